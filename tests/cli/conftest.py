"""The real API application behind a real HTTP server on loopback, and `busbar` run against it.

The cluster is that of tests/api: tenant `ada` with alice and the namespace `ada-lab`, tenant `bob-corp` with bob.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.api.conftest import JOB, World, settings, sqlite_template, sqlite_url, world
from tests.cli.loopback import app_of, listening

from busbar.cli.client import Client
from busbar.cli.main import run

__all__ = ["settings", "sqlite_template", "sqlite_url", "world"]


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def run_busbar(*arguments: str, stdin: str = "") -> Done:
    """Run a command line in this process."""
    out, err, saved = _text(), _text(), sys.stdin
    sys.stdin = io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(arguments)
    finally:
        sys.stdin = saved
    return Done(code, _read(out), _read(err))


def _text() -> io.TextIOWrapper:
    """Like a real standard output: a text layer over bytes."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="", write_through=True)


def _read(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


@dataclass
class Site:
    """A server, and a person at a terminal."""

    world: World
    url: str
    folder: Path
    token: str
    monkeypatch: pytest.MonkeyPatch

    async def busbar(self, *arguments: str, stdin: str = "") -> Done:
        """Run a command as the person; returns after the store has seen its changes."""
        done = await asyncio.to_thread(run_busbar, *arguments, stdin=stdin)
        await self.world.settle()
        return done

    async def be(self, subject: str) -> None:
        """Run the following commands as another person."""
        self.monkeypatch.setenv("BUSBAR_TOKEN", await self.world.token(subject))

    def client(self) -> Client:
        return Client(self.url, self.token)

    def manifest(self, name: str = "run.yaml", document: object = None) -> str:
        """A file with a job (or the document given)."""
        path = self.folder / name
        path.write_text(yaml.safe_dump(document or JOB))
        return str(path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty configuration folder, without the machine's own settings."""
    for name in ("BUSBAR_SERVER", "BUSBAR_TOKEN", "BUSBAR_NAMESPACE", "BUSBAR_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
async def site(world: World, home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """The API on a loopback port; the person is alice, identified by environment variables without a login."""
    async with listening(app_of(world.public)) as url:
        token = await world.token("alice")
        monkeypatch.setenv("BUSBAR_SERVER", url)
        monkeypatch.setenv("BUSBAR_TOKEN", token)
        yield Site(world, url, home, token, monkeypatch)
