"""One handler per kind: gathers the view of an object, calls its pure reconcile, and passes the result to the writer.

This is the only module that knows both the caches and the reconciles. It makes no decisions of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time

from busbar.kube.contracts.workload import CHECKPOINT_PATH, DRAIN_PATH, SLEEP_PATH, WAKE_PATH
from busbar.kube.errors import BadRequest, Forbidden, Invalid
from busbar.kube.informer import Key
from busbar.kube.resources import ACCELERATOR_POOLS, MODEL_SERVICES, TENANTS, TRAINING_JOBS
from busbar.kube.types import ModelService, Tenant, TrainingJob, TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.tenant import TenantUsage
from busbar.kube.types.training_status import TrainingJobStatus, Usage
from busbar.operator.accounting.allocations import (
    AllocationCounts,
    Allocations,
    PoolRemarks,
    TenantAllocation,
)
from busbar.operator.decisions import Admit, Deadline, Decision, Forecast, Reserved, Wait
from busbar.operator.energy.ledger import Ledger
from busbar.operator.metrics import Metrics
from busbar.operator.pods.engine_image import EngineImage
from busbar.operator.pods.foreign_pods import admit_pod, is_claim, lacking, release_job
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING, Rendering
from busbar.operator.pods.orphans import Reaper
from busbar.operator.pods.prober import Prober
from busbar.operator.pods.room import PodRoom, Promised, pod_room
from busbar.operator.pods.silent_nodes import next_given_up_s, silent_nodes, with_silence
from busbar.operator.pods.volume_claims import claims_of_job, claims_of_service, missing
from busbar.operator.pools.discovery import discover
from busbar.operator.pools.reconcile import COUNTS_S as POOL_COUNTS_S
from busbar.operator.pools.reconcile import reconcile as reconcile_pool
from busbar.operator.power.keeper import PowerKeeper
from busbar.operator.power.limited_runs import power_use
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.profiles.keeper import ProfileKeeper
from busbar.operator.profiles.table import rates_of
from busbar.operator.queue.controller import Controller, Item
from busbar.operator.scheduling.rounds import Rounds
from busbar.operator.serving.demand import DemandReader
from busbar.operator.serving.latency_targets import LatencyTargets
from busbar.operator.serving.metrics import Scaled, ScalingMetrics
from busbar.operator.serving.names import holders as name_holders
from busbar.operator.serving.reach import Reach
from busbar.operator.serving.reconcile import reconcile as reconcile_service
from busbar.operator.serving.replicas import wanted_indexes
from busbar.operator.serving.view import ServiceView, model_uri
from busbar.operator.settings import Settings
from busbar.operator.steady_clock import utc_now
from busbar.operator.tenancy.budget_holds import BudgetHolds
from busbar.operator.tenancy.reconcile import COUNTS_S as TENANT_COUNTS_S
from busbar.operator.tenancy.reconcile import TenantView, release, revoke
from busbar.operator.tenancy.reconcile import reconcile as reconcile_tenant
from busbar.operator.training.deadline import news as deadline_news
from busbar.operator.training.health import news as health_news
from busbar.operator.training.reconcile import reconcile as reconcile_job
from busbar.operator.training.view import JobView, holders, waits_for_its_turn
from busbar.operator.watch.caches import Caches
from busbar.operator.write.actions import Action, Create
from busbar.operator.write.events import Notice
from busbar.operator.write.pace import paced
from busbar.operator.write.writer import Writer
from busbar.scheduler import Snapshot
from busbar.scheduler.autoscale import ScalingState

log = logging.getLogger(__name__)

ENDING_S = 2.0
"""After so long a namespace whose pods end is looked at again."""
POD_ROOM_S = 5.0
"""For so long a count of a namespace's pods serves jobs that are not about to be admitted."""


