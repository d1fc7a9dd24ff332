"""Merges what a training pod reports into its job's status.

A reading is one answer of ``GET /status`` or the termination message of a pod that has ended: the same JSON.
It comes from a tenant's container: after validation and within bounds it fills progress, checkpoint and evaluation
of that tenant's own job. Only the speed affects others, as far as it is plausible (profiles/speeds.py). A status
that the API server refuses cannot be written, and a job whose status cannot be written never ends: so numbers are
limited to what the schema accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from busbar.kube.contracts.report import TrainingReport
from busbar.kube.contracts.workload import (
    AdapterProgressReport,
    EvaluationReport,
    MemoryReport,
    SlowLinkReport,
    StepPhaseSeconds,
    TimingReport,
    TrainingState,
    TrainingStatus,
    WorkerReport,
)
from busbar.kube.types.lost_work import LostWork
from busbar.kube.types.training_sections import MOST_ADAPTERS
from busbar.kube.types.training_status import (
    MOST_OWNERS,
    MOST_WORKERS,
    AdapterProgress,
    CheckpointStatus,
    EvaluationResult,
    Fingerprint,
    LinkDirection,
    MemoryPlace,
    MemoryUse,
    PlannedBytes,
    Progress,
    SlowLink,
    StepPhases,
    StepSeconds,
    TrainedModel,
    TrainingJobStatus,
    Worker,
)
from busbar.operator.accounting.lost_work import settled
from busbar.operator.write.status import human_duration

LARGEST = 2**53  # JSON numbers are exact up to here


def merge_reading(
    status: TrainingJobStatus, reading: TrainingStatus, now: datetime, slack: float | None = None
) -> TrainingJobStatus:
    """The job's status after taking the reading in.

    Args:
        slack: the mean over the lower bound of the speed that the profile holds for the job's placement, as a factor
            on the time left; None: the profile has no speed for it.
    """
    fields: dict[str, Any] = {}
    if reading.total_steps or reading.step:
        fields["progress"] = _progress(reading, now, slack)
    if reading.model is not None:
        fields["model"] = TrainedModel(
            parameters=_count(reading.model.parameters),
            trainable_parameters=_count(reading.model.trainable_parameters),
            adapter=reading.model.adapter,
        )
    begins = reading.report is None and reading.tokens_per_second is None
    if reading.report is not None or begins:
        # At the begin of an attempt the old numbers are of elsewhere; the termination message has none of the owners.
        owners = status.memory.owners if status.memory is not None and not begins else None
        fields["memory"] = _memory(reading.report, reading.memory, owners)
    if reading.checkpoint is not None:
        fields["checkpoint"] = CheckpointStatus(
            step=_count(reading.checkpoint.step),
            saved_at=_past(reading.checkpoint.saved_at, now),
            mib_per_second=_rate(reading.checkpoint.bytes_per_second),
            usual_mib_per_second=_rate(reading.checkpoint.usual_bytes_per_second),
            slow_in_a_row=_count(reading.checkpoint.slow_in_a_row) or None,
        )
    if reading.evaluation is not None:
        fields["evaluation"] = _evaluation(reading.evaluation)
    if reading.fingerprint is not None:
        fields["fingerprint"] = Fingerprint(
            losses=reading.fingerprint.losses, weights=reading.fingerprint.weights
        )
    if reading.adapters:
        by_name = {
            each.name: each for each in reading.adapters if each.name
        }  # the schema refuses a name twice
        fields["adapters"] = [_adapter(each) for each in list(by_name.values())[:MOST_ADAPTERS]] or None
    lost = _lost_work(status, reading)
    if lost is not None:
        fields["lost_work"] = lost
    return status.model_copy(update=fields)


def _adapter(reading: AdapterProgressReport) -> AdapterProgress:
    scores, digests = reading.evaluation, reading.fingerprint
    return AdapterProgress(
        name=reading.name,
        step=_count(reading.step),
        steps=_count(reading.steps),
        loss=_finite(reading.loss, 4),
        finished=reading.finished,
        bits_per_byte=None if scores is None else _amount(scores.bits_per_byte, 6),
        fingerprint=None if digests is None else Fingerprint(losses=digests.losses, weights=digests.weights),
    )


def _progress(reading: TrainingStatus, now: datetime, slack: float | None) -> Progress:
    done = reading.phase in (TrainingState.DONE, TrainingState.EVALUATING)
    eta = _amount(reading.eta_seconds, 0) if not done else None
    step, total = _count(reading.step), _count(reading.total_steps)
    percent = min(100.0, 100.0 * step / total) if total > 0 else None
    return Progress(
        step=step,
        total_steps=total,
        loss=_finite(reading.loss, 4),
        tokens_per_second=_amount(reading.tokens_per_second, 1),
        model_tflops=_amount(reading.model_tflops, 4),
        step_seconds=_step_seconds(reading.timing),
        phases=_phases(reading.phase_seconds),
        workers=_workers(reading.workers),
        slow_link=_slow_link(reading.link),
        tokens=_count(reading.tokens),
        bad_rows=_count(reading.bad_rows),
        activations=reading.activations,
        eta_seconds=eta,
        eta=human_duration(eta) if eta is not None else None,
        eta_p50=_moment(now, eta, 1.0),
        eta_p90=_moment(now, eta, slack) if slack is not None else None,
        percent=round(percent, 1) if percent is not None else None,
    )


def _rate(size: float | None) -> int | None:
    """MiB of this many bytes."""
    amount = _amount(size, 0)
    return None if amount is None else round(amount / 2**20)


def _step_seconds(timing: TimingReport | None) -> StepSeconds | None:
    if timing is None:
        return None
    return StepSeconds(
        predicted=_amount(timing.predicted.step, 4),
        measured=_amount(timing.measured.step, 4),
        ratio=_amount(timing.ratio, 2),
    )


def _phases(spent: StepPhaseSeconds | None) -> StepPhases | None:
    """In whole percent, so that a steady job's cause no writes."""
    seconds = {} if spent is None else {name: _amount(each, 3) or 0.0 for name, each in spent}
    whole = sum(seconds.values())
    if not whole > 0:
        return None
    return StepPhases.model_validate({name: round(100 * each / whole) for name, each in seconds.items()})


