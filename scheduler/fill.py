"""Starting waiting jobs in free room, in order of rights.

Whose turn it is: the tenant whose next job has the strongest right (guarantee, fair share, borrowing), then,
of guarantees, the one whose job has waited into its deadline (`Round.due_at_s`; the earliest first), then the
one that holds, and has held lately, least for its weight. Which job: highest priority, then serving, then
those that were not stopped lately; then its users take turns by the same rule (inside their share of the
tenant's, then least for their weight); a user's jobs by most value per accelerator. Where: the column with
the most value above its price.

    pass   rights               columns
    1      guaranteed           any
    2      at least entitled    worth their price
    3      at least entitled    any
    4, 5   any                  worth their price, then any

So room that was cleared on the strength of a right is never taken by a weaker one, and a job that was stopped
does not take back the place it was stopped for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import cast

from .books import Ranked, Seat
from .ledger import Right
from .round import Round
from .types import JobId, JobKind


class Blocked:
    """Requests that did not fit. While room only shrinks, what is at least as large does not fit either."""

    def __init__(self) -> None:
        self.least: dict[int, int] = {}
        """The fewest pods that did not fit, by number of shape."""
        self.notes = 0
        """How often something was noted."""

    def hopeless(self, shape: int, pods: int) -> bool:
        return pods >= self.least.get(shape, 1 << 30)

    def note(self, shape: int, pods: int) -> None:
        self.notes += 1
        self.least[shape] = min(pods, self.least.get(shape, 1 << 30))


Order = tuple[int, bool, bool, float, float, JobId]


def order(round_: Round, seat: Seat) -> Order:
    """The order of one tenant's jobs."""
    job, key = seat.job, seat.order
    if key is None:
        round_.ranked(seat)
        key = seat.order = (
            -round_.priority(job),
            job.kind is not JobKind.SERVING,
            False,
            -seat.density,
            job.submitted_at_s,
            job.id,
        )
    if (job.run is None and job.last_move_at_s is None) or not round_.stopped_lately(job):
        return key
    return (*key[:2], True, *key[3:])


PASSES = (
    (Right.GUARANTEED, False),
    (Right.ENTITLED, True),
    (Right.ENTITLED, False),
    (Right.BORROWING, True),
    (Right.BORROWING, False),
)
"""Weakest right served, and whether only columns worth their price count."""


def fill(
    round_: Round,
    seats: Iterable[Seat] | None = None,
    blocked: Blocked | None = None,
    others: Iterable[Seat] = (),
) -> list[Seat]:
    """Start what fits; returns the jobs that could not start, in the order in which they were tried.

    Args:
        seats: jobs to try; None: all that wait.
        blocked: what is known not to fit.
        others: jobs to try as long as there is room for them; they are not returned.
    """
    _sooner(round_)
    blocked = Blocked() if blocked is None else blocked
    wanted = [s for s in (round_.waiting() if seats is None else seats) if not _ended(round_, s)]
    keep = {seat.job.id for seat in wanted}
    left = [*wanted, *others]
    left.sort(key=lambda seat: order(round_, seat), reverse=True)
    tried = left
    known = -1
    full = _full(round_, left)
    for right, worthwhile in PASSES[-1:] if full else PASSES:
        if right is Right.BORROWING or _anybody(round_, left, blocked, right, worthwhile):
            tried = _pass(round_, left, blocked, right, worthwhile, full)
            left = [seat for seat in left if seat.placement is None]
        if blocked.notes != known:
            known = blocked.notes
            left = [seat for seat in left if seat.job.id in keep or not _hopeless(round_, seat, blocked)]
    return [seat for seat in tried if seat.job.id in keep]


def _full(round_: Round, seats: Iterable[Seat]) -> bool:
    """Whether there is no room for any of these: then nobody starts, and only their order remains to be told."""
    least: dict[int, tuple[int, Seat, Ranked]] = {}
    """The fewest pods of each shape, and who asks for them."""
    for seat in seats:
        for row in seat.ranked or round_.ranked(seat):
            known, pods = least.get(row.shape), row.column.pods
            if known is None or pods < known[0]:
                least[row.shape] = pods, seat, row
    return all(round_.places(seat.job, row.column) < pods for pods, seat, row in least.values())


def _ended(round_: Round, seat: Seat) -> bool:
    """Pods that are not ours end when they are stopped: they start nowhere else at the same moment."""
    job = seat.job
    return job.kind is JobKind.OPAQUE and (job.run is not None or job.last_move_at_s == round_.now)


def _sooner(round_: Round) -> None:
    """Jobs that were given room which a stopping job still holds take what has become free since."""
    for seat in sorted((s for s in round_.changed if s.waits_for_release), key=lambda s: order(round_, s)):
        placement, column, started = seat.placement, seat.column, seat.started_at_s
        assert placement is not None
        assert column is not None
        round_.clear(seat)
        found = round_.find(seat.job, column)
        if found is None or found[1]:
            round_.restore(seat, placement, column, started, release=True)
        else:
            round_.put(seat, column, *found)


def _anybody(round_: Round, seats: list[Seat], blocked: Blocked, weakest: Right, worthwhile: bool) -> bool:
    """Whether any of these jobs could start in a pass: rights only weaken and room only shrinks in its course."""
    ledger = round_.ledger
    return any(
        ledger.best_right(seat.job.tenant, seat.option.row.sizes) <= weakest
        and not (worthwhile and round_.ranked(seat)[0].profit < -1e-9)
        and not _hopeless(round_, seat, blocked)
        for seat in seats
    )


