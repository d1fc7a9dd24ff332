"""Checkpoints on disk: written block by block while training continues, committed by one rename.

On disk, beside the journal:

    step-00000050/state.safetensors    weights/<name>, m/<name>, v/<name>, low/<name>, rng/<device>
    step-00000050/manifest.json        step, identity, counters, CRC-32 of every tensor as it was in memory
    .tmp-step-00000100-<pid>/          a checkpoint that is being written, or was when its process died

A gang writes a file per rank instead (see `gang_folder`).

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from busbar.workloads.training.durable import fsync
from busbar.workloads.training.errors import CheckpointError, NotFinite
from busbar.workloads.training.layout import Entry, Layout
from busbar.workloads.training.loaded import MANIFEST, STATE, Loaded, canonical, read

PREFIX = "step-"
MANIFEST_BYTES = 2**20  # about 80 a tensor; and the header of the state file


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
            raise self._failed(step, problem) from problem
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
        self._remove_leftovers()
        problems: list[str] = []
        for step in self.steps():
            try:
                return Found(read(self._folder(step)), tuple(problems))
            except CheckpointError as problem:
                problems.append(str(problem))
                self._damaged.add(step)
        return Found(None, tuple(problems))

    def _remove_leftovers(self) -> None:
        for leftover in self.path.glob(".tmp-*") if self.path.is_dir() else ():
            shutil.rmtree(leftover, ignore_errors=True)

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

    def _failed(self, step: int, problem: object) -> CheckpointError:
        return CheckpointError(
            f"checkpoint of step {step} could not be written to {self.path}: {problem}; "
            "free space there, or lower checkpoint.keep"
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


def _write_files(
    folder: Path, step: int, layout: Layout, blocks: Iterable[torch.Tensor], facts: Mapping[str, Any]
) -> int:
    checksums = write_state(folder / STATE, step, layout, blocks)
    write_document(folder / MANIFEST, {**facts, "step": step, "savedAt": time.time(), "tensors": checksums})
    fsync(folder)
    return sum((folder / name).stat().st_size for name in (STATE, MANIFEST))


def write_state(path: Path, step: int, layout: Layout, blocks: Iterable[torch.Tensor]) -> dict[str, int]:
    """Write one file of state, durably; returns the checksum of each tensor. Raises CheckpointError or OSError."""
    checksums = dict.fromkeys((entry.name for entry in layout.entries), 0)
    with path.open("wb", buffering=0) as file:
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
    fsync(path)
    return checksums


def write_document(path: Path, body: Mapping[str, Any]) -> int:
    """Write a manifest with its checksum, durably; returns that."""
    crc32 = zlib.crc32(canonical(body))
    path.write_text(json.dumps({"crc32": crc32, "body": body}))
    fsync(path)
    return crc32


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
