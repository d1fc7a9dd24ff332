"""`busbar-api` as a process of its own, as in its Deployment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx2
from tests.cluster.apiserver import ApiServer
from tests.free_port import free_port

COMMAND = [sys.executable, "-m", "busbar.api.main"]
LEADS = "this replica writes the history"
_SECRET = "0123456789abcdefghijklmnopqrstuvwxyz"


def environment(
    server: ApiServer, folder: Path, database_url: str, port: int, internal: int, token: str = ""
) -> dict[str, str]:
    """Its variables; its files are in `folder`. Without a token it has the rights that the chart gives it."""
    config, secret = folder / "kubeconfig", folder / "secret"
    secret.write_text(_SECRET)
    cluster = {"server": server.url, "certificate-authority": str(server.ca_file)}
    token = token or server.service_account_token("busbar-system", "busbar-api")
    document = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    config.write_text(json.dumps(document))
    return {k: v for k, v in os.environ.items() if not k.startswith("BUSBAR_")} | {
        "BUSBAR_API_DATABASE_URL": database_url,
        "BUSBAR_API_SESSION_SECRET_FILE": str(secret),
        "BUSBAR_API_KUBECONFIG": str(config),
        "BUSBAR_API_HOST": "127.0.0.1",
        "BUSBAR_API_PORT": str(port),
        "BUSBAR_API_INTERNAL_PORT": str(internal),
    }


@dataclass
class ApiProcess:
    """One replica; `start` makes another process in its place where it has ended."""

    server: ApiServer
    folder: Path
    database_url: str
    command: list[str] = field(default_factory=lambda: COMMAND)
    token: str = ""
    """For the API server; "": its own service account's."""
    port: int = field(default_factory=free_port)
    internal: int = field(default_factory=free_port)

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.http = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=3)
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end(signal.SIGKILL)
        await self.http.aclose()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def terms(self) -> int:
        """How often it began to write the history."""
        return self.log.count(LEADS)

    async def start(self) -> None:
        """Starts it, and waits until it is ready."""
        variables = environment(
            self.server, self.folder, self.database_url, self.port, self.internal, self.token
        )
        with (self.folder / "log").open("a") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, env=variables, stdout=log, stderr=log
            )
        async with asyncio.timeout(60):
            while not await self.is_ready():
                assert self.process.returncode is None, self.log[-2000:]
                await asyncio.sleep(0.1)

    async def is_ready(self) -> bool:
        try:
            return (await self.http.get("/ready")).status_code == 200
        except httpx2.HTTPError:
            return False

    async def end(self, how: signal.Signals) -> None:
        """Ends it where it runs, and waits for that."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(how)
        await self.process.wait()
