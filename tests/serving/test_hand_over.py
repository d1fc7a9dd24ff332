"""Streams that a replica of the role prefill hands to another one at their first token; the test is the gateway."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.serving.engines import load_engine
from tests.serving.inside import serving_inside
from tests.serving.models import save_model
from tests.serving.processes import Service
from tests.serving.test_migration import BODY, HEADERS, LAYERS, Gateway, Got, computed, dying, wait_for

from busbar.kube.contracts.streams import TERMS_HEADER
from busbar.kube.contracts.workload import TENANT_HEADER, ReplicaRole
from busbar.workloads.serving import migrate_out
from busbar.workloads.serving.errors import Overloaded
from busbar.workloads.serving.handover import Handover, LeftError, Stage
from busbar.workloads.serving.migrate_in import Arrivals
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.settings import EngineSettings

SAMPLED = {**BODY, "max_tokens": 60, "temperature": 0.9, "seed": 5, "logprobs": 1}
NOWHERE = "http://127.0.0.1:9"
CHUNK = 32
"""Prompt tokens of a step: two blocks."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("roles")
    save_model(folder, num_hidden_layers=LAYERS)
    return EngineSettings(folder, block_tokens=16, threads=1, deterministic=True, max_batched_tokens=CHUNK)


@pytest.fixture(scope="module")
def pair(settings: EngineSettings) -> Iterator[tuple[Service, Service]]:
    with (
        serving_inside(settings, "m", role=ReplicaRole.PREFILL) as prefill,
        serving_inside(settings, "m", role=ReplicaRole.DECODE) as decode,
    ):
        yield prefill, decode


def terms(*to: str) -> dict[str, str]:
    sent = {"seed": 11, "created": 1_700_000_000, "usage": "last", "moves": True, "handOver": list(to)}
    return {**HEADERS, TERMS_HEADER: json.dumps(sent)}


def alone(server: Service, body: dict[str, Any]) -> Got:
    """The answer of one replica that shares no block with the others of this file."""
    return Gateway(server, body, {**HEADERS, TENANT_HEADER: "alone"}).finish()


