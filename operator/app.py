"""The operator put together: what feeds what, in which order it starts, and what ends it.

    lease ─► lists ─► informers synced ─► Kopf, workers, rounds, poller, demand, events, server ─► (lease lost) end

Nothing is written before the lease is held, and nothing is planned before every kind was seen once: a plan on half
of the objects would give away what the other half holds. Losing the lease, or the end of any task, ends the
process; Kubernetes starts it again, and everything it needs to go on stands in the objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from busbar.kube.client import KubeClient, Limits, Object
from busbar.kube.contracts.forecast import ForecastAnswer
from busbar.kube.errors import ApiError, ConnectionFailed
from busbar.kube.informer import Key, key_of, version_of
from busbar.kube.login import Login
from busbar.kube.resources import MODEL_SERVICES, TRAINING_JOBS, Resource
from busbar.kube.types import TrainingJob
from busbar.operator.actions import Ask
from busbar.operator.controller import Controller, Item, utc_now
from busbar.operator.demand import DemandReader
from busbar.operator.errors import Fenced
from busbar.operator.events import EventQueue, Notice
from busbar.operator.forecasts import Forecasts
from busbar.operator.handlers import Handlers
from busbar.operator.lease import LeaseKeeper
from busbar.operator.metrics import Metrics
from busbar.operator.past import Past
from busbar.operator.pods import Pod
from busbar.operator.podspec import KIND_SERVICE, KIND_TRAINING
from busbar.operator.prober import Prober
from busbar.operator.rounds import Rounds, matters, policy_of
from busbar.operator.routes import build_routes
from busbar.operator.server import Draft, RoutesFeed, Server
from busbar.operator.settings import Settings
from busbar.operator.shell import KINDS, Shell
from busbar.operator.snapshot import DRAFT, Seen, build
from busbar.operator.world import World, tenant_of_namespace
from busbar.operator.writer import Writer
from busbar.scheduler import Policy, Snapshot

log = logging.getLogger(__name__)

OWNER_KIND = {KIND_TRAINING: "TrainingJob", KIND_SERVICE: "ModelService"}
TASK_END_S = 5.0
# Kopf lists our kinds a moment after we did, and never tells of what was deleted in between.
EARLY_RESYNCS_S = (2.0, 8.0, 30.0)


class Operator:
    """One operator process. ``run()`` returns when it is cancelled and raises when it must end."""

    def __init__(
        self,
        login: Login,
        settings: Settings,
        policy: Policy | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self._on_lost = (
            on_lost  # told before the tasks are ended: the process must go, even if one of them hangs
        )
        self.metrics = Metrics()
        limits = Limits(connections=settings.connections)
        self._plain = KubeClient(login, user_agent="busbar-operator", limits=limits)
        self.lease = LeaseKeeper(
            self._plain, settings.namespace, settings.lease_name, settings.identity, settings.lease_duration_s
        )
        self.client = KubeClient(login, user_agent="busbar-operator", limits=limits, guard=self._fence)
        self.world = World(self._plain, self._changed, inactivity_s=settings.watch_inactivity_s)
        self.controller = Controller(self.metrics, workers=settings.writers)
        policy = policy or policy_of(settings)
        self.rounds = Rounds(self.world, self.controller, settings, self.metrics, policy)
        self.past = Past()
        self.forecasts = Forecasts(self.world, self.rounds, self.past, settings, self.metrics, policy)
        self.prober = Prober(
            settings, self.metrics, self.world.pods.items.values,
            lambda name: self.world.nodes.items.get(Key("", name)), self._pod_spoke, self._pod_refused,
        )  # fmt: skip
        self.demand = DemandReader(settings, lambda key: self.controller.add("ModelService", key))
        self.events = EventQueue(
            self.client, self.metrics, instance=settings.identity,
            per_s=settings.events_per_s, burst=settings.events_burst, busy=lambda: self.writer.busy > 0,
        )  # fmt: skip
        self.writer = Writer(self.client, self.metrics, self.events, self.world.by_kind(), self._ask)
        self.handlers = Handlers(
            self.world, self.writer, self.controller, self.rounds, self.prober, self.demand, settings
        )
        self.feed = RoutesFeed(
            lambda revision: build_routes(
                self.world, settings.workload_key, revision, [r for r in settings.pod_cidrs.split(",") if r]
            )
        )
        self.server = Server(
            settings,
            self._plain,
            self.metrics,
            self.feed,
            self.snapshot,
            self.forecast,
            self.problems,
            lambda: self.synced,
        )
        self.shell = Shell(login, settings, self._kopf_event)
        self.synced = False
        self._routes_dirty = asyncio.Event()
        self._started_at = time.monotonic()

    # -- life ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled; raises Fenced when the lease is lost, and whatever ends a task."""
        await self.server.start()
        try:
            await self.lease.acquire()
            self.metrics.leader.set(1)
            log.info("lease held identity=%s", self.settings.identity)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_lease(), name="lease")
                for informer in self.world.informers:
                    group.create_task(informer.run(), name=f"informer-{informer.resource.plural}")
                await self.resync()
                for informer in self.world.informers:
                    await informer.synced.wait()
                self.synced = True
                log.info("synced jobs=%d pods=%d", len(self.world.jobs.items), len(self.world.pods.items))
                self.past.rebuild(self.world.jobs.items.values(), self._tenant_of)
                self.everything()
                for name, task in (
                    ("kopf", self.shell.run()),
                    ("workers", self.controller.run()),
                    ("rounds", self.rounds.run()),
                    ("prober", self.prober.run()),
                    ("forecasts", self.forecasts.run()),
                    ("events", self.events.run()),
                    ("resync", self._resync_forever()),
                    ("routes", self._routes_forever()),
                    ("numbers", self._numbers_forever()),
                ):
                    group.create_task(task, name=name)
                if self.settings.gateway_url:
                    group.create_task(self.demand.run(), name="demand")
        finally:
            self.metrics.leader.set(0)
            self.controller.queue.close()
            with contextlib.suppress(Exception):
                async with asyncio.timeout(TASK_END_S):
                    await self._close()

    async def _keep_lease(self) -> None:
        try:
            await self.lease.keep()
        except Fenced:
            self._on_lost()
            raise

    def _fence(self) -> None:
        try:
            self.lease.check()
        except Fenced:
            self._on_lost()
            raise

    async def _close(self) -> None:
        await self.lease.release()  # first: a successor waits for it, and our time may be short
        await self.server.stop()
        await self.prober.close()
        await self.client.close()
        await self._plain.close()

    async def resync(self) -> None:
        """Lists our kinds once: the start, and the cure for anything a watch may have missed."""
        for cache in self.world.ours:
            objects, revision = await self._plain.list(cache.resource)
            cache.replace(objects, revision)

    async def _resync_forever(self) -> None:
        for pause_s in itertools.chain(EARLY_RESYNCS_S, itertools.repeat(self.settings.resync_s)):
            await asyncio.sleep(pause_s)
            try:
                await self.resync()
            except (ApiError, ConnectionFailed) as error:
                log.warning("resync failed: %s", error)
            self.everything()

    def everything(self) -> None:
        """Every object is looked at again."""
        for cache in (*self.world.ours, self.world.batch_jobs, self.world.namespaces):
            for key in list(cache.items):
                self.controller.add(cache.resource.kind, key)
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
            for informer in self.world.informers:
                self.metrics.watch_age.labels(informer.resource.plural).set(informer.age_s)
            self.metrics.jobs.clear()
            for kind, cache in (("TrainingJob", self.world.jobs), ("ModelService", self.world.services)):
                for obj in cache.items.values():
                    phase = str((obj.status.phase if obj.status is not None else None) or "New")
                    self.metrics.jobs.labels(kind, phase).inc()
            await asyncio.sleep(5)

    # -- what happens ----------------------------------------------------------------------------------

    def _kopf_event(self, resource: Resource, event: str | None, obj: Object) -> None:
        cache = next(c for c in self.world.ours if c.resource is resource)
        obj = {**obj, "metadata": dict(obj["metadata"])}
        if event == "DELETED":
            cache.forget(key_of(obj), version_of(obj))
        else:
            cache.observe(obj)

    def _changed(self, kind: str, key: Key, old: Any, new: Any) -> None:
        """A cache changed: who has to look again?"""
        if not self.synced:
            return
        if matters(kind, old, new):
            self.rounds.wake()
        if kind == "Pod":
            pod: Pod | None = new or old
            if pod is not None and pod.kind in OWNER_KIND:
                self.controller.add(OWNER_KIND[pod.kind], Key(pod.key.namespace, pod.job))
            if pod is not None and pod.kind == KIND_SERVICE:
                self._routes_dirty.set()
            return
        self.controller.add(kind, key)
        if kind in ("ModelService", "Tenant", "Node"):
            self._routes_dirty.set()
        if kind in ("Namespace", "RoleBinding", "NetworkPolicy") or (
            kind == "Tenant" and matters(kind, old, new)
        ):
            # Claims compete: one tenant's change can be another's namespace.
            for tenant in self.world.tenants.items:
                self.controller.add("Tenant", tenant)
            for namespace in self.world.namespaces.items:
                self.controller.add("Namespace", namespace)
        if kind == "TrainingJob":
            self.handlers.profiles.job_changed(old, new)
            self._remember(old, new)
            self._wake_services_of(key, old, new)

    def _remember(self, old: TrainingJob | None, new: TrainingJob | None) -> None:
        """What happened to a job is what forecasts are made from."""
        if new is not None:
            self.past.observe(new, self._tenant_of)
        elif old is not None:
            self.past.forget(old, self._tenant_of, utc_now())

    def _tenant_of(self, namespace: str) -> str:
        return tenant_of_namespace(self.world.tenants.items.values()).get(namespace, "")

    def _wake_services_of(self, key: Key, old: Any, new: Any) -> None:
        """A service that serves a job's output starts when the job is done."""
        before = old.status.phase if old is not None and old.status is not None else None
        after = new.status.phase if new is not None and new.status is not None else None
        if before == after:
            return
        for service_key, service in self.world.services.items.items():
            if service_key.namespace == key.namespace and service.spec.model.training_job == key.name:
                self.controller.add("ModelService", service_key)

    def _pod_spoke(self, pod: Pod) -> None:
        if pod.kind in OWNER_KIND:
            self.controller.add(OWNER_KIND[pod.kind], Key(pod.key.namespace, pod.job))

    def _pod_refused(self, pod: Pod, why: str) -> None:
        self.events.put(
            Notice("v1", "Pod", pod.key.namespace, pod.key.name, pod.uid, "PortNotRead", why, warning=True)
        )

    def _ask(self, ask: Ask) -> None:
        self.prober.ask(ask, self.world.pods.items.get(ask.key))

    # -- what others ask -------------------------------------------------------------------------------

    def snapshot(self, draft: Draft | None = None) -> Snapshot:
        """What a plan would be made on now."""
        return build(Seen.of(self.world), utc_now(), draft, self.settings.usage_half_life_s)

    async def forecast(self, draft: Draft) -> ForecastAnswer:
        """When a draft would start."""
        return await self.forecasts.of_draft(self.snapshot(draft), DRAFT)

    def problems(self) -> list[str]:
        """Why the process should be restarted; empty while it is healthy."""
        limit = self.settings.watch_dead_s
        if not self.synced:
            waited = time.monotonic() - self._started_at
            blocked = self.lease.held() and waited > limit
            return ["the first lists did not end"] if blocked else []
        return [
            f"the watch of {i.resource.plural} has been silent for {i.age_s:.0f} s"
            for i in self.world.informers
            if i.age_s > limit
        ]


__all__ = ["KINDS", "MODEL_SERVICES", "TRAINING_JOBS", "Item", "Operator"]
