"""Exchanges by value: whole chains are carried out, but none that gains only at the prices and not in fact."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import Cell, Job, JobId, PerformanceTable, Policy, Snapshot, applied, check_plan, plan
from busbar.scheduler.search.round import Round
from busbar.scheduler.search.start import start_waiting
from busbar.scheduler.search.state import PlanningState

from ..build import NOW, cluster, job, nodes, placed, tenant

SPEEDS = {
    "a": {"V": 1.0, "P": 0.5, "K": 0.2},
    "b": {"V": 1.0, "P": 0.95, "K": 0.6},
    "c": {"V": 1.0, "P": 0.9, "K": 0.85},
    "x": {"V": 1.0, "P": 0.5, "K": 0.6},
    "y": {"V": 1.0, "P": 0.9, "K": 0.2},
    "z": {"P": 1.0},
}
POLICY = Policy(solver=False)


def _running(name: str, of: str, workload_class: str, hours: float = 5.0, preemptible: bool = True) -> Job:
    on = placed(of, f"{of}-0000")
    return job(
        name,
        workload_class=workload_class,
        on=on,
        saved=NOW,
        remaining=3600 * hours,
        preemptible=preemptible,
    )


def _three(*jobs: Job) -> Snapshot:
    """One accelerator of each of three types."""
    cells = tuple(
        Cell(name, kind, 1000, speed=speed) for name, row in SPEEDS.items() for kind, speed in row.items()
    )
    empty = cluster(*jobs, V=0, P=0, K=0)
    one_each = tuple(node for of in "VPK" for node in nodes(of, 1, size=1))
    return replace(empty, nodes=one_each, table=PerformanceTable(cells))


def _where(snapshot: Snapshot) -> dict[str, str]:
    return {job.name: "" if job.run is None else job.run.placement.accelerator for job in snapshot.jobs}


def test_a_chain_over_three_types_is_carried_out() -> None:
    before = _three(_running("a", "K", "a"), _running("b", "V", "b"), _running("c", "P", "c"))
    result, _ = plan(before, POLICY, NOW)
    assert _where(applied(before, result, NOW)) == {"a": "V", "b": "P", "c": "K"}


def test_nobody_is_moved_for_a_place_that_is_not_to_be_had() -> None:
    """x would gain 0.4 of its best speed on V, and y would lose only 0.1 if it could have P; but z keeps P, so y
    would end on K and lose 0.8."""
    kept = _running("z", "P", "z", hours=1e6, preemptible=False)
    before = _three(_running("x", "K", "x"), _running("y", "V", "y"), kept)
    for hour in range(3):
        result, _ = plan(before, POLICY, NOW + 3600 * hour)
        assert result.actions == ()


def test_a_waiting_job_takes_a_place_whose_holder_finds_another() -> None:
    """y waits and runs well on V and P only; c runs on V and is nearly as fast on K, which is free."""
    waits = job("y", workload_class="y", remaining=3600 * 5.0)
    held = replace(_running("z", "P", "z"), accelerators=("P",))
    before = _three(_running("c", "V", "c"), held, waits)
    result, _ = plan(before, POLICY, NOW)
    assert _where(applied(before, result, NOW)) == {"c": "K", "z": "P", "y": "V"}


def test_what_is_undone_is_as_it_was_promises_of_room_included() -> None:
    """A job that waits for another's devices, and one that runs: both are moved, and the moves are undone."""
    leaving = _running("a", "V", "a")
    assert leaving.run is not None
    leaving = replace(leaving, run=replace(leaving.run, releasing=True))
    waits = job("w", workload_class="a", remaining=3600.0, accelerators=("V",))
    round_ = Round(PlanningState(_three(leaving, _running("c", "P", "c"), waits), POLICY, NOW), NOW)
    start_waiting(round_)
    promised, running = round_.assignments[waits.id], round_.assignments[JobId("uid-c")]
    assert promised.waits_for_release
    was = (promised.placement, running.placement, running.started_at_s)
    with round_.trial() as trial:
        for assignment in (promised, running):
            round_.clear(assignment)
        assert [assignment.job.name for assignment, _ in trial.changes()] == ["c", "w"]
    assert (promised.placement, running.placement, running.started_at_s) == was
    assert promised.waits_for_release
    with round_.trial() as trial:
        round_.clear(promised)
        round_.put(promised, promised.option.candidates[0], ("V-0000",), release=False)
        assert [assignment.job.name for assignment, _ in trial.changes()] == ["w"]
    assert promised.waits_for_release


def test_a_swap_that_needs_nobodys_room_still_needs_the_tenants_quota() -> None:
    """The tenant is at its ceiling: a more valuable job may replace the running one, not run beside it."""
    long = _at_work("long", 3, remaining=900_000.0)
    short = job("short", "a", remaining=600.0)
    before = cluster(long, short, tenants=(tenant("a", any=(0, None, 3)),), H100=1)
    made, _ = plan(before, POLICY, NOW)
    assert check_plan(before, made) == []


def _at_work(name: str, pods: int, remaining: float) -> Job:
    on = placed("H100", *["H100-0000"] * pods)
    return job(name, "a", pods=pods, on=on, saved=NOW, remaining=remaining)
