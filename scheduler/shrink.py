"""Smaller places for elastic victims: give back the pods that are needed, go on with the others.

A shrink costs what a stop costs (the whole gang starts again from its last checkpoint), so it never loses less
work than stopping the same job; but the job goes on, and a part can be taken where the whole must not be: from a
tenant that would fall below its fair share without the job. Two moments:

    offered    a job that cannot be taken whole is offered to the search for victims (`victims.py`) as the part
               that may be taken; its price per accelerator counts the work of the whole job
    kept       when the stronger job has its place, every elastic victim keeps as many of its pods as still fit
               where they ran, unless something better than that is free for it elsewhere

A job never shrinks below `min_pods`, only to sizes that it could be started with, and only on its own nodes. What
it keeps costs nothing more to take in the same round: it has to start again anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from .books import Seat
from .columns import Candidate, Part
from .pool_nodes import request
from .round import Round
from .types import JobKind


def smaller(seat: Seat) -> list[Candidate]:
    """Columns that differ from the seat's by fewer pods only, largest first."""
    placement = seat.placement
    if placement is None or placement.pods <= seat.job.min_pods or seat.job.kind is not JobKind.TRAINING:
        return []
    found = [
        column
        for column in seat.option.columns
        if column.pods < placement.pods
        and (column.pool, column.mode, column.per_pod) == (placement.pool, placement.mode, placement.per_pod)
    ]
    return sorted(found, key=lambda column: -column.pods)


def part(round_: Round, seat: Seat, allowed: Callable[[int], bool]) -> Part | None:
    """The most that may be taken of an elastic job; None: nothing.

    Args:
        allowed: whether so much (thousandths of an accelerator) may be taken.
    """
    placement = seat.placement
    for column in reversed(smaller(seat)):
        assert placement is not None
        if allowed(placement.accelerators_m - column.accelerators_m):
            stays = _stays(round_, seat, Counter(placement.nodes), column)
            if stays is None:
                return None
            leaves = Counter(placement.nodes) - Counter(stays)
            return Part(column, stays, tuple(sorted(leaves.elements())))
    return None


def keep(round_: Round, seat: Seat, sizes: Sequence[Candidate], held: Sequence[str]) -> None:
    """Let an elastic job that has to give way keep the most pods that still fit where it ran.

    Args:
        seat: its place has been taken away, or is the part that was offered.
        sizes: `smaller` of the place that it had.
        held: where its pods ran, by pod.
    """
    least = 0 if seat.placement is None else seat.placement.pods
    for column in sizes:
        if column.pods <= least:
            return
        room = _room(round_, seat, column, held)
        stays = _stays(round_, seat, room, column)
        if stays is not None:
            if least or not _better_elsewhere(round_, seat, column):
                round_.clear(seat)
                round_.put(seat, column, stays)
            return


def _room(round_: Round, seat: Seat, column: Candidate, held: Sequence[str]) -> Counter[str]:
    """Pods of the job that its own nodes have room for, those that stay included."""
    nodes = round_.cluster.pools[column.pool]
    ask = request(column.per_pod, nodes.pool.is_cpu)
    own = Counter(() if seat.placement is None else seat.placement.nodes)
    room: Counter[str] = Counter()
    for name, count in Counter(held).items():
        i = nodes.index.get(name)
        if i is not None:
            room[name] = min(count, own[name] + nodes.room(i, ask, later=False))
    return room


def _stays(round_: Round, seat: Seat, room: Counter[str], column: Candidate) -> tuple[str, ...] | None:
    """Which pods go on: few nodes, and the fullest, so that what is given back lies together."""
    nodes = round_.cluster.pools[column.pool]
    allowed = nodes.selected(seat.job)
    open_ = [
        (-count, nodes.later[i][nodes.key], name)
        for name, count in room.items()
        if count > 0
        and (i := nodes.index.get(name)) is not None
        and nodes.usable[i]
        and (allowed is None or i in allowed)
    ]
    found = [name for count, _, name in sorted(open_) for _ in range(-count)][: column.pods]
    return tuple(sorted(found)) if len(found) == column.pods else None


def _better_elsewhere(round_: Round, seat: Seat, column: Candidate) -> bool:
    """Whether the job could start now in a column worth more than this one."""
    ledger, job = round_.ledger, seat.job
    for other in seat.option.columns:
        if other.value <= column.value:
            return False
        if ledger.refusal(job.tenant, other.accelerator, other.accelerators_m) is None:
            found = round_.find(job, other)
            if found is not None and not found[1]:
                return True
    return False
