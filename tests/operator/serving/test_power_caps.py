"""Power caps of a service's replicas: chosen where watts bind, told in the status, noted at the pods, lifted again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import NOW, admit, placement, replica, service
from tests.operator.profiles.parts import profile
from tests.operator.serving.fleet_world import SLO, STEP, World, each, one
from tests.operator.serving.test_reconcile import view

from busbar.kube.types import ModelService, PerformanceProfile
from busbar.kube.types.service_status import ScalingCause
from busbar.operator.pods.replica_place import place_of, placement_note
from busbar.operator.serving.claims import claims
from busbar.operator.serving.fleet_plan import Plan
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.replica_speed import speeds
from busbar.operator.watch.projections import ANNOTATION_PLACEMENT, Pod
from busbar.operator.write.actions import Create, Patch
from busbar.scheduler.autoscale.columns import LimitKind, Row
from busbar.scheduler.autoscale.step_model import Slo
from busbar.scheduler.explain.service_room import BoardDraw, ServiceRoom

DRAW = BoardDraw(idle_w=12.0, most_w=72.0)
SLOWER = {80: (1.1, 1.02), 60: (1.4, 1.1)}
"""Prompts and decoding, by per cent."""


def cell(percent: int, reads: float = 1.0, decodes: float = 1.0) -> dict[str, Any]:
    step = {
        name: value * (reads if name == "secondsPerPromptToken" else decodes)
        for name, value in STEP.items()
        if name not in ("rmsErrorSeconds", "steps")
    }
    return {
        "accelerator": "L4", "accelerators": 1, "powerCapPercent": percent, "tokensPerSecond": 50 / decodes,
        "source": "Measured", "kvTokens": 200_000, "stepModel": step | {"rmsErrorSeconds": 0.001, "steps": 500},
    }  # fmt: skip


def known(*cells: dict[str, Any]) -> PerformanceProfile:
    return profile(status={"cells": list(cells)}, workloadClass="serve-x")


PROFILE = known(cell(100), *(cell(percent, *slower) for percent, slower in SLOWER.items()))


def room(watts: float, stock: int = 16, **fields: Any) -> ServiceRoom:
    feed = Row("the power of domain feed", {"l4": float(DRAW.at(1.0))}, watts, LimitKind.POWER)
    return ServiceRoom({"l4": stock}, (feed,), boards={"l4": DRAW}, **fields)


def limited(watts: float, **fields: Any) -> World:
    """A service on L4, each of 60 W above idle; 46 W at 80 % and 32 W at 60 %."""
    return one(profiles=(PROFILE,), room=room(watts), **fields)


def percent(plan: Plan) -> dict[str, int] | None:
    return None if plan.caps is None else {pool: round(100 * cap) for pool, cap in plan.caps.items()}


def test_the_speed_under_a_cap_is_the_services_own_by_what_the_cap_costs_its_class() -> None:
    of = World(lines=[World().lines[0] | {"stepModel": STEP | {"secondsPerStep": 0.04}}]).service
    slo = Slo(2.0, 0.1)
    found = speeds(of, World().pools, (PROFILE,), slo)
    whole, under = found.models["l4"], found.capped["l4"][0.6]
    assert sorted(found.capped["l4"]) == [0.6, 0.8]
    assert under.a_s == pytest.approx(1.1 * 0.04)
    assert [under.b_s, under.c_s, under.d_s] == pytest.approx(
        [1.1 * whole.b_s, 1.1 * whole.c_s, 1.4 * whole.d_s]
    )
    assert under.kv_tokens == whole.kv_tokens
    assert speeds(of, World().pools, (known(*(cell(60, 1.4, 1.1),)),), slo).capped["l4"] == {}, "of nothing"
    foreign = service(status={"measured": World().lines}, slo=SLO, image="somebody/engine:1")
    assert speeds(foreign, World().pools, (PROFILE,), slo).capped["l4"] == {}


def test_what_was_measured_under_limits_is_not_slowed_again() -> None:
    slow = World().lines[0] | {"stepModel": STEP | {"secondsPerStep": 0.03}, "limited": True}
    of, slo = World(lines=[slow]).service, Slo(2.0, 0.1)
    found = speeds(of, World().pools, (PROFILE,), slo, limitable=["l4"])
    assert found.models["l4"].a_s == pytest.approx(0.02), "the profile's, without limits"
    assert found.capped["l4"][0.6].a_s == pytest.approx(1.1 * 0.02)
    assert speeds(of, World().pools, (PROFILE,), slo).models["l4"].a_s == 0.03
    assert speeds(of, World().pools, (known(cell(100)),), slo, limitable=["l4"]).models["l4"].a_s == 0.03


def test_replicas_that_fit_under_no_cap_wait_without_one() -> None:
    world = limited(0.0, full={"l4"})
    world.pods.clear()
    plan = world.run(2, 0.1)
    assert (plan.target, percent(plan)) == ({"l4": 1}, {}), (
        "whether others make room is the scheduler's to decide"
    )
    world.room = room(50.0)
    assert percent(world.run(31, 0.1)) == {"l4": 80}


def test_where_watts_bind_more_replicas_run_under_a_cap_and_are_lifted_when_the_load_is_gone() -> None:
    world = limited(130.0)
    rate = each(world)
    plan = world.run(60, 1.2 * rate)
    assert (plan.target, percent(plan)) == ({"l4": 2}, {})
    plan = world.run(90, 3.2 * rate)
    assert (plan.target, percent(plan)) == ({"l4": 4}, {"l4": 60})
    assert plan.caps_reason == (
        "Boards of pool l4 are limited to 60 % of their watts: more replicas at lower limits carry more of the load."
    )
    assert plan.rates["l4"] == pytest.approx(rate / 1.15, rel=0.1)
    assert plan.rates["l4"] < rate
    assert plan.capacity_rps is not None
    assert plan.capacity_rps >= 3.2 * rate
    assert ScalingCause.POWER in {each.held.cause for each in world.plans if each.held is not None}
    low = world.run(900, 0.5 * rate)
    assert (low.target, percent(low)) == ({"l4": 1}, {})
    assert low.caps_reason == "Boards of pool l4 have no power cap any more: their power domains have room."
    assert low.rates["l4"] == pytest.approx(rate)


@pytest.mark.parametrize("blind", [{"profiles": ()}, {"room": replace(room(130.0), boards={})}])
def test_without_known_costs_or_nodes_that_take_limits_nothing_is_capped(blind: dict[str, Any]) -> None:
    world = one(**({"profiles": (PROFILE,), "room": room(130.0)} | blind))
    plan = world.run(120, 3.2 * each(world))
    assert (plan.target, percent(plan)) == ({"l4": 2}, {})


def test_a_domain_that_loses_watts_lowers_the_cap_and_one_that_gains_some_raises_it_later() -> None:
    world = limited(250.0)
    rate = each(world)
    world.run(60, 1.7 * rate)  # no queue grows that more than three would have to work off
    plan = world.run(120, 2.4 * rate)
    assert (plan.target, percent(plan)) == ({"l4": 3}, {})
    world.room = room(150.0)
    plan = world.run(31, 2.4 * rate)
    assert plan.target is not None
    assert plan.target["l4"] >= 3
    assert percent(plan) in ({"l4": 80}, {"l4": 60})
    assert "their power domains leave the replicas no more" in world.plans[-1].caps_reason
    before = percent(plan)
    world.room = room(400.0, short=frozenset({"the power of domain feed"}))
    assert percent(world.run(400, 2.4 * rate)) == before, "a job waits for these watts"
    world.room = room(400.0)
    assert percent(world.run(31, 2.4 * rate)) == {}


def test_a_cap_is_not_raised_soon_after_a_change() -> None:
    world = limited(250.0)
    rate = each(world)
    world.run(120, 2.4 * rate)
    world.room = room(150.0)
    low = percent(world.run(31, 2.4 * rate))
    world.room = room(400.0)
    assert percent(world.run(200, 2.4 * rate)) == low
    assert percent(world.run(200, 2.4 * rate)) == {}


def test_an_operator_that_restarts_keeps_the_caps_of_the_status() -> None:
    world = limited(130.0)
    rate = each(world)
    world.run(90, 3.2 * rate)
    again = limited(
        130.0, desired=4, rows=[{"pool": "l4", "replicas": 4, "desired": 4, "powerCapPercent": 60}]
    )
    for _ in range(3):
        again.start("l4", 0)
    first = again.run(1, 3.2 * rate)
    assert percent(first) == {"l4": 60}
    again.room = None
    assert percent(again.run(1, 3.2 * rate)) == {"l4": 60}
    away = World(rows=again.rows, profiles=(PROFILE,))
    assert away.run(1, None).caps is None, "nothing is known: what the status has stays"


def test_a_cap_stays_for_a_while_where_replicas_cannot_be_limited_any_more() -> None:
    world = limited(130.0)
    rate = each(world)
    world.run(90, 3.2 * rate)
    known, unknown = room(130.0), replace(room(130.0), boards={})
    world.room = unknown
    assert percent(world.run(25, 3.2 * rate)) == {"l4": 60}, "an agent starts anew"
    world.room = known
    assert percent(world.run(31, 3.2 * rate)) == {"l4": 60}
    world.room = unknown
    plan = world.run(65, 3.2 * rate)
    assert percent(plan) == {}
    assert "cannot be limited there any more" in plan.caps_reason


def test_an_operator_that_starts_keeps_caps_until_it_has_heard_of_boards() -> None:
    rows = [{"pool": "l4", "replicas": 3, "desired": 3, "powerCapPercent": 60}]
    again = limited(130.0, desired=3, rows=rows)
    again.room = replace(room(130.0), boards={})
    for _ in range(3):
        again.start("l4", 0)
    rate = each(again)
    assert percent(again.run(5, 3.2 * rate)) == {"l4": 60}
    again.room = room(130.0)
    assert percent(again.run(5, 3.2 * rate)) == {"l4": 60}


# -- status, claims and pods -------------------------------------------------------------------------------


def capped(percent: int | None = None, pods: int = 2, desired: int = 2) -> tuple[ModelService, list[Pod]]:
    """A service with these replicas, each with a cap of 60 %, and what its status says of caps."""
    row = {
        "pool": "l4",
        "replicas": pods,
        "desired": desired,
        "accelerator": "L4",
        "powerCapPercent": percent,
    }
    of = service(status={"desiredReplicas": desired, "pools": [row]}, slo=SLO, maxReplicas=9)
    place = placement(pool="l4", accelerator="L4", power_cap=0.6)
    return of, [replica(i, pool="l4", placement=placement_note(place)) for i in range(pods)]


def note(action: object) -> dict[str, Any]:
    assert isinstance(action, Patch)
    found: dict[str, Any] = json.loads(action.patch["metadata"]["annotations"][ANNOTATION_PLACEMENT])
    return found


def test_the_status_tells_the_cap_and_the_history_why_it_changed() -> None:
    of, pods = capped()
    why = "Boards of pool l4 are limited to 60 % of their watts: more replicas at lower limits carry more of the load."
    plan = Plan({"l4": 2}, caps={"l4": 0.6}, caps_reason=why)
    status = reconcile(view(of, *pods, plan=plan)).status
    assert status is not None
    assert [row.power_cap_percent for row in status.pools or ()] == [60]
    [entry] = status.scaling_history or []
    assert (entry.previous, entry.desired, entry.cause, entry.reason) == (2, 2, ScalingCause.POWER, why)
    told = of.model_copy(update={"status": status})
    again = reconcile(view(told, *pods, plan=plan)).status or status
    assert len(again.scaling_history or []) == 1, "once"
    unknown = reconcile(view(told, *pods, plan=replace(plan, caps=None))).status or status
    assert [row.power_cap_percent for row in unknown.pools or ()] == [60]
    more = reconcile(view(of, *pods, plan=replace(plan, target={"l4": 3}))).status
    assert more is not None
    [entry] = more.scaling_history or []
    assert (entry.desired, entry.reason.endswith(why)) == (3, True)
    without = reconcile(view(told, *pods)).status
    assert without is not None
    assert [row.power_cap_percent for row in without.pools or ()] == [None], "no latency target any more"


def test_the_speed_under_another_cap_is_told_however_little_it_changes() -> None:
    of, pods = capped(60)
    assert of.status is not None
    known = [row.model_copy(update={"requests_per_second": 2.0}) for row in of.status.pools or ()]
    of = of.model_copy(update={"status": of.status.model_copy(update={"pools": known})})
    for percent, told in ((60, 2.0), (80, 2.1)):
        plan = Plan({"l4": 2}, rates={"l4": 2.1}, caps={"l4": percent / 100})
        status = reconcile(view(of, *pods, plan=plan)).status or of.status
        assert status is not None
        assert [row.requests_per_second for row in status.pools or ()] == [told]


def test_another_cap_is_noted_at_the_pods_that_run_on() -> None:
    of, pods = capped(80)
    plan = Plan({"l4": 2}, caps={"l4": 0.8})
    notes = [note(action) for action in reconcile(view(of, *pods, plan=plan)).actions]
    assert [found["powerCapPercent"] for found in notes] == [80, 80]
    lifted, _ = capped(None)
    notes = [note(action) for action in reconcile(view(lifted, *pods, plan=replace(plan, caps={}))).actions]
    assert ["powerCapPercent" in found for found in notes] == [False, False]
    same, _ = capped(60)
    assert reconcile(view(same, *pods, plan=replace(plan, caps={"l4": 0.6}))).actions == ()


def test_a_missing_replica_is_asked_for_under_the_cap_and_made_with_it() -> None:
    of, pods = capped(60, desired=3)
    asked = [claim.job for claim in claims(of, tuple(pods), (), "team", NOW)]
    [more] = [job for job in asked if job.run is None]
    assert (more.pools, more.power_cap) == (("l4",), 0.6)
    assert [job.run.placement.power_cap for job in asked if job.run is not None] == [0.6, 0.6]
    assert {job.power_cap for job in asked} == {0.6}
    place = replace(admit(index=2), placement=placement(pool="l4", accelerator="L4", power_cap=0.6))
    made = [action for action in reconcile(view(of, *pods), (place,)).actions if isinstance(action, Create)]
    noted = made[0].body["metadata"]["annotations"][ANNOTATION_PLACEMENT]
    found = place_of(replica(2, placement=noted))
    assert found is not None
    assert found.power_cap == 0.6
    free, _ = capped(None, desired=3)
    [more] = [claim.job for claim in claims(free, tuple(pods), (), "team", NOW) if claim.job.run is None]
    assert (more.pools, more.accelerators, more.power_cap) == ((), ("L4",), 1.0)


@pytest.mark.parametrize("cap", [0, 101, -5, "x", None])
def test_a_note_with_a_cap_that_cannot_be_is_none(cap: object) -> None:
    raw = json.loads(placement_note(placement(power_cap=0.6))) | {"powerCapPercent": cap}
    assert place_of(replica(0, placement=json.dumps(raw))) is None
