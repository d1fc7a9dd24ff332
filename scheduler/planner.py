"""The decision: a snapshot in, a plan out.

    1. Price the accelerators (prices.py) and work out who is entitled to what (entitlement.py).
    2. Start waiting jobs in free room, by rights (fill.py).
    3. Make room for those whose rights or value demand it (displace.py).
    4. Move and resize running jobs where that clearly pays (moves.py).
    5. Again from 2 until nothing changes; then say why everybody else waits (reasons.py).

`plan` does all of it; `react` answers one event: the same steps without moves and value, which is always
feasible and fast.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from .displace import improve, reclaim
from .errors import SnapshotError
from .fill import fill
from .moves import move
from .plans import Action, ActionKind, Memo, Plan, Policy, Price
from .reasons import records
from .round import Round, Seat
from .types import JobId, Placement, Snapshot

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
    return _decide(snapshot, policy, now, full=True)


def react(snapshot: Snapshot, policy: Policy, now: float, memo: Memo | None = None) -> tuple[Plan, Memo]:
    """The quick answer to an event, on the snapshot after it: starts and reclaims only."""
    return _decide(snapshot, policy, now, full=False)


def _decide(snapshot: Snapshot, policy: Policy, now: float, full: bool) -> tuple[Plan, Memo]:
    validate(snapshot)
    round_ = Round(snapshot, policy, now)
    blocked = fill(round_)
    for _ in range(PASSES):
        changed = reclaim(round_, blocked)
        if full:
            blocked = [seat for seat in blocked if seat.placement is None]
            changed = improve(round_, blocked) or changed
            changed = move(round_) or changed
        if not changed:
            break
        blocked = fill(round_)
    identity = _identity(snapshot, policy, now)
    actions = _actions(round_)
    prices = tuple(Price(kind, price) for kind, price in sorted(round_.market.prices.items()))
    value = sum(seat.column.value for seat in round_.seats.values() if seat.column is not None)
    result = Plan(
        id=identity,
        version=snapshot.version,
        at_s=now,
        actions=actions,
        waiting=records(round_, blocked, actions, identity),
        prices=prices,
        value=value,
        bound=max(round_.market.bound, value),
        policy=policy.hash,
    )
    return result, Memo(prices, snapshot.version)


def validate(snapshot: Snapshot) -> None:
    """Refuse a snapshot that contradicts itself."""
    pools = {pool.name for pool in snapshot.pools}
    _unique("pool", (pool.name for pool in snapshot.pools))
    _unique("node", (node.name for node in snapshot.nodes))
    _unique("tenant", (tenant.name for tenant in snapshot.tenants))
    _unique("job", (job.id for job in snapshot.jobs))
    for node in snapshot.nodes:
        if node.pool not in pools:
            raise SnapshotError(
                f"node {node.name!r} names the pool {node.pool!r}, which is not in the snapshot"
            )
    for job in snapshot.jobs:
        if not 1 <= job.min_pods <= job.max_pods:
            raise SnapshotError(
                f"job {job.key}: pods {job.min_pods}..{job.max_pods} is not a range from 1 up"
            )


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SnapshotError(f"two {what}s are called {name!r}")
        seen.add(name)


def _identity(snapshot: Snapshot, policy: Policy, now: float) -> str:
    """Digest of what the plan was made from, whatever the order of the snapshot's tuples."""
    jobs = sorted((j.id, "" if j.run is None else repr(j.run.placement)) for j in snapshot.jobs)
    text = json.dumps([snapshot.version, policy.hash, now, jobs, sorted(n.name for n in snapshot.nodes)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _actions(round_: Round) -> tuple[Action, ...]:
    """What differs between where jobs were and where they are in the plan: releases first."""
    releases: list[Action] = []
    starts: list[Action] = []
    leaving = _leaving(round_)
    taken: dict[str, list[int]] = {}
    for seat in sorted(round_.seats.values(), key=lambda seat: seat.job.id):
        run = seat.job.run
        before = None if run is None or run.releasing else run.placement
        if before == seat.placement or (run is not None and run.releasing):
            continue
        if seat.placement is None:
            releases.append(_action(round_, seat, ActionKind.PREEMPT, before, ()))
        elif seat.waits_for_release:
            # Its next place is not free yet: a running job stops all the same, a waiting one goes on waiting.
            if before is not None:
                releases.append(_action(round_, seat, ActionKind.PREEMPT, before, ()))
        else:
            kind = _kind(before, seat.placement)
            after = _after(seat, leaving) if round_.must_wait(seat.placement, taken) else ()
            starts.append(_action(round_, seat, kind, before, after))
    starts.sort(key=lambda action: (len(action.after) > 0, action.job))
    return tuple(releases + starts)


def _kind(before: Placement | None, after: Placement) -> ActionKind:
    if before is None:
        return ActionKind.START
    if (before.pool, before.mode, before.per_pod) == (after.pool, after.mode, after.per_pod):
        if after.pods > before.pods:
            return ActionKind.GROW
        if after.pods < before.pods:
            return ActionKind.SHRINK
    return ActionKind.MOVE


def _leaving(round_: Round) -> dict[str, set[JobId]]:
    """Jobs that leave each node in this plan."""
    leaving: dict[str, set[JobId]] = {}
    for seat in round_.seats.values():
        run = seat.job.run
        if run is not None and not run.releasing and run.placement != seat.placement:
            for name in run.placement.nodes:
                leaving.setdefault(name, set()).add(seat.job.id)
    return leaving


def _after(seat: Seat, leaving: dict[str, set[JobId]]) -> tuple[JobId, ...]:
    assert seat.placement is not None
    jobs = {job for name in seat.placement.nodes for job in leaving.get(name, ())}
    return tuple(sorted(jobs - {seat.job.id}))


def _action(
    round_: Round, seat: Seat, kind: ActionKind, before: Placement | None, after: tuple[JobId, ...]
) -> Action:
    old = None if before is None else seat.option.column_of(before)
    gain = (0.0 if seat.column is None else seat.column.value) - (0.0 if old is None else old.value)
    lost_s, units = 0.0, 0.0
    if before is not None and seat.job.run is not None:
        run = seat.job.run
        saved = run.started_at_s if run.saved_at_s is None else run.saved_at_s
        lost_s = seat.job.restart_s + max(0.0, round_.now - saved)
        units = round_.ledger.units_of(before.accelerator, before.accelerators_m)
    text = json.dumps([seat.job.id, kind.value, repr(seat.placement), repr(before), seat.job.preemptions])
    identity = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Action(
        id=identity,
        kind=kind,
        job=seat.job.id,
        to=None if kind is ActionKind.PREEMPT else seat.placement,
        assumed=before,
        after=after,
        gain=gain,
        cost=lost_s * units,
        reason=_reason(round_, seat, kind, lost_s),
    )


def _reason(round_: Round, seat: Seat, kind: ActionKind, lost_s: float) -> str:
    column = seat.column
    if column is None or kind is ActionKind.PREEMPT:
        return f"makes room for a job with a stronger claim; {lost_s:.0f} s of work are repeated"
    best = seat.option.best_speed
    share = column.speed / best if best > 0 else 1.0
    where = (
        f"{column.pods} x {_count(column.per_pod.accelerators_m)} {column.accelerator} in pool {column.pool}"
    )
    mode = "" if column.mode == "resident" else f", mode {column.mode}"
    if kind is ActionKind.START:
        return f"starts on {where}{mode}: {share:.0%} of its best speed"
    return f"continues on {where}{mode}: {share:.0%} of its best speed; costs {lost_s:.0f} s of work"


def _count(amount_m: int) -> str:
    return f"{amount_m / 1000:g}"
