"""From places to actions: the difference between where jobs were and where they are in the plan."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from ..candidates.candidate import Candidate
from ..fairness.quota import Right
from ..model.plans import Action, ActionKind
from ..model.snapshot import JobId, Placement
from .round import Round
from .state import Assignment


def actions(round_: Round) -> tuple[Action, ...]:
    """The actions of the round: releases first."""
    releases: list[Action] = []
    starts: list[Action] = []
    lifts: list[tuple[Assignment, Placement]] = []
    leaving = _leaving(round_)
    taken: dict[str, list[int]] = {}
    # The stronger right is given room that is free now; the others wait for room that is being released.
    for assignment in sorted(round_.changed, key=lambda assignment: _right(round_, assignment)):
        run = assignment.job.run
        before = None if run is None else run.placement
        if assignment.stays or (run is not None and run.releasing) or before is assignment.placement is None:
            continue
        if before is not None and _is_lift(before, assignment.placement):
            lifts.append((assignment, before))
        elif assignment.placement is None:
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
    return (*releases, *starts, *_lifts(round_, lifts, taken))


def _lifts(
    round_: Round, lifts: list[tuple[Assignment, Placement]], taken: dict[str, list[int]]
) -> list[Action]:
    """Lifts for which there are watts already, beside all that starts; others are for a later plan."""
    feeds, found = round_.cluster.feeds, []
    for assignment, before in lifts:
        place = assignment.placement
        assert place is not None
        drawn = round_.state.candidates.draws.counted(assignment.job, before).watts
        if feeds is None or not feeds.short_at_start(replace(place, watts=place.watts - drawn), taken):
            found.append(_action(round_, assignment, ActionKind.LIFT, before, ()))
    return found


def _is_lift(before: Placement, after: Placement | None) -> bool:
    """Whether only the power cap is another one, and higher."""
    return (
        after is not None
        and after.power_cap > before.power_cap
        and after == replace(before, power_cap=after.power_cap)
    )


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
        moves = run is not None and not run.releasing and not assignment.stays
        if run is not None and moves and not _is_lift(run.placement, assignment.placement):
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
        lost_s = 0.0 if kind is ActionKind.LIFT else round_.repeats_s(assignment.job)
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
    capped = () if placement.power_cap == 1 else (placement.power_cap,)
    where = (placement.pool, placement.accelerator, placement.mode, placement.nodes, placement.devices)
    return (*where, amounts, *capped)


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
    if kind is ActionKind.LIFT:
        limit = _limit(candidate) or ", without a limit"
        return f"runs on{limit}: {share:.0%} of its best speed, as its power domains have watts left"
    mode += _limit(candidate)
    if kind is ActionKind.SHRINK:
        return f"goes on with less, on {where}{mode}, for a job with a stronger claim; costs {lost_s:.0f} s of work"
    if kind is ActionKind.START:
        return f"starts on {where}{mode}: {share:.0%} of its best speed"
    if kind is ActionKind.MOVE and assignment.job.id in round_.gave_way:
        return (
            f"moves to {where}{mode}, so that a job that needs its place fits; costs {lost_s:.0f} s of work"
        )
    return f"continues on {where}{mode}: {share:.0%} of its best speed; costs {lost_s:.0f} s of work"


def _limit(candidate: Candidate) -> str:
    cap = candidate.power_cap
    return "" if cap >= 1 else f", its boards limited to {cap:.0%} for their power domains"


def _count(amount_m: int) -> str:
    return f"{amount_m / 1000:g}"
