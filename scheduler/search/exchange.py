"""Exchanges between running jobs of different tenants: shares hold in work, not only in accelerators.

Rights give a waiting job its tenant's share of the accelerators. Which jobs run on which type is decided by value inside
a tenant (`swap.py`, `migration.py`), so a tenant that came late may have its share of the accelerators and little of
the work: it runs on what the first one left. Here a running job takes the place of jobs of other tenants on a type that
is faster for it, and these go where it was, or to any other free place. It is kept if

    a share   the tenant does less than `Policy.work_share` of the work that it is entitled to, and the least of the
              levels of all tenants concerned rises, by a quarter at least of what the job brings its own tenant; or
    a gain    no tenant concerned does less than before,

and what the job gains in the time that it has left, or the tenants together gain, is `Policy.move_gain_factor` times
the work that all of the moved repeat. A tenant's level is the work of its running jobs per unit that it is entitled to
(`fairness/work.py`). The lowest level rises with each exchange for a share, and the sum with each for a gain, so
exchanges end. The others are moved for a job: that counts as a preemption, at most `Policy.max_preemptions` times. No
place inside a guarantee is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..candidates.candidates import Candidate
from ..fairness.work import WorkRates
from ..model.snapshot import JobKind
from .holds import lifted
from .migration import pays
from .preemption import hours_left, may_be_preempted_again, preempt
from .round import Place, Round, Trial, place_of
from .state import Assignment
from .victims import Victim, VictimGroup

ATTEMPTS = 16
"""Exchanges that are tried in one pass and undone; equal requests count once."""
LEAST_RISE = 0.25
"""Part of what the job brings its tenant by which the lowest level must rise, so that the last exchange does not turn
the inequality round."""


def exchange(round_: Round) -> bool:
    """Exchange places between tenants where that is a share or a gain; whether anything changed."""
    if len(round_.holdings.tenants) < 2 or not round_.can_disrupt():
        return False
    levels = _Levels(round_)
    changed, undone = False, 0
    hopeless: set[tuple[object, ...]] = set()
    for _, _, assignment, candidate in sorted(_proposals(round_, levels), key=lambda row: row[:2]):
        old = assignment.placement
        if undone >= ATTEMPTS or not round_.can_disrupt():
            break
        if not _free_to_go(round_, assignment) or old is None:
            continue
        key = (id(assignment.option.shared), assignment.job.tenant, old.pool, candidate)
        if key in hopeless:
            continue
        if _exchanged(round_, levels, assignment, candidate):
            changed = True
        else:
            undone += 1
            hopeless.add(key)
    return changed


class _Levels:
    """Work of each tenant's running jobs, per unit that it is entitled to."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._rates = WorkRates(round_.holdings.rate, round_.holdings.capacity_m)
        self._work = dict.fromkeys(round_.holdings.tenants, 0.0)
        for (_, tenant), assignments in round_.held.items():
            self._work[tenant] = self._work.get(tenant, 0.0) + sum(map(self.work, assignments.values()))

    def work(self, assignment: Assignment) -> float:
        """What a job does where it is."""
        placement, candidate, _, waits = place_of(assignment)
        return self.at((placement, candidate, 0.0, waits), assignment)

    def at(self, place: Place, assignment: Assignment) -> float:
        """What it does in a place, in units; a job whose speed says nothing: the units that it holds."""
        placement, candidate, _, waits = place
        if placement is None or waits:
            return 0.0
        if candidate is None or assignment.job.kind is not JobKind.TRAINING:
            return self._round.holdings.units_of(placement.accelerator, placement.accelerators_m)
        return self._rates.work(assignment.option.shared, candidate)

    def gain(self, assignment: Assignment, candidate: Candidate) -> float:
        """What it would do more with this candidate."""
        return self._rates.work(assignment.option.shared, candidate) - self.work(assignment)

    def level(self, tenant: str, more: float = 0.0) -> float:
        """The tenant's level if it did this much more."""
        entitled = self._round.holdings.entitled.get(tenant, 0.0)
        return (self._work.get(tenant, 0.0) + more) / max(entitled, 1e-9)

    def keep(self, changes: Mapping[str, float]) -> None:
        """Take changes in, by tenant."""
        for tenant, more in changes.items():
            self._work[tenant] = self._work.get(tenant, 0.0) + more


def _free_to_go(round_: Round, assignment: Assignment) -> bool:
    return assignment.stays and assignment.candidate is not None and round_.movable(assignment)


def _proposals(
    round_: Round, levels: _Levels
) -> Iterator[tuple[tuple[bool, float], tuple[float, str], Assignment, Candidate]]:
    """Running jobs and candidates of other types that are clearly faster; jobs of tenants that lack work first, of
    these the lowest level, then those with the largest gain."""
    types = _held_by_several(round_)
    if not types:
        return
    for assignment in round_.assignments.values():
        current = assignment.candidate
        if current is None or not _free_to_go(round_, assignment):
            continue
        level = levels.level(assignment.job.tenant)
        lacks = level < round_.policy.work_share
        for candidate in assignment.option.candidates:
            if candidate.accelerator == current.accelerator or candidate.accelerator not in types:
                continue
            gain = levels.gain(assignment, candidate)
            if gain > 0 and pays(round_, assignment, current, candidate):
                yield (not lacks, level if lacks else 0.0), (-gain, assignment.job.id), assignment, candidate


