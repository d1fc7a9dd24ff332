"""Replicas by the latency target, second by second with a fake clock: demand in, target by pool out."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.operator.builders import NOW, pool, replica, service

from busbar.kube.contracts.demand import ServiceDemand, SizeCount, Totals, WindowDemand
from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile
from busbar.kube.types.service_status import ScaledBy, ScalingCause
from busbar.operator.pods.silent_nodes import with_silence
from busbar.operator.serving.fleet_input import Seen, alive, ready
from busbar.operator.serving.fleets import Fleets, Plan
from busbar.operator.serving.history import Load
from busbar.operator.watch.projections import Pod
from busbar.scheduler.autoscale.columns import LimitKind, Row
from busbar.scheduler.autoscale.day_profile import BIN_S, BINS, DayProfile
from busbar.scheduler.explain.service_room import ServiceRoom

SLO = {"ttftMilliseconds": 2000, "tpotMilliseconds": 100}
STEP = {
    "secondsPerStep": 0.02, "secondsPerSequence": 0.001, "secondsPerThousandContextTokens": 0.0005,
    "secondsPerPromptToken": 0.0001, "rmsErrorSeconds": 0.001, "steps": 500,
}  # fmt: skip
START = timedelta(seconds=40)


def line(kind: str, **step: Any) -> dict[str, Any]:
    return {
        "workloadClass": "serve-x", "accelerator": kind, "accelerators": 1, "mode": "resident", "kvTokens": 200_000,
        "stepModel": STEP | step,
    }  # fmt: skip


def kind(name: str, price: float, capacity: float = 16) -> AcceleratorPool:
    made = pool(name, accelerator=name.upper(), resourceName="nvidia.com/gpu", pricePerHour=price)
    return made.model_validate(made.to_wire() | {"status": {"capacity": capacity}})


def windows(rate: float, seconds: int = 10, kept: float = 1.0) -> list[WindowDemand]:
    count = round(rate * seconds)
    sums = {"count": count, "prompt_tokens": 400 * count, "output_tokens": 200 * count}
    sizes = [SizeCount(prompt=2, output=3, **sums)] if count else []
    answers = {"answered": count, "within": round(kept * count)}
    return [WindowDemand(seconds=seconds, arrivals=count, sizes=sizes, **answers)]


@dataclass
class World:
    """A service, its pods and its gateway; replicas start after `START` and are placed in `full` pools never."""

    spec: dict[str, Any] = field(default_factory=dict)
    pools: tuple[AcceleratorPool, ...] = (kind("l4", 1.0),)
    lines: list[dict[str, Any]] = field(default_factory=lambda: [line("L4")])
    full: set[str] = field(default_factory=set)
    desired: int = 1
    now_s: float = 1000.0
    counted_s: float = 500.0
    overdue: int = 0
    kept: float = 1.0
    knows: bool = True
    """Whether the gateway has the service's route."""
    fleets: Fleets = field(default_factory=Fleets)
    plans: list[Plan] = field(default_factory=list)
    pods: dict[int, tuple[Pod, float]] = field(default_factory=dict)
    """By rank, with the time at which each becomes ready."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    reading: int = 0
    room: ServiceRoom | None = None
    """What quota, power and other work leave."""
    days: DayProfile = field(default_factory=DayProfile)
    profiles: tuple[PerformanceProfile, ...] = ()

    @property
    def service(self) -> ModelService:
        status = {"desiredReplicas": self.desired, "measured": self.lines, "pools": self.rows}
        return service(status=status, **{"slo": SLO, "maxReplicas": 10, **self.spec})

    def run(self, seconds: int, rate: float | None) -> Plan:
        """Seconds with so many requests per second; None: the gateway is away."""
        for _ in range(seconds):
            self.now_s += 1
            self.reading += rate is not None
            plan = self.fleets.plan(self.seen(rate))
            self.plans.append(plan)
            if plan.target is not None and self.spec.get("replicas") is None:
                self.follow(dict(plan.target))
        return self.plans[-1]

    def seen(self, rate: float | None) -> Seen:
        demand = None
        if rate is not None:
            self.counted_s += 1
            demand = ServiceDemand(
                namespace="team", name="web", overdue=self.overdue, windows=[w for s in (10, 60, 180) for w in windows(rate, s, self.kept)],
                totals=Totals(),
            )  # fmt: skip
            demand = demand if self.knows else ServiceDemand(namespace="team", name="web")
        pods = tuple(
            replace(pod, ready=self.now_s >= at, ready_since=NOW + START if self.now_s >= at else None)
            for pod, at in self.pods.values()
        )
        return Seen(
            self.service,
            pods,
            self.pools,
            self.profiles,
            demand,
            self.reading,
            self.counted_s,
            self.now_s,
            room=self.room,
            days=self.days,
        )

    def follow(self, target: dict[str, int]) -> None:
        """What the reconcile and the scheduler do with a target."""
        self.desired = sum(target.values())
        self.rows = [{"pool": name, "replicas": 0, "desired": count} for name, count in target.items()]
        for name in {pod.pool for pod, _ in self.pods.values()} | target.keys():
            held = [rank for rank, (pod, _) in self.pods.items() if pod.pool == name]
            for rank in held[target.get(name, 0) :]:
                del self.pods[rank]
            for _ in range(target.get(name, 0) - len(held) if name not in self.full else 0):
                self.start(name)

    def start(self, name: str, ready_in_s: float = START.total_seconds()) -> None:
        rank = next(i for i in range(99) if i not in self.pods)
        made = replica(rank, pool=name, phase="Running", created_at=NOW)
        self.pods[rank] = (made, self.now_s + ready_in_s)


def one(**fields: Any) -> World:
    """A service with one ready replica on L4, and a gateway that has counted for a while."""
    world = World(**fields)
    world.start("l4", 0)
    return world


def each(world: World) -> float:
    """What one replica sustains."""
    rate = world.run(1, 0.1).rates["l4"]
    assert 1 < rate < 20, "the loads of these tests are relative to it"
    return rate


def test_a_rising_load_adds_replicas_until_they_carry_its_quantile() -> None:
    world = one()
    rate = each(world)
    plan = world.run(240, 2.5 * rate)
    assert plan.target is not None
    assert 3 <= plan.target["l4"] <= 4
    assert plan.capacity_rps is not None
    assert plan.capacity_rps >= 2.5 * rate
    assert plan.scaled_by(world.service) is ScaledBy.PROMISE
    assert plan.ahead is not None
    assert plan.ahead.now == round(2.5 * rate * 10) / 10
    assert plan.ahead.upper >= plan.ahead.at_ready


def test_a_burst_beyond_what_is_live_is_answered_in_the_next_second_with_its_cause() -> None:
    world = one()
    rate = each(world)
    world.run(60, 0.4 * rate)
    plan = world.run(1, 2.9 * rate)
    assert plan.target == {"l4": 3}
    assert plan.change is not None
    assert plan.change.cause is ScalingCause.PANIC
    assert "last ten seconds" in plan.change.reason
    assert plan.over_since_s == world.now_s
    assert world.plans[-2].over_since_s is None
    assert world.run(1, 2.5 * rate).over_since_s is None, "those that start count"


def test_requests_that_wait_half_of_the_target_add_a_replica_although_the_rate_is_low() -> None:
    world = one()
    rate = each(world)
    world.run(60, 0.4 * rate)
    world.overdue = 5
    plan = world.run(4, 0.4 * rate)
    assert plan.target == {"l4": 2}
    assert plan.change is not None
    assert plan.change.cause is ScalingCause.PANIC


def test_replicas_leave_only_after_the_load_has_been_low_for_the_window() -> None:
    world = one()
    rate = each(world)
    high = world.run(400, 2.5 * rate).target
    assert high is not None
    assert world.run(290, 0.3 * rate).target == high
    plan = world.run(400, 0.3 * rate)
    assert plan.target == {"l4": 1}
    assert plan.change is not None
    assert plan.change.cause is ScalingCause.IDLE


def test_a_gateway_that_is_away_or_new_is_no_drop_to_zero() -> None:
    world = one()
    rate = each(world)
    high = world.run(400, 2.5 * rate).target
    away = world.run(60, None)
    assert away.target == high
    assert "gateway says nothing" in away.message
    world.counted_s = 0
    assert world.run(8, 0.0).target == high, "a window that is not full yet says nothing"
    world.knows = False
    world.counted_s = 0
    assert world.run(100, 0.0).target == high, "a gateway without routes says nothing, either"
    world.knows = True
    assert world.run(200, 2.5 * rate).target == high


@pytest.mark.parametrize(("asked_s", "window_s", "told"), [(120, 120, False), (20, 40, True)])
def test_the_window_is_what_the_service_asks_for_and_at_least_a_start(
    asked_s: int, window_s: int, told: bool
) -> None:
    world = World(spec={"scaling": {"downAfterSeconds": asked_s}}, desired=3)
    rate = each(world)
    world.run(400, 2.5 * rate)
    before = len(world.plans)
    world.run(2 * window_s + 120, 0.2 * rate)
    counts = [sum((plan.target or {}).values()) for plan in world.plans[before:]]
    assert counts[0] >= 3
    first = next(i for i, count in enumerate(counts) if count < counts[0])
    assert window_s <= first <= window_s + 60
    said = f"scaling.downAfterSeconds is {asked_s}, which is shorter than a start: replicas leave after 40 s"
    assert [said in plan.message for plan in world.plans[before:][:1]] == [told]


def test_an_operator_that_restarts_keeps_the_target_and_lets_nothing_leave_before_the_window_has_passed() -> (
    None
):
    world = one()
    rate = each(world)
    high = world.run(400, 2.5 * rate).target
    world.fleets = Fleets()
    assert world.run(1, None).target == high
    assert world.run(280, 0.2 * rate).target == high
    assert world.run(600, 0.2 * rate).target == {"l4": 1}


@pytest.mark.parametrize("kept", [True, False])
def test_an_operator_that_restarts_forecasts_with_the_load_of_earlier_days_where_it_was_kept(
    kept: bool,
) -> None:
    """A load that rises and falls within ten minutes, each day alike."""
    before = DayProfile()
    for bin_ in range(BINS):
        before.remember(bin_ * BIN_S, 2.0 if bin_ % 2 else 6.0)
    world = one(days=Load.of(before).profile() if kept else DayProfile())  # type: ignore[union-attr]
    for _ in range(120):
        plan = world.run(10, before.at(world.now_s))
    assert plan.ahead is not None
    assert (plan.ahead.method == "day") is kept
    assert world.days.today, "this day counts for the next ones"


def test_without_a_usable_speed_requests_in_flight_decide_and_the_message_says_why() -> None:
    for lines, why in (
        ([], "no replica has measured its speed on L4 yet"),
        ([line("L4", secondsPerSequence=-0.001)], "has b = -0.001: no work takes negative time"),
        ([line("L4", steps=10)], "is known from 10 steps; 64 are needed"),
        ([line("L4", rmsErrorSeconds=0.06)], "more than half of the target of 100 ms per token"),
        ([line("L4", secondsPerStep=90)], "has a coefficient above 60 s"),
        ([line("L4", secondsPerStep=0.2)], "no type keeps the target at any load; L4 comes nearest"),
        ([line("L4") | {"kvTokens": None}], "do not report how many tokens of context they hold"),
        ([line("L4") | {"kvTokens": 300}], "no type keeps the target at any load"),
    ):
        world = one(lines=lines)
        plan = world.run(3, 5.0)
        assert plan.target is None
        assert plan.scaled_by(world.service) is ScaledBy.IN_FLIGHT
        assert why in plan.message, plan.message


def test_a_target_that_no_type_reaches_is_told_with_the_nearest_type_and_its_time_to_the_first_token() -> (
    None
):
    fast, slow = line("L4", secondsPerStep=0.2), line("T4", secondsPerStep=0.4)
    both = (kind("l4", 4.0), kind("t4", 1.0))
    for lines, pools, words in (
        ([slow, fast], both, "L4 comes nearest: alone, with 400 tokens of prompt, it takes 241 ms to the first token"),
        ([fast], both, "; no replica has measured its speed on T4 yet."),
        ([line("L4") | {"kvTokens": 300}], both[:1], "its KV cache holds 300 tokens, and a request has 600."),
    ):  # fmt: skip
        world = one(lines=lines, pools=pools)
        plan = world.run(3, 5.0)
        assert plan.unreachable is not None
        assert plan.unreachable.startswith("No type keeps the target at any load;")
        assert words in plan.unreachable, plan.unreachable
    reachable = one(lines=[line("L4"), slow], pools=both)
    assert reachable.run(3, 5.0).unreachable == "", "one type that keeps it is enough"
    assert one(lines=[]).run(3, 5.0).unreachable is None, "nothing is measured, so nothing is known"
    assert one(lines=[fast]).run(1, 0.0).unreachable is None, "the sizes of requests are not known"


def test_without_sizes_or_a_target_for_the_first_token_requests_in_flight_decide() -> None:
    world = one()
    assert "no request was answered yet" in world.run(1, 0.0).message
    world.spec = {"slo": {"tpotMilliseconds": 100}}
    assert "ttftMilliseconds is not set" in world.run(1, 5.0).message


def test_spec_replicas_is_obeyed_and_giving_it_back_changes_nothing_at_once() -> None:
    world = one()
    rate = each(world)
    world.run(100, 0.5 * rate)
    world.spec = {"replicas": 4}
    world.desired = 4
    for _ in range(3):
        world.start("l4", 0)
    plan = world.run(200, 0.5 * rate)
    assert plan.scaled_by(world.service) is ScaledBy.EXTERNAL
    world.spec = {}
    assert world.run(1, 0.5 * rate).target == {"l4": 4}


def given_back(starting: int = 0) -> tuple[World, float]:
    """A service that was scaled to five from outside, of which some have no pod yet, and needs one."""
    world = one()
    rate = each(world)
    world.run(100, 0.5 * rate)
    world.spec, world.desired, world.rows = {"replicas": 5}, 5, []
    for _ in range(4 - starting):
        world.start("l4", 0)
    world.run(600, 0.5 * rate)
    return world, rate


def test_control_that_returns_lets_nothing_leave_before_a_whole_window_has_passed() -> None:
    world, rate = given_back()
    world.spec = {}
    assert world.run(290, 0.5 * rate).target == {"l4": 5}
    plan = world.run(100, 0.5 * rate)
    assert plan.target == {"l4": 1}
    assert plan.change is not None
    assert plan.change.cause is ScalingCause.IDLE


def test_control_that_returns_keeps_replicas_that_still_wait_for_a_place() -> None:
    world, rate = given_back(starting=2)
    world.spec = {}
    assert world.run(1, 0.5 * rate).target == {"l4": 5}


def test_control_that_returns_while_the_gateway_is_away_changes_nothing() -> None:
    world, rate = given_back()
    world.spec, world.desired = {"replicas": 7}, 7
    world.run(20, None)
    world.spec = {}
    assert world.run(20, None).target is None, "the number stays by the other rule"
    assert world.run(1, 0.5 * rate).target == {"l4": 7}


def test_the_bounds_hold_whatever_the_load() -> None:
    world = one(spec={"maxReplicas": 2})
    rate = each(world)
    assert world.run(120, 8 * rate).target == {"l4": 2}
    world = one(spec={"minReplicas": 3, "maxReplicas": 5})
    plan = world.run(40, 0.1 * rate)
    assert plan.target == {"l4": 3}
    assert plan.change is not None
    assert plan.change.cause is ScalingCause.BOUNDS


def test_of_two_types_the_one_that_carries_the_load_for_less_is_chosen_and_its_stock_is_kept() -> None:
    dear, cheap = kind("l4", 4.0), kind("t4", 1.0, capacity=2)
    world = one(pools=(dear, cheap), lines=[line("L4"), line("T4")])
    rate = each(world)
    plan = world.run(1, 2.4 * rate)
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
    assert world.run(1, 3.4 * rate).target == {"l4": 2, "t4": 2}, "the dear pool gets what the quota forbids"
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


def test_a_load_that_nobody_watched_for_long_lets_nothing_leave_when_it_is_watched_again() -> None:
    world = one()
    rate = each(world)
    high = world.run(400, 2.5 * rate).target
    world.now_s += 900
    world.run(1, None)
    assert world.run(290, 0.2 * rate).target == high
    assert world.run(600, 0.2 * rate).target == {"l4": 1}


@pytest.mark.parametrize("seed", range(4))
def test_any_load_on_any_pools_keeps_the_bounds_and_the_stock(seed: int) -> None:
    rng = random.Random(seed)
    kinds = rng.sample(["l4", "t4", "a100", "h100"], rng.randint(1, 4))
    pools = tuple(kind(k, rng.choice([0.0, 1.0, 4.0]), rng.randint(1, 4)) for k in kinds)
    lines = [line(k.upper(), secondsPerStep=rng.choice([0.01, 0.03])) for k in kinds if rng.random() < 0.8]
    least, most = rng.randint(0, 2), rng.randint(2, 8)
    world = World(
        spec={"minReplicas": least, "maxReplicas": most}, pools=pools, lines=lines or [line(kinds[0].upper())],
        full={k for k in kinds if rng.random() < 0.3},
    )  # fmt: skip
    world.start(kinds[0], 0)
    stock = {p.metadata.name: int(p.status.capacity or 0) for p in pools if p.status is not None}
    for _ in range(12):
        load = rng.choice([0.0, 0.3, 2.0, 9.0, 40.0, None])
        world.overdue = rng.choice([0, 0, 3])
        target = world.run(rng.randint(5, 60), load).target
        if target is not None:
            assert max(least, 1) <= sum(target.values()) <= max(most, 1)
            assert all(count <= max(stock[name], least, 1) for name, count in target.items())


def test_a_service_that_is_late_within_its_capacity_gets_more_replicas_and_says_so() -> None:
    world = one()
    rate = each(world)
    calm = world.run(120, 0.6 * rate).target
    assert calm == {"l4": 1}
    world.kept = 0.9
    plan = world.run(600, 0.6 * rate)
    assert plan.target == {"l4": 2}
    assert "of their computed rate: answers were late below it." in plan.message


def test_a_replica_whose_node_does_not_answer_is_not_counted_so_another_pool_may_be_asked() -> None:
    pods = with_silence((replica(0, pool="l4"), replica(1, pool="l4", node="node-1")), {"node-0"})
    seen = cast("Seen", SimpleNamespace(pods=pods))
    assert (alive(seen), ready(seen)) == ({"l4": 1}, {"l4": 1})


def test_services_are_forgotten_while_another_thread_plans_for_new_ones() -> None:
    world = World()
    fleets, first = world.fleets, world.seen(None)
    news = [replace(first, service=renamed(first.service, f"uid-{number}")) for number in range(1000)]
    before, kept = sys.getswitchinterval(), {seen.service.metadata.uid for seen in news}
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as threads:
            planning = threads.submit(lambda: [fleets.plan(seen) for seen in news])
            while not planning.done():
                fleets.keep(kept)
        planning.result()
    finally:
        sys.setswitchinterval(before)
    assert all(fleets.latest(uid) is not None for uid in kept)
    fleets.keep(["uid-7"])
    assert [uid for uid in kept if fleets.latest(uid) is not None] == ["uid-7"]


def renamed(made: ModelService, uid: str) -> ModelService:
    return made.model_copy(update={"metadata": made.metadata.model_copy(update={"uid": uid})})
