"""One exchange with one replica: its answer, or why there is none.

Whoever waits for a replica is watched (`watchdog`): by silence alone nobody can tell a slow replica from a dead one.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp

from busbar.gateway.contacts import Contacts
from busbar.gateway.delivery import Call
from busbar.gateway.endpoint_picker import Lease
from busbar.gateway.errors import BadUpstream
from busbar.gateway.settings import Settings
from busbar.gateway.watchdog import Watch, Watchdog
from busbar.kube.contracts.streams import TERMS_HEADER
from busbar.kube.contracts.workload import BATCH_HEADER, HEALTH_PATH, KEY_HEADER, TENANT_HEADER, WEIGHT_HEADER

_REFUSING = frozenset({429, 503})
_OUR_FAULT = frozenset({401, 403})


class ReplicaFailedError(Exception):
    """This replica did not answer, or not to the end."""

    def __init__(
        self,
        reason: str,
        *,
        refused: bool,
        unanswered: bool = False,
        pause_s: float | None = None,
        moved_to: str = "",
    ) -> None:
        """
        Args:
            unanswered: it may be dead: nothing came of it, or not all.
            moved_to: it is well, and the stream goes on best at this address.
        """
        super().__init__(reason)
        self.moved_to = moved_to
        self.reason = reason
        self.refused, self.unanswered = refused, unanswered
        self.pause_s = pause_s


class Replicas:
    """Calls replicas."""

    def __init__(self, settings: Settings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
        self.watchdog = Watchdog(self._is_well, probe_after_s=settings.probe_after_s)
        self.contacts = Contacts(lambda: self.watchdog.watches, settings.probe_after_s, time.monotonic)

    async def _is_well(self, url: str) -> bool:
        """Whether a replica answers its health check, other than with an error of its own."""
        timeout = aiohttp.ClientTimeout(total=self._settings.probe_timeout_s)
        try:
            async with self._session.get(
                url.rstrip("/") + HEALTH_PATH, timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.status < 500:
                    self.contacts.heard(url)
                return answer.status < 500
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    @asynccontextmanager
    async def post(
        self, call: Call, lease: Lease, path: str, data: bytes
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, Watch]]:
        """The replica's answer, its status one that concerns the client, and the watch over its silence.

        Raises ReplicaFailedError, or BadUpstream when a replica that is well took its whole time and said nothing:
        another one would do the same.
        """
        headers = {
            "Authorization": f"Bearer {lease.endpoint.bearer or lease.service.bearer}",
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if call.stream else "application/json",
            "Accept-Encoding": "identity",
            "X-Request-Id": call.request_id,
            "X-Busbar-Request-Id": call.request_id,
            TENANT_HEADER: call.tenant,
            KEY_HEADER: call.key_id,
            WEIGHT_HEADER: f"{call.weight:g}",
            TERMS_HEADER: call.terms(lease.work.to),
            **({BATCH_HEADER: "1"} if call.keep is not None else {}),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s)
        limit_s = self._settings.first_byte_timeout_s
        with self._told(lease.endpoint.url), self.watchdog.watch(lease.endpoint.url, limit_s) as watch:
            try:
                async with asyncio.timeout(None) as waiting:
                    watch.cut = lambda: waiting.reschedule(0.0)
                    response = await self._session.post(
                        lease.endpoint.url.rstrip("/") + path,
                        data=io.BytesIO(data),
                        headers=headers,
                        timeout=timeout,
                        allow_redirects=False,
                    )
                    watch.cut = response.close
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise ReplicaFailedError(
                    "it could not be connected to", refused=True, unanswered=True
                ) from error
            except TimeoutError as error:
                if watch.silence is not None and watch.silence.hung:
                    raise ReplicaFailedError(watch.silence.reason, refused=False, unanswered=True) from error
                raise BadUpstream(f"The model did not answer within {limit_s:.0f} s.") from error
            except (aiohttp.ClientError, OSError) as error:
                raise ReplicaFailedError(
                    "it closed the connection without an answer", refused=False, unanswered=True
                ) from error
            self.contacts.heard(lease.endpoint.url)
            try:
                _check_status(response)
                watch.heard()
                yield response, watch
            finally:
                response.close()  # for one not read to its end, this is what cancels the work upstream

    @contextmanager
    def _told(self, url: str) -> Iterator[None]:
        """Notes whether the replica answered to the end."""
        try:
            yield
        except ReplicaFailedError as error:
            if error.unanswered:
                self.contacts.failed(url)
            raise
        else:
            self.contacts.heard(url)

    async def read(self, upstream: aiohttp.ClientResponse, watch: Watch) -> bytes:
        """A whole answer. Raises ReplicaFailedError or BadUpstream."""
        limit = self._settings.response_body_mib << 20
        data = bytearray()
        try:
            async for piece in upstream.content.iter_any():
                watch.heard()
                data += piece
                if len(data) > limit:
                    raise BadUpstream(f"The model server's answer is larger than {limit >> 20} MiB.")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = watch.silence.reason if watch.silence else "it broke off in its answer"
            raise ReplicaFailedError(reason, refused=False, unanswered=True) from error
        watch.pause()
        return bytes(data)


def _check_status(response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status in _REFUSING:
        raise ReplicaFailedError(
            f"it answered {status}", refused=True, pause_s=_seconds(response.headers.get("Retry-After"))
        )
    if status >= 500 or status in _OUR_FAULT or not (status == 200 or status >= 400):
        raise ReplicaFailedError(f"it answered {status}", refused=False)


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isascii() and text.isdigit() else None
