"""Forecasts: whose turn it is, what is written, what is remembered, and the process that computes them."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from busbar.kube.types import TrainingJob, TrainingPhase
from busbar.kube.types.training_job import TrainingJobStatus
from busbar.operator import forecasts
from busbar.operator import foretell as child
from busbar.operator.errors import ForetellFailed
from busbar.operator.forecasts import Forecasts, Waiting, due
from busbar.operator.foretell import Answer, Question, foretell, left_s
from busbar.operator.job_forecast import foretold, moment
from busbar.operator.metrics import Metrics
from busbar.operator.orders import Foretold
from busbar.operator.past import Past
from busbar.operator.trainingjob import reconcile
from busbar.scheduler import (
    Cell,
    Finished,
    Job,
    JobId,
    Node,
    PerformanceTable,
    Placement,
    Policy,
    Pool,
    Resources,
    Run,
    Snapshot,
    Tenant,
    plan,
)

from .builders import NOW, SETTINGS, admit, admitted, job, view

T = NOW.timestamp()


def tenant_of(namespace: str) -> str:
    return {"team": "a"}.get(namespace, "")


# -- whose turn it is ------------------------------------------------------------------------------------------


def waiting(name: str, submitted: float, told: float | None = None, was: int | None = None) -> Waiting:
    return Waiting(JobId(name), submitted, 1, told, was)


def test_half_of_a_batch_is_for_the_newest_and_half_for_those_who_wait_longest() -> None:
    jobs = [waiting(f"j{i}", float(i)) for i in range(10)]
    assert due(jobs, T, 300, 60, 4) == ["j9", "j8", "j0", "j1"]
    assert due(jobs[::-1], T, 300, 60, 4) == ["j9", "j8", "j0", "j1"]


def test_a_forecast_is_made_again_when_it_is_old_or_the_place_has_changed() -> None:
    young, old = waiting("young", 1, T - 100, 1), waiting("old", 2, T - 301, 1)
    moved, settling = waiting("moved", 3, T - 61, 4), waiting("settling", 4, T - 59, 4)
    restarted = waiting("restarted", 5, T - 100, None)
    assert due([young, old, moved, settling, restarted], T, 300, 60, 4) == ["old", "moved"]


def test_everybody_gets_a_turn_however_many_arrive() -> None:
    told: dict[str, float] = {}
    for step in range(30):
        jobs = [waiting(f"j{i:02d}", float(i), told.get(f"j{i:02d}"), 1) for i in range(2 * step + 20)]
        for name in due(jobs, 10.0 * step, 300, 60, 4):
            told[name] = 10.0 * step
    assert {f"j{i:02d}" for i in range(20)} <= told.keys()


# -- what is written -------------------------------------------------------------------------------------------


def queued(**status: Any) -> TrainingJob:
    return job(status={"phase": "Queued", "reason": "InsufficientCapacity", **status})


def said(of: TrainingJob, p50: float, p90: float, after_s: float = 0.0, **fields: Any) -> TrainingJob | None:
    """The job after a forecast, as the API server would keep it; None where nothing is written."""
    at = NOW + timedelta(seconds=after_s)
    order = Foretold(at, (p50, p90), (p50 / 2, p90 / 2), **fields)
    decision = reconcile(view(of, now=at), order)
    return None if decision.status is None else stored(of, decision.status)


def stored(of: TrainingJob, status: TrainingJobStatus) -> TrainingJob:
    return of.model_copy(update={"status": TrainingJobStatus.model_validate(status.to_wire())})


def status_of(found: TrainingJob | None) -> TrainingJobStatus:
    assert found is not None
    assert found.status is not None
    return found.status


def test_a_first_forecast_is_written_and_is_the_promise() -> None:
    status = status_of(said(queued(), 605, 3700, end_s=(905, 4300)))
    assert status.forecast is not None
    assert status.forecast.start_p50 == NOW + timedelta(seconds=600)
    assert status.forecast.start_p90 == NOW + timedelta(seconds=3720)
    assert status.forecast.end_p90 == NOW + timedelta(seconds=4320)
    assert status.promise is not None
    assert status.promise.start_p50 == status.forecast.start_p50
    assert (status.promise.simulated_p50_seconds, status.promise.attempt) == (302.5, 0)
    assert status.phase is TrainingPhase.QUEUED


def test_what_has_hardly_moved_is_not_written_again() -> None:
    first = said(queued(), 7200, 20_000)
    assert first is not None
    # Five minutes later everything is five minutes nearer: the same moments.
    assert said(first, 6900, 19_700, 300) is None
    assert said(first, 6900 + 600, 19_700 + 1900, 300) is None
    assert said(first, 6900 + 900, 19_700, 300) is not None


def test_a_later_forecast_leaves_the_promise_as_it_was() -> None:
    first = said(queued(), 600, 1200)
    assert first is not None
    second = status_of(said(first, 6000, 12_000, 300))
    assert second.promise == status_of(first).promise
    assert second.forecast != status_of(first).forecast


def test_the_start_ends_the_forecast_and_decides_the_promise() -> None:
    first = said(queued(), 600, 1200)
    assert first is not None
    status = reconcile(view(first, now=NOW + timedelta(seconds=700)), admit()).status
    assert status is not None
    assert status.forecast is None
    assert status.promise is not None
    assert status.promise.started_at == NOW + timedelta(seconds=700)


def test_a_promise_for_another_spec_says_nothing() -> None:
    first = said(queued(), 600, 1200)
    assert first is not None
    changed = first.model_copy(update={"metadata": first.metadata.model_copy(update={"generation": 2})})
    status = reconcile(view(changed), admit()).status
    assert status is not None
    assert status.promise is None
    again = status_of(said(changed, 600, 1200, 60))
    assert again.promise is not None
    assert again.promise.generation == 2


def test_a_suspended_job_has_no_forecast_and_its_promise_is_void() -> None:
    first = said(queued(), 600, 1200)
    assert first is not None
    paused = first.model_copy(update={"spec": first.spec.model_copy(update={"suspend": True})})
    status = reconcile(view(paused)).status
    assert status is not None
    assert (status.forecast, status.promise) == (None, None)


def test_a_second_wait_is_a_second_promise() -> None:
    old = {
        "madeAt": "2026-11-21T10:00:00Z", "startP50": "2026-11-21T10:10:00Z", "startP90": "2026-11-21T10:20:00Z",
        "simulatedP50Seconds": 600.0, "simulatedP90Seconds": 1200.0, "attempt": 0, "generation": 1,
        "startedAt": "2026-11-21T10:05:00Z",
    }  # fmt: skip
    status = status_of(said(queued(attempt=1, promise=old), 600, 1200))
    assert status.promise is not None
    assert (status.promise.attempt, status.promise.started_at) == (1, None)


def test_nothing_is_told_to_a_job_that_does_not_wait() -> None:
    started = reconcile(view(queued()), admit()).status
    assert started is not None
    paused = job(status={"phase": "Suspended"}, suspend=True)
    for each in (stored(queued(), started), paused, job(status={"phase": "Succeeded"})):
        found = reconcile(view(each), Foretold(NOW, (600, 1200), (600, 1200))).status
        assert found is None or (found.forecast, found.promise) == (None, None)


def test_a_forecast_that_holds_no_more_is_taken_back() -> None:
    first = said(queued(), 600, 1200)
    assert first is not None
    gone = foretold(first, Foretold(NOW), NOW)
    assert gone is not None
    assert gone.forecast is None
    assert foretold(queued(), Foretold(NOW), NOW) is None


@pytest.mark.parametrize(
    ("seconds", "rounded"), [(4, 0), (43, 40), (3650, 3660), (30_000, 30_000), (100_000, 100_800)]
)
def test_moments_are_rounded_as_far_as_anybody_cares(seconds: float, rounded: float) -> None:
    assert moment(NOW, seconds) - NOW == timedelta(seconds=rounded)


# -- what is remembered ----------------------------------------------------------------------------------------


def ended(name: str, seconds: float, at: datetime = NOW, phase: str = "Succeeded") -> TrainingJob:
    usage = {"acceleratorSeconds": seconds, "workUnits": seconds}
    return job(name, status={"phase": phase, "completionTime": at.isoformat(), "usage": usage, "attempt": 1})


def promise(made_s: float, p50_s: float, p90_s: float, started_s: float | None = None) -> dict[str, Any]:
    at = {
        "madeAt": made_s, "startP50": made_s + p50_s, "startP90": made_s + p90_s, "startedAt": started_s,
    }  # fmt: skip
    moments = {k: (NOW + timedelta(seconds=v)).isoformat() for k, v in at.items() if v is not None}
    return {**moments, "simulatedP50Seconds": p50_s, "simulatedP90Seconds": p90_s, "attempt": 0}


def test_ended_jobs_are_read_off_their_objects_in_the_order_in_which_they_ended() -> None:
    past = Past()
    late = ended("late", 60, NOW + timedelta(hours=1))
    past.rebuild([late, ended("early", 30), ended("never-ran", 0), queued()], tenant_of)
    assert [row.seconds for row in past.ended] == [30, 60]
    assert past.ended[0].tenant == "a"
    assert past.ended[0].accelerators_m == 1000
    past.observe(late, tenant_of)
    assert len(past.ended) == 2


def test_a_restarted_operator_knows_the_promises_that_stand_in_statuses() -> None:
    jobs = [
        job("kept", status={"phase": "Running", "promise": promise(-5000, 100, 900, -4950)}),
        job("late", status={"phase": "Running", "promise": promise(-5000, 100, 900, -1000)}),
        job("open", status={"phase": "Queued", "promise": promise(-50, 100, 900)}),
    ]
    live, restarted = Past(), Past()
    for each in jobs:
        live.observe(each.model_copy(update={"status": None}), tenant_of)
        live.observe(each, tenant_of)
    restarted.rebuild(jobs, tenant_of)
    assert restarted.outcomes == live.outcomes
    assert [outcome.waited_s for _, outcome in restarted.outcomes] == [50, 4000, None]


def test_a_promise_counts_when_its_moment_has_passed_and_not_when_it_is_kept_early() -> None:
    past = Past()
    past.observe(job("a", status={"promise": promise(-50, 100, 900, -40)}), tenant_of)
    assert [kept.promises for kept in past.kept(T)] == [0, 0]
    assert past.kept(T + 60)[0].share == 1.0
    past.observe(job("b", status={"promise": promise(-50, 100, 900)}), tenant_of)
    assert (past.kept(T + 60)[0].promises, past.kept(T + 60)[0].share) == (2, 0.5)
    assert past.kept(T + 60)[1].promises == 0


def test_a_withdrawn_job_takes_its_promise_with_it_and_a_started_one_leaves_it() -> None:
    past = Past()
    waits = job("w", status={"promise": promise(-50, 100, 900)})
    runs = job("r", status={"promise": promise(-50, 100, 900, -10), "usage": {"acceleratorSeconds": 10}})
    for each in (waits, runs):
        past.observe(each, tenant_of)
        past.forget(each, tenant_of, NOW)
    assert [key for key, _ in past.outcomes] == ["uid-r/0"]
    assert [row.seconds for row in past.ended] == [10]


def test_a_job_that_is_deleted_while_it_runs_ran_until_then() -> None:
    past = Past()
    past.forget(admitted(job("r"), last_usage_time=NOW - timedelta(seconds=60)), tenant_of, NOW)
    assert [row.seconds for row in past.ended] == [60]


def test_a_job_in_nobodys_namespace_says_nothing() -> None:
    past = Past()
    past.rebuild([ended("x", 60)], lambda namespace: "")
    assert past.ended == ()


# -- one batch after the other ---------------------------------------------------------------------------------


class OneWorld:
    """Waiting jobs, the last plan on them, and a past long enough."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        objects = [queued().model_copy(update={"metadata": job(name).metadata}) for name in names]
        jobs = tuple(
            Job(JobId(f"uid-{name}"), name, "team", "a", per_pod=Resources(8000), submitted_at_s=T + i)
            for i, name in enumerate(names)
        )
        full_up = full()
        snapshot = Snapshot(full_up.pools, full_up.nodes, full_up.tenants, (full_up.jobs[0], *jobs))
        self.past = Past()
        self.past.rebuild([ended(f"e{i}", 7200 + i) for i in range(5)], tenant_of)
        made, _ = plan(snapshot, Policy(solver=False), T)
        self.rounds = SimpleNamespace(last=(snapshot, made), foretold={}, wake=lambda: None)
        world = SimpleNamespace(jobs=SimpleNamespace(items=dict(enumerate(objects))))
        self.metrics = Metrics()
        self.found = Forecasts(cast(Any, world), cast(Any, self.rounds), self.past, SETTINGS, self.metrics)
        self.asked: list[tuple[str, ...]] = []
        self.slow: str | None = None
        monkeypatch.setattr(forecasts, "foretell", self._foretell)

    async def _foretell(self, asked: Question, limit_s: float) -> list[Answer]:
        self.asked.append(asked.jobs)
        reached = asked.jobs[: asked.jobs.index(JobId(self.slow))] if self.slow in asked.jobs else asked.jobs
        return [Answer(name, (60.0, 120.0), (60.0, 120.0)) for name in reached]

    def count(self, result: str) -> float:
        return float(self.metrics.forecasts.labels(result)._value.get())


