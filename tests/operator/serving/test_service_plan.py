"""The cheapest replicas of a service for a stated load, from what is measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError
from tests.operator.builders import service
from tests.operator.serving.fleet_world import SLO, World, kind, line, one
from tests.operator.serving.test_power_caps import DRAW, PROFILE

from busbar.kube.contracts.demand import ServiceDemand, SizeCount, WindowDemand
from busbar.kube.contracts.service_plan import ServicePlanAnswer, ServicePlanRequest
from busbar.kube.types import AcceleratorPool
from busbar.operator.serving.fleets import Fleets
from busbar.operator.serving.service_plan import service_plan
from busbar.operator.serving.sizes import Sizes
from busbar.scheduler.autoscale.columns import LimitKind, Row
from busbar.scheduler.explain.service_room import ServiceRoom

L4, T4 = kind("l4", 4.0), kind("t4", 1.0, capacity=2)
BOTH: dict[str, Any] = {"pools": (L4, T4), "lines": [line("L4"), line("T4")]}


def answer(world: World, rate: float, trust: float = 1.0, **asked: Any) -> ServicePlanAnswer:
    sizes = Sizes()
    count = SizeCount(prompt=2, output=3, count=10, prompt_tokens=4000, output_tokens=2000)
    sizes.learn([count], 0.0)
    question = ServicePlanRequest(namespace="team", name="web", rate=rate, **asked)
    return service_plan(world.seen(1.0), sizes, trust, question)


def each(world: World) -> float:
    return answer(world, 0.1).pools[0].requests_per_second


def test_the_mix_fills_the_cheap_pool_first_and_names_prices_and_what_one_pool_alone_needs() -> None:
    world = one(**BOTH)
    found = answer(world, 3.5 * each(world))
    assert found.possible
    assert found.reason.startswith("4 replicas carry ")
    assert [(p.pool, p.accelerator, p.replicas, p.cost_per_hour, p.alone) for p in found.pools] == [
        ("l4", "L4", 2, 4.0, 4), ("t4", "T4", 2, 1.0, None),
    ]  # fmt: skip
    assert found.cost_per_hour == 10.0
    assert (found.ttft_milliseconds, found.tpot_milliseconds, found.percentile) == (2000, 100, 99)
    assert (found.prompt_tokens, found.output_tokens) == (400, 200)


def test_a_harder_target_needs_more_and_one_out_of_reach_is_refused_with_the_nearest_type() -> None:
    world = one(pools=(L4,))
    rate = 3.5 * each(world)
    assert sum(p.replicas for p in answer(world, rate, tpot_milliseconds=25).pools) > 4
    lax = answer(world, rate, percentile=50)
    assert sum(p.replicas for p in lax.pools) <= 4
    never = answer(world, rate, ttft_milliseconds=10)
    assert (never.possible, never.pools) == (False, ())
    assert never.reason.startswith("No type keeps the target at any load; L4 comes nearest: ")
    assert never.ttft_milliseconds == 10


def test_more_than_the_pools_hold_says_how_much_they_carry() -> None:
    world = one(pools=(T4,), lines=[line("T4")])
    found = answer(world, 4 * each(world))
    assert (found.possible, found.pools[0].replicas, found.pools[0].alone) == (False, 2, None)
    assert "hold too little: 2 replicas carry 50 % of " in found.reason


def test_quota_power_and_what_others_hold_are_in_the_plan() -> None:
    world = one(**BOTH, spec={"scaling": {"maxCostPerHour": 5.0}})
    rate = 3.5 * each(world)
    quota, power = (
        Row("the tenant's quota of L4", {"l4": 1.0}, 1.0, LimitKind.QUOTA),
        Row("the power of domain a", {"l4": 60.0}, 90.0, LimitKind.POWER),
    )
    world.room = ServiceRoom({"l4": 16, "t4": 1}, (quota, power))
    found = answer(world, rate)
    assert [(p.pool, p.replicas) for p in found.pools] == [("l4", 1), ("t4", 1)]
    assert found.reason.startswith(
        "The tenant's quota of L4 and the power of domain a allow no more: 2 replicas carry 57 % of "
    )
    assert "Work of others that can be stopped counts as room" in found.notes[-1]
    world.room = ServiceRoom({"l4": 16, "t4": 0}, ())
    found = answer(world, rate)
    assert [(p.replicas, p.alone) for p in found.pools] == [(4, 4), (0, None)]
    assert found.notes[-2] == "spec.scaling.maxCostPerHour allows 5; this mix costs 16."


def test_where_watts_bind_the_plan_has_replicas_under_caps_and_says_so() -> None:
    feed = Row("the power of domain a", {"l4": 60.0}, 130.0, LimitKind.POWER)
    world = one(profiles=(PROFILE,), room=ServiceRoom({"l4": 16}, (feed,), boards={"l4": DRAW}))
    rate = each(world)
    found = answer(world, 3.2 * rate)
    assert (found.possible, [(p.pool, p.replicas, p.alone) for p in found.pools]) == (True, [("l4", 4, 4)])
    assert found.pools[0].requests_per_second < rate
    assert found.notes[0] == "Boards of pool l4 are limited to 60 % of their watts."
    free = answer(world, 1.9 * rate)
    assert ([p.replicas for p in free.pools], free.notes[0][:6]) == ([2], "Work o"), (
        "two carry it at full power"
    )
    world.profiles = ()
    without = answer(world, 3.2 * rate)
    assert (without.possible, [p.replicas for p in without.pools]) == (False, [2])


def test_a_type_that_reaches_the_target_never_has_no_part_and_carries_nothing_alone() -> None:
    world = one(pools=(L4, T4), lines=[line("L4"), line("T4", secondsPerStep=0.5)])
    fast, slow = answer(world, 3.5 * each(world)).pools
    assert (fast.replicas, fast.alone) == (4, 4)
    assert (slow.replicas, slow.alone, slow.requests_per_second) == (0, None, 0.0)


def test_prompts_that_no_type_serves_in_time_are_told_and_the_plan_is_not_whole() -> None:
    sizes = Sizes()
    short = SizeCount(prompt=2, output=3, count=9, prompt_tokens=3600, output_tokens=1800)
    sizes.learn([short, SizeCount(prompt=7, output=3, count=1, prompt_tokens=30_000, output_tokens=200)], 0.0)
    asked = ServicePlanRequest(namespace="team", name="web", rate=4.0)
    found = service_plan(one(pools=(L4,)).seen(1.0), sizes, 1.0, asked)
    assert not found.possible
    assert "carry 90 % of 4 requests/s within the target; no type keeps it for the others" in found.reason
    assert "prompts of 30000 tokens" in found.reason
    assert (found.pools[0].replicas > 0, found.pools[0].alone) == (True, None)


def test_what_is_not_known_is_said() -> None:
    free = kind("h100", 0.0)
    unseen: AcceleratorPool = L4.model_validate({k: v for k, v in L4.to_wire().items() if k != "status"})
    world = one(pools=(unseen, free), spec={"maxReplicas": 1})
    found = answer(world, 2.5 * each(world), trust=0.9)
    assert found.notes[:-1] == (
        "No replica has measured its speed on H100 yet.",
        "The capacity of pool l4 is not known yet.",
        "Not every pool has a pricePerHour; the types' exchange rates stand in, and no cost is told.",
        "Replicas count for 90 % of their computed rate: answers were late below it.",
        "spec.maxReplicas allows 1; this mix has 3.",
    )
    assert (found.cost_per_hour, found.pools[0].cost_per_hour) == (None, None)
    assert "Quota" in found.notes[-1]


def test_without_a_target_sizes_or_speeds_there_is_no_mix_and_a_sentence_why() -> None:
    bare = one(spec={"slo": None})
    assert "has not both times" in answer(bare, 5.0).reason
    assert answer(bare, 5.0, ttft_milliseconds=2000, tpot_milliseconds=100).possible
    assert answer(one(lines=[]), 5.0).reason == "No replica has measured its speed on L4 yet."
    asked = ServicePlanRequest(namespace="team", name="web", rate=5.0)
    assert "sizes of requests are not known" in service_plan(one().seen(1.0), Sizes(), 1.0, asked).reason


def test_the_fewest_replicas_are_those_of_the_spec() -> None:
    found = answer(one(spec={"minReplicas": 3}), 0.1)
    assert found.pools[0].replicas == 3


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, 2e6])
def test_a_rate_that_is_no_load_is_refused(rate: float) -> None:
    with pytest.raises(ValidationError):
        ServicePlanRequest(namespace="team", name="web", rate=rate)


def test_sizes_are_those_that_scaling_learned_or_of_the_last_minutes_without_a_target() -> None:
    world = one()
    world.run(20, 5.0)
    sizes, trust = world.fleets.outlook(world.service.metadata.uid, None)
    assert (sizes.known, trust) == (True, 1.0)
    count = SizeCount(prompt=1, output=1, count=4, prompt_tokens=800, output_tokens=40)
    demand = ServiceDemand(
        namespace="team", name="web", windows=[WindowDemand(seconds=180, arrivals=4, sizes=[count])]
    )
    fresh, _ = Fleets().outlook(service(slo=SLO).metadata.uid, demand)
    assert fresh.means[1].prompt_tokens == 200
    assert not Fleets().outlook("x", None)[0].known


def test_a_reserve_for_the_loss_of_a_zone_is_in_the_mix_or_the_notes_say_what_is_missing() -> None:
    world = one(**BOTH, spec={"minReplicas": 2, "scaling": {"minZones": 2, "zoneReserve": 1.0}})
    rate = 1.5 * each(world)
    world.room = ServiceRoom({"l4": 9, "t4": 2}, (), {"l4": "a", "t4": "b"})
    found = answer(world, rate)
    assert [(p.pool, p.replicas) for p in found.pools] == [("l4", 2), ("t4", 2)]
    assert not any("zoneReserve" in note for note in found.notes)
    world.room = ServiceRoom({"l4": 9, "t4": 1}, (), {"l4": "a", "t4": "b"})
    [note] = [note for note in answer(world, rate).notes if "zoneReserve" in note]
    assert note == (
        "scaling.zoneReserve is 1, and there is room for replicas that carry 67 % of the load without zone a."
    )
