"""Elastic victims: they give back the pods that are needed and go on with the others.

A shrink costs what a stop costs (the whole gang restarts from its last checkpoint), so it never loses less
work than stopping the same job. But the job goes on, and a part may be taken where the whole may not: from a
tenant that would fall below its fair share without the job. There are two moments:

    offered    a job that cannot be taken whole is offered to the search for victims (`victims.py`) as the part
               that may be taken; its cost per accelerator counts the work of the whole job
    kept       when the stronger job has its place, every elastic victim keeps as many of its pods as still fit
               where they ran, unless a better candidate is free for it elsewhere

A job never shrinks below `min_pods`, to any size that it could be started with, and only on its own nodes. So it
gives back what is needed and no more.
Taking more of what it keeps costs nothing in the same round: it restarts anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..candidates.candidate import Candidate
from ..model.snapshot import Placement
from ..placement.feeds import NOW
from ..placement.pool import request
from .round import Round
from .state import Assignment
from .victim_groups import Part


def partial_victim(round_: Round, assignment: Assignment, allowed: Callable[[int], bool]) -> Part | None:
    """The most that may be taken of an elastic job; None: nothing.

    Args:
        allowed: whether this much (thousandths of an accelerator) may be taken.
    """
    placement = assignment.placement
    if placement is None or not assignment.can_shrink:
        return None
    for pods in range(assignment.job.min_pods, placement.pods):
        candidate = round_.sized(assignment, placement, pods)
        if candidate is not None and allowed(placement.accelerators_m - candidate.accelerators_m):
            stays = _stays(round_, assignment, Counter(placement.nodes), candidate)
            if stays is None:
                return None
            leaves = Counter(placement.nodes) - Counter(stays)
            return Part(candidate, stays, tuple(sorted(leaves.elements())))
    return None


def keep_pods(round_: Round, assignment: Assignment, held: Placement) -> None:
    """Let an elastic job that has to give way keep the most pods that still fit where it ran.

    Args:
        assignment: its place was taken away, or is the part that was offered.
        held: the place that it had.
    """
    least = 0 if assignment.placement is None else assignment.placement.pods
    room = _room(round_, assignment, held)
    most = min(held.pods - 1, room.total())
    for pods in range(most, max(assignment.job.min_pods - 1, least), -1):
        candidate = round_.sized(assignment, held, pods)
        if candidate is None:
            continue
        stays = _stays(round_, assignment, room, candidate)
        if stays is not None:
            if least or not _better_elsewhere(round_, assignment, candidate):
                waits = assignment.waits_for_release
                round_.clear(assignment)
                round_.put(assignment, candidate, stays, release=waits)
            return


def _room(round_: Round, assignment: Assignment, held: Placement) -> Counter[str]:
    """Pods of the job that fit on its own nodes, those that stay included."""
    nodes = round_.cluster.pools[held.pool]
    ask = request(held.per_pod, nodes.pool.is_cpu)
    place = assignment.placement
    own = Counter(() if place is None else (name for name in place.nodes if name in nodes.index))
    counts = Counter(held.nodes)
    more = [
        (i, min(counts[name] - own[name], nodes.room(i, ask, later=False)))
        for name in counts
        if (i := nodes.index.get(name)) is not None
    ]
    for i, count in nodes.powered(more, held.watts, NOW):
        own[nodes.nodes[i].name] += count
    return own


def _stays(
    round_: Round, assignment: Assignment, room: Counter[str], candidate: Candidate
) -> tuple[str, ...] | None:
    """The pods that go on: on few nodes, the fullest ones, so that what is given back is contiguous."""
    nodes = round_.cluster.pools[candidate.pool]
    allowed = nodes.selected_nodes(assignment.job)
    open_ = [
        (-count, nodes.free_later[i][nodes.key], name)
        for name, count in room.items()
        if count > 0
        and (i := nodes.index.get(name)) is not None
        and nodes.usable[i]
        and (allowed is None or i in allowed)
    ]
    found = [name for count, _, name in sorted(open_) for _ in range(-count)][: candidate.pods]
    if len(found) < candidate.pods or not nodes.limits(candidate.placed(tuple(found))):
        return None
    return tuple(sorted(found))


def _better_elsewhere(round_: Round, assignment: Assignment, candidate: Candidate) -> bool:
    """Whether the job could start now with a candidate of higher value."""
    job = assignment.job
    for other in assignment.option.candidates:
        if other.value <= candidate.value:
            return False
        if round_.allows(job, other):
            found = round_.find(job, other)
            if found is not None and not found[1]:
                return True
    return False
