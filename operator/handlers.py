"""From a key to a view, through the pure reconcile, to the writer: one short handler per kind.

This is the only place that knows both the caches and the reconciles; it holds no logic of its own beyond
"gather, decide, write".
"""

from __future__ import annotations

import logging
import time

from busbar.kube.contracts.workload import CHECKPOINT_PATH, DRAIN_PATH
from busbar.kube.errors import BadRequest, Forbidden, Invalid
from busbar.kube.informer import Key
from busbar.kube.resources import ACCELERATOR_POOLS, MODEL_SERVICES, TENANTS, TRAINING_JOBS
from busbar.operator import modelservice, pool, tenant, trainingjob
from busbar.operator.actions import Action, Create
from busbar.operator.controller import Controller, utc_now
from busbar.operator.demand import DemandReader
from busbar.operator.events import Notice
from busbar.operator.holdings import Holdings, TenantHolding, holdings
from busbar.operator.job_view import JobView
from busbar.operator.optin import admit_pod, release_job
from busbar.operator.orders import Admit, Order, Wait
from busbar.operator.podspec import KIND_SERVICE, KIND_TRAINING, Rendering
from busbar.operator.prober import Prober
from busbar.operator.profile_keeper import ProfileKeeper
from busbar.operator.rounds import Rounds
from busbar.operator.settings import Settings
from busbar.operator.table import rates_of
from busbar.operator.world import World, tenant_of_namespace
from busbar.operator.writer import Writer
from busbar.scheduler import Snapshot
from busbar.scheduler.autoscale import ScalingState

log = logging.getLogger(__name__)