def _held_by_several(round_: Round) -> frozenset[str]:
    """Types on which tenants run jobs; none if only one tenant runs any."""
    held = [(pool, tenant) for (pool, tenant), assignments in round_.held.items() if assignments]
    if len({tenant for _, tenant in held}) < 2:
        return frozenset()
    return frozenset(round_.cluster.pools[pool].pool.accelerator for pool, _ in held)


def _exchanged(round_: Round, levels: _Levels, assignment: Assignment, candidate: Candidate) -> bool:
    """Carry out the exchange; undo it and return False unless it is a share or a gain."""
    victims = VictimGroup(
        _others(round_, levels, assignment, candidate), round_.cluster.pools[candidate.pool]
    )
    if not victims.count:
        return False
    level, gain = levels.level(assignment.job.tenant), levels.gain(assignment, candidate)
    with round_.trial() as trial:
        if not _moved(round_, assignment, candidate, victims, trial) or not trial.within_budget:
            return False
        changes = _changes(levels, trial)
        lacks = level < round_.policy.work_share
        if not _is_gain(round_, assignment, trial, changes) and not (
            lacks and _is_share(round_, levels, assignment, trial, changes, gain)
        ):
            return False
        for other, _ in trial.changes():
            if other is not assignment:
                round_.gave_way[other.job.id] = assignment.job.id
        levels.keep(changes)
        return trial.keep()


def _moved(
    round_: Round, assignment: Assignment, candidate: Candidate, victims: VictimGroup, trial: Trial
) -> bool:
    """Put the job where the cheapest of these are and these elsewhere; False if that fails or takes the room of a
    reservation, with some of them moved."""
    had_room = [hold for hold in round_.holds.values() if hold.applied and hold.has_room]
    with lifted(round_.holds.values()):
        round_.clear(assignment)
        if not preempt(round_, assignment, candidate, [victims]) or assignment.waits_for_release:
            return False
        if not _placed_again(round_, trial):
            return False
    return all(hold.has_room for hold in had_room)


def _others(round_: Round, levels: _Levels, assignment: Assignment, candidate: Candidate) -> Iterator[Victim]:
    """Jobs of tenants with a higher level that could also run where this one runs, each at the cost of what it would
    do less there and of the work it repeats, in units over the hours that this job has left."""
    old, nodes = assignment.candidate, round_.cluster.pools[candidate.pool]
    assert old is not None
    hours = hours_left(assignment, candidate)
    own = levels.level(assignment.job.tenant)
    for tenant in sorted(round_.holdings.tenants):
        held = round_.holdings.held(tenant, candidate.accelerator)
        if (
            tenant == assignment.job.tenant
            or not held
            or levels.level(tenant) < min(own, round_.policy.work_share)
            or round_.holdings.inside_guarantee(tenant, candidate.accelerator)
        ):
            continue
        for victim in round_.preemptible_victims(candidate.pool, tenant):
            other = victim.assignment
            there = [c for c in other.option.candidates if c.accelerator == old.accelerator]
            if there and _free_to_go(round_, other) and may_be_preempted_again(round_, other):
                less = max(0.0, -max(levels.gain(other, c) for c in there))
                repeated = round_.policy.move_gain_factor * round_.lost_units(other) / 3600 / hours
                yield Victim(other, less + repeated, nodes)


def _placed_again(round_: Round, trial: Trial) -> bool:
    """Whether all that lost their place in the trial have been given another, the largest first."""
    lost = [other for other, (was, *_) in trial.changes() if was is not None and other.placement is None]
    lost.sort(key=lambda other: (-max(c.accelerators_m for c in other.option.candidates), other.job.id))
    return all(any(round_.put_now(other, row.candidate) for row in round_.ranked(other)) for other in lost)


def _changes(levels: _Levels, trial: Trial) -> dict[str, float]:
    """What each tenant concerned does more than before the trial."""
    found: dict[str, float] = {}
    for other, was in trial.changes():
        tenant = other.job.tenant
        found[tenant] = found.get(tenant, 0.0) + levels.work(other) - levels.at(was, other)
    return found


def _is_share(
    round_: Round,
    levels: _Levels,
    assignment: Assignment,
    trial: Trial,
    changes: Mapping[str, float],
    gain: float,
) -> bool:
    tenant, candidate = assignment.job.tenant, assignment.candidate
    assert candidate is not None
    rise = min(levels.level(name, more) for name, more in changes.items()) - min(map(levels.level, changes))
    brings = levels.level(tenant, gain) - levels.level(tenant)
    if rise < LEAST_RISE * brings:
        return False
    return gain * hours_left(assignment, candidate) >= _repeated(round_, (a for a, _ in trial.changes()))


def _is_gain(round_: Round, assignment: Assignment, trial: Trial, changes: Mapping[str, float]) -> bool:
    assert assignment.candidate is not None
    if min(changes.values()) < 0:
        return False
    hours = hours_left(assignment, assignment.candidate)
    moved = [other for other, _ in trial.changes()]
    return all(
        more * min(hours, *(hours_left(a, a.candidate) for a in moved if a.candidate is not None))
        >= _repeated(round_, (a for a in moved if a.job.tenant == tenant))
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
    saved = run.started_at_s if run.saved_at_s is None else run.saved_at_s
    return units * (assignment.job.restart_s + max(0.0, round_.now - saved))
