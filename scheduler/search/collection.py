"""Where the room of a reservation is collected, and when it is there (`reservations.py` states the rule).

Who leaves which node and when: a job that ends, or one that gives way to the claim. The nodes whose room, and whose
watts (`watt_ends.py`), are there first are chosen, within what may be taken of each tenant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from ..candidates.candidate import Candidate
from ..fairness.quota import Right
from ..model.snapshot import JobId, JobKind
from ..placement.pool import request
from .holds import Hold
from .round import Round
from .rules import share_run_s
from .state import Assignment
from .surplus import spare_m
from .turns import turn_s
from .watt_ends import Ends, WattEnds, ends_of, promised, watts_there


@dataclass(slots=True)
class Leaver:
    """A job on nodes that could be collected."""

    assignment: Assignment
    ends_at_s: float
    may_stop_at_s: float = math.inf
    """From when the claim may stop it."""
    budget: str | None = None
    """The tenant whose surplus it is taken from; None: no limit."""

    @property
    def leaves_at_s(self) -> float:
        return min(self.ends_at_s, self.may_stop_at_s)


@dataclass(slots=True)
class Slot:
    """Room for one more pod on a node."""

    at_s: float
    node: int
    leavers: list[Leaver] = field(default_factory=list)
    """Who leaves for it."""


class Collection:
    """The search for the place of one reservation."""

    def __init__(
        self,
        round_: Round,
        assignment: Assignment,
        candidate: Candidate,
        since_s: dict[int, float],
        others: Set[int] = frozenset(),
        backfilled: Set[JobId] | None = frozenset(),
        known_turn_s: float = 0.0,
    ) -> None:
        """Find out who leaves which node when.

        Args:
            since_s: since when each node is collected already, by its index.
            others: nodes that are collected for others.
            backfilled: jobs that were started in the room on condition that they leave it; None: not known, so whatever
                started on these nodes since they are collected.
            known_turn_s: when the reservation says that the job's turn is.
        """
        self.turn_s = turn_s(round_, assignment, known_turn_s)
        self.backfilled = backfilled
        self.round, self.assignment, self.candidate, self.since_s = round_, assignment, candidate, since_s
        self.nodes = round_.cluster.pools[candidate.pool]
        self.ask = request(candidate.per_pod, self.nodes.pool.is_cpu)
        self.right = round_.holdings.right(
            assignment.job.tenant, candidate.accelerator, candidate.accelerators_m
        )
        self.share_run_s = share_run_s(round_, assignment.job.tenant)
        self.patient = round_.is_patient(assignment)
        taken = (round_.barred(assignment, candidate.pool) | others) - since_s.keys()
        allowed = self.nodes.open_to(assignment.job, candidate)
        every = range(len(self.nodes.nodes)) if allowed is None else sorted(allowed)
        self.open = [i for i in every if self.nodes.usable[i] and i not in taken]
        self.budgets: dict[str, int] = {}
        if self.right is not Right.BORROWING:
            self.budgets = {
                tenant: spare_m(round_, tenant, candidate.accelerator, self.right)
                for (pool, tenant), held in sorted(round_.held.items())
                if pool == candidate.pool and held and tenant != assignment.job.tenant
            }
        self._leavers: dict[JobId, Leaver] = {}
        self._ends: Ends | None = None
        self._on_node: dict[int, list[tuple[Leaver, tuple[int, ...]]]] = {}

    def leavers(self, i: int) -> list[tuple[Leaver, tuple[int, ...]]]:
        """Who is on a node and what it has there, in the order in which they leave."""
        known = self._on_node.get(i)
        if known is None:
            known = self._on_node[i] = [
                (self._leaver(one), self.round.stay(one)[1][i])
                for one in self.round.on_node(self.candidate.pool, i)
            ]
            known.sort(key=lambda pair: (pair[0].leaves_at_s, pair[0].assignment.job.id))
        return known

    def _leaver(self, assignment: Assignment) -> Leaver:
        """When a job leaves, or may be stopped by the claim."""
        known = self._leavers.get(assignment.job.id)
        if known is not None:
            return known
        round_, own, job = self.round, self.assignment.job, assignment.job
        ends_at_s, holds = round_.stay(assignment)
        leaver = self._leavers[job.id] = Leaver(assignment, ends_at_s)
        yields = job.tenant == own.tenant or self.budgets.get(job.tenant, 0) > 0 or bool(self.since_s)
        if yields and job.preemptible and self._gives_way(assignment, leaver, holds):
            run_s = self._run_s(leaver)
            fresh = job.run is None
            leaver.may_stop_at_s = round_.now if fresh else max(round_.now, assignment.started_at_s + run_s)
        elif job.run is None and self._was_passed_by(assignment):
            leaver.may_stop_at_s = round_.now
        return leaver

    def _run_s(self, leaver: Leaver) -> float:
        """How long a job must have run that gives way to the claim."""
        by_share = leaver.budget is not None and self.right is Right.ENTITLED
        return self.share_run_s if by_share else self.round.policy.min_run_s

    def _gives_way(self, assignment: Assignment, leaver: Leaver, on: Iterable[int]) -> bool:
        """Whether the claim may stop the job, which is on these nodes, once it has run `min_run_s`."""
        round_, own, job = self.round, self.assignment.job, assignment.job
        if (
            self._was_backfilled(assignment, on)
            and job.kind is JobKind.TRAINING
            and round_.may_be_preempted_again(assignment)
        ):
            return True
        if job.tenant == own.tenant:
            return round_.priority(job) < round_.priority(own)
        if self.budgets.get(job.tenant, 0) <= 0:
            return False
        leaver.budget = job.tenant
        return self.right is Right.GUARANTEED or round_.may_be_preempted_again(assignment)

    def _was_backfilled(self, assignment: Assignment, on: Iterable[int]) -> bool:
        if self.backfilled is not None and assignment.job.id not in self.backfilled:
            return False
        return any(i in self.since_s and assignment.started_at_s >= self.since_s[i] - 1e-6 for i in on)

    def _was_passed_by(self, assignment: Assignment) -> bool:
        """Whether this job was only placed in this round and has no right to go first; one with a reservation was
        promised its place."""
        round_, own, job = self.round, self.assignment.job, assignment.job
        if job.tenant == own.tenant and round_.priority(job) != round_.priority(own):
            return round_.priority(job) < round_.priority(own)
        if (
            job.id in round_.holds
            or not self.patient
            or job.submitted_at_s <= own.submitted_at_s
            or assignment.candidate is None
        ):
            return False
        kind = assignment.candidate.accelerator
        if job.tenant != own.tenant and round_.holdings.inside_guarantee(job.tenant, kind):
            return False
        return assignment.candidate.accelerators_m < self.candidate.accelerators_m

    def ready(self) -> set[int]:
        """Nodes where a pod fits already."""
        return {i for i in self.open if self.nodes.room(i, self.ask, later=True) > 0}

    def hold(self, among: Iterable[int] | None = None) -> Hold | None:
        """The place that is ready first; None: there is none.

        Args:
            among: consider these nodes only.
        """
        depth = self.assignment.job.required_domain
        open_ = set(self.open) if among is None else set(self.open).intersection(among)
        domains = [open_]
        if depth is not None and depth > 0 and self.candidate.pods > 1:
            domains = [set(own) & open_ for own in self.nodes.nodes_by_domain(depth, frozenset(open_))]
        best: tuple[list[Slot], WattEnds] | None = None
        for domain in domains:
            found = self._first_in(domain)
            if found is not None and (best is None or found[1].at_s < best[1].at_s):
                best = found
        return None if best is None else self._hold_of(*best)

    def _first_in(self, domain: Set[int]) -> tuple[list[Slot], WattEnds] | None:
        """The place on these nodes that is ready first, and when. Where its power domains do not carry it by then, nodes
        that hang on other ones are looked at, too."""
        chosen = self._choose(domain)
        if chosen is None:
            return None
        ends = self._watts_of(chosen)
        if ends is not None and ends.at_s <= chosen[-1].at_s:
            return chosen, ends
        best = None if ends is None else (chosen, ends)
        for own in self.nodes.by_feed(domain):
            chosen = self._choose(own)
            ends = None if chosen is None else self._watts_of(chosen)
            if chosen is not None and ends is not None and (best is None or ends.at_s < best[1].at_s):
                best = chosen, ends
        return best

    def _watts_of(self, slots: list[Slot]) -> WattEnds | None:
        """When the power domains carry the place: when those have gone who leave for it, or others have ended."""
        feeds, own = self.round.cluster.feeds, self.assignment.job.id
        if feeds is None or not self.candidate.draw_w:
            return WattEnds(slots[-1].at_s)
        place = self.candidate.placed(tuple(self.nodes.nodes[one.node].name for one in slots))
        leaving = {leaver.assignment.job.id: leaver.assignment for one in slots for leaver in one.leavers}
        taken = promised(self.round, own)
        return watts_there(feeds, place, slots[-1].at_s, leaving, taken, self._all_ends)

    def _all_ends(self) -> Ends:
        if self._ends is None:
            self._ends = ends_of(self.round, self._leaves_at_s)
        return self._ends

    def _leaves_at_s(self, assignment: Assignment) -> float:
        """When a job on other nodes that this round has placed gives back its watts."""
        if self._was_passed_by(assignment):
            return self.round.now
        return self.round.stay(assignment)[0]

    def _choose(self, domain: Set[int]) -> list[Slot] | None:
        """The slots that are ready first, within what may be taken of each tenant; the last one last. A reservation
        that is kept does not lose its place where that has become less: there it waits until jobs end."""
        left = dict(self.budgets)
        chosen: list[Slot] = []
        skipped: set[int] = set()
        for stops in (True, False):
            counted: set[str] = set()
            nodes = domain if stops else set(skipped)
            for slot in self._in_order(nodes, stops, self.candidate.pods - len(chosen)):
                if len(chosen) == self.candidate.pods:
                    break
                if slot.node in skipped and stops:
                    continue
                cost = self._cost(slot, counted) if stops or not self.since_s else {}
                if any(amount > left[tenant] for tenant, amount in cost.items()):
                    skipped.add(slot.node)
                    continue
                for tenant, amount in cost.items():
                    left[tenant] -= amount
                counted |= {leaver.assignment.job.id for leaver in slot.leavers}
                chosen.append(slot)
            if len(chosen) == self.candidate.pods or not skipped:
                break
        chosen.sort(key=lambda slot: slot.at_s)
        return chosen if len(chosen) == self.candidate.pods else None

    def _in_order(self, nodes: Set[int], stops: bool, most: int) -> Iterator[Slot]:
        """The slots of these nodes, those that are ready first; where enough are ready now, the other nodes are not
        looked at."""
        later: list[Slot] = []
        for i in sorted(nodes, key=lambda i: (i not in self.since_s, i)):
            for slot in self._slots(i, stops, most):
                if slot.at_s <= self.round.now:
                    yield slot
                else:
                    later.append(slot)
        later.sort(key=lambda slot: (slot.at_s, slot.node not in self.since_s, slot.node))
        yield from later

    @staticmethod
    def _cost(slot: Slot, counted: set[str]) -> dict[str, int]:
        """What is taken of each tenant's surplus for a slot."""
        cost: dict[str, int] = {}
        for leaver in slot.leavers:
            place = leaver.assignment.placement
            if leaver.budget is None or place is None or leaver.assignment.job.id in counted:
                continue
            if leaver.may_stop_at_s < leaver.ends_at_s:
                cost[leaver.budget] = cost.get(leaver.budget, 0) + place.accelerators_m
        return cost

    def _slots(self, i: int, stops: bool, most: int) -> list[Slot]:
        """When room for the first, second, … pod is there on a node (`stops`: jobs may be stopped for it)."""
        free = list(self.nodes.free_later[i])
        found = [Slot(self.round.now, i) for _ in range(min(most, self.nodes.room_in(free, self.ask)))]
        if len(found) >= most:
            return found
        here = self.leavers(i)
        if not stops:
            here = sorted(here, key=lambda pair: pair[0].ends_at_s)
        gone: list[Leaver] = []
        for leaver, amounts in here:
            at_s = leaver.leaves_at_s if stops else leaver.ends_at_s
            if len(found) >= most or at_s == math.inf:
                break
            for k, amount in enumerate(amounts):
                free[k] += amount
            gone.append(leaver)
            room = min(most, self.nodes.room_in(free, self.ask))
            found += [Slot(at_s, i, list(gone)) for _ in range(room - len(found))]
        return found

    def _hold_of(self, slots: list[Slot], watts: WattEnds) -> Hold:
        now = self.round.now
        places = [slot.node for slot in slots]
        since_s = {i: self.since_s.get(i, now) for i in places}
        hold = Hold(self.assignment, self.candidate, self.nodes, since_s, places)
        hold.backfilled = None if self.backfilled is None else set(self.backfilled)
        hold.turn_s = self.turn_s
        hold.start_s = max(watts.at_s, self.turn_s)
        if hold.watts is not None:
            hold.watts.promised = promised(self.round, self.assignment.job.id)
        hold.leaving = {one.job.id: one for one in watts.leaving}
        ready: dict[int, bool] = {}
        for slot in slots:
            ready[slot.node] = ready.get(slot.node, True) and slot.at_s <= now + 1e-6
            for leaver in slot.leavers:
                hold.leaving[leaver.assignment.job.id] = leaver.assignment
                if leaver.may_stop_at_s <= now + 1e-6:
                    hold.victims[leaver.assignment.job.id] = leaver.assignment
        for i in set(places):
            for leaver, _ in self.leavers(i):
                if leaver.leaves_at_s <= hold.start_s:
                    hold.leaving[leaver.assignment.job.id] = leaver.assignment
        hold.collected = sum(ready.values())
        self.round.leavers |= hold.leaving.keys()
        return hold
