"""Reads the demand from every gateway every second: requests held, requests in flight, the age of the last one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
from pydantic import ValidationError

from busbar.kube.contracts.demand import PATH, WINDOWS_S, AccountUse, Demand, ServiceDemand
from busbar.kube.informer import Key
from busbar.kube.token_file import TokenFile
from busbar.operator.serving.demand_sum import FRESH_S, DemandSum
from busbar.operator.settings import Settings

log = logging.getLogger(__name__)
LIMIT_BYTES = 4 * 1024 * 1024


class DemandReader:
    """The last demand by service; ``of`` returns None once it is too old to act on."""

    def __init__(self, settings: Settings, changed: Callable[[Key], None]) -> None:
        self._settings, self._changed = settings, changed
        self._by_key: dict[Key, ServiceDemand] = {}
        self._accounts: dict[str, AccountUse] = {}
        self.clock: Callable[[], float] = time.monotonic
        """Seconds by which an answer grows old; another one in tests."""
        self._heard_at = float("-inf")
        self.reading = 0
        """Number of the gateway's last answer."""
        self.counted_s = 0.0
        """How long the gateway had counted then."""
        path = settings.gateway_token_file
        self._token = TokenFile(Path(path)) if path else None
        self._urls = [each.rstrip("/") + PATH for each in settings.gateway_url.split(",") if each.strip()]
        self._sum = DemandSum(self._urls, self.clock())
        self._failing: set[str] = set()

    def of(self, key: Key) -> ServiceDemand | None:
        """The demand for a service; zero where the gateway has seen none."""
        if self.clock() - self._heard_at > FRESH_S:
            return None
        return self._by_key.get(key) or ServiceDemand(namespace=key.namespace, name=key.name)

    def account(self, tenant: str) -> AccountUse | None:
        """What a tenant uses of its limits of inference; None where the gateway has not told lately."""
        return None if self.clock() - self._heard_at > FRESH_S else self._accounts.get(tenant)

    def take(self, demand: Demand) -> None:
        """Takes in one answer, and queues the services whose demand changed."""
        fresh = {Key(s.namespace, s.name): s for s in demand.services}
        blind = self.clock() - self._heard_at > FRESH_S
        self._accounts = {account.tenant: account for account in demand.accounts}
        old, self._by_key, self._heard_at = self._by_key, fresh, self.clock()
        self.reading, self.counted_s = self.reading + 1, demand.counted_seconds or 0.0
        for key in fresh.keys() | old.keys():
            found = fresh.get(key)
            if blind or _load(old.get(key)) != _load(found) or _waits(found) or _unanswered(found):
                self._changed(key)

    async def run(self) -> None:
        """Reads for ever; while no gateway answers, nothing changes."""
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            while True:
                await self._ask(session)
                await asyncio.sleep(self._settings.demand_period_s)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        """Ask all gateways at once, and take in the answers of those that gave one."""
        answers = await asyncio.gather(*(self._answer(session, url) for url in self._urls))
        total = answers[0] if len(answers) == 1 else self._summed(answers)
        if total is not None:
            self.take(total)

    def _summed(self, answers: Sequence[Demand | None]) -> Demand | None:
        """Not of one gateway: its sum would count for longer while it is silent."""
        for url, answer in zip(self._urls, answers, strict=True):
            if answer is not None:
                self._sum.take(url, answer, self.clock())
        return self._sum.sum(self.clock()) if any(answers) else None

    async def _answer(self, session: aiohttp.ClientSession, url: str) -> Demand | None:
        try:
            found = await self._read(session, url)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, ValidationError) as error:
            if url not in self._failing:
                log.warning("demand not read", extra={"url": url, "error": repr(error)})
            self._failing.add(url)
            return None
        self._failing.discard(url)
        return found

    async def _read(self, session: aiohttp.ClientSession, url: str) -> Demand:
        headers = self._token.header() if self._token is not None else {}
        async with session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"{url} answered {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_chunked(
                65536
            ):  # read(n) returns what has arrived so far
                body += chunk
                if len(body) > LIMIT_BYTES:
                    raise ValueError(f"{url} answered more than {LIMIT_BYTES} bytes")
        return Demand.model_validate_json(bytes(body))


def _load(demand: ServiceDemand | None) -> tuple[int, ...]:
    if demand is None:
        return (0, 0, 0, 0)
    window = demand.window(WINDOWS_S[0])
    return (demand.waiting, demand.in_flight, demand.arrivals, window.arrivals if window is not None else 0)


def _unanswered(demand: ServiceDemand | None) -> bool:
    """Whether replicas leave requests without an answer: these are asked with each answer of the gateway."""
    rows = (demand.replicas if demand is not None else None) or ()
    return any(row.failing_seconds is not None for row in rows)


def _waits(demand: ServiceDemand | None) -> bool:
    """Whether requests wait too long: that is looked at with each answer of the gateway."""
    return demand is not None and demand.overdue > 0
