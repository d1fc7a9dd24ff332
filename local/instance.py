"""One named cluster on this machine: its folder, its addresses, and whether it runs.

``instance.json`` in the folder holds the settings that are chosen once and must not change (addresses, ports),
because certificates, etcd's content and people's bookmarks contain them.  ``running.json`` names the supervisor that
runs it now; it is valid only while that process lives and has the start time written there, because process ids are
reused.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network
from pathlib import Path

from busbar.local import build, paths
from busbar.local.addresses import (
    GATEWAY_PORT,
    PORTAL_PORT,
    Addresses,
    check_name,
    choose,
    choose_port,
    parse_routes,
)
from busbar.local.errors import InstanceError

DEFAULT_NAME = "busbar"
SETTINGS = {"name": str, "octet": int, "portal_port": int, "gateway_port": int}
"""What ``instance.json`` holds."""


@dataclass(frozen=True)
class Instance:
    """The permanent settings of one instance."""

    name: str
    octet: int
    portal_port: int
    gateway_port: int

    @property
    def addresses(self) -> Addresses:
        """Its addresses."""
        return Addresses(self.octet)

    @property
    def folder(self) -> Path:
        """Its data folder on the machine."""
        return folder(self.name)

    @property
    def node_name(self) -> str:
        """The real node's name in Kubernetes."""
        return f"{self.name}-node"

    @property
    def cgroup(self) -> str:
        """Its cgroup below the root of every hierarchy."""
        return f"busbar.{self.name}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    def save(self) -> None:
        """Store it for the next start."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self.folder / "instance.json", asdict(self))


def folder(name: str) -> Path:
    """The data folder of the instance called ``name``."""
    return paths.data() / name


def write_json(file: Path, value: object) -> None:
    """Write atomically: readers see the old content or the new."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    partial.replace(file)


def load(name: str) -> Instance | None:
    """The instance called ``name`` if it was ever started here.

    Raises:
        InstanceError: a bad name, or settings that this version does not know.
    """
    file = folder(check_name(name)) / "instance.json"
    if not file.exists():
        return None
    try:
        told = json.loads(file.read_text())
    except ValueError:
        told = None
    if not isinstance(told, dict) or {key: type(value) for key, value in told.items()} != SETTINGS:
        raise InstanceError(
            f"{file} does not hold the settings of an instance as this version of Busbar writes them: use the version"
            f" that made the instance, or delete {file.parent} with all data of the instance"
        )
    return Instance(**told)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Keep every other `up` and `down` of the instance away. What was loaded before may have been deleted meanwhile."""
    with build.locked(paths.data() / f".{name}.lock", f"another `busbar up` or `down` of {name}"):
        yield


def names() -> list[str]:
    """All instances that have data on this machine."""
    return sorted(file.parent.name for file in paths.data().glob("*/instance.json"))


def load_or_create(name: str) -> Instance:
    """The instance called ``name``, with free addresses and ports chosen the first time.

    Raises:
        InstanceError: a bad name, nothing free, or settings that this version does not know.
    """
    with build.locked(paths.data() / ".lock", "another `busbar up` that chooses addresses"):
        return load(name) or _create(name)


def _create(name: str) -> Instance:
    others = [other for other in map(load, names()) if other is not None]
    taken = [*machine_networks(), *(other.addresses.network for other in others)]
    ports = [port for other in others for port in (other.portal_port, other.gateway_port)]
    portal = choose_port(PORTAL_PORT, port_is_free, ports)
    gateway = choose_port(GATEWAY_PORT, port_is_free, [*ports, portal])
    made = Instance(name, choose(name, taken).octet, portal, gateway)
    made.save()
    return made


def machine_networks() -> list[IPv4Network]:
    """Every IPv4 network that the machine has a route to or an address in."""
    routes = json.loads(_ip("-j", "-4", "route", "show", "table", "all"))
    links = json.loads(_ip("-j", "-4", "addr", "show"))
    found = [str(route.get("dst", "")) for route in routes if route.get("type") != "broadcast"]
    found += [f"{a['local']}/{a['prefixlen']}" for link in links for a in link.get("addr_info", [])]
    return parse_routes(found)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], text=True, capture_output=True, check=True).stdout or "[]"


def port_is_free(port: int) -> bool:
    """Whether 127.0.0.1:port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class Running:
    """A living supervisor: its process id on the machine and when that process started (clock ticks)."""

    pid: int
    started_ticks: int
    started_at: str


def running(name: str) -> Running | None:
    """The supervisor that runs the instance now, or None."""
    file = folder(name) / "running.json"
    try:
        told = Running(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return told if start_ticks(told.pid) == told.started_ticks else None


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
