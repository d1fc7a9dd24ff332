"""The process that answers previews: one question after the other, with the snapshot that it holds."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import (
    NOW,
    SETTINGS,
    job,
    pool,
)
from tests.operator.previews.drafts import POLICY, TENANTS, asked, nodes_of

from busbar.kube.contracts.preview import PreviewAnswer
from busbar.operator.errors import Busy, PreviewFailed
from busbar.operator.forecasts.forecaster import Forecaster
from busbar.operator.forecasts.job_history import JobHistory
from busbar.operator.forecasts.worker import Question
from busbar.operator.previews import worker as preview_worker
from busbar.operator.previews.preview import (
    PreviewQuestion,
    answer,
)
from busbar.operator.previews.worker import HEAD, Previews, PreviewWorker, serve
from busbar.operator.scheduling.snapshot import DRAFT, ClusterObjects, build
from busbar.scheduler import (
    Finished,
    Snapshot,
)


def forecast(question: PreviewQuestion) -> Question:
    ended = tuple(Finished("others", 8000, NOW.timestamp() - 1000.0 * i) for i in range(20))
    return Question(Snapshot(), POLICY, question.now, (DRAFT,), ended, (), 5.0)


def test_the_child_answers_each_question_with_two_lines() -> None:
    starts = asked(job("draft"))
    waits = asked(job("draft"), full=True)
    questions = [starts, replace(waits, forecast=forecast(waits))]
    sent = b"".join(
        len(data).to_bytes(HEAD) + data for data in (pickle.dumps(question) for question in questions)
    )
    out = io.StringIO()
    serve(io.BytesIO(sent), out)
    first, nothing, second, told = out.getvalue().splitlines()
    assert PreviewAnswer.model_validate_json(first) == answer(starts)
    assert nothing == "null"
    assert PreviewAnswer.model_validate_json(second).waits
    assert json.loads(told)["job"] == DRAFT


@pytest.fixture
async def worker() -> AsyncIterator[PreviewWorker]:
    made = PreviewWorker(limit_s=120.0)  # a busy machine takes long to start a process
    yield made
    await made.close()


async def test_one_process_answers_one_question_after_the_other(worker: PreviewWorker) -> None:
    starts, waits = asked(job("draft")), asked(job("draft"), full=True)
    assert await worker.ask(starts, 5.0) == (answer(starts), None)
    child = worker._child
    assert child is not None
    assert (await worker.ask(waits, 5.0))[0] == answer(waits)
    assert (await worker.ask(replace(waits, admin=True), 5.0))[0] == answer(replace(waits, admin=True))
    assert worker._child is child
    child.kill()  # after any end of the process, the next request gets a new one
    await child.wait()
    assert (await worker.ask(starts, 5.0))[0].starts_now
    assert worker._child is not child


def runs(worker: PreviewWorker) -> bool:
    return worker._child is not None


async def test_a_snapshot_that_is_held_is_not_sent_with_the_question(worker: PreviewWorker) -> None:
    starts, waits = asked(job("draft")), asked(job("draft"), full=True)
    assert waits.base is not None
    await worker.hold(waits.base)
    assert not runs(worker)  # no request yet
    await worker.ask(starts, 5.0)
    await worker.hold(waits.base)
    assert worker._base is waits.base
    assert (await worker.ask(waits, 5.0))[0] == answer(waits)
    child = worker._child
    assert child is not None
    child.kill()
    await child.wait()
    assert (await worker.ask(waits, 5.0))[0] == answer(waits)  # it is sent again to the new process


async def test_after_a_preview_each_round_sends_its_snapshot_at_once(worker: PreviewWorker) -> None:
    nobody: Any = None
    forecasts = Forecaster(nobody, nobody, JobHistory(), SETTINGS, nobody, POLICY)
    seen = ClusterObjects(pools=(pool("cpu"),), nodes=nodes_of(), tenants=TENANTS)
    rounds = [build(seen, NOW)]
    previews = Previews(lambda: seen, lambda: rounds[-1], forecasts, POLICY, 5.0)
    previews.worker = worker
    previews.after_round()
    assert not runs(worker)
    assert (await previews.of(job("draft"), admin=False)).starts_now
    rounds.append(build(seen, NOW))
    previews.after_round()
    assert previews._sending is not None
    await previews._sending
    assert worker._base is rounds[-1]
    assert (await previews.of(job("draft"), admin=True)).nodes != ()
    await previews.close()


async def test_a_question_that_breaks_the_process_is_an_error_and_the_next_is_answered(
    worker: PreviewWorker,
) -> None:
    broken = replace(asked(job("draft")), base=None)
    with pytest.raises(PreviewFailed):
        await worker.ask(broken, 5.0)
    assert (await worker.ask(asked(job("draft")), 5.0))[0].starts_now


async def test_a_forecast_that_is_not_found_in_time_does_not_cost_the_answer(worker: PreviewWorker) -> None:
    waits = asked(job("draft"), full=True)
    found, told = await worker.ask(replace(waits, forecast=forecast(waits)), 0.0)
    assert (found, told) == (answer(waits), None)
    assert worker._child is None  # the result that it still computes is dropped


async def test_more_than_may_wait_are_told_to_come_back(
    worker: PreviewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview_worker, "MOST_WAITING", 0)
    with pytest.raises(Busy, match="try again"):
        await worker.ask(asked(job("draft")), 5.0)
    assert worker._child is None
