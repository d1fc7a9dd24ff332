"""A log of finished steps, from which a resumed run knows its lost steps and verifies that it repeats them.

One line per finished step, appended and handed to the kernel at once (a killed process loses nothing of it):
`{"step": 51, "loss": 5.25, "attempt": 1, "steps": 400}`. After a crash, the steps behind the last checkpoint are lost work:
their number is exact. When they are trained again, each loss is compared with the line that is already there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from pathlib import Path
from typing import TextIO


class Journal:
    def __init__(self, path: Path | None, attempt: int, steps: int = 0) -> None:
        """`steps` is the length of the whole run: with another one the learning rates are others.

        Without a path nothing is read or kept: rank 0 keeps the journal of a gang.
        """
        self._attempt, self._steps = attempt, steps
        read = {} if path is None else _read(path)
        self.recorded: dict[int, float] = {step: loss for step, (loss, _) in read.items()}
        self._comparable = {step for step, (_, length) in read.items() if length == steps}
        self.replayed = 0
        self.mismatches: list[int] = []
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _end_torn_line(path)
            self._file = path.open("a", encoding="utf-8")

    @property
    def last_step(self) -> int:
        """The last finished step of all attempts; 0 when there was none."""
        return max(self.recorded, default=0)

    def lost_since(self, step: int) -> int:
        """Finished steps that a restart from the state after `step` has to repeat."""
        return max(0, self.last_step - step)

    def append(self, step: int, loss: float) -> None:
        """Record a finished step (counted from 1); one that was done before must repeat its loss."""
        before = self.recorded.get(step)
        if before is not None:
            self.replayed += 1
            if step in self._comparable and before != loss and not (math.isnan(before) and math.isnan(loss)):
                self.mismatches.append(step)
        self.recorded[step] = loss
        self._comparable.add(step)
        line = {"step": step, "loss": loss, "attempt": self._attempt, "steps": self._steps}
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Make the lines durable, so that a checkpoint always has the history before it."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def digest(self, step: int) -> str | None:
        """SHA-256 over (step, loss as float64) of steps 1..step; None when a line is missing."""
        digest = hashlib.sha256()
        for number in range(1, step + 1):
            if number not in self.recorded:
                return None
            digest.update(struct.pack("<qd", number, self.recorded[number]))
        return digest.hexdigest()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _end_torn_line(path: Path) -> None:
    """A killed writer may have left an incomplete line: end it, so that the next one starts on a new line."""
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def _read(path: Path) -> dict[int, tuple[float, int]]:
    """(loss, length of the run that it belongs to) of each step."""
    steps: dict[int, tuple[float, int]] = {}
    if not path.exists():
        return steps
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            steps[int(entry["step"])] = float(entry["loss"]), int(entry.get("steps", 0))
        except (ValueError, KeyError, TypeError):
            continue  # the torn last line of a killed process
    return steps