class Handlers:
    """Registers itself with the controller."""

    def __init__(
        self,
        caches: Caches,
        writer: Writer,
        controller: Controller,
        rounds: Rounds,
        prober: Prober,
        demand: DemandReader,
        settings: Settings,
        reaper: Reaper,
        metrics: Metrics,
    ) -> None:
        self._caches, self._writer, self._controller = caches, writer, controller
        self._reaper = reaper
        self._rounds, self._prober, self._demand = rounds, prober, demand
        self._settings = settings
        self._rendering = Rendering(
            settings.workloads_image,
            settings.image_pull_policy,
            settings.workload_key,
            settings.former_workload_key,
        )
        self._allocations = Allocations()
        self._counts = AllocationCounts()
        self._discovers = True
        self.undiscovered = True
        """Whether a node or a pool changed since devices without a pool were looked for."""
        self._without_tenant: set[str] = set()
        """Namespaces that were seen without a Tenant."""
        self._scaling: dict[str, ScalingState] = {}  # by uid
        self._scales = ScalingMetrics(metrics.registry)
        self.targets = LatencyTargets(
            caches,
            demand,
            lambda: rounds.outcome,
            self._scales,
            settings.gateway_url != "",
            rounds.lacking_watts,
        )
        self._refused: dict[tuple[str, Key], str] = {}  # why the API server refused pods of (kind, key)
        self._reach = Reach(prober.ask, prober.url_of, prober.ports, prober.clock)
        self._promised = Promised()
        self.holds = BudgetHolds(caches, controller, rounds.wake)
        self._rooms: dict[
            str, tuple[float, PodRoom | None]
        ] = {}  # by namespace: when it was counted, what is left
        self._pace = 0, settings
        self._pool_told: dict[Key, float] = {}  # when a pool's status was written
        self._tenant_told: dict[Key, float] = {}  # and a tenant's
        self._written_at: dict[Key, float] = {}  # jobs: when their last status was written
        self._refused_until: dict[Key, float] = {}  # services: when the next replica is sent
        controller.handles("TrainingJob", self.training_job)
        controller.handles("ModelService", self.model_service)
        controller.handles("Tenant", self.tenant)
        controller.handles("AcceleratorPool", self.pool)
        controller.handles("Pod", self.pod)
        controller.handles("Job", self.batch_job)
        controller.handles("Namespace", self.namespace)
        self.profiles = ProfileKeeper(caches, writer, controller, settings)
        power_metrics = PowerMetrics(metrics.registry)
        self.energy = Ledger(caches, power_metrics, settings.power_fresh_s)
        self.power = PowerKeeper(
            caches,
            writer,
            controller,
            settings,
            power_metrics,
            self.energy,
            prices=rounds.watt_prices,
            replicas=prober.serving,
            trainers=prober.training,
            curves=self.profiles.curves,
            draws=self.profiles.draws,
            engine=EngineImage(self._rendering.workloads_image, settings.workloads_digests),
            wake=rounds.wake,
        )

    async def training_job(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        job = self._caches.jobs.items.get(key)
        if job is None:
            self._refused.pop((KIND_TRAINING, key), None)
            self._written_at.pop(key, None)
            return None
        forecast = next((d for d in decisions if isinstance(d, Forecast)), None)
        reserved = next((d for d in decisions if isinstance(d, Reserved)), None)
        deadline = next((d for d in decisions if isinstance(d, Deadline)), None)
        decision = next((d for d in decisions if not isinstance(d, Forecast | Reserved | Deadline)), None)
        status = job.status
        name = decision.placement.pool if isinstance(decision, Admit) else ""
        if not name and status is not None and status.admission is not None:
            name = status.admission.pool
        own = self._caches.owned_pods(KIND_TRAINING, job)
        view = JobView(
            job=job,
            pods=own,
            now=utc_now(),
            settings=self._paced(),
            rendering=self._rendering,
            pool=self._caches.pools.items.get(Key("", name)),
            readings=self._prober.training,
            refusals=self._prober.refusals,
            asked=self._prober.asked.get(CHECKPOINT_PATH, {}),
            counted=self.profiles.counted(job),
            slack=self.profiles.slack(job),
            refused=self._refused.get((KIND_TRAINING, key), ""),
            has_tenant=self._has_tenant(key),
            counts_due=time.monotonic() - self._written_at.get(key, 0.0) >= self._counts_s(status),
            holders=holders(job, own, self._caches.pods.items),
            gone_pods=self._caches.gone_pods(job.metadata.uid),
            absent_nodes=self._absent_nodes(job),
            silent=silent_nodes(own, self._caches.nodes.items),
            energy_joules=self._energy(job.metadata.uid, status.usage if status is not None else None),
            power=power_use(job, self.profiles.curves),
            budget=self.holds.of_namespace(key.namespace),
            missing_claims=missing(key.namespace, claims_of_job(job), self._caches.volume_claims.items),
            is_ending=self._is_ending(key.namespace),
            held_back=self._rounds.held_back.get(Item("TrainingJob", key), ""),
            pod_room=self._pod_room(job, key, isinstance(decision, Admit)),
        )
        update = reconcile_job(view, decision, forecast, reserved, deadline)
        if update.status is not None:
            self._energy_sent(job.metadata.uid, update.status.usage)
            acts, waits = bool(update.actions), bool(decisions)
            if view.pod_room is not None and update.status.admission is not None:
                self._promised.pods[key] = update.status.admission.pods
            try:
                await self._writer.write_status(TRAINING_JOBS, job, update.status, acts=acts, waits=waits)
            finally:
                self._promised.pods.pop(key, None)
            self._written_at[key] = time.monotonic()
            for told in (deadline_news(status, update.status), *health_news(status, update.status)):
                if told is not None:
                    self._writer.notice(TRAINING_JOBS, job, *told)
            if update.status.admission is None:
                self._refused.pop((KIND_TRAINING, key), None)
        await self._carry_out(KIND_TRAINING, key, update.actions)
        if update.offer:
            self._rounds.wake()
        return _sooner(update.again_s, self._given_up_s(view))

    def _absent_nodes(self, job: TrainingJob) -> frozenset[str]:
        """Nodes of a gang that take no pod now, where one may be replaced."""
        admission = job.status.admission if job.status is not None else None
        if admission is None or job.spec.checkpoint.memory is None:
            return frozenset()
        nodes = self._caches.nodes.items
        known = {name: nodes.get(Key("", name)) for name in admission.nodes}
        return frozenset(name for name, node in known.items() if node is None or not node.ready)

    def _counts_s(self, status: TrainingJobStatus | None) -> float:
        """How long after a job's last status the pods that run are counted in the next."""
        told = status is not None and status.phase is TrainingPhase.STARTING
        return self._settings.count_period_s if told else self._settings.start_told_s

    def _pod_room(self, job: TrainingJob, key: Key, admits: bool) -> PodRoom | None:
        """What the limit of pods leaves for a waiting job: exact where it is to be admitted, else some seconds old."""
        if not waits_for_its_turn(job):
            return None
        counted_at, room = self._rooms.get(key.namespace, (float("-inf"), None))
        if not admits and time.monotonic() - counted_at < POD_ROOM_S:
            return room
        caches = self._caches
        name = caches.tenant_of.get(key.namespace, "")
        found = caches.tenants.items.get(Key("", name))
        room = pod_room(found, key, caches.pods.items.values(), caches.jobs.items.values(), self._promised)
        self._rooms[key.namespace] = time.monotonic(), room
        return room

    async def model_service(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        service = self._caches.services.items.get(key)
        if service is None:
            known = {s.metadata.uid for s in self._caches.services.items.values()}
            self._scaling = {uid: state for uid, state in self._scaling.items() if uid in known}
            self.targets.keep(known)
            self._scales.gone(key)
            self._refused.pop((KIND_SERVICE, key), None)
            self._refused_until.pop(key, None)
            return None
        if any(isinstance(d, Wait) for d in decisions):
            self._refused.pop((KIND_SERVICE, key), None)  # now it waits for another reason
        refused = self._refused.get((KIND_SERVICE, key), "")
        if refused and time.monotonic() < self._refused_until.get(key, 0.0):
            # The plan decides to start it once a second; a quota or a policy need not be tried that often.
            decisions = tuple(d for d in decisions if not isinstance(d, Admit))
        view = await self._service_view(key, service, refused)
        update = reconcile_service(view, decisions)
        if update.scaling is not None:
            self._scaling[service.metadata.uid] = update.scaling
        if update.status is not None:
            self._energy_sent(service.metadata.uid, update.status.usage)
            acts, waits = bool(update.actions), bool(decisions)
            await self._writer.write_status(MODEL_SERVICES, service, update.status, acts=acts, waits=waits)
        told = service.spec.slo is not None or service.spec.scaling.warm is not None
        scaled = (
            Scaled(update.scaled, view.status.desired_replicas or 0, update.status.desired_replicas or 0)
            if update.scaled is not None and update.status is not None
            else None
        )
        self._scales.show(key, view.plan, scaled, view.pods if told else (), self.targets.clock(), view.day)
        self._scales.show_lost(key, view.pods, view.reach)
        await self._carry_out(KIND_SERVICE, key, update.actions)
        for reason, message in update.notices:
            self._writer.notice(MODEL_SERVICES, service, reason, message)
        return _sooner(update.again_s, self._given_up_s(view))

    async def _service_view(self, key: Key, service: ModelService, refused: str) -> ServiceView:
        """All that the reconcile of a service depends on; `refused`: why its pods were, the last time."""
        own = self._caches.owned_pods(KIND_SERVICE, service)
        silent = silent_nodes(own, self._caches.nodes.items)
        own = with_silence(own, silent)
        model = model_uri(service, self._caches.jobs.items.values())
        plan = await self.targets.plan(key, service, own, model.made_by)
        demand = self._demand.of(key) if self._settings.gateway_url else None
        return ServiceView(
            service=service,
            pods=own,
            now=utc_now(),
            settings=self._paced(),
            rendering=self._rendering,
            model=model,
            pools={k.name: p for k, p in self._caches.pools.items.items()},
            demand=demand,
            readings=self._prober.serving,
            held_pods=self.power.held.uids,
            asked=self._prober.asked.get(DRAIN_PATH, {}),
            changing=frozenset(
                uid
                for path in (SLEEP_PATH, WAKE_PATH)
                for uid, answered in self._prober.asked.get(path, {}).items()
                if not answered
            ),
            scaling=self._scaling.get(service.metadata.uid),
            plan=plan,
            warmth=self.targets.warmth(service, own, plan),
            day=self.targets.day(key, service),
            watts=self.energy.service_watts(service.metadata.uid),
            reach=self._reach.look(own, (demand.replicas or ()) if demand is not None else (), utc_now()),
            refused=refused,
            missing_claims=missing(
                key.namespace, claims_of_service(service, model.uri), self._caches.volume_claims.items
            ),
            silent=silent,
            held_back=self._rounds.held_back.get(Item("ModelService", key), ""),
            has_tenant=self._has_tenant(key),
            tenant=self._caches.tenant_of.get(key.namespace, ""),
            energy_joules=self._energy(
                service.metadata.uid, service.status.usage if service.status is not None else None
            ),
            budget=self.holds.of_namespace(key.namespace),
            holders=name_holders(service, wanted_indexes(service, own), own, self._caches.pods.items),
            lost=self._caches.charged_to(service.metadata.uid),
        )

    def _given_up_s(self, view: JobView | ServiceView) -> float | None:
        """In how many seconds pods of the object are given up with their nodes."""
        return next_given_up_s(view.silent, view.now, self._settings.node_lost_s)

    async def _carry_out(self, kind: str, key: Key, actions: tuple[Action, ...]) -> None:
        """Remembers why pods were refused, so that the next reconcile can write it into the status."""
        try:
            await self._writer.carry_out(actions)
        except (Forbidden, Invalid, BadRequest) as error:
            if any(isinstance(a, Create) for a in actions):
                self._refused[kind, key] = error.message
                if kind == KIND_SERVICE:
                    self._refused_until[key] = time.monotonic() + self._settings.refused_again_s
            raise
        if any(isinstance(a, Create) for a in actions):
            self._refused.pop((kind, key), None)

    async def tenant(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        found = self._caches.tenants.items.get(key)
        if found is None:
            self._tenant_told.pop(key, None)
            self.holds.look(key.name)
            return None
        view = TenantView(
            tenant=found,
            owner_of=self._caches.tenant_of,
            namespaces={k.name: n for k, n in self._caches.namespaces.items.items()},
            bindings=tuple(self._caches.bindings.items.values()),
            now=utc_now(),
            policies=tuple(self._caches.policies.items.values()),
            quotas=tuple(self._caches.quotas.items.values()),
            waiting_jobs=self._waiting_jobs(found),
            platform=self._settings.shielded_by,
            allocation=self._allocations.tenants.get(key.name, TenantAllocation()),
            free_by_type=self._allocations.free_by_type,
            pools=tuple(self._caches.pools.items.values()),
            rates=rates_of(self._caches.pools.items.values()),
            energy_joules=self._energy(
                found.metadata.uid, found.status.usage if found.status is not None else None
            ),
            drawn_watts=self.energy.watts(key.name),
            inference=self._demand.account(key.name),
            lost=tuple(
                (s.metadata.uid, self._caches.tenant_of.get(k.namespace, ""), s.status.lost_work_caused)
                for k, s in self._caches.services.items.items()
                if s.status is not None and s.status.lost_work_caused is not None
            ),
            usage_period_s=self._settings.usage_period_s,
            half_life_s=self._settings.usage_half_life_s,
        )
        update = reconcile_tenant(view)
        await self._writer.carry_out(update.actions)
        if update.status is not None:
            self._energy_sent(found.metadata.uid, update.status.usage)
            self._tenant_told[key] = time.monotonic()
            await self._writer.write_status(TENANTS, found, update.status)
        for reason, message in update.notices:
            self._writer.notice(TENANTS, found, reason, message)
        self.holds.look(key.name)
        return update.again_s

    def _paced(self) -> Settings:
        """The settings for jobs and services, as their number allows."""
        running = sum(tenant.running for tenant in self._allocations.tenants.values())
        if running != self._pace[0]:
            self._pace = running, paced(self._settings, running)
        return self._pace[1]

    def _energy(self, uid: str, usage: Usage | TenantUsage | None) -> float | None:
        """The new total of an object that has used so much."""
        return self.energy.accounts.total(uid, usage.energy_joules if usage is not None else None)

    def _energy_sent(self, uid: str, usage: Usage | TenantUsage | None) -> None:
        """To be called before a status with this use is written."""
        self.energy.accounts.sent(uid, usage.energy_joules if usage is not None else None)

    def _waiting_jobs(self, tenant: Tenant) -> int | None:
        limits = tenant.spec.limits
        if limits is None or limits.waiting_jobs is None:
            return None
        spaces = set(tenant.spec.namespaces or ())
        return sum(
            job.metadata.namespace in spaces and waits_for_its_turn(job)
            for job in self._caches.jobs.items.values()
        )

    def _tenant_changed(self, key: Key, old: TenantAllocation | None, new: TenantAllocation) -> None:
        """Queues a tenant whose allocation changed; where it holds what it held, when its counts may be written again."""
        if old == new:
            return
        item = Item("Tenant", key)
        left_s = self._tenant_told.get(key, float("-inf")) + TENANT_COUNTS_S - time.monotonic()
        if left_s > 0 and old is not None and old.holds_as(new):
            self._controller.queue.later(item, left_s)
        else:
            self._controller.add(*item)

    async def pool(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        found = self._caches.pools.items.get(key)
        allocation = self._allocations.pools.get(key.name)
        if found is None or allocation is None:
            return None
        update = reconcile_pool(found, allocation, utc_now())
        if update.waits and (left_s := self._pool_told.get(key, 0.0) + POOL_COUNTS_S - time.monotonic()) > 0:
            return left_s
        if update.status is not None:
            self._pool_told[key] = time.monotonic()
            await self._writer.write_status(ACCELERATOR_POOLS, found, update.status)
            if update.event:
                self._writer.notice(ACCELERATOR_POOLS, found, Reason.FOREIGN_PODS, update.event)
        return None

    async def pod(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        """A pod of another controller that opted in, or one of ours that may have lost its owner."""
        found = self._caches.pods.items.get(key)
        if found is None:
            return None
        if found.kind:
            return await self._reaper.handle(found, utc_now())
        if found.gated and is_claim(found):
            held_back = self._rounds.held_back.get(Item("Pod", key), "")
            waits = {
                Reason.BUDGET_SPENT: self.holds.of_namespace(key.namespace).why,
                Reason.GUARANTEES_OF_OTHERS: held_back,
            }
            for reason, text in waits.items():
                if text:
                    notice = Notice("v1", "Pod", key.namespace, key.name, found.uid, reason, text)
                    self._writer.put_notice(notice)
                    return None
        for decision in decisions:
            if isinstance(decision, Admit):
                node = self._caches.nodes.items.get(Key("", decision.placement.nodes[0]))
                action = admit_pod(found, decision, node)
                if action is not None:
                    await self._writer.carry_out((action,))
            elif isinstance(decision, Wait):
                tenant = self._caches.tenant_of.get(key.namespace, "")
                text = lacking(found, tenant, self._caches.pools.items.values()) or decision.message
                self._writer.put_notice(
                    Notice("v1", "Pod", key.namespace, key.name, found.uid, decision.reason, text)
                )
        return None

    async def batch_job(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        found = self._caches.batch_jobs.items.get(key)
        if found is None:
            return None
        owners = self._caches.tenant_of
        action = release_job(found, key.namespace in owners)
        if action is not None:
            await self._writer.carry_out((action,))
        return None

    async def namespace(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        found = self._caches.namespaces.items.get(key)
        if found is None:
            return None
        owner_of = self._caches.tenant_of
        self._tenancy_seen(key.name, key.name in owner_of)
        ending = key.name not in owner_of and self._runs_in(key.name)
        actions = revoke(
            found,
            owner_of,
            self._caches.bindings.items.values(),
            ()
            if ending
            else self._caches.policies.items.values(),  # as long as our pods run, so does their shield
            self._settings.shielded_by,
            self._caches.quotas.items.values(),
        )
        await self._writer.carry_out(tuple(actions))
        released = release(found, owner_of)
        if released is not None:
            await self._writer.carry_out((released.apply,))
            self._writer.put_notice(released.notice)
            log.info("namespace released", extra={"object": key.name})
        return ENDING_S if ending else None

    def _has_tenant(self, key: Key) -> bool:
        return key.namespace in self._caches.tenant_of

    def _is_ending(self, namespace: str) -> bool:
        seen = self._caches.namespaces.items.get(Key("", namespace))
        return seen is not None and seen.deleting

    def _tenancy_seen(self, namespace: str, has_tenant: bool) -> None:
        """Queues the jobs and services of a namespace that lost its Tenant or got one."""
        if has_tenant == (namespace not in self._without_tenant):
            return
        (self._without_tenant.discard if has_tenant else self._without_tenant.add)(namespace)
        for cache in (self._caches.jobs, self._caches.services):
            for key in cache.items:
                if key.namespace == namespace:
                    self._controller.add(cache.resource.kind, key)

    def _runs_in(self, namespace: str) -> bool:
        """Whether pods of our jobs and services run in the namespace."""
        pods = self._caches.pods.items.values()
        return any(p.kind and p.key.namespace == namespace and not p.ended for p in pods)

    async def after_round(self, snapshot: Snapshot, remarks: PoolRemarks) -> None:
        """Queues the tenants and pools whose allocation changed, and makes pools for devices that no pool covers."""
        old = self._allocations
        self._allocations = await asyncio.to_thread(self._counts.follow, snapshot, remarks)
        for name, now_held in self._allocations.tenants.items():
            self._tenant_changed(Key("", name), old.tenants.get(name), now_held)
        for name, pool_held in self._allocations.pools.items():
            if old.pools.get(name) != pool_held:
                self._controller.add("AcceleratorPool", Key("", name))
        await self.profiles.after_round(snapshot.table, self._counts.classes, self._counts.running_classes)
        if not self._discovers or not self.undiscovered:
            return
        self.undiscovered = False
        found = discover(self._caches.nodes.items.values(), self._caches.pools.items.values())
        try:
            await self._writer.carry_out(tuple(found))
        except (Forbidden, Invalid) as error:
            self._discovers = False
            log.warning("pools are not discovered: %s", error)


def _sooner(one: float | None, other: float | None) -> float | None:
    """The earlier of two times, each of which may be never."""
    return min((each for each in (one, other) if each is not None), default=None)
