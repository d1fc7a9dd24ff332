"""Ends of a command that come from outside: Ctrl-C, SIGTERM, and a pipe whose reader has gone.

Exit codes are those of shells: 128 and the signal's number. Commands that have an end of their own (`train` saves, `serve`
drains) set handlers of their own.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
CLOSED_PIPE = 128 + signal.SIGPIPE


class Terminated(SystemExit):
    """SIGTERM has come; what is half done is cleaned up on the way out, as after Ctrl-C."""

    code: int


class ClosedPipe(SystemExit):
    """Nobody reads the output any more."""


@contextmanager
def pipe_watched() -> Iterator[None]:
    """Raises ClosedPipe where something was written to a pipe without a reader. click and rich make exit code 1 of it."""
    try:
        yield
    except BrokenPipeError as error:
        raise ClosedPipe(CLOSED_PIPE) from error
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise ClosedPipe(CLOSED_PIPE) from end
        raise


def end_on_sigterm() -> None:
    """Have SIGTERM raise Terminated in the main thread, once; a second one ends the process at once."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else somebody wants it ignored
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Terminated(128 + number)


def end_at_once_when_interrupted() -> None:
    """For the time in which Python shuts down: nothing that could be cleaned up is left."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def drop_closed_streams() -> None:
    """Python must not try at its exit to flush what nobody reads."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (AttributeError, OSError, ValueError):
            setattr(sys, name, None)
