"""The life of a replica: two processes, the front (HTTP and text) and the engine (`engine_process.py`), which it starts.

The front listens before the model is loaded, so that /health and /ready tell the truth from the start. On
SIGTERM (or SIGINT) it drains: new requests get 503, running ones end within `drain_s`. Exit code 0:
everything was finished; 143: the drain's time ran out and requests were cut; 1: the engine failed, or its process ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

from busbar.kube.http_connection import connections
from busbar.workloads.serving import engine_process
from busbar.workloads.serving.engine import EngineState
from busbar.workloads.serving.engine_link import EngineLink
from busbar.workloads.serving.engine_process import Way
from busbar.workloads.serving.errors import EngineLost, SettingsError
from busbar.workloads.serving.http_request import refuse
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.passing import EnginePassage
from busbar.workloads.serving.server import Server
from busbar.workloads.serving.settings import ServerSettings
from busbar.workloads.serving.text_model import TextFiles, TextModel, read_text, read_text_files

log = logging.getLogger(__name__)
EXIT_DONE, EXIT_FAILED, EXIT_CUT = 0, 1, 143
LAST_STATUS_S = 5.0
"""For reading the last status, where somebody does and streams have moved: within the pod's margin behind its drain."""
ENGINE_END_S = engine_process.STEP_S + 3.0
"""For the engine's process after the front has dismissed it; then it is killed."""


def read_ahead(settings: ServerSettings) -> None:
    """What servers that are forked from this process then need not read again. Raises ModelError."""
    read_text(settings.engine.model_dir)


def serve(settings: ServerSettings, on_ready: Callable[[Loaded], None] = lambda _: None) -> int:
    """Serves until a signal or a failure; the process's exit code. Raises the engine's load error, or EngineLost.

    `on_ready` is called in the engine's process. The calling process must have no other thread: it is forked, so that both
    share what has been imported.
    """
    ours, engines = socket.socketpair()
    way = new_way()
    sys.stdout.flush()  # else both would write what waits
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        ours.close()
        engine_process.live(settings, engines, way, on_ready)
    engines.close()
    return asyncio.run(_run(settings, ours, way, child))


def new_way() -> Way:
    return Way(f"\0busbar-engine-{secrets.token_hex(16)}", secrets.token_hex(16))


async def _run(settings: ServerSettings, sock: socket.socket, way: Way, child: int) -> int:
    loop = asyncio.get_running_loop()
    leave, changed = asyncio.Event(), asyncio.Event()
    link = await EngineLink.connect(sock, changed.set)
    server = Server(settings, link, EnginePassage(way.path, way.secret, link))
    runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    port: asyncio.Server | None = None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    reading = asyncio.create_task(asyncio.to_thread(read_text_files, settings.engine.model_dir))

    def read(done: asyncio.Task[TextFiles]) -> None:
        if not done.cancelled():
            done.exception()  # whoever uses it raises it; the engine may have failed by then
        changed.set()

    reading.add_done_callback(read)
    try:
        await link.greeted.wait()
        port = await _listen(runner, settings)
        await _watch(server, reading, changed, leave)
        if link.state is EngineState.FAILED:
            await asyncio.sleep(0)  # let the streams' error events go out
            raise link.failure or EngineLost(await _last_words(child))
        return await _drain(server, settings.drain_s)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        if port is not None:
            port.close()
        await runner.cleanup()
        link.tell("stop")
        link.close()
        await _reaped(child)


async def _listen(runner: web.AppRunner, settings: ServerSettings) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(
            connections(runner, refuse), settings.host, settings.port, backlog=128
        )
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            "choose another port or address"
        ) from error


async def _watch(
    server: Server, reading: asyncio.Task[TextFiles], changed: asyncio.Event, leave: asyncio.Event
) -> None:
    """Returns when told to leave or when the engine fails. Raises where the model's text files cannot be read."""
    link = server.link
    leaving = asyncio.ensure_future(leave.wait())
    try:
        while not leaving.done() and link.state is not EngineState.FAILED:
            if reading.done() and server.model is None:
                server.model = TextModel(reading.result(), link.check_grammar)
            news = asyncio.ensure_future(changed.wait())
            await asyncio.wait({leaving, news}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            changed.clear()
    finally:
        leaving.cancel()


async def _drain(server: Server, limit_s: float) -> int:
    link = server.link
    server.start_drain()
    try:
        if not server.quiet.is_set():  # a limit of 0 leaves nobody the time to be asked
            await asyncio.wait_for(server.quiet.wait(), limit_s)
    except TimeoutError:
        log.warning("drain time of %s s is over; cutting %d requests", limit_s, link.open_streams)
        link.tell("cut", reason="the server is shutting down; send the request again")
        try:
            await asyncio.wait_for(server.quiet.wait(), 2.0)
        except TimeoutError:
            log.warning("requests did not end; leaving anyway")
        return EXIT_CUT
    if await server.has_moved_streams():  # the operator, which reads every two seconds, is to know of it
        with suppress(TimeoutError):
            await asyncio.wait_for(server.heard.wait(), LAST_STATUS_S)
    return EXIT_FAILED if link.state is EngineState.FAILED else EXIT_DONE


async def _last_words(child: int) -> str:
    """Why an engine's process is gone that has said nothing."""
    status = await _reaped(child)
    if status is not None and status < 0:
        how = f"was ended by signal {-status} ({signal.Signals(-status).name})"
    else:
        how = f"ended with exit code {status}" if status is not None else "ended"
    return f"the engine's process {how}, so the replica ended too"


async def _reaped(child: int) -> int | None:
    """The exit code of the engine's process, minus the signal that ended it; None: it is known no more. One that does not
    end is killed."""
    try:
        descriptor = os.pidfd_open(child)
    except ProcessLookupError:
        return None
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(ENGINE_END_S):
            await ended.wait()
    except TimeoutError:
        log.warning("the engine's process does not end; killing it")
        os.kill(child, signal.SIGKILL)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - it has ended
    return os.waitstatus_to_exitcode(status)
