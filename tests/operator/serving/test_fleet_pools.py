"""In which pools a service's replicas are: prices, stock, quota, pools that place nothing, nodes that fail."""

from __future__ import annotations

from dataclasses import replace

from tests.operator.serving.fleet_world import each, kind, line, one

from busbar.kube.types.service_status import ScaledBy, ScalingCause
from busbar.scheduler.autoscale.columns import LimitKind, Row
from busbar.scheduler.explain.service_room import ServiceRoom


def test_of_two_types_the_one_that_carries_the_load_for_less_is_chosen_and_its_stock_is_kept() -> None:
    dear, cheap = kind("l4", 4.0), kind("t4", 1.0, capacity=2)
    world = one(pools=(dear, cheap), lines=[line("L4"), line("T4")])
    rate = each(world)
    plan = world.run(1, 1.7 * rate)
    assert plan.target == {"l4": 1, "t4": 2}
    plan = world.run(300, 3.6 * rate)
    assert plan.target is not None
    assert plan.target["t4"] == 2
    assert plan.target["l4"] >= 2


def test_the_shares_of_the_ready_pools_leave_when_one_does_and_hardly_change_with_the_load() -> None:
    world = one(
        spec={"minReplicas": 2},
        pools=(kind("l4", 1.0, capacity=1), kind("h100", 4.0)),
        lines=[line("L4"), line("H100", secondsPerStep=0.005)],
    )
    rate = each(world)
    assert world.plans[-1].shares == (), "one pool takes all"
    plan = world.run(60, 0.8 * rate)
    assert plan.target == {"l4": 1, "h100": 1}
    served = plan.shares[2]
    assert (set(served), round(sum(served.values()), 6)) == ({"l4", "h100"}, 1.0)
    assert served["h100"] > served["l4"] > 0, "as much as each of them sustains"
    assert abs(served["h100"] / served["l4"] - plan.rates["h100"] / plan.rates["l4"]) < 0.5
    assert world.fleets.shares(world.service.metadata.uid) == plan.shares
    before = plan.shares
    assert world.run(60, 0.9 * rate).shares is before
    world.pods = {rank: (pod, at) for rank, (pod, at) in world.pods.items() if pod.pool == "l4"}
    world.full = {"h100"}
    assert world.run(2, 0.8 * rate).shares == ()
    assert world.fleets.shares("another") == ()


def test_quota_and_power_are_rows_of_the_mix_and_the_message_names_those_that_hold_it_back() -> None:
    dear, cheap = kind("l4", 4.0), kind("t4", 1.0)
    world = one(pools=(dear, cheap), lines=[line("L4"), line("T4")])
    world.room = ServiceRoom(
        {"t4": 5, "l4": 16}, (Row("the tenant's quota of T4", {"t4": 1.0}, 2.0, LimitKind.QUOTA),)
    )
    rate = each(world)
    assert world.run(1, 2.2 * rate).target == {"l4": 2, "t4": 2}, "the dear pool gets what the quota forbids"
    assert world.plans[-1].message == ""
    world.room = replace(
        world.room,
        rows=(
            *world.room.rows,
            Row("the power of domain feed", {"l4": 60.0, "t4": 60.0}, 300.0, LimitKind.POWER),
        ),
    )
    world.run(120, 7 * rate)
    plan = world.plans[-1]
    assert plan.target == {"l4": 3, "t4": 2}
    assert plan.message.endswith(
        "need more replicas, held back by the tenant's quota of T4 and by the power of domain feed."
    )
    world.room = replace(
        world.room, rows=(Row("the tenant's quota of T4", {"t4": 1.0}, 1.0, LimitKind.QUOTA),)
    )
    target = world.run(60, 7 * rate).target
    assert target is not None
    assert (target["t4"], target["l4"] > 3) == (2, True), "a quota below what runs stops nothing else"


def test_pools_without_room_are_told_where_the_load_needs_more_and_nothing_else_holds_it_back() -> None:
    world = one(pools=(kind("l4", 1.0, capacity=2),))
    rate = each(world)
    assert world.run(60, 1.5 * rate).full == frozenset()
    assert world.run(60, 5 * rate).full == {"l4"}
    world.room = ServiceRoom({"l4": 2}, (Row("the tenant's quota", {"l4": 1.0}, 2.0, LimitKind.QUOTA),))
    assert world.run(60, 5 * rate).full == frozenset(), "more nodes would not help"
    world.room, world.pools = None, (kind("l4", 1.0, capacity=16),)
    world.spec = {"maxReplicas": 2}
    assert world.run(60, 5 * rate).full == frozenset(), "nor would they here"


