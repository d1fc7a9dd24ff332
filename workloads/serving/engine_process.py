"""The life of an engine's process: load, compute, and end with the front.

It ends when the front says so, or is gone: then it leaves a termination message. Signals are the front's business.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from aiohttp import web

from busbar.kube.contracts.workload import TERMINATION_LOG, ExitCode
from busbar.workloads.machine.processes import end_process
from busbar.workloads.serving.engine import EngineState
from busbar.workloads.serving.engine_host import EngineHost
from busbar.workloads.serving.loader import Loaded, load
from busbar.workloads.serving.settings import ServerSettings
from busbar.workloads.serving.termination import write_termination_message

log = logging.getLogger(__name__)
STEP_S = 5.0
"""For the step that runs when the front ends."""
ORPHANED = "EngineLost: the front's process ended, so the engine's process ended too"


@dataclass(frozen=True)
class Way:
    """How the front reaches the engine's routes."""

    path: str
    """Of a socket; it begins with a zero byte, so it is no file."""
    secret: str


@asynccontextmanager
async def hosted(
    settings: ServerSettings, load: Callable[[], Loaded], sock: socket.socket, way: Way
) -> AsyncIterator[EngineHost]:
    """An engine that loads, and answers the front at the other end of `sock`."""
    host = EngineHost(settings, load, sock, way.secret)
    runner = web.AppRunner(
        host.routes.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        await web.UnixSite(runner, way.path).start()
        host.start()
        yield host
    finally:
        await runner.cleanup()
        # A step ends soon; a load that is under way does not, and nobody waits for it.
        limit_s = 0.0 if host.engine.state is EngineState.LOADING else STEP_S
        await asyncio.to_thread(host.engine.stop, limit_s)
        host.close()


def live(
    settings: ServerSettings, sock: socket.socket, way: Way, on_ready: Callable[[Loaded], None]
) -> NoReturn:
    """All of it, in a process that was made for it."""
    code = int(ExitCode.FAILED)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        code = asyncio.run(_live(settings, sock, way, on_ready))
    except BaseException:
        log.exception("the engine's process failed")
    finally:
        # The engine's thread may be in torch (loading, or in a long step) and cannot be stopped; if it came back while the
        # interpreter shuts down, the process would abort.
        end_process(code)


async def _live(
    settings: ServerSettings, sock: socket.socket, way: Way, on_ready: Callable[[Loaded], None]
) -> int:
    async with hosted(settings, lambda: load(settings.engine, settings.model_id), sock, way) as host:
        announcing = asyncio.create_task(_announce(host, on_ready))
        await host.over.wait()
        announcing.cancel()
    if host.dismissed:
        return 0
    log.error(ORPHANED)
    write_termination_message(TERMINATION_LOG, ORPHANED)
    return int(ExitCode.FAILED)


async def _announce(host: EngineHost, on_ready: Callable[[Loaded], None]) -> None:
    while host.engine.loaded is None:
        await host.changed.wait()
        host.changed.clear()
    on_ready(host.engine.loaded)
