"""When the changes of a trial are kept: what is won must exceed what is lost by a margin.

A rule that is a right or a promise needs no gain. The others (`rules.Rule.gains`) compare, over the time that the job has
left, what some win with what others lose and with the work that all who move repeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from .claim import Claim, hours_left, lost_value
from .round import Round, Trial
from .state import Assignment

NEGLIGIBLE = 1e-9
"""Value per hour."""


def more_value(claim: Claim, trial: Trial) -> bool:
    """Whether the value gained is `Policy.hysteresis` times what is lost; moves count as losses."""
    round_, assignment = claim.round, claim.assignment
    won = lost = 0.0
    hours = math.inf if assignment.candidate is None else hours_left(assignment, assignment.candidate)
    for other, (placement, old, _, waited) in trial.changes():
        new = other.candidate
        now = 0.0 if new is None or other.waits_for_release else new.value
        was = 0.0 if old is None or waited else old.value
        change = now - was
        won += max(0.0, change)
        lost += max(0.0, -change)
        run, candidate = other.job.run, new or old
        if run is not None and placement == run.placement and candidate is not None:
            lost += lost_value(round_, other) / min(hours, hours_left(other, candidate))
    return won > round_.policy.hysteresis * lost + NEGLIGIBLE


def a_share_or_a_gain(claim: Claim, trial: Trial) -> bool:
    """Whether the tenant lacks work and the lowest level rises by enough, or no tenant does less than before; and what
    is gained is worth the work that is repeated."""
    assert claim.levels is not None
    changes = claim.levels.changes(trial)
    lacks = claim.levels.level(claim.job.tenant) < claim.round.policy.work_share
    return _is_gain(claim, trial, claim.levels.changes(trial, net=True)) or (
        lacks and _is_share(claim, trial, changes)
    )


def _is_share(claim: Claim, trial: Trial, changes: Mapping[str, float]) -> bool:
    levels, tenant = claim.levels, claim.job.tenant
    assert levels is not None
    more = levels.work(claim.assignment) - _work_before(claim, trial)
    rise = min(levels.level(name, extra) for name, extra in changes.items()) - min(map(levels.level, changes))
    brings = levels.level(tenant, more) - levels.level(tenant)
    if rise < claim.round.policy.least_rise * brings:
        return False
    return more * claim.hours >= _repeated(claim.round, (one for one, _ in trial.changes()))


def _work_before(claim: Claim, trial: Trial) -> float:
    """What the claim's job did where it was before the trial."""
    assert claim.levels is not None
    before = next((was for one, was in trial.changes() if one is claim.assignment), None)
    return 0.0 if before is None else claim.levels.at(before, claim.assignment)


def _is_gain(claim: Claim, trial: Trial, changes: Mapping[str, float]) -> bool:
    if min(changes.values()) < 0:
        return False
    moved = [other for other, _ in trial.changes()]
    return all(
        more * min(claim.hours, *(hours_left(a, a.candidate) for a in moved if a.candidate is not None))
        >= _repeated(claim.round, (a for a in moved if a.job.tenant == tenant))
        for tenant, more in changes.items()
    )


def _repeated(round_: Round, moved: Iterable[Assignment]) -> float:
    """The work that these jobs repeat, in unit-hours, times what a move must bring."""
    return round_.policy.move_gain_factor * sum(_lost(round_, one) for one in moved) / 3600


def _lost(round_: Round, assignment: Assignment) -> float:
    run = assignment.job.run
    if run is None:
        return 0.0
    units = round_.holdings.units_of(run.placement.accelerator, run.placement.accelerators_m)
    return units * round_.repeats_s(assignment.job)


def within_its_worth(claim: Claim, trial: Trial) -> bool:
    """What is gained was the limit on what may be lost (`Claim.worth`)."""
    return True
