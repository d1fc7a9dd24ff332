"""The requirements on the machine, checked before anything is changed.

``gather`` reads facts; ``complaints`` is pure and returns one sentence for each missing requirement.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from busbar.local import build, cgroups, namespaces, packages, paths
from busbar.local.errors import PreflightError
from busbar.local.images import recipe
from busbar.local.images.buildah import pushed
from busbar.local.instance import folder, load, port_is_free, running
from busbar.local.packages import NEEDED

GIB = 1024**3
MEMORY_GIB = 6
DISK_FIRST_GIB = 30  # programs, images, and image layers in containerd's store
DISK_LATER_GIB = 4
MACHINES = ("x86_64", "aarch64")
NETLINK_NETFILTER = 12


@dataclass(frozen=True)
class Facts:
    """The facts of the machine."""

    system: str
    machine: str
    root: bool
    python: tuple[int, int]
    memory_bytes: int
    disk_free: dict[str, int]  # folder → bytes free on its file system
    disk_needed: int
    busy_ports: tuple[int, ...] = ()
    missing_features: tuple[str, ...] = ()
    missing_packages: tuple[str, ...] = ()
    has_apt: bool = True
    has_cryptography: bool = True


def complaints(facts: Facts) -> list[str]:
    """One sentence per missing requirement; empty if the machine is suitable."""
    if facts.system != "Linux":
        return [f"a Linux machine is needed, and this is {facts.system}: use a virtual machine"]
    found = []
    if not facts.root:
        found.append("root is needed, as for any Kubernetes node: run it with sudo")
    if facts.machine not in MACHINES:
        found.append(f"the processor must be one of {', '.join(MACHINES)}, and this is {facts.machine}")
    if facts.python < (3, 11):
        found.append(f"Python 3.11 or newer is needed, and this is {facts.python[0]}.{facts.python[1]}")
    if facts.memory_bytes < MEMORY_GIB * GIB:
        found.append(f"{MEMORY_GIB} GiB of memory are needed, and there are {facts.memory_bytes / GIB:.1f}")
    for place, free in facts.disk_free.items():
        if free < facts.disk_needed:
            needed = facts.disk_needed / GIB
            found.append(f"{needed:.0f} GiB of disk are needed in {place}, and {free / GIB:.1f} are free")
    for port in facts.busy_ports:
        found.append(f"port {port} of 127.0.0.1, which this instance uses, is taken by another program")
    for feature in facts.missing_features:
        found.append(f"the kernel lacks {feature}")
    if not facts.has_cryptography:
        found.append("the Python package cryptography is missing: pip install 'busbar[local]'")
    if facts.missing_packages and not facts.has_apt:
        found.append(f"apt-get is missing and so are these packages: {', '.join(facts.missing_packages)}")
    return found


def check(name: str) -> None:
    """Refuse a machine that cannot run the instance, before anything is changed.

    Raises:
        PreflightError: with every sentence.
    """
    found = complaints(gather(name))
    if found:
        raise PreflightError("; ".join(found))


def gather(name: str) -> Facts:
    """Read the facts of this machine; changes nothing."""
    linux = sys.platform == "linux"
    root = os.geteuid() == 0
    # If the programs and earlier images exist, only small layers are added.
    built = not build.missing() and all(pushed(image.name, "latest") for image in recipe.IMAGES)
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        root=root,
        python=sys.version_info[:2],
        memory_bytes=_memory() if linux else 0,
        disk_free={str(place): shutil.disk_usage(place).free for place in _places(name)},
        disk_needed=(DISK_LATER_GIB if built else DISK_FIRST_GIB) * GIB,
        busy_ports=_busy_ports(name),
        missing_features=tuple(_missing_features()) if linux and root else (),
        missing_packages=tuple(packages.missing()),
        has_apt=shutil.which("apt-get") is not None,
        has_cryptography=importlib.util.find_spec("cryptography") is not None,
    )


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _places(name: str) -> list[Path]:
    """An existing folder on each file system that will be written to."""
    found: dict[int, Path] = {}
    for wanted in (paths.cache(), folder(name)):
        place = wanted
        while not place.exists():
            place = place.parent
        found.setdefault(place.stat().st_dev, place)
    return list(found.values())


def _busy_ports(name: str) -> tuple[int, ...]:
    known = load(name)
    if known is None or running(name) is not None:
        return ()
    return tuple(port for port in (known.portal_port, known.gateway_port) if not port_is_free(port))


def _missing_features() -> list[str]:
    missing = []
    filesystems = Path("/proc/filesystems").read_text().split()
    if "overlay" not in filesystems and not _loadable("overlay"):
        missing.append("the overlay file system")
    if not cgroups.ROOT.exists():
        missing.append("cgroups mounted at /sys/fs/cgroup")
    else:
        absent = sorted(set(cgroups.NEEDED) - cgroups.controllers())
        missing += [f"the cgroup controller {name}" for name in absent]
        if not absent and not cgroups.may_have_children():
            missing.append("cgroups to hand out: processes sit in /sys/fs/cgroup itself, as in a container")
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER).close()
    except OSError:
        missing.append("netfilter (nf_tables)")
    if not _veth_works():
        missing.append("network namespaces with veth devices (or the right to make them)")
    return missing


def _loadable(module: str) -> bool:
    modprobe = shutil.which("modprobe")
    return (
        modprobe is not None and subprocess.run([modprobe, "-n", "-q", module], check=False).returncode == 0
    )


def _veth_works() -> bool:
    """Try the feature in a namespace that ends with the child process."""
    if not Path(NEEDED["iproute2"]).exists():
        return True  # cannot be tried before iproute2 is installed
    child = os.fork()
    if child == 0:
        code = 1
        try:
            namespaces.unshare(namespaces.CLONE_NEWNET | namespaces.CLONE_NEWNS)
            command = ["ip", "link", "add", "name", "try0", "type", "veth", "peer", "name", "try1"]
            code = subprocess.run(command, capture_output=True, check=False).returncode
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