def _workers(reports: Sequence[WorkerReport]) -> list[Worker] | None:
    known = [(each.rank, _amount(each.own_seconds, 6)) for each in reports[:MOST_WORKERS]]
    return [Worker(rank=_count(rank), own_seconds=own) for rank, own in known if own is not None] or None


def _slow_link(reading: SlowLinkReport | None) -> SlowLink | None:
    if reading is None:
        return None
    return SlowLink(
        direction=LinkDirection(reading.direction),
        mib_per_second=_rate(reading.bytes_per_second) or 0,
        usual_mib_per_second=_rate(reading.usual_bytes_per_second) or 0,
    )


def _memory(
    report: TrainingReport | None, plan: MemoryReport | None, known: list[PlannedBytes] | None
) -> MemoryUse | None:
    """What is planned, and once it is measured the peaks; None: nothing is.

    Args:
        known: owners of the plan that the same attempt has told before.
    """
    owners = _owners(plan) or known
    if report is None:
        if plan is None:
            return None
        return MemoryUse(
            planned_device_mib=_mib(_count(plan.device_bytes)),
            planned_host_mib=_mib(_count(plan.host_bytes)),
            owners=owners,
        )
    return MemoryUse(
        planned_device_mib=_mib(report.planned_device_bytes),
        peak_device_mib=_mib(report.peak_device_bytes),
        planned_host_mib=_mib(report.planned_host_bytes),
        peak_host_mib=_mib(report.peak_host_bytes),
        owners=owners,
    )


