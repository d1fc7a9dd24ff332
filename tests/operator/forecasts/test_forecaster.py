"""Which waiting jobs get a forecast next; batches run one after the other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.operator.builders import NOW, SETTINGS, job, queued
from tests.operator.forecasts.parts import T, ended, full, promise, tenant_of

from busbar.operator.forecasts import forecaster
from busbar.operator.forecasts.forecaster import Forecaster, Waiting, due
from busbar.operator.forecasts.job_history import JobHistory
from busbar.operator.forecasts.worker import Answer, Question
from busbar.operator.metrics import Metrics
from busbar.scheduler import (
    Job,
    JobId,
    Policy,
    Resources,
    Snapshot,
    plan,
)


def waiting(name: str, submitted: float, made: float | None = None, was: int | None = None) -> Waiting:
    return Waiting(JobId(name), submitted, 1, made, was)


def test_half_of_a_batch_is_for_the_newest_and_half_for_those_who_wait_longest() -> None:
    jobs = [waiting(f"j{i}", float(i)) for i in range(10)]
    assert due(jobs, T, 300, 60, 4) == ["j9", "j8", "j0", "j1"]
    assert due(jobs[::-1], T, 300, 60, 4) == ["j9", "j8", "j0", "j1"]


def test_a_forecast_is_made_again_when_it_is_old_or_the_place_has_changed() -> None:
    young, old = waiting("young", 1, T - 100, 1), waiting("old", 2, T - 301, 1)
    moved, settling = waiting("moved", 3, T - 61, 4), waiting("settling", 4, T - 59, 4)
    restarted = waiting("restarted", 5, T - 100, None)
    assert due([young, old, moved, settling, restarted], T, 300, 60, 4) == ["old", "moved"]


def test_every_waiting_job_gets_a_forecast_however_many_arrive() -> None:
    made: dict[str, float] = {}
    for step in range(30):
        jobs = [waiting(f"j{i:02d}", float(i), made.get(f"j{i:02d}"), 1) for i in range(2 * step + 20)]
        for name in due(jobs, 10.0 * step, 300, 60, 4):
            made[name] = 10.0 * step
    assert {f"j{i:02d}" for i in range(20)} <= made.keys()


class OneWorld:
    """Waiting jobs, their last plan, and a long enough job history."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        objects = [queued().model_copy(update={"metadata": job(name).metadata}) for name in names]
        jobs = tuple(
            Job(JobId(f"uid-{name}"), name, "team", "a", per_pod=Resources(8000), submitted_at_s=T + i)
            for i, name in enumerate(names)
        )
        full_up = full()
        snapshot = Snapshot(full_up.pools, full_up.nodes, full_up.tenants, (full_up.jobs[0], *jobs))
        self.history = JobHistory()
        self.history.rebuild([ended(f"e{i}", 7200 + i) for i in range(5)], tenant_of)
        made, _ = plan(snapshot, Policy(solver=False), T)
        self.rounds = SimpleNamespace(last=(snapshot, made), forecasts={}, wake=lambda: None)
        world = SimpleNamespace(jobs=SimpleNamespace(items=dict(enumerate(objects))))
        self.metrics = Metrics()
        self.found = Forecaster(
            cast(Any, world), cast(Any, self.rounds), self.history, SETTINGS, self.metrics
        )
        self.asked: list[tuple[str, ...]] = []
        self.slow: str | None = None
        monkeypatch.setattr(forecaster, "compute", self._compute)

    async def _compute(self, asked: Question, limit_s: float) -> list[Answer]:
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
    assert list(world.rounds.forecasts) == ["uid-j5"]
    assert (world.count("made"), world.count("late")) == (1, 3)
    await world.found.batch(NOW + timedelta(seconds=5))
    assert world.asked[-1] == ("uid-j3", "uid-j2", "uid-j0", "uid-j1")
    await world.found.batch(NOW + timedelta(seconds=10))
    assert len(world.asked) == 2  # no job is due


async def test_nothing_is_forecast_before_enough_jobs_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    world = OneWorld(monkeypatch, "j")
    world.found._history = JobHistory()
    await world.found.batch(NOW)
    assert world.found.question_of(JobId("uid-j"), NOW) is None
    assert world.asked == []


async def test_a_draft_is_asked_about_and_how_promises_were_kept_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = OneWorld(monkeypatch, "j")
    kept = promise(-5000, 100, 900, -4950)
    world.history.observe(job("kept", status={"phase": "Running", "promise": kept}), tenant_of)
    question = world.found.question_of(JobId("uid-j"), NOW)
    assert question is not None
    assert (question.jobs, len(question.ended), question.policy.solver) == (("uid-j",), 5, False)
    assert [(found.promises, found.share) for found in world.found.kept(T)] == [(1, 1.0), (1, 1.0)]
    world.found.count(T)
    assert world.metrics.promises.labels("0.9")._value.get() == 1


async def test_no_forecast_is_made_in_the_first_minute_of_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    world = OneWorld(monkeypatch, *(f"j{i}" for i in range(25)))
    for seconds, asked in ((30.0, 0), (59.0, 0), (61.0, 1)):
        await world.found.batch(datetime.fromtimestamp(T + seconds, UTC))
        assert len(world.asked) == asked
