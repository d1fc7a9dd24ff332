"""Starts the server again when it crashes, within a second or so (`--keep-weights`).

    supervisor      imports the engine and reads the model's text once; computes nothing, and has no thread, which a fork would lose
      └─ server     a fork of it, the front, with the engine's process as its own fork (`process.py`), in a process group of their
                    own: both end together, with an exit code, or because either is killed

A server that was killed by a signal, or failed (exit code 1), is followed by another one if it had served, and at most RESTARTS
did so within WITHIN_S: what crashes again and again ends the process, and whoever started it decides (in a pod the
kubelet, which waits longer each time). All other exit codes are the process's. The next server knows how often that was, when
and why, and tells it in `/status` and `/metrics`. Weights are not the supervisor's: they lie in the folder
(`kept_weights.py`), so they also outlive a container that is started again.
"""

from __future__ import annotations

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
from dataclasses import replace
from datetime import UTC, datetime
from typing import NoReturn

from busbar.kube.contracts.workload import MOST_CAUSE, ExitCode, RestartReport
from busbar.workloads.machine.processes import end_process, end_with_parent
from busbar.workloads.serving.errors import ServingError
from busbar.workloads.serving.settings import ServerSettings

log = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RESTARTS, WITHIN_S = 5, 600.0
KILLED = 128
"""And the signal's number: the exit code of a process that a signal ended, as shells say it."""


class Told:
    """What a server tells whoever started it, in memory that both share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 + MOST_CAUSE)

    def clear(self) -> None:
        self._memory[:] = bytes(len(self._memory))

    def serves(self) -> None:
        self._memory[0] = 1

    @property
    def has_served(self) -> bool:
        return self._memory[0] == 1

    def ends_for(self, why: str) -> None:
        """The server's last words."""
        text = why.encode()[:MOST_CAUSE]
        self._memory[1 : 1 + len(text)] = text

    @property
    def why(self) -> str:
        """Empty where it had no time to say it."""
        return self._memory[1:].rstrip(b"\0").decode(errors="ignore")


Serve = Callable[[ServerSettings, Told], int]
"""Serves until a signal or a failure; the exit code."""


class Supervisor:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._told = Told()
        self._crashes: deque[float] = deque()
        self._restarts = 0
        self._server: int | None = None  # its process
        self._stopping = False

    def run(self, settings: ServerSettings, serve: Serve) -> int:
        """Has servers of these settings serve, one after the other; the exit code of the last one. What was imported before, none
        of them imports again."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._forward)
        while True:
            self._told.clear()
            self._start(settings, serve)
            code = self._wait()
            if not self.is_followed(code, self._told.has_served):
                gc.unfreeze()  # or extensions complain of leaks at exit
                return code if code >= 0 else KILLED - code
            report = self.count(code)
            log.error("%s; the server is started again", report.cause)
            settings = replace(settings, restarted=report)

    def is_followed(self, code: int, has_served: bool) -> bool:
        """Whether another server follows one that ended so: with an exit code, or minus the number of a signal."""
        if self._stopping or not has_served or (code >= 0 and code != ExitCode.FAILED):
            return False
        now = self._clock()
        while self._crashes and self._crashes[0] < now - WITHIN_S:
            self._crashes.popleft()
        self._crashes.append(now)
        return len(self._crashes) <= RESTARTS

    def count(self, code: int) -> RestartReport:
        """What the server that follows one that ended so tells of it."""
        self._restarts += 1
        cause = self._told.why or f"the server {how(code)}"
        return RestartReport(count=self._restarts, cause=cause, at=self._wall().replace(microsecond=0))

    def _start(self, settings: ServerSettings, serve: Serve) -> None:
        gc.collect()
        gc.freeze()  # a collection in the server would write to, and so copy, pages that both share
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the server has handlers of its own
        self._server = os.fork()
        if self._server == 0:
            self._live(settings, serve)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self._stopping:
            self._forward(signal.SIGTERM)

    def _live(self, settings: ServerSettings, serve: Serve) -> NoReturn:
        """The server's process."""
        code = int(ExitCode.FAILED)
        try:
            os.setpgid(0, 0)
            end_with_parent()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            code = serve(settings, self._told)
        except BaseException as error:
            log.exception("the server failed")
            self._told.ends_for(f"{type(error).__name__}: {error}")
        finally:
            end_process(code)  # at once: the next server waits for it

    def _wait(self) -> int:
        assert self._server is not None
        _, ended = os.waitpid(self._server, 0)
        # The engine of a front that was killed: the next one needs its memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server, signal.SIGKILL)
        self._server = None
        return os.waitstatus_to_exitcode(ended)

    def _forward(self, number: int, *_: object) -> None:
        self._stopping = True
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server, number)


def supervised(settings: ServerSettings, serve: Serve) -> int:
    """The exit code. Where weights are kept, the server has a process of its own, and is followed by another one."""
    if settings.engine.keep_dir is None:
        return serve(settings, Told())
    prepare(settings)
    return Supervisor().run(settings, serve)


def prepare(settings: ServerSettings) -> None:
    """What no server needs to do again: imports, and reading the model's text."""
    from busbar.workloads.serving.process import read_ahead  # torch and all else takes seconds

    with contextlib.suppress(ServingError):  # each server finds it, too, and says it
        read_ahead(settings)


def how(code: int) -> str:
    """What ended a process, for people."""
    if code >= 0:
        return f"ended with code {code}"
    known = {int(one): one.name for one in signal.Signals}  # most real-time signals have no name
    return f"was killed by {known.get(-code, f'signal {-code}')}"
