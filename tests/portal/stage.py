"""The portal's test environment: the real API, the real gateway process, an in-memory cluster, a scripted operator.

Everything that a browser calls is real: HTTP server, application, database, planner, event stream, gateway. Replaced
are Kubernetes (`tests.api.memory_kube`), the operator's writes (`actor.py`, which writes the phases of a job) and the
engine (`engine.py`, a small OpenAI server that streams words).

    python -m tests.portal.stage        runs it for manual inspection and prints address and tokens
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from tests.api.conftest import seed
from tests.api.memory_kube import MemoryKube
from tests.api.scripted_operator import ScriptedOperator
from tests.free_port import free_port
from tests.portal import engine
from tests.portal.actor import Actor, now

from busbar.api import services as wiring
from busbar.api.access.identity import CallerRole
from busbar.api.database.migrate import migrate
from busbar.api.serve import run
from busbar.api.services import Services
from busbar.api.settings import Settings

TICK_S = 0.15


@dataclass
class Stage:
    """A running portal and the tokens of its people."""

    url: str
    gateway_url: str
    tokens: dict[str, str]
    namespace: str
    kube: MemoryKube
    services: Services
    loop: asyncio.AbstractEventLoop
    held: set[str]

    @contextlib.contextmanager
    def holding(self, job: str) -> Iterator[None]:
        """Inside the block a job of this name does not end, however slow the browser is."""
        self.held.add(job)
        try:
            yield
        finally:
            self.held.discard(job)

    def wait_until_routed(self, service: str) -> None:
        """Waits until the gateway has the service's route: routes arrive separately, and later than the page's
        events."""
        ask = urllib.request.Request(
            f"{self.gateway_url}/v1/models", headers={"Authorization": f"Bearer {self.tokens['alice']}"}
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        until = time.monotonic() + 60
        while True:
            with direct.open(ask, timeout=60) as answer:
                models = {card["id"] for card in json.load(answer)["data"]}
            if service in models:
                return
            assert time.monotonic() < until, f"the gateway knows {sorted(models)}, not {service}"
            time.sleep(0.05)

    def kube_call(self, do: Callable[[MemoryKube], object]) -> None:
        """Script the cluster from the test's thread."""

        async def call() -> None:
            do(self.kube)

        asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)


@contextlib.contextmanager
def stage(*, gateway: bool = True, fast: bool = True) -> Iterator[Stage]:
    """Run the stage in a thread of its own until the block ends."""
    ready: list[Stage] = []
    failed: list[BaseException] = []
    up, down = threading.Event(), threading.Event()

    def body() -> None:
        try:
            asyncio.run(_run(ready, up, down, gateway, TICK_S if fast else 1.0))
        except BaseException as error:
            failed.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=body, name="stage")
    thread.start()
    up.wait()
    if failed:
        thread.join()
        raise failed[0]
    try:
        yield ready[0]
    finally:
        down.set()
        thread.join()
    if failed:
        raise failed[0]


async def _run(
    ready: list[Stage], up: threading.Event, down: threading.Event, with_gateway: bool, tick_s: float
) -> None:
    with tempfile.TemporaryDirectory(prefix="busbar-stage-") as folder:
        port, internal, operator_port, gateway_port, gateway_internal, engine_port = (
            free_port() for _ in range(6)
        )
        url = f"sqlite+aiosqlite:///{folder}/api.db"
        await migrate(url)
        settings = Settings(
            session_secret=secrets.token_hex(32),
            database_url=url,
            host="127.0.0.1",
            port=port,
            internal_port=internal,
            gateway_url=f"http://127.0.0.1:{gateway_port}",
            log_level="warning",
        )
        kube = MemoryKube(now)
        seed(kube)
        built = wiring.build(settings, kube, ScriptedOperator(kube), backoff_s=(0.05, 1.0))
        gateway_token = secrets.token_hex(16)
        kube.users[gateway_token] = {"username": settings.gateway_subject, "groups": []}
        actor = Actor(kube, f"http://127.0.0.1:{engine_port}", tick_s)
        stopping = asyncio.Event()
        serving = asyncio.create_task(run(built, stopping))
        acting = asyncio.create_task(actor.run())
        answering = await _listen(engine.app(), engine_port)
        operator = await _listen(actor.routes_app(), operator_port)
        child = None
        try:
            tokens = {}
            for name, role in (
                ("alice", CallerRole.USER),
                ("bob", CallerRole.USER),
                ("vera", CallerRole.USER),
                ("root", CallerRole.ADMIN),
            ):
                tokens[name], _ = await built.tokens.create(name, created_by="stage", role=role)
            if with_gateway:
                child = _gateway(
                    Path(folder), gateway_port, gateway_internal, operator_port, internal, gateway_token
                )
                await _answers(gateway_port)
            await _answers(port)
            ready.append(
                Stage(
                    f"http://127.0.0.1:{port}",
                    settings.gateway_url,
                    tokens,
                    "ada-lab",
                    kube,
                    built,
                    asyncio.get_running_loop(),
                    actor.held,
                )
            )
            up.set()
            await asyncio.to_thread(down.wait)
        finally:
            if child is not None:
                child.terminate()
                await asyncio.to_thread(child.wait, 60)  # it may deliver usage to the API on shutdown
            acting.cancel()
            stopping.set()
            for ended in await asyncio.gather(serving, acting, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended
            await answering.cleanup()
            await operator.cleanup()


async def _listen(app: web.Application, port: int) -> web.AppRunner:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


def _gateway(
    folder: Path, port: int, internal: int, operator_port: int, api_port: int, token: str
) -> subprocess.Popen[bytes]:
    token_file = folder / "token"
    token_file.write_text(token)
    state = folder / "gateway"
    state.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith("BUSBAR_")} | {
        "BUSBAR_GATEWAY_PUBLIC_ADDRESS": f"127.0.0.1:{port}",
        "BUSBAR_GATEWAY_INTERNAL_ADDRESS": f"127.0.0.1:{internal}",
        "BUSBAR_GATEWAY_STATE_DIR": str(state),
        "BUSBAR_GATEWAY_OPERATOR_URL": f"http://127.0.0.1:{operator_port}",
        "BUSBAR_GATEWAY_OPERATOR_TOKEN_FILE": str(token_file),
        "BUSBAR_GATEWAY_API_URL": f"http://127.0.0.1:{api_port}",
        "BUSBAR_GATEWAY_API_TOKEN_FILE": str(token_file),
    }
    with (folder / "gateway.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "busbar.gateway.main"], env=env, stdout=log, stderr=log
        )


async def _answers(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


if __name__ == "__main__":
    with stage(gateway="--no-gateway" not in sys.argv, fast="--slow" not in sys.argv) as running:
        print(running.url)
        for name_, token_ in running.tokens.items():
            print(f"  {name_}: {token_}")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
