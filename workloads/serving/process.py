"""The life of a serving process: listen, load, serve, drain, leave.

It listens before the model is loaded, so that /health and /ready tell the truth from the start. On
SIGTERM (or SIGINT) it drains: new requests get 503, running ones end within `drain_s`. Exit code 0:
everything was finished; 143: the drain's time ran out and requests were cut; 1: the engine failed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from aiohttp import web

from busbar.kube.contracts.workload import TERMINATION_LIMIT_BYTES
from busbar.workloads.serving.engine import ENGINE_THREAD, Engine, EngineState
from busbar.workloads.serving.errors import SettingsError
from busbar.workloads.serving.loader import Loaded, load
from busbar.workloads.serving.server import Server
from busbar.workloads.serving.settings import ServerSettings

log = logging.getLogger(__name__)
EXIT_DONE, EXIT_FAILED, EXIT_CUT = 0, 1, 143
LAST_STATUS_S = 5.0
"""For reading the last status, where somebody does and streams have moved: within the pod's margin behind its drain."""


async def run(settings: ServerSettings, on_ready: Callable[[Loaded], None] = lambda _: None) -> int:
    """Serves until a signal or a failure; the process's exit code. Raises the engine's load error."""
    loop = asyncio.get_running_loop()
    leave, changed = asyncio.Event(), asyncio.Event()
    engine = Engine(lambda: load(settings.engine, settings.model_id), loop, on_change=changed.set)
    server = Server(settings, engine)
    runner = web.AppRunner(
        server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    try:
        await _listen(runner, settings)
        engine.start()
        await _watch(engine, changed, leave, on_ready)
        if engine.state is EngineState.FAILED:
            assert engine.failure is not None
            await asyncio.sleep(0)  # let the streams' error events go out
            raise engine.failure
        return await _drain(server, engine, settings.drain_s)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await runner.cleanup()
        # A step ends soon; a load that is under way does not, and nobody waits for it.
        await asyncio.to_thread(engine.stop, 0.0 if engine.state is EngineState.LOADING else 5.0)


def leave(code: int) -> NoReturn:
    """Ends the process with `code`, also while the engine's thread is in torch (loading, or in a long step).

    Such a thread cannot be stopped, and if it comes back while the interpreter shuts down, the process aborts.
    """
    if any(thread.name == ENGINE_THREAD for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


async def _listen(runner: web.AppRunner, settings: ServerSettings) -> None:
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            "choose another port or address"
        ) from error


async def _watch(
    engine: Engine, changed: asyncio.Event, leave: asyncio.Event, on_ready: Callable[[Loaded], None]
) -> None:
    """Returns when told to leave or when the engine fails."""
    leaving = asyncio.ensure_future(leave.wait())
    announced = False
    while True:
        news = asyncio.ensure_future(changed.wait())
        await asyncio.wait({leaving, news}, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        changed.clear()
        if engine.state is EngineState.READY and not announced and engine.loaded is not None:
            announced = True
            on_ready(engine.loaded)
        if leaving.done() or engine.state is EngineState.FAILED:
            leaving.cancel()
            return


async def _drain(server: Server, engine: Engine, limit_s: float) -> int:
    server.start_drain()
    try:
        if not server.quiet.is_set():  # a limit of 0 leaves nobody the time to be asked
            await asyncio.wait_for(server.quiet.wait(), limit_s)
    except TimeoutError:
        log.warning("drain time of %s s is over; cutting %d requests", limit_s, engine.open_streams)
        engine.cut("the server is shutting down; send the request again")
        try:
            await asyncio.wait_for(server.quiet.wait(), 2.0)
        except TimeoutError:
            log.warning("requests did not end; leaving anyway")
        return EXIT_CUT
    if server.has_moved_streams:  # the operator, which reads every two seconds, is to know of it
        with suppress(TimeoutError):
            await asyncio.wait_for(server.heard.wait(), LAST_STATUS_S)
    return EXIT_FAILED if engine.state is EngineState.FAILED else EXIT_DONE


def write_termination_message(path: str, message: str) -> None:
    """The container's last words, which the operator reads; silent where there is no such file."""
    text = json.dumps({"kind": "serving", "message": message}, ensure_ascii=False)
    try:
        with open(path, "r+b") as file:
            file.write(text.encode()[:TERMINATION_LIMIT_BYTES])
    except OSError:
        log.debug("no termination log at %s", path)