async def test_what_was_not_reached_comes_before_what_was_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    world = OneWorld(monkeypatch, *(f"j{i}" for i in range(6)))
    world.slow = "uid-j4"
    await world.found.batch(NOW)
    assert world.asked[-1] == ("uid-j5", "uid-j4", "uid-j0", "uid-j1")
    assert list(world.rounds.foretold) == ["uid-j5"]
    assert (world.count("made"), world.count("late")) == (1, 3)
    await world.found.batch(NOW + timedelta(seconds=5))
    assert world.asked[-1] == ("uid-j3", "uid-j2", "uid-j0", "uid-j1")
    await world.found.batch(NOW + timedelta(seconds=10))
    assert len(world.asked) == 2  # nobody is due


async def test_nothing_is_foretold_before_enough_jobs_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    world = OneWorld(monkeypatch, "j")
    world.found._past = Past()
    await world.found.batch(NOW)
    draft = await world.found.of_draft(world.rounds.last[0], JobId("uid-j"))
    assert world.asked == []
    assert (draft.start_p50_seconds, draft.ended_jobs, draft.before_p50) == (None, 0, None)


async def test_a_draft_is_answered_with_how_promises_were_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = OneWorld(monkeypatch, "j")
    told = promise(-5000, 100, 900, -4950)
    world.past.observe(job("kept", status={"phase": "Running", "promise": told}), tenant_of)
    draft = await world.found.of_draft(world.rounds.last[0], JobId("uid-j"))
    assert (draft.start_p50_seconds, draft.start_p90_seconds, draft.ended_jobs) == (60, 120, 5)
    assert (draft.promises, draft.before_p50, draft.before_p90) == (1, 1.0, 1.0)
    world.found.count(T)
    assert world.metrics.promises.labels("0.9")._value.get() == 1


