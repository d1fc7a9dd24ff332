"""Who is entitled to how much: weighted max-min in work units, with guarantees, ceilings and hierarchy.

A share is counted in exchange-rate units (accelerators x rate). Tenants may only use some types, and request
only so much, so fairness is a flow problem:

    source -> organisation -> tenant -> the types its jobs may use -> sink

All flows are raised in proportion to their weights until some set of tenants is stuck (a minimum cut); those
are frozen at what they have, the others go on. Guarantees are a floor, ceilings and demand a cap. There are
three levels: first between organisations, then between the tenants of each, then between the users of a
tenant, who share what the tenant is entitled to and never get more, while all other tenants keep theirs. If
all jobs may use the same types there is a single resource, and the level is found by walking along the levels
at which a tenant is capped (`_fill_common`): the same result as the flow, without one.

Nothing here depends on what runs where or on past use, only on demand (running and waiting together), weights
and quotas. So an entitlement does not change when a plan is carried out, and more weight or quota never
lowers it. Past use decides between equal claims, in `quota.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .max_flow import EPS, Flow

Demand = tuple[tuple[frozenset[str], float], ...]
"""Units wanted by the jobs that may use exactly this set of types."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one tenant requests of the cluster, in units; or one user of it (`user_shares`)."""

    name: str
    organisation: str
    weight: float
    guaranteed: float
    limit: float
    """Ceiling over all types (infinite if none)."""
    demand: Demand
    type_limit: Mapping[str, float] = field(default_factory=dict)
    """Ceiling per type."""
    owner: str = ""
    """The tenant whose ceilings per type these are, if several claims share them (its users)."""

    @property
    def wanted(self) -> float:
        return min(self.limit, sum(amount for _, amount in self.demand))


def entitlements(claims: Iterable[Claim], capacity: Mapping[str, float]) -> dict[str, float]:
    """Units each tenant is entitled to, given the capacity in units per type."""
    ordered = sorted(claims, key=lambda claim: claim.name)
    groups: dict[str, list[Claim]] = {}
    for claim in ordered:
        groups.setdefault(claim.organisation or "\0" + claim.name, []).append(claim)
    whole = [_Group.of(name, members) for name, members in groups.items()]
    common = _common_capacity(ordered, capacity)
    shares = _water_fill(whole, {}, ordered, capacity) if common is None else _fill_common(whole, common)
    result: dict[str, float] = {}
    for name, members in groups.items():
        if len(members) == 1:
            result[members[0].name] = shares[name]
            continue
        if common is not None:
            rest = common - sum(share for other, share in shares.items() if other != name)
            result |= _fill_common([_Group.of(claim.name, [claim]) for claim in members], rest)
            continue
        others = [_Group.of(other, claims_) for other, claims_ in groups.items() if other != name]
        own = [_Group.of("\0\0" + claim.name, [claim]) for claim in members]
        inside = _water_fill(own + others, {g.name: shares[g.name] for g in others}, ordered, capacity)
        result |= {claim.name: inside["\0\0" + claim.name] for claim in members}
    return result


def with_demand(
    claims: Iterable[Claim], name: str, change: Iterable[tuple[frozenset[str], float]]
) -> list[Claim]:
    """The claims if one tenant wanted more (or less) units of these types."""

    def changed(claim: Claim) -> Claim:
        wanted = dict(claim.demand)
        for kinds, amount in change:
            wanted[kinds] = wanted.get(kinds, 0.0) + amount
        rows = [(kinds, amount) for kinds, amount in wanted.items() if amount > EPS]
        return replace(claim, demand=tuple(sorted(rows, key=lambda row: sorted(row[0]))))

    return [changed(claim) if claim.name == name else claim for claim in claims]


def user_shares(
    claims: Iterable[Claim],
    entitled: Mapping[str, float],
    tenant: str,
    users: Mapping[str, tuple[float, Demand]],
    capacity: Mapping[str, float],
) -> dict[str, float]:
    """Units each user of a tenant is entitled to.

    Args:
        claims: of all tenants.
        entitled: what they are entitled to (`entitlements`).
        users: weight and demand of the tenant's users; together their demand is the tenant's.
        capacity: units per type.
    """
    budget = entitled[tenant]
    wanted = {name: sum(amount for _, amount in demand) for name, (_, demand) in sorted(users.items())}
    if sum(wanted.values()) <= budget + EPS:
        return wanted
    own = next(claim for claim in claims if claim.name == tenant)
    others = [claim for claim in claims if claim.name != tenant]
    members = [
        replace(own, name="\0\0" + name, weight=weight, guaranteed=0.0, demand=demand, owner=tenant)
        for name, (weight, demand) in sorted(users.items())
    ]
    mine = [_Group.of(member.name, [member]) for member in members]
    if len({types for member in members for types, _ in member.demand}) == 1:
        found = _fill_common(mine, budget)
    else:
        groups = [_Group.of(claim.name, [claim]) for claim in others]
        given = {claim.name: entitled[claim.name] for claim in others}
        found = _water_fill(groups + mine, given, [*others, *members], capacity, budget)
    return {name: found["\0\0" + name] for name in sorted(users)}


