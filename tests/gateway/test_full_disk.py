"""A full disk under the gateway: what was used is delivered, once; nothing is served uncounted; and it goes on by itself."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gateway.parts import PATIENCE_S
from tests.gateway.test_usage import Api, die, recorder, spool, use

from busbar.gateway.errors import Unavailable


class Disk:
    """A folder's disk. While it is full, files can be overwritten and removed, and nothing can be made or grow."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.full = False
        self._folder = str(folder)
        self._open, self._write = os.open, os.write
        patch.setattr(os, "open", self._opened)
        patch.setattr(os, "write", self._written)

    def _opened(self, path: str | Path, flags: int, mode: int = 0o777) -> int:
        grows = flags & os.O_TRUNC or (flags & os.O_CREAT and not os.path.exists(path))
        if self.full and grows and str(path).startswith(self._folder):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return self._open(path, flags, mode)

    def _written(self, handle: int, data: bytes) -> int:
        if self.full and os.readlink(f"/proc/self/fd/{handle}").startswith(self._folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(handle, data)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.005)


async def test_on_a_full_disk_usage_is_delivered_requests_are_refused_and_both_end_with_it(
    tmp_path: Path, disk: Disk
) -> None:
    api = Api()
    api.away = True
    here = recorder(tmp_path, api)
    here.start()
    for number in (1, 2, 3):
        use(here, number)
    await until(lambda: here.spool_bytes > 0 and not here._ended)
    disk.full = True
    api.away = False
    await until(lambda: here.undelivered == 0 and here.spool_bytes == 0)  # so what had filled it is gone

    use(here, 4)  # nobody knows yet that its record cannot be written
    await until(lambda: here._disk_failed)
    with pytest.raises(Unavailable, match="disk is full") as refusal:
        use(here, 5)
    assert refusal.value.retry_after_s
    assert len(api.taken) == 3

    disk.full = False
    await until(lambda: not here._disk_failed)
    use(here, 6)
    await until(lambda: len(api.taken) == 5)
    await here.stop(PATIENCE_S)
    assert [record["requestId"] for record in api.taken.values()] == [f"req-{n}" for n in (1, 2, 3, 4, 6)]


async def test_a_gateway_that_is_killed_on_a_full_disk_starts_again_and_counts_what_it_served(
    tmp_path: Path, disk: Disk
) -> None:
    api = Api()
    first = recorder(tmp_path, api)
    first.start()
    use(first, 1)
    await until(lambda: len(api.taken) == 1 and first.undelivered == 0)
    disk.full = True
    use(first, 2)
    use(first, 3, end=False)
    await until(lambda: first._disk_failed)
    die(first)

    heir = recorder(tmp_path, api)
    heir.start()
    await until(lambda: heir._disk_failed)
    disk.full = False
    await until(lambda: len(api.taken) == 3)
    await heir.stop(PATIENCE_S)
    assert sorted(seq for _, seq in api.taken) == [1, 2, 3]
    assert sorted(record["requestId"] for record in api.taken.values()) == ["req-1", "req-2", "req-3"]


def test_a_folder_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "acknowledged").write_text("41\n")
    opened = spool(tmp_path)
    assert opened.append([{"requestId": "r"}])[0]["seq"] == 42
    opened.acknowledge(42)
    opened.close()
    assert spool(tmp_path).acknowledged == 42
