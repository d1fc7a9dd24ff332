"""The newest state of a run in memory that outlives its trainer, so that a crash costs seconds and few steps.

The memory is anonymous files (memfd) of the supervisor (see `supervisor`), which its trainers inherit: it is the pod's, no
disk holds it, and it is gone when the supervisor ends. Two slots take turns. A slot is what a checkpoint is on disk, a
state and a manifest with the checksums of both; while one is written the other one is whole, and a slot whose manifest
does not match its state does not count. The ranks of a gang hold each other's bytes too (see `gang_copies`).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from busbar.workloads.training.async_checkpoint import Saver, Target
from busbar.workloads.training.checkpoint import write_document
from busbar.workloads.training.demand import COPIES
from busbar.workloads.training.errors import CheckpointError
from busbar.workloads.training.layout import Layout
from busbar.workloads.training.loaded import Loaded, document, read_part
from busbar.workloads.training.snapshot import Snapshot
from busbar.workloads.training.state_file import Blocks, write_state

if TYPE_CHECKING:
    from busbar.workloads.training.run import Run

_COUNTERS = struct.Struct("<qq")  # starts of a trainer, steps that crashes cost


class Copies(Target, Protocol):
    """Those of one process, or of a gang."""

    @property
    def step(self) -> int | None:
        """Of the newest whole copy, by its manifest alone."""

    def newest(self) -> tuple[Loaded | None, list[str]]:
        """The newest copy that is whole, verified byte by byte; and sentences on others that were passed over."""


@dataclass(frozen=True)
class Slot:
    """Paths of anonymous files; any process that inherited them can open these."""

    state: Path
    manifest: Path
    parity: Path  # of other ranks' states; alone, it is empty

    @classmethod
    def create(cls, name: str) -> Slot:
        """Raises OSError."""
        return cls(*(_anonymous(f"{name}-{each}") for each in ("state", "manifest", "parity")))

    @property
    def step(self) -> int | None:
        """Of the whole copy in it, by its manifest alone; None: there is none."""
        try:
            return int(document(self.manifest)["step"])
        except (CheckpointError, OSError, ValueError, KeyError, TypeError):
            return None

    def empty(self) -> None:
        self.manifest.write_bytes(b"")


class MemoryCopies:
    """Two slots and two counters, which the supervisor makes and its trainers use, one trainer at a time."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.slots = [Slot.create(f"busbar-copy-{number}") for number in range(COPIES)]
        self._counters = mmap.mmap(-1, _COUNTERS.size)  # shared with the trainers

    @property
    def starts(self) -> int:
        """Trainers that were started."""
        return int(_COUNTERS.unpack(self._counters[:])[0])

    @property
    def lost_steps(self) -> int:
        """Steps that were repeated because a trainer crashed."""
        return int(_COUNTERS.unpack(self._counters[:])[1])

    def count(self, *, starts: int = 0, lost_steps: int = 0) -> None:
        self._counters[:] = _COUNTERS.pack(self.starts + starts, self.lost_steps + lost_steps)

    @property
    def step(self) -> int | None:
        """Of the newest whole copy, by the manifests alone."""
        return max((step for slot in self.slots if (step := slot.step) is not None), default=None)

    @property
    def bytes(self) -> int:
        """Memory that the slots hold now."""
        return sum(
            path.stat().st_size for slot in self.slots for path in (slot.state, slot.manifest, slot.parity)
        )

    def spare(self) -> Slot:
        """The slot that is empty, or else not the newest."""
        return min(self.slots, key=lambda slot: -1 if slot.step is None else slot.step)

    def write(self, step: int, layout: Layout, blocks: Blocks, facts: Mapping[str, Any]) -> int:
        """Copy the state of `step` into the spare slot; returns its bytes. Raises CheckpointError."""
        slot = self.spare()
        try:
            slot.empty()  # before its state changes
            checksums = write_state(slot.state, step, layout, blocks)
            write_document(slot.manifest, {**facts, "step": step, "tensors": checksums})
        except OSError as problem:
            raise CheckpointError(
                f"the state after step {step} could not be copied to memory: {problem}"
            ) from problem
        return layout.size

    def remove_old(self, written: int) -> None:
        """Nothing: the next copy takes the slot of the older one."""

    def newest(self) -> tuple[Loaded | None, list[str]]:
        """The newest copy that is whole, verified byte by byte; and sentences on others that were passed over."""
        notes: list[str] = []
        known = [(step, slot) for slot in self.slots if (step := slot.step) is not None]
        for step, slot in sorted(known, key=lambda item: -item[0]):
            try:
                body = document(slot.manifest)
                return read_part(f"the copy of step {step} in memory", body, slot.state, body), notes
            except CheckpointError as problem:
                notes.append(passed_over(problem))
        return None, notes


class Copier:
    """Copies the state to memory while training goes on, where the job asks for it, and while no checkpoint is written."""

    def __init__(self, saver: Saver | None, every_steps: int) -> None:
        self._saver, self._every_steps = saver, every_steps

    @classmethod
    def of(cls, run: Run, copies: Copies | None, snapshot: Snapshot, facts: Mapping[str, Any]) -> Copier:
        policy = run.checkpoint.memory
        if copies is None or policy is None:
            return cls(None, 0)
        saver = Saver(copies, snapshot, facts, lambda: None, lambda *_: None)
        saver.durable_step = copies.step
        return cls(saver, policy.every_steps)

    def due(self, step: int) -> bool:
        return self._saver is not None and step % self._every_steps == 0

    def save(self, step: int, counters: Mapping[str, Any]) -> None:
        """Start to copy the state after `step`. Raises what the copy before it raised, as `Saver.save` does."""
        if self._saver is not None:
            self._saver.save(step, counters)

    @property
    def stalled_seconds(self) -> float:
        """Time that the training loop lost to copies."""
        return 0.0 if self._saver is None else self._saver.stalled_seconds

    def settle(self) -> None:
        """Wait for a running copy: there is one snapshot, which the next checkpoint needs. Raises CheckpointError."""
        if self._saver is not None:
            self._saver.drain()

    def close(self) -> None:
        """Wait for a running copy, whatever becomes of it."""
        if self._saver is not None:
            self._saver.close()


def passed_over(problem: object) -> str:
    return f"passed over a damaged copy: {problem}"


def _anonymous(name: str) -> Path:
    descriptor = os.memfd_create(name)
    os.set_inheritable(descriptor, True)
    return Path(f"/proc/self/fd/{descriptor}")
