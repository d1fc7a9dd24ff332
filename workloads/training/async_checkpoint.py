"""Asynchronous checkpoints: the state of a step's end is copied and written while training continues.

The training loop waits where an update reaches what is not copied yet (see `capture`), and for the rest of the
previous write if that is still going on. All bytes go through the snapshot's buffers. A stop during a write costs one
more write: of the newest state if the time allows it, else the rest of the running write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from busbar.workloads.training.capture import Abandoned, Capture
from busbar.workloads.training.errors import CheckpointError
from busbar.workloads.training.layout import Layout
from busbar.workloads.training.snapshot import Snapshot
from busbar.workloads.training.state_file import Blocks

ESTIMATE_MARGIN = 1.5  # a write may take this much longer than the running one predicts


def time_for_another(left_s: float | None, elapsed_s: float, written: int, size: int) -> bool:
    """Whether a whole new write fits into `left_s`, by the speed of the running one. None: there is no limit."""
    if left_s is None or written == 0:
        return True
    return elapsed_s * size / written * ESTIMATE_MARGIN <= left_s


class Target(Protocol):
    """Where the state is written to: a folder of checkpoints, or memory."""

    def write(self, step: int, layout: Layout, blocks: Blocks, facts: Mapping[str, Any]) -> int:
        """Returns the bytes, once they are safe there. Raises CheckpointError."""

    def remove_old(self, written: int) -> None:
        """Let go what nobody needs since the state after step `written` is safe, and has been said to be. Raises CheckpointError."""


class Saver:
    """Writes snapshots in a background thread, in which `before` and `on_durable(step, saved_at, size)` run."""

    def __init__(
        self,
        target: Target,
        snapshot: Snapshot,
        facts: Mapping[str, Any],
        before: Callable[[], None],
        on_durable: Callable[[int, float, int], None],
        vote: Callable[[tuple[bool, bool]], Sequence[tuple[bool, bool]]] = lambda own: [own],
    ) -> None:
        """`vote` gathers what each rank of a gang says: all have to decide alike."""
        self._vote = vote
        self._target, self._snapshot, self._facts = target, snapshot, facts
        self._before, self._on_durable = before, on_durable
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._capture: Capture | None = None
        self._writing_step = 0
        self._started = 0.0
        self.durable_step: int | None = None
        self._stalled = 0.0
        self.saved = 0  # checkpoints that were begun
        self.durable_seconds: float | None = None  # from the call of `save` on, of the last whole one

    @property
    def stalled_seconds(self) -> float:
        """Time that the training loop lost to checkpoints: in `save`, and in updates that waited for copies."""
        return self._stalled + (0.0 if self._capture is None else self._capture.waited_s)

    @property
    def writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def save(self, step: int, counters: Mapping[str, Any]) -> None:
        """Start to copy and write the state after `step` steps; `counters` go into its manifest.

        Raises what the previous write raised; this one has been started all the same.
        """
        if self.durable_step == step:
            return
        started = time.monotonic()
        failure = self._join()
        self._stalled = self.stalled_seconds
        self._capture = self._snapshot.begin()
        self._writing_step, self._started = step, started
        self._writer = threading.Thread(
            target=self._write,
            args=(step, self._capture, {**self._facts, **counters}),
            name="checkpoint-writer",
            daemon=True,
        )
        self._writer.start()
        self._stalled += time.monotonic() - started
        self.saved += 1
        if failure is not None:
            raise failure

    def save_last(self, step: int, counters: Mapping[str, Any], left_s: float | None) -> None:
        """Make the newest state durable within `left_s` seconds, or an older one if that takes too long.

        `durable_step` tells which. Raises CheckpointError.
        """
        older, fits = zip(*self._vote(self._of_the_running_write(step, left_s)), strict=True)
        if any(older) and all(fits):
            if self._capture is not None:
                self._capture.abandon()
        elif any(older) and self._join() is None:
            return
        self._join()  # a failure of an earlier write is ignored if this one succeeds
        self.save(step, counters)
        self.drain()

    def _of_the_running_write(self, step: int, left_s: float | None) -> tuple[bool, bool]:
        """Whether an older state is being written, and whether there is time to write the newest one instead."""
        older = self.writing and self._writing_step != step
        if not older or self._capture is None:
            return False, True
        elapsed = time.monotonic() - self._started
        return True, time_for_another(left_s, elapsed, self._capture.taken, self._snapshot.layout.size)

    def drain(self) -> None:
        """Wait until the last save is durable. Raises CheckpointError if it failed."""
        failure = self._join()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for a running write, so that a run that fails keeps the checkpoint that it had begun."""
        self._join()

    def _join(self) -> CheckpointError | None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        return failure

    def _write(self, step: int, capture: Capture, facts: Mapping[str, Any]) -> None:
        try:
            self._before()
            size = self._target.write(step, self._snapshot.layout, capture, facts)
        except Abandoned:
            return
        except CheckpointError as problem:
            self._failure = problem
        except Exception as problem:
            self._failure = CheckpointError(f"checkpoint of step {step} failed: {problem!r}")
        else:
            self.durable_step = step
            self.durable_seconds = time.monotonic() - self._started
            self._on_durable(step, time.time(), size)
            self._remove_old(step)
        finally:
            capture.finish()

    def _remove_old(self, step: int) -> None:
        try:
            self._target.remove_old(step)
        except CheckpointError as problem:
            self._failure = problem
