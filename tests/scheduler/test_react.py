"""`react` gives the same plan with and without a memo, always an allowed one, and acts only on what the event
affects."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    ActionKind,
    Event,
    Happened,
    Job,
    JobId,
    JobKind,
    Memo,
    Plan,
    Policy,
    Reservation,
    Resources,
    Run,
    Snapshot,
    WaitCode,
    applied,
    check_plan,
    plan,
    planner,
    react,
    updated,
)
from busbar.scheduler.model.snapshot import Delta
from busbar.scheduler.search.promised_places import carry, drop_all
from busbar.scheduler.search.state import PlanningState

from .build import NOW, cluster, job, nodes, placed, tenant
from .strategies import jobs as any_job
from .strategies import powered, snapshots

POLICY = Policy(solver_seconds=None)
quiet = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def changes(draw: st.DrawFn, snapshot: Snapshot, number: int, now: float) -> Snapshot:
    """The snapshot after something happened to it."""
    running = [j for j in snapshot.jobs if j.run is not None and not j.run.releasing]
    releasing = [j for j in snapshot.jobs if j.run is not None and j.run.releasing]
    kinds = ("arrive", "end", "stop", "release", "node", "back", "speed", "quota", "saved")
    kind = draw(st.sampled_from((*kinds, "watts", "hangs") if snapshot.domains else kinds))
    if kind == "arrive" or not running:
        fresh = replace(draw(any_job(50 + number)), submitted_at_s=now)
        return updated(snapshot, Delta(jobs=(fresh,)))
    one = draw(st.sampled_from(running))
    assert one.run is not None
    if kind == "stop":
        return updated(snapshot, Delta(jobs=(replace(one, run=replace(one.run, releasing=True)),)))
    if kind == "release" and releasing:
        gone = draw(st.sampled_from(releasing))
        return updated(snapshot, Delta(jobs=(replace(gone, run=None, last_move_at_s=now),)))
    if kind in ("node", "back"):
        node = draw(st.sampled_from(snapshot.nodes))
        return updated(snapshot, Delta(nodes=(replace(node, ready=kind == "back"),)))
    if kind == "speed":
        cells = list(snapshot.table.cells)
        at = draw(st.integers(0, len(cells) - 1))
        cells[at] = replace(cells[at], speed=cells[at].speed * 1.5)
        return updated(snapshot, Delta(table=replace(snapshot.table, cells=tuple(cells))))
    if kind == "quota":
        who = draw(st.sampled_from(snapshot.tenants))
        return updated(snapshot, Delta(tenants=(replace(who, weight=2 * who.weight, quotas=()),)))
    if kind == "watts":
        one_feed = draw(st.integers(0, len(snapshot.domains) - 1))
        usable_w = draw(st.sampled_from((0.0, 800.0, 4000.0)))
        domains = list(snapshot.domains)
        domains[one_feed] = replace(domains[one_feed], usable_w=usable_w)
        return updated(snapshot, Delta(domains=tuple(domains)))
    if kind == "hangs":
        node, domain = draw(st.sampled_from(snapshot.nodes)), draw(st.sampled_from(("", "hall", "rack")))
        return updated(snapshot, Delta(nodes=(replace(node, domain=domain),)))
    if kind == "saved":
        return updated(snapshot, Delta(jobs=(replace(one, run=replace(one.run, saved_at_s=now)),)))
    return updated(snapshot, Delta(gone_jobs=(one.id,)))


def _partly(snapshot: Snapshot, made: Plan, now: float, slow: bool) -> Snapshot:
    """The snapshot after the plan. If `slow`, stops do not end yet, and starts that wait for them are skipped."""
    if not slow:
        return applied(snapshot, made, now)
    actions = {action.job: action for action in made.actions}
    found = []
    for one in snapshot.jobs:
        action = actions.get(one.id)
        if action is not None and one.run is not None:
            one = replace(one, run=replace(one.run, releasing=True))
        elif action is not None and action.kind is ActionKind.START and not action.after:
            assert action.to is not None
            one = replace(one, run=Run(action.to, now))
        found.append(one)
    return replace(snapshot, jobs=tuple(found))


@quiet
@given(st.data(), snapshots(), st.booleans(), st.booleans())
def test_a_memo_changes_nothing_and_every_answer_is_allowed(
    data: st.DataObject, snapshot: Snapshot, slow: bool, carried_out: bool
) -> None:
    _follows(data, snapshot, slow, carried_out)


@settings(quiet, max_examples=40)
@given(st.data(), powered(), st.booleans(), st.booleans())
def test_the_same_where_watts_are_short(
    data: st.DataObject, snapshot: Snapshot, slow: bool, carried_out: bool
) -> None:
    _follows(data, snapshot, slow, carried_out)


def _one_after_the_other(snapshot: Snapshot, made: Plan, event: Event) -> Plan:
    """The answer if all places that the last plan gave are given again in the round."""

    def none_carried(state: PlanningState, *more: Any) -> tuple[list[Reservation], list[Reservation]]:
        found = carry(state, *more)
        drop_all(state)
        return found

    with patch.object(planner, "carry", none_carried):
        return react(snapshot, made, event)[0]


def _follows(data: st.DataObject, snapshot: Snapshot, slow: bool, carried_out: bool) -> None:
    made, memo = plan(snapshot, POLICY, NOW)
    first = memo
    now = NOW
    for number in range(6):
        now += 40.0
        before = snapshot
        if carried_out or number % 2:
            snapshot = _partly(snapshot, made, now, slow)
        snapshot = data.draw(changes(snapshot, number, now))
        event = Event.between(before, snapshot, now)
        told, memo = react(snapshot, made, event, memo)
        untold, _ = react(snapshot, made, event, None)
        again, _ = react(snapshot, made, event, memo)
        assert told == untold == again == _one_after_the_other(snapshot, made, event)
        assert check_plan(snapshot, told) == []
        assert told.bound >= told.value
        made = told
    # A memo of another snapshot has the effect of none.
    assert react(snapshot, made, Event(now), first)[0] == react(snapshot, made, Event(now), None)[0]


def _lent(random: Random) -> Snapshot:
    """Nodes full of jobs of two tenants, and jobs of a third one that is guaranteed a half of them."""
    held = [
        job(f"l{i:02d}", random.choice("bc"), size=size, on=placed("H100", f"H100-{node:04d}", size=size))
        for i, (node, size) in enumerate(
            (n, s) for n in range(4) for s in random.choice(((8,), (4, 4), (2, 6)))
        )
    ]
    asking = [
        job(f"w{i}", random.choice("aaab"), random.choice((1, 2, 4, 8)), random.choice((1, 1, 2)),
            priority=random.choice((100, 100, 200)), remaining=random.choice((None, 1e4)))
        for i in range(8)
    ]  # fmt: skip
    return cluster(*held, *asking, tenants=(tenant("a", H100=(16, None, None)),), H100=4, L4=1)


def _goes_on(snapshot: Snapshot, random: Random, number: int, now: float) -> Snapshot:
    """One of those that are being stopped is gone, or something else happens."""
    stopping = [one for one in snapshot.jobs if one.run is not None and one.run.releasing]
    waiting = [one for one in snapshot.jobs if one.run is None]
    kind = random.choice(("gone", "gone", "arrives", "arrives", "asks", "node", "weight"))
    if kind == "gone" and stopping:
        one = random.choice(stopping)
        return updated(snapshot, Delta(jobs=(replace(one, run=None, last_move_at_s=now),)))
    if kind == "asks" and waiting:
        return updated(snapshot, Delta(jobs=(replace(random.choice(waiting), min_pods=1, max_pods=2),)))
    if kind == "node":
        node = random.choice(snapshot.nodes)
        return updated(snapshot, Delta(nodes=(replace(node, ready=not node.ready),)))
    if kind == "weight":
        who = random.choice(snapshot.tenants)
        return updated(snapshot, Delta(tenants=(replace(who, weight=random.choice((0.5, 1.0, 3.0))),)))
    fresh = job(f"n{number}", random.choice("abc"), random.choice((1, 4, 8)), submitted=now)
    return updated(snapshot, Delta(jobs=(replace(fresh, priority=random.choice((50, 100, 500))),)))


@settings(quiet, max_examples=40)
@given(st.integers(0, 10**6))
def test_answers_while_jobs_are_being_stopped_are_those_of_the_full_computation(seed: int) -> None:
    """Hardly any place of the last answer is given anew; the answer is the same as if all were."""
    random = Random(seed)
    before = _lent(random)
    made, memo = plan(before, POLICY, NOW)
    now, after = NOW, _partly(before, made, NOW, slow=True)
    for number in range(8):
        now += 20.0
        event = Event.between(before, after, now)
        told, memo = react(after, made, event, memo)
        assert told == react(after, made, event)[0] == _one_after_the_other(after, made, event)
        assert check_plan(after, told) == []
        made, before = told, after
        after = _goes_on(_partly(after, told, now, slow=True), random, number, now)


@quiet
@given(st.data(), snapshots())
def test_a_full_plan_after_react_converges(data: st.DataObject, snapshot: Snapshot) -> None:
    made, memo = plan(snapshot, POLICY, NOW)
    after = data.draw(changes(applied(snapshot, made, NOW), 0, NOW))
    told, memo = react(after, made, Event.between(snapshot, after, NOW), memo)
    after = applied(after, told, NOW)
    again, memo = react(after, told, Event(NOW), memo)
    assert again.actions == ()
    full, memo = plan(after, POLICY, NOW, memo)
    assert check_plan(after, full) == []
    assert plan(applied(after, full, NOW), POLICY, NOW, memo)[0].actions == ()


def _answer(before: Snapshot, after: Snapshot, at_s: float = NOW + 10) -> tuple[Plan, Plan]:
    made, memo = plan(before, POLICY, NOW)
    told, _ = react(after, made, Event.between(before, after, at_s), memo)
    assert check_plan(after, told) == []
    return made, told


def test_after_a_full_plan_the_memo_is_that_of_the_plan_carried_out() -> None:
    weak = job("w", "b", size=8, on=placed("H100", "H100-0000", size=8))
    before = cluster(weak, job("s", "b", size=8, priority=500), H100=1)
    made, memo = plan(before, POLICY, NOW)
    after = applied(before, made, NOW)
    state = memo.state
    assert {action.kind for action in made.actions} == {ActionKind.PREEMPT, ActionKind.START}
    assert state is not None
    assert state.snapshot == after
    assert state.waiting.keys() == {one.id for one in after.jobs if one.run is None}


def test_a_new_job_starts_and_the_others_keep_their_records() -> None:
    full = [job(f"r{i}", size=8, on=placed("H100", f"H100-{i:04d}", size=8)) for i in range(2)]
    before = cluster(*full, job("big", size=8), H100=2, L4=1, tenants=(tenant("a", H100=(0, None, None)),))
    before = replace(before, jobs=tuple(replace(j, accelerators=("H100",)) for j in before.jobs))
    made, told = _answer(before, updated(before, Delta(jobs=(job("new", size=2),))))
    assert [(a.kind, str(a.job)) for a in told.actions] == [(ActionKind.START, "uid-new")]
    old, kept = made.record(JobId("uid-big")), told.record(JobId("uid-big"))
    assert old == kept
    assert kept is not None
    assert kept.round == made.id != told.id
    assert told.prices == made.prices


def test_room_that_became_free_goes_to_the_strongest_that_fits() -> None:
    full = [job(f"r{i}", size=4, on=placed("H100", "H100-0000", size=4)) for i in range(2)]
    waiting = [job("small", size=4, priority=10), job("strong", size=4, priority=90), job("wide", size=8)]
    before = cluster(*full, *waiting, H100=1)
    _, told = _answer(before, updated(before, Delta(gone_jobs=(full[0].id,))))
    assert [str(a.job) for a in told.actions] == ["uid-strong"]


def test_a_guarantee_is_taken_back_at_once() -> None:
    lent = [job(f"b{i}", "b", size=2, on=placed("H100", "H100-0000", size=2)) for i in range(4)]
    before = cluster(*lent, tenants=(tenant("a", H100=(4, None, None)),), H100=1)
    _, told = _answer(before, updated(before, Delta(jobs=(job("x", "a", size=4),))))
    assert sorted(a.kind for a in told.actions) == [ActionKind.PREEMPT, ActionKind.PREEMPT, ActionKind.START]
    assert [r.code for r in told.waiting if r.job == "uid-x"] == [WaitCode.PREEMPTING]


def test_jobs_that_an_answer_stops_are_told_why_they_wait_once_they_do() -> None:
    lent = [job(f"b{i}", "b", size=4, on=placed("H100", "H100-0000", size=4)) for i in range(2)]
    before = cluster(*lent, tenants=(tenant("a", H100=(8, None, None)),), H100=1)
    made, memo = plan(before, POLICY, NOW)
    after = updated(before, Delta(jobs=(job("x", "a", size=8),)))
    told, memo = react(after, made, Event.between(before, after, NOW + 1), memo)
    codes = {str(r.job): r.code for r in told.waiting}
    assert codes == {"uid-x": WaitCode.PREEMPTING, "uid-b0": WaitCode.RELEASING, "uid-b1": WaitCode.RELEASING}
    gone = applied(after, told, NOW + 2)
    told, _ = react(gone, told, Event.between(after, gone, NOW + 2), memo)
    assert {str(r.job): r.code for r in told.waiting} == dict.fromkeys(
        ("uid-b0", "uid-b1"), WaitCode.FAIR_SHARE
    )


def test_jobs_that_a_full_plan_stops_keep_the_reason_that_it_gave() -> None:
    """It has looked for another place for each of them; one that asks for something else since is tried again."""
    lent = [job(f"b{i}", "b", size=4, on=placed("H100", "H100-0000", size=4)) for i in range(2)]
    before = cluster(*lent, job("x", "a", size=8), tenants=(tenant("a", H100=(8, None, None)),), H100=1)
    made, memo = plan(before, POLICY, NOW)
    given = {str(r.job): r for r in made.waiting if r.job != "uid-x"}
    assert {r.code for r in given.values()} == {WaitCode.FAIR_SHARE}
    gone = applied(before, made, NOW + 1)
    less = next(j for j in gone.jobs if j.id == "uid-b1")
    gone = updated(gone, Delta(jobs=(replace(less, min_pods=1, max_pods=2),)))
    event = Event.between(before, gone, NOW + 1)
    kinds = [(one.name, one.kind) for one in event.happened if one.name in given]
    assert kinds == [
        ("uid-b1", Happened.CHANGED),
        ("uid-b0", Happened.RELEASED),
        ("uid-b1", Happened.RELEASED),
    ]
    told, _ = react(gone, made, event, memo)
    now = {str(r.job): r for r in told.waiting}
    assert now["uid-b0"] is given["uid-b0"]
    assert (now["uid-b1"].round, now["uid-b0"].round) == (told.id, made.id)
    assert told == react(gone, made, event)[0], "and without a memo"


def test_a_promised_place_is_not_given_to_a_weaker_job_while_it_is_being_freed() -> None:
    lent = [job(f"b{i}", "b", size=4, on=placed("H100", "H100-0000", size=4)) for i in range(2)]
    mine = job("x", "a", size=8)
    before = cluster(*lent, mine, tenants=(tenant("a", H100=(8, None, None)),), H100=1)
    made, memo = plan(before, POLICY, NOW)
    first, second = (replace(j, run=replace(j.run, releasing=True)) for j in lent if j.run is not None)
    stopping = updated(before, Delta(jobs=(first, second)))
    made, memo = react(stopping, made, Event.between(before, stopping, NOW + 1), memo)
    half = updated(stopping, Delta(jobs=(job("late", "b", size=4),), gone_jobs=(first.id,)))
    told, memo = react(half, made, Event.between(stopping, half, NOW + 2), memo)
    assert told.actions == ()
    free = updated(half, Delta(gone_jobs=(second.id,)))
    told, memo = react(free, told, Event.between(half, free, NOW + 3), memo)
    assert [str(a.job) for a in told.actions] == ["uid-x"]


def test_a_start_that_was_not_carried_out_is_proposed_again() -> None:
    before = cluster(job("x"), job("y"), H100=1)
    made, memo = plan(before, POLICY, NOW)
    assert len(made.actions) == 2
    told, _ = react(before, made, Event(NOW + 1), memo)
    assert told.actions == made.actions


def test_a_node_that_comes_back_is_filled() -> None:
    before = cluster(job("x", size=8), H100=1)
    before = replace(before, nodes=tuple(replace(n, ready=False) for n in before.nodes))
    after = updated(before, Delta(nodes=nodes("H100", 1)))
    assert [one.kind for one in Event.between(before, after, NOW).happened] == [Happened.NODE_ADDED]
    _, told = _answer(before, after)
    assert [str(a.job) for a in told.actions] == ["uid-x"]


def test_progress_is_no_event() -> None:
    one = job("x", on=placed("H100", "H100-0000"), remaining=100.0)
    assert one.run is not None
    before = cluster(one, H100=1)
    later = replace(one, remaining_work=50.0, attained_s=10.0, run=replace(one.run, saved_at_s=NOW))
    assert Event.between(before, updated(before, Delta(jobs=(later,))), NOW).happened == ()


def test_the_policy_of_the_plan_holds() -> None:
    policy = replace(POLICY, min_run_s=10.0)
    lent = [job(f"b{i}", "b", on=placed("H100", "H100-0000"), since=NOW - 20) for i in range(8)]
    before = cluster(*lent, tenants=(tenant("a", H100=(1, None, None)),), H100=1)
    after = updated(before, Delta(jobs=(Job(JobId("x"), "x", "ns", "a", per_pod=Resources(1000, 1000)),)))
    made, memo = plan(before, policy, NOW)
    told, _ = react(after, made, Event.arrived(NOW, JobId("x")), memo)
    assert [a.kind for a in told.actions] == [ActionKind.PREEMPT, ActionKind.START]
    assert isinstance(memo, Memo)


def test_a_replica_that_requests_wait_for_from_now_on_takes_the_turn_of_another() -> None:
    holds = job("holds", on=placed("H100", "H100-0000", size=8), size=8, preemptible=False)
    old = job("old", size=8, kind=JobKind.SERVING, submitted=NOW - 9000)
    new = job("new", size=8, kind=JobKind.SERVING, submitted=NOW - 20)
    before = cluster(holds, old, new, H100=1)
    last, memo = plan(before, POLICY, NOW)
    assert last.actions == ()
    awaited = Delta(jobs=(replace(new, needed_now=True),), gone_jobs=(holds.id,))
    after = updated(before, awaited)
    answer, _ = react(after, last, Event.between(before, after, NOW + 1), memo)
    assert [action.job for action in answer.actions] == [new.id]


def test_a_lower_priority_does_not_start_first_because_it_is_worth_its_price() -> None:
    """One place becomes free between two full plans: as in a full plan, the higher priority gets it."""
    holds = job("holds", on=placed("H100", "H100-0000", size=8), size=8, priority=900, preemptible=False)
    high = job("high", size=8, priority=500, remaining=1e6)
    urgent = [job(f"replica{i}", size=8, kind=JobKind.SERVING) for i in range(2)]
    before = cluster(holds, high, *urgent, H100=1)
    last, memo = plan(before, POLICY, NOW)
    after = updated(before, Delta(gone_jobs=(holds.id,)))
    answer, _ = react(after, last, Event.between(before, after, NOW + 1), memo)
    assert [action.job for action in answer.actions] == [high.id]
