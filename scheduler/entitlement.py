"""Who is entitled to how much: weighted max-min in work units, with guarantees, ceilings and hierarchy.

A tenant's share is counted in exchange-rate units (accelerators x rate). Tenants may only use some types, and
demand only so much, so fairness is a flow problem:

    source -> organisation -> tenant -> the types its jobs may use -> sink

Level by level, everybody's flow is raised in proportion to its weight until some set of tenants is stuck
(a minimum cut); those are frozen at what they have, the others go on. Guarantees are a floor, ceilings and
demand a cap. First between organisations, then between the tenants of each. Where all jobs may use the same
types there is one thing to share, and the level is found by walking along the levels at which somebody stops
(`_one_pot`): the same answer as the flow, about eighty times sooner.

Nothing here looks at what runs where, only at demand (running and waiting together), so an entitlement does
not change when a plan is carried out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

EPS = 1e-7


@dataclass(frozen=True, slots=True)
class Claim:
    """What one tenant asks of the cluster, in units."""

    name: str
    organisation: str
    weight: float
    guaranteed: float
    limit: float
    """Ceiling over all types (infinite if none)."""
    demand: tuple[tuple[frozenset[str], float], ...]
    """Units wanted by the jobs that may use exactly this set of types."""
    type_limit: Mapping[str, float] = field(default_factory=dict)
    """Ceiling per type."""

    @property
    def wanted(self) -> float:
        return min(self.limit, sum(amount for _, amount in self.demand))


def entitlements(claims: Iterable[Claim], capacity: Mapping[str, float]) -> dict[str, float]:
    """Units each tenant is entitled to, of a capacity in units per type."""
    ordered = sorted(claims, key=lambda claim: claim.name)
    groups: dict[str, list[Claim]] = {}
    for claim in ordered:
        groups.setdefault(claim.organisation or "\0" + claim.name, []).append(claim)
    whole = [_Group.of(name, members) for name, members in groups.items()]
    pot = _pot(ordered, capacity)
    shares = _fill(whole, {}, ordered, capacity) if pot is None else _one_pot(whole, pot)
    result: dict[str, float] = {}
    for name, members in groups.items():
        if len(members) == 1:
            result[members[0].name] = shares[name]
            continue
        if pot is not None:
            rest = pot - sum(share for other, share in shares.items() if other != name)
            result |= _one_pot([_Group.of(claim.name, [claim]) for claim in members], rest)
            continue
        others = [_Group.of(other, claims_) for other, claims_ in groups.items() if other != name]
        own = [_Group.of("\0\0" + claim.name, [claim]) for claim in members]
        inside = _fill(own + others, {g.name: shares[g.name] for g in others}, ordered, capacity)
        result |= {claim.name: inside["\0\0" + claim.name] for claim in members}
    return result


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


def _pot(claims: list[Claim], capacity: Mapping[str, float]) -> float | None:
    """What there is to share, if every job may use the same types; None: it matters who may use which."""
    kinds = {types for claim in claims for types, _ in claim.demand}
    if len(kinds) != 1 or any(claim.type_limit for claim in claims):
        return None
    return sum(capacity.get(kind, 0.0) for kind in sorted(next(iter(kinds))))


def _one_pot(groups: list[_Group], pot: float) -> dict[str, float]:
    """The level at which what the groups have, between floor and demand, adds up to the pot."""
    rising = [group for group in groups if group.weight > 0]
    turns = [(group.floor / group.weight, group.weight) for group in rising]
    turns += [(group.wanted / group.weight, -group.weight) for group in rising]
    level, speed, taken = 0.0, 0.0, sum(group.floor for group in groups)
    for turn, change in sorted(turns):
        if taken + speed * (turn - level) >= pot:
            level = min(turn, level + (pot - taken) / speed) if speed > 0 and taken < pot else level
            break
        taken += speed * (turn - level)
        level, speed = turn, speed + change
    return {group.name: min(group.wanted, max(group.floor, level * group.weight)) for group in groups}


def _fill(
    groups: list[_Group], given: Mapping[str, float], claims: list[Claim], capacity: Mapping[str, float]
) -> dict[str, float]:
    """Water-fill the groups; those in `given` have exactly that."""
    frozen = dict(given) | {group.name: group.floor for group in groups if group.weight <= 0}
    active = sorted((group for group in groups if group.name not in frozen), key=lambda group: group.name)
    level = 0.0
    while active:
        level, stuck = _raise(groups, frozen, active, level, claims, capacity)
        for group in stuck:
            frozen[group.name] = group.at(level)
        active = [group for group in active if group.name not in frozen]
    wanted = {group.name: group.wanted for group in groups}
    return {name: min(amount, wanted[name]) for name, amount in frozen.items()}


def _raise(
    groups: list[_Group],
    frozen: Mapping[str, float],
    active: list[_Group],
    least: float,
    claims: list[Claim],
    capacity: Mapping[str, float],
) -> tuple[float, list[_Group]]:
    """The highest level that all active groups can have, and those that cannot go higher (at least one).

    Newton's method on cuts: begin too high; the minimum cut names a set of groups that wants more than there
    is room for, and the level at which that set just fits is the next guess. Guesses only fall.
    """
    total = sum(capacity.values())
    level = max(least, (total + 1) / min(group.weight for group in active))
    while True:
        targets = {group.name: group.at(level) for group in active} | dict(frozen)
        flow = _Flow(groups, targets, claims, capacity)
        if flow.run() >= sum(targets.values()) - EPS * max(1.0, total):
            stuck = [group for group in active if not flow.reaches_sink("g:" + group.name)]
            return level, stuck or active
        full = flow.side()
        over = [group for group in active if "g:" + group.name in full]
        room = flow.cut(full) - sum(amount for name, amount in frozen.items() if "g:" + name in full)
        lower = _level_for(room, over, least)
        if not over or lower >= level - EPS * level:
            return level, over or active
        level = lower
        if level <= least:
            return least, over


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


class _Flow:
    """Maximum flow from groups through tenants and types to the sink, by shortest augmenting paths.

    The graph has a few nodes per tenant and type, so nothing faster is needed.
    """

    def __init__(
        self,
        groups: list[_Group],
        targets: Mapping[str, float],
        claims: list[Claim],
        capacity: Mapping[str, float],
    ) -> None:
        self.left: dict[str, dict[str, float]] = {"source": {}, "sink": {}}
        for group in groups:
            self._edge("source", "g:" + group.name, targets[group.name])
            for tenant in group.tenants:
                self._edge("g:" + group.name, "t:" + tenant, math.inf)
        for claim in claims:
            self._edge("t:" + claim.name, "T:" + claim.name, claim.limit)
            for number, (types, amount) in enumerate(claim.demand):
                node = f"d:{number}:{claim.name}"
                self._edge("T:" + claim.name, node, amount)
                for kind in sorted(types):
                    self._edge(node, f"k:{kind}:{claim.name}", math.inf)
            for kind in sorted({kind for types, _ in claim.demand for kind in types}):
                limit = claim.type_limit.get(kind, math.inf)
                self._edge(f"k:{kind}:{claim.name}", "y:" + kind, limit)
        for kind, amount in sorted(capacity.items()):
            self._edge("y:" + kind, "sink", amount)
        self.capacity = {u: dict(out) for u, out in self.left.items()}

    def _edge(self, u: str, v: str, amount: float) -> None:
        self.left.setdefault(u, {})
        self.left.setdefault(v, {}).setdefault(u, 0.0)
        self.left[u][v] = self.left[u].get(v, 0.0) + amount

    def run(self) -> float:
        """The maximum flow; afterwards `side` and `cut` describe a minimum cut."""
        total = 0.0
        while True:
            parent = self._search("source")
            if "sink" not in parent:
                return total
            path, node = [], "sink"
            while node != "source":
                path.append((parent[node], node))
                node = parent[node]
            amount = min(self.left[u][v] for u, v in path)
            for u, v in path:
                self.left[u][v] -= amount
                self.left[v][u] += amount
            total += amount

    def _search(self, start: str) -> dict[str, str]:
        parent = {start: start}
        queue = deque([start])
        while queue:
            u = queue.popleft()
            for v, amount in self.left[u].items():
                if amount > EPS and v not in parent:
                    parent[v] = u
                    queue.append(v)
        return parent

    def reaches_sink(self, node: str) -> bool:
        """Whether more could flow from this node."""
        return "sink" in self._search(node)

    def side(self) -> set[str]:
        """The source's side of the minimum cut."""
        return set(self._search("source"))

    def cut(self, side: set[str]) -> float:
        """Capacity of the cut without the groups' own edges: what the groups in `side` can have together."""
        return sum(
            amount
            for u in sorted(side)
            if u != "source"
            for v, amount in self.capacity[u].items()
            if v not in side and amount > 0
        )
