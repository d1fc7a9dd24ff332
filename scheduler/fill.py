"""Starting waiting jobs in free room, in order of rights.

Whose turn it is: the tenant whose next job has the strongest right (guarantee, fair share, borrowing), then
the one that holds least for its weight. Which job: highest priority, then serving, then those that were not
stopped lately, then most value per accelerator. Where: the column with the most value above its price.

    pass   rights               columns
    1      guaranteed           any
    2      at least entitled    worth their price
    3      at least entitled    any
    4, 5   any                  worth their price, then any

So room that was cleared on the strength of a right is never taken by a weaker one, and a job that was stopped
does not take back the place it was stopped for.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .columns import Candidate
from .ledger import Right
from .round import Round, Seat
from .types import JobId, JobKind, Resources

_Shape = tuple[str, Resources, tuple[tuple[str, str], ...], int | None]


class Blocked:
    """Requests that did not fit. While room only shrinks, what is at least as large does not fit either."""

    def __init__(self) -> None:
        self._least: dict[_Shape, int] = {}

    def hopeless(self, seat: Seat, column: Candidate) -> bool:
        return column.pods >= self._least.get(_shape(seat, column), 1 << 30)

    def note(self, seat: Seat, column: Candidate) -> None:
        shape = _shape(seat, column)
        self._least[shape] = min(column.pods, self._least.get(shape, 1 << 30))


def _shape(seat: Seat, column: Candidate) -> _Shape:
    return column.pool, column.per_pod, seat.job.node_selector, seat.job.required_domain


def density(seat: Seat) -> float:
    """Most value per accelerator that any column of the job brings."""
    return max((c.value / max(c.accelerators_m, 1) * 1000 for c in seat.option.columns), default=0.0)


def order(round_: Round, seat: Seat) -> tuple[int, bool, bool, float, float, JobId]:
    """The order of one tenant's jobs."""
    job = seat.job
    return (
        -round_.priority(job),
        job.kind is not JobKind.SERVING,
        round_.stopped_lately(job),
        -density(seat),
        job.submitted_at_s,
        job.id,
    )


PASSES = (
    (Right.GUARANTEED, False),
    (Right.ENTITLED, True),
    (Right.ENTITLED, False),
    (Right.BORROWING, True),
    (Right.BORROWING, False),
)
"""Weakest right served, and whether only columns worth their price count."""


def fill(round_: Round) -> list[Seat]:
    """Start what fits; returns the jobs that could not start, in the order in which they were tried."""
    blocked = Blocked()
    left = round_.waiting()
    keys = {seat.job.id: order(round_, seat) for seat in left}
    for right, worthwhile in PASSES:
        left.sort(key=lambda seat: keys[seat.job.id], reverse=True)
        left = _pass(round_, left, blocked, right, worthwhile)
    return left


def _pass(round_: Round, seats: list[Seat], blocked: Blocked, weakest: Right, worthwhile: bool) -> list[Seat]:
    queues: dict[str, list[Seat]] = {}
    for seat in seats:
        queues.setdefault(seat.job.tenant, []).append(seat)
    heap = [(*_turn(round_, queue[-1]), name) for name, queue in sorted(queues.items())]
    heapify(heap)
    left: list[Seat] = []
    while heap:
        right, standing, name = heappop(heap)
        queue = queues[name]
        fresh = _turn(round_, queue[-1])
        if fresh != (right, standing):
            heappush(heap, (*fresh, name))
            continue
        seat = queue.pop()
        if right > weakest or not start(round_, seat, blocked, weakest, worthwhile):
            left.append(seat)
        if queue:
            heappush(heap, (*_turn(round_, queue[-1]), name))
    return left


def _turn(round_: Round, seat: Seat) -> tuple[Right, float]:
    ledger, tenant = round_.ledger, seat.job.tenant
    right = Right.BORROWING
    for accelerator, amount_m in seat.option.sizes:
        right = min(right, ledger.right(tenant, accelerator, amount_m))
    return right, ledger.standing(tenant)


def start(round_: Round, seat: Seat, blocked: Blocked, weakest: Right, worthwhile: bool) -> bool:
    """Start one job on its best column that fits and to which it has a right at least so strong."""
    ranked = sorted(
        ((round_.profit(column), -number, column) for number, column in enumerate(seat.option.columns)),
        key=lambda item: (-item[0], -item[1]),
    )
    for profit, _, column in ranked:
        if worthwhile and profit < -1e-9:
            return False
        if blocked.hopeless(seat, column):
            continue
        tenant, accelerator, amount_m = seat.job.tenant, column.accelerator, column.accelerators_m
        if weakest < Right.BORROWING and round_.ledger.right(tenant, accelerator, amount_m) > weakest:
            continue
        if round_.ledger.refusal(tenant, accelerator, amount_m):
            continue
        found = round_.find(seat.job, column)
        if found is None:
            blocked.note(seat, column)
            continue
        round_.put(seat, column, *found)
        return True
    return False
