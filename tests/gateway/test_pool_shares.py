"""Requests of a service with replicas in several pools go by the shares that the routes give for their class of prompts."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from tests.gateway.test_endpoint_picker import Clock, at, owner, picker, service, table
from tests.gateway.test_picking import FAST, SLOW

from busbar.gateway.endpoint_picker import EndpointPicker
from busbar.gateway.picking import Ask
from busbar.gateway.prefix_table import BLOCK_BYTES, blocks_of
from busbar.gateway.routes import RouteTable

SHORT, LONG = Ask(prompt_tokens=100, output_tokens=50), Ask(prompt_tokens=3000, output_tokens=50)
SHARES = [{"prompt": 1, "pools": {"l4": 0.75, "h100": 0.25}}, {"prompt": 5, "pools": {"h100": 1.0}}]
TARGET = {"ttftMs": 2000, "tpotMs": 100}


def routes(shares: list[dict[str, Any]] = SHARES, **pools: dict[str, Any]) -> RouteTable:
    """One replica in each pool, `h100` much faster than `l4`."""
    ends = []
    for pool, speed in (("l4", SLOW), ("h100", FAST)):
        ends += at(pool, pool=pool, speed=speed.model_dump(by_alias=True), **pools.get(pool, {}))
    return table(*ends, shares=shares, slo=TARGET)


def here(known: RouteTable, **limits: Any) -> EndpointPicker:
    made = picker(Clock(), **{"replica_in_flight": 1000, **limits})
    made.update(known)
    return made


async def sent(
    to: EndpointPicker, known: RouteTable, ask: Ask, count: int, leave: bool = True
) -> Counter[str]:
    """Where so many requests go, each of which ends before the next one comes."""
    found: Counter[str] = Counter()
    for _ in range(count):
        lease = await to.enter(service(known), owner("u"), 130.0, ask=ask)
        found[lease.endpoint.pool] += 1
        if leave:
            to.leave(lease)
    return found


async def test_each_class_of_prompts_goes_by_its_own_shares() -> None:
    known = routes()
    to = here(known)
    assert await sent(to, known, SHORT, 200) == {"l4": 150, "h100": 50}
    assert await sent(to, known, LONG, 50) == {"h100": 50}


async def test_without_shares_the_fast_pool_gets_all_that_does_not_queue_there() -> None:
    known = routes([])
    assert await sent(here(known), known, SHORT, 50) == {"h100": 50}
    other = Ask(prompt_tokens=400)  # its class is not in the shares
    assert await sent(here(routes()), routes(), other, 50) == {"h100": 50}


async def test_the_shares_of_several_gateways_add_up_without_a_word_between_them() -> None:
    known = routes()
    gateways, rng = [here(known) for _ in range(3)], random.Random(4)
    total: Counter[str] = Counter()
    for _ in range(400):
        total += await sent(rng.choice(gateways), known, SHORT, 1)
    assert abs(total["l4"] - 300) <= 2 * len(gateways)


@pytest.mark.parametrize("fields", [{"ready": False}, {"draining": True}])
async def test_the_others_take_over_while_a_pool_is_not_ready(fields: dict[str, Any]) -> None:
    known = routes(h100=fields)
    to = here(known)
    assert await sent(to, known, SHORT, 20) == {"l4": 20}
    assert await sent(to, known, LONG, 20) == {"l4": 20}, "nobody else can serve it, within the target or not"
    back = routes()
    to.update(back)
    assert await sent(to, back, SHORT, 100) == {"l4": 75, "h100": 25}, "what it missed is not made up for"


async def test_a_failed_pool_is_left_out_until_its_suspicion_ends() -> None:
    known = routes()
    to = here(known)
    lease = await to.enter(service(known), owner("u"), 130.0, ask=LONG)
    to.leave(lease, suspect=True)
    assert await sent(to, known, SHORT, 20) == {"l4": 20}


async def test_a_full_pool_is_no_reason_to_wait_while_another_has_room() -> None:
    known = routes()
    to = here(known, replica_in_flight=10)
    assert await sent(to, known, SHORT, 20, leave=False) == {"l4": 10, "h100": 10}


async def test_a_pool_whose_prompts_wait_for_half_of_the_target_is_passed_over() -> None:
    known = routes([{"prompt": 5, "pools": {"l4": 1.0, "h100": 0.0}}])
    to = here(known)
    found = await sent(to, known, LONG, 6, leave=False)
    # A prompt of 3,000 tokens takes the slow replica 0.24 s, and 0.38 s beside the decoding of three requests (26 ms of a step whose
    # 512 prompt tokens take 41 ms): after three of them the next would wait 1.2 s of 1 s.
    assert found == {"l4": 3, "h100": 3}


async def test_a_conversation_stays_where_its_prefix_is_and_others_make_up_for_it() -> None:
    known = routes([{"prompt": 3, "pools": {"l4": 0.5, "h100": 0.5}}])
    to = here(known)
    text = blocks_of({"prompt": "x" * 10 * BLOCK_BYTES})
    talk = Ask(prompt_tokens=640, output_tokens=50, blocks=text)
    [first] = await sent(to, known, talk, 1)
    assert await sent(to, known, talk, 4) == {first: 4}
    plain = await sent(to, known, Ask(prompt_tokens=640, output_tokens=50), 45)
    assert plain == {first: 20, "l4" if first == "h100" else "h100": 25}


def test_the_gateway_loads_neither_the_planner_nor_numpy_for_it() -> None:
    code = "import busbar.gateway.pool_shares, sys; print('numpy' in sys.modules, 'busbar.scheduler.planner' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "False"]
