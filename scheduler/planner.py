"""The decision: a snapshot in, a plan out.

`plan` makes the full plan:

    1. Price the accelerators (prices.py) and work out who is entitled to what (entitlement.py).
    2. Start waiting jobs in free room, by rights (fill.py).
    3. Make room for those whose rights (displace.py) or value (exchange.py) demand it.
    4. Move and resize running jobs where that clearly pays (moves.py).
    5. Again from 2 until nothing changes.
    6. Where the certified gap is large, have the solver try (optimum.py), unless the policy forbids it; then
       steps 2 to 5 once more, for what it has made possible.
    7. Say why everybody else waits (reasons.py).

`react` answers an event between two full plans. It takes over the last plan's policy, prices and values, and
does steps 2 and 3 (by rights, not by value) for the jobs that the event touches:

    - those that it names as new or changed, and those of a tenant that changed or a class whose speed was
      reported;
    - those that wait for room where something became free, as far as they fit;
    - those that the last plan has started or promised a place to and that still wait;
    - those that are stopped for one of these.

All other waiting jobs keep the record they have, with the stamp of the plan that made it. What `react` answers
depends on the snapshot, the plan and the event alone: the memo holds the books of the last snapshot
(books.py), which follow the difference instead of being opened again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from .actions import actions
from .books import Books, Memo, Ranked, Seat
from .displace import reclaim
from .errors import SolverError
from .events import Event, Happened
from .exchange import improve
from .fill import Blocked, fill, order
from .moves import move
from .optimum import optimise, worth_trying
from .plans import Known, Plan, Policy, Price, SharePrice, WaitCode
from .prices import prices_of
from .records import records
from .round import Round
from .types import JobId, Snapshot

PASSES = 6
"""Steps 2 to 4 settle after two or three passes; this only bounds them."""


def plan(snapshot: Snapshot, policy: Policy, now: float, memo: Memo | None = None) -> tuple[Plan, Memo]:
    """The plan for this moment.

    Args:
        now: seconds since the epoch; the only clock there is.
        memo: what an earlier round left. The plan is as good and as valid without it.

    Raises:
        SnapshotError: a name stands twice, or a node names a pool that is not there.
    """
    books = Books(snapshot, policy, now)
    round_ = Round(books, now)
    blocked = _settled(round_)
    gained, trouble = 0.0, ""
    if policy.solver and worth_trying(books.value(), books.market.bound):
        try:
            gained = optimise(round_)
        except SolverError as error:
            trouble = str(error)
        if gained:
            round_.recall()
            blocked = _settled(round_)
    prices = tuple(Price(kind, price) for kind, price in sorted(books.market.prices.items()))
    value = books.value()
    identity = _identity(snapshot, policy, now)
    made = actions(round_)
    told = records(round_, blocked, made, identity)
    result = Plan(
        id=identity,
        version=snapshot.version,
        at_s=now,
        actions=made,
        waiting=told.records,
        prices=prices,
        share_prices=tuple(SharePrice(*item) for item in sorted(books.share_prices.items())),
        value=value,
        bound=max(books.market.bound, value),
        policy=policy,
        priced_at_s=now,
        solver_gain=gained,
        solver_error=trouble,
    )
    round_.rewind()
    books.rank()
    return result, Memo(prices, snapshot.version, books, told)


def _settled(round_: Round) -> list[Seat]:
    """Steps 2 to 5; the jobs that could not start, in the order in which they were tried."""
    blocked = fill(round_)
    for _ in range(PASSES):
        changed = reclaim(round_, blocked)
        blocked = [seat for seat in blocked if seat.placement is None]
        changed = improve(round_, blocked) or changed
        changed = move(round_) or changed
        if not changed:
            break
        round_.recall()
        blocked = fill(round_)
    return blocked


def react(snapshot: Snapshot, last: Plan, event: Event, memo: Memo | None = None) -> tuple[Plan, Memo]:
    """The quick answer to an event: starts and reclaims for what it touches.

    Args:
        snapshot: after the event.
        last: the plan so far, from `plan` or `react`. Its actions need not have been carried out.
        event: what happened, and the time (`at_s`).
        memo: what the call that made `last` left. Without it the answer is the same and takes longer.

    Raises:
        SnapshotError: as for `plan`.
    """
    books = _books(snapshot, last, memo)
    round_ = Round(books, event.at_s)
    blocked = Blocked()
    known = None if memo is None else memo.waiting
    if known is None or known.records is not last.waiting:
        known = Known.of(last.waiting)
    touched = _touched(books, last, known, event)
    left = fill(round_, touched.values(), blocked, _fitting(round_, event, blocked, touched))
    for _ in range(PASSES):
        if not reclaim(round_, left):
            break
        stopped = [seat for seat in round_.changed if seat.placement is None and seat.job.run is not None]
        touched |= {seat.job.id: seat for seat in [*stopped, *round_.recall()]}
        left = fill(round_, [seat for seat in touched.values() if seat.placement is None])
    identity = _next_identity(last, snapshot, event)
    made = actions(round_)
    told = records(round_, left, made, identity, known, touched.keys())
    value = books.value()
    result = replace(
        last,
        id=identity,
        version=snapshot.version,
        at_s=event.at_s,
        actions=made,
        waiting=told.records,
        value=value,
        bound=max(books.bound(), value),
        solver_gain=0.0,
        solver_error="",
    )
    round_.rewind()
    return result, Memo(last.prices, snapshot.version, books, told)


def _books(snapshot: Snapshot, last: Plan, memo: Memo | None) -> Books:
    """The books of this snapshot at the last plan's values and prices."""
    books = None if memo is None else memo.books
    shares = {share.share_m: share.price for share in last.share_prices}
    basis = (last.policy, last.priced_at_s, prices_of(last.prices), shares)
    if books is not None and books.basis == basis and books.follow(snapshot):
        return books
    return Books(snapshot, *basis)


