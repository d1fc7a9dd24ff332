"""Moving and resizing running jobs to better columns.

A job moves only if the time it saves over the rest of its life is at least `Policy.move_gain_factor` times
what the move costs (restart and work since the last checkpoint), and only to a column that is also better
value at the prices: a fast type that others need more is left to them.
"""

from __future__ import annotations

from functools import partial

from .books import Seat
from .columns import Candidate
from .displace import MARGIN, by_value, claim, hours_left, own_charge
from .exchange import ATTEMPTS, kept, swap
from .round import Round


def move(round_: Round) -> bool:
    """Move running jobs into free room, the largest gain first; whether anything changed."""
    proposals: list[tuple[float, str, Seat, Candidate]] = []
    for seat in round_.seats.values():
        if round_.movable(seat):
            proposals.extend((-gain, seat.job.id, seat, column) for gain, column in better(round_, seat))
    proposals.sort(key=lambda item: (item[0], item[1]))
    changed = False
    undone = 0
    for _, _, seat, column in proposals:
        if not round_.calm():
            break
        if not round_.movable(seat) or seat.column is None or seat.started_at_s >= round_.now:
            continue
        if _try(round_, seat, column):
            changed = True
        elif undone < ATTEMPTS:
            done = _exchange(round_, seat, column)
            undone += done is False
            changed = changed or done is True
    return changed


def better(round_: Round, seat: Seat) -> list[tuple[float, Candidate]]:
    """Columns worth a move, with the gain in value per hour above prices."""
    current = seat.column
    if current is None:
        return []
    found = []
    for column in seat.option.columns:
        gain = round_.profit(column) - round_.profit(current)
        if gain > 0 and pays(round_, seat, current, column):
            found.append((gain, column))
    return found


def pays(round_: Round, seat: Seat, current: Candidate, column: Candidate) -> bool:
    """Whether the column is clearly faster, no more than a round's growth, and saves over the rest of the job's
    life enough times what the move costs."""
    if column is current or column.speed <= current.speed * (2 - 1 / MARGIN):
        return False
    same = column.pool == current.pool and column.mode == current.mode
    if same and column.pods > current.pods * round_.policy.growth_factor:
        return False
    saved_h = hours_left(seat, current) - hours_left(seat, column)
    return saved_h >= round_.policy.move_gain_factor * round_.lost_s(seat) / 3600


def _try(round_: Round, seat: Seat, column: Candidate) -> bool:
    """Move if the job fits there with its own resources given back, and quota allows it."""
    placement, old, started = seat.placement, seat.column, seat.started_at_s
    if placement is None:
        return False
    round_.clear(seat)
    refused = round_.ledger.refusal(seat.job.tenant, column.accelerator, column.accelerators_m)
    found = None if refused else round_.find(seat.job, column)
    if found is None or found[1]:
        round_.restore(seat, placement, old, started)
        return False
    round_.put(seat, column, *found)
    return True


def _exchange(round_: Round, seat: Seat, column: Candidate) -> bool | None:
    """Move into the place of less valuable jobs of the same tenant; they go where there is room, often to
    the place that this job leaves. None: there are none; False: it does not pay."""
    worth = claim(round_, seat, column) - own_charge(round_, seat, column)
    eligible = by_value(round_, seat, column, worth)
    if not eligible.count or round_.ledger.refusal(seat.job.tenant, column.accelerator, 0):
        return None
    return kept(round_, seat, partial(swap, round_, seat, column, eligible, worth))
