"""Which waiting jobs an answer to an event tries where something became free: of each user, as many as could have room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from functools import partial
from heapq import heapify, heappop, heapreplace

from ..model.snapshot import JobId
from .queues import Kind, Order, Request
from .round import Round
from .start import Blocked, order
from .state import Assignment, RankedCandidate

_Fitting = frozenset[tuple[int, int]]
"""Shapes and pods."""
_Wants = list[tuple[tuple[int, bool], int, int]]
"""What a job could have: what counts together (a shape, and whether it is worth its price), the room for it, and the pods
of one job."""


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
    by_user: defaultdict[tuple[str, str], list[tuple[list[Order], _Wants]]] = defaultdict(list)

    def fitting_of(one: Assignment) -> _Fitting:
        rows = [row for row in round_.ranked(one) if row.candidate.pool in pools]
        rows = [row for row in rows if _fits(round_, one, row, room, blocked)]
        return frozenset((row.shape, row.candidate.pods) for row in rows)

    fits: dict[Request, _Fitting] = {}
    for request, kinds in queues.settled(partial(order, round_)).items():
        able = fits[request] = fitting_of(assignments[next(iter(kinds.values()))[0][-1]])
        if able:
            for kind, queue in kinds.items():
                by_user[kind[:2]].append((queue, _wants(able, kind, room)))
    for request, groups in queues.groups(round_.ranked).items():
        if request not in fits:
            fits[request] = fitting_of(next(iter(next(iter(groups.values())).values())))
        if able := fits[request]:
            for kind, group in groups.items():
                queue = sorted(order(round_, one) for one in group.values())
                by_user[kind[:2]].append((queue, _wants(able, kind, room)))
    return [one for rows in by_user.values() for one in _foremost(round_, rows, known)]


def _wants(able: _Fitting, kind: Kind, room: dict[int, int]) -> _Wants:
    """The same for all jobs of a queue."""
    worth = kind[2]
    return [
        ((shape, worth is None or (shape, pods) in worth), room[shape], pods) for shape, pods in sorted(able)
    ]


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
    round_: Round, rows: list[tuple[list[Order], _Wants]], known: Container[JobId]
) -> list[Assignment]:
    """Of a user's queues: as many jobs as there could be room for, and as many that are worth their price. All jobs of a
    queue count alike, so after one that is not needed none is."""
    counts: defaultdict[tuple[int, bool], int] = defaultdict(int)
    chosen: list[Assignment] = []
    assignments = round_.state.assignments
    heap = [(queue[0], number, 0) for number, (queue, _) in enumerate(rows)]
    heapify(heap)
    while heap:
        key, number, at = heap[0]
        assignment, (queue, wants) = assignments[key[-1]], rows[number]
        needed = key[-1] in known or assignment.placement is not None
        if not needed:
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
