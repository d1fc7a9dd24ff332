"""The operator's parts, connected: the order in which they start, and what ends the process.

    server, lease ─► lists ─► informers synced ─► Kopf, workers, rounds, poller, demand, events, leader's label
        ▲                                             ▲               │ lease lost: no writes, no rounds
        └──── another process took it: starts over ◄──┴─ held again ◄─┘

Nothing is written before the lease is held. Nothing is planned before every kind has been listed once: a plan on half
of the objects would assign devices that the other half holds. A lost lease stops writes and rounds until it is held
again. Where another process holds it, or may have held it in between, everything that is known here is given up, and
`lead` starts over with a new Operator: a *standby*, which only looks at the lease until it is free. It has no cache and
reads no objects, so a second replica costs little. If a task ends by a fault, the process ends; Kubernetes starts it
again, and it reads everything that it needs from the objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from busbar.kube.client import ClientLimits, KubeClient, Object
from busbar.kube.contracts.routes import Routes
from busbar.kube.errors import ApiError, ConnectionFailed
from busbar.kube.informer import Cache, Informer, Key, key_of, version_of
from busbar.kube.login import Login
from busbar.kube.resources import MODEL_SERVICES, SECRETS, TRAINING_JOBS, Resource
from busbar.operator import steady_clock
from busbar.operator.accounting.allocations import PoolRemarks
from busbar.operator.energy.keeper import CheckpointKeeper
from busbar.operator.errors import TakenOver
from busbar.operator.forecasts.forecaster import Forecaster
from busbar.operator.forecasts.job_history import JobHistory
from busbar.operator.handlers import Handlers
from busbar.operator.handlers.changes import OWNER_KIND, Changes
from busbar.operator.handlers.shared import Shared
from busbar.operator.metrics import Metrics
from busbar.operator.pods.manifests import KIND_SERVICE
from busbar.operator.pods.orphans import Reaper
from busbar.operator.pods.prober import Prober
from busbar.operator.power.meters import Meters
from busbar.operator.previews.worker import Previews
from busbar.operator.queue.controller import Controller, Item
from busbar.operator.scheduling.rounds import Rounds, policy_of
from busbar.operator.scheduling.snapshot import ClusterObjects, build
from busbar.operator.server import RoutesFeed, Server
from busbar.operator.serving.demand import DemandReader
from busbar.operator.serving.history_keeper import HistoryKeeper
from busbar.operator.serving.routes import build_routes
from busbar.operator.serving.series_keeper import SeriesKeeper
from busbar.operator.serving.series_store import SeriesStore
from busbar.operator.settings import Settings
from busbar.operator.steady_clock import utc_now
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.kopf_shell import KINDS, KopfShell
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import PostToPod
from busbar.operator.write.events import EventQueue, Notice
from busbar.operator.write.lanes import Lanes
from busbar.operator.write.leader_label import LeaderLabel
from busbar.operator.write.lease import Fence
from busbar.operator.write.lease_thread import LeaseThread
from busbar.operator.write.writer import Writer
from busbar.scheduler import Policy, Snapshot

log = logging.getLogger(__name__)

TASK_END_S = 5.0
SAVE_S = 3.0
"""Time to write what a successor goes on from, before the lease is released; with `TASK_END_S` less than `main.END_S`."""
# Kopf lists our kinds shortly after we did, and does not report objects that were deleted in between.
EARLY_RESYNCS_S = (2.0, 8.0, 30.0)
PAGE = 100
"""Objects of our own kinds in one answer: as JSON they take much more memory than in the cache."""
LIST_AGAIN_S = 1.0
"""Pause after a list that failed, while nothing can be planned without it."""


class Operator:
    """One operator, from standby to leader. ``run()`` returns when another process leads, and raises at a fault."""

    def __init__(
        self,
        login: Login,
        settings: Settings,
        policy: Policy | None = None,
        started_at: float | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.metrics.started.set(time.time() if started_at is None else started_at)
        limits = ClientLimits(connections=settings.connections)
        self._plain = KubeClient(login, user_agent="busbar-operator", limits=limits)
        self.lease = LeaseThread(login, settings)
        self.fence = Fence(lambda: self.lease.hold)
        self.client = KubeClient(login, user_agent="busbar-operator", limits=limits, guard=self.fence.check)
        self.caches = Caches(
            self._plain, lambda *change: self._changes.see(*change), inactivity_s=settings.watch_inactivity_s
        )
        self.controller = Controller(self.metrics, workers=settings.writers)
        policy = policy or policy_of(settings)
        self.rounds = Rounds(self.caches, self.controller, settings, self.metrics, policy)
        self.job_history = JobHistory()
        self.forecaster = Forecaster(
            self.caches, self.rounds, self.job_history, settings, self.metrics, policy
        )
        self.previews = Previews(
            lambda: ClusterObjects.of(self.caches), lambda: self.rounds.outcome,
            self.forecaster, policy, settings.forecast_draft_s,
        )  # fmt: skip
        self.prober = Prober(
            settings, self.metrics, self.caches.pods.items.values,
            lambda name: self.caches.nodes.items.get(Key("", name)), self._pod_answered, self._pod_refused,
        )  # fmt: skip
        self.demand = DemandReader(settings, lambda key: self.controller.add("ModelService", key))
        self.lanes = Lanes(settings.connections)
        self.events = EventQueue(
            self.client, self.metrics, instance=settings.identity,
            per_s=settings.events_per_s, burst=settings.events_burst, lanes=self.lanes,
        )  # fmt: skip
        self.writer = Writer(
            self.client, self.metrics, self.events, self.caches.by_kind(), self._post_to_pod, self.lanes
        )
        self.reaper = Reaper(self.caches, self.writer, self._plain.get, settings)
        shared = Shared(
            self.caches,
            self.writer,
            self.controller,
            self.rounds,
            self.prober,
            self.demand,
            settings,
            self.metrics,
        )
        self.handlers = Handlers(shared, self.reaper, self.metrics)
        self.handlers.power.lessor.left_s = self.fence.left_s
        self.checkpoints = CheckpointKeeper(self._plain, self.client, self.handlers.energy, settings)
        self.days = HistoryKeeper(self._plain, self.client, self.handlers.targets.histories, settings)
        self.series = SeriesKeeper(
            self.caches,
            self.demand.of if settings.gateway_url else lambda key: None,
            self.handlers.targets.latest,
        )
        self.series_store = SeriesStore(self._plain, self.client, self.series, settings)
        self.meters = Meters(
            lambda: list(self.caches.power_domains.items.values()),
            self._meter_secret,
            self.handlers.energy,
            settings,
        )
        self.handlers.power.meters = self.meters.found
        self.label = LeaderLabel(self._plain, self.client, settings.namespace, settings.pod_name)
        self.rounds.after = self._after_round
        self.feed = RoutesFeed(self._routes)
        self.server = self._new_server()
        self.shell = KopfShell(login, settings, self._kopf_event)
        self.synced = False
        self._routes_dirty = asyncio.Event()
        self._changes = Changes(
            self.caches,
            self.controller,
            self.rounds,
            self.handlers,
            self.reaper,
            self.job_history,
            lambda: self.synced,
            self._routes_dirty.set,
        )
        self._held_at = time.monotonic()

    def _new_server(self) -> Server:
        return Server(
            self.settings,
            self._plain,
            self.metrics,
            self.feed,
            self.snapshot,
            self.previews.of,
            self.handlers.targets.service_plan,
            self.series.of,
            self.handlers.power,
            self.problems,
            lambda: self.synced,
            lambda: self.lease.hold.holder != "",
        )

    def _routes(self, revision: int) -> Routes:
        """What the gateways are told of the services."""
        return build_routes(
            self.caches,
            self.settings.workload_keys,
            revision,
            [r for r in self.settings.pod_cidrs.split(",") if r],
            self.prober.serving,
            lambda namespace: self.handlers.holds.of_namespace(namespace).stops,
            self.handlers.targets.shares_of,
        )

    # -- life ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until cancelled, or until another process leads. Raises any exception that ends a task."""
        try:
            await self._run()
        except* TakenOver as errors:
            log.warning("this operator is a standby now", extra={"why": str(errors.exceptions[0])})

    async def _run(self) -> None:
        await self.server.start()
        self.lease.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.lease.wait(), name="lease")
                term = await self.lease.held()
                self._held_at = time.monotonic()
                steady_clock.begin()
                log.info("lease held", extra={"identity": self.settings.identity})
                group.create_task(self.lease.taken(term), name="taken")
                for informer in self.caches.informers:
                    group.create_task(informer.run(), name=f"informer-{informer.resource.plural}")
                await self._list_all(*self.caches.ours)
                for informer in self.caches.informers:
                    await informer.synced.wait()
                await self.checkpoints.load()
                await self.days.load()
                self.synced = True
                counts = {"jobs": len(self.caches.jobs.items), "pods": len(self.caches.pods.items)}
                log.info("synced", extra=counts)
                self.job_history.rebuild(self.caches.jobs.items.values(), self.caches.tenant)
                self.everything()
                for name, task in (
                    ("lead", self._lead(term)),
                    ("kopf", self.shell.run()),
                    ("workers", self.controller.run()),
                    ("rounds", self.rounds.run()),
                    ("sentences", self.rounds.sentences.run()),
                    ("prober", self.prober.run()),
                    ("forecasts", self.forecaster.run()),
                    ("power", self.handlers.power.run()),
                    ("checkpoints", self.checkpoints.run()),
                    ("days", self.days.run()),
                    ("series", self.series_store.run()),
                    ("meters", self.meters.run()),
                    ("events", self.events.run()),
                    ("resync", self._resync_forever()),
                    ("routes", self._routes_forever()),
                    ("numbers", self._numbers_forever()),
                    ("label", self.label.run()),
                ):
                    group.create_task(task, name=name)
                if self.settings.gateway_url:
                    group.create_task(self.demand.run(), name="demand")
        finally:
            self.metrics.leader.set(0)
            self.controller.queue.close()
            try:
                await self._save()
            finally:
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(TASK_END_S):
                        await self._close()

    async def _meter_secret(self, name: str) -> Mapping[str, object]:
        """A meter's Secret, of our own namespace and no other."""
        found = await self.client.get(SECRETS, name, self.settings.namespace)
        data = found.get("data")
        return data if isinstance(data, dict) else {}

    async def _lead(self, term: int) -> None:
        """Lets the operator write and plan while the lease is held in this term."""
        self.fence.open(term)
        while True:
            self.controller.resume()
            self.metrics.leader.set(1)
            await self.lease.lost(term)
            self.metrics.leader.set(0)
            self.controller.pause()
            log.warning("lease lost; nothing is written until it is held again")
            async with self.rounds.stopped:
                await self.lease.held()  # a new term ends this operator, see `taken`
            log.info("lease held again")
            self.everything()

    async def _save(self) -> None:
        """Writes what a successor goes on from, as far as the lease is held and time suffices."""
        if self.fence.left_s() <= 0:
            return
        try:
            async with asyncio.timeout(SAVE_S), asyncio.TaskGroup() as group:
                group.create_task(self.checkpoints.save())
                group.create_task(self.days.save())
                group.create_task(self.series_store.save())
        except Exception as error:
            log.warning("joules and services' load since the last writes were not all written: %r", error)

    async def _close(self) -> None:
        """Closes every part, whatever another part's closing raises or how long it takes."""
        async with contextlib.AsyncExitStack() as parts:  # the last one pushed is closed first
            for close in (
                self._plain.close, self.client.close, self.prober.close, self.previews.close, self.server.stop,
                self.lease.stop,  # first: a successor waits for it, and the kubelet may kill this process soon
            ):  # fmt: skip
                parts.push_async_callback(close)

    async def _list_all(self, *caches: Cache[Any]) -> None:
        """Lists kinds completely, each as often as it takes."""
        for cache in caches:
            while True:
                try:
                    await self._list(cache)
                    break
                except (ApiError, ConnectionFailed) as error:
                    log.warning("%s were not listed, and are tried again: %s", cache.resource.plural, error)
                    await asyncio.sleep(LIST_AGAIN_S)

    async def _list(self, cache: Cache[Any]) -> None:
        if isinstance(cache, Informer):
            await cache.relist()
        else:
            await cache.replace_by_pages(self._plain.pages(cache.resource, page=PAGE))

    async def _resync_forever(self) -> None:
        for pause_s in itertools.chain(EARLY_RESYNCS_S, itertools.repeat(self.settings.resync_s)):
            await asyncio.sleep(pause_s)
            try:
                for cache in self.caches.ours:  # in case a watch missed something
                    await self._list(cache)
            except (ApiError, ConnectionFailed) as error:
                log.warning("resync failed: %s", error)
            self.everything()

    def everything(self) -> None:
        """Queues every object for a reconcile."""
        for cache in (*self.caches.ours, self.caches.batch_jobs, self.caches.namespaces):
            for key in list(cache.items):
                self.controller.add(cache.resource.kind, key)
        for key in self.reaper.strays():
            self.controller.add("Pod", key)
        self.rounds.wake()
        self._routes_dirty.set()

    async def _routes_forever(self) -> None:
        while True:
            await self._routes_dirty.wait()
            self._routes_dirty.clear()
            self.feed.refresh()

    async def _numbers_forever(self) -> None:
        while True:
            self.metrics.queue.set(len(self.controller.queue))
            self.metrics.clock_behind.set(steady_clock.behind_s())
            for informer in self.caches.informers:
                self.metrics.watch_age.labels(informer.resource.plural).set(informer.age_s)
            self.metrics.show_budgets(self.caches.tenants.items.values())
            self.metrics.show_pools(self.caches.pools.items.values())
            self.handlers.power.show()
            self.metrics.jobs.clear()
            for kind, cache in (("TrainingJob", self.caches.jobs), ("ModelService", self.caches.services)):
                phases = Counter(
                    obj.status.phase if obj.status is not None else None for obj in cache.items.values()
                )
                for phase, count in phases.items():
                    self.metrics.jobs.labels(kind, str(phase or "New")).set(count)
            await asyncio.sleep(5)

    # -- what happens ----------------------------------------------------------------------------------

    def _kopf_event(self, resource: Resource, event: str | None, obj: Object) -> None:
        cache = next(c for c in self.caches.ours if c.resource is resource)
        obj = {**obj, "metadata": dict(obj["metadata"])}
        if event == "DELETED":
            cache.forget(key_of(obj), version_of(obj))
        else:
            cache.observe(obj)

    def _pod_answered(self, pod: Pod) -> None:
        if pod.kind in OWNER_KIND:
            self.controller.add(OWNER_KIND[pod.kind], Key(pod.key.namespace, pod.job))
        if pod.kind == KIND_SERVICE and self.synced:
            self._routes_dirty.set()

    def _pod_refused(self, pod: Pod, why: str) -> None:
        self.events.put(
            Notice("v1", "Pod", pod.key.namespace, pod.key.name, pod.uid, "PortNotRead", why, warning=True)
        )

    def _post_to_pod(self, post: PostToPod) -> None:
        pods = self.caches.pods.items
        peers = [peer for key in post.peers if (peer := pods.get(key)) is not None]
        self.prober.post(post, pods.get(post.key), peers)

    async def _after_round(self, snapshot: Snapshot, remarks: PoolRemarks) -> None:
        await self.handlers.after_round(snapshot, remarks)
        self.previews.after_round()

    # -- what others ask -------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The snapshot that a plan would be made on now."""
        seen, orders = ClusterObjects.of(self.caches), self.rounds.orders.in_flight
        return build(seen, utc_now(), half_life_s=self.settings.usage_half_life_s, orders=orders)

    def problems(self) -> list[str]:
        """Why the process should be restarted; empty while it is healthy.

        A held lease proves that the API server answers. While it does not, a restart would help nothing.
        """
        limit = self.settings.watch_dead_s
        if time.monotonic() >= self.lease.hold.until:
            return []
        if not self.synced:
            waited = time.monotonic() - self._held_at
            return ["the first lists did not end"] if waited > limit else []
        return [
            f"the watch of {i.resource.plural} has been silent for {i.age_s:.0f} s"
            for i in self.caches.informers
            if i.age_s > limit
        ]


async def lead(make: Callable[[], Operator]) -> None:
    """Leads whenever no other process does, and stands by otherwise, until cancelled."""
    this = asyncio.current_task()
    assert this is not None
    while not this.cancelling():  # a cancellation that comes together with the end of a term is not lost
        # A task of its own: in Python 3.11 a task group that has failed leaves its task's `cancelling` at 1.
        await asyncio.create_task(make().run())
    raise asyncio.CancelledError


__all__ = ["KINDS", "MODEL_SERVICES", "TRAINING_JOBS", "Item", "Operator"]
