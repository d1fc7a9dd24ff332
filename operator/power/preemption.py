"""Stops work where the lowest limits of all boards are above a domain's budget, and remembers what was stopped.

    tick ──► leasts (what nodes draw at least) ──► relieve (what must stop) ──► Release, as for any preemption

Limits come first: nothing is stopped before a domain has lacked watts, those of work that is leaving left out, for as
long as a lease lives and telemetry stays fresh. What was stopped is known only to this process; after a restart the
scheduler's own count of watts holds it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from busbar.kube.informer import Key
from busbar.kube.resources import MODEL_SERVICES, POWER_DOMAINS, TRAINING_JOBS
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_status import TERMINAL_PHASES
from busbar.operator.decisions import Release
from busbar.operator.power.leasts import Objects, leasts, places, tree_of, works
from busbar.operator.power.membership import Membership
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.readings import Reading
from busbar.operator.queue.controller import Controller, Item
from busbar.operator.settings import Settings
from busbar.operator.steady_clock import utc_now
from busbar.operator.watch.caches import Caches, tenant_of_namespace
from busbar.operator.write.writer import Writer
from busbar.scheduler.power import Relief, Stop, Work, relieve

CYCLES_S = 2.0
"""Two rounds of leases: one that sees the lack, one that has lowered."""


def patience_s(settings: Settings) -> float:
    """For how long a domain lacks watts before work is stopped: by then every lease that was lowered or not renewed has
    ended, and what was silent counts as silent."""
    return settings.power_lease_s + settings.power_fresh_s + CYCLES_S


@dataclass(frozen=True, slots=True)
class FeedRelief:
    """What is known of one domain whose budget may stop work."""

    usable_w: float
    lacks_w: float
    """For what runs, with all boards at their lowest limits; not above 0: so much is left."""
    remains_w: float = 0.0
    """What it will lack when all that may be stopped has gone."""
    leaving: int = 0
    """Jobs and replicas on it that are being stopped."""
    stopped_w: float | None = None
    """What the least of what was stopped here needs; None: nothing waits."""

    @property
    def short_w(self) -> float | None:
        """What it lacks for what runs, or for the least of what was stopped; None: nothing is lacking."""
        if self.lacks_w > 0:
            return self.lacks_w
        if self.stopped_w is None or self.stopped_w + self.lacks_w <= 0:
            return None
        return self.stopped_w + self.lacks_w


@dataclass(slots=True)
class Stopped:
    """Work that was told to stop."""

    stop: Stop
    item: Item
    index: int
    went: bool = False
    """It was seen to leave."""


class Preemptions:
    """Of all domains."""

    def __init__(
        self,
        caches: Caches,
        writer: Writer,
        controller: Controller,
        settings: Settings,
        metrics: PowerMetrics,
        left_s: Callable[[], float],
    ) -> None:
        self.feeds: Mapping[str, FeedRelief] = {}
        """Of the domains whose budget may stop work, as of the last look."""
        self._caches, self._writer, self._controller = caches, writer, controller
        self._settings, self._metrics, self._left_s = settings, metrics, left_s
        self._since: dict[str, float] = {}  # by domain: since when it lacks watts
        self._stopped: dict[str, Stopped] = {}  # by work
        self._stopping: asyncio.Task[None] | None = None

    def look(
        self,
        found: Membership,
        readings: Mapping[str, Reading],
        silent_w: Mapping[str, float],
        now_s: float,
    ) -> None:
        """Takes stock, and begins to stop what is due."""
        if not found.preempting:
            self.feeds, self._since, self._stopped = {}, {}, {}
            return
        caches = self._caches
        at = places(found, caches.nodes.items.values(), tuple(caches.pools.items.values()))
        pods = caches.pods.items.values()
        since_s = now_s - self._settings.power_fresh_s
        nodes = leasts(found, at, readings, pods, silent_w, since_s)
        tree = tree_of(found)
        seen: Mapping[str, tuple[Work, Key, int]] = {}
        relief = relieve(tree, nodes, (), found.preempting)
        if self._stopped or any(watts > 0 for watts in relief.lacks_w.values()):  # else nobody need be asked
            seen = works(at, nodes, self._objects(), utc_now())
            relief = relieve(tree, nodes, (work for work, _, _ in seen.values()), found.preempting)
        every = [work for work, _, _ in seen.values()]
        self._follow(found, relief, seen, now_s)
        self.feeds = {
            name: FeedRelief(
                found.domains[name].usable_w,
                relief.lacks_w[name],
                relief.remains_w[name],
                self._leaving(name, found, every),
                min((each.stop.watts for each in self._stopped.values() if each.stop.domain == name), default=None),
            )
            for name in sorted(found.preempting)
        }  # fmt: skip
        wait_s = patience_s(self._settings)
        due = {name for name, since_s in self._since.items() if now_s - since_s >= wait_s}
        if due and self._left_s() > 0 and (self._stopping is None or self._stopping.done()):
            stops = relieve(tree, nodes, every, due).stops
            if stops:
                orders = [self._order(stop, seen) for stop in stops]
                self._stopping = asyncio.get_running_loop().create_task(self._stop(orders))

    async def close(self) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
            await asyncio.gather(self._stopping, return_exceptions=True)

    def _objects(self) -> Objects:
        caches = self._caches
        tenants = caches.tenants.items
        ceilings = {
            namespace: tenants[Key("", name)].spec.priority_ceiling
            for namespace, name in tenant_of_namespace(tenants.values()).items()
        }
        return Objects(tuple(caches.pods.items.values()), caches.jobs.items, caches.services.items, ceilings)

    def _follow(
        self,
        found: Membership,
        relief: Relief,
        seen: Mapping[str, tuple[Work, Key, int]],
        now_s: float,
    ) -> None:
        """Since when domains lack watts, and what of the stopped work has gone or runs again."""
        lacking = [name for name, watts in relief.unmet_w.items() if watts > 0]
        self._since = {name: self._since.get(name, now_s) for name in lacking}
        chosen = {stop.work for stop in relief.stops}
        for name, each in list(self._stopped.items()):
            here = seen.get(name)
            leaves = here is None or here[0].going
            if leaves and not each.went:
                each.went = True
                self._tell(each)
            if (
                each.stop.domain not in found.preempting
                or not self._waits(each)
                or (not leaves and (each.went or name not in chosen))
            ):
                del self._stopped[name]

    def _tell(self, each: Stopped) -> None:
        domain = self._caches.power_domains.items.get(Key("", each.stop.domain))
        self._metrics.preemptions.labels(each.stop.domain).inc()
        if domain is not None:
            what = "A job or a replica of a service is stopped: the lowest limits of all boards are above the budget."
            self._writer.notice(POWER_DOMAINS, domain, Reason.WORK_STOPPED, what)

    def _waits(self, each: Stopped) -> bool:
        """Whether the work, once it has gone, will want to run again."""
        key = each.item.key
        if each.item.kind == TRAINING_JOBS.kind:
            job = self._caches.jobs.items.get(key)
            status = job.status if job is not None else None
            if job is None or job.spec.suspend or (status is not None and status.phase in TERMINAL_PHASES):
                return False
            has_place = status is not None and status.admission is not None and status.release is None
            return not (each.went and has_place)
        service = self._caches.services.items.get(key)
        if service is None:
            return False
        desired = (service.status.desired_replicas if service.status is not None else None) or 0
        alive = [
            pod
            for pod in self._caches.pods.items.values()
            if pod.owner_uid == service.metadata.uid and not (pod.leaving or pod.parked)
        ]
        return not each.went or len(alive) < desired

    def _leaving(self, domain: str, found: Membership, every: Iterable[Work]) -> int:
        members = set(found.members[domain])
        return sum(work.going and not members.isdisjoint(work.boards) for work in every)

    def _order(self, stop: Stop, seen: Mapping[str, tuple[Work, Key, int]]) -> tuple[Item, Release]:
        """The same decision with which a plan preempts."""
        work, key, index = seen[stop.work]
        is_job = "/" not in work.id
        cache = self._caches.jobs if is_job else self._caches.services
        item = Item(TRAINING_JOBS.kind if is_job else MODEL_SERVICES.kind, key)
        if stop.work not in self._stopped:
            self._stopped[stop.work] = Stopped(stop, item, index)
        lacks_w = self.feeds[stop.domain].lacks_w
        text = (
            f"The power domain {stop.domain} lacks {lacks_w:,.0f} W for what runs on it, with all boards at their lowest "
            f"limits. This needs {stop.watts:,.0f} W of them, and goes on when they are there."
        )
        version = cache.items[key].metadata.resource_version or ""
        return item, Release(Reason.INSUFFICIENT_POWER, text, version, index)

    async def _stop(self, orders: Iterable[tuple[Item, Release]]) -> None:
        by_item: dict[Item, list[Release]] = {}
        for item, release in orders:
            by_item.setdefault(item, []).append(release)
        await asyncio.gather(
            *(self._controller.process(item, tuple(releases)) for item, releases in by_item.items())
        )