def test_replicas_from_outside_are_split_over_the_types_by_the_mix() -> None:
    dear, cheap = kind("l4", 4.0), kind("t4", 1.0, capacity=2)
    world = one(pools=(dear, cheap), lines=[line("L4"), line("T4")])
    rate = each(world)
    world.run(60, 0.5 * rate)
    world.spec = {"replicas": 4}
    plan = world.fleets.plan(replace(world.seen(0.5 * rate), reading=world.reading))
    assert plan.scaled_by(world.service) is ScaledBy.EXTERNAL
    assert plan.target == {"l4": 2, "t4": 2}, "what runs stays, the cheap ones are full"
    world.spec = {"replicas": 2}
    assert world.run(1, 0.5 * rate).target in ({"l4": 1, "t4": 1}, {"t4": 2})
    world.spec, world.desired = {"scaling": {"external": {"l4": 3, "t4": 0}}}, 3
    assert world.run(1, 0.5 * rate).target == {"l4": 3}, "by pool, as it says"


def test_pools_that_place_nothing_are_not_asked_for_replicas_from_outside_either() -> None:
    world = one(pools=(kind("l4", 4.0), kind("t4", 1.0)), lines=[line("L4"), line("T4")], full={"t4"})
    rate = each(world)
    world.spec, world.desired = {"replicas": 3}, 3
    assert world.run(1, rate).target == {"l4": 1, "t4": 2}
    assert world.run(33, rate).target == {"l4": 3}


def test_the_most_that_replicas_may_cost_is_kept_also_when_it_is_lowered() -> None:
    limit = {"scaling": {"maxCostPerHour": 9.0}}
    world = one(
        spec=limit, pools=(kind("l4", 4.0), kind("t4", 1.0, capacity=2)), lines=[line("L4"), line("T4")]
    )
    rate = each(world)
    plan = world.run(120, 9 * rate)
    assert plan.target is not None
    assert (plan.target["t4"], plan.target.get("l4", 0)) == (2, 1)
    assert plan.message.endswith("need more replicas, held back by the budget per hour.")
    world.spec = {"scaling": {"maxCostPerHour": 2.5}}
    plan = world.run(1, 9 * rate)
    assert plan.target == {"t4": 2}
    assert plan.change is not None
    assert plan.change.cause is ScalingCause.BUDGET
    world.pools = (kind("l4", 0.0), kind("t4", 1.0, capacity=2))
    plan = world.run(40, 9 * rate)
    assert plan.target is not None
    assert plan.target["l4"] > 1
    assert "limits nothing: not every pool has a pricePerHour." in plan.message


def test_what_others_hold_for_good_is_no_stock() -> None:
    world = one(room=ServiceRoom({"l4": 2}))
    rate = each(world)
    assert world.run(120, 6 * rate).target == {"l4": 2}


def test_a_pool_that_places_nothing_is_given_up_for_another_after_half_a_minute() -> None:
    world = one(pools=(kind("l4", 4.0), kind("t4", 1.0)), lines=[line("L4"), line("T4")], full={"t4"})
    rate = each(world)
    for plan in (world.run(1, 1.9 * rate), world.run(29, 1.9 * rate)):
        assert plan.target is not None
        assert plan.target["t4"] >= 1
    plan = world.run(4, 1.9 * rate)
    assert plan.target is not None
    assert (plan.target["l4"] >= 2, plan.target.get("t4", 0)) == (True, 0)


def test_replicas_of_a_node_that_failed_are_asked_for_elsewhere_at_once_and_only_if_there_is_room() -> None:
    lines = [line("L4"), line("T4")]
    for room, elsewhere in (({"l4": 9, "t4": 1}, True), ({"l4": 0, "t4": 1}, False)):
        world = one(
            pools=(kind("l4", 4.0), kind("t4", 1.0)), lines=lines, room=ServiceRoom({"l4": 0, "t4": 9})
        )
        rate = each(world)
        begun = world.run(120, 2.9 * rate).target or {}
        assert (begun["t4"] >= 2, begun.get("l4", 0)) == (True, 1)
        for rank in [rank for rank, (pod, _) in world.pods.items() if pod.pool == "t4"][1:]:
            del world.pods[rank]  # given up with their node
        world.full, world.room = {"t4"}, ServiceRoom(room)
        plan = world.run(3, 2.9 * rate)
        assert plan.target is not None
        assert (plan.target.get("l4", 0) >= 2) == elsewhere
        assert (plan.target["t4"] == 1) == elsewhere
        assert plan.change is not None


def test_a_replica_in_a_pool_without_a_speed_counts_as_the_slowest_and_the_message_names_the_type() -> None:
    world = one(pools=(kind("l4", 1.0), kind("a100", 9.0)))
    world.start("a100", 0)
    world.desired = 2
    rate = each(world)
    plan = world.run(60, 1.5 * rate)
    assert plan.target == {"l4": 1, "a100": 1}
    assert "no replica has measured its speed on A100 yet" in plan.message


def test_where_the_measured_type_places_nothing_another_that_nobody_measured_is_tried() -> None:
    world = one(pools=(kind("l4", 1.0), kind("a100", 9.0)))
    rate = each(world)
    world.full = {"l4"}
    world.run(30, 1.5 * rate)
    assert world.plans[-1].target is not None
    assert set(world.plans[-1].target) == {"l4"}
    plan = world.run(10, 1.5 * rate)
    assert plan.target == {"l4": 1, "a100": 1}
