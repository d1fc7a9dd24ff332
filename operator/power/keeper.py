"""Reconciles PowerDomains: keeps the membership of the moment, and queues the domains when it may have changed."""

from __future__ import annotations

from busbar.kube.informer import Key
from busbar.kube.resources import POWER_DOMAINS
from busbar.kube.types import PowerDomain
from busbar.operator.decisions import Decision
from busbar.operator.power.membership import Membership, membership
from busbar.operator.power.reconcile import reconcile
from busbar.operator.queue.controller import Controller, utc_now
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.projections import Node
from busbar.operator.write.writer import Writer


class PowerKeeper:
    """Registers itself with the controller."""

    def __init__(self, caches: Caches, writer: Writer, controller: Controller) -> None:
        self._caches, self._writer, self._controller = caches, writer, controller
        self._membership: Membership | None = None
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
        if old is None or new is None or old.metadata.generation != new.metadata.generation:
            self._changed()

    async def handle(self, key: Key, decisions: tuple[Decision, ...]) -> float | None:
        domain = self._caches.power_domains.items.get(key)
        if domain is None:
            return None
        status = reconcile(domain, self.membership, utc_now())
        if status is not None:
            await self._writer.write_status(POWER_DOMAINS, domain, status)
        return None

    def _changed(self) -> None:
        self._membership = None
        for key in self._caches.power_domains.items:
            self._controller.add(POWER_DOMAINS.kind, key)
