"""Power domains: a tree of feeds, each with a budget.

A node is listed by exactly one domain and counts in that domain and in all above it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from ..errors import DomainError

MAX_DEPTH = 5
MAX_BUDGET_W = 100e6
MAX_MARGIN_PERCENT = 50.0
MAX_RIDE_THROUGH_S = 10.0


class DomainFault(StrEnum):
    """Why domains were refused; the values never change."""

    DUPLICATE = "DuplicateDomain"
    BUDGET = "InvalidBudget"
    MARGIN = "InvalidMargin"
    RIDE_THROUGH = "InvalidRideThrough"
    UNKNOWN_PARENT = "UnknownParent"
    CYCLE = "Cycle"
    CHILD_ABOVE_PARENT = "ChildAboveParent"
    TOO_DEEP = "TooDeep"
    NODE_TWICE = "NodeInTwoDomains"


class PowerPolicy(StrEnum):
    """How the nodes that a domain lists get their leases."""

    OBSERVE = "Observe"
    """No leases: the nodes count with all they can draw, also in the domains above."""
    STATIC = "Static"
    """Equal leases, whatever runs."""
    LEASE = "Lease"
    """Watts go where they save the most work; the boards' limits alone keep a node within its lease."""
    LEASE_WITH_BURST = "LeaseWithBurst"
    """As Lease, but the lease bounds the mean: short peaks pass through a token bucket on the node."""


@dataclass(frozen=True, slots=True)
class Domain:
    """One feed and the nodes that hang directly on it."""

    name: str
    budget_w: float
    parent: str | None = None
    policy: PowerPolicy = PowerPolicy.LEASE
    nodes: tuple[str, ...] = ()
    margin_percent: float = 1.0
    """Of the budget, never leased: for what the meter and the host's model do not see."""
    ride_through_s: float = 0.1
    """LeaseWithBurst: depth of the token bucket. So many seconds of its lease may a node draw in advance."""

    @property
    def usable_w(self) -> float:
        return self.budget_w * (1 - self.margin_percent / 100)


@dataclass(frozen=True)
class DomainTree:
    """Validated domains; build it with `domain_tree`."""

    domains: Mapping[str, Domain]
    order: tuple[str, ...]
    """Children before their parents."""

    @cached_property
    def leaf_of(self) -> Mapping[str, str]:
        """The domain that lists each node."""
        return {node: domain.name for domain in self.domains.values() for node in domain.nodes}

    @cached_property
    def members(self) -> Mapping[str, tuple[str, ...]]:
        """All nodes under each domain, its children's included, in name order."""
        found: dict[str, list[str]] = {name: list(self.domains[name].nodes) for name in self.order}
        for name in self.order:
            parent = self.domains[name].parent
            if parent is not None:
                found[parent].extend(found[name])
        return {name: tuple(sorted(nodes)) for name, nodes in found.items()}


def domain_tree(domains: tuple[Domain, ...]) -> DomainTree:
    """Validate the domains.

    Raises:
        DomainError: they are not a tree of at most five levels in which no child is larger than its parent, a number
            is out of range, or a node is listed twice; `reason` is a value of `DomainFault`.
    """
    by_name: dict[str, Domain] = {}
    for domain in domains:
        if domain.name in by_name:
            raise DomainError(DomainFault.DUPLICATE, f"two domains are named {domain.name!r}")
        _check_numbers(domain)
        by_name[domain.name] = domain
    depth = {name: _depth(name, by_name) for name in by_name}
    for domain in domains:
        if domain.parent is not None and domain.budget_w > by_name[domain.parent].budget_w:
            raise DomainError(
                DomainFault.CHILD_ABOVE_PARENT,
                f"domain {domain.name!r}: {domain.budget_w:g} W is more than the {by_name[domain.parent].budget_w:g} W "
                f"of its parent {domain.parent!r}",
            )
    _check_nodes(domains)
    return DomainTree(by_name, tuple(sorted(by_name, key=lambda name: (-depth[name], name))))


def _check_numbers(domain: Domain) -> None:
    rules = (
        (
            DomainFault.BUDGET,
            0 < domain.budget_w <= MAX_BUDGET_W,
            f"the budget must be above 0 and at most {MAX_BUDGET_W:g} W, not {domain.budget_w:g} W",
        ),
        (
            DomainFault.MARGIN,
            0 <= domain.margin_percent <= MAX_MARGIN_PERCENT,
            f"the margin must be 0 to {MAX_MARGIN_PERCENT:g} %, not {domain.margin_percent:g} %",
        ),
        (
            DomainFault.RIDE_THROUGH,
            0 < domain.ride_through_s <= MAX_RIDE_THROUGH_S,
            f"ride-through must be above 0 and at most {MAX_RIDE_THROUGH_S:g} s, not {domain.ride_through_s:g} s",
        ),
    )
    for fault, holds, sentence in rules:  # NaN fails every comparison
        if not holds:
            raise DomainError(fault, f"domain {domain.name!r}: {sentence}")
    assert math.isfinite(domain.usable_w)


def _depth(name: str, by_name: Mapping[str, Domain]) -> int:
    seen = [name]
    while (parent := by_name[seen[-1]].parent) is not None:
        if parent not in by_name:
            raise DomainError(
                DomainFault.UNKNOWN_PARENT,
                f"domain {seen[-1]!r}: there is no domain {parent!r} to be its parent",
            )
        if parent in seen:
            raise DomainError(
                DomainFault.CYCLE, f"domain {name!r}: the chain of parents returns to {parent!r}"
            )
        seen.append(parent)
    if len(seen) > MAX_DEPTH:
        raise DomainError(
            DomainFault.TOO_DEEP, f"domain {name!r} is on level {len(seen)}; at most {MAX_DEPTH} are allowed"
        )
    return len(seen)


def _check_nodes(domains: tuple[Domain, ...]) -> None:
    owner: dict[str, str] = {}
    for domain in domains:
        for node in domain.nodes:
            if node in owner:
                raise DomainError(
                    DomainFault.NODE_TWICE,
                    f"node {node!r} is listed by {owner[node]!r} and by {domain.name!r}",
                )
            owner[node] = domain.name
