"""How much memory this process may use: the cgroup's limit (v2 or v1) and the machine's free memory.

A cgroup's usage counts the pages of files that were read. The kernel gives those back as soon as somebody wants
the memory, so they count as free here, as they do in the machine's own MemAvailable: a large corpus or saved
model that was just read does not make a job look too big for its pod.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

RESERVE_BYTES = 256 * 2**20  # Python, torch's code and buffers outside the arenas

_CGROUPS = (  # limit, usage, statistics, prefix of the keys that include child groups
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)


def host_limit_bytes(
    cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")
) -> int | None:
    """Bytes that may still be allocated, or None where nothing is known."""
    free = [size for size in (_cgroup_free(cgroup), _available(meminfo)) if size is not None]
    return max(0, min(free) - RESERVE_BYTES) if free else None


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