# -- the process -----------------------------------------------------------------------------------------------


def full() -> Snapshot:
    """One node of eight, taken for two hours now; two jobs wait for all of it."""
    place = Placement("H100", "H100", "resident", ("n",), Resources(8000))
    runs = Job(
        JobId("old"), "old", "team", "a", per_pod=Resources(8000), preemptible=False, run=Run(place, T - 7200)
    )
    waits = [
        Job(
            JobId(name), name, "team", "a", per_pod=Resources(8000), submitted_at_s=T, workload_class="c",
            remaining_work=1000.0,
        )
        for name in ("x", "y")
    ]  # fmt: skip
    cells = (Cell("c", "H100", 8000, "resident", speed=10.0, low=5.0, high=20.0),)
    return Snapshot(
        (Pool("H100", "H100"),), (Node("n", "H100", Resources(8000)),), (Tenant("a"),), (runs, *waits),
        PerformanceTable(cells=cells),
    )  # fmt: skip


def question(**changes: Any) -> Question:
    rows = tuple(Finished("a", 8000, 7250.0 + 50 * i) for i in range(70))
    fields: dict[str, Any] = {
        "snapshot": full(), "policy": Policy(solver=False), "now": T, "jobs": (JobId("x"), JobId("y")),
        "ended": rows, "outcomes": (), "computing_s": 20.0,
    }  # fmt: skip
    return Question(**{**fields, **changes})


