"""The energy ledger: once a second, who has used the joules since the last time.

    readings ─► metering (joules of each meter) ─► shares (joules of each owner) ─► metrics, and accounts by object:
    TrainingJob, ModelService, Tenant and PowerDomain, whose reconciles write the totals

Everything that was drawn is booked exactly once to a tenant or to nobody, and once to each feed above the node. A new
operator goes on from the last checkpoint (`checkpoint.py`): at a node's first reading it books what the meters have
counted since, to the pods that held the boards in that time as far as it can know (`Holders.over`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool, ModelService, TrainingJob
from busbar.kube.types.power_domain import PowerDomainStatus
from busbar.kube.types.service_status import ModelServiceStatus
from busbar.kube.types.tenant import TenantStatus
from busbar.kube.types.training_status import TERMINAL_PHASES, TrainingJobStatus
from busbar.operator.energy.accounts import Accounts
from busbar.operator.energy.checkpoint import Checkpoint, cut_of, metering_of
from busbar.operator.energy.holders import Holders
from busbar.operator.energy.metering import FILL_S, Metering, Step, rebased, step
from busbar.operator.energy.shares import NOT_KNOWN, Charge, HeldBoard, Holder, nobodys, shared
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.energy import FeedEnergy
from busbar.operator.power.membership import Membership
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.readings import Reading
from busbar.operator.steady_clock import CLOCK
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.projections import Node

K = TypeVar("K", bound=Hashable)
MEAN_S = 60.0
FADED_W = 0.01
KEEP_EVERY_S = 60.0
"""Accounts of objects that are gone are looked for so often."""
UNASSIGNED = "/unassigned"
"""After a domain's uid: the account of what nobody holds there."""


