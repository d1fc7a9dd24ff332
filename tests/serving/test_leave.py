"""How a replica's two processes end: by SIGTERM, also while the engine's thread is in torch, and when one of them dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from tests.serving.engines import load_engine
from tests.serving.pair import paired
from tests.serving.processes import serving
from tests.serving.test_server import MODEL, open_stream

from busbar.kube.contracts.bearers import one_for_all
from busbar.workloads.serving import process
from busbar.workloads.serving.engine_process import ORPHANED
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.server import Server
from busbar.workloads.serving.settings import EngineSettings, ServerSettings

LOADS_FOR_EVER = """
import os, signal, sys
from pathlib import Path
import torch
from busbar.workloads.serving import engine_process, process
from busbar.workloads.serving.settings import EngineSettings, ServerSettings

def load(*_):
    torch.set_num_threads(1)
    weights = torch.ones(50, 50)
    os.kill(os.getppid(), signal.SIGTERM)
    while True:
        weights = (weights @ weights).tanh()

engine_process.load = load
settings = ServerSettings(EngineSettings(Path(sys.argv[2])), "model", port=0, drain_s=float(sys.argv[1]))
print("kept though not flushed")
sys.exit(process.serve(settings))
"""


REQUEST = make_mocked_request("GET", "/status")


@pytest.mark.parametrize("drain_s", ["30", "0"])
def test_sigterm_while_a_model_loads_ends_both_processes_at_once_and_well(
    llama: tuple[Path, Any], drain_s: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADS_FOR_EVER, drain_s, str(llama[0])],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "kept though not flushed\n", "")


async def test_a_replica_whose_streams_have_moved_waits_until_that_was_read(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LAST_STATUS_S", 30.0)
    settings = ServerSettings(EngineSettings(Path("nowhere")), "model", bearers=one_for_all("secret"))

    async def ending(server: Server) -> asyncio.Task[int]:
        task = asyncio.create_task(process._drain(server, 30.0))
        await server.link.call("sync")
        await server.link.call("sync")
        return task

    async def status(server: Server) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads((await server.status(REQUEST)).text or "")
        return found

    for read, moved in ((False, True), (True, False), (True, True)):
        async with paired(settings, lambda: loaded) as pair:
            server = pair.server
            if read:
                await status(server)  # somebody reads it
            server.start_drain()
            await server.link.call("sync")
            pair.host.routes.departures.copied += moved
            end = await ending(server)
            if read and moved:
                assert not end.done()
                assert (await status(server))["drain"] == {"requests": 0, "copied": 1, "recomputed": 0}
            assert await end == process.EXIT_DONE


@pytest.fixture
def loaded(llama: tuple[Path, Any]) -> Loaded:
    return load_engine(llama[0])


def exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_killed_engine_ends_the_front_and_every_stream_with_the_reason(deep: Path) -> None:
    with serving(deep, "--model-id", MODEL) as server:
        _, engine = server.processes
        with open_stream(server, 490) as stream:
            stream.line()
            os.kill(engine, signal.SIGKILL)
            rest = stream.rest()
        assert b"the engine's process ended; the request may be sent again" in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert server.process.wait(30) == 1
        assert "the engine's process was ended by signal 9 (SIGKILL)" in server.log()


def test_a_killed_front_ends_the_engine_with_the_reason(deep: Path) -> None:
    with serving(deep, "--model-id", MODEL) as server:
        _, engine = server.processes
        with open_stream(server, 490) as stream:
            stream.line()
            server.process.kill()
            server.wait_for(lambda: not exists(engine), 30)
        assert ORPHANED in server.log()


def test_signals_to_the_engine_are_the_fronts_business(llama: tuple[Path, Any]) -> None:
    """Ctrl-C in a terminal reaches both, and a drain needs the engine."""
    with serving(llama[0], "--model-id", MODEL) as server:
        _, engine = server.processes
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine, number)
        assert server.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})[0] == 200
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert not exists(engine)
