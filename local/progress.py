"""Progress output: a spinner with a clock on a terminal, plain lines elsewhere.

Every long operation is a *step*: a title, an optional changing detail, and a time at the end.  On a terminal the
line of a running step is redrawn by rich; into a pipe or a log one line is printed at the start, one every
``HEARTBEAT_S`` while the detail changes, and one at the end.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

HEARTBEAT_S = 15.0


class Step:
    """One running step; ``update`` shows its progress."""

    def __init__(self, title: str, status: Status | None) -> None:
        self.title = title
        self._status = status
        self._started = time.monotonic()
        self._last_line = self._started

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._started

    def update(self, detail: str) -> None:
        """Show ``detail`` behind the title; cheap enough to call for every line of a compiler."""
        if self._status is not None:
            self._status.update(f"{self.title}: {detail}")
            return
        now = time.monotonic()
        if now - self._last_line >= HEARTBEAT_S:
            self._last_line = now
            say(f"{self.title}: {detail} ({self.seconds:.0f} s)")


_console: Console | None = None
_lock = threading.Lock()
_spinning = False


def _terminal() -> Console | None:
    global _console
    if not sys.stderr.isatty():
        return None
    if _console is None:
        from rich.console import Console

        _console = Console(stderr=True, highlight=False)
    return _console


def say(text: str) -> None:
    """Print one line at once, to the standard error, so that ``-o json`` stays clean."""
    console = _terminal()
    if console is not None:
        console.print(text, markup=False)
    else:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[Step]:
    """Show one step from its start to its end; an exception is shown as a failure and raised again."""
    global _spinning
    console = _terminal()
    spinner: Status | None = None
    if console is not None:
        with _lock:
            if not _spinning:  # rich allows one live display at a time; a second step prints lines
                _spinning = True
                spinner = console.status(title)
    running = Step(title, spinner)
    if spinner is not None:
        spinner.start()
    else:
        say(f"· {title} …")
    try:
        yield running
    except BaseException:
        _stop(spinner)
        say(f"✗ {title}: failed after {running.seconds:.1f} s")
        raise
    _stop(spinner)
    say(f"✓ {title}: {running.seconds:.1f} s")


def _stop(spinner: Status | None) -> None:
    global _spinning
    if spinner is not None:
        spinner.stop()
        with _lock:
            _spinning = False
