"""`busbar-api` starts on a full disk: it says so, and goes on by itself when there is room."""

from __future__ import annotations

import io
import logging
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event
from tests.api.conftest import SECRET

from busbar.api import main as api


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    monkeypatch.setenv("BUSBAR_API_DATABASE_URL", f"sqlite+aiosqlite:///{tmp_path}/b.db")
    monkeypatch.setenv("BUSBAR_API_SESSION_SECRET_FILE", str(secret))
    monkeypatch.setattr("busbar.kube.logs.set_up", lambda *_: None)
    return tmp_path / "b.db"


@contextmanager
def connections(do: Any) -> Iterator[None]:
    """Does something with each new connection of SQLite."""

    def new(connection: Any, _record: Any) -> None:
        do(connection)

    event.listen(Engine, "connect", new)
    try:
        yield
    finally:
        event.remove(Engine, "connect", new)


def without_room(connection: Any) -> None:
    connection.execute("PRAGMA max_page_count=8")


def without_shared_memory(_connection: Any) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def test_a_migration_without_room_says_so_and_can_be_told_from_other_failures(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with connections(without_room):
        assert api.main(["migrate"]) == api.NO_ROOM
    assert f"the disk of {database} is full" in said.getvalue()
    with connections(without_shared_memory):
        with pytest.raises(Exception, match="disk I/O error"):
            api.main(["migrate"])
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
            assert api.main(["migrate"]) == api.NO_ROOM
    assert api.main(["migrate"]) == 0, "a migration that was interrupted has done nothing"


def test_serving_begins_as_soon_as_there_is_room(
    database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes, waits, served = [api.NO_ROOM, api.NO_ROOM, 0], list[float](), list[str]()

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, codes.pop(0))

    async def serve(_settings: object) -> None:
        served.append("served")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr("busbar.api.serve.serve", serve)
    with caplog.at_level(logging.ERROR):
        assert api.main([]) == 0
    assert (codes, waits, served) == ([], [api.AGAIN_S, api.AGAIN_S], ["served"])
    assert "full" in caplog.text
    codes.append(1)
    with pytest.raises(subprocess.CalledProcessError):
        api.main([])
    assert served == ["served"]
