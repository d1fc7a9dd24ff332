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

_CGROUPS = (  # limit, usage, statistics, prefix of the keys that include child groups
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)


def host_limit_bytes(
    cgroup: Path = Path("/sys/fs/cgroup"),
    meminfo: Path = Path("/proc/meminfo"),
    reserve: int = RESERVE_BYTES,
) -> int | None:
    """Bytes that may still be allocated, or None where nothing is known."""
    free = [size for size in (_cgroup_free(cgroup), _available(meminfo)) if size is not None]
    return max(0, min(free) - reserve) if free else None


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
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        names = ("quota", "period")
        quota, period = (str(_number(cgroup / f"cpu/cpu.cfs_{name}_us") or "max") for name in names)
    if not (quota.isdigit() and period.isdigit()):  # "max", or -1 in v1: no limit
        return allowed
    return max(1, min(allowed, int(quota) // int(period)))


def _cgroup_free(cgroup: Path) -> int | None:
    for limit_name, usage_name, statistics, prefix in _CGROUPS:
        limit, usage = _number(cgroup / limit_name), _number(cgroup / usage_name)
        if limit is not None and usage is not None and limit < 2**60:  # v1 says "no limit" with a huge number
            return max(0, limit - max(0, usage - _file_pages(cgroup / statistics, prefix)))
    return None


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
