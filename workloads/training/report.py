"""The output of a run for people: lines for a log, or a live bar on a terminal.

A log that cannot be written (its reader has gone, its disk is full) does not end the run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from busbar.workloads.training.run import Run

LINE_EVERY_S = 5.0


class Reporter(Protocol):
    def phase(self, name: str, message: str) -> None: ...

    def share(self, done: float) -> None:
        """Progress of a phase that has no steps, 0..1."""

    def step(self, step: int, total: int, loss: float, tokens_per_s: float, eta_s: float | None) -> None: ...

    def note(self, message: str) -> None: ...

    def error(self, message: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """One `key=value` line per event; steps at most every few seconds, and the last one always."""

    def __init__(
        self,
        job: str,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        rank: int | None = None,
    ) -> None:
        """`rank` stands in each line where several processes write to one log."""
        self._who = f"job={job}" if rank is None else f"job={job} rank={rank}"
        self._out, self._clock = out or sys.stdout, clock
        self._last = float("-inf")

    def phase(self, name: str, message: str) -> None:
        self._line("phase", phase=name, message=message)

    def share(self, done: float) -> None:
        if self._due():
            self._line("progress", percent=round(done * 100))

    def step(self, step: int, total: int, loss: float, tokens_per_s: float, eta_s: float | None) -> None:
        if self._due() or step == total:
            eta = None if eta_s is None else round(eta_s)
            self._line(
                "step", step=f"{step}/{total}", loss=f"{loss:.4f}", tokens_per_s=tokens_per_s, eta_s=eta
            )

    def note(self, message: str) -> None:
        self._line("note", message=message)

    def error(self, message: str) -> None:
        self.note(f"error: {message}")

    def close(self) -> None:
        try:
            self._out.flush()
        except OSError:
            _write_to_nowhere(self._out)

    def _due(self) -> bool:
        now = self._clock()
        if now - self._last < LINE_EVERY_S:
            return False
        self._last = now
        return True

    def _line(self, event: str, **facts: object) -> None:
        shown = " ".join(f"{key}={_quoted(value)}" for key, value in facts.items() if value is not None)
        try:
            print(f"{self._who} event={event} {shown}", file=self._out, flush=True)
        except BrokenPipeError:
            _write_to_nowhere(self._out)
        except OSError:
            return  # there may be room for the next one


class Errors(Lines):
    """Of a run that goes as another log says."""

    def _line(self, event: str, **facts: object) -> None:
        return

    def error(self, message: str) -> None:
        super()._line("note", message=f"error: {message}")


def lines_of(run: Run) -> Lines:
    """For the log of a pod: of its other processes, which do the same as the first, only what fails."""
    rank = run.world.rank if run.world.per_pod > 1 else None
    return (Lines if run.world.speaks_for_pod else Errors)(run.name, rank=rank)


class Bar:
    """A rich progress bar, with notes printed above it."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: Any = None
        self._progress.start()

    def phase(self, name: str, message: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=1.0, total=1.0)
        done = 1 if name == "Done" else 0
        self._task = self._progress.add_task(name, total=1.0, completed=done, facts=message[:60])

    def share(self, done: float) -> None:
        self._progress.update(self._task, completed=done)

    def step(self, step: int, total: int, loss: float, tokens_per_s: float, eta_s: float | None) -> None:
        facts = f"step {step}/{total}  loss {loss:.3f}  {tokens_per_s:,.0f} tok/s"
        self._progress.update(self._task, completed=step / total, facts=facts)

    def note(self, message: str) -> None:
        self._progress.console.print(message, highlight=False, markup=False)

    def error(self, message: str) -> None:
        self.note(f"error: {message}")

    def close(self) -> None:
        self._progress.stop()


def _write_to_nowhere(out: TextIO) -> None:
    """Also for what is left in its buffer: Python ends with exit code 120 where that cannot be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out.fileno())
    os.close(nowhere)


def _quoted(value: object) -> str:
    text = str(value)
    if any(character.isspace() or character in '"=' for character in text):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return text
