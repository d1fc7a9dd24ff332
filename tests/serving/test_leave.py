"""A serving process that gets SIGTERM while its engine's thread is in torch exits with its own exit code."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from busbar.kube.contracts.bearers import one_for_all
from busbar.workloads.serving import process
from busbar.workloads.serving.engine import Engine
from busbar.workloads.serving.server import Server
from busbar.workloads.serving.settings import EngineSettings, ServerSettings

LOADS_FOR_EVER = """
import asyncio, os, signal, sys, threading
from pathlib import Path
import torch
from busbar.workloads.serving import process
from busbar.workloads.serving.settings import EngineSettings, ServerSettings

def load(*_):
    torch.set_num_threads(1)
    weights = torch.ones(50, 50)
    loading.set()
    while True:
        weights = (weights @ weights).tanh()

def tell():
    loading.wait()
    os.kill(os.getpid(), signal.SIGTERM)

process.load, loading = load, threading.Event()
threading.Thread(target=tell).start()
settings = ServerSettings(EngineSettings(Path("nowhere")), "model", port=0, drain_s=float(sys.argv[1]))
print("kept though not flushed")
process.leave(asyncio.run(process.run(settings)))
"""


@pytest.mark.parametrize("drain_s", ["30", "0"])
def test_sigterm_while_a_model_loads_ends_the_process_at_once_and_well(drain_s: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADS_FOR_EVER, drain_s],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "kept though not flushed\n", "")


async def test_a_process_whose_streams_have_moved_waits_until_that_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never() -> None:
        raise AssertionError("nothing is loaded")

    monkeypatch.setattr(process, "LAST_STATUS_S", 30.0)
    engine = Engine(never, asyncio.get_running_loop())  # type: ignore[arg-type]
    settings = ServerSettings(EngineSettings(Path("nowhere")), "model", bearers=one_for_all("secret"))

    async def ending(server: Server) -> asyncio.Task[int]:
        task = asyncio.create_task(process._drain(server, engine, 30.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    unread, read, unmoved = (Server(settings, engine) for _ in range(3))
    for server in (read, unmoved):
        await server.status(None)  # type: ignore[arg-type]  # somebody reads it
    for server in (unread, read, unmoved):
        server.start_drain()
    for server in (unread, read):
        server.departures.copied += 1
    assert await (await ending(unread)) == await (await ending(unmoved)) == process.EXIT_DONE
    waiting = await ending(read)
    assert not waiting.done()
    await read.status(None)  # type: ignore[arg-type]
    assert await waiting == process.EXIT_DONE
    assert read.serving_status().drain is not None
