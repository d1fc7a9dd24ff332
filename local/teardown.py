"""Stop an instance and remove everything that it made on the machine, also when its supervisor has ended.

Ending the supervisor ends everything inside its namespaces.  These may be left on the machine and are searched for
here, whatever the state files say: the supervisor itself (after a crash of ``up``), its cgroups, and the machine's
end of the veth while the kernel is still removing the namespaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from busbar.local import cgroups, paths
from busbar.local.addresses import check_name
from busbar.local.errors import InstanceError
from busbar.local.instance import Instance, alone, folder, load, running, start_ticks
from busbar.local.progress import say, step

STOP_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 20.0
DELETED = ".deleted"
"""Folder beside those of the instances: it holds those that are being deleted."""


def down(name: str, *, purge: bool) -> None:
    """Stop and clean up the instance; with ``purge`` delete its data too.  Has no effect when nothing runs.

    Raises:
        InstanceError: something could not be removed; the message lists it.
    """
    if purge or load(name) is not None:
        # An `up` that is still running would restart the parts that are stopped here.
        with alone(check_name(name)):
            instance = load(name)
            if instance is not None:
                _down(instance, purge=purge)
                return
            if purge:
                remove_deleted(name)
    say(f"no instance called {name!r} was started here")


def _down(instance: Instance, *, purge: bool) -> None:
    name = instance.name
    with step(f"stop {name}"):
        stop(instance)
        for file in ("running.json", "parts.json", "supervisor.json"):
            (instance.folder / file).unlink(missing_ok=True)
        clear(instance)
    if purge:
        with step(f"delete the data of {name} in {instance.folder}"):
            delete_data(instance)
    else:
        say(f"data kept in {instance.folder} (`busbar down --name {name} --purge` deletes it)")


def stop(instance: Instance) -> None:
    """End the supervisor: SIGTERM first."""
    found = running(instance.name)
    if found is not None:
        for sent, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, GONE_TIMEOUT_S)):
            with suppress(ProcessLookupError):
                os.kill(found.pid, sent)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                if start_ticks(found.pid) != found.started_ticks:
                    return
                time.sleep(0.05)


def clear(instance: Instance) -> None:
    """Remove what a supervisor that has ended left on the machine: after a crash the veth may be there for a minute, and the
    next supervisor could not make its own.

    Raises:
        InstanceError: something could not be removed; the message lists it.
    """
    left = sweep(instance)
    if left:
        raise InstanceError(
            f"these of {instance.name} could not be removed: {', '.join(left)}; end the programs that use them, and repeat"
        )


def sweep(instance: Instance) -> list[str]:
    """Remove what the supervisor left; returns what could not be removed."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while True:
        for pid in sorted({*strays(instance), *cgroups.members(instance.cgroup)}):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        device = instance.addresses.host_device
        if Path(f"/sys/class/net/{device}").exists():
            subprocess.run(["ip", "link", "delete", device], capture_output=True, check=False)
        left = cgroups.remove(instance.cgroup)
        left += [device] if Path(f"/sys/class/net/{device}").exists() else []
        left += [f"process {pid}" for pid in strays(instance)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def strays(instance: Instance) -> list[int]:
    """Supervisors of this instance that no state file names, found by their command line."""
    marker = f"busbar.local.supervisor\0{instance.folder}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if marker in (entry / "cmdline").read_bytes() and start_ticks(int(entry.name)) is not None:
                    found.append(int(entry.name))
    return found


def delete_data(instance: Instance) -> None:
    """Delete the instance's folder. It is moved away first, so that a start after a deletion that was interrupted does not
    meet what is left of it.

    Raises:
        InstanceError: it still runs.
    """
    if running(instance.name) is not None:
        raise InstanceError(f"{instance.name} still runs")
    remove_deleted(instance.name)
    target = _deleted(instance.name)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    folder(instance.name).rename(target)
    remove_deleted(instance.name)


def remove_deleted(name: str) -> None:
    """Remove what is left of an instance whose deletion was begun."""
    target = _deleted(name)
    if target.exists():
        shutil.rmtree(target)
    with suppress(OSError):  # there is none, or others are being deleted
        target.parent.rmdir()


def _deleted(name: str) -> Path:
    return paths.data() / DELETED / name
