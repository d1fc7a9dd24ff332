"""Checkpoints on disk: written block by block while training continues, committed by one rename.

On disk, beside the journal:

    step-00000050/state.safetensors    weights/<name>, m/<name>, v/<name>, low/<name>, rng/<device>
    step-00000050/manifest.json        step, identity, counters, CRC-32 of every tensor as it was in memory
    .tmp-step-00000100-<pid>/          a checkpoint that is being written, or was when its process died

The format does not depend on the plan: a run may resume with its state elsewhere. Writing: fill the temporary
folder, fsync each file and the folder, rename, fsync the parent. Reading goes from the newest to the oldest
and takes the first whose manifest, sizes and every checksum hold; others are named and skipped. Neither direction
makes a copy of the state: blocks are written from the snapshot's buffers, and read into their place.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from busbar.workloads.training.durable import fsync
from busbar.workloads.training.errors import CheckpointError, NotFinite

PREFIX = "step-"
STATE, MANIFEST = "state.safetensors", "manifest.json"
READ_BYTES = 4 * 2**20
MANIFEST_BYTES = 2**20  # about 80 a tensor; and the header of the state file
_TYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One flat tensor of the file; `begin` counts bytes from the start of the data section."""

    name: str
    dtype: torch.dtype
    elements: int
    begin: int

    @property
    def size(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.size


@dataclass(frozen=True)
class Layout:
    """The offset of every tensor in `state.safetensors`: wide types first, so that none is misaligned."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, torch.dtype, int]]) -> Layout:
        """The layout of (name, dtype, elements)."""
        entries, begin = [], 0
        for name, dtype, elements in sorted(tensors, key=lambda item: -item[1].itemsize):
            entries.append(Entry(name, dtype, elements, begin))
            begin = entries[-1].end
        return cls(tuple(entries))

    @property
    def size(self) -> int:
        return self.entries[-1].end if self.entries else 0

    def header(self) -> bytes:
        """The safetensors header, padded so that the data section starts at a multiple of 4096 bytes."""
        described = {
            entry.name: {
                "dtype": _TYPES[entry.dtype],
                "shape": [entry.elements],
                "data_offsets": [entry.begin, entry.end],
            }
            for entry in self.entries
        }
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 4096)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint; its tensors are read when they are asked for."""

    step: int
    manifest: Mapping[str, Any]
    path: Path  # of the state file
    data_start: int
    entries: Mapping[str, Entry]

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of one tensor."""
        entry = self.entries[name]
        target = torch.empty(entry.elements, dtype=entry.dtype)
        self.read_into(name, 0, target)
        return target

    def read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the flat tensor `target` with elements from `start` on. Raises CheckpointError."""
        entry = self.entries[name]
        offset = self.data_start + entry.begin + start * entry.dtype.itemsize
        if target.dtype != entry.dtype or start + target.numel() > entry.elements:
            raise CheckpointError(f"{self.path.parent.name}: {name} is not {target.numel()} x {target.dtype}")
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
class Found:
    """The content of the folder: the newest valid checkpoint, and why newer ones were skipped."""

    checkpoint: Loaded | None
    passed_over: tuple[str, ...]


class CheckpointFolder:
    """One folder of checkpoints, of which the newest `keep` valid ones are kept.

    Fewer stay, but one always, where the disk has no room for the next one otherwise; `note` is told.
    """

    def __init__(self, path: Path, keep: int, note: Callable[[str], object] = lambda text: None) -> None:
        self.path, self.keep, self._note = path, keep, note
        self._damaged: set[int] = set()  # passed over; they never count among the `keep`

    def write(
        self, step: int, layout: Layout, blocks: Iterable[torch.Tensor], facts: Mapping[str, Any]
    ) -> int:
        """Make the checkpoint of `step` durable; returns its bytes. Raises CheckpointError.

        `blocks` are the bytes of the data section in order, as uint8 tensors.
        """
        target = self._folder(step)
        temporary = self.path / f".tmp-{target.name}-{os.getpid()}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self._make_room(layout.size)
            size = _write_files(temporary, step, layout, blocks, facts)
            _replace(temporary, target)
        except OSError as problem:
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.path}: {problem}; "
                "free space there, or lower checkpoint.keep"
            ) from problem
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._remove_old(step)
        return size

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, newest first, unverified."""
        if not self.path.is_dir():
            return []
        names = [entry.name for entry in self.path.iterdir() if entry.name.startswith(PREFIX)]
        return sorted(
            (int(name[len(PREFIX) :]) for name in names if name[len(PREFIX) :].isdigit()), reverse=True
        )

    def newest(self) -> Found:
        """The newest checkpoint that is whole. Half-written ones of dead processes are removed."""
        for leftover in self.path.glob(".tmp-*") if self.path.is_dir() else ():
            shutil.rmtree(leftover, ignore_errors=True)
        problems: list[str] = []
        for step in self.steps():
            try:
                return Found(read(self._folder(step)), tuple(problems))
            except CheckpointError as problem:
                problems.append(str(problem))
                self._damaged.add(step)
        return Found(None, tuple(problems))

    def _make_room(self, size: int) -> None:
        """Remove damaged and then the oldest good checkpoints, if that makes room for `size` bytes."""
        good = [step for step in self.steps() if step not in self._damaged]
        missing = size + MANIFEST_BYTES - shutil.disk_usage(self.path).free
        gone: list[int] = []
        for step in [*sorted(self._damaged), *reversed(good[1:])]:
            if missing <= 0:
                break
            gone.append(step)
            missing -= sum(file.stat().st_size for file in self._folder(step).glob("*"))
        if missing > 0:  # none of them would help
            return
        for step in gone:
            shutil.rmtree(self._folder(step), ignore_errors=True)
            self._damaged.discard(step)
            self._note(
                f"warning: the disk is full: removed the checkpoint of step {step} to make room for the next"
            )

    def _folder(self, step: int) -> Path:
        return self.path / f"{PREFIX}{step:08d}"

    def _remove_old(self, written: int) -> None:
        """Keep the newest `keep` good ones; a damaged one may be newer than the one just `written`."""
        self._damaged.discard(written)
        good = [step for step in self.steps() if step not in self._damaged]
        for step in [*good[self.keep :], *self._damaged]:
            shutil.rmtree(self._folder(step), ignore_errors=True)
        self._damaged.clear()


def _replace(temporary: Path, target: Path) -> None:
    """Commit. An existing folder of the same name (one that was skipped) is moved aside first."""
    aside = target.with_name(f".tmp-old-{target.name}")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    temporary.rename(target)
    fsync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def read(folder: Path) -> Loaded:
    """Verify one checkpoint: every byte is read once. Raises CheckpointError saying what does not hold."""
    path = folder / STATE
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        body = manifest["body"]
        if manifest["crc32"] != zlib.crc32(_canonical(body)):
            raise CheckpointError(f"{folder.name}: the manifest does not match its checksum")
        start, entries = _read_header(path)
        if set(entries) != set(body["tensors"]):
            raise CheckpointError(f"{folder.name}: its tensors are not those of its manifest")
        with path.open("rb") as file:
            for entry in sorted(entries.values(), key=lambda entry: entry.begin):
                file.seek(start + entry.begin)
                if _checksum(file, entry.size) != body["tensors"][entry.name]:
                    raise CheckpointError(f"{folder.name}: {entry.name} does not match its checksum")
        return Loaded(int(body["step"]), body, path, start, entries)
    except CheckpointError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{folder.name}: unreadable ({problem!r})") from problem


def _read_header(path: Path) -> tuple[int, dict[str, Entry]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        described = json.loads(file.read(length))
    entries = {
        name: Entry(name, _DTYPES[item["dtype"]], math.prod(item["shape"]), int(item["data_offsets"][0]))
        for name, item in described.items()
        if name != "__metadata__"
    }
    return 8 + length, entries


def _checksum(file: Any, size: int) -> int:
    crc = 0
    while size:
        data = file.read(min(size, READ_BYTES))
        if not data:
            raise EOFError("the file ends early")
        crc, size = zlib.crc32(data, crc), size - len(data)
    return crc


def _read_exactly(file: Any, target: torch.Tensor) -> None:
    room = target.view(torch.uint8).numpy().data
    while room:
        count = file.readinto(room)
        if not count:
            raise CheckpointError("the checkpoint's file ended while it was read")
        room = room[count:]


def _write_files(
    folder: Path, step: int, layout: Layout, blocks: Iterable[torch.Tensor], facts: Mapping[str, Any]
) -> int:
    checksums = dict.fromkeys((entry.name for entry in layout.entries), 0)
    with (folder / STATE).open("wb", buffering=0) as file:
        _write_all(file, memoryview(layout.header()))
        position = 0
        for block in blocks:
            for entry, part in _parts(layout, position, block):
                if not is_finite(part.view(entry.dtype)):
                    raise NotFinite(
                        f"checkpoint of step {step} is not written: {entry.name} holds numbers that are not "
                        "finite; the checkpoints before it stay"
                    )
                checksums[entry.name] = zlib.crc32(part.numpy().data, checksums[entry.name])
            _write_all(file, block.numpy().data)
            position += block.numel()
    if position != layout.size:
        raise CheckpointError(f"checkpoint of step {step}: {position} of {layout.size} bytes came")
    body = {**facts, "step": step, "savedAt": time.time(), "tensors": checksums}
    (folder / MANIFEST).write_text(json.dumps({"crc32": zlib.crc32(_canonical(body)), "body": body}))
    for name in (STATE, MANIFEST):
        fsync(folder / name)
    fsync(folder)
    return sum((folder / name).stat().st_size for name in (STATE, MANIFEST))


def _parts(layout: Layout, position: int, block: torch.Tensor) -> Iterable[tuple[Entry, torch.Tensor]]:
    """The runs of tensors that lie in `block`, which starts at byte `position` of the data section."""
    for entry in layout.entries:
        first, last = max(entry.begin, position), min(entry.end, position + block.numel())
        if first < last:
            yield entry, block[first - position : last - position]


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is a finite number; needs no memory beside the tensor."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True).encode()
