"""The instance's cgroups, in version 1 (one tree per controller) and version 2 (one tree).

Below ``busbar.<name>`` lie ``system/<part>`` (our processes, for accounting) and ``kubepods`` (the kubelet's).
Unlike everything else they are not removed with the namespaces, so ``down`` removes them, also after a crash.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NEEDED = ("cpu", "cpuset", "memory", "pids")


def is_v2(root: Path = ROOT) -> bool:
    """Whether the machine has only the unified tree."""
    return (root / "cgroup.controllers").exists()


def trees(root: Path = ROOT) -> list[Path]:
    """The root of every hierarchy, links resolved (``cpu`` and ``cpuacct`` may be one)."""
    if is_v2(root):
        return [root]
    return sorted({p.resolve() for p in root.iterdir() if (p / "cgroup.procs").exists()})


def controllers(root: Path = ROOT) -> set[str]:
    """The controllers that can be used."""
    if is_v2(root):
        return set((root / "cgroup.controllers").read_text().split())
    return {p.name for p in root.iterdir() if (p / "cgroup.procs").exists()}


def may_have_children(root: Path = ROOT) -> bool:
    """False where version 2 cannot delegate controllers: a cgroup that is not the real root contains processes."""
    if not is_v2(root) or not (root / "cgroup.type").exists():  # the real root has no cgroup.type
        return True
    handed_down = set((root / "cgroup.subtree_control").read_text().split())
    return set(NEEDED) <= handed_down or not (root / "cgroup.procs").read_text().strip()


def create(path: str, root: Path = ROOT) -> None:
    """Make the cgroup ``path`` in every hierarchy, ready for children."""
    if is_v2(root):
        wanted = " ".join(f"+{c}" for c in sorted(controllers(root)) if c in (*NEEDED, "io", "hugetlb"))
        current = root
        for name in path.split("/"):
            (current / "cgroup.subtree_control").write_text(wanted)
            current = current / name
            current.mkdir(exist_ok=True)
        return
    for tree in trees(root):
        current = tree
        for name in path.split("/"):
            current = current / name
            current.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):  # empty in a new cpuset: nothing could run there
                file = current / setting
                if file.exists() and not file.read_text().strip():
                    file.write_text((current.parent / setting).read_text())


def weigh(path: str, cores: int, root: Path = ROOT) -> None:
    """Give all pods together the CPU weight of two busy processes per core.

    By default they would share the CPU time of one process of the machine, however many cores there are.
    """
    if is_v2(root):
        (root / path / "cpu.weight").write_text(str(min(10_000, 200 * cores)))
        return
    (root / "cpu" / path / "cpu.shares").write_text(str(min(262_144, 2048 * cores)))


def enter(path: str, pid: int, root: Path = ROOT) -> None:
    """Put a process into ``path`` for accounting: the memory tree in version 1, the only tree in version 2."""
    folder = (root if is_v2(root) else root / "memory") / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text(str(pid))


def members(path: str, root: Path = ROOT) -> list[int]:
    """Process ids that are in ``path`` or below, in any hierarchy."""
    found: set[int] = set()
    for tree in trees(root):
        for folder, _, _ in os.walk(tree / path):
            with suppress(OSError):
                found.update(map(int, (Path(folder) / "cgroup.procs").read_text().split()))
    return sorted(found)


def remove(path: str, root: Path = ROOT) -> list[str]:
    """Remove ``path`` and everything below it in every hierarchy; returns the folders that could not be removed."""
    left = []
    for tree in trees(root):
        for folder, _, _ in os.walk(tree / path, topdown=False):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                continue
            except OSError:
                left.append(folder)
    return left


def working_set(folder: Path) -> int | None:
    """Bytes that cannot be reclaimed for free: usage less the inactive file cache, as kubectl counts."""
    for usage_file, key in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            usage = int((folder / usage_file).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        inactive = next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)
        return max(0, usage - inactive)
    return None


def memory_folder(path: str, root: Path = ROOT) -> Path:
    """The folder with the memory files of ``path``."""
    return (root if is_v2(root) else root / "memory") / path


def cpu_seconds(folder: Path, root: Path = ROOT) -> float:
    """Processor seconds used by the cgroup whose memory folder is ``folder``."""
    if is_v2(root):
        with suppress(OSError):
            lines = (folder / "cpu.stat").read_text().splitlines()
            return next(int(li.split()[1]) for li in lines if li.startswith("usage_usec")) / 1e6
        return 0.0
    with suppress(OSError):
        return (
            int((root / "cpuacct" / folder.relative_to(root / "memory") / "cpuacct.usage").read_text()) / 1e9
        )
    return 0.0
