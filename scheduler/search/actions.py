"""From places to actions: the difference between where jobs were and where they are in the plan."""

from __future__ import annotations

import hashlib

from ..fairness.quota import Right
from ..model.plans import Action, ActionKind
from ..model.snapshot import JobId, Placement
from .round import Round
from .state import Assignment


def actions(round_: Round) -> tuple[Action, ...]:
    """The actions of the round: releases first."""
    releases: list[Action] = []
    starts: list[Action] = []
    leaving = _leaving(round_)
    taken: dict[str, list[int]] = {}
    # The stronger right is given room that is free now; the others wait for room that is being released.
    for assignment in sorted(round_.changed, key=lambda assignment: _right(round_, assignment)):
        run = assignment.job.run
        before = None if run is None else run.placement
        if assignment.stays or (run is not None and run.releasing) or before is assignment.placement is None:
            continue
        if assignment.placement is None:
            releases.append(_action(round_, assignment, ActionKind.PREEMPT, before, ()))
        elif assignment.waits_for_release:
            # Its next place is not free yet: a running job stops now, a waiting one goes on waiting.
            if before is not None:
                releases.append(_action(round_, assignment, ActionKind.PREEMPT, before, ()))
        else:
            kind = _kind(before, assignment.placement)
            after = _after(assignment, leaving, round_.waits_for(assignment.placement, taken))
            starts.append(_action(round_, assignment, kind, before, after))
    starts.sort(key=lambda action: (len(action.after) > 0, action.job))
    return tuple(releases + starts)


def _right(round_: Round, assignment: Assignment) -> Right:
    """The right by which its tenant holds, in the plan, what the job has there."""
    place = assignment.placement
    return (
        Right.BORROWING
        if place is None
        else round_.holdings.right(assignment.job.tenant, place.accelerator, 0)
    )


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
    """Jobs that leave each node in this plan, and each power domain."""
    leaving: dict[str, set[JobId]] = {}
    feeds = round_.cluster.feeds
    for assignment in round_.changed:
        run = assignment.job.run
        if run is not None and not run.releasing and not assignment.stays:
            for name in run.placement.nodes:
                for key in (name, *(feeds.keys_of(name) if feeds is not None else ())):
                    leaving.setdefault(key, set()).add(assignment.job.id)
    return leaving


def _after(assignment: Assignment, leaving: dict[str, set[JobId]], where: list[str]) -> tuple[JobId, ...]:
    jobs = {job for name in where for job in leaving.get(name, ())}
    return tuple(sorted(jobs - {assignment.job.id}))


def _action(
    round_: Round,
    assignment: Assignment,
    kind: ActionKind,
    before: Placement | None,
    after: tuple[JobId, ...],
) -> Action:
    old = None if before is None else round_.state.candidates.instance(assignment.option, before)
    gain = (0.0 if assignment.candidate is None else assignment.candidate.value) - (
        0.0 if old is None else old.value
    )
    lost_s, units = 0.0, 0.0
    if before is not None and assignment.job.run is not None:
        run = assignment.job.run
        saved = run.started_at_s if run.saved_at_s is None else run.saved_at_s
        lost_s = assignment.job.restart_s + max(0.0, round_.now - saved)
        units = round_.holdings.units_of(before.accelerator, before.accelerators_m)
    makes_room_for = round_.gave_way.get(assignment.job.id) if kind is ActionKind.MOVE else None
    text = repr(
        (
            assignment.job.id,
            kind.value,
            _where(assignment.placement),
            _where(before),
            assignment.job.preemptions,
        )
    )
    identity = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Action(
        id=identity,
        kind=kind,
        job=assignment.job.id,
        to=None if kind is ActionKind.PREEMPT else assignment.placement,
        assumed=before,
        after=after,
        gain=gain,
        cost=lost_s * units,
        reason=_reason(round_, assignment, kind, lost_s),
        makes_room_for=makes_room_for,
    )


def _where(placement: Placement | None) -> object:
    """A placement as it goes into an action's id."""
    if placement is None:
        return None
    ask = placement.per_pod
    amounts = (ask.accelerators_m, ask.cpu_m, ask.memory_mib, ask.ephemeral_mib)
    return placement.pool, placement.accelerator, placement.mode, placement.nodes, placement.devices, amounts


def _reason(round_: Round, assignment: Assignment, kind: ActionKind, lost_s: float) -> str:
    candidate = assignment.candidate
    if assignment.job.yields and kind is ActionKind.PREEMPT:
        return "sleeps, and makes room for a job that waits"
    if candidate is None or kind is ActionKind.PREEMPT:
        return f"makes room for a job with a stronger claim; {lost_s:.0f} s of work are repeated"
    best = assignment.option.best_speed
    share = candidate.speed / best if best > 0 else 1.0
    where = f"{candidate.pods} x {_count(candidate.per_pod.accelerators_m)} {candidate.accelerator} in pool {candidate.pool}"
    mode = "" if candidate.mode == "resident" else f", mode {candidate.mode}"
    if kind is ActionKind.SHRINK:
        return f"goes on with less, on {where}{mode}, for a job with a stronger claim; costs {lost_s:.0f} s of work"
    if kind is ActionKind.START:
        return f"starts on {where}{mode}: {share:.0%} of its best speed"
    if kind is ActionKind.MOVE and assignment.job.id in round_.gave_way:
        return (
            f"moves to {where}{mode}, so that a job that needs its place fits; costs {lost_s:.0f} s of work"
        )
    return f"continues on {where}{mode}: {share:.0%} of its best speed; costs {lost_s:.0f} s of work"


def _count(amount_m: int) -> str:
    return f"{amount_m / 1000:g}"
