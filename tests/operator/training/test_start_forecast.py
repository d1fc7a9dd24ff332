"""The fields that a forecast writes into a TrainingJob's status."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, admit, job, queued, view

from busbar.kube.types import TrainingJob, TrainingPhase
from busbar.kube.types.training_status import TrainingJobStatus
from busbar.operator.decisions import Forecast, Wait
from busbar.operator.training.reconcile import reconcile
from busbar.operator.training.start_forecast import moment, with_forecast


def said(of: TrainingJob, p50: float, p90: float, after_s: float = 0.0, **fields: Any) -> TrainingJob | None:
    """The job after a forecast, as the API server would keep it; None where nothing is written."""
    at = NOW + timedelta(seconds=after_s)
    decision = Forecast(at, (p50, p90), (p50 / 2, p90 / 2), **fields)
    update = reconcile(view(of, now=at), None, decision)
    return None if update.status is None else stored(of, update.status)


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
    # Five minutes later every delay is five minutes shorter, so the times are the same.
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
        found = reconcile(view(each), None, Forecast(NOW, (600, 1200), (600, 1200))).status
        assert found is None or (found.forecast, found.promise) == (None, None)


def test_a_forecast_that_holds_no_more_is_taken_back() -> None:
    first = said(queued(), 600, 1200)
    assert first is not None
    gone = with_forecast(first, Forecast(NOW), NOW)
    assert gone is not None
    assert gone.forecast is None
    assert with_forecast(queued(), Forecast(NOW), NOW) is None


@pytest.mark.parametrize(
    ("seconds", "rounded"), [(4, 0), (43, 40), (3650, 3660), (30_000, 30_000), (100_000, 100_800)]
)
def test_moments_are_rounded_as_far_as_anybody_cares(seconds: float, rounded: float) -> None:
    assert moment(NOW, seconds) - NOW == timedelta(seconds=rounded)


def test_a_reason_and_a_forecast_are_one_status() -> None:
    forecast = Forecast(NOW, (605, 3700), (300, 1850))
    status = reconcile(view(queued()), Wait("FairShare", "Others first."), forecast).status
    assert status is not None
    assert (status.reason, status.message) == ("FairShare", "Others first.")
    assert status.forecast is not None
