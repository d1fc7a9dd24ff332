"""Which replica a request goes to: by predicted first token, prefix, adapter and load; and what is held back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.parts import House, route
from tests.gateway.test_endpoint_picker import at, owner, picker, service, settle, table

from busbar.gateway.picking import ADAPTER_S, Ask, Candidate, choose, predicted_s
from busbar.gateway.prefix_table import BLOCK_BYTES, PrefixTable, blocks_of
from busbar.kube.contracts.routes import Endpoint, ReplicaSpeed
from busbar.kube.contracts.workload import MOST_RUNNING
from busbar.workloads.serving.scheduler import StepLimits

FAST = ReplicaSpeed(
    per_step_s=0.005, per_sequence_s=0.0001, per_context_token_s=1e-7, per_prompt_token_s=2e-5
)
SLOW = ReplicaSpeed(per_step_s=0.02, per_sequence_s=0.0004, per_context_token_s=4e-7, per_prompt_token_s=8e-5)


def replica(name: str, speed: ReplicaSpeed | None = FAST, **fields: Any) -> Candidate:
    end = Endpoint(pod=name, url=f"http://{name}", ready=True, speed=speed)
    values: dict[str, Any] = {
        "running": 0,
        "prompt_tokens_ahead": 0,
        "context_tokens": 0,
        "prefix": PrefixTable(),
    }
    return Candidate(end, **{**values, **fields})


def name_of(chosen: Candidate | None) -> str:
    return chosen.endpoint.pod if chosen is not None else ""


def text(*parts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": part} for part in parts]}


def chosen(*candidates: Candidate, ask: Ask = Ask(1000), seed: int = 0) -> str:  # noqa: B008
    return name_of(choose(candidates, ask, random.Random(seed)))


def test_the_fast_replica_is_taken_until_its_queue_costs_more_than_its_speed_saves() -> None:
    assert chosen(replica("fast"), replica("slow", SLOW)) == "fast"
    assert chosen(replica("fast", prompt_tokens_ahead=2000), replica("slow", SLOW)) == "fast"
    assert chosen(replica("fast", prompt_tokens_ahead=8000), replica("slow", SLOW)) == "slow"


def test_a_prompt_follows_its_prefix_until_that_costs_more_than_it_saves() -> None:
    blocks = blocks_of({"prompt": "x" * 40 * BLOCK_BYTES})
    warm = PrefixTable()
    warm.add(blocks)
    ask = Ask(40 * 64 + 20, blocks=blocks)
    assert chosen(replica("warm", prefix=warm, running=3), replica("cold"), ask=ask) == "warm"
    assert chosen(replica("warm", prefix=warm, prompt_tokens_ahead=2000), replica("cold"), ask=ask) == "warm"
    assert chosen(replica("warm", prefix=warm, prompt_tokens_ahead=4000), replica("cold"), ask=ask) == "cold"


def test_an_adapter_stays_where_it_is_loaded_until_the_queue_there_is_longer_than_loading() -> None:
    ask = Ask(100, adapter="sql")
    loaded = frozenset({"sql"})
    assert chosen(replica("a"), replica("b", adapters=loaded, running=5), ask=ask) == "b"
    busy = replica("b", adapters=loaded, prompt_tokens_ahead=int(2 * ADAPTER_S / FAST.per_prompt_token_s))
    assert chosen(replica("a"), busy, ask=ask) == "a"


def test_without_speeds_the_idler_of_two_is_taken_and_a_prefix_followed_while_it_is_not_much_busier() -> None:
    many = [replica(str(n), None, running=n) for n in range(6)]
    taken = Counter(chosen(*many, seed=seed) for seed in range(300))
    assert taken["0"] > taken["1"] > taken["3"]
    assert taken["5"] == 0, "the busiest of two is never taken"
    blocks = blocks_of({"prompt": "x" * 10 * BLOCK_BYTES})
    warm = PrefixTable()
    warm.add(blocks)
    ask = Ask(640, blocks=blocks)
    for running, name in ((8, "warm"), (9, "cold")):
        both = replica("warm", None, running=running, prefix=warm), replica("cold", None)
        assert chosen(*both, ask=ask) == name


def test_nobody_is_chosen_of_nobody() -> None:
    assert choose([], Ask(), random.Random(0)) is None


def test_a_conversation_shares_the_blocks_of_its_former_turns() -> None:
    first = blocks_of(text("a" * 1000, "b" * 1000), "tenant")
    second = blocks_of(text("a" * 1000, "b" * 1000, "c" * 500), "tenant")
    assert second[: len(first)] == first
    assert len(second) > len(first) > 5
    table = PrefixTable()
    table.add(first)
    assert table.found(second) == len(first)


@pytest.mark.parametrize(
    ("document", "salt"),
    [
        (text("a" * 1000), ("other",)),
        (text("a" * 1000), ("tenant", "adapter")),
        ({**text("a" * 1000), "cache_salt": "s"}, ("tenant",)),
        ({**text("a" * 1000), "tools": [{"type": "function"}]}, ("tenant",)),
    ],
)
def test_blocks_of_another_tenant_adapter_salt_or_tools_are_others(
    document: dict[str, Any], salt: tuple[str, ...]
) -> None:
    table = PrefixTable()
    table.add(blocks_of(text("a" * 1000), "tenant"))
    assert blocks_of(document, *salt)
    assert table.found(blocks_of(document, *salt)) == 0


@pytest.mark.parametrize("prompt", [None, 5, "", [], [1, -2], [2**40], ["a", 3], {"a": 1}, [[1], "b", None]])
def test_no_prompt_breaks_the_blocks(prompt: object) -> None:
    blocks_of({"prompt": prompt, "messages": prompt, "tools": prompt, "cache_salt": prompt})


def test_the_least_recently_used_blocks_leave_and_of_a_prompt_the_last_first() -> None:
    table = PrefixTable()
    table.most = 6
    old, new = blocks_of({"prompt": [1] * 256}), blocks_of({"prompt": [2] * 256})
    table.add(old)
    table.add(new)
    assert len(table) == 6
    assert (table.found(new), table.found(old)) == (4, 2)


@given(
    st.integers(0, 200),
    st.integers(0, 10**5),
    st.integers(0, 10**6),
    st.integers(1, 10**5),
    st.integers(0, 100),
)
def test_more_to_do_never_makes_the_first_token_come_sooner(
    running: int, ahead: int, context: int, prompt: int, more: int
) -> None:
    ask = Ask(prompt)
    base = predicted_s(
        replica("a", running=running, prompt_tokens_ahead=ahead, context_tokens=context), FAST, ask
    )
    for changed in (
        replica("a", running=running + more, prompt_tokens_ahead=ahead, context_tokens=context),
        replica("a", running=running, prompt_tokens_ahead=ahead + more, context_tokens=context),
        replica("a", running=running, prompt_tokens_ahead=ahead, context_tokens=context + more),
    ):
        assert predicted_s(changed, FAST, ask) >= base > 0


async def test_what_a_replica_cannot_run_soon_waits_here() -> None:
    here, one = (
        picker(replica_in_flight=128, hold_limit=100, hold_limit_per_user=100),
        table(*at("a", mostRunning=8)),
    )
    here.update(one)
    tasks = [asyncio.create_task(here.enter(service(one), owner("u"), 1e9)) for _ in range(20)]
    await settle()
    assert [(d.waiting, d.in_flight) for d in here.demand()] == [(10, 10)]
    done = [task.result() for task in tasks if task.done()]
    here.leave(done[0])
    await settle()
    assert [(d.waiting, d.in_flight) for d in here.demand()] == [(9, 10)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_last_places_are_for_owners_who_were_served_less() -> None:
    limits: dict[str, Any] = {"replica_in_flight": 128, "hold_limit": 100, "hold_limit_per_user": 100}
    here, one = picker(**limits), table(*at("a", mostRunning=8))
    here.update(one)
    first = here.enter(service(one), owner("light"), 1e9, ask=Ask(10))
    here.leave(await first)
    heavy = [
        asyncio.create_task(here.enter(service(one), owner("heavy"), 1e9, ask=Ask(500))) for _ in range(12)
    ]
    await settle()
    assert sum(task.done() for task in heavy) == 8, "of nine places one is kept"
    light = asyncio.create_task(here.enter(service(one), owner("light"), 1e9, ask=Ask(10)))
    await settle()
    assert light.done()
    for task in heavy:
        task.cancel()
    await asyncio.gather(*heavy, return_exceptions=True)


async def test_what_does_not_fit_into_the_kv_cache_waits_here_and_one_request_always_goes() -> None:
    here, one = picker(replica_in_flight=128), table(*at("a", kvTokens=1000))
    here.update(one)
    big = Ask(5000)
    first = await here.enter(service(one), owner("u"), 1e9, ask=big)
    second = asyncio.create_task(here.enter(service(one), owner("u"), 1e9, ask=Ask(10)))
    await settle()
    assert not second.done()
    here.leave(first)
    third = asyncio.create_task(here.enter(service(one), owner("u"), 1e9, ask=Ask(1000, 10)))
    await settle()
    assert second.done()
    assert third.done()
    here.leave(await second)
    here.leave(await third)


async def test_the_prefix_decides_between_two_replicas_over_http(house: House) -> None:
    speed = {"perStepS": 0.005, "perSequenceS": 0.0001, "perContextTokenS": 1e-7, "perPromptTokenS": 2e-5}
    engines = [await house.engine("a"), await house.engine("a")]
    ends = [{"pod": f"m-{n}", "url": e.url, "ready": True, "speed": speed} for n, e in enumerate(engines)]
    apples, trains = "apples " * 600, "trains " * 600
    await house.publish(route("m", ends[1]))
    await house.ask(prompt=apples)
    await house.publish(route("m", *ends))
    await house.ask(prompt=trains)
    for _ in range(3):
        for prompt in (apples, trains):
            await house.ask(prompt=prompt + str(random.random()))
    places = [Counter(body["prompt"].split()[0] for body in engine.bodies) for engine in engines]
    assert places == [{"trains": 4}, {"apples": 4}]


async def test_a_model_server_that_orders_by_priority_gets_the_rank_of_the_owner(house: House) -> None:
    engine = await house.engine("a", "b", "c")
    await house.publish(route("m", engine, ranked=True), route("plain", engine))
    assert (await house.ask(priority=-7))[0] == 200
    assert engine.bodies[-1]["priority"] == 0, "what the client says counts nothing"
    await house.ask("plain")
    await house.ask("plain", priority=3)
    assert [body.get("priority") for body in engine.bodies[-2:]] == [None, 3]


def test_our_engine_computes_as_many_requests_together_as_the_routes_say() -> None:
    assert StepLimits().max_running == MOST_RUNNING
