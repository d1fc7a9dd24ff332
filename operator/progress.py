"""What a training pod says about itself, taken into the job's status.

A Reading is one answer of ``GET /status`` or the termination message of a pod that has ended: the same JSON.
It is a tenant's word: it fills progress, checkpoint and evaluation of that tenant's own job, after validation and
within bounds. Of all that only the speed counts for others, as far as it can be believed (speeds.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from busbar.kube.contracts.workload import TrainingState, TrainingStatus
from busbar.kube.types.training_job import (
    CheckpointStatus,
    EvaluationResult,
    Fingerprint,
    LostWork,
    Progress,
    TrainingJobStatus,
)
from busbar.operator.status import human_duration


@dataclass(frozen=True)
class Reading:
    """One validated training status, and the raw fingerprint beside it."""

    status: TrainingStatus
    fingerprint: Fingerprint | None = None


def parse_reading(raw: Any) -> Reading | None:
    """A reading from parsed JSON; None where it is not a training status."""
    if not isinstance(raw, dict):
        return None
    try:
        status = TrainingStatus.model_validate(raw)
        mark = raw.get("fingerprint")
        fingerprint = Fingerprint.model_validate(mark) if isinstance(mark, dict) else None
    except ValidationError:
        return None
    return Reading(status, fingerprint)


def from_termination_message(text: str) -> Reading | None:
    """The reading that a pod left behind; None where the message is something else, such as a log's tail."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return parse_reading(json.loads(text))
    except ValueError:
        return None


def merge_reading(status: TrainingJobStatus, reading: Reading, now: datetime) -> TrainingJobStatus:
    """The job's status after taking the reading in."""
    said = reading.status
    fields: dict[str, Any] = {}
    if said.total_steps or said.step:
        fields["progress"] = _progress(said, now)
    if said.checkpoint is not None:
        fields["checkpoint"] = CheckpointStatus(
            step=max(0, said.checkpoint.step), saved_at=said.checkpoint.saved_at
        )
    if said.evaluation is not None:
        fields["evaluation"] = EvaluationResult.model_validate(said.evaluation.model_dump())
    if reading.fingerprint is not None:
        fields["fingerprint"] = reading.fingerprint
    lost = _lost_work(status, said)
    if lost is not None:
        fields["lost_work"] = lost
    return status.model_copy(update=fields)


def _progress(said: TrainingStatus, now: datetime) -> Progress:
    done = said.phase in (TrainingState.DONE, TrainingState.EVALUATING)
    eta = said.eta_seconds if not done else None
    percent = min(100.0, 100.0 * said.step / said.total_steps) if said.total_steps > 0 else None
    return Progress(
        step=max(0, said.step),
        total_steps=max(0, said.total_steps),
        loss=_finite(said.loss, 4),
        tokens_per_second=_finite(said.tokens_per_second, 1),
        tokens=max(0, said.tokens),
        eta_seconds=_finite(eta, 0),
        eta=human_duration(eta) if eta is not None and _finite(eta, 0) is not None else None,
        eta_p50=_moment(now, eta, 1.0),
        eta_p90=_moment(now, eta, 1.2),
        percent=round(percent, 1) if percent is not None else None,
    )


def _lost_work(status: TrainingJobStatus, said: TrainingStatus) -> LostWork | None:
    """Each attempt's loss is added once: the attempt that was counted last stands beside the sum."""
    attempt = status.attempt or 0
    old = status.lost_work or LostWork()
    if said.resumed_from_step is None or old.attempt == attempt:
        return None
    before = status.progress.step if status.progress is not None else 0
    steps = max(0, said.lost_steps, before - said.resumed_from_step)
    return LostWork(
        steps=old.steps + steps,
        seconds=round(old.seconds + steps * _seconds_per_step(status), 1),
        attempt=attempt,
    )


def _seconds_per_step(status: TrainingJobStatus) -> float:
    """From the progress of the attempt that was lost."""
    progress = status.progress
    if progress is None or not progress.tokens_per_second or not progress.step:
        return 0.0
    return progress.tokens / progress.step / progress.tokens_per_second


def _finite(value: float | None, digits: int) -> float | None:
    """Rounded; None for what JSON or a schema cannot hold."""
    if value is None or value != value or abs(value) > 1e15:
        return None
    return round(value, digits)


def _moment(now: datetime, eta_s: float | None, factor: float) -> datetime | None:
    if eta_s is None or not 0 <= eta_s < 10 * 365 * 86400:
        return None
    # To ten seconds: a forecast that changes in every answer would be a write in every answer.
    seconds = round((now + timedelta(seconds=eta_s * factor)).timestamp() / 10) * 10
    return datetime.fromtimestamp(seconds, tz=now.tzinfo)
