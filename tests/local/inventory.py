"""An inventory of everything on this machine that an instance could have made, to compare before and after."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path

from busbar.local import cgroups

SETTINGS = ("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "vm/panic_on_oom", "fs/inotify")
NETWORK_SETTINGS = Path("/proc/sys/net")


@dataclass(frozen=True)
class Inventory:
    """Everything by name; two inventories are equal when nothing was left."""

    mounts: frozenset[str]
    links: frozenset[str]
    routes: frozenset[str]
    tables: frozenset[str]
    settings: frozenset[str]
    cgroups: frozenset[str]
    folders: frozenset[str]

    def left_behind(self, before: Inventory) -> dict[str, list[str]]:
        """What exists now and did not before, by kind."""
        found = {}
        for field in fields(self):
            extra = getattr(self, field.name) - getattr(before, field.name)
            if extra:
                found[field.name] = sorted(extra)
        return found


def take(name: str) -> Inventory:
    """The parts of the machine's state that the instance ``name`` could have changed."""
    links = [link["ifname"] for link in json.loads(_run("ip", "-j", "link"))]
    return Inventory(
        mounts=frozenset(line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()),
        links=frozenset(link for link in links if link.startswith("busbar")),
        routes=frozenset(_routes()),
        tables=frozenset(_run("nft", "list", "tables").splitlines()),
        settings=frozenset(_settings()),
        cgroups=frozenset(
            str(folder)
            for tree in cgroups.trees()
            for folder, _, _ in os.walk(tree)
            if f"busbar.{name}" in Path(folder).relative_to(tree).parts
        ),
        folders=frozenset(
            path
            for path in (
                "/var/lib/kubelet",
                "/var/lib/cni",
                "/var/lib/containers",
                "/var/log/pods",
                "/run/containerd",
            )
            if Path(path).exists()
        ),
    )


def processes(supervisor: int) -> dict[int, str]:
    """Every process in the supervisor's PID namespace, with its command."""
    from busbar.local.status import pids_inside

    found = {}
    for pid in pids_inside(supervisor).values():
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def _settings() -> list[str]:
    files = [Path("/proc/sys") / name for name in SETTINGS]
    found = []
    for root in (*files, NETWORK_SETTINGS):
        for file in [root] if root.is_file() else sorted(root.rglob("*")):
            # Settings of a network device disappear with it; other programs' devices may come and go meanwhile.
            if {"conf", "neigh"} & set(file.parts):
                continue
            try:
                state = file.stat()
                # A read-only file is no setting: it counts something, such as the machine's connections.
                if stat.S_ISREG(state.st_mode) and state.st_mode & 0o222 and os.access(file, os.R_OK):
                    found.append(f"{file}={file.read_text().strip()}")
            except OSError:
                continue
    return found


def _routes() -> list[str]:
    """Without the remaining lifetime of a route that was learnt from a router."""
    return [
        route.partition(" expires ")[0] for route in _run("ip", "route", "show", "table", "all").splitlines()
    ]


def _run(*command: str) -> str:
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout
