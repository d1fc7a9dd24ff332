"""Parts of a TrainingJob's next status: its phase with the conditions, usage up to a moment, its pods' reports."""

from __future__ import annotations

from datetime import datetime, timedelta

from busbar.kube.contracts.workload import TrainingStatus
from busbar.kube.types import TrainingPhase
from busbar.kube.types.reasons import ConditionType
from busbar.kube.types.training_status import Admission, TrainingJobStatus
from busbar.operator.pods.engine_image import EngineImage, check
from busbar.operator.pods.readings import from_termination_message
from busbar.operator.profiles.table import rates_of, workload
from busbar.operator.training.deadline import ended
from busbar.operator.training.health import with_plan_fits
from busbar.operator.training.progress import merge_reading
from busbar.operator.training.view import JobView, without_node
from busbar.operator.watch.projections import Pod
from busbar.operator.write.pace import next_at_s
from busbar.operator.write.status import (
    Held,
    add_usage,
    clip,
    conditions,
    job_conditions,
)

LIMIT_STEP = 5
"""Percent; limits move all the time, and each change of a status is a write."""
SLOWDOWN_STEP = 0.01


def in_phase(
    view: JobView, status: TrainingJobStatus, phase: TrainingPhase, reason: str, message: str
) -> TrainingJobStatus:
    """The status in a phase, with the conditions that follow from it."""
    generation = view.job.metadata.generation
    message = clip(message)
    same = (status.phase, status.reason, status.observed_generation) == (phase, reason, generation)
    fields: dict[str, object] = {
        "workload_class": status.workload_class or workload(view.job).workload_class or None,
        "phase": phase,
        "reason": str(reason),
        "message": message,
        "observed_generation": generation,
    }
    outcome = ended(view.job, phase, view.now)
    if outcome is not None:
        fields["deadline"] = outcome
    if not same or not status.conditions:
        made = conditions(status.conditions, job_conditions(phase), reason, message, generation, view.now)
        lasting = [c for c in status.conditions or () if c.type == ConditionType.PLAN_FITS]
        fields["conditions"] = [*made, *lasting]
    return status.model_copy(update=fields)


def _held(view: JobView, admission: Admission) -> Held:
    rate = rates_of([view.pool])[view.pool.spec.accelerator] if view.pool is not None else 1.0
    pods = admission.pods - len(without_node(admission))
    return Held.of(float(pods * admission.accelerators_per_pod), view.pool, rate)


def counted_to(status: TrainingJobStatus) -> datetime | None:
    """The moment up to which the usage of a job's admission is counted; None without an admission."""
    return (status.last_usage_time or status.admission.admitted_at) if status.admission is not None else None


def count_usage(view: JobView, status: TrainingJobStatus, until: datetime) -> TrainingJobStatus:
    """Usage up to ``until``, written with the moment it is counted to."""
    admission = view.status.admission
    if admission is None:
        return status
    since = counted_to(view.status) or until
    until = max(until, since)
    seconds = (until - since) / timedelta(seconds=1)
    usage = add_usage(status.usage, _held(view, admission), seconds, view.energy_joules)
    return status.model_copy(update={"usage": usage, "last_usage_time": until})


def numbers_due_in(view: JobView) -> float:
    """Seconds until usage is written although nothing else changes."""
    return max(view.settings.progress_period_s, use_due_in_s(view, view.status.last_usage_time))


def use_due_in_s(view: JobView, counted: datetime | None) -> float:
    """Until this job's use is written while nothing else changes, if it was counted until then; not above 0: now."""
    if counted is None:
        return 0.0
    period_s = view.settings.usage_period_s
    return next_at_s(view.job.metadata.uid, counted.timestamp(), period_s) - view.now.timestamp()


def _age_s(view: JobView) -> float:
    """Since the numbers were written."""
    counted = view.status.last_usage_time
    return (view.now - counted) / timedelta(seconds=1) if counted is not None else float("inf")


def numbers_due(view: JobView, new: TrainingJobStatus) -> bool:
    """Whether progress or usage should be written now although nothing else changed."""
    old, age = view.status, _age_s(view)
    if use_due_in_s(view, view.status.last_usage_time) <= 0:
        return True
    if old.admission != new.admission:
        return True
    changed = new.model_copy(update={"conditions": old.conditions}) != old
    return changed and age >= view.settings.progress_period_s


def with_readings(view: JobView, status: TrainingJobStatus, current: dict[int, Pod]) -> TrainingJobStatus:
    lead = current.get(0)
    reading = view.readings.get(lead.uid) if lead is not None else None
    return _merged(view, status, reading) if reading is not None else status


def with_power(view: JobView, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status with what limits have cost, if that differs so that somebody would see it."""
    old, new = status.power, view.power
    if new is None or new == old:
        return status
    if old is not None and old.attempt == new.attempt:
        near = abs((new.limit_percent or 0) - (old.limit_percent or 0)) < LIMIT_STEP
        near = near and (new.limit_percent is None) == (old.limit_percent is None)
        if near and abs(new.slowdown - old.slowdown) < SLOWDOWN_STEP and new.seconds < 2 * old.seconds:
            return status
    return status.model_copy(update={"power": new})


def _merged(view: JobView, status: TrainingJobStatus, reading: TrainingStatus) -> TrainingJobStatus:
    merged = with_plan_fits(view, merge_reading(status, reading, view.now, view.slack), reading)
    spec = view.job.spec
    if merged.checkpoint is None or spec.output is None:
        return merged
    uri = spec.checkpoint.uri or f"{spec.output.uri.rstrip('/')}/checkpoints"
    return merged.model_copy(update={"checkpoint": merged.checkpoint.model_copy(update={"uri": uri})})


def with_image(view: JobView, status: TrainingJobStatus, current: dict[int, Pod]) -> TrainingJobStatus:
    """The status with the check of the image that an engine's pods run."""
    admission = status.admission
    if admission is None or view.job.spec.engine is None:
        return status  # the speeds of own images are not shared
    engine = EngineImage(view.rendering.workloads_image, view.settings.workloads_digests)
    image = check(admission.image, current.values(), engine)
    if image == admission.image:
        return status
    return status.model_copy(update={"admission": admission.model_copy(update={"image": image})})


def with_start(
    status: TrainingJobStatus, current: dict[int, Pod], unknown: datetime | None = None
) -> TrainingJobStatus:
    """The status with the moment at which all pods of the attempt ran; as it is where not all have run.

    Args:
        unknown: counts for pods that do not say when they began.
    """
    admission = status.admission
    if admission is None or len(current) < admission.pods:
        return status
    began = [p.started_at or (p.exit.started_at if p.exit else None) or unknown for p in current.values()]
    known = [moment for moment in began if moment is not None]
    if len(known) < len(began):
        return status
    started = max(known)
    fields: dict[str, object] = {"start_time": status.start_time or started}
    if admission.started_at is None:
        fields["admission"] = admission.model_copy(update={"started_at": started})
    return status.model_copy(update=fields)


def with_exit_messages(
    view: JobView, status: TrainingJobStatus, current: dict[int, Pod]
) -> TrainingJobStatus:
    """What is told of an ended attempt: its start, where it ended before that was written, and its last numbers, from
    rank 0's termination message, else from its last reading."""
    status = with_start(status, current)
    if status.admission is not None and status.admission.image is not None:
        status = with_image(view, status, current)
    lead = current.get(0)
    if lead is None:
        return status
    last = from_termination_message(lead.exit.message) if lead.exit is not None else None
    if last is None:
        return with_readings(view, status, current)
    return _merged(view, status, last)


def ended_at(current: dict[int, Pod], now: datetime) -> datetime:
    """When the last pod ended; now where one still runs, the time is unknown, or it was less than five seconds ago.

    Kubelets report whole seconds, so their times are only used after the operator was away.
    """
    times = [p.exit.finished_at if p.exit is not None else None for p in current.values()]
    known = [t for t in times if t is not None]
    if not known or len(known) < len(times) or now - max(known) < timedelta(seconds=5):
        return now
    return max(known)
