"""The processes of a pod that has several: each is a rank of the gang, and all that one process alone is.

    launcher                     the pod's command, if LOCAL_WORLD_SIZE is above 1 and LOCAL_RANK is not set
      ├─ rank RANK               the same command with its own RANK and LOCAL_RANK; it answers on the pod's port
      ├─ rank RANK + 1           the others do not; CUDA_VISIBLE_DEVICES shows each its own device
      └─ ...                     with `checkpoint.memory` each is a supervisor with its own trainer

A signal to stop goes to all of them. If one fails, the others end by themselves, because they watch each other
(`watch.py`), or are killed; the pod then has the exit code of the first that failed. Standard library only.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from busbar.kube.contracts.workload import Env, ExitCode
from busbar.workloads.training.control import STOP_SIGNALS
from busbar.workloads.training.world import ALONE, world_of

LEAVE_S = 20.0
"""For the others' own end when one has failed: they first find out, which takes some seconds (see `world.Patience`)."""
POLL_S = 0.05
KILLED = 128  # and the signal's number: exit code of a process that a signal ended, as shells say it
_DEVICES, _GIVEN = "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"
_AS_ASKED = (int(ExitCode.DONE), int(ExitCode.SAVED_AFTER_SIGTERM))


def starts_others(environment: Mapping[str, str]) -> bool:
    """Whether this process has to start those of its pod. Raises InvalidJob."""
    return Env.LOCAL_RANK not in environment and world_of(environment).per_pod > 1


def of_ranks(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables of each process of the pod that `environment` describes. Raises InvalidJob."""
    world = world_of(environment)
    known = _devices(environment)
    return [
        {
            **environment,
            Env.RANK: str(world.rank + local),
            Env.LOCAL_RANK: str(local),
            _DEVICES: known[local] if local < len(known) else str(local),
        }
        for local in range(world.per_pod)
    ]


def _devices(environment: Mapping[str, str]) -> list[str]:
    """Names of the pod's devices, as far as somebody has said them: those that CUDA shall see, or that the container was given.
    An index would name the first slice of a device (MIG) only."""
    if environment.get(_DEVICES):
        return [name for name in environment[_DEVICES].split(",") if name]
    given = environment.get(_GIVEN, "").split(",")
    return given if all(name.startswith(("GPU-", "MIG-")) for name in given) else []


def on_this_machine(processes: int) -> dict[str, str]:
    """The variables of a pod that is a gang by itself, for `of_ranks`."""
    with socket.socket() as free:
        free.bind((ALONE.address, 0))
        port = free.getsockname()[1]
    return {
        **os.environ,
        Env.RANK: "0",
        Env.WORLD_SIZE: str(processes),
        Env.LOCAL_WORLD_SIZE: str(processes),
        Env.MASTER_ADDR: ALONE.address,
        Env.MASTER_PORT: str(port),
    }


def launch(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Run the command once with each of `environments`; returns the exit code of all together."""
    return _Launcher(command).run(environments)


class _Launcher:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._stopped_by: int | None = None
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, environments: Sequence[Mapping[str, str]]) -> int:
        for number in STOP_SIGNALS:
            signal.signal(number, self._forward)
        for environment in environments:
            # In a session of its own Ctrl-C reaches it through the launcher only, and once.
            self._running.append(
                subprocess.Popen(self._command, env=dict(environment), start_new_session=True)
            )
            if self._stopped_by is not None:
                self._running[-1].send_signal(self._stopped_by)
        return self._wait()

    def _wait(self) -> int:
        asked, failed, deadline = int(ExitCode.DONE), None, float("inf")
        while self._running:
            for process in [one for one in self._running if one.poll() is not None]:
                self._running.remove(process)
                if process.returncode in _AS_ASKED:
                    asked = asked or process.returncode
                elif failed is None:
                    failed, deadline = process.returncode, time.monotonic() + LEAVE_S
            if time.monotonic() > deadline:
                for process in self._running:
                    process.kill()
            time.sleep(POLL_S)
        if failed is None:
            return asked
        return failed if failed >= 0 else KILLED - failed

    def _forward(self, number: int, *_: object) -> None:
        self._stopped_by = number
        for process in list(self._running):
            process.send_signal(number)


def end_at_once(code: int) -> NoReturn:
    """What is left of broken collectives may wait, or abort, at an ordinary end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def same_command() -> list[str]:
    """What started this process."""
    return [sys.executable, *sys.orig_argv[1:]]
