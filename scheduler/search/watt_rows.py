"""Rows for power domains in the solver's program (`milp.py`).

A job that keeps its place draws on the domains above its nodes. The pods of another candidate may stand below any of its
pool's domains: equal pods of a pool share variables that say how many of them stand where, within the accelerators
there. So a domain is never given more than it carries, and the nodes decide the rest, as for accelerators.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from .. import highs
from ..candidates.candidate import Candidate
from ..model.snapshot import Placement
from ..placement.feeds import NOW, Chain, Feeds
from ..placement.pool import PoolNodes
from .round import Round

Terms = list[tuple[int, float]]
Pod = tuple[str, int, int]
"""Pool, thousandths of accelerators and watts of one pod."""


class WattRows:
    """The draw of the variables of a program."""

    def __init__(self, round_: Round, feeds: Feeds) -> None:
        self._pools, self._feeds = round_.cluster.pools, feeds
        self._drawn: defaultdict[int, Terms] = defaultdict(list)
        """By domain."""
        self._held: Counter[int] = Counter()
        self._here: defaultdict[tuple[str, Chain], Terms] = defaultdict(list)
        """Thousandths of accelerators by pool and the domains above."""
        self._held_m: Counter[tuple[str, Chain]] = Counter()
        self._pods: defaultdict[Pod, Terms] = defaultdict(list)

    def stays(self, variable: int, place: Placement) -> None:
        """The variable keeps a job in its place."""
        for number, watts in self._feeds.asked(place).items():
            self._drawn[number].append((variable, float(watts)))
            self._held[number] += watts
        for chain, count in Counter(self._feeds.chains.get(name, ()) for name in place.nodes).items():
            amount_m = count * place.per_pod.accelerators_m
            self._here[place.pool, chain].append((variable, float(amount_m)))
            self._held_m[place.pool, chain] += amount_m

    def goes(self, variable: int, candidate: Candidate) -> None:
        """The variable puts a job somewhere in the candidate's pool."""
        pod = (candidate.pool, candidate.per_pod.accelerators_m, candidate.draw_w)
        self._pods[pod].append((variable, float(candidate.pods)))

    def add(self, program: highs.Program) -> None:
        """Add the rows."""
        for (name, amount_m, watts), terms in sorted(self._pods.items()):
            spread: Terms = []
            for chain in self._pools[name].chains:
                there = program.variable(0.0, 0.0, math.inf)
                spread.append((there, -1.0))
                self._here[name, chain].append((there, float(amount_m)))
                for number in chain if watts else ():
                    self._drawn[number].append((there, float(watts)))
            program.row([*terms, *spread], high=0.0)
        for (name, chain), terms in sorted(self._here.items()):
            program.row(terms, high=self._free_m(self._pools[name], chain) + self._held_m[name, chain])
        for number, terms in sorted(self._drawn.items()):
            program.row(terms, high=max(0, self._feeds.left[NOW][number]) + self._held[number])

    @staticmethod
    def _free_m(nodes: PoolNodes, chain: Chain) -> int:
        return sum(nodes.free_now[i][nodes.key] for i in nodes.below(chain) if nodes.usable[i])


def watt_rows(round_: Round, candidates: Iterable[Candidate]) -> WattRows | None:
    """Rows for these candidates; None: no power domain limits what they may draw."""
    feeds = round_.cluster.feeds
    return None if feeds is None or not any(one.draw_w for one in candidates) else WattRows(round_, feeds)
