"""Reading checkpoints: verified as a whole, then tensor by tensor into place.

One process writes one file of state. The ranks of a gang write one each, with extents of the tensors: any number of
ranks reads them, each the elements that it needs.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from busbar.workloads.machine.checksum import combine, crc32
from busbar.workloads.training.errors import CheckpointError
from busbar.workloads.training.layout import DTYPES, Entry, Extent

STATE, MANIFEST = "state.safetensors", "manifest.json"
READ_BYTES = 2**20
READERS = 4  # threads that read and verify


def shard_name(rank: int, ranks: int) -> str:
    """The file of one rank's state; its checksums are beside it, in a file that ends in .json."""
    return f"state-{rank}-of-{ranks}.safetensors"


@dataclass(frozen=True)
class StateFile:
    """One file of state; `extents` of the tensors of which it has a part."""

    path: Path
    data_start: int
    entries: Mapping[str, Entry]
    extents: Mapping[str, Extent]

    def start(self, name: str) -> int:
        extent = self.extents.get(name)
        return 0 if extent is None else extent.start

    def read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the flat tensor `target` with elements of the file's part, counted from its begin."""
        entry = self.entries[name]
        offset = self.data_start + entry.begin + start * entry.dtype.itemsize
        with self.path.open("rb") as file:
            file.seek(offset)
            if target.device.type == "cpu":
                _read_exactly(file, target)
                return
            room = torch.empty(min(target.numel(), READ_BYTES // entry.dtype.itemsize), dtype=entry.dtype)
            for first in range(0, target.numel(), room.numel()):
                part = target[first : first + room.numel()]
                _read_exactly(file, room[: part.numel()])
                part.copy_(room[: part.numel()])


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint; its tensors are read when they are asked for."""

    step: int
    manifest: Mapping[str, Any]
    files: tuple[StateFile, ...]
    name: str  # for people
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)  # that are in no file of these

    @property
    def size(self) -> int:
        return sum(each.path.stat().st_size for each in self.files)

    @property
    def names(self) -> set[str]:
        return {name for each in self.files for name in each.entries} | set(self.others)

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of one tensor."""
        if name in self.others:
            return self.others[name]
        parts = [each.entries[name] for each in self.files if name in each.entries]
        target = torch.empty(sum(part.elements for part in parts), dtype=parts[0].dtype)
        self.read_into(name, 0, target)
        return target

    def read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the flat tensor `target` with elements from `start` on. Raises CheckpointError."""
        missing = target.numel()
        for each in self.files:
            if (entry := each.entries.get(name)) is None or entry.dtype != target.dtype:
                continue
            begin = each.start(name)
            first, last = max(start, begin), min(start + target.numel(), begin + entry.elements)
            if first < last:
                each.read_into(name, first - begin, target[first - start : last - start])
                missing -= last - first
        if missing:
            raise CheckpointError(f"{self.name}: {name} is not {target.numel()} x {target.dtype}")


def read(folder: Path, mine: Callable[[int], bool] = lambda index: True) -> Loaded:
    """Verify one checkpoint: every byte is read once. Raises CheckpointError saying what does not hold.

    Args:
        mine: whether to verify the bytes of a file, by its number; the other ranks of a gang verify the others.
    """
    with _explained(folder.name):
        body = document(folder / MANIFEST)
        files = _shards(folder, body) if "ranks" in body else [(_open(folder / STATE), body["tensors"])]
        for index, (file, checksums) in enumerate(files):
            if mine(index):
                _verify(file, checksums, folder.name)
        return Loaded(int(body["step"]), body, tuple(file for file, _ in files), folder.name)


def read_part(
    name: str, body: Mapping[str, Any], state: Path, part: Mapping[str, Any], *, verified: bool = False
) -> Loaded:
    """The same of one process's part, whose file may be anywhere; errors call it `name`.

    Args:
        body: of the manifest.
        part: of it, what this file holds: checksums of its tensors and, of a gang, their extents.
        verified: its bytes have been compared with the checksums already.
    """
    with _explained(name):
        file = _open(state, _extents(part))
        if not verified:
            _verify(file, part["tensors"], name)
        return Loaded(int(body["step"]), body, (file,), name)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raises what does not hold of the checkpoint `name` as a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{name}: unreadable ({problem!r})") from problem


def document(path: Path, crc32: int | None = None) -> Any:
    """The body of a manifest, which has its checksum in itself, and may be the one that another one names."""
    manifest = json.loads(path.read_text())
    body = manifest["body"]
    if manifest["crc32"] != zlib.crc32(canonical(body)) or crc32 not in (None, manifest["crc32"]):
        raise CheckpointError(f"{path.parent.name}: the manifest does not match its checksum")
    return body


def _shards(folder: Path, body: Mapping[str, Any]) -> list[tuple[StateFile, Mapping[str, int]]]:
    """The files of a gang's checkpoint, all of them, whose extents are whole tensors together."""
    found = []
    for rank, stated in enumerate(body["ranks"]):
        path = folder / shard_name(rank, len(body["ranks"]))
        part = document(path.with_suffix(".json"), int(stated))
        found.append((_open(path, _extents(part)), part["tensors"]))
    covered: dict[str, int] = {}
    for file, _ in found:
        for name, entry in file.entries.items():
            if file.start(name) != covered.get(name, 0):
                raise CheckpointError(f"{folder.name}: the parts of {name} do not join")
            covered[name] = file.start(name) + entry.elements
    short = [name for name, whole in body["elements"].items() if covered.get(name, 0) != whole]
    if short:
        raise CheckpointError(f"{folder.name}: {short[0]} is not whole")
    return found


def _extents(part: Mapping[str, Any]) -> dict[str, Extent]:
    """Of the tensors of which a file has a part, as its manifest says."""
    stated = part.get("extents", {})
    return {name: Extent(int(start), int(whole)) for name, (start, whole) in stated.items()}


def _open(path: Path, extents: Mapping[str, Extent] | None = None) -> StateFile:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        described = json.loads(file.read(length))
    entries = {
        name: Entry(name, DTYPES[item["dtype"]], math.prod(item["shape"]), int(item["data_offsets"][0]))
        for name, item in described.items()
        if name != "__metadata__"
    }
    return StateFile(path, 8 + length, entries, extents or {})


def _verify(state: StateFile, checksums: Mapping[str, int], name: str) -> None:
    if set(state.entries) != set(checksums):
        raise CheckpointError(f"{name}: its tensors are not those of its manifest")
    ranges = [
        (entry, start, min(entry.size - start, READ_BYTES))
        for entry in sorted(state.entries.values(), key=lambda entry: entry.begin)
        for start in range(0, entry.size, READ_BYTES)
    ]
    shares = [ranges[index::READERS] for index in range(READERS)]
    parts: dict[tuple[str, int], int] = {}
    with state.path.open("rb", buffering=0) as file, ThreadPoolExecutor(READERS) as pool:
        for found in pool.map(lambda share: _checksums(file.fileno(), state.data_start, share), shares):
            parts |= found
    whole = dict.fromkeys(checksums, 0)
    for entry, start, length in ranges:
        whole[entry.name] = combine(whole[entry.name], parts[entry.name, start], length)
    for tensor in state.entries:
        if whole[tensor] != checksums[tensor]:
            raise CheckpointError(f"{name}: {tensor} does not match its checksum")


def _checksums(
    descriptor: int, data_start: int, ranges: Sequence[tuple[Entry, int, int]]
) -> dict[tuple[str, int], int]:
    """The CRC-32 of each range, by tensor and first byte."""
    room = memoryview(bytearray(READ_BYTES))
    found = {}
    for entry, start, length in ranges:
        if os.preadv(descriptor, [room[:length]], data_start + entry.begin + start) < length:
            raise EOFError("the file ends early")
        found[entry.name, start] = crc32(room[:length])
    return found


def _read_exactly(file: Any, target: torch.Tensor) -> None:
    room = target.view(torch.uint8).numpy().data
    while room:
        count = file.readinto(room)
        if not count:
            raise CheckpointError("the checkpoint's file ended while it was read")
        room = room[count:]


def canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True).encode()
