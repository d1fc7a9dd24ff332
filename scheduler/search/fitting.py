"""Which waiting jobs an answer to an event tries where something became free: of each user, as many as could have room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from functools import partial
from heapq import heapify, heappop, heapreplace

from ..model.snapshot import JobId
from .queues import Order, Request, request_of
from .round import Round
from .start import Blocked, order
from .state import Assignment, RankedCandidate

_Fitting = frozenset[tuple[int, int]]
"""Shapes and pods."""


def fitting(round_: Round, pools: set[str], blocked: Blocked, known: Container[JobId]) -> list[Assignment]:
    """Waiting jobs that fit in these pools, without those that are known.

    Args:
        blocked: takes note of requests that do not fit.
    """
    if not pools:
        return []
    assignments, queues = round_.state.assignments, round_.state.queues
    room: dict[int, int] = {}
    """Pods of each shape that there is room for."""
    fits: dict[Request, _Fitting] = {}
    by_user: defaultdict[tuple[str, str], list[tuple[list[Order], _Fitting]]] = defaultdict(list)

    def fitting_of(one: Assignment) -> _Fitting:
        found = fits.get(request := request_of(one))
        if found is None:
            rows = [row for row in round_.ranked(one) if row.candidate.pool in pools]
            rows = [row for row in rows if _fits(round_, one, row, room, blocked)]
            found = fits[request] = frozenset((row.shape, row.candidate.pods) for row in rows)
        return found

    for kinds in queues.settled(partial(order, round_)).values():
        able = fitting_of(assignments[next(iter(kinds.values()))[0][-1]])
        if able:
            for (tenant, user, _), queue in kinds.items():
                by_user[tenant, user].append((queue, able))
    for one in queues.stopped.values():
        if able := fitting_of(one):
            by_user[one.job.tenant, one.job.user].append(([order(round_, one)], able))
    return [one for rows in by_user.values() for one in _foremost(round_, rows, room, known)]


def _fits(
    round_: Round, assignment: Assignment, row: RankedCandidate, room: dict[int, int], blocked: Blocked
) -> bool:
    """Whether the job fits with this candidate now."""
    candidate, shape = row.candidate, row.shape
    if candidate.pods >= blocked.least.get(shape, 1 << 30):
        return False
    if shape not in room:
        room[shape] = round_.pods_that_fit(assignment.job, candidate)
    if room[shape] >= candidate.pods:
        return True
    blocked.note(shape, candidate.pods)
    return False


def _foremost(
    round_: Round, rows: list[tuple[list[Order], _Fitting]], room: dict[int, int], known: Container[JobId]
) -> list[Assignment]:
    """Of a user's queues, each with what fits of it: as many jobs as there could be room for, and as many that are worth
    their price. All jobs of a queue count alike, so after one that is not needed none is."""
    counts: defaultdict[tuple[int, bool], int] = defaultdict(int)
    chosen: list[Assignment] = []
    assignments = round_.state.assignments
    heap = [(queue[0], number, 0) for number, (queue, _) in enumerate(rows)]
    heapify(heap)
    wanted: list[list[tuple[tuple[int, bool], int, int]] | None] = [None] * len(rows)
    """Of each queue: what counts together, the room for it, and the pods of one job."""
    while heap:
        key, number, at = heap[0]
        assignment, (queue, able) = assignments[key[-1]], rows[number]
        needed = key[-1] in known or assignment.placement is not None
        if not needed:
            wants = wanted[number]
            if wants is None:
                wants = wanted[number] = [
                    ((row.shape, row.profit >= 0), room[row.shape], row.candidate.pods)
                    for row in round_.ranked(assignment)
                    if (row.shape, row.candidate.pods) in able
                ]
            for together, most, pods in wants:
                if counts[together] < most:
                    counts[together] += pods
                    needed = True
            if needed:
                chosen.append(assignment)
        if needed and at + 1 < len(queue):
            heapreplace(heap, (queue[at + 1], number, at + 1))
        else:
            heappop(heap)
    return chosen
