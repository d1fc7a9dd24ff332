"""Promised places: a job has one in the last plan, and others that are being stopped have still to leave it.

An answer to an event gives each of them to its job again (`reservations.keep`), and thousands of jobs may be stopping at
a time. So those of which that is certain are counted as taken before the round begins, and the planning state carries them
from answer to answer: only those that come or go cost anything. With all that is promised,

    nodes   are open and have room when the jobs have left that are being stopped in the pool
    quota   allows the tenant what it has then
    share   the place is due (`Shares.are_due`) after those of its tenant that come before, whatever other tenants have

The rest are given one after the other, after these. None is carried where power domains limit or devices are shared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..fairness.quota import EPS, Right
from ..model.snapshot import JobId, JobKind, Placement, Reservation
from .holds import Hold, since_of
from .state import PlanningState


@dataclass(frozen=True, slots=True)
class PromisedPlace:
    """A promised place, as the last plan listed it and as the job has it now."""

    reservation: Reservation
    hold: Hold
    placement: Placement


def carry(
    state: PlanningState, promised: Iterable[Reservation], now: float
) -> tuple[list[Reservation], list[Reservation]]:
    """Count those of these places as taken, and no others, that are given in any order. Returns these and the rest.

    Args:
        promised: places that the last plan gave, in its order.
    """
    wanted = {one.job: one for one in promised if _asks(state, one)}
    for job, known in list(state.carried.items()):
        if wanted.get(job) is not known.reservation and wanted.get(job) != known.reservation:
            drop(state, job)
    for job, one in wanted.items():
        if job not in state.carried:
            _take(state, one)
    for job in _doubtful(state, [job for job in wanted if job in state.carried]):
        drop(state, job)
    for known in state.carried.values():
        known.hold.start_s = known.hold.holder.started_at_s = now
    given = [one for job, one in wanted.items() if job in state.carried]
    return given, [one for job, one in wanted.items() if job not in state.carried]


def drop(state: PlanningState, job: JobId) -> None:
    """Count the place of a job as taken no longer."""
    known = state.carried.pop(job)
    assignment = known.hold.holder
    known.hold.nodes.take_promised(known.placement, sign=1)
    state.count_place(assignment, sign=-1)
    assignment.placement, assignment.candidate, assignment.started_at_s = None, None, 0.0
    assignment.waits_for_release = False


def drop_all(state: PlanningState) -> None:
    """Count none as taken."""
    for job in list(state.carried):
        drop(state, job)


def held_without(state: PlanningState) -> dict[str, float]:
    """Units that each tenant holds without the places that are carried."""
    less: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for known in state.carried.values():
        less[known.hold.holder.job.tenant][known.placement.accelerator] += known.placement.accelerators_m
    holdings = state.holdings
    return {
        tenant: holdings.units_without(tenant, less[tenant]) if tenant in less else holdings.units(tenant)
        for tenant in holdings.tenants
    }


def _asks(state: PlanningState, one: Reservation) -> bool:
    """Whether the job still waits and could have the place."""
    if one.job in state.carried:
        return True
    assignment = state.assignments.get(one.job)
    return (
        assignment is not None
        and assignment.job.run is None
        and one.placement.pool in state.cluster.pools
        and assignment.option.listed(one.placement) is not None
    )


def _take(state: PlanningState, one: Reservation) -> None:
    """Count a place as taken, if it could be carried."""
    assignment, nodes = state.assignments[one.job], state.cluster.pools[one.placement.pool]
    candidate = assignment.option.listed(one.placement)
    assert candidate is not None
    if (
        state.cluster.feeds is not None
        or nodes.width
        or assignment.job.kind is JobKind.OPAQUE
        or not nodes.may_hold(assignment.job, one.placement)
    ):
        return
    places = [nodes.index[name] for name in one.placement.nodes]
    hold = Hold(assignment, candidate, nodes, since_of(nodes, one), places)
    hold.collected = len(set(places))
    names = tuple(nodes.nodes[i].name for i in hold.places)
    assignment.candidate = state.candidates.for_nodes(assignment.option, candidate, names)
    assignment.placement = assignment.candidate.placed(names)
    assignment.waits_for_release = True
    nodes.take_promised(assignment.placement)
    state.count_place(assignment)
    state.carried[one.job] = PromisedPlace(one, hold, assignment.placement)


def _doubtful(state: PlanningState, jobs: Iterable[JobId]) -> list[JobId]:
    """Of these jobs, whose places are counted as taken, those that might not be given theirs after the ones before."""
    found: list[JobId] = []
    holdings, before = state.holdings, held_without(state)
    for job in jobs:
        hold, place = state.carried[job].hold, state.carried[job].placement
        tenant, kind = hold.holder.job.tenant, place.accelerator
        own, share = holdings.units_of(kind, place.accelerators_m), holdings.entitled.get(tenant, 0.0) + EPS
        is_due = own > share or before.get(tenant, 0.0) <= share
        free = hold.nodes.free_later
        if (
            (is_due or holdings.right(tenant, kind, 0) is not Right.BORROWING)
            and hold.nodes.releasing
            and all(min(free[i]) >= 0 for i in hold.places)
            and holdings.refusal(tenant, kind, 0) is None
        ):
            before[tenant] += own
        else:
            found.append(job)
    return found
