"""Sends leases, once a second, while this operator leads; what they say is decided in `leasing.py`.

A message that is late, lost or refused needs nothing: the next telemetry says what the node holds, and until then the
controller counts whatever was sent. So nobody waits for an answer, and a node that hangs delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import aiohttp

from busbar.kube.contracts.power import LEASE_PATH, PATH, SIGNATURE, LeaseMessage, LeaseOrder, lease_bearer
from busbar.kube.errors import SettingsError
from busbar.operator.power.gatherer import CONNECT_S, TIMEOUT_S, Source
from busbar.operator.power.leasing import FeedLeases, State, new_leader, take_round
from busbar.operator.power.membership import Membership
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.readings import Reading
from busbar.operator.power.work import NodeWork
from busbar.operator.settings import Settings
from busbar.scheduler.power import ControlSettings

if TYPE_CHECKING:
    from busbar.operator.agent.signing import Signer

log = logging.getLogger(__name__)

PARALLEL = 64
"""Messages at a time."""
ANSWER_BYTES = 16 * 1024


def control_settings(settings: Settings) -> ControlSettings:
    """How the controller reaches agents: limits are in the boards, and stay there if all processes of a node are dead."""
    return ControlSettings(
        ttl_s=settings.power_lease_s,
        stale_s=settings.power_fresh_s,
        renew_s=settings.power_lease_s / 4,
        limits_stay=True,
    )


def _signer(pem: bytes) -> Signer | None:
    """None without a key: then agents refuse every lease, and say so."""
    if not pem:
        return None
    from busbar.operator.agent.signing import Signer  # with cryptography, ten MiB that few need

    try:
        return Signer(pem)
    except ValueError as error:
        raise SettingsError(f"BUSBAR_POWER_LEASE_KEY_FILE: {error}") from error


class Lessor:
    """Keeps the controller's state, and sends what it says."""

    def __init__(self, settings: Settings, metrics: PowerMetrics, clock: Callable[[], float]) -> None:
        self.left_s: Callable[[], float] = lambda: 0.0
        """For how long this operator leads; 0 or less: nothing is sent."""
        self.feeds: Mapping[str, FeedLeases] = {}
        """Of the last round; empty without one."""
        self.why: Mapping[str, str] = {}
        """Why each limited node has its lease; of the last round too."""
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._control = control_settings(settings)
        self._state: State | None = None
        self._seen: dict[str, tuple[str, int]] = {}  # by node: start and sequence whose actuation was counted
        self._signer = _signer(settings.power_lease_key)
        self._said: dict[str, str] = {}  # by address: why messages fail, as logged
        self._sending: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    @property
    def counted_w(self) -> dict[str, float]:
        """By leased node: the most that it may draw by all that was sent to it, as of the last round."""
        state = self._state
        return {node: watts for node, (_, watts) in state.counted.items()} if state is not None else {}

    async def round(
        self,
        found: Membership,
        readings: Mapping[str, Reading],
        sources: Iterable[Source],
        works: Mapping[str, NodeWork] = MappingProxyType({}),
    ) -> None:
        """Decides in a thread, and begins to send.

        Args:
            works: see `take_round`.
        """
        if self.left_s() <= 0:
            return
        state = self._state or new_leader(self._clock())
        self._state = state
        made = await asyncio.to_thread(
            take_round, state, found, dict(readings), self._clock(), self._control, works
        )
        self._state, self.feeds, self.why = made.state, made.feeds, made.why
        self._count_actuation(readings)
        by_node = {message.node: message for message in made.messages}
        for source in sources:
            messages = [by_node[node] for node in sorted(source.nodes & by_node.keys())]
            if messages:
                task = asyncio.get_running_loop().create_task(self._send(source, messages))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def close(self) -> None:
        for task in list(self._sending):
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(self, source: Source, messages: Sequence[LeaseMessage]) -> None:
        url = source.url.removesuffix(PATH) + LEASE_PATH
        if self.left_s() <= 0:
            return
        try:
            why = await self._post(url, source.name, LeaseOrder(leases=tuple(messages)))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"{type(error).__name__}: {error}"[:300]
        if not why:
            self._said.pop(url, None)
        elif self._said.get(url) != why:
            self._said[url] = why
            log.warning("leases not taken", extra={"of": url, "why": why})

    async def _post(self, url: str, name: str, order: LeaseOrder) -> str:
        """Why it was not taken as a whole; empty: it was."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=PARALLEL),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=CONNECT_S),
                trust_env=False,
            )
        headers = {
            "Authorization": f"Bearer {lease_bearer(self._settings.power_key, name)}",
            "Content-Type": "application/json",
        }
        body = order.model_dump_json(by_alias=True).encode()
        if self._signer is not None:
            headers[SIGNATURE] = self._signer.sign(body)
        async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status == 200:
                return ""
            text = (await response.content.read(ANSWER_BYTES)).decode(errors="replace")
            return f"answered {response.status}: {text}"[:300]

    def _count_actuation(self, readings: Mapping[str, Reading]) -> None:
        """Each message's time from its arrival to its limits being read back, once."""
        self._seen = {node: seen for node, seen in self._seen.items() if node in readings}
        for node, reading in readings.items():
            limits = reading.limits
            if limits is None or limits.actuation_s is None:
                continue
            mark = reading.epoch, limits.sequence
            if self._seen.get(node) != mark:
                self._seen[node] = mark
                self._metrics.actuation.observe(max(0.0, limits.actuation_s))
