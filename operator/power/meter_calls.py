"""One look at a meter over HTTP: bounded in time and length, without redirects, proxies or addresses of this machine.

Who may write PowerDomains is an administrator, and still an address in one must not become a way to reach what only the
operator's pod reaches: its own loopback and the cloud's metadata. A name is resolved once, every address that it has
is judged, and the one that was judged is called. Credentials go over https only.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlencode, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from busbar.kube.types.power_meter import PowerMeter
from busbar.kube.types.reasons import Reason
from busbar.operator.power.meter_answers import Unreadable, prometheus, redfish
from busbar.operator.power.meter_book import Value

TIMEOUT_S = 10.0
CONNECT_S = 3.0
MOST_BYTES = 256 * 1024
"""A Power resource with many supplies has some tens of KiB."""
Address = IPv4Address | IPv6Address
Judge = Callable[[Address], bool]


class MeterError(Exception):
    """There is no reading; the text is a sentence."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def reachable(address: Address) -> bool:
    """Whether a meter may have this address: not this machine, nor one that every machine sees as another."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    address = mapped or address
    return not (
        address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or address.is_multicast
        or address.is_reserved
    )


@dataclass(frozen=True)
class Credentials:
    """What a Secret says; never printed."""

    authorization: str = ""
    ca_pem: str = ""

    def __repr__(self) -> str:
        return "Credentials(…)"

    @classmethod
    def of(cls, secret: Mapping[str, object]) -> Credentials:
        """Of a Secret's `data`.

        Raises:
            MeterError: neither a token nor a user with a password is in it, or something is no text.
        """
        try:
            told = {
                key: base64.b64decode(str(secret[key]), validate=True).decode()
                for key in ("token", "username", "password", "ca.crt")
                if key in secret
            }
        except (ValueError, binascii.Error) as error:
            raise MeterError(
                Reason.METER_REFUSED, "The meter's Secret has a value that is no text."
            ) from error
        ca_pem = told.get("ca.crt", "")
        if token := told.get("token", "").strip():
            return cls(f"Bearer {_printable(token)}", ca_pem)
        if "username" in told and "password" in told:
            pair = f"{told['username']}:{told['password']}".encode()
            return cls("Basic " + base64.b64encode(pair).decode(), ca_pem)
        if ca_pem:
            return cls("", ca_pem)
        text = "The meter's Secret has neither token, nor username and password, nor ca.crt."
        raise MeterError(Reason.METER_REFUSED, text)


def _printable(token: str) -> str:
    if not token.isascii() or not token.isprintable():
        raise MeterError(Reason.METER_REFUSED, "The meter's Secret has a token that no header can carry.")
    return token


class _Resolver(AbstractResolver):
    """Addresses of a name, if a meter may have all of them."""

    def __init__(self, judge: Judge) -> None:
        self._judge, self._system = judge, aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._system.resolve(host, port, family)
        if not all(self._judge(ip_address(one["host"].partition("%")[0])) for one in found):
            raise _refused(host)
        return found

    async def close(self) -> None:
        await self._system.close()


def _refused(host: str) -> MeterError:
    text = f"No meter can have the address of {host}: it is the operator's own machine, or one that only it reaches."
    return MeterError(Reason.METER_ADDRESS_REFUSED, text)


async def look(meter: PowerMeter, credentials: Credentials | None, judge: Judge = reachable) -> Value:
    """What the meter says now.

    Raises:
        MeterError: it says nothing that counts.
    """
    url = _url(meter)
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        if not judge(ip_address(host)):
            raise _refused(host)
    except ValueError:
        pass  # a name: the resolver judges its addresses
    if credentials is not None and parts.scheme != "https":
        text = "Its meter has a Secret and no https: credentials are not sent where everybody can read them."
        raise MeterError(Reason.METER_REFUSED, text)
    try:
        body = await _body(url, credentials or Credentials(), judge)
        return prometheus(body, meter.prometheus.unit) if meter.prometheus is not None else redfish(body)
    except Unreadable as error:
        raise MeterError(Reason.METER_UNREADABLE, f"Its meter {error}.") from error
    except TimeoutError as error:
        text = f"Its meter at {host} has not answered within {TIMEOUT_S:.0f} s."
        raise MeterError(Reason.METER_UNREACHABLE, text) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        text = f"Its meter at {host} cannot be reached: {type(error).__name__}: {str(error)[:200]}."
        raise MeterError(Reason.METER_UNREACHABLE, text) from error


def _url(meter: PowerMeter) -> str:
    if meter.prometheus is None:
        return meter.url
    return f"{meter.url.rstrip('/')}/api/v1/query?{urlencode({'query': meter.prometheus.query})}"


async def _body(url: str, credentials: Credentials, judge: Judge) -> bytes:
    headers = {"Accept": "application/json"}
    if credentials.authorization:
        headers["Authorization"] = credentials.authorization
    context: ssl.SSLContext | bool = True
    if credentials.ca_pem:
        try:
            context = ssl.create_default_context(cadata=credentials.ca_pem)
        except (ssl.SSLError, ValueError) as error:
            raise MeterError(
                Reason.METER_REFUSED, "The meter's Secret has a ca.crt that is no certificate."
            ) from error
    connector = aiohttp.TCPConnector(resolver=_Resolver(judge), ssl=context, limit=1, force_close=True)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=CONNECT_S)
    async with (
        asyncio.timeout(TIMEOUT_S + CONNECT_S),
        aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
        session.get(url, headers=headers, allow_redirects=False) as response,
    ):
        if response.status in (401, 403):
            text = f"Its meter at {urlsplit(url).hostname} refuses the credentials ({response.status})."
            raise MeterError(Reason.METER_REFUSED, text)
        body = bytearray()
        async for chunk in response.content.iter_chunked(65536):
            body += chunk
            if len(body) > MOST_BYTES:
                raise Unreadable(f"answers with more than {MOST_BYTES // 1024} KiB")
        if response.status != 200 and not (response.status in (400, 422, 503) and b'"error"' in body):
            raise Unreadable(f"answers {response.status}, and no redirect is followed")
    return bytes(body)
