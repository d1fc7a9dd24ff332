"""What this gateway has had from each replica (`scheduler/autoscale/contacts.py` counts): the operator reads it with the demand.

A replica whose process or node is dead is known here as soon as a request goes there, or at the latest when one has heard nothing
for `probe_after_s`; the operator then asks the replica itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from busbar.gateway.watchdog import Watch
from busbar.kube.contracts.demand import ReplicaContact
from busbar.kube.contracts.routes import Endpoint
from busbar.scheduler.autoscale.contacts import Contact, Waits


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
        self._by_url: dict[str, Contact] = {}

    def heard(self, url: str) -> None:
        """It answered, whatever it said."""
        self._by_url.setdefault(url, Contact()).heard(self._clock())

    def failed(self, url: str) -> None:
        """A request got no answer there, or one that broke off."""
        self._by_url.setdefault(url, Contact()).failed(self._clock())

    def keep(self, urls: Collection[str]) -> None:
        """Forgets all other replicas."""
        self._by_url = {url: contact for url, contact in self._by_url.items() if url in urls}

    def of(self, endpoints: Sequence[Endpoint]) -> list[ReplicaContact]:
        """Of those replicas that requests were sent to lately."""
        now, waiting = self._clock(), self._waiting()
        rows: list[ReplicaContact] = []
        for endpoint in endpoints:
            waits = Waits.of(waiting.get(endpoint.url, ()), now, self._silent_s)
            said = (self._by_url.get(endpoint.url) or Contact()).said(waits, now)
            if said is not None:
                rows.append(
                    ReplicaContact(
                        pod=endpoint.pod,
                        url=endpoint.url,
                        failures=said.failures,
                        failing_seconds=said.failing_seconds,
                        heard_seconds=said.heard_seconds,
                    )
                )
        return rows

    def _waiting(self) -> dict[str, list[tuple[float | None, float | None]]]:
        """By address: when each request has last heard something, and since when it waits for the replica."""
        found: dict[str, list[tuple[float | None, float | None]]] = {}
        for watch in self._watches():
            if watch.url:
                found.setdefault(watch.url, []).append((watch.heard_at, watch.since))
        return found
