"""What is said of a TrainingJob's deadline: in the status, in words, as events, and what the next plan reads of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, ended, job, running, view

from busbar.kube.types import TrainingJob, TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_status import DeadlineAnswer, TrainingJobStatus
from busbar.operator.decisions import Deadline, Wait
from busbar.operator.training.claim import waiting
from busbar.operator.training.deadline import news, promised, sentence
from busbar.operator.training.reconcile import reconcile
from busbar.scheduler import DeadlineAnswer as Answer
from busbar.scheduler import DeadlineShare, JobId

NOW_S = NOW.timestamp()
DUE = NOW + timedelta(hours=2)
KEEPS = DeadlineShare(JobId("uid-job"), Answer.KEEPS, "H100", 4000, 10.0, ends_s=NOW_S + 3600, slack_s=3600.0)
LATE = replace(KEEPS, answer=Answer.LATE, ends_s=NOW_S + 9000, slack_s=-1800.0)
ALONE = replace(KEEPS, answer=Answer.OUT_OF_REACH, accelerators_m=0, ends_s=NOW_S + 9000, slack_s=-1800.0)
CROWDED = DeadlineShare(JobId("uid-job"), Answer.CROWDED, breaks=("team/a", "team/b"))


def queued(**spec: Any) -> TrainingJob:
    made: dict[str, Any] = {"deadline": DUE.isoformat(), **spec}
    return job(status={"phase": "Queued", "reason": "Waiting"}, **made)


def told(of: TrainingJob, share: DeadlineShare | None, after_s: float = 0.0) -> TrainingJob | None:
    """The job as the API server keeps it after a round's word; None where nothing is written."""
    update = reconcile(view(of, now=NOW + timedelta(seconds=after_s)), deadline=Deadline(share))
    if update.status is None:
        return None
    return of.model_copy(update={"status": TrainingJobStatus.model_validate(update.status.to_wire())})


def said(of: TrainingJob | None) -> Any:
    assert of is not None
    assert of.status is not None
    return of.status.deadline


def test_the_next_plan_reads_the_deadline_and_the_promise() -> None:
    before = waiting(queued(), "team", NOW)
    assert (before.deadline_s, before.promised) == (DUE.timestamp(), False)
    after = told(queued(), KEEPS)
    assert after is not None
    assert waiting(after, "team", NOW).promised
    assert waiting(job(), "team", NOW).deadline_s is None


@pytest.mark.parametrize(
    ("share", "promise"), [(KEEPS, True), (LATE, True), (ALONE, False), (CROWDED, False), (None, False)]
)
def test_only_a_promise_is_read_as_one_and_only_for_its_own_deadline(
    share: DeadlineShare | None, promise: bool
) -> None:
    after = told(queued(), share)
    assert after is not None
    assert promised(after) is promise
    later = DUE + timedelta(hours=1)
    moved = after.model_copy(update={"spec": after.spec.model_copy(update={"deadline": later})})
    assert not promised(moved)
    assert said(told(moved, KEEPS)).at == later


@pytest.mark.parametrize(
    ("share", "writes"),
    [
        (KEEPS, False),
        (replace(KEEPS, ends_s=NOW_S + 3700, slack_s=3500.0), False),
        (replace(KEEPS, ends_s=NOW_S + 4200, slack_s=3000.0), True),
        (replace(KEEPS, accelerators_m=8000), True),
        (LATE, True),
        (None, True),
    ],
)
def test_only_what_people_see_is_written_again(share: DeadlineShare | None, writes: bool) -> None:
    first = told(queued(), KEEPS)
    assert first is not None
    assert (told(first, share, 5.0) is not None) is writes


def test_a_deadline_that_is_taken_away_is_spoken_of_no_more() -> None:
    first = told(queued(), KEEPS)
    assert first is not None
    without = first.model_copy(update={"spec": first.spec.model_copy(update={"deadline": None})})
    update = reconcile(view(without))
    assert update.status is not None
    assert update.status.deadline is None


def test_a_suspended_job_is_promised_nothing() -> None:
    first = told(queued(), KEEPS)
    assert first is not None
    stopped = first.model_copy(update={"spec": first.spec.model_copy(update={"suspend": True})})
    update = reconcile(view(stopped))
    assert update.status is not None
    assert update.status.deadline is not None
    assert update.status.deadline.answer is DeadlineAnswer.UNKNOWN
    stored = stopped.model_copy(update={"status": update.status})
    assert not promised(stored)
    again = reconcile(view(stored))
    assert again.status is None or again.status == update.status


