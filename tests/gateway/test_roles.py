"""Replicas with roles: where prompts are computed, where streams go on, and what happens when either side dies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.gateway.parts import Engine, House, route, text_of
from tests.gateway.test_endpoint_picker import at, owner, picker, service, table
from tests.gateway.test_picking import FAST, SLOW, replica
from tests.gateway.test_resume import numbered

from busbar.gateway.picking import Ask, Candidate
from busbar.gateway.prefix_table import BLOCK_BYTES, PrefixTable, blocks_of
from busbar.gateway.roles import destinations, for_prompts
from busbar.kube.contracts.routes import ReplicaSpeed
from busbar.kube.contracts.streams import TERMS_HEADER
from busbar.kube.contracts.workload import ReplicaRole

STALL_S = 0.05
LONG = Ask(4000, moves=True)
"""0.08 s of prompt at a fast replica."""


def one(name: str, role: ReplicaRole, speed: ReplicaSpeed | None = FAST, **fields: Any) -> Candidate:
    found = replica(name, speed, **fields)
    kv_tokens = fields.get("kv_tokens", 100_000)
    end = found.endpoint.model_copy(update={"role": role, "kv_tokens": kv_tokens})
    return Candidate(end, found.running, found.prompt_tokens_ahead, found.context_tokens, found.prefix)


def prefill(name: str = "prefill", **fields: Any) -> Candidate:
    return one(name, ReplicaRole.PREFILL, **fields)


def decode(name: str = "decode", **fields: Any) -> Candidate:
    return one(name, ReplicaRole.DECODE, **fields)


def names(*candidates: Candidate, ask: Ask = LONG) -> list[str]:
    return [c.endpoint.pod for c in for_prompts(candidates, ask, STALL_S)]


def test_a_long_prompt_goes_where_prompts_are_computed() -> None:
    assert names(prefill(), decode(running=4)) == ["prefill"]
    assert names(prefill(), decode()) == ["prefill"], "it would hold up the next stream"


def test_a_short_prompt_goes_to_where_its_stream_goes_on() -> None:
    assert names(prefill(), decode(running=4), ask=Ask(100, moves=True)) == ["decode"]


def test_a_prompt_that_is_cached_but_for_a_little_pays_no_handing_over() -> None:
    blocks = blocks_of({"prompt": "x" * 60 * BLOCK_BYTES})
    warm = PrefixTable()
    warm.add(blocks)
    ask = Ask(60 * 64 + 50, blocks=blocks, moves=True)
    assert names(prefill(), decode(running=4), ask=ask) == ["prefill"]
    assert names(prefill(), decode(running=4, prefix=warm), ask=ask) == ["decode"]
    assert names(prefill(prefix=warm), decode(running=4), ask=ask) == ["prefill"]


def test_a_prompt_goes_to_one_that_decodes_where_the_others_would_make_it_wait_longer_than_it_delays() -> (
    None
):
    def busy(ahead: int) -> list[str]:
        return names(prefill(prompt_tokens_ahead=ahead), decode(running=3))

    assert busy(4000) == ["prefill"]
    assert busy(40_000) == ["decode"]


def test_an_answer_that_cannot_move_is_not_charged_for_moving() -> None:
    ask = Ask(500)
    assert names(prefill(), decode(running=3), ask=ask) == ["prefill"]
    assert names(prefill(), decode(running=3), ask=Ask(500, moves=True)) == ["decode"]


def test_one_that_has_never_computed_a_prompt_does_not_look_free() -> None:
    unknown = FAST.model_copy(update={"per_prompt_token_s": 0.0})
    assert names(prefill(), decode(speed=unknown)) == ["prefill"]


def test_without_speeds_prompts_go_to_those_that_compute_them() -> None:
    assert names(prefill(speed=None), decode()) == ["prefill"]
    assert names(prefill(), decode(speed=None)) == ["prefill"]


def test_where_only_one_kind_can_take_a_request_it_does() -> None:
    assert names(decode("a"), decode("b")) == ["a", "b"]
    assert names(prefill("a")) == ["a"]


def test_replicas_of_both_roles_compute_prompts_without_handing_over() -> None:
    both = one("both", ReplicaRole.BOTH)
    assert names(prefill(), both, decode(running=9)) == ["prefill", "both"]
    assert names(both, one("b", ReplicaRole.BOTH)) == ["both", "b"]


def to(*candidates: Candidate) -> list[str]:
    return [url.removeprefix("http://") for url in destinations(candidates, LONG)]


def test_streams_go_where_a_token_is_predicted_to_take_the_shortest_time_then_to_the_most_free_blocks() -> (
    None
):
    assert to(decode("a", running=40, context_tokens=40_000), decode("b", running=2)) == ["b", "a"]
    assert to(decode("slow", speed=SLOW), decode("fast", running=9)) == ["fast", "slow"]
    assert to(decode("a", context_tokens=300), decode("b", context_tokens=200)) == ["b", "a"]
    assert to(decode("a", speed=None, running=2), decode("b", running=1)) == ["b", "a"]


def test_streams_go_to_no_replica_that_computes_prompts_only_and_to_at_most_three() -> None:
    assert to(prefill()) == []
    assert to(one("both", ReplicaRole.BOTH), prefill()) == ["both"]
    assert len(to(*(decode(str(number)) for number in range(5)))) == 3


async def test_a_place_is_kept_for_a_stream_that_is_on_its_way() -> None:
    roles = table(
        *at("p", role="prefill", mostRunning=8),
        *at("d", role="decode", mostRunning=2),
        *at("e", role="decode", mostRunning=1),
    )
    here = picker(replica_in_flight=8)
    here.update(roles)
    leases = [await here.enter(service(roles), owner(str(n)), 130.0, ask=LONG) for n in range(4)]
    assert [lease.endpoint.pod for lease in leases] == ["p"] * 4
    first = [lease.work.to[:1] for lease in leases]
    assert sorted(first[:3]) == [("http://d",), ("http://d",), ("http://e",)]
    assert first[3] == (), "nobody has room: it is decoded where its prompt is computed"
    here.leave(leases[0])
    again = await here.enter(
        service(roles), owner("0"), 130.0, ask=LONG, again=True, prefer=leases[0].work.to[0]
    )
    assert again.endpoint.url == leases[0].work.to[0]
    assert again.work.to == ()


async def test_the_measured_stall_decides_what_is_handed_over() -> None:
    speed = FAST.model_dump(by_alias=True)
    roles = table(
        *at("p", role="prefill", mostRunning=9, speed=speed),
        *at("d", role="decode", mostRunning=9, speed=speed),
    )
    here = picker(replica_in_flight=9)
    here.update(roles)
    ask = Ask(1500, moves=True)
    before = await here.enter(service(roles), owner("a"), 130.0, ask=ask)
    here.leave(before)
    for _ in range(200):
        here.moved(service(roles), 0.0)
    after = await here.enter(service(roles), owner("a"), 130.0, ask=ask)
    assert (before.endpoint.pod, after.endpoint.pod) == ("d", "p")


def with_role(engine: Engine, role: str) -> dict[str, Any]:
    return {"pod": engine.url, "url": engine.url, "ready": True, "draining": False, "role": role}


def told(engine: Engine, request: int = 0) -> list[str]:
    """The destinations that a replica got with a request."""
    found: list[str] = json.loads(engine.seen_headers[request][TERMS_HEADER])["handOver"]
    return found


@pytest.fixture
async def house(house: House) -> House:
    """A replica that has failed gets no second request."""
    await house.stop_gateway()
    house.overrides.update(suspect_s=60.0, suspect_max_s=60.0)
    await house.start_gateway()
    return house


async def test_a_stream_is_handed_over_once_and_counted_once(house: House) -> None:
    first, second = await numbered(house), await numbered(house)
    first.leaves_at, first.moves_to = 1, second.url
    await house.publish(route("m", with_role(second, "decode"), with_role(first, "prefill")))
    stream = await house.stream()
    assert (text_of(stream), stream[-1]) == ("abcd", "[DONE]")
    assert told(first) == [second.url]
    assert told(second) == []
    assert second.bodies[0]["choices"] == [{"tokens": [100], "ended": False}]
    await house.api.wait_for(1)
    assert house.api.total("id-a") == (1, 7, 4)


async def test_where_the_first_dies_before_the_commit_the_stream_is_computed_where_prompts_are(
    house: House,
) -> None:
    first, spare, last = [await numbered(house) for _ in range(3)]
    first.die_at = 1
    spare.leaves_at, spare.moves_to = 2, last.url
    await house.publish(
        route("m", with_role(first, "prefill"), with_role(spare, "prefill"), with_role(last, "decode"))
    )
    assert text_of(await house.stream()) == "abcd"
    assert (told(first), told(spare)) == ([last.url], [last.url])
    assert spare.bodies[0]["choices"] == [{"tokens": [100], "ended": False}]


@pytest.mark.parametrize("dies_at", [0, 1])
async def test_where_the_only_one_for_prompts_dies_another_role_computes_them(
    house: House, dies_at: int
) -> None:
    first, second = await numbered(house, dies_at=dies_at), await numbered(house)
    await house.publish(route("m", with_role(first, "prefill"), with_role(second, "decode")))
    assert text_of(await house.stream()) == "abcd"
    assert text_of(await house.stream()) == "abcd"
    assert told(second, 1) == []


async def test_where_the_second_dies_behind_the_commit_the_stream_goes_back_and_on_to_a_third(
    house: House,
) -> None:
    first, second, third = [await numbered(house) for _ in range(3)]
    first.leaves_at, first.moves_to = 1, second.url
    second.die_at = 3
    await house.publish(
        route("m", with_role(first, "prefill"), with_role(second, "decode"), with_role(third, "decode"))
    )
    first_ask = house.stream()
    second.arrived.clear()

    async def goes_on() -> None:
        await second.arrived.wait()
        first.leaves_at, first.moves_to = 3, third.url

    stream, _ = await asyncio.gather(first_ask, goes_on())
    assert text_of(stream) == "abcd"
    assert told(first, 0) == [second.url, third.url]
    assert told(first, 1) == [third.url]
    await house.api.wait_for(1)
    assert house.api.total("id-a") == (1, 7, 4)


async def test_whole_answers_and_services_without_roles_hand_nothing_over(house: House) -> None:
    first, second = await numbered(house), await numbered(house)
    await house.publish(route("m", with_role(first, "prefill"), with_role(second, "decode")))
    status, _ = await house.ask()
    assert (status, told(first), second.bodies) == (200, [], [])
    await house.publish(route("m", with_role(first, "both"), with_role(second, "both")))
    assert text_of(await house.stream()) == "abcd"
    assert told(first, 1) == []
