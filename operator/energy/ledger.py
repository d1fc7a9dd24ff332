"""The energy ledger: once a second, who has used the joules since the last time.

    readings ─► metering (joules of each meter) ─► shares (joules of each owner) ─► metrics, and accounts by object:
    TrainingJob, ModelService, Tenant and PowerDomain, whose reconciles write the totals

Everything that was drawn is booked exactly once to a tenant or to nobody, and once to each feed above the node. What
the operator could not see is not booked: the time in which it was away, and what was counted and not yet written to a
status when it was killed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from busbar.kube.informer import Key
from busbar.kube.types import ModelService, TrainingJob
from busbar.kube.types.power_domain import PowerDomainStatus
from busbar.operator.energy.accounts import Accounts
from busbar.operator.energy.holders import Holders
from busbar.operator.energy.metering import Metering, step
from busbar.operator.energy.shares import Charge, nobodys, shared
from busbar.operator.power.energy import FeedEnergy
from busbar.operator.power.membership import Membership
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.readings import Reading
from busbar.operator.watch.caches import Caches

MEAN_S = 60.0
FADED_W = 0.01
KEEP_EVERY_S = 60.0
"""Accounts of objects that are gone are looked for so often."""
UNASSIGNED = "/unassigned"
"""After a domain's uid: the account of what nobody holds there."""


class Ledger:
    """See the module's head. `fresh_s`: a node that has not reported for longer is silent."""

    def __init__(self, caches: Caches, metrics: PowerMetrics, fresh_s: float) -> None:
        self._caches, self._metrics, self._fresh_s = caches, metrics, fresh_s
        self._nodes: dict[str, Metering] = {}
        self._holders = Holders()
        self._kept_s = self._ticked_s = 0.0
        self._watts: dict[str, float] = {}
        self.accounts = Accounts()

    def tick(self, readings: Mapping[str, Reading], found: Membership, now_s: float) -> None:
        """Books what was drawn since the last time; `now_s` is the clock of `Reading.at_s`."""
        self._nodes = {name: last for name, last in self._nodes.items() if name in readings}
        caches = self._caches
        nodes = {key.name: node for key, node in caches.nodes.items.items() if key.name in readings}
        pools = tuple(caches.pools.items.values())
        tenant_of = caches.tenant_of
        holders = self._holders.of(nodes, caches.pods.items.values(), pools, tenant_of) if nodes else {}
        passed_s, self._ticked_s = now_s - self._ticked_s, now_s
        every: list[Charge] = []
        for name, reading in readings.items():
            looked = step(self._nodes.get(name), reading, now_s, self._fresh_s)
            self._nodes[name] = looked.metering
            if looked.drawn or looked.late:
                sources = reading.boards_from, reading.host_from
                charges = shared(looked.drawn, holders.get(name, ()), *sources)
                charges += nobodys(looked.late, reading.boards_from)
                every += charges
                self._book_feeds(charges, feeds_above(found, name))
        self._watts = smoothed(self._watts, self._book(every, tenant_of), passed_s)
        if now_s - self._kept_s >= KEEP_EVERY_S:
            self._kept_s = now_s
            self.accounts.keep(frozenset(self._uids()))

    def watts(self, tenant: str) -> float:
        """What the tenant's pods draw now: the mean of about a minute."""
        return self._watts.get(tenant, 0.0)

    def feed(self, uid: str, told: PowerDomainStatus | None) -> FeedEnergy | None:
        """The totals of a PowerDomain with this status; None: nothing was ever measured there."""
        joules = self.accounts.total(uid, told.energy_joules if told is not None else None)
        unassigned = self.accounts.total(
            uid + UNASSIGNED, told.unassigned_joules if told is not None else None
        )
        return FeedEnergy(joules, unassigned or 0.0) if joules is not None else None

    def feed_sent(self, uid: str, status: PowerDomainStatus) -> None:
        """To be told before a status is sent."""
        self.accounts.sent(uid, status.energy_joules)
        self.accounts.sent(uid + UNASSIGNED, status.unassigned_joules)

    def _book(self, charges: Sequence[Charge], tenant_of: Mapping[str, str]) -> dict[str, float]:
        """Books the charges to objects and tenants; returns the joules by tenant.

        A pod's owner reference counts only for an object of the pod's own tenant.
        """
        caches = self._caches
        objects: list[TrainingJob | ModelService] = [
            *caches.jobs.items.values(),
            *caches.services.items.values(),
        ]
        tenants_of = {
            obj.metadata.uid: tenant_of.get(obj.metadata.namespace or "")
            for obj in (objects if charges else ())
        }
        shown: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        tenants: defaultdict[str, float] = defaultdict(float)
        for charge in charges:
            owner = charge.owner
            shown[owner.tenant, owner.kind, charge.source] += charge.joules
            tenants[owner.tenant] += charge.joules
            if owner.uid and tenants_of.get(owner.uid) == owner.tenant:
                self.accounts.book(owner.uid, charge.joules)
        for labels, joules in shown.items():
            self._metrics.energy.labels(*labels).inc(joules)
        for name, joules in tenants.items():
            tenant = self._caches.tenants.items.get(Key("", name))
            if tenant is not None:
                self.accounts.book(tenant.metadata.uid, joules)
        return tenants

    def _book_feeds(self, charges: Sequence[Charge], feeds: Iterable[str]) -> None:
        joules = sum(charge.joules for charge in charges)
        unassigned = sum(charge.joules for charge in charges if not charge.owner.tenant)
        for feed in feeds:
            domain = self._caches.power_domains.items.get(Key("", feed))
            if domain is not None:
                self.accounts.book(domain.metadata.uid, joules)
                self.accounts.book(domain.metadata.uid + UNASSIGNED, unassigned)

    def _uids(self) -> Iterable[str]:
        caches = self._caches
        yield from (obj.metadata.uid for obj in caches.jobs.items.values())
        yield from (obj.metadata.uid for obj in caches.services.items.values())
        yield from (obj.metadata.uid for obj in caches.tenants.items.values())
        for domain in caches.power_domains.items.values():
            yield from (domain.metadata.uid, domain.metadata.uid + UNASSIGNED)


def smoothed(watts: Mapping[str, float], drawn: Mapping[str, float], passed_s: float) -> dict[str, float]:
    """The means after so many joules more; those that have faded away are left out."""
    if passed_s <= 0:
        return dict(watts)
    part = 1 - math.exp(-passed_s / MEAN_S)
    means = {
        tenant: watts.get(tenant, 0.0) + part * (drawn.get(tenant, 0.0) / passed_s - watts.get(tenant, 0.0))
        for tenant in {*watts, *drawn}
    }
    return {tenant: mean for tenant, mean in means.items() if mean > FADED_W}


def feeds_above(found: Membership, node: str) -> list[str]:
    """The domains in which a node counts, each once."""
    feeds: list[str] = []
    for feed in found.feeds.get(node, ()):
        feeds += [each for each in (feed, *found.above[feed]) if each not in feeds]
    return feeds
