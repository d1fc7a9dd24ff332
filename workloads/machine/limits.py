"""How much memory and how many processors this process may use, by its cgroup (v2 or v1) and the machine.

A cgroup's usage counts the pages of files that were read. The kernel reclaims those on demand, so they count as free
here, as in the machine's own MemAvailable: a job does not seem too large for its pod because a large corpus or saved
model was just read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

RESERVE_BYTES = 256 * 2**20  # Python, torch's code and buffers outside the arenas
CUDA_RESERVE_BYTES = (
    2**30
)  # and libraries and kernels that the driver loads later; an assumption, not a measurement
SUPERVISOR_BYTES = (
    64 * 2**20
)  # of pages that a supervisor and its trainer no longer share; 45 MiB were measured

_CGROUPS = (  # tree (the name of v1's controller), limit, usage, statistics, prefix of the keys that include child groups
    ("", "memory.max", "memory.current", "memory.stat", ""),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_"),
)


def host_limit_bytes(
    cgroup: Path = Path("/sys/fs/cgroup"),
    meminfo: Path = Path("/proc/meminfo"),
    reserve: int = RESERVE_BYTES,
    membership: Path = Path("/proc/self/cgroup"),
    processes: int = 1,
) -> int | None:
    """Bytes that this process, one of so many alike, may still allocate, or None where nothing is known.

    In a container the root of the tree is the container's own cgroup. Elsewhere each cgroup on the way from the root to
    that of this process may have a limit (`systemd-run -p MemoryMax=`), and the tightest counts.
    """
    found = (
        _free(folder / limit, folder / usage, folder / statistics, prefix)
        for tree, limit, usage, statistics, prefix in _CGROUPS
        for folder in _own_folders(cgroup / tree, membership, tree)
    )
    free = [size for size in (*found, _available(meminfo)) if size is not None]
    return max(0, min(free) // processes - reserve) if free else None


class PeakMeter:
    """The largest resident set of this process since `reset`, above that at the meter's creation.

    Pages of files that were read are in it: it is an upper bound of what the process allocated.
    """

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self._base = self._read("VmRSS")

    def reset(self) -> None:
        try:
            (self._proc / "clear_refs").write_text("5")  # the kernel starts its high-water mark anew
        except OSError:
            return  # without the right to do so, it is the peak of all phases so far

    def peak_bytes(self) -> int:
        return max(0, self._read("VmHWM") - self._base)

    def _read(self, name: str) -> int:
        try:
            lines = (self._proc / "status").read_text().splitlines()
        except OSError:
            return 0
        return _kibibytes(line for line in lines if line.startswith(f"{name}:")) or 0


def usable_processors(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors that this process may use: its affinity, and the cgroup's quota (v2 or v1) where there is one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        names = ("quota", "period")
        quota, period = (str(_number(cgroup / f"cpu/cpu.cfs_{name}_us") or "max") for name in names)
    if not (quota.isdigit() and period.isdigit()):  # "max", or -1 in v1: no limit
        return allowed
    return max(1, min(allowed, int(quota) // int(period)))


def _own_folders(root: Path, membership: Path, controller: str) -> list[Path]:
    """The cgroups from the root of a tree to that of this process, as far as they can be seen."""
    try:
        rows = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        rows = []
    path = next((row[2] for row in rows if len(row) == 3 and controller in row[1].split(",")), "/")
    folders, folder = [root], root
    for part in path.split("/"):
        folder = folder / part
        if part and part != ".." and folder.is_dir():
            folders.append(folder)
    return folders


def _free(limit: Path, usage: Path, statistics: Path, prefix: str) -> int | None:
    most, used = _number(limit), _number(usage)
    if most is None or used is None or most >= 2**60:  # v1 says "no limit" with a huge number
        return None
    return max(0, most - max(0, used - _file_pages(statistics, prefix)))


def _file_pages(statistics: Path, prefix: str) -> int:
    """Bytes of file pages that can be dropped."""
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    try:
        rows = [line.split() for line in statistics.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in wanted)


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return _kibibytes(line for line in lines if line.startswith("MemAvailable:"))


def _kibibytes(lines: Iterable[str]) -> int | None:
    for line in lines:
        return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or the word "max"
        return None