def _owners(plan: MemoryReport | None) -> list[PlannedBytes] | None:
    if plan is None:
        return None
    told = {
        MemoryPlace.DEVICE: plan.device_owners,
        MemoryPlace.HOST: plan.host_owners,
        MemoryPlace.DISK: plan.disk_owners,
    }
    rows = [
        PlannedBytes(place=place, owner=owner, mib=-(-_count(size) // 2**20))
        for place, sizes in told.items()
        for owner, size in sorted(sizes.items(), key=lambda each: (-each[1], each[0]))
        if size > 0 and 0 < len(owner) <= 63
    ]
    return rows[:MOST_OWNERS] or None


def _mib(size: int | None) -> int | None:
    """Whole MiB, rounded up, so that a peak that grows by bytes causes no write."""
    return None if size is None else -(-size // 2**20)


def _lost_work(status: TrainingJobStatus, reading: TrainingStatus) -> LostWork | None:
    """Adds the steps lost by each attempt once: the attempt that was counted last is stored beside the sum. What the attempt
    before lost because it gave way to a service is charged with them.

    Within an attempt they grow when its trainer crashes and goes on from the pod's memory.
    """
    attempt = status.attempt or 0
    old = status.lost_work or LostWork()
    if reading.resumed_from_step is None:
        return None
    if old.attempt == attempt:
        counted = reading.lost_steps if old.attempt_steps is None else old.attempt_steps
        of_attempt = _count(reading.lost_steps)
        if of_attempt <= counted:
            return None
    else:
        counted = 0
        before = status.progress.step if status.progress is not None else 0
        of_attempt = _count(max(reading.lost_steps, before - reading.resumed_from_step))
    steps = of_attempt - counted
    seconds = steps * _seconds_per_step(status)
    return (settled(old, steps, seconds) or old).model_copy(
        update={
            "steps": _count(old.steps + steps),
            "seconds": round(old.seconds + seconds, 1),
            "attempt": attempt,
            "attempt_steps": of_attempt,
        }
    )


def _seconds_per_step(status: TrainingJobStatus) -> float:
    """Seconds per step of the attempt that was lost, from its progress."""
    progress = status.progress
    if progress is None or not progress.tokens_per_second or not progress.step:
        return 0.0
    return progress.tokens / progress.step / progress.tokens_per_second


def _evaluation(reading: EvaluationReport) -> EvaluationResult:
    return EvaluationResult(
        bits_per_byte=_amount(reading.bits_per_byte, 6),
        bigram_bits_per_byte=_amount(reading.bigram_bits_per_byte, 6),
        ngram_bits_per_byte=_amount(reading.ngram_bits_per_byte, 6),
        held_out_bytes=_count(reading.held_out_bytes),
    )


def _count(value: int) -> int:
    """A count between zero and the largest integer that every reader of JSON represents exactly."""
    return min(max(0, value), LARGEST)


def _amount(value: float | None, digits: int) -> float | None:
    """Like ``_finite``, and None for a negative number."""
    return _finite(value, digits) if value is not None and value >= 0 else None


def _past(moment: datetime, now: datetime) -> datetime:
    """The moment, with a time zone and at most now; the pod's clock may be wrong."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return min(aware, now)


def _finite(value: float | None, digits: int) -> float | None:
    """Rounded; None for what JSON or the schema does not accept."""
    if value is None or value != value or abs(value) > 1e15:
        return None
    return round(value, digits)


def _moment(now: datetime, eta_s: float | None, factor: float) -> datetime | None:
    if eta_s is None or not 0 <= eta_s < 10 * 365 * 86400:
        return None
    # To ten seconds: an estimate that changes in every answer would cause a write for every answer.
    seconds = round((now + timedelta(seconds=eta_s * factor)).timestamp() / 10) * 10
    return datetime.fromtimestamp(seconds, tz=now.tzinfo)
