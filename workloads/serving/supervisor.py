"""Starts the server again when it crashes, within a second or two (`--keep-weights`).

    supervisor      imports the engine once; computes nothing, and has no thread, which a fork would lose
      └─ server     a fork of it, the front, with the engine's process as its own fork (`process.py`), in a process group of their
                    own: both end together, with an exit code, or because either is killed

A server that was killed by a signal, or failed (exit code 1), is followed by another one if it had served, and at most RESTARTS
did so within WITHIN_S: what crashes again and again ends the process, and whoever started it decides (in a pod the
kubelet, which waits longer each time). All other exit codes are the process's. Weights are not the supervisor's: they lie
in the folder (`kept_weights.py`), so they also outlive a container that is started again.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import mmap
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable

from busbar.kube.contracts.workload import ExitCode
from busbar.workloads.machine.processes import end_with_parent
from busbar.workloads.serving.settings import ServerSettings

log = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESTARTS, WITHIN_S = 5, 600.0
KILLED = 128
"""And the signal's number: the exit code of a process that a signal ended, as shells say it."""


class Supervisor:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._has_served = mmap.mmap(-1, 1)  # shared with the servers
        self._crashes: deque[float] = deque()
        self._server: int | None = None  # its process
        self._stopping = False

    def servers(self) -> Callable[[], None]:
        """Returns in each server, with what it calls when it serves. The supervisor itself leaves by SystemExit. What was
        imported before, no server imports again."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._forward)
        while True:
            self._has_served[0] = 0
            if self._fork():
                return self._serves
            code = self._wait()
            if not self.is_followed(code, self._has_served[0] == 1):
                gc.unfreeze()  # or extensions complain of leaks at exit
                sys.exit(code if code >= 0 else KILLED - code)
            log.error("the server %s; it is started again", how(code))

    def is_followed(self, code: int, has_served: bool) -> bool:
        """Whether another server follows one that ended so: with an exit code, or minus the number of a signal."""
        if self._stopping or not has_served or (code >= 0 and code != ExitCode.FAILED):
            return False
        now = self._clock()
        while self._crashes and self._crashes[0] < now - WITHIN_S:
            self._crashes.popleft()
        self._crashes.append(now)
        return len(self._crashes) <= RESTARTS

    def _fork(self) -> bool:
        """Whether this is the server."""
        gc.collect()
        gc.freeze()  # a collection in the server would write to, and so copy, pages that both share
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the server has handlers of its own
        self._server = os.fork()
        if self._server == 0:
            os.setpgid(0, 0)
            end_with_parent()
            atexit.register(gc.unfreeze)  # or extensions complain of leaks
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self._server and self._stopping:
            self._forward(signal.SIGTERM)
        return self._server == 0

    def _wait(self) -> int:
        assert self._server is not None
        _, ended = os.waitpid(self._server, 0)
        # The engine of a front that was killed: the next one needs its memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server, signal.SIGKILL)
        self._server = None
        return os.waitstatus_to_exitcode(ended)

    def _serves(self) -> None:
        self._has_served[0] = 1

    def _forward(self, number: int, *_: object) -> None:
        self._stopping = True
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server, number)


def serving_process(settings: ServerSettings) -> Callable[[], None]:
    """What to call when the server of these settings serves. Where it keeps weights, this returns in each of the processes that
    serve one after the other."""
    return Supervisor().servers() if settings.engine.keep_dir is not None else lambda: None


def how(code: int) -> str:
    """What ended a process, for people."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
