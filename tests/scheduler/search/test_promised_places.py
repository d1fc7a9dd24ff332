"""Places that the last plan gave and that others have still to leave are carried from answer to answer.

That an answer is the same if all are given anew: `test_react.py`.
"""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import (
    ActionKind,
    Event,
    Job,
    Memo,
    Plan,
    Policy,
    Snapshot,
    WaitCode,
    plan,
    react,
    updated,
)
from busbar.scheduler.model.snapshot import Delta
from busbar.scheduler.placement.cluster import Cluster
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed, tenant

OWNER = (tenant("a", H100=(16, None, None)), tenant("b"))


def _state(memo: Memo) -> PlanningState:
    assert memo.state is not None
    return memo.state


def _begun() -> tuple[Snapshot, Snapshot, Plan, Memo]:
    """Two nodes that b borrowed are given back to two jobs of a, and those of b are being stopped."""
    lent = [job(f"l{i}", "b", size=8, on=placed("H100", f"H100-{i:04d}", size=8)) for i in range(2)]
    before = cluster(*lent, job("x", size=8), job("y", size=8), tenants=OWNER, H100=2)
    made, memo = plan(before, Policy(solver=False), NOW)
    leaving = tuple(replace(one, run=replace(one.run, releasing=True)) for one in lent if one.run is not None)
    return before, updated(before, Delta(jobs=leaving)), made, memo


def _stopping() -> tuple[Snapshot, Plan, Memo]:
    """The same after the first answer."""
    before, after, made, memo = _begun()
    return _answered(before, after, made, memo, NOW + 1)


def _answered(
    before: Snapshot, after: Snapshot, made: Plan, memo: Memo, now: float
) -> tuple[Snapshot, Plan, Memo]:
    event = Event.between(before, after, now)
    told, renewed = react(after, made, event, memo)
    assert told == react(after, made, event)[0]
    return after, told, renewed


def _job(snapshot: Snapshot, name: str) -> Job:
    return next(one for one in snapshot.jobs if one.name == name)


def test_a_start_that_waits_for_others_keeps_the_place_that_the_plan_gave_it() -> None:
    before, after, made, memo = _begun()
    starts = {action.job: action.to for action in made.actions if action.after}
    assert starts.keys() == {"uid-x", "uid-y"}
    _, told, memo = _answered(before, after, made, memo, NOW + 1)
    assert told.actions == ()
    assert {one.job: one.placement for one in told.reservations} == starts
    assert {record.job: record.reservation for record in told.waiting if record.job in starts} == {
        one.job: one for one in told.reservations
    }
    assert _state(memo).carried.keys() == starts.keys()


def test_a_start_that_waits_for_jobs_of_which_one_is_not_being_stopped_yet_is_planned_again() -> None:
    before, after, made, memo = _begun()
    runs = next(one for one in before.jobs if one.name == "l1")
    _, told, memo = _answered(before, updated(after, Delta(jobs=(runs,))), made, memo, NOW + 1)
    assert [action.kind for action in told.actions] == [ActionKind.PREEMPT, ActionKind.START]
    assert len(_state(memo).carried) == 1


def test_a_place_is_carried_with_its_record_until_others_have_left_it() -> None:
    before, made, memo = _stopping()
    assert sorted(_state(memo).carried) == ["uid-x", "uid-y"]
    after = updated(before, Delta(jobs=(job("late", "b", size=1),)))
    _, told, memo = _answered(before, after, made, memo, NOW + 3)
    assert sorted(_state(memo).carried) == ["uid-x", "uid-y"]
    assert told.actions == ()
    assert told.reservations == made.reservations
    for name in ("uid-x", "uid-y"):
        old, kept = (next(r for r in one.waiting if r.job == name) for one in (made, told))
        assert kept is old
        assert kept.code is WaitCode.PREEMPTING
    gone = updated(after, Delta(gone_jobs=(_job(after, "l0").id,)))
    _, told, memo = _answered(after, gone, told, memo, NOW + 4)
    (start,) = told.actions
    assert (start.kind, start.after) == (ActionKind.START, ())
    assert start.to is not None
    assert start.to.nodes == ("H100-0000",)
    assert len(_state(memo).carried) == 1


def test_a_job_that_asks_for_something_else_is_carried_no_longer() -> None:
    before, made, memo = _stopping()
    after = updated(before, Delta(jobs=(replace(_job(before, "x"), min_pods=2, max_pods=2),)))
    _, _, memo = _answered(before, after, made, memo, NOW + 3)
    assert list(_state(memo).carried) == ["uid-y"]
    assert "uid-x" in _state(memo).waiting


def test_a_place_on_a_node_that_is_lost_is_carried_no_longer() -> None:
    before, made, memo = _stopping()
    after = updated(before, Delta(nodes=(replace(before.nodes[0], ready=False),)))
    _, _, memo = _answered(before, after, made, memo, NOW + 3)
    (kept,) = _state(memo).carried.values()
    assert kept.placement.nodes == ("H100-0001",)


def test_a_place_that_a_stronger_right_takes_leaves_its_job_waiting_for_another() -> None:
    """The priority of a job of the same tenant takes a promised place; who had it waits, and is told why."""
    before, made, memo = _stopping()
    after = updated(before, Delta(jobs=(job("strong", size=8, priority=900),)))
    _, told, memo = _answered(before, after, made, memo, NOW + 3)
    codes = {str(record.job): record for record in told.waiting}
    lost = [name for name in ("uid-x", "uid-y") if codes[name].code is not WaitCode.PREEMPTING]
    assert codes["uid-strong"].code is WaitCode.PREEMPTING
    assert len(lost) == 1
    assert codes[lost[0]].round == told.id
    assert lost[0] not in _state(memo).carried


def test_more_than_the_quota_allows_is_given_one_after_the_other() -> None:
    before, made, memo = _stopping()
    less = (tenant("a", H100=(8, 0, None)), tenant("b"))
    after = replace(before, tenants=less)
    _, told, memo = _answered(before, after, made, memo, NOW + 3)
    assert not _state(memo).carried
    assert sum(record.code is WaitCode.PREEMPTING for record in told.waiting) == 1


def test_a_promised_place_counts_as_neither_held_nor_taken_when_a_round_begins() -> None:
    """How long others must run for a share depends on what the tenant holds, and a start waits for those on its nodes if
    these had no room: what was only promised is still to come."""
    _, _, memo = _stopping()
    round_ = Round(_state(memo), NOW + 3)
    assert round_.held_before == {"a": 0.0, "b": 0.0}
    assert round_.holdings.units("a") == 16.0
    empty = Cluster(cluster(H100=1)).pools["H100"]
    place = placed("H100", "H100-0000", size=8)
    empty.take_promised(place)
    empty.begin()
    assert not empty.short(place, {})
    empty.rewind()
    empty.take_promised(place, sign=1)
    empty.take(place)
    empty.begin()
    assert empty.short(place, {})