def _hopeless(round_: Round, seat: Seat, blocked: Blocked) -> bool:
    least = blocked.least
    rows = seat.ranked or round_.ranked(seat)
    return all(row.column.pods >= least.get(row.shape, 1 << 30) for row in rows)


class _Line:
    """The jobs of one tenant that wait in a pass, the next one ready to be looked at.

    Where several users have jobs, each has a queue of its own, and among jobs that are equals otherwise (the
    first three parts of `order`) it is the turn of the user that stands lowest.
    """

    def __init__(self, round_: Round, seats: list[Seat]) -> None:
        """`seats` come last first."""
        self.round = round_
        self.users: dict[str, list[Seat]] = {}
        for seat in seats:
            self.users.setdefault(seat.job.user, []).append(seat)
        self.first = next(iter(self.users))
        self.shared = len(self.users) > 1
        self.heap = [self._key(user) for user in self.users] if self.shared else []
        heapify(self.heap)

    def _key(self, user: str) -> tuple[object, ...]:
        seat = self.users[user][-1]
        turn = self.round.ledger.user_turn(seat.job.tenant, user, seat.option.row.sizes)
        own = order(self.round, seat)
        return (*own[:3], *turn, *own[3:], user)

    def __bool__(self) -> bool:
        """Whether anybody is left."""
        return bool(self.heap if self.shared else self.users[self.first])

    def next(self) -> Seat:
        """Whose turn it is."""
        return self.users[cast(str, self.heap[0][-1]) if self.shared else self.first][-1]

    def pop(self) -> Seat:
        """Take out the job whose turn it is; call `stand` when it is settled."""
        if self.shared:
            self.first = cast(str, heappop(self.heap)[-1])
        return self.users[self.first].pop()

    def stand(self) -> None:
        """The job that was taken out has started, or not: its user stands where it stands now."""
        if self.shared and self.users[self.first]:
            heappush(self.heap, self._key(self.first))


def _pass(
    round_: Round, seats: list[Seat], blocked: Blocked, weakest: Right, worthwhile: bool, full: bool
) -> list[Seat]:
    """One pass over the jobs, which come last first; returns those left, in the order tried (`full`: there is no
    room for any of them)."""
    queues: dict[str, list[Seat]] = {}
    for seat in seats:
        queues.setdefault(seat.job.tenant, []).append(seat)
    lines = {name: _Line(round_, queue) for name, queue in queues.items()}
    heap = [(*_turn(round_, line.next()), name) for name, line in lines.items()]
    heapify(heap)
    left: list[Seat] = []
    while heap:
        right, _, _, name = heappop(heap)
        line = lines[name]
        while True:
            seat = line.pop()
            if full or right > weakest or not start(round_, seat, blocked, weakest, worthwhile):
                left.append(seat)
            line.stand()
            if not line:
                break
            fresh = _turn(round_, line.next())
            if heap and (*fresh, name) > heap[0]:
                heappush(heap, (*fresh, name))
                break
            right = fresh[0]
    return left


def _turn(round_: Round, seat: Seat) -> tuple[Right, float, float]:
    ledger, tenant = round_.ledger, seat.job.tenant
    right = ledger.best_right(tenant, seat.option.row.sizes)
    due = round_.due_at_s(seat) if right is Right.GUARANTEED else math.inf
    return right, due if due <= round_.now else math.inf, ledger.standing(tenant)


def start(round_: Round, seat: Seat, blocked: Blocked, weakest: Right, worthwhile: bool) -> bool:
    """Start one job on its best column that fits and to which it has a right at least so strong; of columns that
    are just as good, on the one that costs the rest of the cluster least."""
    rows = seat.ranked or round_.ranked(seat)
    for place, row in enumerate(rows):
        if worthwhile and row.profit < -1e-9:
            return False
        found = _open(round_, seat, row, blocked, weakest)
        if found is None:
            continue
        rival = rows[place + 1] if place + 1 < len(rows) else None
        if rival is not None and rival.profit == row.profit and row.column.pods == 1:
            equal = [other for other in rows[place:] if other.profit == row.profit and other.column.pods == 1]
            row, found = _least_loss(round_, seat, equal, blocked, weakest) or (row, found)
        round_.put(seat, row.column, *found)
        return True
    return False


_Found = tuple[tuple[str, ...], bool]


def _open(round_: Round, seat: Seat, row: Ranked, blocked: Blocked, weakest: Right) -> _Found | None:
    """Nodes for the job in this column, if it has the right to it and fits."""
    column, shape = row.column, row.shape
    if column.pods >= blocked.least.get(shape, 1 << 30):
        return None
    tenant, accelerator, amount_m = seat.job.tenant, column.accelerator, column.accelerators_m
    if weakest < Right.BORROWING and round_.ledger.right(tenant, accelerator, amount_m) > weakest:
        return None
    if round_.ledger.refusal(tenant, accelerator, amount_m):
        return None
    found = round_.find(seat.job, column)
    if found is None:
        blocked.note(shape, column.pods)
    return found


def _least_loss(
    round_: Round, seat: Seat, rows: Iterable[Ranked], blocked: Blocked, weakest: Right
) -> tuple[Ranked, _Found] | None:
    """The column of one pod whose node is left most useful; what is free now comes before what will be."""
    best: tuple[tuple[bool, float], Ranked, _Found] | None = None
    for row in rows:
        found = _open(round_, seat, row, blocked, weakest)
        if found is not None:
            key = found[1], round_.cluster.loss(seat.job, row.column.pool, row.column.per_pod, found[1])
            if best is None or key < best[0]:
                best = key, row, found
    return None if best is None else best[1:]
