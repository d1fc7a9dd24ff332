"""Writes a forecast into a TrainingJob's status: rounded moments and a promise, only when a moment has moved.

A forecast is computed again every few minutes and differs a little each time. It is written only when a moment
has moved by a tenth of the time that is left, so that a queue that does not change causes no writes.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from busbar.kube.types import TrainingJob
from busbar.kube.types.forecast import Promise, StartForecast
from busbar.kube.types.training_status import TrainingJobStatus
from busbar.operator.decisions import Forecast

GRIDS_S = ((600, 10), (7200, 60), (86400, 600))
"""(nearer than this, rounded to this much), and to an hour beyond: in a wait of days seconds do not matter."""
MOVED = 0.1
MOVED_S = 30.0
"""Changes smaller than this are not written."""


def with_forecast(job: TrainingJob, decision: Forecast, now: datetime) -> TrainingJobStatus | None:
    """The status of a waiting job with this forecast; None where the status need not change."""
    status = job.status or TrainingJobStatus()
    if decision.start_s is None:
        return status.model_copy(update={"forecast": None}) if status.forecast is not None else None
    made = decision.made_at
    forecast = StartForecast(
        made_at=made,
        start_p50=moment(made, decision.start_s[0]),
        start_p90=moment(made, decision.start_s[1]),
        end_p50=moment(made, decision.end_s[0]) if decision.end_s is not None else None,
        end_p90=moment(made, decision.end_s[1]) if decision.end_s is not None else None,
    )
    promise = promised(status.promise, job, forecast, decision)
    if (
        promise is status.promise
        and status.forecast is not None
        and not moved(status.forecast, forecast, now)
    ):
        return None
    return status.model_copy(update={"forecast": forecast, "promise": promise})


def promised(
    old: Promise | None, job: TrainingJob, forecast: StartForecast, decision: Forecast
) -> Promise | None:
    """The promise of this wait: the one in the status, or this first forecast."""
    attempt = (job.status.attempt or 0) if job.status is not None else 0
    if old is not None and old.started_at is None and _same_wait(old, job):
        return old
    if decision.raw_s is None:
        return old
    return Promise(
        made_at=forecast.made_at,
        start_p50=forecast.start_p50,
        start_p90=forecast.start_p90,
        simulated_p50_seconds=round(decision.raw_s[0], 1),
        simulated_p90_seconds=round(decision.raw_s[1], 1),
        generation=job.metadata.generation,
        attempt=attempt,
    )


def started(job: TrainingJob, now: datetime) -> dict[str, object]:
    """The fields of an admitted job's status: the forecast is removed, and the promise gets the time of the start.

    A promise that was made for another spec (a priority, a size) cannot be compared, and is removed.
    """
    promise = job.status.promise if job.status is not None else None
    if promise is not None and promise.started_at is None:
        kept = promise.model_copy(update={"started_at": now}) if _same_wait(promise, job) else None
        return {"forecast": None, "promise": kept}
    return {"forecast": None}


def withdrawn(status: TrainingJobStatus) -> TrainingJobStatus:
    """The status of a job that no longer waits and did not start: its forecast and promise are removed."""
    promise = status.promise
    if status.forecast is None and (promise is None or promise.started_at is not None):
        return status
    kept = promise if promise is not None and promise.started_at is not None else None
    return status.model_copy(update={"forecast": None, "promise": kept})


def moment(made: datetime, seconds: float) -> datetime:
    """The moment that many seconds later, rounded to the grid for that distance."""
    grid = next((grid for nearer, grid in GRIDS_S if seconds < nearer), 3600)
    at = round((made.timestamp() + seconds) / grid) * grid
    return datetime.fromtimestamp(max(at, made.timestamp()), tz=made.tzinfo)


def moved(old: StartForecast, new: StartForecast, now: datetime) -> bool:
    """Whether the new forecast differs enough to be written."""
    return any(
        _differs(getattr(old, name), getattr(new, name), now)
        for name in ("start_p50", "start_p90", "end_p50", "end_p90")
    )


def _differs(old: datetime | None, new: datetime | None, now: datetime) -> bool:
    if old is None or new is None:
        return old is not new
    left_s = max(0.0, (new - now) / timedelta(seconds=1))
    return abs((new - old) / timedelta(seconds=1)) > max(MOVED_S, MOVED * left_s)


def _same_wait(promise: Promise, job: TrainingJob) -> bool:
    attempt = (job.status.attempt or 0) if job.status is not None else 0
    return (promise.attempt, promise.generation) == (attempt, job.metadata.generation)
