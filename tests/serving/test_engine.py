"""The engine's thread: cancelling, failing and stopping, seen from the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import TestClient, TestServer
from tests.serving.engines import greedy_params, load_engine
from tests.serving.models import VOCAB
from tests.serving.pair import Pair, paired, text_files_of

from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.engine import EngineState
from busbar.workloads.serving.engine_link import Asked, EngineLink, Prompt, Stream
from busbar.workloads.serving.errors import ModelCorrupt, Overloaded
from busbar.workloads.serving.frames import Kind, frame
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.sequence import Sequence
from busbar.workloads.serving.settings import EngineSettings, ServerSettings


@pytest.fixture
def loaded(llama: tuple[Path, Any]) -> Loaded:
    return load_engine(llama[0])


SETTINGS = ServerSettings(EngineSettings(Path("m")), "tiny", stall_s=30.0)


@asynccontextmanager
async def started(loaded: Loaded) -> AsyncIterator[Pair]:
    """A replica in state Ready, stopped at the end."""
    changed = asyncio.Event()
    async with paired(SETTINGS, lambda: loaded, text_files_of(loaded), changed.set) as pair:
        while pair.link.state is EngineState.LOADING:
            await changed.wait()
            changed.clear()
        assert pair.link.state is EngineState.READY
        yield pair


@asynccontextmanager
async def asked(link: EngineLink, *prompts: Prompt) -> AsyncIterator[list[Stream]]:
    async with link.opened(Asked("r", prompts)) as streams:
        yield streams


async def read(stream: Stream) -> list[Delta]:
    deltas = [await stream.next()]
    while deltas[-1].finish is None:
        deltas.append(await stream.next())
    return deltas


async def answer(link: EngineLink, prompt: list[int], params: SamplingParams) -> list[Delta]:
    async with asked(link, Prompt(prompt, params)) as (stream,):
        return await read(stream)


async def test_requests_of_one_engine_run_together_and_each_gets_its_tokens(loaded: Loaded) -> None:
    prompts = [Prompt([i + 1] * 10, greedy_params(5, ignore_eos=True)) for i in range(3)]
    async with started(loaded) as pair, asked(pair.link, *prompts) as streams:
        ends = [await read(stream) for stream in streams]
        assert [[d.index for d in deltas] for deltas in ends] == [[1, 2, 3, 4, 5]] * 3
        assert pair.link.open_streams == pair.host.engine.waiting == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_requests_priority_reaches_the_scheduler(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    seen: list[int] = []
    add = loaded.core.scheduler.add

    def note(sequence: Sequence, *, admitted: bool) -> None:
        seen.append(sequence.priority)
        add(sequence, admitted=admitted)

    monkeypatch.setattr(loaded.core.scheduler, "add", note)
    body = {"model": "tiny", "max_tokens": 1, "n": 2}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    async with started(loaded) as pair:
        client: TestClient[web.Request, web.Application] = TestClient(TestServer(pair.server.application()))
        async with client:
            for priority in (-3, None):
                assert (await client.post(path, json={**body, "priority": priority})).status == 200
    assert seen == [-3, -3, 0, 0]


async def test_a_client_that_leaves_as_its_stream_begins_is_no_error(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave(request: web.Request, response: web.StreamResponse) -> None:
        assert request.transport is not None
        request.transport.close()

    body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with started(loaded) as pair:
        app = pair.server.application()
        app.on_response_prepare.append(leave)
        client: TestClient[web.Request, web.Application] = TestClient(TestServer(app))
        async with client:
            with pytest.raises(ClientError):
                await client.post("/v1/completions", json=body)
        await answer(pair.link, [1], greedy_params(1))  # runs after the cancel
        assert loaded.core.live == 0
    assert not [line for line in caplog.records if line.exc_info]


async def test_closing_a_stream_frees_its_blocks(loaded: Loaded) -> None:
    async with started(loaded) as pair:
        for confirms in (False, True):
            prompt = Prompt([1] * 40, greedy_params(400, ignore_eos=True), confirms=confirms)
            async with asked(pair.link, prompt) as (stream,):
                await stream.next()
            await answer(pair.link, [1], greedy_params(1))  # runs after the cancel
            assert loaded.core.scheduler.pool.used == 0
            assert loaded.core.live == 0


async def test_a_failing_step_ends_every_stream_with_an_error(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[Delta]:
        raise RuntimeError("out of registers")

    async with started(loaded) as pair:
        monkeypatch.setattr(loaded.core, "step", fail)
        (delta,) = await answer(pair.link, [1], greedy_params(4))
        assert (delta.finish, delta.error) == ("error", "the engine failed; the request may be sent again")
        assert isinstance(pair.host.engine.failure, RuntimeError)
        assert loaded.core.scheduler.pool.used == 0
        with pytest.raises(Overloaded, match="going down"):
            await answer(pair.link, [1], greedy_params(1))
        await pair.link.call("sync")  # the streams' ends come before the state
        assert pair.link.state is EngineState.FAILED
        assert str(pair.link.failure) == "RuntimeError: out of registers"


@pytest.mark.parametrize("where", ["step", "submit"])
async def test_a_step_that_never_ends_fails_the_health_checks_until_it_ends(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Also if a command between two steps hangs."""
    now, entered, release = [100.0], threading.Event(), threading.Event()
    inner = getattr(loaded.core, where)

    def hang(*arguments: Any) -> Any:
        entered.set()
        release.wait(60)
        return inner(*arguments)

    monkeypatch.setattr(loaded.core, where, hang)
    async with started(loaded) as pair:
        monkeypatch.setattr(pair.host.engine, "_clock", lambda: now[0])
        client: TestClient[web.Request, web.Application] = TestClient(TestServer(pair.server.application()))

        async def look() -> list[tuple[int, str]]:
            await pair.link.call("sync")
            answers = [await client.get(path) for path in ("/health", "/ready")]
            return [(answer.status, (await answer.json())["state"]) for answer in answers]

        async with client, asked(pair.link, Prompt([1], greedy_params(1))) as (stream,):
            await asyncio.to_thread(entered.wait, 60)
            now[0] += 29.0
            assert await look() == [(200, "Ready"), (200, "Ready")]
            now[0] += 2.0
            assert await look() == [(503, "Stalled"), (503, "Stalled")]
            refused = await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
            assert refused.status == 503
            release.set()
            await read(stream)
            await asyncio.to_thread(pair.host.engine.stop)
            assert pair.host.engine.step_seconds == 0.0


