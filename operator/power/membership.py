"""Which nodes hang on which feed, and what is wrong with the tree.

A node hangs on one domain: of those that select it, one below another comes first, then the one with the most labels.
Where two are left, both are at fault. The rules of the tree are the scheduler's (`busbar.scheduler.power.domain_tree`);
here each domain is judged with the chain of domains above it, so that one wrong object does not blind the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from busbar.kube.types import PowerDomain
from busbar.kube.types.power_domain import PowerEnforcement
from busbar.operator.watch.projections import Node
from busbar.scheduler.errors import DomainError
from busbar.scheduler.power import Domain, DomainFault, PowerPolicy, domain_tree

DEFAULT_RIDE_THROUGH_S = 0.1


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a domain is not ready."""

    reason: str
    message: str


@dataclass(frozen=True)
class Membership:
    """The domains and nodes of one moment."""

    domains: Mapping[str, Domain]
    """As the scheduler knows them, without their nodes."""
    above: Mapping[str, tuple[str, ...]]
    """Domain to the domains above it, nearest first."""
    feeds: Mapping[str, tuple[str, ...]]
    """Node to the domains on which it hangs: one, or several that are at fault. Other nodes are left out."""
    members: Mapping[str, tuple[str, ...]]
    """Domain to the nodes on it and on all domains below it, each once, in name order."""
    faults: Mapping[str, Fault]
    """Of domains that are not ready for the tree's sake."""
    host_w: Mapping[str, float | None]
    """Domain to what one of its nodes draws at most beside its boards."""
    unreported_w: Mapping[str, float | None]
    """Domain to what one of its nodes counts with before it has reported; None: nobody knows."""
    limited: frozenset[str] = frozenset()
    """Domains with a node, on them or below, that a policy limits."""
    preempting: frozenset[str] = frozenset()
    """Domains without fault for whose budget running work may be stopped."""

    @property
    def sound(self) -> dict[str, Domain]:
        """The domains without fault, each below the nearest one above it that has none either."""
        return {
            name: replace(
                domain, parent=next((each for each in self.above[name] if each not in self.faults), None)
            )
            for name, domain in self.domains.items()
            if name not in self.faults
        }

    def is_limited(self, node: str) -> bool:
        """Whether a policy limits the node."""
        return any(self.domains[feed].policy is not PowerPolicy.OBSERVE for feed in self.feeds.get(node, ()))

    def lets_bursts_pass(self, node: str) -> bool:
        """Whether the node's lease bounds its mean draw only."""
        return any(
            self.domains[feed].policy is PowerPolicy.LEASE_WITH_BURST for feed in self.feeds.get(node, ())
        )


def membership(domains: Iterable[PowerDomain], nodes: Iterable[Node]) -> Membership:
    """Decides it anew from the objects.

    A node that two domains select equally is a member of both: no domain's draw is understated.
    """
    objects = {domain.metadata.name: domain for domain in domains}
    known = {name: _scheduler_domain(domain) for name, domain in sorted(objects.items())}
    selectors = {
        name: frozenset(domain.spec.node_selector.items())
        for name, domain in objects.items()
        if domain.spec.node_selector
    }
    above = {name: _above(name, known) for name in known}
    feeds: dict[str, tuple[str, ...]] = {}
    members: dict[str, set[str]] = {name: set() for name in known}
    limited: set[str] = set()
    for node in nodes:
        on = _feeds(frozenset(node.labels), selectors, above)
        if not on:
            continue
        feeds[node.name] = on
        for feed in on:
            for name in (feed, *above[feed]):
                members[name].add(node.name)
            if known[feed].policy is not PowerPolicy.OBSERVE:
                limited.update((feed, *above[feed]))
    faults = {**_contested(feeds), **_faults(known, above)}
    return Membership(
        domains=known,
        above=above,
        feeds=feeds,
        members={name: tuple(sorted(found)) for name, found in members.items()},
        faults=faults,
        host_w={name: domain.spec.host_watts for name, domain in objects.items()},
        unreported_w={name: domain.spec.unreported_node_watts for name, domain in objects.items()},
        limited=frozenset(limited),
        preempting=frozenset(
            name
            for name, domain in objects.items()
            if domain.spec.enforcement is PowerEnforcement.PREEMPT and name not in faults
        ),
    )


def _scheduler_domain(domain: PowerDomain) -> Domain:
    spec = domain.spec
    return Domain(
        domain.metadata.name,
        spec.budget_watts,
        spec.parent,
        PowerPolicy(spec.policy.value),
        margin_percent=spec.margin_percent,
        ride_through_s=DEFAULT_RIDE_THROUGH_S
        if spec.ride_through_seconds is None
        else spec.ride_through_seconds,
    )


def _above(name: str, known: Mapping[str, Domain]) -> tuple[str, ...]:
    """The domains above this one, nearest first, each once; it ends at the root, at an unknown one or at a cycle."""
    chain = [name]
    while (parent := known[chain[-1]].parent) is not None and parent in known and parent not in chain:
        chain.append(parent)
    return tuple(chain[1:])


def _feeds(
    labels: frozenset[tuple[str, str]],
    selectors: Mapping[str, frozenset[tuple[str, str]]],
    above: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    selecting = {name: len(wanted) for name, wanted in selectors.items() if wanted <= labels}
    lowest = [
        name for name in selecting if not any(name in above[other] for other in selecting if other != name)
    ] or list(selecting)  # all of them above each other: a cycle
    most = max((selecting[name] for name in lowest), default=0)
    return tuple(sorted(name for name in lowest if selecting[name] == most))


def _contested(feeds: Mapping[str, tuple[str, ...]]) -> dict[str, Fault]:
    nodes: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for node, on in sorted(feeds.items()):
        if len(on) > 1:
            for feed in on:
                nodes.setdefault(feed, []).append((node, on))
    found = {}
    for feed, contested in nodes.items():
        node, on = contested[0]
        more = f" and {len(contested) - 1} more" if len(contested) > 1 else ""
        found[feed] = Fault(
            DomainFault.NODE_TWICE,
            f"Node {node}{more} is selected by {', '.join(on)} with equally many labels; narrow a nodeSelector.",
        )
    return found


def _faults(known: Mapping[str, Domain], above: Mapping[str, tuple[str, ...]]) -> dict[str, Fault]:
    found = {}
    for name in known:
        try:
            domain_tree(tuple(known[each] for each in (name, *above[name])))
        except DomainError as error:
            text = str(error)
            found[name] = Fault(error.reason, f"{text[:1].upper()}{text[1:]}.")
    return found
