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
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busbar.workloads.machine.direct_file import NoRoom
from busbar.workloads.training.disk_pace import DiskPace
from busbar.workloads.training.durable import fsync
from busbar.workloads.training.errors import CheckpointError
from busbar.workloads.training.layout import Layout
from busbar.workloads.training.loaded import MANIFEST, STATE, Loaded, canonical, read
from busbar.workloads.training.state_file import Blocks, write_state

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

    def __init__(
        self,
        path: Path,
        keep: int,
        note: Callable[[str], object] = lambda text: None,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """`confirm` is called before anything is committed or removed; it raises CheckpointError where that must not be."""
        self.path, self.keep, self._note, self._confirm = path, keep, note, confirm
        self._damaged: set[int] = set()  # passed over; they never count among the `keep`
        self._may_remove = False  # good checkpoints, if the next one cannot be written otherwise
        self._said: set[str] = set()
        self.pace = DiskPace()

    def write(self, step: int, layout: Layout, blocks: Blocks, facts: Mapping[str, Any]) -> int:
        """Make the checkpoint of `step` durable; returns its bytes. Raises CheckpointError. See `remove_old` for those before it.

        `blocks` are the bytes of the data section.
        """
        target = self._folder(step)
        temporary = self.path / f".tmp-{target.name}-{os.getpid()}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self._make_room(layout.size)
            size = self._write_files(temporary, step, layout, blocks, facts)
            self._confirm()
            _replace(temporary, target)
        except OSError as problem:
            raise self._failed(step, problem) from problem
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return size

    def _write_files(
        self, folder: Path, step: int, layout: Layout, blocks: Blocks, facts: Mapping[str, Any]
    ) -> int:
        while True:
            try:
                checksums = write_state(
                    folder / STATE, step, layout, blocks, self._note_once, self.pace.moved
                )
                break
            except NoRoom:  # a quota, say: the file system had said that there was room
                if not self._remove_oldest():
                    raise
        write_document(
            folder / MANIFEST, {**facts, "step": step, "savedAt": time.time(), "tensors": checksums}
        )
        fsync(folder)
        return sum((folder / name).stat().st_size for name in (STATE, MANIFEST))

    def _note_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._note(text)

    def size(self, step: int) -> int:
        """Bytes of a committed checkpoint."""
        return sum(file.stat().st_size for file in self._folder(step).glob("*"))

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, newest first, unverified."""
        if not self.path.is_dir():
            return []
        names = [entry.name for entry in self.path.iterdir() if entry.name.startswith(PREFIX)]
        return sorted(
            (int(name[len(PREFIX) :]) for name in names if name[len(PREFIX) :].isdigit()), reverse=True
        )

    def newest_step(self) -> int:
        """Of the committed checkpoints, unverified; 0: there is none."""
        return max(self.steps(), default=0)

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
        missing = size + MANIFEST_BYTES - shutil.disk_usage(self.path).free
        gone: list[int] = []
        for step in self._removable():
            if missing <= 0:
                break
            gone.append(step)
            missing -= self.size(step)
        self._may_remove = missing <= 0
        if missing > 0:  # none of them would help
            return
        for step in gone:
            self._remove_for_room(step)

    def _remove_oldest(self) -> bool:
        """Remove the checkpoint that is needed least, if the file system says that there is room, and one may go."""
        removable = self._removable() if self._may_remove else []
        if removable:
            self._remove_for_room(removable[0])
        return bool(removable)

    def _removable(self) -> list[int]:
        """Damaged ones, then the good ones from the oldest on; never the newest good one."""
        good = [step for step in self.steps() if step not in self._damaged]
        return [*sorted(self._damaged), *reversed(good[1:])]

    def _remove_for_room(self, step: int) -> None:
        self._remove(step)
        self._damaged.discard(step)
        self._note(
            f"warning: the disk is full: removed the checkpoint of step {step} to make room for the next"
        )

    def _remove(self, step: int) -> None:
        """Rename first: a crash in between must not leave a checkpoint of which files are missing."""
        self._confirm()
        gone = self.path / f".tmp-removed-{self._folder(step).name}"
        shutil.rmtree(gone, ignore_errors=True)
        try:
            self._folder(step).rename(gone)
        except OSError:
            return  # it is gone already, or stays
        shutil.rmtree(gone, ignore_errors=True)

    def _failed(self, step: int, problem: object) -> CheckpointError:
        return CheckpointError(
            f"checkpoint of step {step} could not be written to {self.path}: {problem}; "
            "free space there, or lower checkpoint.keep"
        )

    def _folder(self, step: int) -> Path:
        return self.path / f"{PREFIX}{step:08d}"

    def remove_old(self, written: int) -> None:
        """Keep the newest `keep` good ones; a damaged one may be newer than the one just `written`. Raises CheckpointError.

        It is apart from `write`, because a file system may take as long to give a large file's space back as a disk to write it.
        """
        self._damaged.discard(written)
        good = [step for step in self.steps() if step not in self._damaged]
        for step in [*good[self.keep :], *self._damaged]:
            self._remove(step)
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


def write_document(path: Path, body: Mapping[str, Any]) -> int:
    """Write a manifest with its checksum, durably; returns that."""
    crc32 = zlib.crc32(canonical(body))
    path.write_text(json.dumps({"crc32": crc32, "body": body}))
    fsync(path)
    return crc32
