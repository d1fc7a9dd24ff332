"""The handler of ModelServices."""

from __future__ import annotations

import time

from busbar.kube.contracts.workload import DRAIN_PATH, SLEEP_PATH, WAKE_PATH
from busbar.kube.informer import Key
from busbar.kube.resources import MODEL_SERVICES
from busbar.kube.types import ModelService
from busbar.operator.decisions import Admit, Decision, Wait
from busbar.operator.handlers.shared import NOT_REFUSED, Shared, sooner
from busbar.operator.metrics import Metrics
from busbar.operator.pods.manifests import KIND_SERVICE
from busbar.operator.pods.silent_nodes import silent_nodes, with_silence
from busbar.operator.pods.volume_claims import claims_of_service, missing
from busbar.operator.queue.controller import Item
from busbar.operator.serving.latency_targets import LatencyTargets
from busbar.operator.serving.metrics import Scaled, ScalingMetrics
from busbar.operator.serving.names import holders as name_holders
from busbar.operator.serving.reach import Reach
from busbar.operator.serving.reconcile import reconcile as reconcile_service
from busbar.operator.serving.replicas import wanted_indexes
from busbar.operator.serving.view import ServiceView, model_uri
from busbar.operator.steady_clock import utc_now
from busbar.scheduler.autoscale import ScalingState


class ModelServices:
    """Reconciles one service at a time; remembers how each was scaled."""

    def __init__(self, shared: Shared, metrics: Metrics) -> None:
        self._shared = shared
        self._scaling: dict[str, ScalingState] = {}  # by uid
        self._scales = ScalingMetrics(metrics.registry)
        rounds, prober = shared.rounds, shared.prober
        self.targets = LatencyTargets(
            shared.caches,
            shared.demand,
            lambda: rounds.outcome,
            self._scales,
            shared.settings.gateway_url != "",
            rounds.lacking_watts,
        )
        self._reach = Reach(prober.ask, prober.url_of, prober.ports, prober.clock)

    async def reconcile(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        service = self._shared.caches.services.items.get(key)
        if service is None:
            known = {s.metadata.uid for s in self._shared.caches.services.items.values()}
            self._scaling = {uid: state for uid, state in self._scaling.items() if uid in known}
            self.targets.keep(known)
            self._scales.gone(key)
            self._shared.refused.pop((KIND_SERVICE, key), None)
            return None
        if any(isinstance(d, Wait) for d in decisions):
            self._shared.refused.pop((KIND_SERVICE, key), None)  # now it waits for another reason
        refused = self._shared.refused.get((KIND_SERVICE, key), NOT_REFUSED)
        if time.monotonic() < refused.again:
            # The plan decides to start it once a second; a quota or a policy need not be tried that often.
            decisions = tuple(d for d in decisions if not isinstance(d, Admit))
        view = await self._view(key, service, refused.why)
        update = reconcile_service(view, decisions)
        if update.scaling is not None:
            self._scaling[service.metadata.uid] = update.scaling
        if update.status is not None:
            self._shared.energy_sent(service.metadata.uid, update.status.usage)
            acts, waits = bool(update.actions), bool(decisions)
            await self._shared.writer.write_status(
                MODEL_SERVICES, service, update.status, acts=acts, waits=waits
            )
        told = service.spec.slo is not None or service.spec.scaling.warm is not None
        scaled = (
            Scaled(update.scaled, view.status.desired_replicas or 0, update.status.desired_replicas or 0)
            if update.scaled is not None and update.status is not None
            else None
        )
        self._scales.show(key, view.plan, scaled, view.pods if told else (), self.targets.clock(), view.day)
        self._scales.show_lost(key, view.pods, view.reach)
        await self._shared.carry_out(KIND_SERVICE, key, update.actions)
        for reason, message in update.notices:
            self._shared.writer.notice(MODEL_SERVICES, service, reason, message)
        return sooner(update.again_s, self._shared.given_up_s(view))

    async def _view(self, key: Key, service: ModelService, refused: str) -> ServiceView:
        """All that the reconcile of a service depends on; `refused`: why its pods were, the last time."""
        own = self._shared.caches.owned_pods(KIND_SERVICE, service)
        silent = silent_nodes(own, self._shared.caches.nodes.items)
        own = with_silence(own, silent)
        model = model_uri(service, self._shared.caches.jobs.items.values())
        plan = await self.targets.plan(key, service, own, model.made_by)
        demand = self._shared.demand.of(key) if self._shared.settings.gateway_url else None
        return ServiceView(
            service=service,
            pods=own,
            now=utc_now(),
            settings=self._shared.paced(),
            rendering=self._shared.rendering,
            model=model,
            pools={k.name: p for k, p in self._shared.caches.pools.items.items()},
            demand=demand,
            readings=self._shared.prober.serving,
            held_pods=self._shared.power.held.uids,
            asked=self._shared.prober.asked.get(DRAIN_PATH, {}),
            changing=frozenset(
                uid
                for path in (SLEEP_PATH, WAKE_PATH)
                for uid, answered in self._shared.prober.asked.get(path, {}).items()
                if not answered
            ),
            scaling=self._scaling.get(service.metadata.uid),
            plan=plan,
            warmth=self.targets.warmth(service, own, plan),
            day=self.targets.day(key, service),
            watts=self._shared.energy.service_watts(service.metadata.uid),
            reach=self._reach.look(own, (demand.replicas or ()) if demand is not None else (), utc_now()),
            refused=refused,
            missing_claims=missing(
                key.namespace, claims_of_service(service, model.uri), self._shared.caches.volume_claims.items
            ),
            silent=silent,
            held_back=self._shared.rounds.held_back.get(Item("ModelService", key), ""),
            has_tenant=self._shared.has_tenant(key),
            tenant=self._shared.caches.tenant_of.get(key.namespace, ""),
            energy_joules=self._shared.energy_total(
                service.metadata.uid, service.status.usage if service.status is not None else None
            ),
            budget=self._shared.holds.of_namespace(key.namespace),
            holders=name_holders(service, wanted_indexes(service, own), own, self._shared.caches.pods.items),
            lost=self._shared.caches.charged_to(service.metadata.uid),
        )
