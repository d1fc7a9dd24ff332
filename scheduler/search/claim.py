"""A job that asks for the place of others: what it offers, and what a job loses that leaves its place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..candidates.candidate import Candidate
from ..candidates.value import SHORTEST_H, remaining_s
from ..fairness.quota import Right
from ..model.snapshot import Job
from ..placement.pool import PoolNodes
from .levels import Levels
from .round import Round
from .state import Assignment


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that asks for the place of others with this candidate."""

    round: Round
    assignment: Assignment
    candidate: Candidate
    right: Right = Right.BORROWING
    worth: float = math.inf
    """The most that the others may lose, in the unit of the rule's cost."""
    levels: Levels | None = None
    """Work of the tenants, for exchanges."""
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)
    """Of the nodes in the order in which `surplus.first_lent_together` empties them; empty before it is asked for. Victims
    are looked for before anything is moved, so it stays true."""

    @property
    def job(self) -> Job:
        return self.assignment.job

    @property
    def nodes(self) -> PoolNodes:
        return self.round.cluster.pools[self.candidate.pool]

    @property
    def hours(self) -> float:
        """Estimated hours that the job still runs with the candidate."""
        return hours_left(self.assignment, self.candidate)


def hours_left(assignment: Assignment, candidate: Candidate) -> float:
    """Estimated hours that the job still runs with this candidate."""
    best = assignment.option.best_speed
    left = remaining_s(assignment.job, best) * best / max(candidate.speed, 1e-12)
    return max(left / 3600, SHORTEST_H)


def regret(round_: Round, assignment: Assignment, candidate: Candidate) -> float:
    """Value per hour that the job loses if this accelerator type is denied to it."""
    other = max(
        (round_.profit(c) for c in assignment.option.candidates if c.accelerator != candidate.accelerator),
        default=0.0,
    )
    gross = round_.profit(candidate) - max(0.0, other)
    return gross + round_.market.cost(candidate)


def lost_value(round_: Round, assignment: Assignment) -> float:
    """The work lost by stopping a job, as value."""
    return round_.policy.move_gain_factor * assignment.option.weight * round_.lost_s(assignment) / 3600


def own_charge(round_: Round, assignment: Assignment, candidate: Candidate) -> float:
    """The work that a running job loses by moving to the candidate, as value per hour that it then runs."""
    return lost_value(round_, assignment) / hours_left(assignment, candidate)


def offered(round_: Round, assignment: Assignment, candidate: Candidate) -> float:
    """Value per hour that a job offers for a candidate: its gain over its present place, plus the price, with
    which the victim can pay for another place. At the prices, each job that should be elsewhere has a regret
    below the price, so a profitable claim finds its victim among those."""
    now = 0.0 if assignment.candidate is None else max(0.0, round_.profit(assignment.candidate))
    return round_.profit(candidate) - now + round_.market.cost(candidate)
