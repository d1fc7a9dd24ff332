"""The program of the objective makespan, against cases worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from busbar.scheduler import Objective, Policy, highs, plan
from busbar.scheduler.candidates.makespan import Asked, Solution, solve
from busbar.scheduler.candidates.value import CRITICAL
from busbar.scheduler.errors import SolverError
from busbar.scheduler.model.snapshot import JobId
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

from ..build import NOW, cluster, job, placed

HOUR = 3600.0


def asked(name: str, hours: float, present: int | None = None, size: float = 1.0, **speed: float) -> Asked:
    """A job that takes so many hours at speed 1."""
    return Asked(JobId(name), hours * HOUR, list(speed), [size] * len(speed), list(speed.values()), present)


def spent(solution: Solution, kind: int) -> Mapping[str, float]:
    return {str(name): round(part.shares[kind], 6) for name, part in solution.parts.items()}


def test_jobs_go_where_they_lose_least() -> None:
    """Ten jobs lose nine tenths of their speed on B, ten lose half: two thirds of those go to B, and all ends at 13.33 h."""
    slow = [asked(f"slow{i}", 10, A=10.0, B=1.0) for i in range(10)]
    both = [asked(f"both{i}", 10, A=10.0, B=5.0) for i in range(10)]
    found = solve([*slow, *both], {"A": 1.0, "B": 1.0})
    on_b = spent(found, 1)
    assert sum(on_b[f"slow{i}"] for i in range(10)) == 0
    assert found.load == pytest.approx(1.0)
    assert sum(part.time for part in found.parts.values()) == pytest.approx(2.0), "both are never idle"
    assert {round(found.parts[JobId(f"slow{i}")].time * 40 / 3, 6) for i in range(10)} == {1.0}
    # An hour on A is worth 4/3 of the average, one on B 2/3; a job's best speed is on A.
    assert [part.value for part in found.parts.values()] == [pytest.approx(4 / 3, rel=1e-4)] * 20
    assert 6 <= sum(share > 0.5 for share in on_b.values()) <= 8


def test_the_longest_job_alone_decides_where_there_is_room_for_all() -> None:
    found = solve([asked("long", 9, gpu=1.0), asked("short", 2, gpu=1.0)], {"gpu": 2.0})
    assert found.load == pytest.approx(0.0)
    assert found.parts[JobId("long")].time == pytest.approx(1.0)
    assert found.parts[JobId("short")].time == pytest.approx(2 / 9)


def test_what_the_load_leaves_open_is_done_soon_and_not_on_a_slow_type() -> None:
    """Else jobs that may wait look like the long one, which must not, and take its place in turn."""
    drawn = random.Random(1)
    many = [
        asked(
            f"job{i}", drawn.uniform(1, 6), size=drawn.choice((1.0, 2.0, 4.0)),
            A=1.0, B=drawn.uniform(0.3, 0.7), C=drawn.uniform(0.1, 0.3),
        )
        for i in range(150)
    ]  # fmt: skip
    found = solve([asked("long", 9, A=1.0, B=0.5, C=0.2), *many], dict.fromkeys("ABC", 150.0))
    assert found.load == pytest.approx(0.0, abs=1e-3)
    assert [str(name) for name, part in found.parts.items() if part.time > CRITICAL] == ["long"]


@pytest.mark.parametrize("present", [0, 1])
def test_of_equally_good_solutions_a_running_job_stays(present: int) -> None:
    jobs = [asked("runs", 1, present, A=1.0, B=1.0), asked("waits", 1, None, A=1.0, B=1.0)]
    assert spent(solve(jobs, {"A": 1.0, "B": 1.0}), present)["runs"] == 1.0


def test_what_cannot_run_anywhere_is_left_out() -> None:
    assert solve([], {"A": 1.0}).parts == {}
    assert solve([asked("x", 1, A=0.0)], {"A": 1.0}).parts == {}
    both = [asked("other", 1, C=1.0), asked("large", 1, size=2.0, A=1.0), asked("x", 1, A=1.0)]
    found = solve(both, {"A": 1.0})
    assert found.parts.keys() == {"x"}
    assert found.ends_s == pytest.approx(HOUR)


def test_gangs_of_more_than_half_of_a_type_run_one_after_the_other() -> None:
    """By the load alone two gangs of three and a job of two on four accelerators end after 8 h / 4 = 2 h."""
    jobs = [
        asked("g1", 1, size=3.0, A=1.0),
        asked("g2", 1, size=3.0, A=1.0),
        asked("two", 1, size=2.0, A=1.0),
    ]
    found = solve(jobs, {"A": 4.0})
    assert found.ends_s == pytest.approx(3 * HOUR)
    assert found.load == pytest.approx(1.0)
    small = solve([*jobs[:2], asked("one", 2, A=1.0)], {"A": 4.0})
    assert small.ends_s == pytest.approx(2 * HOUR), "one accelerator is left beside them"


def test_equal_jobs_run_one_after_the_other() -> None:
    trace = Trace("equal", tuple(TraceJob(f"j{i}", 0.0, HOUR, {"gpu": 1.0}, "c") for i in range(20)))
    policy = Policy(objective=Objective.MAKESPAN, solver=False)
    found = simulate(trace, TraceCluster({"gpu": 2}), policy, Settings(steps_known=True))
    assert found.makespan_s <= 10.2 * HOUR
    assert sum(done.restarts for done in found.jobs) <= 2


@pytest.mark.parametrize("late", [False, True])
def test_only_jobs_that_came_later_try_a_jobs_patience(late: bool) -> None:
    """A gang that has waited longer than all work takes gets a reservation if there are newer jobs that pass it."""
    since = NOW - 10 * HOUR
    newest = NOW if late else since
    small = [
        job(f"s{i}", on=placed("H100", "H100-0000"), since=NOW - 60, submitted=newest, remaining=600.0)
        for i in range(8)
    ]
    gang = job("gang", size=8, submitted=since, remaining=600.0)
    policy = Policy(objective=Objective.MAKESPAN, solver=False)
    made, _ = plan(cluster(*small, gang, H100=1), policy, NOW)
    assert [one.job for one in made.reservations] == (["uid-gang"] if late else [])


def test_without_a_solution_jobs_have_their_usual_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise SolverError("no solver here")

    monkeypatch.setattr(highs, "solve", fails)
    snapshot = cluster(job("x", workload_class="c", remaining=100.0), H100=1)
    made, _ = plan(snapshot, Policy(objective=Objective.MAKESPAN, solver=False), NOW)
    assert [action.job for action in made.actions] == [JobId("uid-x")]
    assert made.solver_error == "no solver here"