def test_it_goes_with_the_reason_to_wait_and_to_a_job_that_runs() -> None:
    update = reconcile(view(queued()), Wait("NoRoom", "There is no room."), deadline=Deadline(KEEPS))
    assert update.status is not None
    assert (update.status.reason, update.status.deadline is not None) == ("NoRoom", True)
    admission = {
        "id": "id-1", "pool": "cpu", "accelerator": "cpu", "pods": 1, "nodes": ["node-0"],
        "admittedAt": "2026-11-21T11:30:00Z",
    }  # fmt: skip
    runs = job(deadline=DUE.isoformat(), status={"phase": "Running", "attempt": 1, "admission": admission})
    assert said(told_running(runs)).answer is DeadlineAnswer.LATE


def told_running(of: TrainingJob) -> TrainingJob:
    update = reconcile(view(of, running(0)), deadline=Deadline(LATE))
    assert update.status is not None
    return of.model_copy(update={"status": update.status})


@pytest.mark.parametrize(
    ("end", "code", "message", "met"),
    [
        (NOW + timedelta(hours=2), 0, "Kept: it ended 2h0m before its deadline.", True),
        (NOW - timedelta(minutes=5), 0, "Missed: it ended 5m0s late.", False),
        (NOW + timedelta(hours=2), 1, "Missed: the job failed.", False),
    ],
)
def test_at_its_end_a_job_kept_its_deadline_or_missed_it(
    end: Any, code: int, message: str, met: bool
) -> None:
    admission = {
        "id": "id-1", "pool": "cpu", "accelerator": "cpu", "pods": 1, "nodes": ["node-0"],
        "admittedAt": "2026-11-21T11:30:00Z",
    }  # fmt: skip
    status = {"phase": "Running", "attempt": 1, "admission": admission}
    runs = job(deadline=end.isoformat(), retryLimit=0, status=status)
    update = reconcile(view(runs, ended(0, code)), deadline=Deadline(KEEPS))
    assert update.status is not None
    assert update.status.phase in (TrainingPhase.SUCCEEDED, TrainingPhase.FAILED)
    found = update.status.deadline
    assert found is not None
    assert (found.met, found.message) == (met, message)
    event = news(runs.status, update.status)
    assert event == ((Reason.DEADLINE_KEPT if met else Reason.DEADLINE_MISSED), message)
    assert news(update.status, update.status) is None


def test_other_answers_are_events_and_moved_ends_are_not() -> None:
    first, second = told(queued(), KEEPS), told(queued(), LATE)
    assert first is not None
    assert second is not None
    assert first.status is not None
    assert second.status is not None
    found = news(queued().status, first.status)
    assert found is not None
    assert found[0] is Reason.DEADLINE_PROMISED
    late = news(first.status, second.status)
    assert late is not None
    assert late[0] is Reason.DEADLINE_LATE
    moved = told(first, replace(KEEPS, ends_s=NOW_S + 6000, slack_s=1200.0))
    assert moved is not None
    assert moved.status is not None
    assert news(first.status, moved.status) is None


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (KEEPS, "Promised: it needs 4 H100 from now on; it would end at 13:00 UTC, 1h0m before the deadline."),
        (replace(KEEPS, accelerators_m=0), "Promised: earlier deadlines come first; it would end"),
        (LATE, "cannot be kept as things are: it needs 4 H100 from now on; it would end at 14:30 UTC, 30m0s late."),
        (ALONE, "Not promised: out of reach, even alone in the cluster it would end at 14:30 UTC, 30m0s late."),
        (DeadlineShare(JobId("x"), Answer.OUT_OF_REACH), "Not promised: out of reach, nothing here runs it."),
        (CROWDED, "Not promised: it would break the promised deadlines of team/a, team/b."),
        (replace(CROWDED, breaks=()), "Not promised: what the tenant is entitled to is promised to other jobs"),
        (replace(CROWDED, breaks=tuple("abcdefg")), "of a, b, c, d, e and 2 more."),
        (DeadlineShare(JobId("x"), Answer.NOT_TRIED), "Not promised yet: many deadlines wait"),
        (None, "Nothing is promised: the job is in no plan"),
    ],
)  # fmt: skip
def test_what_is_said_in_words(share: DeadlineShare | None, text: str) -> None:
    assert text in sentence(share, DUE)


def test_every_answer_of_the_scheduler_has_a_word_here() -> None:
    assert {answer.value for answer in Answer} | {"Unknown"} == {answer.value for answer in DeadlineAnswer}
