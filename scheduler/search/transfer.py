"""Pods move between running elastic jobs, where one gains more than the other loses.

The other steps know an elastic job's smallest size, its doublings and its largest (`candidates.pod_counts`), and growth
(`growth.py`) only what is free. So two jobs that are alone may have 32 and 8 pods although 24 and 16 do more work. Here
one job of a user takes pods of another that runs in the same pool with the same request, any number of them, if what it
gains in value is more than what the other loses by `Policy.transfer_gain_factor` times the work that both repeat.

As growth does, it leaves a pool alone that a waiting job could use. Nobody's share changes: both jobs are of one tenant,
user and priority. Each job takes part once in a plan. Without transfers the jobs of the row `elastic` (`benchmarks/scheduling`)
take up to 1 % longer and, but for one of four cases, need 2 to 4 % more accelerator-hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from ..candidates.candidate import Candidate
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
    gain: float
    """The value that it gains (of a job with fewer: below 0), less that of the work that is repeated."""


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
    givers = _foremost(_less(round_, one) for one in group)
    pairs = [
        (more.gain + less.gain, more, less)
        for taking in takers
        for giving in givers
        if taking[0].assignment is not giving[0].assignment
        for more in taking
        for less in giving
        if more.pods == less.pods and more.gain > -less.gain
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1].assignment.job.id, pair[2].assignment.job.id))
    for _, more, less in pairs:
        if round_.disruption_budget_left < 2:
            return
        if more.assignment.stays and less.assignment.stays:
            _carried_out(round_, more, less)


def _foremost(sizes: Iterable[list[_Resized]]) -> list[list[_Resized]]:
    """The sizes of the jobs that gain most, or lose least, per pod."""
    known = [own for own in sizes if own]
    known.sort(key=lambda own: -max(one.gain / one.pods for one in own))
    return known[:TRIED]


def _more(round_: Round, assignment: Assignment) -> list[_Resized]:
    """The job with more pods, as many as one restart may give it."""
    now = assignment.candidate
    assert now is not None
    most = min(assignment.job.max_pods, now.pods * round_.policy.growth_factor)
    larger = _resized(round_, assignment, now, range(now.pods + 1, most + 1))
    return [one for one in larger if pays(round_, assignment, now, one.candidate)]


def _less(round_: Round, assignment: Assignment) -> list[_Resized]:
    """The job with fewer pods."""
    now = assignment.candidate
    assert now is not None
    return list(_resized(round_, assignment, now, range(assignment.job.min_pods, now.pods)))


def _resized(
    round_: Round, assignment: Assignment, now: Candidate, sizes: Iterable[int]
) -> Iterator[_Resized]:
    for pods in sizes:
        one = round_.sized(assignment, now, pods)
        if one is not None:
            charge = round_.policy.transfer_gain_factor * own_charge(round_, assignment, one)
            yield _Resized(assignment, one, abs(pods - now.pods), one.value - now.value - charge)


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
