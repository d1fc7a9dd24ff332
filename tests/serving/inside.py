"""A server in a thread of the test's own process.

Most of what a new process costs is importing torch, which the tests have done already.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from aiohttp import web
from tests.serving.pair import paired
from tests.serving.processes import Service

from busbar.kube.contracts.bearers import Bearers, one_for_all
from busbar.kube.contracts.workload import ReplicaRole
from busbar.workloads.serving.engine import EngineState
from busbar.workloads.serving.loader import Loaded, load
from busbar.workloads.serving.settings import EngineSettings, ServerSettings, SpecAdapters
from busbar.workloads.serving.text_model import read_text_files

TOKEN = "secret"
START_LIMIT_S = 90.0
Started = Future[tuple[str, Callable[[], object]]]
"""(its address, what ends it)."""


@contextmanager
def serving_inside(
    engine: EngineSettings,
    model_id: str,
    max_waiting: int = 256,
    bearers: Bearers | None = None,
    role: ReplicaRole = ReplicaRole.BOTH,
    adapters: SpecAdapters | None = None,
) -> Iterator[Service]:
    """A server that is ready; every route wants `TOKEN`, unless there are bearers of its own."""
    bearers = one_for_all(TOKEN) if bearers is None else bearers
    settings = ServerSettings(
        engine, model_id, bearers=bearers, max_waiting=max_waiting, role=role, spec_adapters=adapters
    )
    started: Started = Future()
    thread = threading.Thread(target=_run, args=(settings, started), name="server")
    thread.start()
    url, leave = started.result(START_LIMIT_S)
    try:
        yield Service(url, TOKEN)
    finally:
        leave()
        thread.join()


def _run(settings: ServerSettings, started: Started) -> None:
    try:
        asyncio.run(_serve(settings, started))
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


async def _serve(settings: ServerSettings, started: Started) -> None:
    loop = asyncio.get_running_loop()
    leave, changed = asyncio.Event(), asyncio.Event()
    files = read_text_files(settings.engine.model_dir)

    def read() -> Loaded:
        return load(settings.engine, settings.model_id)

    async with paired(settings, read, files, changed.set) as pair:
        runner = web.AppRunner(pair.server.application(), handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, settings.host, 0).start()
            while pair.link.state is EngineState.LOADING:
                await changed.wait()
                changed.clear()
            if pair.host.engine.failure is not None:
                raise pair.host.engine.failure
            host, port = runner.addresses[0][:2]
            started.set_result((f"http://{host}:{port}", partial(loop.call_soon_threadsafe, leave.set)))
            await leave.wait()
        finally:
            await runner.cleanup()
