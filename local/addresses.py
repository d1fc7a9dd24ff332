"""Which addresses and ports an instance uses: pure functions of those already in use.

Every instance gets one private /16, ``10.N.0.0/16``, that overlaps no network of the machine:

===================  ==========================================================================
``10.N.0.1``         the machine's end of the veth pair
``10.N.0.2``         the instance's end: API server, kubelet, node ports, DNS
``10.N.4.0/24``      the link to the internet, with ``--internet``
``10.N.64.0/18``     pods
``10.N.128.0/18``    services (``10.N.128.1`` the API server, ``10.N.128.10`` DNS)
``10.N.192.0/18``    addresses of simulated pods; no program connects to them
===================  ==========================================================================

The machine gets one route for the /16 through the veth, so that pods and services are reachable from the machine; the
route is removed with the veth.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from busbar.local.errors import InstanceError

FIRST, LAST = 64, 250  # the second octet of candidates
PORTAL_PORT = 30080
GATEWAY_PORT = 30081
NAME = re.compile(r"[a-z][a-z0-9-]{0,19}")


@dataclass(frozen=True)
class Addresses:
    """An instance's addresses, all derived from its second octet."""

    octet: int

    def _at(self, rest: str) -> str:
        return f"10.{self.octet}.{rest}"

    @property
    def network(self) -> IPv4Network:
        """The instance's whole network."""
        return IPv4Network(self._at("0.0/16"))

    @property
    def host(self) -> str:
        """The machine's end of the veth."""
        return self._at("0.1")

    @property
    def node(self) -> str:
        """The instance's end."""
        return self._at("0.2")

    @property
    def pods(self) -> str:
        """Range of real pods."""
        return self._at("64.0/18")

    @property
    def services(self) -> str:
        """Range of ClusterIPs."""
        return self._at("128.0/18")

    @property
    def api_service(self) -> str:
        """ClusterIP of the API server."""
        return self._at("128.1")

    @property
    def dns(self) -> str:
        """ClusterIP of the cluster's DNS."""
        return self._at("128.10")

    @property
    def simulated(self) -> str:
        """Range of simulated pods' addresses."""
        return self._at("192.0/18")

    @property
    def way_out(self) -> str:
        """Range of the link through which pods reach the internet, with ``--internet``."""
        return self._at("4.0/24")

    @property
    def way_out_dns(self) -> str:
        """Address of the machine's name servers on that link."""
        return self._at("4.3")

    @property
    def host_device(self) -> str:
        """Name of the machine's end of the veth."""
        return f"busbar{self.octet}"

    @property
    def api_url(self) -> str:
        """Where the API server listens."""
        return f"https://{self.node}:6443"


def check_name(name: str) -> str:
    """The name, if it is valid for an instance.

    Raises:
        InstanceError: it is not.
    """
    if not NAME.fullmatch(name):
        raise InstanceError(
            f"instance name {name!r}: must begin with a small letter and hold at most 20 of a-z, 0-9 and -"
        )
    return name


def choose(name: str, taken: Iterable[IPv4Network]) -> Addresses:
    """A free /16 for the instance; the same name tries the same one first.

    Raises:
        InstanceError: every candidate overlaps something in ``taken``.
    """
    used = [network for network in taken if network.prefixlen > 0]  # the default route occupies no address
    count = LAST - FIRST + 1
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % count
    for offset in range(count):
        candidate = Addresses(FIRST + (start + offset) % count)
        if not any(candidate.network.overlaps(network) for network in used):
            return candidate
    raise InstanceError(
        f"no private network of the form 10.N.0.0/16 (N from {FIRST} to {LAST}) is free on this machine; "
        "`ip route` shows what uses them"
    )


def choose_port(preferred: int, is_free: Callable[[int], bool], avoid: Iterable[int] = ()) -> int:
    """The preferred loopback port or the next free one after it.

    Raises:
        InstanceError: none of the next hundred is free.
    """
    unwanted = set(avoid)
    for port in range(preferred, preferred + 100):
        if port not in unwanted and is_free(port):
            return port
    raise InstanceError(f"no port from {preferred} to {preferred + 99} is free on 127.0.0.1")


def parse_routes(routes: Iterable[str]) -> list[IPv4Network]:
    """Networks out of ``ip -4 route`` destinations and interface addresses; other texts are ignored."""
    networks = []
    for route in routes:
        text = "0.0.0.0/0" if route == "default" else route
        try:
            address, _, length = text.partition("/")
            IPv4Address(address)
            networks.append(IPv4Network(f"{address}/{length or 32}", strict=False))
        except ValueError:
            continue
    return networks