def outcomes(server: Service, outcome: str) -> float:
    text = server.get("/metrics")[2].decode()
    (line,) = [each for each in text.splitlines() if f'outcome="{outcome}"' in each and "_total{" in each]
    return float(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize(
    "body",
    [
        {**SAMPLED, "prompt": list(range(20, 170))},
        {**SAMPLED, "prompt": list(range(20, 52)), "temperature": 0},
        {**SAMPLED, "prompt": list(range(30, 180)), "n": 2},
        {**SAMPLED, "prompt": list(range(40, 50))},
    ],
    ids=["sampled", "greedy, whole blocks", "two answers", "less than a block"],
)
def test_a_stream_goes_on_at_the_other_replica_and_nothing_is_computed_twice(
    pair: tuple[Service, Service], body: dict[str, Any]
) -> None:
    prefill, decode = pair
    moved, before = outcomes(prefill, "copied"), computed(decode)
    stream = Gateway(prefill, body, terms(decode.url))
    got = stream.finish()
    assert got.end == f"leaving {decode.url}"
    had = got.count
    assert 1 <= had < 60
    got = stream.resume(decode)
    assert outcomes(prefill, "copied") == moved + 1
    assert got.done
    assert computed(decode) - before == got.count - had
    expected = alone(prefill, body)
    assert (got.tokens, got.texts, got.logprobs) == (expected.tokens, expected.texts, expected.logprobs)
    for server in pair:
        wait_for(lambda server=server: is_empty(server), 15)


def is_empty(server: Service) -> bool:
    status = server.status()
    return bool(status["kvBlocksFree"] == status["kvBlocksTotal"])


def test_full_blocks_go_while_later_chunks_are_computed_and_the_first_token_holds_the_request(
    settings: EngineSettings,
) -> None:
    core = load_engine(settings.model_dir, block_tokens=16, max_batched_tokens=CHUNK).core
    handover, sent = Handover(core), {"a": 0}
    core.submit("a", list(range(20, 120)), SamplingParams(max_tokens=9, temperature=0.0), 0.0)
    assert handover.stage(sent, most=2, waits=True) is None, "it waits"
    full = []
    while not core.step():
        stage = next_stage(handover, sent, most=2)
        assert (stage.held, stage.is_computing) == (False, True)
        full.append(len(stage.blocks))
        sent["a"] += len(stage.blocks)
        assert handover.stage(sent, most=2, waits=True) is None, "the rest is computed"
        with pytest.raises(LeftError, match="computes its prompt"):
            handover.stage(sent, most=2)
    assert full == [2, 2, 2]
    stage = next_stage(handover, sent, most=1)
    assert (stage.held, stage.is_computing, len(stage.blocks)) == (True, False, 1)
    assert len(stage.seen["a"].tokens) == 101
    assert core.step() == []
    handover.let_go(["a"])
    assert len(core.step()) == 1


def test_more_than_the_last_stage_may_have_is_sent_while_the_request_decodes(
    settings: EngineSettings,
) -> None:
    core = load_engine(settings.model_dir, block_tokens=16, max_batched_tokens=CHUNK).core
    handover = Handover(core)
    core.submit("a", list(range(20, 120)), SamplingParams(max_tokens=9, temperature=0.0), 0.0)
    while not core.step():
        pass
    stage = next_stage(handover, {"a": 0}, most=6)
    assert (stage.held, stage.is_computing, len(stage.blocks)) == (False, False, 6)
    assert len(core.step()) == 1
    assert next_stage(handover, {"a": 6}, most=6).held


def next_stage(handover: Handover, sent: dict[str, int], most: int) -> Stage:
    stage = handover.stage(sent, most, waits=True)
    assert stage is not None
    handover.unpin(stage.blocks)
    return stage


def test_where_nobody_takes_a_stream_the_replica_decodes_it(
    pair: tuple[Service, Service], settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody there, no free blocks, blocks of another form, one that hangs up at each message."""
    monkeypatch.setattr(migrate_out, "AGAIN_S", 3600.0)
    prefill, decode = pair
    body = {**SAMPLED, "prompt": list(range(50, 200))}
    expected = alone(prefill, body)
    full = replace(settings, kv_bytes=6 * 16 * LAYERS * 2 * 2 * 16 * 4)
    with (
        serving_inside(full, "m", role=ReplicaRole.DECODE) as small,
        serving_inside(replace(settings, block_tokens=32), "m", role=ReplicaRole.DECODE) as other,
    ):
        check_stays(prefill, body, expected, NOWHERE, small.url, other.url)
    for messages in range(3):
        body = {**body, "prompt": list(range(80 + messages, 280 + messages))}
        with dying(decode, messages) as url:
            check_stays(prefill, body, alone(prefill, body), url)


def check_stays(prefill: Service, body: dict[str, Any], expected: Got, *to: str) -> None:
    stayed = outcomes(prefill, "stayed")
    got = Gateway(prefill, body, terms(*to)).finish()
    assert got.done
    assert (got.tokens, got.texts) == (expected.tokens, expected.texts)
    # The answer may be whole before a peer that does not answer has been given up.
    wait_for(lambda: outcomes(prefill, "stayed") > stayed, 30)
    assert outcomes(prefill, "stayed") == stayed + 1


def test_a_ticket_that_has_expired_while_the_request_waited_is_asked_for_again(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = Arrivals.begin, list[str]()

    async def forgetful(arrivals: Arrivals, request: web.Request) -> web.Response:
        answer = await begin(arrivals, request)
        begun.extend(arrivals._tickets)
        if len(begun) == 1:
            arrivals._forget(begun[0])
        return answer

    monkeypatch.setattr(Arrivals, "begin", forgetful)
    with (
        serving_inside(settings, "m", role=ReplicaRole.PREFILL) as prefill,
        serving_inside(settings, "m", role=ReplicaRole.DECODE) as decode,
    ):
        stream = Gateway(prefill, SAMPLED, terms(decode.url))
        assert stream.finish().end == f"leaving {decode.url}"
        assert len(begun) == 2
        before, had = computed(decode), stream.got.count
        left = stream.resume(decode).count - had
        assert computed(decode) - before == left


def test_a_stream_that_nobody_took_is_offered_again_while_it_decodes(
    pair: tuple[Service, Service], settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first destination keeps blocks in another form, and the second one has no room twice."""
    prefill, _ = pair
    begin, refused = Arrivals.begin, list[str]()

    async def full(arrivals: Arrivals, request: web.Request) -> web.Response:
        if f"http://{request.host}" != other.url and len(refused) < 2:
            refused.append("no room")
            raise Overloaded("no free blocks", retry_after_s=1)
        return await begin(arrivals, request)

    monkeypatch.setattr(Arrivals, "begin", full)
    monkeypatch.setattr(migrate_out, "AGAIN_S", 0.02)
    body = {**SAMPLED, "prompt": list(range(90, 240)), "max_tokens": 300}
    expected, stayed = alone(prefill, body), outcomes(prefill, "stayed")
    with (
        serving_inside(replace(settings, block_tokens=32), "m", role=ReplicaRole.DECODE) as other,
        serving_inside(settings, "m", role=ReplicaRole.DECODE) as decode,
    ):
        stream = Gateway(prefill, body, terms(other.url, decode.url))
        had, before = stream.finish().count, computed(decode)
        assert stream.got.end == f"leaving {decode.url}"
        assert len(refused) == 2
        assert 1 <= had < 300
        got = stream.resume(decode)
        assert computed(decode) - before == got.count - had
        wait_for(lambda: is_empty(decode), 15)
    assert (got.tokens, got.texts, got.logprobs) == (expected.tokens, expected.texts, expected.logprobs)
    assert outcomes(prefill, "stayed") == stayed
    wait_for(lambda: is_empty(prefill), 15)


def test_the_next_one_is_asked_where_the_first_does_not_take_it(pair: tuple[Service, Service]) -> None:
    prefill, decode = pair
    stream = Gateway(prefill, {**SAMPLED, "prompt": list(range(60, 210))}, terms(NOWHERE, decode.url))
    assert stream.finish().end == f"leaving {decode.url}"


def test_a_client_that_leaves_leaves_nothing_at_either_side(pair: tuple[Service, Service]) -> None:
    prefill, decode = pair
    for number in range(3):
        body = {**SAMPLED, "prompt": list(range(70 + number, 270 + number))}
        stream = Gateway(prefill, body, terms(decode.url))
        stream.read(number)
        stream.leave()
    for server in pair:
        wait_for(lambda server=server: is_empty(server), 30)


def test_a_sender_that_leaves_before_it_has_its_ticket_leaves_nothing(
    pair: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    asked, gate, taken, expect = *(threading.Event() for _ in range(3)), Handover.expect

    def late(self: Handover, *of: Any) -> Any:
        asked.set()
        assert gate.wait(30)
        found = expect(self, *of)
        taken.set()
        return found

    monkeypatch.setattr(Handover, "expect", late)
    stream = Gateway(prefill, {**SAMPLED, "prompt": list(range(80, 280))}, terms(decode.url))
    assert asked.wait(30)
    stream.leave()
    wait_for(lambda: is_empty(prefill), 30)
    time.sleep(0.5)  # the other replica sees its sender leave
    gate.set()
    assert taken.wait(30)
    wait_for(lambda: is_empty(decode), 30)


def test_an_answer_of_one_token_and_one_at_a_replica_of_another_role_stay(
    pair: tuple[Service, Service],
) -> None:
    prefill, decode = pair
    assert prefill.status()["role"] == "prefill"
    assert decode.status()["role"] == "decode"
    assert Gateway(prefill, {**SAMPLED, "max_tokens": 1}, terms(decode.url)).finish().done
    assert Gateway(decode, SAMPLED, terms(prefill.url)).finish().done


def test_a_bad_address_is_refused(pair: tuple[Service, Service]) -> None:
    status, _, data = pair[0].call(
        "POST", "/v1/completions", json.dumps(SAMPLED).encode(), headers=terms("ftp://a")
    )
    assert status == 400
    assert b"must be an address" in data


def test_the_command_line_says_the_role(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from busbar.workloads.serving.command import serve

    result = CliRunner().invoke(serve, [str(tmp_path), "--role", "neither"])
    assert result.exit_code == 2
    assert "is not one of" in result.output
