"""Exchanges by value inside one tenant, each tried out to its end before it is kept.

What a job loses if it must leave its place is estimated at the prices (`displace.regret`): as if it could have its
next best column for what that costs. Whether it can is seen only when it looks for a place: that column may be held
by a gang that nothing pays to move. So an exchange is carried out on the books, together with all that follows
from it: who lost a place takes free room, as do other waiting jobs of the tenant, or else the place of somebody
to whom it is worth less, and so on. Such a chain passes each pool once at most. It is kept where what is gained
is `MARGIN` times what is lost, moves counted at `Policy.move_gain_factor` times their cost; otherwise
everything is put back. Without this, two ways to hand out the same accelerators, each of which looks better from
the other, would take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from .books import Seat
from .columns import Candidate
from .displace import MARGIN, by_value, charge, claim, displace, hours_left
from .fill import fill
from .round import Mark, Round
from .victims import Group

ATTEMPTS = 64
"""Exchanges tried for waiting jobs, and exchanges undone of running ones, in one pass; the most valuable jobs are
tried first."""
NEGLIGIBLE = 1e-9
"""Value per hour."""


def improve(round_: Round, blocked: list[Seat]) -> bool:
    """Put jobs that could not start, or that were only now given a place that is not their best, in the place of
    less valuable ones of their tenant; whether anything changed."""
    changed = False
    attempts = 0
    for seat in [*blocked, *_fresh(round_)]:
        if attempts >= ATTEMPTS or not round_.calm():
            break
        for offer in _offers(round_, seat):
            attempts += 1
            if kept(round_, seat, offer):
                changed = True
                break
    return changed


def improve_one(round_: Round, seat: Seat) -> bool:
    """The same for one job."""
    return round_.calm() and any(kept(round_, seat, offer) for offer in _offers(round_, seat))


def _fresh(round_: Round) -> list[Seat]:
    """Jobs that start in this round, in order of id."""
    return [
        seat
        for seat in round_.changed
        if seat.job.run is None and seat.column is not None and not seat.waits_for_release
    ]


def _offers(round_: Round, seat: Seat) -> Iterator[Callable[[], bool]]:
    """Ways to put a job where less valuable ones are, best first, if it has no place or one less good."""
    for ranked in round_.ranked(seat)[:2]:
        column = ranked.column
        if ranked.profit <= 0 or column is seat.column:
            return
        if round_.ledger.refusal(seat.job.tenant, column.accelerator, 0):
            continue
        worth = claim(round_, seat, column)
        eligible = by_value(round_, seat, column, worth)
        if eligible.count:
            yield partial(swap, round_, seat, column, eligible, worth)


def swap(round_: Round, seat: Seat, column: Candidate, eligible: Group, worth: float) -> bool:
    """Put the job in the place of some of these; False (and no change) if that costs more than it is worth."""
    placement, old, started = seat.placement, seat.column, seat.started_at_s
    round_.clear(seat)
    if displace(round_, seat, column, [eligible], worth):
        return True
    if placement is not None:
        round_.restore(seat, placement, old, started)
    return False


def kept(round_: Round, seat: Seat, change: Callable[[], bool]) -> bool:
    """Carry a change for this job out with all that follows; undo it and answer False unless it gains."""
    before = round_.mark()
    calm = min(0, round_.budget_left)
    if not change():
        return False
    _follow(round_, before)
    won, lost = _balance(round_, seat, before)
    if won > MARGIN * lost + NEGLIGIBLE and round_.budget_left >= calm:
        return True
    round_.undo_to(before)
    return False


def _follow(round_: Round, before: Mark) -> None:
    """Find places for those who lost theirs since the mark."""
    for _ in round_.cluster.pools:
        homeless = {
            seat.job.id: seat
            for seat, (placement, *_) in round_.since(before)
            if placement is not None and seat.placement is None
        }
        if not homeless:
            return
        tenants = {seat.job.tenant for seat in homeless.values()}
        fill(round_, [seat for seat in round_.waiting() if seat.job.tenant in tenants])
        for seat in homeless.values():
            any(offer() for offer in _offers(round_, seat))


def _balance(round_: Round, seat: Seat, before: Mark) -> tuple[float, float]:
    """Value per hour won by some and lost by others since the mark, moves counted as losses."""
    won = lost = 0.0
    hours = math.inf if seat.column is None else hours_left(seat, seat.column)
    for other, (placement, old, _, waited) in round_.since(before):
        new = other.column
        now = 0.0 if new is None or other.waits_for_release else new.value
        was = 0.0 if old is None or waited else old.value
        change = now - was
        won += max(0.0, change)
        lost += max(0.0, -change)
        run, column = other.job.run, new or old
        if run is not None and placement == run.placement and column is not None:
            lost += charge(round_, other, min(hours, hours_left(other, column)))
    return won, lost
