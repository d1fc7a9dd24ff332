"""What a training pod says about itself, taken into the job's status.

A Reading is one answer of ``GET /status`` or the termination message of a pod that has ended: the same JSON.
It is a tenant's word: it fills progress, checkpoint and evaluation of that tenant's own job, after validation and
within bounds. Of all that only the speed counts for others, as far as it can be believed (speeds.py). A status that
the API server would refuse could never be written, and a job whose status cannot be written never ends: so numbers
are cut to what the schema holds, never passed on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from busbar.kube.contracts.workload import EvaluationReport, TrainingState, TrainingStatus
from busbar.kube.types.training_job import (
    CheckpointStatus,
    EvaluationResult,
    Fingerprint,
    LostWork,
    Progress,
    TrainingJobStatus,
)
from busbar.operator.status import human_duration

LARGEST = 2**53  # JSON numbers are exact up to here


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
    except (ValueError, RecursionError):
        return None


def merge_reading(
    status: TrainingJobStatus, reading: Reading, now: datetime, slack: float | None = None
) -> TrainingJobStatus:
    """The job's status after taking the reading in.

    Args:
        slack: how many times as long the rest takes at the lowest speed that is believed of the job's place; None:
            nothing is believed of it.
    """
    said = reading.status
    fields: dict[str, Any] = {}
    if said.total_steps or said.step:
        fields["progress"] = _progress(said, now, slack)
    if said.checkpoint is not None:
        fields["checkpoint"] = CheckpointStatus(
            step=_count(said.checkpoint.step), saved_at=_past(said.checkpoint.saved_at, now)
        )
    if said.evaluation is not None:
        fields["evaluation"] = _evaluation(said.evaluation)
    if reading.fingerprint is not None:
        fields["fingerprint"] = reading.fingerprint
    lost = _lost_work(status, said)
    if lost is not None:
        fields["lost_work"] = lost
    return status.model_copy(update=fields)


def _progress(said: TrainingStatus, now: datetime, slack: float | None) -> Progress:
    done = said.phase in (TrainingState.DONE, TrainingState.EVALUATING)
    eta = _amount(said.eta_seconds, 0) if not done else None
    step, total = _count(said.step), _count(said.total_steps)
    percent = min(100.0, 100.0 * step / total) if total > 0 else None
    return Progress(
        step=step,
        total_steps=total,
        loss=_finite(said.loss, 4),
        tokens_per_second=_amount(said.tokens_per_second, 1),
        tokens=_count(said.tokens),
        eta_seconds=eta,
        eta=human_duration(eta) if eta is not None else None,
        eta_p50=_moment(now, eta, 1.0),
        eta_p90=_moment(now, eta, slack) if slack is not None else None,
        percent=round(percent, 1) if percent is not None else None,
    )


def _lost_work(status: TrainingJobStatus, said: TrainingStatus) -> LostWork | None:
    """Each attempt's loss is added once: the attempt that was counted last stands beside the sum."""
    attempt = status.attempt or 0
    old = status.lost_work or LostWork()
    if said.resumed_from_step is None or old.attempt == attempt:
        return None
    before = status.progress.step if status.progress is not None else 0
    steps = _count(max(said.lost_steps, before - said.resumed_from_step))
    return LostWork(
        steps=_count(old.steps + steps),
        seconds=round(old.seconds + steps * _seconds_per_step(status), 1),
        attempt=attempt,
    )


def _seconds_per_step(status: TrainingJobStatus) -> float:
    """From the progress of the attempt that was lost."""
    progress = status.progress
    if progress is None or not progress.tokens_per_second or not progress.step:
        return 0.0
    return progress.tokens / progress.step / progress.tokens_per_second


def _evaluation(said: EvaluationReport) -> EvaluationResult:
    return EvaluationResult(
        bits_per_byte=_amount(said.bits_per_byte, 6),
        bigram_bits_per_byte=_amount(said.bigram_bits_per_byte, 6),
        ngram_bits_per_byte=_amount(said.ngram_bits_per_byte, 6),
        held_out_bytes=_count(said.held_out_bytes),
    )


def _count(value: int) -> int:
    """A number of something, as large as every reader of JSON can hold."""
    return min(max(0, value), LARGEST)


def _amount(value: float | None, digits: int) -> float | None:
    """Like ``_finite``, and None for what is below zero."""
    return _finite(value, digits) if value is not None and value >= 0 else None


def _past(moment: datetime, now: datetime) -> datetime:
    """A moment that has been, with its time zone; the pod's clock may be wrong or lie."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return min(aware, now)


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
