"""Starts the trainer, and another one when it crashes: from the copy of the state in memory, within seconds.

    supervisor          imports the engine once, holds the copies (see `memory_copy`), computes nothing
      └─ trainer        a fork of it: prepares, trains, writes; ends with an exit code, or is killed

A trainer that was killed by a signal, or ended with code 1 (say by a CUDA error), is followed by another one if the
newest copy is of a later step than the one from which it had begun: a crash that comes again at the same step ends the
pod, and the operator decides. All other exit codes are the pod's. The memory belongs to the supervisor, so it is gone with
the whole container (a lost node, or the kernel where it kills a container's processes together for memory): then what other
pods of the gang hold of it counts (see `gang_copies`), or the checkpoints on disk.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from busbar.workloads.machine.processes import end_with_parent
from busbar.workloads.training.control import STOP_SIGNALS
from busbar.workloads.training.run import FAILED, Run

if TYPE_CHECKING:
    from busbar.workloads.training.memory_copy import MemoryCopies

Start = Callable[[Run], int]  # runs to its end, and returns the exit code
Error = Callable[[str], object]
_ENGINE = ("trainer", "loop", "preparation", "resume", "export", "evaluation")
_KILLED = 128  # and the signal's number: exit code of a process that a signal ended, as shells say it


def supervise(run: Run, start: Start, error: Error) -> int:
    """Train with copies in memory; returns the exit code. `start` is called in each trainer."""
    from busbar.workloads.training.memory_copy import MemoryCopies

    copies = MemoryCopies()
    _import_engine(run)
    try:
        return Supervisor(replace(run, copies=copies), copies, start, error).go()
    finally:
        gc.unfreeze()  # or extensions complain of leaks at exit


class Supervisor:
    def __init__(self, run: Run, copies: MemoryCopies, start: Start, error: Error) -> None:
        self._run, self._copies, self._start, self._error = run, copies, start, error
        self._trainer: int | None = None  # its process
        self._stopping = False

    def go(self) -> int:
        for number in STOP_SIGNALS:
            signal.signal(number, self._forward)
        began: int | None = None  # the step of the copy from which the trainer began
        while True:
            code = self._one_trainer()
            newest = self._copies.step
            if code >= 0 and code != FAILED:
                return code
            again = newest is not None and newest != began and not self._stopping
            if not again:
                return code if code >= 0 else _KILLED - code
            self._error(f"the trainer {_how(code)}; another one goes on from the copy of step {newest}")
            began = newest

    def _one_trainer(self) -> int:
        """Exit code of a trainer from its start to its end; minus the signal's number when it was killed."""
        self._copies.count(starts=1)
        gc.collect()
        gc.freeze()  # a collection in the trainer would write to, and so copy, pages that both share
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the trainer has its own handlers
        process = os.fork()
        if process == 0:
            self._be_the_trainer()
        self._trainer = process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self._stopping:
            self._forward(signal.SIGTERM)
        _, ended = os.waitpid(process, 0)
        self._trainer = None
        return os.waitstatus_to_exitcode(ended)

    def _be_the_trainer(self) -> NoReturn:
        code = FAILED
        try:
            end_with_parent()
            code = self._start(self._run)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _forward(self, number: int, *_: object) -> None:
        self._stopping = True
        if self._trainer is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._trainer, number)


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _import_engine(run: Run) -> None:
    """Import what takes a trainer seconds to import. Nothing is computed: threads do not survive a fork."""
    for name in _ENGINE:
        importlib.import_module(f"busbar.workloads.training.{name}")
    kind = (run.spec.model.config or {}).get("model_type")
    with contextlib.suppress(ImportError):  # the trainer will say what is wrong with it
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    if run.spec.adapter is not None:
        importlib.import_module("peft")
