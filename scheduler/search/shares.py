"""What its tenant's share of all means for a job: on which type it runs, and when its tenant's turn is.

Where more is asked than there is, a tenant is held to its share, which counts each type at its exchange rate. A type then
costs its jobs what they could do elsewhere with the same part of the share. A job that the fast type makes less faster
than the rate says does less for its tenant there, however much faster it runs itself: its tenant does more on the slow
types, of which it may hold more, and leaves the fast ones to those whom they help more.
"""

from __future__ import annotations

from ..candidates.candidate import Candidate, SharedCandidates
from ..fairness.quota import EPS, Right
from .holds import Hold
from .state import Assignment, PlanningState, RankedCandidate


class Shares:
    """The shares of one round."""

    def __init__(self, state: PlanningState, now: float) -> None:
        """Find out who is held to its share: tenants with jobs that wait, if these are several and no type is left over."""
        self._holdings, self._state, self._now = state.holdings, state, now
        self._best: dict[int, tuple[SharedCandidates, dict[str, float]]] = {}
        self._limited: frozenset[str] = frozenset()
        kinds = [kind for kind, amount in state.holdings.capacity_m.items() if amount > 0]
        if len(kinds) > 1 and len(state.holdings.tenants) > 1 and all(map(self._is_scarce, kinds)):
            waiting = frozenset(tenant for tenant, jobs in state.asking.items() if jobs)
            if len(waiting) > 1:
                self._limited = waiting

    def _is_scarce(self, accelerator: str) -> bool:
        return self._state.market.price(accelerator) > EPS

    def limit(self, tenant: str) -> bool:
        """Whether the tenant's share is what limits it: it could use more, and so could others, on every type."""
        return tenant in self._limited

    def ordered(self, assignment: Assignment) -> list[RankedCandidate]:
        """The job's candidates in the order in which they are tried: most profit first; where its share limits its
        tenant, first the types on which it does most work for what they take of the share."""
        rows = assignment.ranked or self._state.ranked(assignment)
        if len(rows) < 2 or not self.limit(assignment.job.tenant):
            return rows
        best = self._work_per_unit(assignment.option.shared)
        return sorted(rows, key=lambda row: -best.get(row.candidate.accelerator, 0.0))

    def are_kept_by(self, assignment: Assignment, current: Candidate, candidate: Candidate) -> bool:
        """Whether the job, where its share limits its tenant, does no less with the candidate for what that takes of the
        share than it does now."""
        if not self.limit(assignment.job.tenant) or current.accelerator == candidate.accelerator:
            return True
        return self._per_unit(candidate) >= self._per_unit(current)

    def worth(self, assignment: Assignment) -> float:
        """Work per accelerator-second-unit of the share: the most, by speed, that the job does with one unit on any type;
        0 where its share does not limit its tenant."""
        if not self.limit(assignment.job.tenant):
            return 0.0
        return max(self._work_per_unit(assignment.option.shared).values(), default=0.0)

    def _work_per_unit(self, shared: SharedCandidates) -> dict[str, float]:
        """The most speed for one unit, by type, rounded so that equal types stay in the order of profit."""
        known = self._best.get(id(shared))
        if known is None:
            best: dict[str, float] = {}
            for one in shared.candidates:
                best[one.accelerator] = max(self._per_unit(one), best.get(one.accelerator, 0.0))
            known = self._best[id(shared)] = shared, best
        return known[1]

    def _per_unit(self, candidate: Candidate) -> float:
        units = self._holdings.units_of(candidate.accelerator, candidate.accelerators_m)
        return round(candidate.speed / max(units, EPS), 9)

    def excess(self, assignment: Assignment) -> float:
        """By how many times its tenant's share a job is larger than the share (`turns.py`), at most `Policy.patience`; 0: it
        is not."""
        share = self._holdings.entitled.get(assignment.job.tenant, 0.0)
        asked = min((self._holdings.units_of(*size) for size in assignment.option.sizes), default=0.0)
        return min(asked / share - 1, self._state.policy.patience) if 0 < share < asked - EPS else 0.0

    def are_due(self, hold: Hold) -> bool:
        """Whether the holder of a reservation may take its place: not before its turn, if the job is larger than its tenant's
        share; another not by patience, if its tenant holds more than its share already and another lacks a part of its own.
        Jobs that were started in the room of the reservation do not count: they leave it."""
        if hold.turn_s > self._now:
            return False
        tenant, candidate = hold.holder.job.tenant, hold.candidate
        holdings = self._holdings
        if holdings.right(tenant, candidate.accelerator, candidate.accelerators_m) is not Right.BORROWING:
            return True
        share = holdings.entitled.get(tenant, 0.0)
        too_large = holdings.units_of(candidate.accelerator, candidate.accelerators_m) > share + EPS
        leaving = [
            one.placement
            for one in hold.leaving.values()
            if one.job.tenant == tenant and hold.backfilled is not None and one.job.id in hold.backfilled
        ]
        keeps = holdings.units(tenant) - sum(
            holdings.units_of(place.accelerator, place.accelerators_m)
            for place in leaving
            if place is not None
        )
        if too_large or keeps <= share + EPS:
            return True
        others = (name for name in holdings.entitled if name != tenant)
        return all(holdings.units(name) >= holdings.entitled[name] - EPS for name in others)
