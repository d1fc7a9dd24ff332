"""The level of a tenant: the work of its running jobs, per unit that it is entitled to (`fairness/work.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from ..candidates.candidate import Candidate
from ..fairness.work import WorkRates
from ..model.snapshot import JobKind, Placement
from .round import Place, Round, Trial, place_of
from .state import Assignment


class Levels:
    """The levels of all tenants, at some moment of a round and after the changes that are kept."""

    def __init__(self, round_: Round, only: str | None = None) -> None:
        """Add up the work of all jobs, or of those of one tenant."""
        self._round = round_
        self._rates = WorkRates(round_.holdings.rate, round_.holdings.capacity_m)
        self._work = dict.fromkeys(round_.holdings.tenants, 0.0)
        for (_, tenant), assignments in round_.held.items():
            if only is None or tenant == only:
                self._work[tenant] = self._work.get(tenant, 0.0) + sum(map(self.work, assignments.values()))

    def work(self, assignment: Assignment) -> float:
        """What a job does where it is, in units."""
        return self.at(place_of(assignment), assignment)

    def at(self, place: Place, assignment: Assignment) -> float:
        """What it does in a place, in units; a job whose speed says nothing: the units that it holds."""
        placement, candidate, _, waits = place
        if placement is None or waits:
            return 0.0
        if candidate is None or assignment.job.kind is not JobKind.TRAINING:
            return self._round.holdings.units_of(placement.accelerator, placement.accelerators_m)
        return self._rates.work(assignment.option.shared, candidate)

    def gain(self, assignment: Assignment, candidate: Candidate) -> float:
        """What it would do more with this candidate, in units."""
        return self._rates.work(assignment.option.shared, candidate) - self.work(assignment)

    def net_gain(self, assignment: Assignment, candidate: Candidate) -> float:
        """The same, less what its tenant could do with what the candidate takes more of its share."""
        return (
            self.gain(assignment, candidate)
            - self._cost(assignment, candidate)
            + self._cost(assignment, assignment.placement)
        )

    def _cost(self, assignment: Assignment, place: Candidate | Placement | None) -> float:
        """What the job could do elsewhere with the part of its tenant's share that a place takes, in units; 0 where the
        share is not what limits the tenant (`shares.py`)."""
        worth = self._round.shares.worth(assignment)
        if place is None or not worth:
            return 0.0
        units = self._round.holdings.units_of(place.accelerator, place.accelerators_m)
        return units * worth * self._rates.per_speed(assignment.option.shared)

    def level(self, tenant: str, more: float = 0.0) -> float:
        """The tenant's level if it did this much more."""
        entitled = self._round.holdings.entitled.get(tenant, 0.0)
        return (self._work.get(tenant, 0.0) + more) / max(entitled, 1e-9)

    def changes(self, trial: Trial, net: bool = False) -> dict[str, float]:
        """What each tenant concerned does more than before the trial (`net`: less what it could do with what it holds
        more)."""
        found: dict[str, float] = {}
        for other, was in trial.changes():
            more = self.work(other) - self.at(was, other)
            if net:
                more -= self._cost(other, other.placement) - self._cost(other, was[0])
            found[other.job.tenant] = found.get(other.job.tenant, 0.0) + more
        return found

    def keep(self, changes: Mapping[str, float]) -> None:
        """Take changes in, by tenant."""
        for tenant, more in changes.items():
            self._work[tenant] = self._work.get(tenant, 0.0) + more


def level_of(round_: Round, tenant: str) -> float:
    """The level of one tenant now."""
    return round_.cached(("level", tenant), tenant, lambda: Levels(round_, tenant).level(tenant))