@dataclass(frozen=True, slots=True)
class _Group:
    """Tenants that are raised together."""

    name: str
    tenants: tuple[str, ...]
    weight: float
    floor: float
    wanted: float

    @classmethod
    def of(cls, name: str, claims: list[Claim]) -> _Group:
        return cls(
            name,
            tuple(claim.name for claim in claims),
            sum(claim.weight for claim in claims),
            sum(min(claim.guaranteed, claim.wanted) for claim in claims),
            sum(claim.wanted for claim in claims),
        )

    def at(self, level: float) -> float:
        return max(self.floor, level * self.weight)


def _common_capacity(claims: list[Claim], capacity: Mapping[str, float]) -> float | None:
    """The total to share if every job may use the same types; None: it matters who may use which."""
    kinds = {types for claim in claims for types, _ in claim.demand}
    if len(kinds) != 1 or any(claim.type_limit for claim in claims):
        return None
    return sum(capacity.get(kind, 0.0) for kind in sorted(next(iter(kinds))))


def _fill_common(groups: list[_Group], common: float) -> dict[str, float]:
    """Shares of one resource: the level at which the groups' shares, each between floor and demand, add up to
    it."""
    rising = [group for group in groups if group.weight > 0]
    turns = [(group.floor / group.weight, group.weight) for group in rising]
    turns += [(group.wanted / group.weight, -group.weight) for group in rising]
    level, speed, taken = 0.0, 0.0, sum(group.floor for group in groups)
    for turn, change in sorted(turns):
        if taken + speed * (turn - level) >= common:
            level = min(turn, level + (common - taken) / speed) if speed > 0 and taken < common else level
            break
        taken += speed * (turn - level)
        level, speed = turn, speed + change
    return {group.name: min(group.wanted, max(group.floor, level * group.weight)) for group in groups}


def _water_fill(
    groups: list[_Group],
    given: Mapping[str, float],
    claims: list[Claim],
    capacity: Mapping[str, float],
    budget: float = math.inf,
) -> dict[str, float]:
    """Water-fill the groups; those in `given` have exactly that, the others together no more than `budget`."""
    frozen = dict(given) | {group.name: group.floor for group in groups if group.weight <= 0}
    active = sorted((group for group in groups if group.name not in frozen), key=lambda group: group.name)
    level = 0.0
    while active:
        spent = sum(amount for name, amount in frozen.items() if name not in given)
        most = math.inf if math.isinf(budget) else _level_for(budget - spent, active, level)
        level, stuck = _raise(groups, frozen, active, (level, most), claims, capacity)
        for group in stuck:
            frozen[group.name] = group.at(level)
        active = [group for group in active if group.name not in frozen]
    wanted = {group.name: group.wanted for group in groups}
    return {name: min(amount, wanted[name]) for name, amount in frozen.items()}


def _raise(
    groups: list[_Group],
    frozen: Mapping[str, float],
    active: list[_Group],
    between: tuple[float, float],
    claims: list[Claim],
    capacity: Mapping[str, float],
) -> tuple[float, list[_Group]]:
    """The highest level that all active groups can have, and those that cannot go higher (at least one).

    Newton's method on cuts: start too high; the minimum cut names a set of groups that wants more than there
    is room for, and the level at which that set just fits is the next guess. Guesses only fall.
    """
    total = sum(capacity.values())
    least, most = between
    level = max(least, min(most, (total + 1) / min(group.weight for group in active)))
    while True:
        targets = {group.name: group.at(level) for group in active} | dict(frozen)
        flow = _flow(groups, targets, claims, capacity)
        if flow.run() >= sum(targets.values()) - EPS * max(1.0, total):
            stuck = [group for group in active if not flow.reaches_sink("g:" + group.name)]
            return level, stuck or active
        full = flow.source_side()
        over = [group for group in active if "g:" + group.name in full]
        room = flow.cut_capacity(full) - sum(amount for name, amount in frozen.items() if "g:" + name in full)
        lower = _level_for(room, over, least)
        if not over or lower >= level - EPS * level:
            return level, over or active
        level = lower
        if level <= least:
            return least, over


def _flow(
    groups: list[_Group],
    targets: Mapping[str, float],
    claims: Sequence[Claim],
    capacity: Mapping[str, float],
) -> Flow:
    """The network from groups through tenants and types to the sink."""
    flow = Flow()
    for group in groups:
        flow.edge("source", "g:" + group.name, targets[group.name])
        for tenant in group.tenants:
            flow.edge("g:" + group.name, "t:" + tenant, math.inf)
    limited: set[str] = set()
    for claim in claims:
        owner = claim.owner or claim.name
        flow.edge("t:" + claim.name, "T:" + claim.name, claim.limit)
        for number, (types, amount) in enumerate(claim.demand):
            node = f"d:{number}:{claim.name}"
            flow.edge("T:" + claim.name, node, amount)
            for kind in sorted(types):
                flow.edge(node, f"k:{kind}:{owner}", math.inf)
        for kind in sorted({kind for types, _ in claim.demand for kind in types}):
            node = f"k:{kind}:{owner}"
            if node not in limited:
                limited.add(node)
                flow.edge(node, "y:" + kind, claim.type_limit.get(kind, math.inf))
    for kind, amount in sorted(capacity.items()):
        flow.edge("y:" + kind, "sink", amount)
    return flow


def _level_for(room: float, groups: list[_Group], least: float) -> float:
    """The level at which these groups together take exactly `room`."""
    free = sorted(groups, key=lambda group: (group.floor / group.weight, group.name))
    rest = room
    while free:
        level = rest / sum(group.weight for group in free)
        if free[-1].floor <= level * free[-1].weight:
            return max(level, least)
        rest -= free.pop().floor
    return least
