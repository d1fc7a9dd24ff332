"""What the handlers of several kinds use together: the operator's parts, why pods were refused, and the pace of writes."""

from __future__ import annotations

import time
from typing import NamedTuple

from busbar.kube.errors import BadRequest, Forbidden, Invalid
from busbar.kube.informer import Key
from busbar.kube.types.tenant import TenantUsage
from busbar.kube.types.training_status import Usage
from busbar.operator.accounting.allocations import (
    Allocations,
)
from busbar.operator.energy.ledger import Ledger
from busbar.operator.metrics import Metrics
from busbar.operator.pods.engine_image import EngineImage
from busbar.operator.pods.manifests import Rendering
from busbar.operator.pods.prober import Prober
from busbar.operator.pods.silent_nodes import next_given_up_s
from busbar.operator.power.keeper import PowerKeeper
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.profiles.keeper import ProfileKeeper
from busbar.operator.queue.controller import Controller
from busbar.operator.scheduling.rounds import Rounds
from busbar.operator.serving.demand import DemandReader
from busbar.operator.serving.view import ServiceView
from busbar.operator.settings import Settings
from busbar.operator.tenancy.budget_holds import BudgetHolds
from busbar.operator.training.view import JobView
from busbar.operator.watch.caches import Caches
from busbar.operator.write.actions import Action, Create
from busbar.operator.write.pace import paced
from busbar.operator.write.writer import Writer


class Refusal(NamedTuple):
    """Why the API server refused pods, and from when on (by `time.monotonic`) it is worth another try."""

    why: str
    again: float


NOT_REFUSED = Refusal("", 0.0)


class Shared:
    """The parts of the operator that handlers reach; each kind's own memory is with its handler."""

    def __init__(
        self,
        caches: Caches,
        writer: Writer,
        controller: Controller,
        rounds: Rounds,
        prober: Prober,
        demand: DemandReader,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self.caches, self.writer, self.controller = caches, writer, controller
        self.rounds, self.prober, self.demand = rounds, prober, demand
        self.settings = settings
        self.rendering = Rendering(
            settings.workloads_image,
            settings.image_pull_policy,
            settings.workload_key,
            settings.former_workload_key,
        )
        self.allocations = Allocations()
        """What tenants and pools held after the last round."""
        self.refused: dict[tuple[str, Key], Refusal] = {}
        """Of (kind, key) the pods that the API server refused."""
        self.holds = BudgetHolds(caches, controller, rounds.wake)
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
            engine=EngineImage(self.rendering.workloads_image, settings.workloads_digests),
            wake=rounds.wake,
        )
        self._pace = 0, settings

    def paced(self) -> Settings:
        """The settings for jobs and services, as their number allows."""
        running = sum(tenant.running for tenant in self.allocations.tenants.values())
        if running != self._pace[0]:
            self._pace = running, paced(self.settings, running)
        return self._pace[1]

    def energy_total(self, uid: str, usage: Usage | TenantUsage | None) -> float | None:
        """The new total of an object that has used so much."""
        return self.energy.accounts.total(uid, usage.energy_joules if usage is not None else None)

    def energy_sent(self, uid: str, usage: Usage | TenantUsage | None) -> None:
        """To be called before a status with this use is written."""
        self.energy.accounts.sent(uid, usage.energy_joules if usage is not None else None)

    def has_tenant(self, key: Key) -> bool:
        """Whether the object's namespace has a Tenant."""
        return key.namespace in self.caches.tenant_of

    def is_ending(self, namespace: str) -> bool:
        """Whether the namespace is being deleted."""
        seen = self.caches.namespaces.items.get(Key("", namespace))
        return seen is not None and seen.deleting

    def given_up_s(self, view: JobView | ServiceView) -> float | None:
        """In how many seconds pods of the object are given up with their nodes."""
        return next_given_up_s(view.silent, view.now, self.settings.node_lost_s)

    async def carry_out(self, kind: str, key: Key, actions: tuple[Action, ...]) -> None:
        """Carries out what a reconcile of (kind, key) wants; remembers a refusal, which the next one writes into the status."""
        try:
            await self.writer.carry_out(actions)
        except (Forbidden, Invalid, BadRequest) as error:
            if any(isinstance(a, Create) for a in actions):
                again = time.monotonic() + self.settings.refused_again_s
                self.refused[kind, key] = Refusal(error.message, again)
            raise
        if any(isinstance(a, Create) for a in actions):
            self.refused.pop((kind, key), None)


def sooner(one: float | None, other: float | None) -> float | None:
    """The earlier of two times, each of which may be never."""
    return min((each for each in (one, other) if each is not None), default=None)
