"""Keeps the power domains: once a second who hangs where, what is drawn and who may draw what; now and then a status.

Leases are sent by `lessor.py`, and only while this operator leads. A status is written when a condition changes, at most every two seconds, and otherwise
once in `power_status_s`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from busbar.kube.contracts.power_view import PowerPicture, PowerSeries, Resolution
from busbar.kube.contracts.workload import ServingStatus, TrainingStatus
from busbar.kube.errors import ApiError, ConnectionFailed
from busbar.kube.informer import Key
from busbar.kube.resources import POWER_DOMAINS
from busbar.kube.types import PowerDomain
from busbar.kube.types.power_domain import PowerDomainStatus
from busbar.kube.types.reasons import ConditionType
from busbar.operator.decisions import Decision
from busbar.operator.errors import Fenced, LaneFull
from busbar.operator.pods.engine_image import EngineImage
from busbar.operator.power.board_holders import BoardHolders, Boards
from busbar.operator.power.board_limits import HeldPods
from busbar.operator.power.draw import Draw, Overrun, draw_of, watched
from busbar.operator.power.energy import EnergyBook
from busbar.operator.power.gatherer import Gatherer, Source, sources
from busbar.operator.power.lessor import Lessor
from busbar.operator.power.limited_replicas import LimitedReplicas
from busbar.operator.power.limited_runs import limited_runs, with_curves
from busbar.operator.power.membership import Membership, membership
from busbar.operator.power.meters import Metered
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.own_replicas import OwnReplicas
from busbar.operator.power.preemption import Preemptions
from busbar.operator.power.prompt_shares import PromptShares
from busbar.operator.power.reconcile import Seen, reconcile
from busbar.operator.power.replica_draws import replica_draws
from busbar.operator.power.rings import Series
from busbar.operator.power.taints import taints
from busbar.operator.power.telling import TellingNodes
from busbar.operator.power.view import picture, series_of
from busbar.operator.power.work import NodeWork, node_work
from busbar.operator.profiles.paces import LimitCurves
from busbar.operator.profiles.phase_draws import PhaseDraws
from busbar.operator.profiles.speeds import run_of
from busbar.operator.queue.controller import Controller
from busbar.operator.settings import Settings
from busbar.operator.steady_clock import utc_now
from busbar.operator.watch.caches import Caches, tenant_of_namespace
from busbar.operator.watch.projections import Node
from busbar.operator.write.actions import TaintNode
from busbar.operator.write.writer import Writer

log = logging.getLogger(__name__)

TICK_S = 1.0
LONGEST_TICK_S = 3.0
"""An operator that was stopped for longer knows nothing of the time between."""
TAINTS = 50
"""Nodes whose taints are written at a time."""
TAINTS_AGAIN_S = 10.0
"""After a refusal."""
CHANGE_S = 2.0
"""Between two writes of one status, whatever changes."""


@dataclass
class Feed:
    """What is kept of one domain between two ticks."""

    draw: Draw | None = None
    overrun: Overrun | None = None
    series: Series = field(default_factory=Series)
    leased: Series = field(default_factory=Series)
    forecast: Series = field(default_factory=Series)
    written_s: float = -math.inf


class PowerKeeper:
    """Registers itself with the controller; `run` ticks."""

    def __init__(
        self,
        caches: Caches,
        writer: Writer,
        controller: Controller,
        settings: Settings,
        metrics: PowerMetrics,
        energy: EnergyBook | None = None,
        clock: Callable[[], float] = time.monotonic,
        prices: Callable[[], Mapping[str, float]] = dict,
        replicas: Mapping[str, ServingStatus] = MappingProxyType({}),
        trainers: Mapping[str, TrainingStatus] = MappingProxyType({}),
        curves: LimitCurves | None = None,
        engine: EngineImage | None = None,
        draws: PhaseDraws | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            prices: of a watt-hour by domain, in work, as of the last plan.
            replicas: what serving pods said last, by uid; its content changes.
            trainers: the same of training pods.
            curves: what limits cost; learns from the jobs and replicas here.
            engine: the platform's own image, whose replicas teach; None: none does.
            draws: what boards of replicas draw by phase; learns here too.
            wake: called where more or fewer nodes may be shared under power caps.
        """
        self._replicas, self._prompt_shares = replicas, PromptShares()
        self._trainers, self.curves = trainers, curves or LimitCurves()
        self.held = HeldPods()
        self._holders = BoardHolders()
        self.boards: Mapping[str, Boards] = {}
        """Who holds them, by node of which it is known; as of the last tick."""
        self._telling, self._wake = TellingNodes(), wake
        self._own_replicas, self.draws = OwnReplicas(engine or EngineImage("")), draws or PhaseDraws()
        self._limited_replicas = LimitedReplicas(self._own_replicas, lambda: caches.profiles.items.values())
        self._prices = prices
        self.meters: Mapping[str, Metered] = {}
        """What the feeds' own meters say (`meters.py`), by domain."""
        self._caches, self._writer, self._controller = caches, writer, controller
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._membership: Membership | None = None
        self._energy = energy
        self.gatherer = Gatherer(settings, clock)
        self.lessor = Lessor(settings, metrics, clock)
        self.preemptions = Preemptions(
            caches, writer, controller, settings, metrics, lambda: self.lessor.left_s()
        )
        self._tainting: asyncio.Task[None] | None = None
        self._taints_at_s = 0.0
        self.feeds: dict[str, Feed] = {}
        self._began_s = self._ticked_s = math.inf
        controller.handles(POWER_DOMAINS.kind, self.handle)

    @property
    def membership(self) -> Membership:
        """Of this moment."""
        if self._membership is None:
            caches = self._caches
            self._membership = membership(caches.power_domains.items.values(), caches.nodes.items.values())
        return self._membership

    def node_changed(self, old: Node | None, new: Node | None) -> None:
        """To be told of every change of a node; only its name and labels count."""
        if old is None or new is None or old.labels != new.labels:
            self._changed()

    def domain_changed(self, old: PowerDomain | None, new: PowerDomain | None) -> None:
        """To be told of every change of a domain; one can take another's nodes, or be its parent."""
        if old is None or new is None or old.spec != new.spec:
            self._changed()

    async def run(self) -> None:
        """Ticks until cancelled."""
        try:
            while True:
                found = self.tick()
                await self.lessor.round(self.membership, self.gatherer.readings, found, self.works())
                await asyncio.sleep(TICK_S - self._clock() % TICK_S)
        finally:
            await self.gatherer.close()
            await self.lessor.close()
            await self.preemptions.close()
            if self._tainting is not None:
                self._tainting.cancel()
                await asyncio.gather(self._tainting, return_exceptions=True)

    def tick(self) -> list[Source]:
        """Asks the agents, and takes stock of what they have said so far; gives the agents."""
        now_s = self._clock()
        fresh_from_s = now_s - self._settings.power_fresh_s
        caches, gatherer = self._caches, self.gatherer
        agents = sources(self._settings, caches.nodes.items.values(), caches.pods.items.values())
        gatherer.ask(agents)
        gatherer.keep(key.name for key in caches.nodes.items)
        passed_s = min(max(0.0, now_s - self._ticked_s), LONGEST_TICK_S)
        self._began_s, self._ticked_s = min(self._began_s, now_s), now_s
        found = self.membership
        pods, pools = caches.pods.items.values(), tuple(caches.pools.items.values())
        self.boards = self._holders.look(gatherer.readings, caches.nodes.items, pods, pools)
        self._tell(found, now_s)
        if self._energy is not None:
            self._energy.tick(gatherer.readings, found, now_s, self.boards)
        draws = replica_draws(
            gatherer.readings, pods, self._replicas, self._own_replicas, fresh_from_s, self.boards
        )
        self.draws.look(draws, now_s)
        self.preemptions.look(found, gatherer.readings, self.lessor.counted_w, now_s)
        for name in [n for n in self.feeds if n not in found.domains]:
            del self.feeds[name]
            self._metrics.overrun.remove(name)
        for name, domain in found.domains.items():
            self._measure(name, domain.budget_w, passed_s)
            key = Key("", name)
            if self._status_of(key) is not None:
                self._controller.add(POWER_DOMAINS.kind, key)
        if self._settings.power_taint_nodes:
            self._taint(found, now_s)
        fresh = [r for r in gatherer.readings.values() if r.at_s >= fresh_from_s]
        self._metrics.count_capped(fresh, passed_s)
        return agents

    def works(self) -> dict[str, NodeWork]:
        """What the boards of each limited node do, and what limits cost there."""
        caches, now_s = self._caches, self._clock()
        pods, jobs = caches.pods.items, caches.jobs.items
        shares = self._prompt_shares.look(self._replicas)
        works = node_work(self.membership, pods.values(), jobs, caches.services.items, shares, self.boards)
        fresh_from_s = now_s - self._settings.power_fresh_s
        readings = self.gatherer.readings
        boards = self.boards
        runs = limited_runs(
            self.membership, readings, pods.values(), jobs, self._trainers, fresh_from_s, boards
        )
        runs += self._limited_replicas.look(
            self.membership, readings, pods.values(), self._replicas, fresh_from_s, boards
        )
        self.curves.look(runs, now_s)
        self.held.look(readings, pods.values(), boards, fresh_from_s, now_s)
        return with_curves(works, runs, self.curves, now_s)

    async def handle(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        domain = self._caches.power_domains.items.get(key)
        status = self._status_of(key)
        if domain is None or status is None:
            return None
        before = {c.type: c.reason for c in (domain.status.conditions if domain.status else None) or ()}
        self.feeds.setdefault(key.name, Feed()).written_s = self._clock()
        if self._energy is not None:
            self._energy.feed_sent(domain.metadata.uid, status)
        await self._writer.write_status(POWER_DOMAINS, domain, status)
        for condition in status.conditions or ():
            if condition.type != ConditionType.READY and before.get(condition.type) != condition.reason:
                self._writer.notice(POWER_DOMAINS, domain, condition.reason, condition.message)
        return None

    def picture(self) -> PowerPicture:
        """What feeds and nodes draw now."""
        draws = {name: feed.draw for name, feed in self.feeds.items() if feed.draw is not None}
        fresh_s = self._settings.power_fresh_s
        return picture(
            self.membership,
            draws,
            self.gatherer.readings,
            self._clock(),
            fresh_s,
            self.lessor.feeds,
            self.preemptions.feeds,
            self._prices(),
            self.meters,
            self.lessor.why,
            self.boards.keys(),
        )

    def series(self, feed: str, node: str, resolution: Resolution) -> PowerSeries:
        """The means of the feed, or of the node where no feed is named."""
        kept = self.feeds.get(feed)
        found = kept.series if kept is not None else self.gatherer.series.get(node) if not feed else None
        series = series_of(feed or node, found, resolution, self._clock())
        if kept is None:
            return series
        leased, forecast = (
            series_of(feed, of, resolution, self._clock()).watts for of in (kept.leased, kept.forecast)
        )
        return series.model_copy(update={"leased": leased, "forecast": forecast})

    def show(self) -> None:
        """Sets the metrics."""
        found = self.membership.domains
        self._metrics.show(
            {
                name: (found[name].budget_w, feed.draw)
                for name, feed in self.feeds.items()
                if name in found and feed.draw is not None
            },
            self.lessor.feeds,
            self.gatherer.readings.values(),
            self._clock(),
        )
        self._metrics.show_meters(self.meters)
        caches = self._caches
        tenants = tenant_of_namespace(caches.tenants.items.values())
        self._metrics.show_slowdowns(
            (tenants.get(key.namespace, ""), job.spec.priority, known[0].slowdown)
            for key, job in caches.jobs.items.items()
            if (known := self.curves.cost(run_of(job))) is not None
        )

    def _tell(self, found: Membership, now_s: float) -> None:
        """Says on which nodes each board can be limited by itself."""
        telling = self._telling.look(filter(found.is_limited, self.boards), now_s)
        if telling != self._caches.telling:
            self._caches.telling = telling
            self._wake()

    def _taint(self, found: Membership, now_s: float) -> None:
        """Begins to put and take away the taints of nodes, a few at a time."""
        busy = self._tainting is not None and not self._tainting.done()
        if busy or now_s < self._taints_at_s or self.lessor.left_s() <= 0:
            return
        fresh_s = self._settings.power_fresh_s
        heard = now_s - self._began_s > 2 * fresh_s
        nodes = self._caches.nodes.items.values()
        changes = taints(found, nodes, self.gatherer.readings, now_s - fresh_s, heard=heard)
        if changes:
            self._tainting = asyncio.get_running_loop().create_task(self._write_taints(changes[:TAINTS]))

    async def _write_taints(self, changes: Sequence[TaintNode]) -> None:
        try:
            await self._writer.carry_out(tuple(changes))
        except (ApiError, ConnectionFailed, Fenced, LaneFull) as error:
            self._taints_at_s = self._clock() + TAINTS_AGAIN_S
            log.warning("taints of nodes were not written, and are tried again: %s", error)

    def _measure(self, name: str, budget_w: float, passed_s: float) -> None:
        feed = self.feeds.setdefault(name, Feed())
        members, fresh_s = self.membership.members[name], self._settings.power_fresh_s
        feed.draw = draw = draw_of(members, self.gatherer.readings, self._ticked_s, fresh_s)
        if draw.fresh:
            feed.series.add(self._ticked_s, draw.watts)
        if (leases := self.lessor.feeds.get(name)) is not None:
            feed.leased.add(self._ticked_s, leases.leased_w)
            feed.forecast.add(self._ticked_s, leases.forecast_w)
        above_w = draw.watts - budget_w if draw.fresh else -budget_w
        feed.overrun = watched(feed.overrun, above_w, passed_s, utc_now())
        self._metrics.overrun.labels(name).inc(passed_s if above_w > 0 else 0.0)

    def _status_of(self, key: Key) -> PowerDomainStatus | None:
        """The status to write now, if any."""
        domain = self._caches.power_domains.items.get(key)
        if domain is None:
            return None
        feed = self.feeds.get(key.name, Feed())
        since_s = self._clock() - feed.written_s
        if since_s < CHANGE_S:
            return None
        heard = self._clock() - self._began_s > self._settings.power_fresh_s
        energy = self._energy.feed(domain.metadata.uid, domain.status) if self._energy is not None else None
        leases = self.lessor.feeds.get(key.name)
        relief = self.preemptions.feeds.get(key.name)
        seen = (
            Seen(feed.draw, feed.overrun, energy, leases, relief, self.meters.get(key.name))
            if heard and feed.draw is not None
            else None
        )
        due = seen is not None and since_s >= self._settings.power_status_s
        return reconcile(domain, self.membership, seen, utc_now(), due=due)

    def _changed(self) -> None:
        self._membership = None
        for key in self._caches.power_domains.items:
            self._controller.add(POWER_DOMAINS.kind, key)
