"""Both listeners in one process and one event loop, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Generator
from pathlib import Path

import uvicorn

from busbar.api import services, slow_clients
from busbar.api.app import internal_app, public_app
from busbar.api.kubernetes.client import Kubernetes
from busbar.api.objects.operator_client import OperatorClient
from busbar.api.settings import Settings
from busbar.kube.login import find_login, from_kubeconfig

GRACE_S = 10

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """A server without signal handlers of its own: one handler stops both listeners."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(settings: Settings) -> None:
    """Serve until told to stop; running requests get `GRACE_S` seconds."""
    login = from_kubeconfig(Path(settings.kubeconfig)) if settings.kubeconfig else find_login(os.environ)
    built = services.build(
        settings,
        Kubernetes(login, user_agent="busbar-api"),
        OperatorClient(settings.operator_url, settings.operator_token_file),
    )
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await run(built, stopping)


async def run(built: services.Services, stopping: asyncio.Event) -> None:
    """Serve a set of services until the event is set."""
    settings = built.settings
    tasks = await built.start()
    servers = [
        _Server(_config(settings, public_app(built), settings.port)),
        _Server(_config(settings, internal_app(built), settings.internal_port)),
    ]
    serving = [asyncio.create_task(server.serve()) for server in servers]
    log.info("serving REST and portal on :%d, internal on :%d", settings.port, settings.internal_port)
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([waiting, *serving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        built.change_stream.close()
        for server in servers:
            server.should_exit = True
        waiting.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await built.stop(tasks)


def _config(settings: Settings, app: object, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # a FastAPI application is an ASGI application
        host=settings.host,
        port=port,
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=30,
        http=slow_clients.protocol(settings.header_timeout_s, settings.body_timeout_s),
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
    )
