"""Engine processes forked from one that has imported torch already: starting one costs a tenth of a new process.

Only for scripts and tests that start many. The first start imports torch; the working folder is the repository.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess

from busbar.workloads.serving import process
from busbar.workloads.serving.settings import ServerSettings

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.serving.forked"])


def start(settings: ServerSettings, core: int | None = None) -> BaseProcess:
    """A process that serves as `busbar serve` does, with its engine's process; `core`: both on this one alone."""
    started: BaseProcess = _FORKS.Process(target=_serve, args=(settings, core), daemon=True)
    started.start()
    return started


def _serve(settings: ServerSettings, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    sys.exit(process.serve(settings))