def _touched(books: Books, last: Plan, known: Known, event: Event) -> dict[JobId, Seat]:
    """Waiting jobs to look at whether they fit or not."""
    names = {action.job for action in last.actions if action.to is not None}
    freed = {one.tenant for one in event.happened if one.frees}
    for job, record in known.marked.items():
        limited = record.code in (WaitCode.CEILING, WaitCode.BORROW_LIMIT)
        if record.code is WaitCode.PREEMPTING or (limited and record.tenant in freed):
            names.add(job)
    names |= {JobId(one.name) for one in event.happened if one.kind in (Happened.ARRIVED, Happened.CHANGED)}
    names |= books.waiting.keys() - known.by_job.keys()
    tenants = {one.name for one in event.happened if one.kind is Happened.TENANT}
    classes = {one.name for one in event.happened if one.kind is Happened.SPEED}
    if tenants or classes:
        names |= {
            name
            for name, seat in books.waiting.items()
            if seat.job.tenant in tenants or seat.job.workload_class in classes
        }
    return {name: books.waiting[name] for name in names if name in books.waiting}


def _fitting(round_: Round, event: Event, blocked: Blocked, touched: dict[JobId, Seat]) -> list[Seat]:
    """Other waiting jobs that fit where something became free."""
    pools = {one.pool for one in event.happened if one.frees}
    if not pools:
        return []
    fits: dict[int, int] = {}
    """Pods of each shape that there is room for."""
    known: dict[tuple[object, ...], frozenset[tuple[int, int]]] = {}
    """Shapes and pods that fit, by what jobs ask for."""
    found: list[tuple[Seat, frozenset[tuple[int, int]]]] = []
    for name, seat in round_.books.waiting.items():
        if name in touched:
            continue
        key = (id(seat.option.row), seat.job.node_selector, seat.job.required_domain)
        fitting = known.get(key)
        if fitting is None:
            rows = [row for row in round_.ranked(seat) if row.column.pool in pools]
            rows = [row for row in rows if _fits(round_, seat, row, fits, blocked)]
            fitting = known[key] = frozenset((row.shape, row.column.pods) for row in rows)
        if fitting:
            found.append((seat, fitting))
    found.sort(key=lambda item: order(round_, item[0]))
    return _foremost(round_, found, fits)


def _fits(round_: Round, seat: Seat, row: Ranked, fits: dict[int, int], blocked: Blocked) -> bool:
    """Whether the job fits in this column now."""
    column, shape = row.column, row.shape
    if column.pods >= blocked.least.get(shape, 1 << 30):
        return False
    if shape not in fits:
        fits[shape] = round_.places(seat.job, column)
    if fits[shape] >= column.pods:
        return True
    blocked.note(shape, column.pods)
    return False


def _foremost(
    round_: Round, found: list[tuple[Seat, frozenset[tuple[int, int]]]], fits: dict[int, int]
) -> list[Seat]:
    """Those of each user that there could be room for: of as many as fit, and as many that are worth it."""
    counts: dict[tuple[str, str, int, bool], int] = {}
    chosen: list[Seat] = []
    for seat, fitting in found:
        needed = False
        for row in round_.ranked(seat):
            shape, pods = row.shape, row.column.pods
            if (shape, pods) in fitting:
                key = (seat.job.tenant, seat.job.user, shape, row.profit >= 0)
                count = counts.get(key, 0)
                if count < fits[shape]:
                    counts[key] = count + pods
                    needed = True
        if needed:
            chosen.append(seat)
    return chosen


def _identity(snapshot: Snapshot, policy: Policy, now: float) -> str:
    """Digest of what the plan was made from, whatever the order of the snapshot's tuples."""
    jobs = sorted((j.id, "" if j.run is None else repr(j.run.placement)) for j in snapshot.jobs)
    text = json.dumps([snapshot.version, policy.hash, now, jobs, sorted(n.name for n in snapshot.nodes)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _next_identity(last: Plan, snapshot: Snapshot, event: Event) -> str:
    """The same for an answer to an event: it follows from the plan before."""
    happened = sorted((one.kind.value, one.name, one.pool, one.tenant) for one in event.happened)
    text = json.dumps([last.id, snapshot.version, event.at_s, happened])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