async def test_the_process_answers_as_the_library_does() -> None:
    found = await foretell(question(), 60)
    assert found == list(child.answers(question()))
    first = found[0]
    assert first.start_s is not None
    assert first.end_s is not None
    assert 1000 < first.start_s[0] <= first.start_s[1] < 3500
    assert first.end_s == (first.start_s[0] + 100, first.start_s[1] + 200)


async def test_what_is_not_found_in_time_is_left_out() -> None:
    assert await foretell(question(), 0.01) == []
    assert len(await foretell(question(computing_s=0.0), 60)) <= 1


async def test_a_fault_in_the_process_is_said_and_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ForetellFailed, match="ended with code 1"):
        await foretell(question(jobs=(cast(JobId, 7),), snapshot=cast(Snapshot, None)), 60)
    assert "AttributeError" in capfd.readouterr().err


async def test_a_cancelled_question_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[asyncio.subprocess.Process] = []
    begin, running = asyncio.create_subprocess_exec, asyncio.Event()

    async def recorded(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        begun.append(await begin(*arguments, **options))
        running.set()
        return begun[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)
    asked = asyncio.ensure_future(foretell(question(jobs=(JobId("x"),) * 1000, computing_s=60.0), 60))
    await running.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert begun[0].returncode is not None


def test_what_starts_now_and_what_never_starts_has_no_date() -> None:
    small = Job(
        JobId("s"), "s", "team", "a", per_pod=Resources(8000), min_pods=2, max_pods=2, submitted_at_s=T
    )
    snapshot = full()
    snapshot = Snapshot(snapshot.pools, snapshot.nodes, snapshot.tenants, (small,), snapshot.table)
    (answer,) = child.answers(question(snapshot=snapshot, jobs=(JobId("s"),)))
    assert (answer.start_s, answer.end_s) == (None, None)


def test_the_length_of_a_job_of_which_nothing_is_known_is_not_guessed() -> None:
    snapshot = full()
    opaque = Job(JobId("o"), "o", "team", "a", per_pod=Resources(1000))
    assert left_s(snapshot, opaque) is None
    assert left_s(snapshot, snapshot.jobs[1]) == (100.0, 200.0)
