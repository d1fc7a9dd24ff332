"""Replicas that sleep instead of leaving, without a server: a table of single steps, and whole ways from step to step."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.builders import NOW, RENDERING, SETTINGS, replica, service

from busbar.kube.client import KubeClient
from busbar.kube.contracts.workload import RestartReport, ServingStatus
from busbar.kube.informer import Key
from busbar.kube.login import Login
from busbar.kube.types import ModelService, engines
from busbar.operator.accounting.budgets import Hold
from busbar.operator.decisions import Release
from busbar.operator.serving.claims import claims
from busbar.operator.serving.fleet_input import Seen, alive, ready, start_seconds
from busbar.operator.serving.fleet_plan import Ahead, Plan
from busbar.operator.serving.metrics import ScalingMetrics
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.replicas import wanted_indexes
from busbar.operator.serving.routes import build_routes
from busbar.operator.serving.view import ModelPlace, ServiceView
from busbar.operator.serving.warm_worth import WarmWorth
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.projections import ANNOTATION_DRAINING, ANNOTATION_SLEEP, Pod, Sleep, project_pod
from busbar.operator.write.actions import Action, Create, Delete, Patch, PostToPod
from busbar.scheduler.autoscale.warmth import BIN_S, SleepTerms, WantedHistory, Warmth

AWAKE = ServingStatus(ready=True)
BUSY = ServingStatus(ready=True, running=2)
QUEUED = ServingStatus(ready=True, waiting=1)
SLEEPS = ServingStatus(ready=False, sleep_level=1)
LOADS = ServingStatus(ready=False)
CRASHED = ServingStatus(ready=True, restarted=RestartReport(count=1, cause="killed", at=NOW))
PLACE = (
    '{"pool": "cpu", "accelerator": "cpu", "mode": "resident", "node": "node-0", "perPod": {"cpu_m": 1000}}'
)


def warm(replicas: int = 2, desired: int = 0, level: str = "sleeping", **spec: Any) -> ModelService:
    status = {"desiredReplicas": desired, "observedGeneration": 1}
    scaling = {"warm": {"replicas": replicas, "level": level}}
    body = {"minReplicas": 0, "maxReplicas": 4, "replicas": desired, "scaling": scaling, **spec}
    return service(status=status, **body)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def at(state: Sleep, seconds: float = 10.0, index: int = 0, **fields: Any) -> Pod:
    """A replica that has been in this state for so long."""
    return replica(index, sleep=state, sleep_since=ago(seconds), **fields)


def view(
    of: ModelService, *pods: Pod, readings: dict[int, ServingStatus] | None = None, **fields: Any
) -> ServiceView:
    base = ServiceView(of, pods, NOW, SETTINGS, RENDERING, ModelPlace(uri="pvc://claim/model"))
    by_uid = {pod.uid: readings[pod.rank] for pod in pods if readings is not None and pod.rank in readings}
    return replace(base, readings=by_uid, **fields)


def said(action: Action) -> str:
    """An action in a word."""
    match action:
        case Patch(patch=patch):
            notes: dict[str, str | None] = patch["metadata"]["annotations"]
            if ANNOTATION_DRAINING in notes:
                return "drains"
            return (notes[ANNOTATION_SLEEP] or "serves").split()[0]
        case PostToPod(path=path):
            return path
        case Delete():
            return "deleted"
    return type(action).__name__


def did(of: ModelService, *pods: Pod, **fields: Any) -> list[str]:
    return [said(action) for action in reconcile(view(of, *pods, **fields)).actions]


SETTLING, ASLEEP, WAKING, WOKEN = Sleep.SETTLING, Sleep.ASLEEP, Sleep.WAKING, Sleep.AWAKE
LOADED = {"level": "loaded"}
VLLM = {"level": "loaded", "engine": "vllm", "image": "registry/vllm:1"}


@pytest.mark.parametrize(
    ("pod", "reading", "spec", "expected"),
    [
        # Not wanted: it goes to sleep.
        (replica(0), AWAKE, {}, ["Settling"]),
        (replica(0), BUSY, {}, ["Settling"]),
        (at(WOKEN), AWAKE, {}, ["Settling"]),
        (at(SETTLING, 1.0), AWAKE, {}, []),
        (at(SETTLING), BUSY, {}, []),
        (at(SETTLING), QUEUED, {}, []),
        (at(SETTLING), LOADS, {}, []),
        (at(SETTLING), None, {}, []),
        (at(SETTLING), AWAKE, {}, ["/sleep"]),
        (at(SETTLING), SLEEPS, {}, ["Asleep"]),
        (at(ASLEEP), SLEEPS, {}, []),
        (at(ASLEEP), None, {}, []),
        (at(ASLEEP), LOADS, {}, []),
        (at(ASLEEP), AWAKE, {}, ["Settling"]),
        (at(WAKING), SLEEPS, {}, ["Settling"]),
        # It keeps its weights loaded.
        (replica(0), AWAKE, LOADED, ["Settling"]),
        (at(SETTLING, 1.0), AWAKE, LOADED, []),
        (at(SETTLING), BUSY, LOADED, []),
        (at(SETTLING), AWAKE, LOADED, ["Asleep"]),
        (at(ASLEEP), AWAKE, LOADED, []),
        (at(ASLEEP), SLEEPS, LOADED, ["/wake_up"]),
        (at(SETTLING, 10.0), None, VLLM, []),
        (at(SETTLING, 31.0), None, VLLM, ["Asleep"]),
        (at(SETTLING, 5.0, engine=engines.VLLM), AWAKE, VLLM, []),  # it may not have been read since
        (at(SETTLING, 6.0, engine=engines.VLLM), AWAKE, VLLM, ["Asleep"]),
        (at(SETTLING, 31.0, engine=engines.VLLM), BUSY, VLLM, []),
        # It cannot sleep: it leaves, as without `warm`.
        (replica(0, phase="Pending", ready=False, gates=("busbar.dev/admission",)), None, {}, ["deleted"]),
        (replica(0, phase="Pending", ready=False), None, {}, ["deleted"]),
        (replica(0, ready=False), LOADS, {}, ["drains"]),
        (replica(0, restarts=1), AWAKE, {}, ["drains"]),
        (replica(0), CRASHED, {}, ["drains"]),
        (at(ASLEEP, restarts=1), LOADS, {}, ["drains"]),
        (at(SETTLING, restarts=1), AWAKE, {}, ["drains"]),
        (at(WAKING, restarts=1), LOADS, {"desired": 1}, []),
        (at(SETTLING, 91.0), BUSY, {}, ["drains"]),
        (at(SETTLING, 89.0), BUSY, {}, []),
        (replica(0, draining_since=ago(1)), AWAKE, {}, ["/drain"]),
        # Wanted: it wakes, or never slept.
        (replica(0), AWAKE, {"desired": 1}, []),
        (at(WOKEN), AWAKE, {"desired": 1}, []),
        (at(SETTLING), BUSY, {"desired": 1}, ["serves"]),
        (at(SETTLING), AWAKE, {"desired": 1}, ["serves"]),
        (at(SETTLING), SLEEPS, {"desired": 1}, ["Waking", "/wake_up"]),
        (at(SETTLING), None, {"desired": 1}, ["Waking", "/wake_up"]),
        (at(ASLEEP, 9000.0), SLEEPS, {"desired": 1}, ["Waking", "/wake_up"]),
        (at(ASLEEP, 9000.0), None, {"desired": 1}, ["Waking", "/wake_up"]),
        (at(ASLEEP, 9000.0), LOADS, {"desired": 1}, ["Waking", "/wake_up"]),
        (at(ASLEEP, 9000.0), AWAKE, {"desired": 1}, ["serves"]),
        (at(ASLEEP, 9000.0), AWAKE, {"desired": 1, **LOADED}, ["serves"]),
        (at(ASLEEP, 9000.0), None, {"desired": 1, **VLLM}, ["serves"]),
        (at(WAKING, 1.0), SLEEPS, {"desired": 1}, ["/wake_up"]),
        (at(WAKING, 1.0), None, {"desired": 1}, ["/wake_up"]),
        (at(WAKING, 1.0), AWAKE, {"desired": 1}, ["Awake"]),
        (at(WAKING, 59.0), SLEEPS, {"desired": 1}, ["/wake_up"]),
        (at(WAKING, 60.0), SLEEPS, {"desired": 1}, ["deleted"]),
        (at(WAKING, 60.0), None, {"desired": 1}, ["deleted"]),
        (at(WAKING, 600.0), LOADS, {"desired": 1}, []),
        (at(WAKING, 600.0), AWAKE, {"desired": 1}, ["Awake"]),
        (replica(0), SLEEPS, {"desired": 1}, ["Waking", "/wake_up"]),
        (at(WOKEN), SLEEPS, {"desired": 1}, ["Waking", "/wake_up"]),
        # `warm` was removed, or the service is off.
        (at(ASLEEP), SLEEPS, {"scaling": {}}, ["deleted"]),
        (at(ASLEEP), SLEEPS, {"suspend": True}, ["deleted"]),
        (at(ASLEEP), SLEEPS, {"suspend": True, "desired": 1}, ["Waking", "/wake_up"]),
        (at(ASLEEP), AWAKE, {"suspend": True, **LOADED}, ["drains"]),
        (at(SETTLING), BUSY, {"suspend": True}, ["drains"]),
        (replica(0), BUSY, {"suspend": True}, ["drains"]),
    ],
)  # fmt: skip
def test_one_step(pod: Pod, reading: ServingStatus | None, spec: dict[str, Any], expected: list[str]) -> None:
    readings = {} if reading is None else {0: reading}
    assert did(warm(**spec), pod, readings=readings) == expected


def test_nothing_is_done_to_a_replica_that_answers_a_command() -> None:
    for desired, pod in ((0, at(SETTLING)), (1, at(SETTLING)), (1, at(WAKING)), (0, at(WAKING))):
        for reading in (AWAKE, SLEEPS):
            assert did(warm(desired=desired), pod, readings={0: reading}, changing=frozenset({pod.uid})) == []


def test_at_most_as_many_sleep_as_are_allowed_and_the_others_leave() -> None:
    pods = [replica(i) for i in range(4)]
    awake = dict.fromkeys(range(4), AWAKE)
    assert did(warm(2), *pods, readings=awake) == ["drains", "drains", "Settling", "Settling"]
    assert did(warm(2, desired=1), *pods, readings=awake) == ["drains", "Settling", "Settling"]
    assert did(warm(1, desired=3, maxReplicas=3), *pods, readings=awake) == ["drains"]


def test_those_that_sleep_go_on_before_another_one_is_put_to_sleep() -> None:
    pods = [replica(0), at(ASLEEP, index=1), at(SETTLING, index=2), replica(3)]
    readings = {0: AWAKE, 1: SLEEPS, 2: SLEEPS, 3: AWAKE}
    assert did(warm(2, desired=1), *pods, readings=readings) == ["drains", "Asleep"]


def test_a_sleeping_replica_wakes_before_another_one_is_asked_for() -> None:
    serving, sleeping = replica(0), at(ASLEEP, index=1, ready=False)
    assert wanted_indexes(warm(desired=2), [serving, sleeping]) == [0, 1]
    assert wanted_indexes(warm(desired=3), [serving, sleeping]) == [0, 1, 2]
    starting = replica(2, ready=False)
    assert wanted_indexes(warm(desired=2), [serving, sleeping, starting]) == [0, 2], (
        "what starts is not given up"
    )


def test_no_replica_that_serves_is_given_up_for_one_that_sleeps_where_it_is_wanted() -> None:
    rows = [{"pool": "l4", "replicas": 1, "desired": 2}, {"pool": "h100", "replicas": 2, "desired": 0}]
    serving, other = replica(0, pool="h100"), at(ASLEEP, index=1, pool="h100", ready=False)
    sleeping = at(ASLEEP, index=2, pool="l4", ready=False)
    for desired, kept in ((1, [0]), (2, [0, 2]), (3, [0, 1, 2])):
        of = service(status={"desiredReplicas": desired, "pools": rows}, maxReplicas=4)
        assert wanted_indexes(of, [serving, other, sleeping]) == kept


def test_sleeping_replicas_are_no_part_of_the_fleet_that_the_latency_target_decides_over() -> None:
    states: list[Sleep | None] = [None, SETTLING, ASLEEP, WAKING, WOKEN]
    pods = [replica(i, sleep=s, sleep_since=NOW, ready=s is not WAKING) for i, s in enumerate(states)]
    seen = Seen(warm(), tuple(pods), (), (), None, 0, 0.0, 0.0)
    assert (alive(seen), ready(seen)) == ({"cpu": 3}, {"cpu": 2})


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (replica(0), (True, False)),
        (at(SETTLING), (False, True)),
        (at(ASLEEP), (False, True)),
        (at(WAKING), (False, False)),
        (at(WOKEN), (True, False)),
        (at(WOKEN, ready=False), (False, False)),
        (at(WOKEN, draining_since=NOW), (False, True)),
    ],
)
def test_the_gateway_sends_nothing_to_a_replica_that_sleeps_or_is_about_to(
    pod: Pod, expected: tuple[bool, bool]
) -> None:
    caches = Caches(KubeClient(Login(server="http://127.0.0.1:1")), lambda *_: None, inactivity_s=60.0)
    caches.services.items[Key("team", "web")] = warm()
    pod = replace(pod, ip="10.0.0.5")
    caches.pods.items[pod.key] = pod
    caches._pod_changed(pod.key, None, pod)
    made = build_routes(caches, [RENDERING.workload_key], 1, ("10.0.0.0/8",))
    [endpoint] = made.services[0].endpoints
    assert (endpoint.ready, endpoint.draining) == expected
    assert made.services[0].ready_replicas == expected[0]


def test_the_first_request_from_zero_wakes_one_of_those_that_sleep() -> None:
    pods = [at(ASLEEP, index=i, ready=False) for i in (1, 0)]
    assert did(warm(desired=1), *pods, readings=dict.fromkeys(range(2), SLEEPS)) == ["Waking", "/wake_up"]


def test_only_what_surely_sleeps_yields_its_place() -> None:
    states: list[Sleep | None] = [None, SETTLING, ASLEEP, WAKING, WOKEN]
    pods = tuple(replica(i, placement=PLACE, sleep=state, sleep_since=NOW) for i, state in enumerate(states))
    made = claims(warm(), pods, (), "team", NOW)
    assert [claim.job.yields for claim in made] == [state is ASLEEP for state in states]
    assert all(claim.job.run is not None and not claim.job.preemptible for claim in made)


def test_a_place_that_the_plan_takes_is_free_at_once() -> None:
    order = (Release("Preempted", "makes room", "7", index=0, taken=True),)
    assert [said(a) for a in reconcile(view(warm(), at(ASLEEP), readings={0: SLEEPS}), order).actions] == [
        "deleted"
    ]
    loaded = view(warm(level="loaded"), at(ASLEEP), readings={0: AWAKE})
    [marked] = reconcile(loaded, order).actions
    assert isinstance(marked, Patch)
    assert marked.patch["metadata"]["annotations"] == {ANNOTATION_DRAINING: ago(10).isoformat()}


def test_a_replica_that_was_woken_meanwhile_keeps_its_place() -> None:
    order = (Release("Preempted", "makes room", "7", index=0, taken=True),)
    for state, reading in ((WAKING, LOADS), (WOKEN, AWAKE)):
        assert reconcile(view(warm(desired=1), at(state), readings={0: reading}), order).actions == ()


def test_a_place_that_is_taken_for_watts_is_not_slept_in() -> None:
    order = (Release("InsufficientPower", "lacks watts", "7", index=0),)
    assert [said(a) for a in reconcile(view(warm(), replica(0), readings={0: AWAKE}), order).actions] == [
        "drains"
    ]


def worth(*counts: int, start_s: float = 60.0, missed: float = 0.1) -> Warmth:
    """What decides after so many were wanted, bin by bin."""
    history = WantedHistory()
    for bin_, count in enumerate(counts):
        history.observe(bin_ * BIN_S, count)
    return Warmth(history, 2, SleepTerms(start_s, 5.0, missed))


SOON, NEVER = worth(*[1, 1, 0, 0] * 30), worth(*[1] * 60, *[0] * 200)


def test_a_surplus_replica_sleeps_only_if_it_is_likely_to_be_wanted_again_soon_enough() -> None:
    pod = {"readings": {0: AWAKE}}
    assert did(warm(), replica(0), warmth=SOON, **pod) == ["Settling"]
    assert did(warm(), replica(0), warmth=NEVER, **pod) == ["drains"]
    assert did(warm(), replica(0), warmth=worth(*[1] * 60, *[0] * 200, start_s=60_000), **pod) == ["drains"]
    assert did(warm(), replica(0), warmth=worth(*[1, *[0] * 12] * 20, missed=1.0), **pod) == ["Settling"]


def test_a_replica_that_sleeps_leaves_once_that_is_not_worth_its_price_and_an_event_says_why() -> None:
    asleep = view(warm(), at(ASLEEP), readings={0: SLEEPS}, warmth=NEVER)
    update = reconcile(asleep)
    assert [said(action) for action in update.actions] == ["deleted"]
    [(reason, text)] = update.notices
    assert reason == "SleepEnded"
    assert "Replica web-0 leaves. One more replica was wanted within" in text
    assert "no surplus replica may sleep" in text
    assert not reconcile(replace(asleep, warmth=SOON)).actions
    taken = (Release("Preempted", "gives its place", "7", index=0),)
    assert reconcile(asleep, taken).notices == (), "somebody took its place: that is another reason"
    spent = replace(asleep, budget=Hold(why="The budget is spent."))
    assert reconcile(spent).notices == ()


def test_the_history_and_the_event_say_why_a_replica_sleeps() -> None:
    told = reconcile(view(warm(), at(SETTLING), readings={0: SLEEPS}, warmth=SOON)).notices[0][1]
    assert "any job that waits may take its place. One more replica was wanted within 60 s" in told
    status = reconcile(
        view(fewer(2, 1), replica(0), replica(1), readings={0: AWAKE, 1: AWAKE}, warmth=SOON)
    ).status
    assert status is not None
    assert status.scaling_history is not None
    assert "surplus replica" in status.scaling_history[-1].reason


def fewer(before: int, after: int) -> ModelService:
    """A service whose number somebody has just lowered."""
    made = warm(desired=before)
    return made.model_copy(update={"spec": made.spec.model_copy(update={"replicas": after})})


def test_wakes_are_measured_and_the_terms_follow_the_service() -> None:
    known, of = WarmWorth(), warm(replicas=3)
    assert known.wake_s(of, ()) == 5.0
    assert known.wake_s(warm(level="loaded"), ()) == 1.0
    assert known.wake_s(service(), ()) is None
    assert known.of(service(), (), None, 0.0) is None
    quick = replica(0, created_at=ago(9), ready_since=ago(7))
    assert known.wake_s(of, [quick]) == pytest.approx(0.2), (
        "a wake is no longer than a start before one was seen"
    )
    at_once = replica(0, created_at=ago(9), ready_since=ago(9))
    assert known.wake_s(of, [at_once]) == pytest.approx(0.1)
    first = known.of(of, [at(WAKING, 9)], None, 1000.0)
    assert first is not None
    assert (first.most, first.terms.start_s, first.terms.wake_s, first.terms.missed) == (3, 60.0, 5.0, 1.0)
    after = known.of(of, [at(WOKEN, 7)], None, 1001.0)
    assert after is not None
    assert after.terms.wake_s == 2.0
    assert known.wake_s(of, ()) == 2.0
    foreseen = Plan({"l4": 2}, ahead=Ahead(1.0, 2.0, 3.0, 90.0, "level", 0.8))
    with_target = known.of(warm(desired=2), [], foreseen, 1002.0)
    assert with_target is not None
    assert with_target.terms.missed == 0.2
    in_time = replace(foreseen, ahead=Ahead(1.0, 2.0, 3.0, 90.0, "level", 0.8, late=0.05))
    with_additions = known.of(warm(desired=2), [], in_time, 1002.5)
    assert with_additions is not None
    assert with_additions.terms.missed == 0.05, (
        "what is above the forecast is not late where replicas are there"
    )
    at_zero = known.of(warm(desired=0), [], foreseen, 1003.0)
    assert at_zero is not None
    assert at_zero.terms.missed == 1.0, "a request at zero waits for the start"
    known.keep(())
    assert known.wake_s(of, ()) == 5.0


def test_nothing_sleeps_on_a_spent_budget() -> None:
    spent = Hold(why="The budget is spent.")
    assert did(warm(), at(ASLEEP), readings={0: SLEEPS}, budget=spent) == ["deleted"]
    assert did(warm(), replica(0), readings={0: AWAKE}, budget=spent) == ["drains"]


def test_a_wake_that_takes_too_long_is_told_and_another_replica_is_planned() -> None:
    update = reconcile(view(warm(desired=1), at(WAKING, 61), readings={0: SLEEPS}))
    [(reason, text)] = update.notices
    assert (reason, "web-0 did not wake in 61 s" in text) == ("WakeFailed", True)
    gone = at(WAKING, 61, deleting=True)
    assert wanted_indexes(warm(desired=1), [gone]) == [1]


def test_sleep_and_wake_are_events() -> None:
    assert reconcile(view(warm(), at(SETTLING), readings={0: SLEEPS})).notices[0][0] == "ReplicaAsleep"
    [(reason, text)] = reconcile(view(warm(desired=1), at(WAKING, 2.5), readings={0: AWAKE})).notices
    assert (reason, text) == ("ReplicaWoken", "Replica web-0 woke in 2.5 s.")


@pytest.mark.parametrize(
    ("pods", "desired", "expected"),
    [
        ([at(ASLEEP)], 0, ("Idle", "No replica takes requests; a request wakes one of 1 that sleep.", 0, 1)),
        ([at(SETTLING)], 0, ("Draining", "1 replicas finish their requests and leave.", 0, None)),
        ([at(WAKING)], 1, ("Starting", "1 of 1 replicas are waking up.", 0, None)),
        ([at(ASLEEP)], 1, ("Starting", "1 of 1 replicas are waking up.", 0, 1)),
        ([replica(1), at(ASLEEP)], 1, ("Ready", "1 of 1 replicas take requests.", 1, 1)),
        ([at(WOKEN)], 1, ("Ready", "1 of 1 replicas take requests.", 1, None)),
        ([at(ASLEEP, draining_since=NOW)], 0, ("Draining", "1 replicas finish their requests and leave.", 0, None)),
    ],
)  # fmt: skip
def test_the_status_says_who_sleeps(pods: list[Pod], desired: int, expected: tuple[object, ...]) -> None:
    status = reconcile(view(warm(desired=desired), *pods)).status
    assert status is not None
    assert (status.phase, status.message, status.ready_replicas, status.sleeping_replicas) == expected
    [row] = status.pools or []
    assert (row.replicas, row.ready or 0, row.sleeping) == (len(pods), *expected[2:])


def test_the_history_says_that_a_replica_only_wakes() -> None:
    of = warm(desired=0).model_copy(deep=True)
    of.spec.replicas = 1
    status = reconcile(view(of, at(ASLEEP), readings={0: SLEEPS})).status
    assert status is not None
    [entry] = status.scaling_history or []
    assert entry.reason == "spec.replicas is 1. Sleeping replicas that wake: 1."


def test_what_sleeps_is_charged() -> None:
    of = warm(desired=0)
    assert of.status is not None
    old = {"replicas": 1, "pools": [{"pool": "cpu", "replicas": 1, "sleeping": 1}], "lastUsageTime": ago(60)}
    of = of.model_copy(update={"status": type(of.status).model_validate({"desiredReplicas": 0, **old})})
    status = reconcile(view(of, at(ASLEEP), readings={0: SLEEPS})).status
    assert status is not None
    assert status.usage is not None
    assert status.usage.accelerator_seconds == 60


def test_a_wake_counts_as_no_start() -> None:
    born: dict[str, Any] = {"created_at": ago(500), "ready_since": ago(2)}
    assert start_seconds(warm(), [replica(0, **born), at(WOKEN, index=1, pool="h100", **born)]) == {
        "cpu": 498
    }


def test_metrics_count_the_replicas_by_state_and_forget_them() -> None:
    registry = CollectorRegistry()
    metrics, key = ScalingMetrics(registry), Key("team", "web")
    leaving, starting = replica(6, draining_since=NOW), replica(5, ready=False)
    awake = [replica(0), at(WOKEN, index=1)]
    other = replica(7, pool="l4")
    metrics.show(key, None, None, [*awake, at(ASLEEP), at(SETTLING), at(WAKING), starting, leaving, other])

    def counted() -> dict[tuple[str, str], float]:
        [family] = [f for f in registry.collect() if f.name == "busbar_service_replicas"]
        return {(s.labels["pool"], s.labels["state"]): s.value for s in family.samples}

    cpu = {("cpu", "ready"): 2, ("cpu", "starting"): 2, ("cpu", "sleeping"): 1}
    l4 = {("l4", "ready"): 1, ("l4", "starting"): 0, ("l4", "sleeping"): 0}
    assert counted() == cpu | l4
    metrics.show(key, None, None, [*awake, at(ASLEEP), at(SETTLING), at(WAKING), starting, leaving])
    assert counted() == cpu, "a pool without replicas has no series"
    metrics.show(key, None, None)
    assert counted() == {}
    metrics.gone(key)


def test_a_forged_annotation_is_none() -> None:
    def read(note: str) -> tuple[Sleep | None, datetime | None]:
        pod = project_pod({"metadata": {"name": "x", "annotations": {ANNOTATION_SLEEP: note}}})
        return pod.sleep, pod.sleep_since

    assert read(f"Asleep {NOW.isoformat()}") == (ASLEEP, NOW)
    for note in ("", "Asleep", "Asleep soon", "Dozing 2026-11-21T12:00:00Z", NOW.isoformat()):
        assert read(note) == (None, None), note


class Engine:
    """What an engine with the sleep routes reports, one command after the other."""

    def __init__(self) -> None:
        self.level, self.running = 0, 0

    def reading(self) -> ServingStatus:
        return ServingStatus(ready=self.level == 0, sleep_level=self.level, running=self.running)

    def asked(self, path: str) -> None:
        self.level = {"/sleep": 1, "/wake_up": 0}[path]


def through(
    of: ModelService, pods: list[Pod], engines: dict[str, Engine], now: datetime
) -> tuple[list[Pod], datetime]:
    """Reconciles until nothing changes, carrying out what is asked; a second passes between two."""
    for _ in range(40):
        base = view(of, *pods, readings={p.rank: engines[p.uid].reading() for p in pods})
        update = reconcile(replace(base, now=now, asked={p.uid: True for p in pods}))
        for action in update.actions:
            match action:
                case Patch(key=key, patch=patch):
                    read = project_pod({"metadata": {"name": key.name, **patch["metadata"]}})
                    now_is = {"sleep": read.sleep, "sleep_since": read.sleep_since}
                    if read.draining_since is not None:
                        now_is = {"draining_since": read.draining_since}
                    pods = [replace(p, **now_is) if p.key == key else p for p in pods]  # type: ignore[arg-type]
                case PostToPod(uid=uid, path=path):
                    engines[uid].asked(path)
                case Delete(uid=uid):
                    pods = [p for p in pods if p.uid != uid]
        assert not any(isinstance(action, Create) for action in update.actions)
        now += timedelta(seconds=1)
        if not update.actions and not any(p.leaving or p.sleep in (SETTLING, WAKING) for p in pods):
            return pods, now
    raise AssertionError("it does not settle")


def test_a_whole_night_and_day_by_steps_that_a_new_operator_could_take_over_anywhere() -> None:
    pods = [replica(i) for i in range(3)]
    engines = {pod.uid: Engine() for pod in pods}
    pods, now = through(warm(desired=1), pods, engines, NOW)
    assert [(p.sleep, engines[p.uid].level) for p in pods] == [(None, 0), (ASLEEP, 1), (ASLEEP, 1)]
    pods, now = through(warm(desired=0), pods, engines, now)
    assert [(p.key.name, p.sleep) for p in pods] == [("web-1", ASLEEP), ("web-2", ASLEEP)]
    pods, now = through(warm(desired=2), pods, engines, now)
    assert [(p.sleep, engines[p.uid].level) for p in pods] == [(WOKEN, 0), (WOKEN, 0)]
    pods, now = through(warm(desired=1), pods, engines, now)
    assert [(p.sleep, engines[p.uid].level) for p in pods] == [(WOKEN, 0), (ASLEEP, 1)]
