"""What keeps replicas from being as many as the load needs, in the scaling history; and replicas in several zones."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, replica, service
from tests.operator.serving.fleet_world import SLO, World, each, kind, one
from tests.operator.serving.test_reconcile import view

from busbar.kube.types import ModelService
from busbar.kube.types.service_status import ScalingCause, ScalingDecision
from busbar.operator.serving.claims import claims
from busbar.operator.serving.fleet_plan import Change, Plan
from busbar.operator.serving.reconcile import reconcile
from busbar.scheduler.autoscale.columns import LimitKind, Row
from busbar.scheduler.explain.service_room import ServiceRoom

ROWS = {
    ScalingCause.QUOTA: Row("the tenant's quota of L4", {"l4": 1.0}, 2.0, LimitKind.QUOTA),
    ScalingCause.POWER: Row("the power of domain feed", {"l4": 60.0}, 130.0, LimitKind.POWER),
    ScalingCause.BUDGET: Row("the tenant's budget of kWh a day", {"l4": 0.07}, 0.15, LimitKind.BUDGET),
}


@pytest.mark.parametrize("cause", ROWS)
def test_replicas_that_a_row_holds_back_are_told_with_its_kind(cause: ScalingCause) -> None:
    world = one(room=ServiceRoom({"l4": 16}, (ROWS[cause],)))
    rate = each(world)
    plan = world.run(40, 4 * rate)
    assert plan.target == {"l4": 2}
    assert plan.change is not None
    assert plan.held is not None
    assert (plan.change.cause, plan.held.cause) == (cause, cause)
    assert plan.held.reason.endswith(f"need more replicas, held back by {ROWS[cause].name}.")
    world.room = ServiceRoom({"l4": 16})
    plan = world.run(1, 4 * rate)
    plan = world.run(60, 4 * rate)
    assert plan.target is not None
    assert plan.target["l4"] >= 4
    assert plan.held is None
    assert plan.change is not None
    assert plan.change.cause in (ScalingCause.FORECAST, ScalingCause.PANIC)


def test_a_stock_that_is_used_up_is_no_limit_of_the_tenant() -> None:
    world = one(room=ServiceRoom({"l4": 2}, (replace(ROWS[ScalingCause.QUOTA], most=5.0),)))
    plan = world.run(40, 4 * each(world))
    assert (plan.target, plan.held) == ({"l4": 2}, None)


def held(of: ModelService, cause: ScalingCause | None, target: dict[str, int]) -> list[ScalingDecision]:
    """The scaling history after a reconcile in which this holds the replicas back."""
    why = Change(cause, "8 requests/s need more replicas.", 8.0, 4.0) if cause is not None else None
    plan = Plan(target, "", Change(ScalingCause.FORECAST, "More."), held=why)
    written = reconcile(view(of, plan=plan)).status
    status = written if written is not None else of.status
    assert status is not None
    return status.scaling_history or []


def wanting(history: list[ScalingDecision] | None = None, desired: int = 2) -> ModelService:
    rows = [{"pool": "l4", "replicas": 0, "desired": desired, "accelerator": "L4"}]
    of = service(status={"desiredReplicas": desired, "pools": rows}, slo=SLO, maxReplicas=9)
    assert of.status is not None
    return of.model_copy(update={"status": of.status.model_copy(update={"scaling_history": history})})


def test_what_holds_replicas_back_is_one_line_of_the_history_until_it_is_something_else() -> None:
    [first] = held(wanting(), ScalingCause.QUOTA, {"l4": 2})
    assert (first.previous, first.desired, first.cause, first.requests_per_second) == (
        2,
        2,
        ScalingCause.QUOTA,
        8.0,
    )
    assert held(wanting([first]), ScalingCause.QUOTA, {"l4": 2}) == [first], (
        "an operator that restarts says no more"
    )
    assert held(wanting([first]), None, {"l4": 2}) == [first]
    assert [e.cause for e in held(wanting([first]), ScalingCause.POWER, {"l4": 2})] == [
        ScalingCause.QUOTA, ScalingCause.POWER
    ]  # fmt: skip
    both = held(wanting([first]), ScalingCause.POWER, {"l4": 2})
    assert held(wanting(both), ScalingCause.QUOTA, {"l4": 2}) == both, "limits that take turns are told once"


def test_a_change_has_the_pools_before_and_after_it() -> None:
    [entry] = held(wanting(), None, {"l4": 2, "h100": 1})
    assert (entry.previous_pools, entry.desired_pools) == ({"l4": 2}, {"l4": 2, "h100": 1})
    plain = service(status={"desiredReplicas": 1}, minReplicas=3)
    written = reconcile(view(plain)).status
    assert written is not None
    [entry] = written.scaling_history or []
    assert (entry.previous_pools, entry.desired_pools) == (None, None), "no pools were chosen"


# -- zones -------------------------------------------------------------------------------------------------

ZONES: dict[str, Any] = {"minReplicas": 2, "scaling": {"minZones": 2}}


def far(name: str, price: float, accelerator: str = "L4") -> Any:
    made = kind(name, price)
    return made.model_copy(update={"spec": made.spec.model_copy(update={"accelerator": accelerator})})


def in_zones(**fields: Any) -> World:
    room = ServiceRoom({"l4": 9, "far": 9}, (), {"l4": "a", "far": "b"})
    return one(**{"spec": ZONES, "pools": (kind("l4", 1.0), far("far", 3.0)), "room": room} | fields)


def test_replicas_stand_in_two_zones_although_one_is_cheaper() -> None:
    world = in_zones()
    rate = each(world)
    plan = world.run(60, 1.2 * rate)
    assert plan.target == {"l4": 1, "far": 1}
    high = world.run(200, 5 * rate).target
    assert high is not None
    assert (high["far"], high["l4"] >= 4) == (1, True)
    assert world.run(700, 0.2 * rate).target == {"l4": 1, "far": 1}


def test_a_service_that_is_given_zones_later_moves_a_replica_also_where_no_more_may_run() -> None:
    world = in_zones(spec={"minReplicas": 2, "maxReplicas": 2})
    rate = each(world)
    assert world.run(60, 0.5 * rate).target == {"l4": 2}
    world.spec = ZONES | {"maxReplicas": 2}
    plan = world.run(40, 0.5 * rate)
    assert plan.target == {"l4": 1, "far": 1}
    assert plan.change is not None
    assert plan.change.reason == "Replicas are to stand in 2 zones."


RESERVED: dict[str, Any] = {"minReplicas": 2, "scaling": {"minZones": 2, "zoneReserve": 0.5}}


def test_either_zone_carries_its_part_of_the_load_without_the_other() -> None:
    world = in_zones()
    rate = each(world)
    plain = world.run(60, 4.8 * rate).target
    assert plain is not None
    assert plain["far"] == 1
    world.spec = RESERVED
    plan = world.run(40, 4.8 * rate)
    assert plan.target is not None
    assert plan.target["l4"] == plain["l4"], "what runs stays"
    assert plan.target["far"] >= 3
    assert plan.change is not None
    assert plan.change.cause is ScalingCause.BOUNDS
    assert plan.change.reason == (
        "Replicas are to stand in 2 zones, and to carry 50 % of the load without any one of them."
    )
    assert world.run(1500, 4.8 * rate).target == {"l4": 3, "far": 3}


def test_a_reserve_without_room_is_told_and_with_one_zone_there_is_none() -> None:
    world = in_zones(spec=RESERVED, room=ServiceRoom({"l4": 9, "far": 1}, (), {"l4": "a", "far": "b"}))
    rate = each(world)
    plan = world.run(60, 4.8 * rate)
    assert plan.target is not None
    assert plan.target["far"] == 1
    assert plan.message.startswith("scaling.zoneReserve is 0.5, and there is room for replicas that carry ")
    assert plan.message.endswith(" % of the load without zone a.")
    alone = in_zones(spec=RESERVED, room=ServiceRoom({"l4": 9, "far": 0}, (), {"l4": "a", "far": "b"}))
    assert "have room in 1 (a)" in alone.run(60, 4.8 * rate).message


def test_a_type_without_a_speed_is_asked_where_the_others_are_in_one_zone() -> None:
    world = in_zones(pools=(kind("l4", 1.0), far("far", 3.0, "T4")))
    assert world.run(60, 0.5 * each(world)).target == {"l4": 1, "far": 1}


def test_zones_without_room_are_named_and_do_not_stop_the_rest() -> None:
    world = in_zones(room=ServiceRoom({"l4": 9, "far": 0}, (), {"l4": "a", "far": "b"}))
    plan = world.run(60, 0.5 * each(world))
    assert plan.target == {"l4": 2}
    assert plan.message.startswith(
        "scaling.minZones is 2, and the pools that the service may use have room in 1 (a)."
    )
    world.room = None
    assert "not known before the scheduler's first round" in world.run(31, 0.5).message


def test_replicas_from_outside_go_to_a_zone_without_one() -> None:
    world = in_zones()
    rate = each(world)
    world.spec = ZONES | {"replicas": 3}
    plan = world.run(1, 0.5 * rate)
    assert plan.target is not None
    assert plan.target["far"] >= 1
    assert sum(plan.target.values()) == 3


def test_each_missing_replica_claims_its_pool_and_one_in_a_wrong_pool_is_replaced() -> None:
    rows = [{"pool": name, "replicas": 0, "desired": 1, "accelerator": "L4"} for name in ("l4", "far")]
    of = service(status={"desiredReplicas": 2, "pools": rows}, slo=SLO, maxReplicas=3, **ZONES)
    own = tuple(replica(i, pool="l4", created_at=NOW - timedelta(hours=1)) for i in range(2))
    waiting = [claim.job for claim in claims(of, own, (), "team", NOW) if claim.job.run is None]
    assert [job.pools for job in waiting] == [("far",)]
