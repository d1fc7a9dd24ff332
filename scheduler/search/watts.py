"""Watts that are left over: capped jobs get them without a restart.

A job that started under a power cap (`candidates/capped.py`) has a higher one, or none, as soon as every power domain
above its nodes carries the difference and no waiting job lacks watts there: the board's limit is written anew and the job
runs on. Nobody's cap is lowered while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush

from ..candidates.candidate import Candidate
from ..model.snapshot import Placement
from ..placement.feeds import LATER, NOW, Feeds
from .round import Round
from .state import Assignment

_Step = tuple[float, str, float, float, int, tuple[Placement, Assignment, Candidate]]
"""A lift, the most gain per watt first; no two are equal before the last part."""
SAMPLE = 16
"""Waiting jobs that are asked what watts they lack; they are in the order in which they would start."""


def lift(round_: Round, blocked: Iterable[Assignment], lacking: Iterable[str] = ()) -> None:
    """Raise the caps of jobs where watts are left, the most gain per watt first.

    Args:
        blocked: jobs that could not start, in their order.
        lacking: names of domains on which other jobs lack watts; read only if watts are limited.
    """
    feeds = round_.cluster.feeds
    capped = [] if feeds is None else [one for one in round_.assignments.values() if _is_capped(one)]
    if feeds is None or not capped:
        return
    names = set(lacking)
    kept = _lacks(round_, feeds, blocked)
    kept |= {number for number, domain in enumerate(feeds.domains) if domain.name in names}
    heap: list[_Step] = []
    for assignment in capped:
        _push(heap, assignment)
    while heap:
        *_, (place, assignment, higher) = heappop(heap)
        if assignment.placement is not place or kept & _domains(feeds, place):
            continue  # it has another cap by now, or others lack watts there
        more = replace(place, watts=higher.draw_w - place.watts)
        if feeds.fits(more, NOW) and feeds.fits(more, LATER):
            started_at_s = assignment.started_at_s
            round_.clear(assignment)
            lifted = replace(place, watts=higher.draw_w, power_cap=higher.power_cap)
            round_.restore(assignment, lifted, higher, started_at_s)
            _push(heap, assignment)


def _push(heap: list[_Step], assignment: Assignment) -> None:
    """Note the caps to which the job could be lifted from where it is."""
    place = assignment.placement
    assert place is not None
    for gain, one in _higher(assignment):
        caps = place.power_cap, one.power_cap
        step = -gain, assignment.job.id, *caps, one.nodes, (place, assignment, one)
        heappush(heap, step)


def _is_capped(assignment: Assignment) -> bool:
    place = assignment.placement
    return (
        place is not None
        and place.power_cap < 1
        and assignment.candidate is not None
        and not assignment.waits_for_release
    )


def _higher(assignment: Assignment) -> Iterator[tuple[float, Candidate]]:
    """The same place under higher caps, each with the value that it gains per watt of one pod."""
    now, place = assignment.candidate, assignment.placement
    assert now is not None
    assert place is not None
    for one in assignment.option.candidates:
        same = (one.pool, one.mode, one.pods, one.per_pod) == (now.pool, now.mode, now.pods, now.per_pod)
        there = not one.nodes or one.nodes == now.nodes
        if same and there and one.power_cap > now.power_cap and one.value > now.value:
            yield (one.value - now.value) / max(one.draw_w - place.watts, 1), one


def _lacks(round_: Round, feeds: Feeds, blocked: Iterable[Assignment]) -> set[int]:
    """The domains on which the first of these jobs lack watts."""
    waiting = [one for one in blocked if one.placement is None][:SAMPLE]
    lacks = (
        round_.cluster.lack(assignment.job, row.candidate)
        for assignment in waiting
        for row in round_.ranked(assignment)
    )
    return {lack.number for lack in lacks if lack is not None and lack.short_w > 0}


def _domains(feeds: Feeds, place: Placement) -> set[int]:
    return {number for name in place.nodes for number in feeds.chains.get(name, ())}
