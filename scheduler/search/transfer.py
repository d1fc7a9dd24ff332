"""Pods move between running elastic jobs, where one gains more than the other loses.

The other steps know an elastic job's smallest size, its doublings and its largest (`candidates.pod_counts`), and growth
(`growth.py`) only what is free. So two jobs that are alone may have 32 and 8 pods although 24 and 16 do more work. Here
one job of a user takes pods of another that runs in the same pool with the same request, any number of them, if what it
gains in value is more than what the other loses by `Policy.transfer_gain_factor` times the work that both repeat.

As growth does, it leaves a pool alone that a waiting job could use. Nobody's share changes: both jobs are of one tenant,
user and priority. Each job takes part once in a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from ..candidates.candidates import Candidate
from ..model.snapshot import Resources
from .claim import own_charge
from .growth import wanted_pools
from .migration import pays
from .round import Round
from .state import Assignment

TRIED = 8
"""Jobs of a group that are tried as takers, and as givers: those with most to gain, and least to lose, per pod."""


@dataclass(frozen=True, slots=True)
class _Resized:
    """A running job with another number of pods."""

    assignment: Assignment
    candidate: Candidate
    pods: int
    """How many more or fewer."""
    value: float
    """Gained or lost by it, the value of the work that is repeated included."""

    @property
    def per_pod(self) -> float:
        return self.value / self.pods


def transfer(round_: Round) -> None:
    """Move pods between running jobs as long as that pays."""
    groups: dict[tuple[str, Resources, str, str, int], list[Assignment]] = {}
    for assignment in round_.assignments.values():
        job, now = assignment.job, assignment.candidate
        if job.min_pods < job.max_pods and now and assignment.stays and round_.movable(assignment):
            key = (now.pool, now.per_pod, job.tenant, job.user, round_.priority(job))
            groups.setdefault(key, []).append(assignment)
    groups = {key: group for key, group in groups.items() if len(group) > 1}
    wanted = wanted_pools(round_) if groups else set[str]()
    for key, group in groups.items():
        if key[0] not in wanted:
            _within(round_, sorted(group, key=lambda one: one.job.id))


def _within(round_: Round, group: list[Assignment]) -> None:
    """Transfers between these jobs, the one that gains most first."""
    takers = _foremost(_more(round_, one) for one in group)
    givers = _foremost((_less(round_, one) for one in group), sign=-1)
    pairs = [
        (more.value - less.value, more, less)
        for taking in takers
        for giving in givers
        if taking[0].assignment is not giving[0].assignment
        for more in taking
        for less in giving
        if more.pods == less.pods and more.value > less.value
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1].assignment.job.id, pair[2].assignment.job.id))
    for _, more, less in pairs:
        if round_.disruption_budget_left < 2:
            return
        if more.assignment.stays and less.assignment.stays:
            _carried_out(round_, more, less)


def _foremost(sizes: Iterable[Iterator[_Resized]], sign: int = 1) -> list[list[_Resized]]:
    """The sizes of the jobs that come first."""
    known = [own for each in sizes if (own := list(each))]
    known.sort(key=lambda own: -max(sign * one.per_pod for one in own))
    return known[:TRIED]


def _more(round_: Round, assignment: Assignment) -> Iterator[_Resized]:
    """The job with more pods, as many as one restart may give it."""
    now = assignment.candidate
    assert now is not None
    for pods in range(now.pods + 1, min(assignment.job.max_pods, now.pods * round_.policy.growth_factor) + 1):
        candidate = round_.sized(assignment, now, pods)
        if candidate is not None and pays(round_, assignment, now, candidate):
            gain = (
                candidate.value
                - now.value
                - round_.policy.transfer_gain_factor * own_charge(round_, assignment, candidate)
            )
            yield _Resized(assignment, candidate, pods - now.pods, gain)


def _less(round_: Round, assignment: Assignment) -> Iterator[_Resized]:
    """The job with fewer pods."""
    now = assignment.candidate
    assert now is not None
    for pods in range(assignment.job.min_pods, now.pods):
        candidate = round_.sized(assignment, now, pods)
        if candidate is not None:
            loss = (
                now.value
                - candidate.value
                + round_.policy.transfer_gain_factor * own_charge(round_, assignment, candidate)
            )
            yield _Resized(assignment, candidate, now.pods - pods, loss)


def _carried_out(round_: Round, more: _Resized, less: _Resized) -> None:
    """Resize both, if the nodes have room so; else leave both."""
    with round_.trial() as trial:
        for one in (more, less):
            round_.clear(one.assignment)
        for one in sorted((more, less), key=attrgetter("candidate.pods"), reverse=True):
            nodes = round_.cluster.find(one.assignment.job, one.candidate, later=False)
            if nodes is None:
                return
            round_.put(one.assignment, one.candidate, nodes)
        trial.keep()
