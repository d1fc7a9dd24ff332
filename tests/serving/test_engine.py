"""The engine's thread: cancelling, failing and stopping, seen from the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from tests.serving.engines import greedy_params, load_engine
from tests.serving.models import VOCAB

from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.engine import Engine, EngineState, Stream
from busbar.workloads.serving.errors import ModelCorrupt, Overloaded
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.sequence import Sequence
from busbar.workloads.serving.server import Server
from busbar.workloads.serving.settings import EngineSettings, ServerSettings


@pytest.fixture
def loaded(llama: tuple[Path, Any]) -> Loaded:
    return load_engine(llama[0])


@asynccontextmanager
async def started(loaded: Loaded) -> AsyncIterator[Engine]:
    """An engine in state Ready, stopped at the end."""
    changed = asyncio.Event()
    engine = Engine(lambda: loaded, asyncio.get_running_loop(), changed.set)
    engine.start()
    await changed.wait()
    assert engine.state is EngineState.READY
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


async def read(stream: Stream) -> list[Delta]:
    deltas = [await stream.next()]
    while deltas[-1].finish is None:
        deltas.append(await stream.next())
    return deltas


async def test_requests_of_one_engine_run_together_and_each_gets_its_tokens(loaded: Loaded) -> None:
    async with started(loaded) as engine:
        streams = [engine.open(str(i), [i + 1] * 10, greedy_params(5, ignore_eos=True)) for i in range(3)]
        ends = [await read(stream) for stream in streams]
        assert [[d.index for d in deltas] for deltas in ends] == [[1, 2, 3, 4, 5]] * 3
        assert engine.open_streams == 0


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
    async with started(loaded) as engine:
        server = Server(ServerSettings(EngineSettings(Path("m")), "tiny"), engine)
        client: TestClient[web.Request, web.Application] = TestClient(TestServer(server.application()))
        async with client:
            for priority in (-3, None):
                assert (await client.post(path, json={**body, "priority": priority})).status == 200
    assert seen == [-3, -3, 0, 0]


async def test_closing_a_stream_frees_its_blocks(loaded: Loaded) -> None:
    async with started(loaded) as engine:
        stream = engine.open("a", [1] * 40, greedy_params(400, ignore_eos=True))
        await stream.next()
        engine.close(stream)
        engine.close(stream)  # harmless
        await read(engine.open("b", [1], greedy_params(1)))  # runs after the cancel
        assert loaded.core.scheduler.pool.used == 0


async def test_a_failing_step_ends_every_stream_with_an_error(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[Delta]:
        raise RuntimeError("out of registers")

    async with started(loaded) as engine:
        monkeypatch.setattr(loaded.core, "step", fail)
        stream = engine.open("a", [1], greedy_params(4))
        (delta,) = await read(stream)
        assert (delta.finish, delta.error) == ("error", "the engine failed; the request may be sent again")
        assert engine.state is EngineState.FAILED
        assert isinstance(engine.failure, RuntimeError)
        assert loaded.core.scheduler.pool.used == 0
        with pytest.raises(Overloaded, match="going down"):
            engine.open("b", [1], greedy_params(1))


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
    changed = asyncio.Event()
    engine = Engine(lambda: loaded, asyncio.get_running_loop(), changed.set, clock=lambda: now[0])
    settings = ServerSettings(EngineSettings(Path("m")), "tiny", stall_s=30.0)
    http = TestServer(Server(settings, engine).application())
    client: TestClient[web.Request, web.Application] = TestClient(http)
    async with client:

        async def look() -> list[tuple[int, str]]:
            answers = [await client.get(path) for path in ("/health", "/ready")]
            return [(answer.status, (await answer.json())["state"]) for answer in answers]

        engine.start()
        await changed.wait()
        stream = engine.open("a", [1], greedy_params(1))
        await asyncio.to_thread(entered.wait, 60)
        now[0] += 29.0
        assert await look() == [(200, "Ready"), (200, "Ready")]
        now[0] += 2.0
        assert await look() == [(503, "Stalled"), (503, "Stalled")]
        refused = await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert refused.status == 503
        release.set()
        await read(stream)
        await asyncio.to_thread(engine.stop)
    assert engine.step_seconds == 0.0


async def test_a_model_that_cannot_be_loaded_fails_the_engine_with_its_error() -> None:
    def load() -> Loaded:
        raise ModelCorrupt("config.json is not JSON")

    changed = asyncio.Event()
    engine = Engine(load, asyncio.get_running_loop(), changed.set)
    with pytest.raises(Overloaded, match="still loading"):
        engine.open("a", [1], greedy_params(1))
    engine.start()
    await changed.wait()
    assert engine.state is EngineState.FAILED
    assert str(engine.failure) == "config.json is not JSON"


async def test_cutting_ends_open_streams_with_the_reason(loaded: Loaded) -> None:
    async with started(loaded) as engine:
        stream = engine.open("a", [1], greedy_params(500, ignore_eos=True))
        await stream.next()
        engine.cut("time is up")
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
    async with started(loaded) as engine:
        streams = [engine.open(str(i), [1, 2], p) for i, p in enumerate(extremes)]
        reasons = [(await read(stream))[-1].finish for stream in streams]
        assert set(reasons) <= {"stop", "length"}
        assert engine.state is EngineState.READY
