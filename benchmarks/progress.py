"""How far a benchmark is, on the standard error: one line that is drawn anew on a terminal, elsewhere a line for each
twentieth of the work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

WIDTH = 30
LINES = 20
"""Without a terminal, as many lines are written of what is counted."""

_written: tuple[str, int] = "", -1
"""What the last line said, and of which part of the work."""


def show(what: str, done: float, whole: float) -> None:
    """Show how much of the whole is done. On a terminal the line ends, and stays, when all is."""
    global _written
    share = min(1.0, done / whole) if whole else 1.0
    live = sys.stderr.isatty()
    part = what, int((100 if live else LINES) * share)
    if part == _written:
        return
    _written = part
    bar = f"[{'#' * int(WIDTH * share):.<{WIDTH}}] {share:4.0%}  {what}"
    begin, end = ("\r\033[K", "\n" if share == 1 else "") if live else ("", "\n")
    print(f"{begin}{bar}", end=end, file=sys.stderr, flush=True)


def say(what: str) -> None:
    """Show what is done now, of work of which nobody knows how much there is."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)
    else:
        print(what, file=sys.stderr, flush=True)


def shown(what: str, made: Iterable[tuple[float, Any]]) -> Iterator[Any]:
    """Yields items that come with the share of the work that is done, and shows it."""
    for share, item in made:
        show(what, share, 1.0)
        yield item
