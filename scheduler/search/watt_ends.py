"""When the watts of a reservation are there: those of jobs that leave its nodes, and of others that end on its domains.

Watts that an earlier reservation will get of those who leave are counted as its own: two promises never count on the same
watt. Who is not on the nodes is not stopped for their watts; they leave when they end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ..model.snapshot import JobId, Placement
from ..placement.feeds import LATER, Feeds
from .round import Round
from .state import Assignment

MOST_ENDS = 32
"""A start that waits for the ends of more jobs on other nodes is not promised: one of them will run longer. So nothing is
collected on a domain that is far above what it carries."""


@dataclass(frozen=True, slots=True)
class WattEnds:
    """From when the power domains carry a place."""

    at_s: float
    leaving: tuple[Assignment, ...] = ()
    """Who ends for it on other nodes."""


def promised(round_: Round, holder: JobId) -> dict[int, int]:
    """What reservations of others will get of jobs that still run, by domain."""
    total: Counter[int] = Counter()
    for hold in round_.holds.values():
        if hold.applied and hold.watts is not None and hold.holder.job.id != holder:
            total.update(hold.watts.outstanding())
    return dict(total)


Ends = Sequence[tuple[float, JobId, Assignment]]
"""When jobs give back their watts, the first to do so first."""


def ends_of(round_: Round, leaves_at_s: Callable[[Assignment], float]) -> Ends:
    """Of all jobs that draw anything and whose end is known.

    Args:
        leaves_at_s: when a job that this round has placed does so; those that ran before stay until their end.
    """
    ran, placed = round_.cached(("ends",), None, lambda: _ends_now(round_))
    more = [(leaves_at_s(one), name, one) for name, one in placed]
    more = [end for end in more if not math.isinf(end[0])]
    return sorted([*ran, *more], key=itemgetter(0, 1)) if more else ran


def _ends_now(round_: Round) -> tuple[Ends, list[tuple[JobId, Assignment]]]:
    """The ends of the jobs that ran before, in order, and the jobs that were placed in this round."""
    ran: list[tuple[float, JobId, Assignment]] = []
    placed = []
    for name, one in round_.assignments.items():
        if one.placement is None or not one.placement.watts:
            continue
        if one.job.run is None:
            placed.append((name, one))
        elif not math.isinf(ends_at_s := round_.stay(one)[0]):
            ran.append((ends_at_s, name, one))
    return sorted(ran, key=itemgetter(0, 1)), placed


def watts_there(
    feeds: Feeds,
    place: Placement,
    at_s: float,
    leaving: Mapping[JobId, Assignment],
    taken: Mapping[int, int],
    ends: Callable[[], Ends],
) -> WattEnds | None:
    """When the domains carry a place whose room is there at `at_s`; None: nobody knows.

    Args:
        leaving: who leaves the nodes until then.
        taken: what of the watts that come free is promised to others.
        ends: asked only where watts are short.
    """
    left = feeds.left[LATER]
    short = {
        number: asked + taken.get(number, 0) - left[number] for number, asked in feeds.asked(place).items()
    }
    for one in leaving.values():
        _give(short, feeds.given_back(one.placement, short))
    if _enough(short.values()):
        return WattEnds(at_s)
    if any(feeds.domains[number].closed for number in short):
        return None  # what comes free there is given to nobody
    found: list[Assignment] = []
    for ends_at_s, name, one in ends():
        if name in leaving:
            continue
        back = feeds.given_back(one.placement, short)
        if any(short[number] > 0 for number in back):
            found.append(one)
            if len(found) > MOST_ENDS:
                return None
            _give(short, back)
            if _enough(short.values()):
                return WattEnds(max(at_s, ends_at_s), tuple(found))
    return None


def _give(short: dict[int, int], back: Mapping[int, int]) -> None:
    for number, watts in back.items():
        short[number] -= watts


def _enough(short: Iterable[int]) -> bool:
    return all(watts <= 0 for watts in short)
