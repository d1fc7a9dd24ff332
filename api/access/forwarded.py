"""Where a request came from: its connection, or what a proxy that the settings trust says of it.

`X-Forwarded-For` and `X-Forwarded-Proto` are believed only from the addresses in `Settings.trusted_proxies`;
anybody else may write anything there. Of a chain of addresses the last one counts that is not itself a trusted
proxy: what stands before it was written by the client.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from busbar.api.settings import PREFIX, Settings
from busbar.kube.errors import SettingsError

UNKNOWN = "unknown"
IPV6_SITE_BITS = 64
"""One household or host has a whole /64, so that much counts as one address."""


class Forwarded:
    """Reads address and scheme of requests (ASGI scopes)."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError for a trusted proxy that is neither an address nor a network."""
        self._trusted = _networks(settings.trusted_proxies)
        # Whether the settings say that every browser speaks TLS.
        self.always_https = settings.secure_cookies or settings.public_url.lower().startswith("https://")

    def address(self, scope: MutableMapping[str, Any]) -> str:
        """The client's address, for counting: an IPv4 address, an IPv6 network of 64 bits, or `unknown`."""
        at = _peer(scope)
        if self._is_trusted(at):
            chain = ",".join(_headers(scope, b"x-forwarded-for")).split(",")
            for said in reversed([part.strip() for part in chain]):
                if not _is_address(said):
                    break
                at = said
                if not self._is_trusted(said):
                    break
        return _counted(at)

    def is_https(self, scope: MutableMapping[str, Any]) -> bool:
        """Whether the person's browser speaks TLS: by the settings, the connection, or a trusted proxy's word."""
        if self.always_https or scope.get("scheme") == "https":
            return True
        said = ",".join(_headers(scope, b"x-forwarded-proto")).split(",")
        return said[-1].strip().lower() == "https" and self._is_trusted(_peer(scope))

    def _is_trusted(self, address: str) -> bool:
        if not self._trusted or not _is_address(address):
            return False
        found = _plain(address)
        return any(found.version == network.version and found in network for network in self._trusted)


def _networks(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    try:
        return tuple(ip_network(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise SettingsError(
            f"{PREFIX}TRUSTED_PROXIES: {error}; write addresses or networks such as 10.0.0.0/8, by commas"
        ) from error


def _peer(scope: MutableMapping[str, Any]) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _headers(scope: MutableMapping[str, Any], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope.get("headers") or [] if key == name]


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _plain(address: str) -> Any:
    """The address; an IPv4 address that came in IPv6 clothes as what it is."""
    found = ip_address(address)
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def _counted(address: str) -> str:
    if not _is_address(address):
        return UNKNOWN
    found = _plain(address)
    if isinstance(found, IPv6Address):
        return str(ip_network((int(found), IPV6_SITE_BITS), strict=False))
    return str(found)
