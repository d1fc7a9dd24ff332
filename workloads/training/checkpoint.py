"""Checkpoints: a quick copy at a step's end, written in the background, committed by one rename.

On disk, beside the journal:

    step-00000050/state.safetensors    weights/<name>, m/<name>, v/<name>, master/<name>, rng/<device>
    step-00000050/manifest.json        step, identity, CRC-32 of every tensor *as it was in memory*, sizes
    .tmp-step-00000100-<pid>/          one that is being written, or was when its process died

The form does not depend on the plan: a run may resume with its state elsewhere. Writing: fill the temporary
folder, fsync each file and the folder, rename, fsync the parent. Reading goes from the newest to the oldest
and takes the first whose manifest, sizes and every checksum hold; others are named and passed over.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from busbar.workloads.training.durable import fsync
from busbar.workloads.training.errors import CheckpointError

PREFIX = "step-"
STATE, MANIFEST = "state.safetensors", "manifest.json"


@dataclass(frozen=True)
class Loaded:
    step: int
    tensors: Mapping[str, torch.Tensor]
    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """What was in the folder: the newest good checkpoint, and why newer ones were passed over."""

    checkpoint: Loaded | None
    passed_over: tuple[str, ...]


class CheckpointFolder:
    """One folder of checkpoints, of which the newest `keep` good ones stay."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep
        self._damaged: set[int] = set()  # passed over; they never count among the `keep`

    def write(self, step: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> int:
        """Make the checkpoint of `step` durable; returns its bytes. Raises CheckpointError."""
        from safetensors import SafetensorError  # what a full disk is called inside `save_file`

        target = self.path / f"{PREFIX}{step:08d}"
        temporary = self.path / f".tmp-{target.name}-{os.getpid()}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            size = _write_files(temporary, step, tensors, facts)
            _replace(temporary, target)
        except (OSError, SafetensorError) as problem:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.path}: {problem}; "
                "free space there, or lower checkpoint.keep"
            ) from problem
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
            folder = self.path / f"{PREFIX}{step:08d}"
            try:
                return Found(read(folder), tuple(problems))
            except CheckpointError as problem:
                problems.append(str(problem))
                self._damaged.add(step)
        return Found(None, tuple(problems))

    def _remove_old(self, written: int) -> None:
        """Keep the newest `keep` good ones; a damaged one may be newer than the one just `written`."""
        self._damaged.discard(written)
        good = [step for step in self.steps() if step not in self._damaged]
        for step in [*good[self.keep :], *self._damaged]:
            shutil.rmtree(self.path / f"{PREFIX}{step:08d}", ignore_errors=True)
        self._damaged.clear()


def _replace(temporary: Path, target: Path) -> None:
    """Commit. A folder that stands in the way (one that was passed over) is moved aside first."""
    aside = target.with_name(f".tmp-old-{target.name}")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    temporary.rename(target)
    fsync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def read(folder: Path) -> Loaded:
    """Read and verify one checkpoint. Raises CheckpointError saying what does not hold."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        body = manifest["body"]
        if manifest["crc32"] != _crc(_canonical(body)):
            raise CheckpointError(f"{folder.name}: the manifest does not match its checksum")
        tensors = load_file(folder / STATE)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as problem:
        raise CheckpointError(f"{folder.name}: unreadable ({problem})") from problem
    if set(tensors) != set(body["tensors"]):
        raise CheckpointError(f"{folder.name}: its tensors are not those of its manifest")
    for name, tensor in tensors.items():
        if tensor_crc(tensor) != body["tensors"][name]:
            raise CheckpointError(f"{folder.name}: {name} does not match its checksum")
    return Loaded(int(body["step"]), tensors, body)


def _write_files(
    folder: Path, step: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
) -> int:
    from safetensors.torch import save_file

    checksums = {name: tensor_crc(tensor) for name, tensor in tensors.items()}
    save_file(dict(tensors), folder / STATE)
    body = {**facts, "step": step, "savedAt": time.time(), "tensors": checksums}
    (folder / MANIFEST).write_text(json.dumps({"crc32": _crc(_canonical(body)), "body": body}))
    for name in (STATE, MANIFEST):
        fsync(folder / name)
    fsync(folder)
    return sum((folder / name).stat().st_size for name in (STATE, MANIFEST))


def tensor_crc(tensor: torch.Tensor) -> int:
    return _crc(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _crc(data: bytes | memoryview) -> int:
    return zlib.crc32(data)


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True).encode()
