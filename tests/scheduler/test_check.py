"""A checker that goes on from snapshot to snapshot finds what one finds that counts everything."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from busbar.scheduler import Checker, Job, Plan, Policy, Snapshot, SnapshotError, applied, check_plan, plan

from .strategies import snapshots

NOW_S = 1e6


def spoilt(made: Plan, snapshot: Snapshot, chance: Random) -> Plan:
    """The plan, or one with an action or a record too few, too many, too early or on other nodes."""
    actions, waiting = list(made.actions), list(made.waiting)
    if actions:
        at = chance.randrange(len(actions))
        to = actions[at].to
        how = chance.randrange(5)
        if how == 0:
            actions.append(actions[at])
        elif how == 1:
            del actions[at]
        elif how == 2:
            actions[at] = replace(actions[at], after=())
        elif how == 3 and to is not None:
            nodes = tuple(chance.choice(snapshot.nodes).name for _ in to.nodes)
            actions[at] = replace(actions[at], to=replace(to, nodes=nodes))
    if waiting and chance.random() < 0.5:
        at = chance.randrange(len(waiting))
        waiting = waiting[:at] + waiting[at + chance.randrange(1, 3) :]
    return replace(made, actions=tuple(actions), waiting=tuple(waiting))


def moved_on(snapshot: Snapshot, made: Plan, chance: Random) -> Snapshot:
    """A later snapshot: the plan was carried out or not, jobs have ended, come, or are being stopped."""
    later = applied(snapshot, made, NOW_S) if chance.random() < 0.7 else snapshot
    jobs: list[Job] = []
    for job in later.jobs:
        luck = chance.random()
        if luck < 0.2:
            continue
        if luck < 0.3 and job.run is not None:
            job = replace(job, run=replace(job.run, releasing=True))
        elif luck < 0.4:
            job = replace(job, run=None)
        jobs.append(job)
    return replace(later, jobs=tuple(jobs))


@given(snapshots(), st.randoms(use_true_random=False))
def test_a_kept_checker_finds_what_a_new_one_finds(snapshot: Snapshot, chance: Random) -> None:
    kept = Checker()
    for _ in range(4):
        try:
            made, _memo = plan(snapshot, Policy(solver=False), NOW_S)
        except SnapshotError:
            return
        for asked in (made, spoilt(made, snapshot, chance)):
            assert kept.check(snapshot, asked) == check_plan(snapshot, asked)
        snapshot = moved_on(snapshot, made, chance)
