"""Who may write to a run's folders: its newest attempt.

A pod whose node is cut off from the cluster cannot be stopped, and another attempt takes its place meanwhile. The earlier
one may still reach the disk. So each attempt writes its number beside the checkpoints when it starts, reads the file again
before it commits or removes anything there, and ends when a later one has begun. What it has half written lies in
temporary folders of its own. Between its look and its rename a whole checkpoint of the same run may still appear: it is as
good as any other.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from busbar.workloads.training.durable import replace_text
from busbar.workloads.training.errors import Superseded

NAME = "writer.json"
AGAIN_S = 10.0
"""A training loop looks so often."""


@dataclass(frozen=True, order=True)
class Turn:
    """Which start of a run: its attempt, and how often the pod of rank 0 was replaced in it."""

    attempt: int
    replacement: int = 0

    def __str__(self) -> str:
        again = f", whose pod was replaced {self.replacement} times" if self.replacement else ""
        return f"attempt {self.attempt}{again}"


class Fence:
    """One start's right to write. Where it is taken by nobody, as on ranks that move no folders, all is allowed."""

    def __init__(self, checkpoints: Path, run: str, turn: Turn) -> None:
        self._path, self._run, self._turn = checkpoints / NAME, run, turn
        self._taken = False
        self._looked_at = -AGAIN_S

    def take(self) -> None:
        """Shut earlier starts of this run out. Raises Superseded where a later one has begun."""
        self._taken = True
        self.check()
        words = {"run": self._run, "attempt": self._turn.attempt, "replacement": self._turn.replacement}
        replace_text(self._path, json.dumps(words))

    def check(self) -> None:
        """Raises Superseded where a later start of this run has begun."""
        if not self._taken:
            return
        found = _read(self._path, self._run)
        if found is not None and found > self._turn:
            raise Superseded(
                f"{found} of this run writes to {self._path.parent}, and this is {self._turn}: it ends, and changes nothing "
                "more there"
            )

    def check_at_times(self) -> None:
        """The same, every ten seconds at most."""
        if time.monotonic() - self._looked_at >= AGAIN_S:
            self._looked_at = time.monotonic()
            self.check()


def _read(path: Path, run: str) -> Turn | None:
    """Whose folder it is; None: nobody's, or another run's, whose checkpoints this one was told to adopt."""
    try:
        words = json.loads(path.read_text())
        return Turn(int(words["attempt"]), int(words["replacement"])) if words["run"] == run else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
