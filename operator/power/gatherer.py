"""Asks node agents what their nodes draw, once a second, and keeps what is believed of it.

The interface to an agent is small (kube/contracts/power.py): one address, one bearer, and the nodes for which it may
answer. Agents are the pods of the chart's DaemonSet in the platform's own namespace, each for its own node; the
simulator answers for the nodes with its label and for no others, and only with watts that it calls simulated.
An agent that answers slowly is not asked again before it has answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from pydantic import ValidationError

from busbar.kube.contracts.power import (
    PATH,
    PORT,
    SIMULATED_LABEL,
    SIMULATOR,
    AgentAnswer,
    AgentReport,
    Backend,
    telemetry_bearer,
)
from busbar.operator.power.readings import Reading, Refusal, read
from busbar.operator.power.rings import Series
from busbar.operator.settings import Settings
from busbar.operator.watch.projections import Node, Pod

log = logging.getLogger(__name__)

PARALLEL = 256
TIMEOUT_S = 2.0
CONNECT_S = 0.5
"""Short, so that many nodes that are away do not hold the places of those that answer."""
NODE_BYTES = 64 * 1024
SIMULATOR_BYTES = 16 * 1024 * 1024
AGENT_OWNER = "DaemonSet busbar-agent"


@dataclass(frozen=True)
class Source:
    """Where reports come from."""

    url: str
    name: str
    """In its bearer."""
    nodes: frozenset[str]
    """The nodes for which it may answer."""

    @property
    def simulates(self) -> bool:
        return self.name == SIMULATOR


def sources(settings: Settings, nodes: Iterable[Node], pods: Iterable[Pod]) -> list[Source]:
    """Every agent that can be asked now; none without a key."""
    if not settings.power_key:
        return []
    found = []
    played = set()
    if settings.power_simulator_url:
        played = {node.name for node in nodes if any(key == SIMULATED_LABEL for key, _ in node.labels)}
        if played:
            found.append(
                Source(settings.power_simulator_url.rstrip("/") + PATH, SIMULATOR, frozenset(played))
            )
    for pod in pods:
        if pod.owner != AGENT_OWNER or pod.key.namespace != settings.namespace or pod.node in played:
            continue
        if pod.phase == "Running" and pod.ip and not pod.host_network:
            host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
            found.append(Source(f"http://{host}:{PORT}{PATH}", pod.node, frozenset({pod.node})))
    return found


class Gatherer:
    """Keeps the last reading of each node, and the means of its last minutes."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.readings: dict[str, Reading] = {}
        self.series: dict[str, Series] = {}
        self._settings, self._clock = settings, clock
        self._asked: dict[str, asyncio.Task[None]] = {}  # by address
        self._refused: dict[str, str] = {}  # by node: why its report does not count, as logged
        self._away: dict[str, str] = {}  # by address: why it has no answer, as logged
        self._session: aiohttp.ClientSession | None = None

    def ask(self, found: Iterable[Source]) -> None:
        """Begins to ask every source that is not being asked already; forgets what was said of others."""
        found = tuple(found)
        here = {source.url for source in found}
        self._away = {url: why for url, why in self._away.items() if url in here}
        for source in found:
            if source.url not in self._asked:
                task = asyncio.get_running_loop().create_task(self._ask(source))
                self._asked[source.url] = task
                task.add_done_callback(partial(self._answered, source.url))

    def keep(self, nodes: Iterable[str]) -> None:
        """Forgets every other node."""
        kept = set(nodes)
        stores: tuple[dict[str, Any], ...] = (self.readings, self.series, self._refused)
        for store in stores:
            for name in [n for n in store if n not in kept]:
                del store[name]

    async def close(self) -> None:
        for task in list(self._asked.values()):
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def take(self, source: Source, report: AgentReport, at_s: float) -> None:
        """Judges one report; `at_s` is when it was asked for."""
        if report.node not in source.nodes:
            return
        told = {report.boards_from, report.host_from}
        if source.simulates and not told <= {Backend.SIMULATED, Backend.NONE}:
            self._note(self._refused, report.node, "the simulator may only say that its watts are simulated")
            return
        last = self.readings.get(report.node)
        if last is not None and at_s < last.at_s:
            return  # overtaken by a later answer, perhaps of a later start
        judged = read(last, report, at_s)
        if isinstance(judged, Refusal):
            self._note(self._refused, report.node, judged.why)
            return
        self._refused.pop(report.node, None)
        self.readings[report.node] = judged
        self.series.setdefault(report.node, Series()).add(at_s, judged.watts)

    def _answered(self, url: str, task: asyncio.Task[None]) -> None:
        self._asked.pop(url, None)

    async def _ask(self, source: Source) -> None:
        at_s = self._clock()
        try:
            text = await self._fetch(source)
            answer = AgentAnswer.model_validate_json(text)
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError) as error:
            self._note(self._away, source.url, f"{type(error).__name__}: {error}"[:300])
            return
        self._away.pop(source.url, None)
        for report in answer.reports:
            self.take(source, report, at_s)

    async def _fetch(self, source: Source) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=PARALLEL),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=CONNECT_S),
                trust_env=False,
            )
        bearer = telemetry_bearer(self._settings.power_key, source.name)
        limit = SIMULATOR_BYTES if source.simulates else NODE_BYTES
        headers = {"Authorization": f"Bearer {bearer}"}
        async with self._session.get(source.url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise aiohttp.ClientError(f"answered {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_chunked(65536):
                body += chunk
                if len(body) > limit:
                    raise aiohttp.ClientError(f"the answer is longer than {limit} bytes")
        return bytes(body)

    def _note(self, said: dict[str, str], about: str, why: str) -> None:
        """Logs it where it is new."""
        if said.get(about) != why:
            said[about] = why
            log.warning("no telemetry", extra={"of": about, "why": why})
