"""The process that computes forecasts."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.operator.forecasts.parts import T, full

from busbar.operator.errors import ForecastFailed
from busbar.operator.forecasts import worker as child
from busbar.operator.forecasts.worker import Question, compute, left_s
from busbar.scheduler import (
    Finished,
    Job,
    JobId,
    Policy,
    Resources,
    Snapshot,
)


def question(**changes: Any) -> Question:
    rows = tuple(Finished("a", 8000, 7250.0 + 50 * i) for i in range(70))
    fields: dict[str, Any] = {
        "snapshot": full(), "policy": Policy(solver=False), "now": T, "jobs": (JobId("x"), JobId("y")),
        "ended": rows, "outcomes": (), "computing_s": 20.0,
    }  # fmt: skip
    return Question(**{**fields, **changes})


async def test_the_process_answers_as_the_library_does() -> None:
    found = await compute(question(), 60)
    assert found == list(child.answers(question()))
    first = found[0]
    assert first.start_s is not None
    assert first.end_s is not None
    assert 1000 < first.start_s[0] <= first.start_s[1] < 3500
    assert first.end_s == (first.start_s[0] + 100, first.start_s[1] + 200)


async def test_what_is_not_found_in_time_is_left_out() -> None:
    assert await compute(question(), 0.01) == []
    assert len(await compute(question(computing_s=0.0), 60)) <= 1


async def test_a_fault_in_the_process_is_said_and_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ForecastFailed, match="ended with code 1"):
        await compute(question(jobs=(cast(JobId, 7),), snapshot=cast(Snapshot, None)), 60)
    assert "AttributeError" in capfd.readouterr().err


async def test_a_cancelled_question_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[asyncio.subprocess.Process] = []
    begin, running = asyncio.create_subprocess_exec, asyncio.Event()

    async def recorded(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        begun.append(await begin(*arguments, **options))
        running.set()
        return begun[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)
    asked = asyncio.ensure_future(compute(question(jobs=(JobId("x"),) * 1000, computing_s=60.0), 60))
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
