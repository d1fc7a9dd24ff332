"""Exchanges between running jobs of different tenants: shares hold in work, not only in accelerators.

Rights give a waiting job its tenant's share of the accelerators. Which jobs run on which type is decided by value inside
a tenant (`swap.py`, `migration.py`), so a tenant that came late may have its share of the accelerators and little of
the work: it runs on what the first one left. Here a running job takes the place of jobs of other tenants on a type that
is faster for it, and these go where it was, or to any other free place. It is kept if

    a share   the tenant does less than `Policy.work_share` of the work that it is entitled to, and the least of the
              levels of all tenants concerned rises, by a quarter at least of what the job brings its own tenant; or
    a gain    no tenant concerned does less than before. Where its share limits a tenant (`shares.py`), it does what
              its jobs do, and what it could do with what they hold less than before,

and what the job gains in the time that it has left, or the tenants together gain, is `Policy.move_gain_factor` times
the work that all of the moved repeat. A tenant's level is the work of its running jobs per unit that it is entitled to
(`fairness/work.py`). The lowest level rises with each exchange for a share, and the sum with each for a gain, so
exchanges end. The others are moved for a job: that counts as a preemption, at most `Policy.max_preemptions` times. No
place inside a guarantee is taken. Without exchanges three scenarios of `benchmarks/scheduling` fail, and with five tenants
the least that one has of its share of the work is a tenth lower.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..candidates.candidate import Candidate
from .claim import Claim
from .holds import lifted
from .levels import Levels
from .migration import pays
from .proposal import propose
from .round import Round
from .rules import EXCHANGE, groups_of
from .state import Assignment

ATTEMPTS = 16
"""Exchanges that are tried in one pass and undone; equal requests count once."""


def exchange(round_: Round) -> bool:
    """Exchange places between tenants where that is a share or a gain; whether anything changed."""
    if len(round_.holdings.tenants) < 2 or not round_.can_disrupt():
        return False
    levels = Levels(round_)
    changed, undone = False, 0
    hopeless: set[tuple[object, ...]] = set()
    for _, _, assignment, candidate in sorted(_proposals(round_, levels), key=lambda row: row[:2]):
        old = assignment.placement
        if undone >= ATTEMPTS or not round_.can_disrupt():
            break
        if not round_.may_go(assignment) or old is None:
            continue
        key = (id(assignment.option.shared), assignment.job.tenant, old.pool, candidate)
        if key in hopeless:
            continue
        if _exchanged(Claim(round_, assignment, candidate, levels=levels)):
            changed = True
        else:
            undone += 1
            hopeless.add(key)
    return changed


def _proposals(
    round_: Round, levels: Levels
) -> Iterator[tuple[tuple[bool, float], tuple[float, str], Assignment, Candidate]]:
    """Running jobs and candidates of other types that are clearly faster; jobs of tenants that lack work first, of
    these the lowest level, then those with the largest gain."""
    types = _held_by_several(round_)
    if not types:
        return
    for assignment in round_.assignments.values():
        current = assignment.candidate
        if current is None or not round_.may_go(assignment):
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


def _exchanged(claim: Claim) -> bool:
    """Carry out the exchange; undo it and return False unless it is a share or a gain, and takes no room of a
    reservation."""
    round_, levels = claim.round, claim.levels
    assert levels is not None
    had_room = [hold for hold in round_.holds.values() if hold.applied and hold.has_room]
    groups = groups_of(claim, (EXCHANGE,))
    with round_.trial() as trial:
        with lifted(round_.holds.values()):
            done = propose(claim, (EXCHANGE,), groups)
        if not done or not all(hold.has_room for hold in had_room):
            return False
        for other in done.moved:
            round_.gave_way[other] = claim.job.id
        levels.keep(levels.changes(trial))
        return trial.keep()
