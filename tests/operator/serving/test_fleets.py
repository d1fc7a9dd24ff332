"""Replicas by the latency target, second by second with a fake clock: demand in, target by pool out."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from tests.operator.builders import replica
from tests.operator.serving.fleet_world import World, each, kind, line, one

from busbar.kube.types import ModelService
from busbar.kube.types.service_status import ScaledBy, ScalingCause
from busbar.operator.pods.silent_nodes import with_silence
from busbar.operator.serving.fleet_input import Seen, alive, ready
from busbar.operator.serving.fleets import Fleets
from busbar.operator.serving.history import Load
from busbar.scheduler.autoscale.day_profile import BIN_S, BINS, DayProfile


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
    plan = world.run(1, 1.95 * rate)
    assert plan.target == {"l4": 3}, "0.95 of it waits for a start of a minute, and is worked off in another"
    assert plan.change is not None
    assert plan.change.cause is ScalingCause.PANIC
    assert "last ten seconds" in plan.change.reason
    assert plan.over_since_s == world.now_s
    assert world.plans[-2].over_since_s is None
    assert world.run(1, 1.95 * rate).over_since_s is None, "those that start count"


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
