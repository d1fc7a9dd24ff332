"""From places to actions: what differs between where jobs were and where they are in the plan."""

from __future__ import annotations

import hashlib

from .books import Seat
from .ledger import Right
from .plans import Action, ActionKind
from .round import Round
from .types import JobId, Placement


def actions(round_: Round) -> tuple[Action, ...]:
    """The actions of the round: releases first."""
    releases: list[Action] = []
    starts: list[Action] = []
    leaving = _leaving(round_)
    taken: dict[str, list[int]] = {}
    # The stronger right has what is free already; the others wait for what is being stopped.
    for seat in sorted(round_.changed, key=lambda seat: _right(round_, seat)):
        run = seat.job.run
        before = None if run is None else run.placement
        if seat.stays or (run is not None and run.releasing) or before is seat.placement is None:
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


def _right(round_: Round, seat: Seat) -> Right:
    """By which its tenant holds in the plan what the job has there."""
    place = seat.placement
    return Right.BORROWING if place is None else round_.ledger.right(seat.job.tenant, place.accelerator, 0)


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
    for seat in round_.changed:
        run = seat.job.run
        if run is not None and not run.releasing and not seat.stays:
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
    text = repr((seat.job.id, kind.value, _where(seat.placement), _where(before), seat.job.preemptions))
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


def _where(placement: Placement | None) -> object:
    """A placement as an action's id knows it."""
    if placement is None:
        return None
    ask = placement.per_pod
    amounts = (ask.accelerators_m, ask.cpu_m, ask.memory_mib, ask.ephemeral_mib)
    return placement.pool, placement.accelerator, placement.mode, placement.nodes, placement.devices, amounts


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
    if kind is ActionKind.SHRINK:
        return f"goes on with less, on {where}{mode}, for a job with a stronger claim; costs {lost_s:.0f} s of work"
    if kind is ActionKind.START:
        return f"starts on {where}{mode}: {share:.0%} of its best speed"
    return f"continues on {where}{mode}: {share:.0%} of its best speed; costs {lost_s:.0f} s of work"


def _count(amount_m: int) -> str:
    return f"{amount_m / 1000:g}"