async def test_an_engine_that_tells_nothing_fails_the_health_checks() -> None:
    """Its process hangs, so that it cannot say for how long."""
    now = [100.0]
    link = EngineLink(clock=lambda: now[0])
    told = {"state": "Ready", "sleep": 0, "running": 0, "step_s": 0.0, "stall_s": 30.0}
    for _ in range(2):
        link.data_received(frame(Kind.STATE, told))
        now[0] += 30.0
        assert not link.stalled
        now[0] += 1.0
        assert link.stalled


async def test_a_model_that_cannot_be_loaded_fails_the_engine_with_its_error() -> None:
    def load() -> Loaded:
        raise ModelCorrupt("config.json is not JSON")

    changed = asyncio.Event()
    with pytest.raises(Overloaded, match="still loading"):
        await answer(EngineLink(), [1], greedy_params(1))
    async with paired(SETTINGS, load, on_change=changed.set) as pair:
        while pair.link.state is EngineState.LOADING:
            await changed.wait()
            changed.clear()
        assert pair.link.state is EngineState.FAILED
        assert isinstance(pair.link.failure, ModelCorrupt)
        assert str(pair.link.failure) == "config.json is not JSON"


async def test_cutting_ends_open_streams_with_the_reason(loaded: Loaded) -> None:
    prompt = Prompt([1], greedy_params(500, ignore_eos=True))
    async with started(loaded) as pair, asked(pair.link, prompt) as (stream,):
        await stream.next()
        pair.link.tell("cut", reason="time is up")
        assert (await read(stream))[-1].error == "time is up"


async def test_extreme_but_legal_parameters_do_not_hurt_the_engine(loaded: Loaded) -> None:
    extremes = [
        SamplingParams(max_tokens=3, temperature=1e-30),
        SamplingParams(max_tokens=3, top_p=1e-12, top_k=10**9),
        SamplingParams(max_tokens=3, logprobs=VOCAB + 1),
        SamplingParams(max_tokens=3, logit_bias=tuple((t, -100.0) for t in range(VOCAB))),
        SamplingParams(max_tokens=3, min_tokens=10**9, presence_penalty=2.0, frequency_penalty=-2.0),
        SamplingParams(max_tokens=3, stop=("x" * 10_000,), stop_token_ids=frozenset(range(VOCAB))),
        SamplingParams(max_tokens=3, seed=-(2**63)),
    ]
    prompts = [Prompt([1, 2], each) for each in extremes]
    async with started(loaded) as pair, asked(pair.link, *prompts) as streams:
        reasons = [(await read(stream))[-1].finish for stream in streams]
        assert set(reasons) <= {"stop", "length"}
        assert pair.link.state is EngineState.READY
