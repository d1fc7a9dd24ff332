"""Jobs that may be stopped or shrunk for others, and what each frees on which node.

Groups (those of one tenant by one rule, for example) know lower bounds per node, and follow a changed list of victims
at the cost of the difference, so one group serves many searches (`victims.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..candidates.candidate import Candidate
from ..model.snapshot import JobId
from ..placement.pool import PoolNodes
from ..placement.sharing import leaving
from .state import Assignment

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Amounts = tuple[int, ...]
"""Resources of a node, in the order of `pool.py`."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an elastic job that is given back: the smaller candidate, the nodes of the pods that stay
    and of those that leave."""

    candidate: Candidate
    stays: tuple[str, ...]
    leaves: tuple[str, ...]

    @property
    def freed_m(self) -> int:
        """Thousandths of an accelerator given back."""
        return len(self.leaves) * self.candidate.per_pod.accelerators_m


class Victim:
    """A job that may be stopped or shrunk, the cost of that, and what it frees on which node."""

    __slots__ = (
        "_offers",
        "amount_m",
        "assignment",
        "cost",
        "frees",
        "id",
        "lasts",
        "may_shrink",
        "nodes",
        "part",
        "placement",
    )

    def __init__(
        self,
        assignment: Assignment,
        cost: float,
        nodes: PoolNodes,
        part: Part | None = None,
        *,
        lasts: bool = False,
    ) -> None:
        self.assignment = assignment
        self.cost = cost
        self.part = part
        """The part that may be taken; None: all."""
        self.nodes = nodes
        self.lasts = lasts
        """Whether it serves many searches, and whoever made it ends with `forget_offers`."""
        self._offers: list[tuple[int, NodeOffer]] | None = None
        self.id: JobId = assignment.job.id
        self.frees: dict[int, Amounts] = {}
        """By index of the node."""
        placement = self.placement = assignment.placement
        self.amount_m = 0 if placement is None else placement.accelerators_m
        """All that it holds."""
        self.may_shrink = assignment.can_shrink
        if placement is not None and placement.pool == nodes.pool.name:
            self.frees = nodes.holds(placement if part is None else leaving(placement, part.leaves))

    @property
    def offers(self) -> list[tuple[int, NodeOffer]]:
        """The victim as each of its nodes sees it."""
        if self._offers is not None:
            return self._offers
        key = self.nodes.key
        made = [
            (i, NodeOffer(self.cost / (m := max(frees[key], 1)), self.id, self, frees, m))
            for i, frees in self.frees.items()
        ]
        if self.lasts:
            self._offers = made
        return made

    @property
    def freed_m(self) -> int:
        """What it gives back, in thousandths of accelerators."""
        return self.amount_m if self.part is None else self.part.freed_m

    def forget_offers(self) -> None:
        """Make them anew whenever they are asked for: they know this victim, and each keeps the other alive."""
        self.lasts, self._offers = False, None


@dataclass(slots=True)
class NodeOffer:
    """One victim as one node sees it: the cost per thousandth of an accelerator freed there."""

    unit_cost: float
    id: JobId
    victim: Victim
    frees: Amounts
    frees_m: int
    """Thousandths of accelerators (in a CPU pool: of CPUs), at least 1."""


class VictimGroup:
    """Victims by the nodes they run on, cheapest per accelerator first."""

    def __init__(self, victims: Iterable[Victim], nodes: PoolNodes) -> None:
        self._nodes = nodes
        self._least: dict[int, Floats] = {}
        self._amounts: tuple[Ints, Ints] | None = None
        self._gives_back: dict[int, int] | None = None
        self._members: list[Victim] = []
        self.most_m: Mapping[str, int] = {}
        """How much may be taken of a tenant for one claim, in thousandths; all of those that it does not name."""
        self.on_node: dict[int, list[NodeOffer]] = {}
        self.become(list(victims))

    @property
    def count(self) -> int:
        """How many victims there are."""
        return len(self._members)

    @property
    def standing(self) -> Iterator[Victim]:
        """Those that free anything on the pool's nodes."""
        return (victim for victim in self._members if victim.frees)

    def become(self, victims: list[Victim]) -> None:
        """Change the group into that of these victims, at the cost of the difference."""
        if victims == self._members:
            return
        self._gives_back = None
        old, new = set(self._members), set(victims)
        come, gone = new - old, old - new
        if not old or len(come) + len(gone) > len(new) or len(new) < len(victims):
            self._least.clear()
            self._amounts = None
            self.on_node = {}
            self._add(victims)
        else:
            touched = {i for victim in gone for i in victim.frees}
            for i in touched:
                left = [offer for offer in self.on_node[i] if offer.victim not in gone]
                if left:
                    self.on_node[i] = left
                else:
                    del self.on_node[i]
            self._add(come)
            touched.update(i for victim in come for i in victim.frees)
            for missing_m, least in self._least.items():
                for i in touched:
                    least[i] = _least(self.on_node.get(i, ()), missing_m)
            if self._amounts is not None:
                for i in touched:
                    self._amounts[0][i], self._amounts[1][i] = _amounts(self.on_node.get(i, ()))
        self._members = victims

    def _add(self, victims: Iterable[Victim]) -> None:
        on_node, shared = self.on_node, set()
        for victim in victims:
            for i, offer in victim.offers:
                here = on_node.get(i)
                if here is None:
                    on_node[i] = [offer]
                else:
                    here.append(offer)
                    shared.add(i)
        for i in shared:
            on_node[i].sort(key=by_cost)

    def without(self, jobs: Set[JobId]) -> VictimGroup:
        """The group less these jobs; itself if it has none of them."""
        left = [victim for victim in self._members if victim.id not in jobs]
        if len(left) == len(self._members):
            return self
        found = VictimGroup((), self._nodes)
        found._members, found.on_node, found.most_m = self._members, dict(self.on_node), self.most_m
        found.become(left)
        return found

    def least(self, missing_m: int) -> Floats:
        """A lower bound on what it costs to free so much beyond what costs nothing, by node; infinite where only that is
        to be had. 0: the lowest cost per thousandth of an accelerator."""
        found = self._least.get(missing_m)
        if found is None:
            found = self._least[missing_m] = np.full(len(self._nodes.nodes), np.inf)
            found[list(self.on_node)] = [_least(offers, missing_m) for offers in self.on_node.values()]
        return found

    @property
    def gives_back(self) -> dict[int, int]:
        """The watts that power domains get back at most if all of them go, by the domain's number."""
        if self._gives_back is None:
            found = self._gives_back = dict[int, int]()
            feeds = self._nodes.feeds
            for victim in self._members if feeds is not None else ():
                if feeds is not None and victim.placement is not None:
                    for number, watts in feeds.asked(victim.placement).items():
                        found[number] = found.get(number, 0) + watts
        return self._gives_back

    @property
    def amounts(self) -> tuple[Ints, Ints]:
        """What victims free, and what those free that cost nothing, by node, in thousandths of accelerators; 0 and 0 where
        there are no victims."""
        if self._amounts is None:
            self._amounts = (
                np.zeros(len(self._nodes.nodes), np.int64),
                np.zeros(len(self._nodes.nodes), np.int64),
            )
            rows = np.array([_amounts(offers) for offers in self.on_node.values()], np.int64).reshape(-1, 2)
            for found, row in zip(self._amounts, rows.T, strict=True):
                found[list(self.on_node)] = row
        return self._amounts


def _least(offers: Iterable[NodeOffer], missing_m: int) -> float:
    """Of those taken that cost anything, either one alone frees enough, or all that is missing is paid at their prices."""
    costs = (
        one.unit_cost * (max(one.frees_m, missing_m) if missing_m else 1) for one in offers if one.unit_cost
    )
    return min(costs, default=math.inf)


def _amounts(offers: Iterable[NodeOffer]) -> tuple[int, int]:
    every = gratis = 0
    for offer in offers:
        every += offer.frees_m
        if not offer.unit_cost:
            gratis += offer.frees_m
    return every, gratis


def by_cost(offer: NodeOffer) -> tuple[float, JobId]:
    return offer.unit_cost, offer.id
