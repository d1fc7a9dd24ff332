"""Which jobs may be preempted for which: one test per right in search/rules.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import ActionKind, Job, JobId, Policy, Snapshot, Tenant, User, plan
from busbar.scheduler.search.claim import lost_value, offered, regret
from busbar.scheduler.search.preemption import reclaim
from busbar.scheduler.search.round import Round, place_of
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed, speeds, tenant

OWNER = (tenant("a", H100=(4, None, None)), tenant("b"))


def _running(name: str, of: str, size: int = 4, *, since: float = NOW - 7200, **more: object) -> Job:
    on = placed("H100", "H100-0000", size=size)
    return replace(job(name, of, size, on=on, since=since, saved=max(since, NOW - 60)), **more)  # type: ignore[arg-type]


def _round(snapshot: Snapshot) -> Round:
    return Round(PlanningState(snapshot, Policy(), NOW), NOW)


def _reclaimed(snapshot: Snapshot, name: str = "w") -> tuple[bool, set[str]]:
    """Whether the waiting job is placed by preemption, and which jobs are stopped."""
    round_ = _round(snapshot)
    assignment = round_.assignments[JobId(f"uid-{name}")]
    started = reclaim(round_, [assignment])
    assert started == (assignment.placement is not None)
    return started, {one.job.name for one in round_.changed if one.placement is None}


def test_a_guarantee_takes_what_others_borrowed() -> None:
    lent = [_running("l1", "b"), _running("l2", "b")]
    started, stopped = _reclaimed(cluster(*lent, job("w", "a", size=4), tenants=OWNER, H100=1))
    assert started
    assert len(stopped) == 1


def test_the_victim_is_the_job_that_loses_least_work() -> None:
    dear, cheap = _running("dear", "b"), _running("cheap", "b")
    assert dear.run is not None
    dear = replace(dear, run=replace(dear.run, saved_at_s=NOW - 600))
    assert _reclaimed(cluster(dear, cheap, job("w", "a", size=4), tenants=OWNER, H100=1)) == (True, {"cheap"})


def test_nothing_is_taken_below_the_others_guarantee() -> None:
    both = (tenant("a", H100=(8, None, None)), tenant("b", H100=(8, None, None)))
    lent = [_running("l1", "b"), _running("l2", "b")]
    assert _reclaimed(cluster(*lent, job("w", "a", size=4), tenants=both, H100=1)) == (False, set())


def test_a_fair_share_takes_from_a_tenant_above_its_own() -> None:
    # Two tenants of equal weight: four each; b holds eight in two jobs.
    lent = [_running("l1", "b"), _running("l2", "b")]
    started, stopped = _reclaimed(cluster(*lent, job("w", "a", size=4), H100=1))
    assert started
    assert len(stopped) == 1
    whole = _running("l", "b", 8)
    assert _reclaimed(cluster(whole, job("w", "a", size=4), H100=1)) == (False, set()), "b would have nothing"


def test_a_fair_share_spares_a_job_that_was_preempted_too_often() -> None:
    tired = [_running("l1", "b", preemptions=5), _running("l2", "b", preemptions=5)]
    assert _reclaimed(cluster(*tired, job("w", "a", size=4), H100=1)) == (False, set())
    assert _reclaimed(cluster(*tired, job("w", "a", size=4), tenants=OWNER, H100=1))[0], (
        "a guarantee does not"
    )


def test_inside_a_tenant_the_higher_priority_wins() -> None:
    low = _running("low", "a", 8)
    assert _reclaimed(cluster(low, job("w", size=8, priority=101), H100=1)) == (True, {"low"})
    assert _reclaimed(cluster(low, job("w", size=8), H100=1)) == (False, set())
    capped = Tenant("a", priority_ceiling=100)
    assert not _reclaimed(cluster(low, job("w", size=8, priority=101), tenants=(capped,), H100=1))[0]


def test_a_user_inside_its_share_takes_from_a_colleague_above_theirs() -> None:
    mine = [_running(f"u{i}", "a", user="u") for i in range(2)]
    waits = replace(job("w", size=4), user="v")
    started, stopped = _reclaimed(cluster(*mine, waits, H100=1))
    assert started
    assert len(stopped) == 1
    heavy = Tenant("a", users=(User("u", weight=3.0),))
    assert not _reclaimed(cluster(*mine, waits, tenants=(heavy,), H100=1))[0], "v is entitled to two of eight"


def test_a_job_that_has_just_started_is_not_stopped_before_the_guarantee_is_due() -> None:
    fresh = _running("fresh", "b", 8, since=NOW - 10)
    soon, due = (job("w", "a", size=4, submitted=NOW - waited) for waited in (149, 150))
    assert _reclaimed(cluster(fresh, soon, tenants=OWNER, H100=1)) == (False, set())
    assert _reclaimed(cluster(fresh, due, tenants=OWNER, H100=1)) == (True, {"fresh"})


def test_a_job_that_is_not_preemptible_keeps_running() -> None:
    fixed = _running("fixed", "b", 8, preemptible=False)
    assert _reclaimed(cluster(fixed, job("w", "a", size=4), tenants=OWNER, H100=1)) == (False, set())


def test_what_a_place_is_worth_to_a_job() -> None:
    """On H100 at its best speed the job is worth its weight, on L4 half of it; nobody else bids, so prices are 0."""
    one = job("w", workload_class="c", remaining=3600.0)
    round_ = _round(replace(cluster(one, H100=1, L4=1), table=speeds("c", H100=1.0, L4=0.5)))
    assignment = round_.assignments[one.id]
    fast, slow = (ranked.candidate for ranked in round_.ranked(assignment))
    weight = assignment.option.weight
    assert (fast.accelerator, fast.value, slow.value) == ("H100", weight, 0.5 * weight)
    assert regret(round_, assignment, fast) == 0.5 * weight
    assert offered(round_, assignment, fast) == weight
    # 30 s lost of one hour, counted twice (`Policy.move_gain_factor`).
    assert lost_value(round_, assignment) == 2 * weight * 30 / 3600


def test_a_failed_preemption_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a place that waits for a release: otherwise the job would start before its room is free."""
    leaving = _running("leaving", "b", 8)
    assert leaving.run is not None
    leaving = replace(leaving, run=replace(leaving.run, releasing=True))
    round_ = _round(cluster(leaving, job("planned", size=8), job("w", size=8, priority=200), H100=1))
    planned, asks = (round_.assignments[JobId(f"uid-{name}")] for name in ("planned", "w"))
    (candidate,) = planned.option.candidates
    round_.put(planned, candidate, ("H100-0000",), release=True)
    monkeypatch.setattr(round_, "find", lambda *_: None)
    before = place_of(planned)
    assert not reclaim(round_, [asks])
    assert place_of(planned) == before
    assert planned.waits_for_release