class Handlers:
    """Registers itself with the controller and the rounds."""

    def __init__(
        self,
        world: World,
        writer: Writer,
        controller: Controller,
        rounds: Rounds,
        prober: Prober,
        demand: DemandReader,
        settings: Settings,
    ) -> None:
        self._world, self._writer, self._controller = world, writer, controller
        self._rounds, self._prober, self._demand = rounds, prober, demand
        self._settings = settings
        self._rendering = Rendering(
            settings.workloads_image, settings.image_pull_policy, settings.workload_key
        )
        self._holdings = Holdings()
        self._discovers = True
        self._scaling: dict[str, ScalingState] = {}  # by uid
        self._refused: dict[tuple[str, Key], str] = {}  # why pods of (kind, key) were not taken
        self._refused_until: dict[Key, float] = {}  # services: when the next is sent
        controller.handles("TrainingJob", self.training_job)
        controller.handles("ModelService", self.model_service)
        controller.handles("Tenant", self.tenant)
        controller.handles("AcceleratorPool", self.pool)
        controller.handles("Pod", self.pod)
        controller.handles("Job", self.batch_job)
        controller.handles("Namespace", self.namespace)
        self.profiles = ProfileKeeper(world, writer, controller, settings)
        rounds.after = self.after_round

    async def training_job(self, key: Key, orders: tuple[Order, ...]) -> float | None:
        job = self._world.jobs.items.get(key)
        if job is None:
            self._refused.pop((KIND_TRAINING, key), None)
            return None
        order = orders[0] if orders else None
        status = job.status
        name = order.placement.pool if isinstance(order, Admit) else ""
        if not name and status is not None and status.admission is not None:
            name = status.admission.pool
        view = JobView(
            job=job,
            pods=self._world.owned_pods(KIND_TRAINING, job),
            now=utc_now(),
            settings=self._settings,
            rendering=self._rendering,
            pool=self._world.pools.items.get(Key("", name)),
            readings=self._prober.training,
            refusals=self._prober.refusals,
            asked=self._prober.asked.get(CHECKPOINT_PATH, {}),
            counted=self.profiles.counted(job),
            slack=self.profiles.slack(job),
            refused=self._refused.get((KIND_TRAINING, key), ""),
        )
        decision = trainingjob.reconcile(view, order)
        if decision.status is not None:
            await self._writer.write_status(TRAINING_JOBS, job, decision.status)
            if decision.status.admission is None:
                self._refused.pop((KIND_TRAINING, key), None)
        await self._carry_out(KIND_TRAINING, key, decision.actions)
        if decision.offer:
            self._rounds.wake()
        return decision.again_s

    async def model_service(self, key: Key, orders: tuple[Order, ...]) -> float | None:
        service = self._world.services.items.get(key)
        if service is None:
            known = {s.metadata.uid for s in self._world.services.items.values()}
            self._scaling = {uid: state for uid, state in self._scaling.items() if uid in known}
            self._refused.pop((KIND_SERVICE, key), None)
            self._refused_until.pop(key, None)
            return None
        if any(isinstance(o, Wait) for o in orders):
            self._refused.pop((KIND_SERVICE, key), None)  # now it waits for something else
        refused = self._refused.get((KIND_SERVICE, key), "")
        if refused and time.monotonic() < self._refused_until.get(key, 0.0):
            # The plan says "start" once a second; a quota or a policy is not asked that often.
            orders = tuple(o for o in orders if not isinstance(o, Admit))
        view = modelservice.ServiceView(
            service=service,
            pods=self._world.owned_pods(KIND_SERVICE, service),
            now=utc_now(),
            settings=self._settings,
            rendering=self._rendering,
            model=modelservice.model_uri(service, self._world.jobs.items.values()),
            pools={k.name: p for k, p in self._world.pools.items.items()},
            demand=self._demand.of(key) if self._settings.gateway_url else None,
            readings=self._prober.serving,
            asked=self._prober.asked.get(DRAIN_PATH, {}),
            scaling=self._scaling.get(service.metadata.uid),
            refused=refused,
        )
        decision = modelservice.reconcile(view, orders)
        if decision.scaling is not None:
            self._scaling[service.metadata.uid] = decision.scaling
        if decision.status is not None:
            await self._writer.write_status(MODEL_SERVICES, service, decision.status)
        await self._carry_out(KIND_SERVICE, key, decision.actions)
        return decision.again_s

    async def _carry_out(self, kind: str, key: Key, actions: tuple[Action, ...]) -> None:
        """Remembers why pods were refused, so that the next look can say it where a person reads it."""
        try:
            await self._writer.carry_out(actions)
        except (Forbidden, Invalid, BadRequest) as error:
            if any(isinstance(a, Create) for a in actions):
                self._refused[kind, key] = error.message
                if kind == KIND_SERVICE:
                    self._refused_until[key] = time.monotonic() + self._settings.explain_period_s
            raise
        if any(isinstance(a, Create) for a in actions):
            self._refused.pop((kind, key), None)

    async def tenant(self, key: Key, orders: tuple[Order, ...]) -> float | None:
        found = self._world.tenants.items.get(key)
        if found is None:
            return None
        view = tenant.TenantView(
            tenant=found,
            owner_of=tenant_of_namespace(self._world.tenants.items.values()),
            namespaces={k.name: n for k, n in self._world.namespaces.items.items()},
            bindings=tuple(self._world.bindings.items.values()),
            now=utc_now(),
            policies=tuple(self._world.policies.items.values()),
            platform=self._settings.shielded_by,
            holding=self._holdings.tenants.get(key.name, TenantHolding()),
            free_by_type=self._holdings.free_by_type,
            pools=tuple(self._world.pools.items.values()),
            rates=rates_of(self._world.pools.items.values()),
            usage_period_s=self._settings.usage_period_s,
            half_life_s=self._settings.usage_half_life_s,
        )
        decision = tenant.reconcile(view)
        await self._writer.carry_out(decision.actions)
        if decision.status is not None:
            await self._writer.write_status(TENANTS, found, decision.status)
        return decision.again_s

    async def pool(self, key: Key, orders: tuple[Order, ...]) -> float | None:
        found = self._world.pools.items.get(key)
        holding = self._holdings.pools.get(key.name)
        if found is None or holding is None:
            return None
        decision = pool.reconcile(found, holding, utc_now())
        if decision.status is not None:
            await self._writer.write_status(ACCELERATOR_POOLS, found, decision.status)
        return None

    async def pod(self, key: Key, orders: tuple[Order, ...]) -> float | None:
        """A pod of another controller that opted in."""
        found = self._world.pods.items.get(key)
        if found is None:
            return None
        for order in orders:
            if isinstance(order, Admit):
                node = self._world.nodes.items.get(Key("", order.placement.nodes[0]))
                action = admit_pod(found, order, node)
                if action is not None:
                    await self._writer.carry_out((action,))
            elif isinstance(order, Wait):
                self._writer.put_notice(
                    Notice("v1", "Pod", key.namespace, key.name, found.uid, order.reason, order.message)
                )
        return None

    async def batch_job(self, key: Key, orders: tuple[Order, ...]) -> float | None:
        found = self._world.batch_jobs.items.get(key)
        if found is None:
            return None
        owners = tenant_of_namespace(self._world.tenants.items.values())
        action = release_job(found, key.namespace in owners)
        if action is not None:
            await self._writer.carry_out((action,))
        return None

    async def namespace(self, key: Key, orders: tuple[Order, ...]) -> float | None:
        found = self._world.namespaces.items.get(key)
        if found is None:
            return None
        owner_of = tenant_of_namespace(self._world.tenants.items.values())
        actions = tenant.revoke(
            found,
            owner_of,
            self._world.bindings.items.values(),
            self._world.policies.items.values(),
            self._settings.shielded_by,
        )
        await self._writer.carry_out(tuple(actions))
        action = tenant.disown(found, owner_of)
        if action is not None:
            await self._writer.carry_out((action,))
        return None

    async def after_round(self, snapshot: Snapshot) -> None:
        """What a round saw of tenants and pools goes into their statuses; uncovered devices get a pool."""
        old, self._holdings = self._holdings, holdings(snapshot)
        for name, now_held in self._holdings.tenants.items():
            if old.tenants.get(name) != now_held:
                self._controller.add("Tenant", Key("", name))
        for name, pool_held in self._holdings.pools.items():
            if old.pools.get(name) != pool_held:
                self._controller.add("AcceleratorPool", Key("", name))
        await self.profiles.after_round(snapshot)
        if not self._discovers:
            return
        found = pool.discover(self._world.nodes.items.values(), self._world.pools.items.values())
        try:
            await self._writer.carry_out(tuple(found))
        except (Forbidden, Invalid) as error:
            self._discovers = False
            log.warning("pools are not discovered: %s", error)
