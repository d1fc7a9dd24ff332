"""A latency target that decides: in the status, the pods and the claims; and the small parts that it is decided with."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.operator.builders import NOW, RENDERING, SETTINGS, pool, replica, service

from busbar.kube.contracts.demand import (
    TIME_EDGES_MS,
    Demand,
    ServiceDemand,
    SizeCount,
    Totals,
    WindowDemand,
)
from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile
from busbar.kube.types.service_status import MeasuredReplica, ModelServiceStatus, ScalingCause
from busbar.operator.profiles.serving_speeds import remembered
from busbar.operator.serving.attainment import HOUR_S, RECENT_S, Attainment
from busbar.operator.serving.claims import claims, needed_now
from busbar.operator.serving.demand import DemandReader
from busbar.operator.serving.fleet_input import prices_of, start_seconds
from busbar.operator.serving.fleet_plan import Ahead, Change, Plan
from busbar.operator.serving.history import Counts
from busbar.operator.serving.metrics import Scaled, ScalingMetrics
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.replica_speed import slo_of, speeds
from busbar.operator.serving.replicas import kept_pods, wanted_indexes
from busbar.operator.serving.scaling import desired_replicas
from busbar.operator.serving.sizes import Sizes
from busbar.operator.serving.trust import Trust
from busbar.operator.serving.view import ModelPlace, ServiceUpdate, ServiceView
from busbar.operator.watch.projections import Pod, Sleep

SLO = {"ttftMilliseconds": 2000, "tpotMilliseconds": 100}
PANIC = Change(ScalingCause.PANIC, "6 requests/s came in the last ten seconds.", 6.0, 2.5)
AHEAD = Ahead(6.0, 6.5, 7.25, 90.0, "trend", 0.93)
STEP = {
    "secondsPerStep": 0.02, "secondsPerSequence": 0.001, "secondsPerThousandContextTokens": 0.0005,
    "secondsPerPromptToken": 0.0001, "rmsErrorSeconds": 0.001, "steps": 500,
}  # fmt: skip
POOLS = {
    name: pool(name, accelerator=name.upper(), resourceName="nvidia.com/gpu", pricePerHour=price)
    for name, price in (("l4", 0.7), ("h100", 7.5))
}


def plan(target: dict[str, int] | None, **fields: Any) -> Plan:
    base = Plan(target, "", PANIC, AHEAD, 2.5, {"l4": 2.5, "h100": 9.0}, (0.98, 600), (0.995, 7000))
    return replace(base, **fields)


def wanting(desired: int, *rows: dict[str, Any], **spec: Any) -> ModelService:
    status = {"desiredReplicas": desired, "observedGeneration": 1, "pools": list(rows)}
    return service(status=status, **{"slo": SLO, "maxReplicas": 9, **spec})


def row(name: str, desired: int, replicas: int = 0) -> dict[str, Any]:
    return {"pool": name, "replicas": replicas, "desired": desired, "accelerator": name.upper()}


def on(name: str, index: int, **fields: Any) -> Pod:
    return replica(index, pool=name, **fields)


def seen(of: ModelService, *pods: Pod, **fields: Any) -> ServiceUpdate:
    demand = ServiceDemand(namespace="team", name="web", in_flight=3, last_request_age_seconds=0.0)
    view = ServiceView(of, pods, NOW, SETTINGS, RENDERING, ModelPlace(uri="pvc://claim/model"), POOLS, demand)
    return reconcile(replace(view, **fields))


def test_the_status_names_the_target_the_cause_the_forecast_and_how_the_promise_was_kept() -> None:
    update = seen(wanting(1), on("l4", 0), plan=plan({"l4": 2, "h100": 1}))
    status = update.status
    assert status is not None
    assert status.desired_replicas == 3
    assert [(r.pool, r.desired, r.ready, r.cost_per_hour) for r in status.pools or ()] == [
        ("h100", 1, 0, 7.5), ("l4", 2, 1, 0.7),
    ]  # fmt: skip
    [entry] = status.scaling_history or []
    assert (entry.previous, entry.desired, entry.cause) == (1, 3, "Panic")
    assert (entry.requests_per_second, entry.capacity_per_second) == (6.0, 2.5)
    assert status.slo is not None
    assert (status.slo.scaled_by, status.slo.attainment_recent, status.slo.requests_hour) == (
        "Promise", 0.98, 7000,
    )  # fmt: skip
    assert status.forecast is not None
    assert (status.forecast.now, status.forecast.p90, status.forecast.capacity) == (6.0, 7.25, 2.5)
    assert update.scaled == PANIC


def test_the_status_tells_the_last_day_and_what_starts_and_draws() -> None:
    place = next(i for i, edge in enumerate(TIME_EDGES_MS) if edge >= 400)
    day = Counts(
        requests=2000, within=1980, prompt_tokens=900_000, output_tokens=100_000, first_token={place: 1900},
        per_token={place - 16: 1800}, cost=0.5, joules=2.5e6,
    )  # fmt: skip
    pods = (on("l4", 0), on("l4", 1, ready=False), on("l4", 2, ready=False, sleep=Sleep.WAKING))
    asleep = on("l4", 3, ready=False, sleep=Sleep.ASLEEP)
    status = seen(wanting(3), *pods, asleep, plan=plan({"l4": 3}), day=day, watts={"l4": 123.4}).status
    assert status is not None
    assert status.slo is not None
    assert (status.slo.attainment_day, status.slo.requests_day) == (0.99, 2000)
    assert status.slo.ttft_milliseconds is not None
    assert status.slo.tpot_milliseconds is not None
    assert 300 < status.slo.ttft_milliseconds < 480
    assert status.slo.tpot_milliseconds == pytest.approx(status.slo.ttft_milliseconds / 16, rel=0.01)
    assert (status.cost_per_million_tokens, status.joules_per_token) == (0.5, 2.5)
    [pool] = status.pools or []
    assert (pool.replicas, pool.ready, pool.starting, pool.sleeping, pool.watts) == (4, 1, 2, 1, 123.0)


def test_watts_are_written_with_the_usage_and_stay_between() -> None:
    told = wanting(1, row("l4", 1, 1) | {"watts": 100.0}, replicas=None)
    assert told.status is not None
    for ago_s, watts, shown in (
        (10, {"l4": 300.0}, 100.0),
        (90, {"l4": 300.0}, 300.0),
        (90, {"l4": 104.0}, 100.0),
        (90, {}, None),
    ):
        counted = {"last_usage_time": NOW - timedelta(seconds=ago_s)}
        of = told.model_copy(update={"status": told.status.model_copy(update=counted)})
        status = seen(of, on("l4", 0), plan=plan({"l4": 1}), watts=watts).status
        assert status is not None
        assert [pool.watts for pool in status.pools or ()] == [shown]


def test_without_tokens_prices_or_meters_nothing_is_told_per_token() -> None:
    for day in (None, Counts(requests=5, cost=1.0, joules=7.0)):
        status = seen(wanting(1), on("l4", 0), plan=plan({"l4": 1}), day=day).status
        assert status is not None
        assert (status.cost_per_million_tokens, status.joules_per_token) == (None, None)
    free = seen(wanting(1), on("l4", 0), plan=plan({"l4": 1}), day=Counts(output_tokens=5)).status
    assert free is not None
    assert (free.cost_per_million_tokens, free.joules_per_token) == (None, None)


def test_without_a_target_the_requests_in_flight_decide_and_the_status_says_why() -> None:
    why = "Replicas are counted by requests in flight: no replica has measured its speed on L4 yet."
    update = seen(wanting(2), on("l4", 0), on("l4", 1), plan=Plan(message=why))
    assert update.status is not None
    assert update.status.slo is not None
    assert (update.status.slo.scaled_by, update.status.slo.message) == ("InFlight", why)
    assert update.status.desired_replicas == 2
    assert [r.desired for r in update.status.pools or ()] == [None]


NEAREST = "No type keeps the target at any load; L4 comes nearest."


def test_a_target_out_of_reach_makes_the_service_not_ready_although_it_serves() -> None:
    of = wanting(1)
    update = seen(of, on("l4", 0), plan=plan(None, unreachable=NEAREST))
    status = update.status
    assert status is not None
    assert status.phase == "Ready"
    assert [(c.type, c.status, c.reason, c.message) for c in status.conditions or ()] == [
        ("Ready", "False", "TargetUnreachable", NEAREST),
        ("Running", "True", "Serving", "1 of 1 replicas take requests."),
        ("ExternallyScaled", "False", "NoExternalTarget", "spec.replicas is not set; Busbar decides."),
    ]
    assert update.notices == (("TargetUnreachable", NEAREST),)
    told = of.model_copy(update={"status": status})
    later: dict[str, Any] = {"now": NOW + timedelta(seconds=20)}
    for unknown in (NEAREST + " Again.", None):
        again = seen(told, on("l4", 0), plan=plan(None, unreachable=unknown), **later)
        assert again.notices == ()
        assert again.status is None or again.status.conditions == status.conditions
    back = seen(told, on("l4", 0), plan=plan({"l4": 1}), **later).status
    assert back is not None
    ready = (back.conditions or [])[0]
    assert (ready.status, ready.reason, ready.last_transition_time) == ("True", "Serving", later["now"])


def test_what_was_out_of_reach_is_forgotten_with_a_new_spec_until_it_is_known_again() -> None:
    status = seen(wanting(1), on("l4", 0), plan=plan(None, unreachable=NEAREST)).status
    assert status is not None
    edited = wanting(1).model_copy(update={"status": status})
    edited = edited.model_copy(update={"metadata": edited.metadata.model_copy(update={"generation": 2})})
    after = seen(edited, on("l4", 0), plan=plan(None, unreachable=None)).status
    assert after is not None
    assert [(c.type, c.status) for c in after.conditions or ()][:2] == [
        ("Ready", "True"),
        ("Running", "True"),
    ]


def test_spec_replicas_and_zero_are_decided_without_the_promise() -> None:
    of = wanting(2, replicas=4)
    external = seen(of, on("l4", 0), on("l4", 1), plan=plan({"l4": 2}))
    assert external.status is not None
    assert external.status.desired_replicas == 4
    assert external.status.slo is not None
    assert external.status.slo.scaled_by == "External"
    assert external.scaled is not None
    assert external.scaled.cause is ScalingCause.EXTERNAL
    asleep = wanting(0, minReplicas=0)
    still = ServiceDemand(namespace="team", name="web", last_request_age_seconds=900.0)
    assert (seen(asleep, plan=plan({"l4": 1}), demand=still).status or asleep.status).desired_replicas == 0  # type: ignore[union-attr]
    woken = seen(asleep, plan=plan({"l4": 3}), demand=still.model_copy(update={"waiting": 1}))
    assert woken.status is not None
    assert woken.status.desired_replicas == 1


def scaled(*counts: int, every_s: float = 60.0, **spec: Any) -> ServiceUpdate:
    """A service whose external target had these values, the last one now."""
    history = [
        {
            "time": (NOW - timedelta(seconds=every_s * (len(counts) - 2 - i))).isoformat(),
            "previous": before, "desired": after, "cause": "External",
        }
        for i, (before, after) in enumerate(pairwise(counts))
    ]  # fmt: skip
    status = {"desiredReplicas": counts[-1], "observedGeneration": 1, "scalingHistory": history}
    of = service(status=status, **{"replicas": counts[-1], **spec})
    return seen(of, *(on("l4", i) for i in range(counts[-1])))


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (scaled(2, 5, 2, 5), "ExternalTargetAlternates"),
        (scaled(5, 2, 5, 2, 5), "ExternalTargetAlternates"),
        (scaled(2, 5, 2), "ExternalTarget"),
        (scaled(2, 4, 6, 8), "ExternalTarget"),
        (scaled(2, 5, 2, 5, every_s=200), "ExternalTarget"),
    ],
    ids=["three in three minutes", "four", "one correction", "one way", "slowly"],
)
def test_an_external_target_is_a_condition_that_tells_where_it_goes_up_and_down(
    update: ServiceUpdate, reason: str
) -> None:
    assert update.status is not None
    external = (update.status.conditions or [])[2]
    assert (external.type, external.status, external.reason) == ("ExternallyScaled", "True", reason)
    assert "it decides, and Busbar does not." in external.message
    told = [text for what, text in update.notices if what == "ExternalTargetAlternates"]
    assert [text == external.message for text in told] == [True] * (reason == "ExternalTargetAlternates")


def test_a_target_that_turns_takes_no_replica_away_nor_after_a_restart_of_the_operator() -> None:
    before = scaled(2, 5, 2, 5).status
    assert before is not None
    of = service(replicas=2, status=before.to_wire())
    update = seen(of, *(on("l4", i) for i in range(5)))  # without what the process before remembered
    assert update.scaling is not None
    assert (update.scaling.replicas, update.actions) == (5, ())
    assert "a lower number takes no replica away" in (before.conditions or [])[2].message


def test_at_zero_the_condition_says_that_a_request_wakes_the_service() -> None:
    for least, words in ((0, "a request wakes the service"), (1, "Busbar does not.")):
        status = scaled(2, 0, minReplicas=least).status
        assert status is not None
        assert words in (status.conditions or [])[2].message


def test_the_condition_ends_with_the_field_and_the_doubt_with_time() -> None:
    first = scaled(2, 5, 2, 5).status
    assert first is not None
    of = service(replicas=5, status=first.to_wire())
    pods = [on("l4", i) for i in range(5)]
    calm = seen(of, *pods, now=NOW + timedelta(seconds=301)).status
    assert calm is not None
    assert (calm.conditions or [])[2].reason == "ExternalTarget"
    assert (calm.conditions or [])[2].last_transition_time == NOW
    free = seen(service(maxReplicas=5, status=first.to_wire()), *pods).status
    assert free is not None
    assert ((free.conditions or [])[2].status, free.desired_replicas) == ("False", 5)


def test_without_a_latency_target_control_returns_step_by_step() -> None:
    """Five replicas by spec.replicas, one needed, three the ceiling; then the field is taken away."""
    idle = ServiceDemand(namespace="team", name="web", in_flight=1, last_request_age_seconds=0.0)
    status = ModelServiceStatus(desired_replicas=5, observed_generation=1)
    state, counts = None, []
    for second in range(0, 400, 5):
        given: dict[str, Any] = {"replicas": 5} if second < 100 else {}
        of = service(maxReplicas=3, **given)
        now = NOW + timedelta(seconds=second)
        of = of.model_copy(update={"status": status})
        count, _, state = desired_replicas(of, idle, state, now, has_model=True)
        status = status.model_copy(update={"desired_replicas": count})
        counts.append(count)
    assert counts[:20] == [5] * 20
    assert counts[20:32] == [3] * 12, "the ceiling holds at once, and the rest waits for a minute"
    steps = [before - after for before, after in pairwise(counts[20:])]
    assert (max(steps), min(steps), counts[-1]) == (1, 0, 1)


def test_a_service_without_requests_rests_only_its_time_after_control_returned() -> None:
    nobody = ServiceDemand(namespace="team", name="web", last_request_age_seconds=9000.0)
    held = service(minReplicas=0, maxReplicas=4, replicas=4, status={"desiredReplicas": 4})
    _, _, state = desired_replicas(held, nobody, None, NOW, has_model=True)
    free = service(minReplicas=0, maxReplicas=4, status={"desiredReplicas": 4})
    for seconds, expected in ((1, 4), (200, 3), (302, 0)):
        later = NOW + timedelta(seconds=seconds)
        count, _, state = desired_replicas(free, nobody, state, later, has_model=True)
        assert count == expected, seconds


def test_a_held_target_stays_within_bounds_that_have_changed_meanwhile() -> None:
    for spec, desired in (({"maxReplicas": 2}, 2), ({"minReplicas": 5}, 5)):
        update = seen(wanting(4, **spec), plan=plan({"l4": 4}), demand=None)
        assert update.status is not None
        assert update.status.desired_replicas == desired


def test_numbers_alone_are_written_no_more_often_than_the_last_request() -> None:
    of = wanting(1)
    first = seen(of, on("l4", 0), plan=plan({"l4": 1})).status
    later = of.model_copy(update={"status": first})
    moved = plan({"l4": 1}, ahead=replace(AHEAD, now=7.0), attainment=(0.5, 10))
    assert seen(later, on("l4", 0), plan=moved, now=NOW + timedelta(seconds=1)).status is None
    again = seen(later, on("l4", 0), plan=moved, now=NOW + timedelta(seconds=20)).status
    assert again is not None
    assert again.forecast is not None
    assert again.forecast.now == 7.0


def test_surplus_replicas_leave_the_pool_where_they_are_not_wanted() -> None:
    of = wanting(2, row("l4", 2), row("h100", 0))
    pods = [on("h100", 0), on("l4", 1), on("l4", 2, ready=False)]
    assert [p.rank for p in kept_pods(of, pods)] == [1, 2]
    plain = wanting(2)
    assert [p.rank for p in kept_pods(plain, pods)] == [0, 1]


def test_replicas_that_compute_prompts_for_the_others_stay() -> None:
    """Also one that does not serve yet: without it there is nobody who computes prompts."""
    pods = [on("l4", 0, ready=False), on("l4", 256), on("l4", 257)]
    of = wanting(2, replicas=3, prefillReplicas=1)
    assert [p.rank for p in kept_pods(of, pods)] == [0, 256]
    assert [p.rank for p in kept_pods(wanting(2), pods)] == [256, 257]


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        ((), [0, 1, 256, 257]),
        ((0, 256, 257), [0, 1, 256, 257]),
        ((0, 1, 256), [0, 1, 256, 257]),
        ((0, 1, 257, 258), [0, 1, 257, 258]),
    ],
)
def test_what_is_missing_gets_a_number_of_its_role(there: tuple[int, ...], wanted: list[int]) -> None:
    of = wanting(4, replicas=4, prefillReplicas=2)
    assert wanted_indexes(of, [on("l4", number) for number in there]) == wanted


def test_who_takes_the_place_of_one_that_leaves_computes_prompts_too() -> None:
    of = wanting(3, replicas=3, prefillReplicas=1)
    leaving = replace(on("l4", 0), draining_since=NOW)
    pods = [leaving, on("l4", 256), on("l4", 257)]
    assert wanted_indexes(of, pods) == [1, 256, 257]
    assert wanted_indexes(of, [on("l4", 1), *pods[1:]]) == [1, 256, 257], "and stays when that is gone"
    assert wanted_indexes(wanting(0, replicas=0, prefillReplicas=1), []) == []


def test_missing_replicas_claim_the_type_that_was_chosen_for_them() -> None:
    of = wanting(4, row("h100", 1), row("l4", 3, 1))
    found = claims(of, (on("l4", 0),), (), "research", NOW)
    assert [(c.job.name, c.job.accelerators) for c in found] == [
        ("web-1", ("H100",)), ("web-2", ("L4",)), ("web-3", ("L4",)),
    ]  # fmt: skip
    plain = claims(wanting(2, accelerators=["L4", "T4"]), (), (), "research", NOW)
    assert [c.job.accelerators for c in plain] == [("L4", "T4")] * 2


@pytest.mark.parametrize(
    ("desired", "there", "now_rps", "cause", "needed"),
    [
        (4, 2, 1.0, "Forecast", [False, False]),
        (4, 2, 5.0, "Forecast", [True, False]),
        (4, 2, 9.0, "Forecast", [True, True]),
        (4, 2, 1.0, "Panic", [True, True]),
        (4, 2, 1.0, "InFlight", [True, True]),
        (2, 0, 0.0, "Bounds", [True, False]),
        (2, 0, 3.0, "External", [True, True]),
        (3, 2, None, "External", [False]),
    ],
)
def test_a_replica_that_requests_wait_for_is_told_from_one_for_load_that_is_foreseen(
    desired: int, there: int, now_rps: float | None, cause: str, needed: list[bool]
) -> None:
    status = {
        "desiredReplicas": desired,
        "pools": [row("l4", desired, there) | {"requestsPerSecond": 2.0}],
        "scalingHistory": [{"time": NOW, "previous": there, "desired": desired, "cause": cause}],
    }
    if now_rps is not None:
        status["forecast"] = {"now": now_rps, "atReady": 9.0, "p90": 9.0, "readyInSeconds": 60}
    of = service(status=status, slo=SLO, maxReplicas=9)
    pods = (
        *(on("l4", index) for index in range(there)),
        on("l4", 7, sleep=Sleep.ASLEEP),
        on("l4", 8, draining_since=NOW),
    )
    found = [claim.job for claim in claims(of, pods[:there], (), "research", NOW) if claim.job.run is None]
    assert [one.needed_now for one in found] == needed
    assert of.status is not None
    places = (of.status.pools or []) * (desired - there)
    assert needed_now(of, pods, places) == sum(needed), "what sleeps or leaves carries nothing"


def test_a_start_is_measured_from_creation_to_ready_and_remembered() -> None:
    of = wanting(1, row("h100", 0) | {"startSeconds": 80})
    pods = [
        on("l4", 0, ready_since=NOW + timedelta(seconds=30)),
        on("l4", 1, ready_since=NOW + timedelta(seconds=50)),
        on("l4", 2, ready_since=NOW + timedelta(seconds=5), restarts=1),
        on("t4", 3, ready=False),
    ]
    assert start_seconds(of, pods) == {"h100": 80, "l4": 30}


def test_replicas_cost_the_pools_prices_or_the_types_rates_where_one_pool_has_none() -> None:
    of = wanting(1, shape={"acceleratorsPerPod": 2})
    assert prices_of(of, POOLS.values()) == {"l4": 1.4, "h100": 15.0}
    unpriced: list[AcceleratorPool] = [
        POOLS["l4"],
        pool("x", accelerator="H100", resourceName="nvidia.com/gpu"),
    ]
    found = prices_of(of, unpriced)
    assert 0 < found["l4"] < found["x"]


def test_the_shared_profile_speaks_for_types_that_the_service_has_not_measured() -> None:
    cell = {"accelerator": "H100", "accelerators": 1, "tokensPerSecond": 9, "source": "Measured"}
    profile = PerformanceProfile.model_validate(
        {
            "metadata": {"name": "x"}, "kind": "PerformanceProfile", "spec": {"workloadClass": "serve-x"},
            "status": {"cells": [cell | {"stepModel": STEP, "kvTokens": 90_000}]},
        }
    )  # fmt: skip
    line = {
        "workloadClass": "serve-x",
        "accelerator": "L4",
        "accelerators": 1,
        "stepModel": STEP,
        "kvTokens": 5000,
    }
    status = {"measured": [line]}
    slo = slo_of(service(slo=SLO).spec.slo)
    assert slo is not None
    assert slo.percentile == 99
    known = speeds(service(status=status, slo=SLO), POOLS.values(), [profile], slo)
    assert {name: model.kv_tokens for name, model in known.models.items()} == {"l4": 5000, "h100": 90_000}
    own_image = speeds(service(status=status, slo=SLO, image="mine"), POOLS.values(), [profile], slo)
    assert list(own_image.models) == ["l4"]
    assert own_image.refused == {"h100": "no replica has measured its speed on H100 yet"}


@pytest.mark.parametrize("mode", ["resident", "int8", "stream"])
def test_the_speed_counts_in_whatever_engine_mode_the_replicas_run(mode: str) -> None:
    def line(mode: str, step_s: float) -> dict[str, Any]:
        at = {"workloadClass": "serve-x", "accelerator": "L4", "accelerators": 1, "kvTokens": 5000}
        return at | {"mode": mode, "stepModel": STEP | {"secondsPerStep": step_s}}

    def known(*lines: dict[str, Any], cells: tuple[dict[str, Any], ...] = ()) -> dict[str, float]:
        rows = [cell | {"accelerator": "H100", "source": "Measured", "tokensPerSecond": 9} for cell in cells]
        for row in rows:
            del row["workloadClass"]
        profile = PerformanceProfile.model_validate(
            {
                "metadata": {"name": "x"}, "kind": "PerformanceProfile", "spec": {"workloadClass": "serve-x"},
                "status": {"cells": rows},
            }
        )  # fmt: skip
        of = service(status={"measured": list(lines)}, slo=SLO)
        slo = slo_of(of.spec.slo)
        assert slo is not None
        found = speeds(of, POOLS.values(), [profile], slo).models
        return {name: model.a_s for name, model in found.items()}

    assert known(line(mode, 0.02)) == {"l4": 0.02}
    assert known(line("resident", 0.02), line(mode, 0.03))["l4"] == 0.03
    assert known(line(mode, 0.02), cells=(line(mode, 0.01),)) == {"l4": 0.02, "h100": 0.01}
    other = line("resident", 0.01), line("stream", 0.09)
    assert known(line(mode, 0.02), cells=other)["h100"] == 0.01


def test_attainment_covers_five_minutes_and_an_hour_and_a_restarted_gateway_starts_from_zero() -> None:
    kept = Attainment()
    kept.take(Totals(answered=1000, within=0), 0)
    assert kept.over(RECENT_S, 0) == (None, 0), "what was counted before says nothing of now"
    kept.take(Totals(answered=1100, within=90, refused=0), 10)
    assert kept.over(RECENT_S, 10) == (0.9, 100)
    kept.take(Totals(answered=50, within=50, refused=50), 1000)
    assert kept.over(RECENT_S, 1000) == (0.5, 100)
    assert kept.over(HOUR_S, 1000) == (0.7, 200)
    kept.take(Totals(answered=50, within=50, refused=50), 5000)
    assert kept.over(HOUR_S, 5000) == (None, 0)


def test_sizes_are_means_by_prompt_class_that_forget_slowly_and_leave_rare_classes_out() -> None:
    sizes = Sizes()
    assert not sizes.known
    many = SizeCount(prompt=1, output=0, count=10_000, prompt_tokens=2_000_000, output_tokens=1_000_000)
    rare = SizeCount(prompt=8, output=0, count=1, prompt_tokens=60_000, output_tokens=10)
    sizes.learn([many, rare], 0.0)
    assert sizes.shares[1] == 1.0
    assert (sizes.means[1].prompt_tokens, sizes.means[1].output_tokens) == (200, 100)
    later = SizeCount(prompt=1, output=0, count=10_000, prompt_tokens=1_000_000, output_tokens=1_000_000)
    sizes.learn([later], 6000.0)
    assert sizes.means[1].prompt_tokens == pytest.approx(100, rel=0.01)


def test_each_answer_of_the_gateway_is_numbered_and_a_wait_is_looked_at_each_time() -> None:
    queued: list[Key] = []
    reader = DemandReader(SETTINGS, queued.append)
    waits = ServiceDemand(namespace="team", name="web", overdue=1)
    for number in (1, 2):
        reader.take(Demand(services=[waits], as_of=NOW, counted_seconds=5.0))
        assert (reader.reading, len(queued), reader.counted_s) == (number, number, 5.0)
    calm = waits.model_copy(update={"overdue": 0})
    reader.take(Demand(services=[calm], as_of=NOW))
    assert len(queued) == 2


def test_metrics_show_demand_capacity_and_attainment_and_forget_a_service_that_is_gone() -> None:
    registry = CollectorRegistry()
    metrics, key = ScalingMetrics(registry), Key("team", "web")
    metrics.show(key, plan({"l4": 1}), Scaled(PANIC, 0, 1), day=Counts(requests=8, within=6))
    text = generate_latest(registry).decode()
    for line in (
        'busbar_service_demand_rps{kind="p90",namespace="team",service="web"} 7.25',
        'busbar_service_capacity_rps{namespace="team",service="web"} 2.5',
        'busbar_service_slo_ratio{namespace="team",over="5m",service="web"} 0.98',
        'busbar_service_slo_ratio{namespace="team",over="24h",service="web"} 0.75',
        'busbar_service_scale_decisions_total{cause="Panic"} 1.0',
    ):
        assert line in text
    metrics.show(key, plan(None, ahead=None, capacity_rps=None, attainment=(None, 0)), None)
    text = generate_latest(registry).decode()
    assert [f'over="{over}"' in text for over in ("5m", "1h", "24h")] == [False, True, False]
    metrics.forget(key)
    metrics.forget(key)
    assert 'service="web"' not in generate_latest(registry).decode()


def test_the_reaction_is_told_from_the_first_reading_with_too_much_until_the_decision_and_until_it_is_ready() -> (
    None
):
    registry, key = CollectorRegistry(), Key("team", "web")
    metrics = ScalingMetrics(registry)

    def told(step: str) -> tuple[float | None, float | None]:
        name, labels = "busbar_service_reaction_seconds", {"step": step}
        return registry.get_sample_value(f"{name}_count", labels), registry.get_sample_value(
            f"{name}_sum", labels
        )

    over, calm = plan({"l4": 3}, over_since_s=100.0), plan({"l4": 3})
    ready, starting = [on("l4", 0), on("l4", 1)], [on("l4", 2, ready=False)]
    metrics.show(key, over, None, ready, 100.5)
    assert told("decision") == (0, 0), "nothing is decided yet"
    metrics.show(key, over, Scaled(PANIC, 2, 3), ready, 101.5)
    assert (told("decision"), told("ready")) == ((1, 1.5), (0, 0))
    metrics.show(key, calm, None, [*ready, *starting], 110.0)
    assert told("ready") == (0, 0)
    metrics.show(key, calm, None, [*ready, on("l4", 2)], 160.0)
    metrics.show(key, calm, None, [*ready, on("l4", 2)], 161.0)
    assert told("ready") == (1, 60.0)
    metrics.show(key, calm, Scaled(PANIC, 3, 4), ready, 200.0)  # foreseen: the load has not come yet
    metrics.show(key, over, Scaled(PANIC, 4, 5), ready, 300.0)
    metrics.show(key, calm, Scaled(PANIC, 5, 2), ready, 301.0)  # taken back before it was ready
    assert (told("decision"), told("ready")) == ((2, 201.5), (1, 60.0))


def test_what_was_measured_on_a_type_outlives_the_replicas_there_but_not_the_model() -> None:
    def line(kind: str, name: str = "serve-x", mode: str = "resident") -> MeasuredReplica:
        body = {
            "workloadClass": name,
            "accelerator": kind,
            "accelerators": 1,
            "stepModel": STEP,
            "mode": mode,
        }
        return MeasuredReplica.model_validate(body)

    old = [line("H100"), line("L4")]
    assert remembered(old, []) == old
    assert [m.accelerator for m in remembered(old, [line("L4")])] == ["H100", "L4"]
    assert remembered(old, [line("L4", "serve-y")]) == [line("L4", "serve-y")]
    streamed = line("L4", mode="stream")
    assert remembered(old, [streamed]) == [line("H100"), streamed]
    assert remembered(old, [line("L4"), streamed]) == [*old, streamed]
    few, enough = (
        streamed.model_copy(
            update={
                "step_model": streamed.step_model.model_copy(update={"steps": steps, "seconds_per_step": 9})
            }
        )
        for steps in (63, 64)
    )
    assert remembered([streamed], [few]) == [streamed]
    assert remembered([streamed], [enough]) == [enough]
    assert remembered([few], [few]) == remembered([line("L4")], [few]) == [few]
    status = {"desiredReplicas": 1, "observedGeneration": 1, "measured": [m.to_wire() for m in old]}
    off = seen(service(status=status, suspend=True)).status
    assert off is not None
    assert off.measured is None


def minute(rate: float, kept: float) -> WindowDemand:
    count = round(60 * rate)
    return WindowDemand(seconds=60, arrivals=count, answered=count, within=round(kept * count))


def test_late_answers_below_the_capacity_lower_the_trust_in_it_and_kept_ones_near_it_raise_it() -> None:
    def after(rate: float, kept: float, minutes: int, trust: Trust, settled: bool = True) -> float:
        for second in range(60 * minutes + 1):
            trust.take(minute(rate, kept), 99.0, 10.0, settled, second)
        return trust.factor

    assert after(8.0, 0.95, 1, Trust()) == 0.9
    assert after(8.0, 0.95, 30, Trust()) == 0.5, "never less"
    assert after(12.0, 0.5, 30, Trust()) == 1.0, "too many requests are not the speed's fault"
    assert after(8.0, 0.5, 30, Trust(), settled=False) == 1.0, "replicas that start are not, either"
    assert after(0.2, 0.5, 30, Trust()) == 1.0, "too few answers say nothing"
    assert after(8.0, 1.0, 2, Trust(0.9)) == pytest.approx(0.9 * 1.02**2)
    assert after(2.0, 1.0, 30, Trust(0.9)) == 0.9, "an easy load does not speak for it"