def test_what_a_job_keeps_of_a_place_that_waits_for_a_release_waits_for_it_too() -> None:
    leaving = _running("leaving", "b", 8)
    assert leaving.run is not None
    leaving = replace(leaving, run=replace(leaving.run, releasing=True))
    grown = replace(job("grown", "b"), max_pods=8)
    round_ = _round(cluster(leaving, grown, job("w", "a", size=4), H100=1))
    planned, asks = (round_.assignments[JobId(f"uid-{name}")] for name in ("grown", "w"))
    whole = next(one for one in planned.option.candidates if one.pods == 8)
    round_.put(planned, whole, ("H100-0000",) * 8, release=True)
    assert reclaim(round_, [asks])
    assert planned.placement is not None
    assert planned.placement.pods == 4
    assert planned.waits_for_release


@pytest.mark.parametrize(
    ("holds", "ran_s", "gives_way"),
    [(0, 301, True), (2, 301, False), (2, 899, False), (2, 901, True), (3, 1199, False), (3, 1201, True)],
)
def test_the_less_of_its_share_is_lacking_the_longer_others_run_before_they_give_way(
    holds: int, ran_s: int, gives_way: bool
) -> None:
    # a asks for one more than it holds, and may have it: it lacks all, a third or a quarter of its share.
    lent = [_running(f"l{i}", "b", 1, since=NOW - ran_s) for i in range(8 - holds)]
    own = [_running(f"o{i}", "a", 1) for i in range(holds)]
    started, stopped = _reclaimed(cluster(*lent, *own, job("w", "a", size=1), H100=1))
    assert (started, len(stopped)) == (gives_way, int(gives_way))


def _turn(
    *, waited_h: float, ran_h: float, runs: int = 8, restart_s: float = 60.0, tenants: tuple[Tenant, ...] = ()
) -> bool:
    """Whether a job of eight of tenant a starts in the place of jobs that tenant b runs on all of eight."""
    waits = replace(job("w", "a", size=8, submitted=NOW - waited_h * 3600), restart_s=restart_s)
    lent = [_running(f"l{i}", "b", runs, since=NOW - ran_h * 3600) for i in range(8 // runs)]
    jobs = [replace(one, restart_s=restart_s) for one in lent]
    return _reclaimed(cluster(*jobs, waits, tenants=tenants, H100=1))[0]


def test_jobs_that_are_too_large_for_their_share_take_turns() -> None:
    assert _turn(waited_h=1, ran_h=1)
    assert not _turn(waited_h=0.9, ran_h=1), "it has not waited for its turn"
    assert not _turn(waited_h=1, ran_h=0.9), "the other one's turn is not over"
    assert not _turn(waited_h=2, ran_h=2, runs=4), "smaller jobs do not give way"


def test_a_turn_is_long_beside_a_restart() -> None:
    assert not _turn(waited_h=1.9, ran_h=2, restart_s=360)
    assert _turn(waited_h=2, ran_h=2, restart_s=360)


def test_a_turn_is_as_often_as_the_share_is_large() -> None:
    light = (Tenant("a"), Tenant("b", weight=3.0))
    assert not _turn(waited_h=2.9, ran_h=9, tenants=light)
    assert _turn(waited_h=3, ran_h=9, tenants=light)


def test_a_guarantee_takes_no_turns() -> None:
    assert not _turn(waited_h=9, ran_h=9, tenants=(Tenant("a"), tenant("b", H100=(8, None, None))))


@pytest.mark.parametrize("min_run_s", [0.0, 300.0])
def test_a_job_that_this_round_has_placed_is_one_victim_however_short_jobs_must_run(min_run_s: float) -> None:
    """The small job starts beside the one that runs; the large one of higher priority needs only the place of that one."""
    runs, small, large = _running("runs", "a", 7), job("small"), job("large", size=7, priority=500)
    snapshot = cluster(runs, small, large, H100=1)
    made, _ = plan(snapshot, Policy(min_run_s=min_run_s), NOW)
    assert {(action.kind, str(action.job)) for action in made.actions} == {
        (ActionKind.PREEMPT, "uid-runs"),
        (ActionKind.START, "uid-large"),
        (ActionKind.START, "uid-small"),
    }
