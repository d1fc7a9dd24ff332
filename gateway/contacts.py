"""What this gateway has had from each replica: when it last answered, and the requests since then that it did not answer.

The operator reads it with the demand. A replica whose process or node is dead is known here as soon as a request goes there, or
at the latest when one has heard nothing for `probe_after_s`; the operator then asks the replica itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from busbar.gateway.watchdog import Watch
from busbar.kube.contracts.demand import ReplicaContact
from busbar.kube.contracts.routes import Endpoint

TOLD_S = 60.0
"""An answer, or a request without one, is told of for so long: what was not tried since may be well again, or dead."""


@dataclass(slots=True)
class _Contact:
    heard_at: float | None = None
    failed_at: float | None = None
    """When the last request got no answer."""
    failing_since: float | None = None
    failures: int = 0
    """Requests since then that got none."""

    def heard(self, at: float) -> None:
        self.heard_at, self.failing_since, self.failures = at, None, 0


@dataclass(slots=True)
class _Waits:
    """The requests that wait for one replica now."""

    heard_at: float | None = None
    silent_since: float | None = None
    silent: int = 0


class Contacts:
    """By the replicas' addresses. Lives on one event loop."""

    def __init__(
        self, watches: Callable[[], Iterable[Watch]], silent_s: float, clock: Callable[[], float]
    ) -> None:
        """
        Args:
            watches: all requests that wait.
            silent_s: one that has heard nothing for so long counts as not answered, unless the replica's health check answers.
        """
        self._watches, self._silent_s, self._clock = watches, silent_s, clock
        self._by_url: dict[str, _Contact] = {}

    def heard(self, url: str) -> None:
        """It answered, whatever it said."""
        self._by_url.setdefault(url, _Contact()).heard(self._clock())

    def failed(self, url: str) -> None:
        """A request got no answer there, or one that broke off."""
        contact, now = self._by_url.setdefault(url, _Contact()), self._clock()
        contact.failed_at = now
        contact.failing_since = now if contact.failing_since is None else contact.failing_since
        contact.failures += 1

    def keep(self, urls: Collection[str]) -> None:
        """Forgets all other replicas."""
        self._by_url = {url: contact for url, contact in self._by_url.items() if url in urls}

    def of(self, endpoints: Sequence[Endpoint]) -> list[ReplicaContact]:
        """Of those replicas that requests were sent to lately."""
        now, waits = self._clock(), self._waits()
        found = (self._row(endpoint, waits.get(endpoint.url), now) for endpoint in endpoints)
        return [row for row in found if row is not None]

    def _row(self, endpoint: Endpoint, waits: _Waits | None, now: float) -> ReplicaContact | None:
        contact = self._by_url.get(endpoint.url) or _Contact()
        if waits is not None and waits.heard_at is not None and waits.heard_at > (contact.heard_at or 0.0):
            contact.heard_at = waits.heard_at
            if contact.failed_at is not None and waits.heard_at > contact.failed_at:
                contact.heard(waits.heard_at)
        if contact.failed_at is not None and now - contact.failed_at > TOLD_S:
            contact.failing_since, contact.failures = None, 0
        heard_at, since, failures = contact.heard_at, contact.failing_since, contact.failures
        if waits is not None and waits.silent_since is not None and waits.silent_since >= (heard_at or 0.0):
            since = waits.silent_since if since is None else min(since, waits.silent_since)
            failures += waits.silent
        if since is None and (heard_at is None or now - heard_at > TOLD_S):
            return None
        return ReplicaContact(
            pod=endpoint.pod,
            url=endpoint.url,
            failures=failures,
            failing_seconds=None if since is None else round(max(0.0, now - since), 3),
            heard_seconds=None if heard_at is None else round(max(0.0, now - heard_at), 3),
        )

    def _waits(self) -> dict[str, _Waits]:
        found: dict[str, _Waits] = {}
        now = self._clock()
        for watch in self._watches():
            if not watch.url:
                continue
            waits = found.setdefault(watch.url, _Waits())
            if watch.heard_at is not None:
                waits.heard_at = max(waits.heard_at or 0.0, watch.heard_at)
            if watch.since is not None and now - watch.since >= self._silent_s:
                waits.silent_since = min(watch.since, waits.silent_since or watch.since)
                waits.silent += 1
        return found
