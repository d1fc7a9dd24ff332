"""A round can be undone, tracks how many jobs it may still disrupt, and computes the cost of a stop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler import Job, JobId, JobKind, Policy, Snapshot
from busbar.scheduler.search.collection import Collection
from busbar.scheduler.search.holds import Hold, lifted
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, placed

POLICY = Policy()


def _round(snapshot: Snapshot, policy: Policy = POLICY) -> Round:
    return Round(PlanningState(snapshot, policy, NOW), NOW)


def _running(name: str, size: int = 1, *, since: float = NOW - 7200, saved: float | None = None) -> Job:
    return job(name, size=size, on=placed("H100", "H100-0000", size=size), since=since, saved=saved)


def _place(round_: Round, name: str) -> None:
    """Give a waiting job its first candidate, where it fits."""
    assignment = round_.assignments[JobId(name)]
    candidate = round_.ranked(assignment)[0].candidate
    found = round_.find(assignment.job, candidate)
    assert found is not None
    round_.put(assignment, candidate, *found)


def test_rewinding_restores_everything() -> None:
    round_ = _round(cluster(_running("r", 4), job("w", size=8), H100=1))
    stopped, started = round_.assignments[JobId("uid-r")], round_.assignments[JobId("uid-w")]
    pool, value = round_.cluster.pools["H100"], round_.state.value()
    round_.clear(stopped)
    _place(round_, "uid-w")
    assert (pool.free_m(), round_.holdings.held("a", "H100")) == (0, 8000)
    assert round_.disrupted == {"uid-r"}
    round_.rewind()
    assert (pool.free_m(), round_.holdings.held("a", "H100")) == (4000, 4000)
    assert stopped.stays
    assert started.placement is None
    assert round_.state.waiting.keys() == {"uid-w"}
    assert round_.state.value() == value


def test_a_trial_that_is_not_kept_leaves_what_came_before_it() -> None:
    round_ = _round(cluster(_running("r", 4), job("v", size=4), job("w", size=4), H100=1))
    _place(round_, "uid-v")
    with round_.trial() as trial:
        round_.clear(round_.assignments[JobId("uid-r")])
        _place(round_, "uid-w")
        assert [one.job.name for one, _ in trial.changes()] == ["r", "w"]
    assert trial.changes() == []
    assert round_.assignments[JobId("uid-v")].placement is not None
    assert round_.assignments[JobId("uid-r")].stays


def test_a_trial_inside_another_is_undone_with_it() -> None:
    round_ = _round(cluster(_running("r", 4), _running("s", 4), job("w", size=4), H100=1))
    stopped, other = round_.assignments[JobId("uid-r")], round_.assignments[JobId("uid-s")]
    with round_.trial() as outer:
        round_.clear(stopped)
        with round_.trial() as inner:
            _place(round_, "uid-w")
            inner.keep()
        with round_.trial():
            round_.clear(other)
        assert other.stays
        assert [one.job.name for one, _ in outer.changes()] == ["r", "w"]
    assert stopped.stays
    assert round_.assignments[JobId("uid-w")].placement is None


def test_a_failure_inside_a_trial_undoes_it() -> None:
    round_ = _round(cluster(_running("r", 4), H100=1))
    running = round_.assignments[JobId("uid-r")]

    def fail() -> None:
        with round_.trial():
            round_.clear(running)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert running.stays


def test_what_is_undone_leaves_reservations_the_room_that_they_had() -> None:
    """A gang collects both nodes. A job on one of them is taken away on trial, while the reservation is lifted for another
    job; then it is back, and the reservation withholds the free node and nothing of the other one."""
    gang = job("w", size=8, pods=2)
    round_ = _round(cluster(_running("r", 8), gang, H100=2))
    holder, running = round_.assignments[gang.id], round_.assignments[JobId("uid-r")]
    nodes = round_.cluster.pools["H100"]
    hold = Hold(holder, holder.option.candidates[0], nodes, {0: NOW, 1: NOW}, [0, 1])
    round_.holds[gang.id] = hold
    hold.apply()
    before = [list(free) for free in nodes.free_now]
    assert [free[nodes.key] for free in nodes.free_now] == [0, 0]
    with round_.trial(), lifted([hold]):
        round_.clear(running)
    assert [list(free) for free in nodes.free_now] == before
    assert hold.has_room is False, "the job is still there, and does not leave for the gang"
    hold.lift()
    assert [free[nodes.key] for free in nodes.free_now] == [0, 8000]


def test_what_a_job_leaves_for_a_reservation_is_withheld_from_others() -> None:
    round_ = _round(cluster(_running("r", 8), job("w", size=8), H100=1))
    holder, running = round_.assignments[JobId("uid-w")], round_.assignments[JobId("uid-r")]
    hold = Collection(round_, holder, holder.option.candidates[0], {}).hold()
    assert hold is not None
    assert hold.leaving.keys() == {"uid-r"}
    round_.holds[holder.job.id] = hold
    hold.apply()
    round_.clear(running)
    assert round_.cluster.pools["H100"].free_m() == 0
    hold.lift()
    assert round_.cluster.pools["H100"].free_m() == 8000


def test_the_disruption_budget_counts_what_happened_lately() -> None:
    # 5 % of 200 jobs are ten; two were moved within the last 300 s, one before that.
    moved = [replace(_running(f"m{i}"), last_move_at_s=NOW - ago) for i, ago in enumerate((10, 200, 400))]
    others = [job(f"w{i}") for i in range(197)]
    round_ = _round(cluster(*moved, *others, H100=1))
    assert round_.disruption_budget_left == 10 - 2
    round_.clear(round_.assignments[JobId("uid-m0")])
    assert round_.disruption_budget_left == 7
    round_.restore(
        round_.assignments[JobId("uid-m0")],
        moved[0].run.placement,  # type: ignore[union-attr]
        None,
        NOW - 7200,
    )
    assert round_.disruption_budget_left == 8, "back where it runs, it is not disrupted"


def test_a_small_cluster_may_disrupt_eight_jobs() -> None:
    round_ = _round(cluster(*[_running(f"r{i}") for i in range(8)], H100=1))
    for i in range(8):
        assert round_.can_disrupt()
        round_.clear(round_.assignments[JobId(f"uid-r{i}")])
    assert not round_.can_disrupt()


@pytest.mark.parametrize(
    ("since", "saved", "lost_s"),
    [
        (NOW - 600, None, 630.0),  # no checkpoint: all work is lost, plus the restart of 30 s
        (NOW - 600, NOW - 60, 90.0),
        (NOW - 600, NOW + 5, 30.0),  # clock skew: never less than the restart
    ],
)
def test_a_stop_costs_the_work_since_the_last_checkpoint(
    since: float, saved: float | None, lost_s: float
) -> None:
    round_ = _round(cluster(_running("r", 2, since=since, saved=saved), H100=1))
    assignment = round_.assignments[JobId("uid-r")]
    assert round_.lost_s(assignment) == lost_s
    assert round_.lost_units(assignment) == 2 * lost_s


def test_a_guarantee_is_due_after_half_its_deadline() -> None:
    policy = replace(POLICY, guarantee_reclaim_s=300.0)
    waits = job("w", submitted=NOW - 100)
    urgent = replace(job("u", submitted=NOW - 100), reclaim_deadline_s=60.0)
    stopped = replace(job("s", submitted=NOW - 9999), last_move_at_s=NOW - 20)
    round_ = _round(cluster(waits, urgent, stopped, _running("r"), H100=1), policy)
    due = {one.job.name: round_.reclaim_due_at_s(one) - NOW for one in round_.assignments.values()}
    assert due == {"w": -100 + 150, "u": -100 + 30, "s": -20 + 150, "r": 150}


def test_only_settled_preemptible_training_moves_for_its_own_good() -> None:
    fresh = _running("fresh", since=NOW - 299)
    old = _running("old", since=NOW - 300)
    fixed = replace(old, id=JobId("uid-fixed"), preemptible=False)
    replica = replace(old, id=JobId("uid-replica"), kind=JobKind.SERVING)
    round_ = _round(cluster(fresh, old, fixed, replica, job("w"), H100=1))
    assert [name for name, one in sorted(round_.assignments.items()) if round_.movable(one)] == ["uid-old"]


def test_a_reservation_outlasts_a_trial_that_takes_its_room_and_is_undone() -> None:
    round_ = _round(cluster(job("first", size=8), job("w", size=4), H100=1))
    first = round_.assignments[JobId("uid-first")]
    hold = Collection(round_, first, round_.ranked(first)[0].candidate, {}).hold()
    assert hold is not None
    round_.holds[first.job.id] = hold
    hold.apply()
    with round_.trial():
        with lifted(round_.holds.values()):
            _place(round_, "uid-w")
        assert not round_.sync_holds()
    assert hold.applied
    assert hold.has_room
    with lifted(round_.holds.values()):
        _place(round_, "uid-w")
    assert round_.sync_holds(), "what is kept takes the room"
    assert not round_.holds


def test_a_reservation_is_not_given_up_to_its_own_holder() -> None:
    round_ = _round(cluster(job("first", size=8), H100=1))
    first = round_.assignments[JobId("uid-first")]
    hold = Collection(round_, first, round_.ranked(first)[0].candidate, {}).hold()
    assert hold is not None
    round_.holds[first.job.id] = hold
    hold.apply()
    with lifted(round_.holds.values()):
        _place(round_, "uid-first")
    assert not round_.sync_holds()
    assert not hold.applied
