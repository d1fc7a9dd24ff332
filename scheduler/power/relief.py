"""Which work to stop when even the lowest limits of all boards are above a budget. Pure.

    least    what a domain draws at most with all boards at their lowest limits: hosts, idle boards, and what each board
             that works adds to its idle draw
    lacks    by how much that is above the budget less its margin
    stops    of the domains that may stop work, those below first: what is stopped there counts above as well

The order of victims: jobs that may be stopped, of the lowest priority first, then by the least work lost for each watt
that their end saves; then replicas that their services can spare; then, only where that alone makes the rest fit,
replicas that they need. At the end those that turned out not to be needed are spared, in the opposite order, so no
smaller part of the chosen would do.

Where nothing makes the rest fit, all jobs and spare replicas whose end saves something are stopped all the same: a
breaker holds the longer the less is too much. Which boards of a node a job holds is not known: those that it frees are
taken to be those that save least, so the sum is never too small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from .domains import DomainTree

SLACK_W = 1e-3
"""Sums of watts are not compared more closely."""


class Tier(IntEnum):
    """What is stopped first."""

    JOB = 0
    """It may be stopped at any time."""
    SPARE = 1
    """A replica that its service can do without."""
    NEEDED = 2
    """A replica of the least number that its service needs."""


@dataclass(frozen=True, slots=True)
class NodeLeast:
    """A node with all boards at their lowest limits."""

    idle_w: float
    """With no work: the host, and all boards idle."""
    gains_w: tuple[float, ...] = ()
    """What each board adds when it works: its lowest limit, or the nameplate of one that takes none, above idle."""
    boards: float = 0.0
    """Boards that work now."""

    def least_w(self, boards: float) -> float:
        """With so many boards at work: those that add most."""
        parts = (
            gain * min(1.0, boards - i)
            for i, gain in enumerate(sorted(self.gains_w, reverse=True))
            if boards > i
        )
        return self.idle_w + math.fsum(parts)


@dataclass(frozen=True, slots=True)
class Work:
    """A job or a replica that may be stopped, or is being stopped."""

    id: str
    boards: Mapping[str, float]
    """By node."""
    tier: Tier = Tier.JOB
    priority: int = 0
    lost: float = 0.0
    """Accelerator-seconds of work that are repeated if it is stopped now."""
    going: bool = False
    """It is being stopped already."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Work to stop now."""

    work: str
    domain: str
    """For whose budget; one that is above all of its nodes or some of them."""
    watts: float
    """What it adds there to the least, and so needs to go on."""


@dataclass(frozen=True)
class Relief:
    """Of the domains that may stop work."""

    stops: tuple[Stop, ...] = ()
    lacks_w: Mapping[str, float] = field(default_factory=dict)
    """By domain, also of those that lack nothing: what it lacks now; not above 0: so much is left."""
    unmet_w: Mapping[str, float] = field(default_factory=dict)
    """The same when all that is being stopped already has gone."""
    remains_w: Mapping[str, float] = field(default_factory=dict)
    """The same when these stops have gone as well."""


def relieve(
    tree: DomainTree, nodes: Mapping[str, NodeLeast], works: Iterable[Work], enforced: Iterable[str]
) -> Relief:
    """What must stop so that the least of each domain fits in its budget less the margin.

    Args:
        nodes: those of the tree that are known; others count nothing.
        works: on these nodes; boards that none of them holds work on.
        enforced: the domains for whose sake work may be stopped.
    """
    order = [name for name in tree.order if name in set(enforced)]
    if not order:
        return Relief()
    every = sorted(works, key=lambda work: work.id)
    now = _Sums(tree, nodes, order)
    lacks = dict(now.lacks_w)
    for work in every:
        if work.going:
            now.stop(work)
    unmet = dict(now.lacks_w)
    chosen: list[tuple[Work, str]] = []
    for name in order:
        chosen += [(work, name) for work in _chosen(now, name, every, {work.id for work, _ in chosen})]
    spared = {work.id for work, name in sorted(chosen, key=lambda pair: _rank(now, *pair), reverse=True)
              if now.spares(work)}  # fmt: skip
    stops = tuple(
        Stop(work.id, name, now.saved_w(name, work)) for work, name in chosen if work.id not in spared
    )
    return Relief(stops, _told(lacks), _told(unmet), _told(now.lacks_w))


def _told(lacks_w: Mapping[str, float]) -> dict[str, float]:
    """Without what is only rounding."""
    return {name: 0.0 if 0 < watts <= SLACK_W else watts for name, watts in lacks_w.items()}


class _Sums:
    """What the domains lack while work is stopped one by one."""

    def __init__(self, tree: DomainTree, nodes: Mapping[str, NodeLeast], order: Sequence[str]) -> None:
        self._nodes = nodes
        self._boards = {name: node.boards for name, node in nodes.items()}
        self._above: dict[str, list[str]] = {}
        self.lacks_w: dict[str, float] = {}
        for name in order:
            inside = [node for node in tree.members[name] if node in nodes]
            for node in inside:
                self._above.setdefault(node, []).append(name)
            least = math.fsum(nodes[node].least_w(nodes[node].boards) for node in inside)
            self.lacks_w[name] = least - tree.domains[name].usable_w

    def is_on(self, domain: str, work: Work) -> bool:
        return any(domain in self._above.get(node, ()) for node in work.boards)

    def saved_w(self, domain: str, work: Work) -> float:
        """What the work adds to the domain's least while everything else that there was runs."""
        saved = 0.0
        for name, boards in work.boards.items():
            if domain in self._above.get(name, ()):
                node = self._nodes[name]
                saved += node.least_w(node.boards) - node.least_w(max(0.0, node.boards - boards))
        return saved

    def stop(self, work: Work, sign: int = 1) -> None:
        """Without the work (sign=-1: with it again)."""
        for name, boards in work.boards.items():
            node = self._nodes.get(name)
            if node is None:
                continue
            before, after = self._boards[name], self._boards[name] - sign * boards
            self._boards[name] = after
            saved = node.least_w(max(0.0, before)) - node.least_w(max(0.0, after))
            for domain in self._above.get(name, ()):
                self.lacks_w[domain] -= saved

    def spares(self, work: Work) -> bool:
        """Lets the work go on if no domain then lacks anything more; whether it does."""
        before = dict(self.lacks_w)
        self.stop(work, sign=-1)
        if all(
            watts <= max(SLACK_W, before[name] + SLACK_W if before[name] > SLACK_W else 0.0)
            for name, watts in self.lacks_w.items()
        ):
            return True
        self.stop(work)
        return False


def _rank(sums: _Sums, work: Work, domain: str) -> tuple[int, int, float, str]:
    return work.tier, work.priority, work.lost / max(sums.saved_w(domain, work), SLACK_W), work.id


def _chosen(sums: _Sums, domain: str, every: Sequence[Work], already: set[str]) -> list[Work]:
    """Stops work on the domain, in the order of victims, until it lacks nothing."""
    if sums.lacks_w[domain] <= SLACK_W:
        return []
    able = [w for w in every if not w.going and w.id not in already and sums.is_on(domain, w)]
    able.sort(key=lambda work: _rank(sums, work, domain))
    chosen: list[Work] = []
    for work in able:
        if sums.lacks_w[domain] <= SLACK_W:
            break
        chosen.append(work)
        sums.stop(work)
    needed = [work for work in chosen if work.tier is Tier.NEEDED]
    if needed and sums.lacks_w[domain] > SLACK_W:
        for work in needed:
            sums.stop(work, sign=-1)
        chosen = [work for work in chosen if work.tier is not Tier.NEEDED]
    return chosen