class Ledger:
    """See the module's head. `fresh_s`: a node that has not reported for longer is silent."""

    def __init__(
        self, caches: Caches, metrics: PowerMetrics, fresh_s: float, wall_s: Callable[[], float] = CLOCK.now_s
    ) -> None:
        self._caches, self._metrics, self._fresh_s, self._wall_s = caches, metrics, fresh_s, wall_s
        self._nodes: dict[str, Metering] = {}
        self._resumed: set[str] = set()
        """Nodes of the checkpoint that have not been heard since."""
        self._holders = Holders()
        self._kept_s = self._ticked_s = 0.0
        self._watts: dict[str, float] = {}
        self._service_watts: dict[tuple[str, str], float] = {}
        """By a service's uid and a pool."""
        self.accounts = Accounts()

    def tick(
        self, readings: Mapping[str, Reading], found: Membership, now_s: float, boards: Mapping[str, Boards]
    ) -> None:
        """Books what was drawn since the last time, as `EnergyBook.tick` says."""
        caches = self._caches
        self._resumed = {name for name in self._resumed if Key("", name) in caches.nodes.items}
        self._nodes = {
            name: last for name, last in self._nodes.items() if name in readings or name in self._resumed
        }
        nodes = {key.name: node for key, node in caches.nodes.items.items() if key.name in readings}
        pools = tuple(caches.pools.items.values())
        tenant_of = caches.tenant_of
        self._catch_up(readings, nodes, pools, found, now_s)
        holders = self._holders.of(nodes, caches.pods.items.values(), pools, tenant_of) if nodes else {}
        passed_s, self._ticked_s = now_s - self._ticked_s, now_s
        every: list[Charge] = []
        services: defaultdict[tuple[str, str], float] = defaultdict(float)
        for name, reading in readings.items():
            looked = step(self._nodes.get(name), reading, now_s, self._fresh_s)
            self._nodes[name] = looked.metering
            if looked.drawn or looked.late:
                pool = self._holders.pool(nodes[name]) if name in nodes else None
                known = NOT_KNOWN
                if pool is not None and name in boards and now_s - reading.at_s <= self._fresh_s:
                    known = self._holders.on_boards(nodes[name], boards[name], caches.pods.items, tenant_of)
                charges = _charges(looked, reading, holders.get(name, ()), known)
                every += charges
                self._book_feeds(charges, feeds_above(found, name))
                for charge in charges:
                    if pool is not None and charge.owner.kind == "service":
                        services[charge.owner.uid, pool.metadata.name] += charge.joules
        self._watts = smoothed(self._watts, self._book(every, tenant_of), passed_s)
        self._service_watts = smoothed(self._service_watts, services, passed_s)
        if now_s - self._kept_s >= KEEP_EVERY_S:
            self._kept_s = now_s
            self.accounts.keep(frozenset(self._uids()))

    def resume(self, checkpoint: Checkpoint, now_s: float) -> None:
        """Goes on from a checkpoint; to be called once, before the first `tick`, with its clock.

        Of a checkpoint that is older than `FILL_S` only totals count that no status has yet: who held which boards since
        then is not known.
        """
        away_s = max(0.0, self._wall_s() - checkpoint.at_s)
        if away_s > FILL_S:
            for uid, told in self._told():
                if (total := checkpoint.totals.get(uid, 0.0)) > (told or 0.0):
                    self.accounts.resume(uid, total)
            return
        # What is told by a status alone was told after the checkpoint.
        for uid in (*checkpoint.totals, *(uid for uid, told in self._told() if told)):
            self.accounts.resume(uid, checkpoint.totals.get(uid, 0.0))
        for name, cut in checkpoint.nodes.items():
            self._nodes[name] = metering_of(name, cut, now_s - away_s)
        self._resumed = set(checkpoint.nodes)

    def checkpoint(self, now_s: float) -> Checkpoint:
        """Of this moment: all accounts that can be counted on, and how far each node is counted."""
        totals = {uid: self.accounts.peek(uid, told) for uid, told in self._told()}
        return Checkpoint(
            at_s=round(self._wall_s(), 3),
            totals={uid: total for uid, total in totals.items() if total},
            nodes={name: cut_of(metering, now_s) for name, metering in self._nodes.items()},
        )

    def watts(self, tenant: str) -> float:
        """What the tenant's pods draw now: the mean of about a minute."""
        return self._watts.get(tenant, 0.0)

    def service_watts(self, uid: str) -> dict[str, float]:
        """The same of a service's replicas, by pool."""
        return {pool: watts for (of, pool), watts in self._service_watts.items() if of == uid}

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

    def _catch_up(
        self,
        readings: Mapping[str, Reading],
        nodes: Mapping[str, Node],
        pools: tuple[AcceleratorPool, ...],
        found: Membership,
        now_s: float,
    ) -> None:
        """Books what nodes have drawn since the checkpoint, at their first readings.

        The metric does not count it: the process before this one has shown a part of it.
        """
        heard = self._resumed & readings.keys() & nodes.keys()
        if not heard:
            return
        self._resumed -= heard
        steps = {}
        times = {}
        wall_s = self._wall_s() - now_s
        for name in heard:
            last = rebased(self._nodes[name], readings[name])
            steps[name] = looked = step(last, readings[name], now_s, self._fresh_s)
            self._nodes[name] = looked.metering
            times[name] = nodes[name], wall_s + last.until_s, wall_s + readings[name].at_s
        holders = self._holders.over(times, self._caches.pods.items.values(), pools, self._caches.tenant_of)
        for name, looked in steps.items():
            charges = _charges(looked, readings[name], holders.get(name, ()))
            self._book(charges, self._caches.tenant_of, again=True)
            self._book_feeds(charges, feeds_above(found, name), again=True)

    def _book(
        self, charges: Sequence[Charge], tenant_of: Mapping[str, str], *, again: bool = False
    ) -> dict[str, float]:
        """Books the charges to objects and tenants; returns the joules by tenant.

        A pod's owner reference counts only for an object of the pod's own tenant.

        Args:
            again: what another process may have booked, and written, already.
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
                self._credit(owner.uid, charge.joules, again)
        for labels, joules in () if again else shown.items():
            self._metrics.energy.labels(*labels).inc(joules)
        for name, joules in tenants.items():
            tenant = self._caches.tenants.items.get(Key("", name))
            if tenant is not None:
                self._credit(tenant.metadata.uid, joules, again)
        return tenants

    def _book_feeds(self, charges: Sequence[Charge], feeds: Iterable[str], *, again: bool = False) -> None:
        joules = sum(charge.joules for charge in charges)
        unassigned = sum(charge.joules for charge in charges if not charge.owner.tenant)
        for feed in feeds:
            domain = self._caches.power_domains.items.get(Key("", feed))
            if domain is not None:
                self._credit(domain.metadata.uid, joules, again)
                self._credit(domain.metadata.uid + UNASSIGNED, unassigned, again)

    def _credit(self, uid: str, joules: float, again: bool) -> None:
        if again and not self.accounts.knows(uid):
            self.accounts.resume(uid, 0.0)  # nothing was counted for it by the checkpoint
        self.accounts.book(uid, joules)

    def _told(self) -> Iterator[tuple[str, float | None]]:
        """All accounts that may be booked to, with the totals in the statuses; jobs that have ended are not."""
        caches = self._caches
        for job in caches.jobs.items.values():
            if job.status is None or job.status.phase not in TERMINAL_PHASES:
                yield job.metadata.uid, _joules(job.status)
        for service in caches.services.items.values():
            yield service.metadata.uid, _joules(service.status)
        for tenant in caches.tenants.items.values():
            yield tenant.metadata.uid, _joules(tenant.status)
        for domain in caches.power_domains.items.values():
            told = domain.status
            yield domain.metadata.uid, told.energy_joules if told is not None else None
            yield domain.metadata.uid + UNASSIGNED, told.unassigned_joules if told is not None else None

    def _uids(self) -> Iterable[str]:
        caches = self._caches
        yield from (obj.metadata.uid for obj in caches.jobs.items.values())
        yield from (obj.metadata.uid for obj in caches.services.items.values())
        yield from (obj.metadata.uid for obj in caches.tenants.items.values())
        for domain in caches.power_domains.items.values():
            yield from (domain.metadata.uid, domain.metadata.uid + UNASSIGNED)


def _joules(status: TrainingJobStatus | ModelServiceStatus | TenantStatus | None) -> float | None:
    usage = status.usage if status is not None else None
    return usage.energy_joules if usage is not None else None


def _charges(
    looked: Step,
    reading: Reading,
    holders: Sequence[Holder],
    known: Mapping[str, HeldBoard] = NOT_KNOWN,
) -> list[Charge]:
    charges = shared(looked.drawn, holders, reading.boards_from, reading.host_from, known)
    return charges + nobodys(looked.late, reading.boards_from)


def smoothed(watts: Mapping[K, float], drawn: Mapping[K, float], passed_s: float) -> dict[K, float]:
    """The means after so many joules more; those that have faded away are left out."""
    if passed_s <= 0:
        return dict(watts)
    part = 1 - math.exp(-passed_s / MEAN_S)
    means = {
        of: watts.get(of, 0.0) + part * (drawn.get(of, 0.0) / passed_s - watts.get(of, 0.0))
        for of in {*watts, *drawn}
    }
    return {of: mean for of, mean in means.items() if mean > FADED_W}


def feeds_above(found: Membership, node: str) -> list[str]:
    """The domains in which a node counts, each once."""
    feeds: list[str] = []
    for feed in found.feeds.get(node, ()):
        feeds += [each for each in (feed, *found.above[feed]) if each not in feeds]
    return feeds
