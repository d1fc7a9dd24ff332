"""Usage records on disk until the API has them: append, fsync, deliver in order, forget.

Files in one folder, written by one process (a lock file makes sure):

    gateway-id            who we are to the API; a new folder is a new gateway
    acknowledged          highest sequence number the API has taken
    00000000000000000001.ndjson   segments, named by their first number; a line is `crc32 json`
    lock

A record gets its number when it is appended, and (gateway id, number) is what the API counts once, so
delivering twice is harmless and delivering in order loses nothing. A line half written when the machine
stopped has a wrong checksum and is cut off at the next start: only the last line can be such a line,
anything else is damage and refused. Segments are removed once all their records are acknowledged.
What the API has taken can be noted and removed on a full disk too: the two small files have a fixed length and are
overwritten in place.

This module is plain blocking file work; `busbar.gateway.usage_recorder` runs it off the event loop.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from busbar.gateway.errors import SpoolError
from busbar.gateway.files import fsync_folder, overwrite, write_atomically

Record = dict[str, Any]


class Spool:
    """The disk side of usage counting. Not thread-safe, except `bytes` and `oldest`: one caller at a time."""

    def __init__(self, folder: Path, *, segment_bytes: int, limit_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._limit_bytes = limit_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock(folder / "lock")
            self._id, self._taken = folder / "gateway-id", folder / "acknowledged"
            self.gateway_id = _gateway_id(self._id)
            self.acknowledged = _acknowledged(self._taken)
            self._pending: dict[int, Record] = {}
            self._sizes: dict[Path, int] = {}
            self._last_in: dict[Path, int] = {}
            self._load()
            self.bytes = sum(self._sizes.values())
            self.oldest: Record | None = next(iter(self._pending.values()), None)
        except OSError as error:
            raise SpoolError(f"usage spool {folder}: {error}; give the gateway a writable folder") from error
        self._next = max([self.acknowledged, *self._pending]) + 1
        self._first_of_this_run = self._next
        self._open: int | None = None
        self._open_path: Path | None = None

    def __len__(self) -> int:
        """Records not yet acknowledged."""
        return len(self._pending)

    @property
    def full(self) -> bool:
        return self.bytes >= self._limit_bytes

    def records(self) -> Iterator[Record]:
        """Records not yet acknowledged, in order."""
        for seq in sorted(self._pending):
            yield self._pending[seq]

    def batch(self, size: int) -> list[Record]:
        """The first `size` records not yet acknowledged, in order."""
        return [self._pending[seq] for seq in sorted(self._pending)[:size]]

    def append(self, records: Iterable[Mapping[str, Any]]) -> list[Record]:
        """Number the records, write them and fsync. Returns them with `seq`.

        Raises SpoolError when the disk refuses; then none of them is pending, and what reached the file is
        cut off again.
        """
        numbered = [{**record, "seq": self._next + index} for index, record in enumerate(records)]
        if not numbered:
            return []
        data = b"".join(_line(record) for record in numbered)
        path, handle = self._segment(self._next)
        size = self._sizes.get(path, 0)
        try:
            _write_all(handle, data)
            os.fsync(handle)
        except OSError as error:
            try:
                os.ftruncate(handle, size)
            except OSError:
                self._close_segment()
            raise SpoolError(f"usage spool {path}: {error}; free disk space") from error
        self._sizes[path] = size + len(data)
        self.bytes += len(data)
        self._last_in[path] = numbered[-1]["seq"]
        self._pending.update((record["seq"], record) for record in numbered)
        self._next += len(numbered)
        self.oldest = self.oldest or numbered[0]
        return numbered

    def acknowledge(self, through: int) -> None:
        """Forget all records up to and including `through`, which the API has taken.

        Raises SpoolError when the disk refuses; what was not removed then is removed by the next call, or at the next start.
        """
        if through <= self.acknowledged:
            return
        try:
            self._acknowledge(min(through, self._next - 1))
        except OSError as error:
            raise SpoolError(f"usage spool {self._folder}: {error}") from error

    def _acknowledge(self, through: int) -> None:
        overwrite(self._taken, _number(through))
        self.acknowledged = through
        for seq in [seq for seq in self._pending if seq <= through]:
            del self._pending[seq]
        self.oldest = next(iter(self._pending.values()), None)  # they are pending in their order
        for path in [path for path, last in self._last_in.items() if last <= through]:
            if path == self._open_path:
                self._close_segment()
            path.unlink(missing_ok=True)
            del self._last_in[path]
            self.bytes -= self._sizes.pop(path)

    def was_restored(self, taken: int) -> None:
        """The API has numbers of ours that were never given out here: this folder is an old copy.

        What the copy held is known to the API already and forgotten. What came since start would be taken
        for repeats under the old id, so from now on we are a new gateway to the API.
        """
        self.acknowledge(min(taken, self._first_of_this_run - 1))
        new = str(uuid.uuid4())
        try:
            overwrite(self._id, f"{new}\n".encode())
        except OSError as error:
            raise SpoolError(f"usage spool {self._id}: {error}") from error
        self.gateway_id = new

    def close(self) -> None:
        self._close_segment()
        os.close(self._lock)

    def _segment(self, first: int) -> tuple[Path, int]:
        if self._open_path is not None and self._sizes.get(self._open_path, 0) >= self._segment_bytes:
            self._close_segment()
        if self._open is None or self._open_path is None:
            path = self._folder / f"{first:020d}.ndjson"
            try:
                self._open = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                fsync_folder(self._folder)
            except OSError as error:
                self._close_segment()
                raise SpoolError(f"usage spool {path}: {error}; free disk space") from error
            self._open_path = path
        return self._open_path, self._open

    def _close_segment(self) -> None:
        if self._open is not None:
            os.close(self._open)
        self._open = None
        self._open_path = None

    def _load(self) -> None:
        paths = sorted(self._folder.glob("*.ndjson"))
        for path in paths:
            records, good = _read_segment(path, last=path == paths[-1])
            if good < path.stat().st_size:
                os.truncate(path, good)
            live = [record for record in records if record["seq"] > self.acknowledged]
            if not live:
                path.unlink()
                continue
            self._sizes[path] = good
            self._last_in[path] = records[-1]["seq"]
            self._pending.update((record["seq"], record) for record in live)


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read_segment(path: Path, *, last: bool) -> tuple[list[Record], int]:
    """Records of a segment and the number of good bytes."""
    records: list[Record] = []
    good = 0
    data = path.read_bytes()
    while good < len(data):
        end = data.find(b"\n", good)
        record = _parse_line(data[good:end]) if end >= 0 else None
        if record is None:
            tail = end < 0 or end == len(data) - 1
            if not (last and tail):
                raise SpoolError(
                    f"usage spool {path}: damaged at byte {good}; move the file away to start without it "
                    "(its remaining records will not be counted)"
                )
            break
        records.append(record)
        good = end + 1
    return records, good


def _parse_line(line: bytes) -> Record | None:
    checksum, _, text = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("seq"), int) else None


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _lock(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise SpoolError(f"{path} is held by another gateway; one state folder serves one process") from error
    return handle


def _gateway_id(path: Path) -> str:
    if path.exists():
        text = path.read_text().strip()
        if text:
            return text
    text = str(uuid.uuid4())
    write_atomically(path, f"{text}\n".encode())
    return text


def _number(through: int) -> bytes:
    """The content of `acknowledged`: of one length, whatever the number."""
    return b"%020d\n" % through


def _acknowledged(path: Path) -> int:
    """What the file says; it is made, or given its length, where that is missing."""
    try:
        text = path.read_text() if path.exists() else "0"
        through = int(text)
        if len(text) != len(_number(through)):
            write_atomically(path, _number(through))
        return through
    except ValueError as error:
        raise SpoolError(f"{path} is not a number; it holds the last number the API has taken") from error
