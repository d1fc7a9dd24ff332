"""PowerDomains as the scheduler sees them: what each may carry, what is not the snapshot's on it, and each node's.

Nothing is made of domains that only observe: without one that limits, a snapshot has none. A node hangs on the domain
that `membership` says; where that one is at fault (a cycle, an unknown parent, too large), on the nearest above it that
is not, or on none. Of a node that two domains select equally the first by name counts.

Reserved on a domain, for each node that hangs on it itself: `hostWatts`, and the nameplates of the accelerators that
pods of no job hold; for a node of no pool `unreportedNodeWatts`, if that is more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from busbar.kube.types import AcceleratorPool, PowerDomain
from busbar.kube.types.power_domain import Policy, PowerEnforcement
from busbar.operator.power.membership import Membership, membership
from busbar.operator.watch.projections import Node
from busbar.scheduler import Node as SNode
from busbar.scheduler import PowerDomain as SDomain
from busbar.scheduler.fit.accelerators import accelerator
from busbar.scheduler.power import DomainFault, PowerPolicy


class PowerDomains:
    """Keeps the scheduler's domains and the nodes with theirs in step; what did not change stays the same object."""

    def __init__(self) -> None:
        self._given: tuple[SNode, ...] | None = None
        self._made: tuple[tuple[SDomain, ...], tuple[SNode, ...]] = (), ()
        self._hung: dict[str, tuple[SNode, SNode]] = {}
        """By node: as it was given, and with its domain."""

    def follow(
        self,
        domains: tuple[PowerDomain, ...],
        seen: Mapping[str, Node],
        nodes: tuple[SNode, ...],
        pools: tuple[AcceleratorPool, ...],
        telling: frozenset[str] = frozenset(),
        *,
        changed: bool,
    ) -> tuple[tuple[SDomain, ...], tuple[SNode, ...]]:
        """The domains, and the nodes of pools with the domain that each hangs on.

        Args:
            seen: all nodes, also those of no pool.
            telling: nodes of which it is known which pods hold which board.
            changed: whether a domain, a pool, a node of `seen` or what is told is another one than the last time.
        """
        if all(domain.spec.policy is Policy.OBSERVE for domain in domains):
            self._hung.clear()
            self._given, self._made = None, ((), nodes)
            return self._made
        if changed or self._given is not nodes:
            self._given = nodes
            self._make(domains, seen, nodes, pools, telling)
        return self._made

    def _make(
        self,
        domains: tuple[PowerDomain, ...],
        seen: Mapping[str, Node],
        nodes: tuple[SNode, ...],
        pools: Iterable[AcceleratorPool],
        telling: frozenset[str],
    ) -> None:
        found = membership(domains, seen.values())
        sound = {
            name
            for name in found.domains
            if name not in found.faults or found.faults[name].reason == DomainFault.NODE_TWICE
        }
        by_name, by_pool = {node.name: node for node in nodes}, {pool.metadata.name: pool for pool in pools}
        leaf: dict[str, str] = {}
        reserved = dict.fromkeys(sorted(sound), 0.0)
        for name, feeds in sorted(found.feeds.items()):
            on = next((each for each in (feeds[0], *found.above[feeds[0]]) if each in sound), None)
            if on is not None:
                leaf[name] = on
                reserved[on] += _not_ours_w(found, feeds[0], seen[name], by_name.get(name), by_pool)
        closed = {domain.metadata.name for domain in domains if is_closed(domain)}
        made = tuple(
            SDomain(
                name,
                found.domains[name].usable_w,
                found.domains[name].parent or "",
                watts,
                found.domains[name].policy is not PowerPolicy.OBSERVE,
                closed=name in closed,
            )
            for name, watts in reserved.items()
        )
        holding = {domain.metadata.name for domain in domains if holds_boards(domain)}
        hung = {
            node.name: self._with_domain(
                node,
                leaf.get(node.name, ""),
                holding.issuperset(found.feeds.get(node.name, ("",))),
                node.name in telling,
            )
            for node in nodes
        }
        self._hung = {node.name: (node, hung[node.name]) for node in nodes}
        self._made = self._made[0] if made == self._made[0] else made, tuple(hung.values())

    def _with_domain(self, node: SNode, domain: str, holds: bool, tells: bool) -> SNode:
        known = self._hung.get(node.name)
        hung = replace(node, domain=domain, limits_boards=holds, tells_boards=tells) if domain else node
        return known[1] if known is not None and known[0] is node and known[1] == hung else hung


def holds_boards(domain: PowerDomain) -> bool:
    """Whether agents hold the boards of all nodes that hang on the domain to their leases, by its last status."""
    limited = domain.status is not None and domain.status.boards_limited is True
    return limited and domain.spec.policy is not Policy.OBSERVE


def is_closed(domain: PowerDomain) -> bool:
    """Whether nothing may start on the domain: work was stopped there, or is about to be, for its budget."""
    return (
        domain.spec.enforcement is PowerEnforcement.PREEMPT
        and domain.status is not None
        and domain.status.short_watts is not None
    )


def _not_ours_w(
    found: Membership, feed: str, seen: Node, node: SNode | None, pools: Mapping[str, AcceleratorPool]
) -> float:
    """What a node may draw at most beside the accelerators that the snapshot counts."""
    host_w = found.host_w[feed] or 0.0
    if node is None:
        return max(host_w, found.unreported_w[feed] or 0.0)
    spec = pools[node.pool].spec
    known = accelerator(spec.accelerator)
    if spec.is_cpu or known is None:
        return host_w
    others = max(0.0, seen.device(spec.resource_name) - node.capacity.accelerators_m / 1000)
    return host_w + others * known.watts
