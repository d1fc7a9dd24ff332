"""What processes that belong together ask of the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel ask this process to stop when its parent is gone; elsewhere than on Linux nothing is asked."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_process(code: int) -> NoReturn:
    """Ends this process at once, with what it has written; the interpreter, its threads and modules are not taken down."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
