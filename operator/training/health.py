"""Conditions of a job of the engine that say whether it runs as it should.

`Degraded`: one pod of a gang is so slow that the others wait for it. The engine tells how many seconds of a step each pod
takes for itself (`workloads/training/pace.py`). Absent until it is true once; it goes with the attempt.

`PlanFits`: the memory that the engine has measured is what its plan said before it allocated any, or the plan does not fit
and the engine has refused the job. Absent until it is known; it stays when the job has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from busbar.kube.contracts.workload import DOES_NOT_FIT, SLOW_WORKER, TrainingStatus, others_seconds
from busbar.kube.types import Condition, ConditionStatus
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.kube.types.training_status import SlowLink, TrainingJobStatus
from busbar.kube.types.training_words import link_words, slowest_words
from busbar.operator.training.view import JobView
from busbar.operator.write.status import clip, conditions

KEEPS_PACE = 1.25
"""Times the others' median: below it a pod that was slow is so no more."""
ABOVE_PLAN, ABOVE_PLAN_BYTES = 1.05, 128 * 2**20
"""A peak that is more than both above its plan was not planned; less is what heaps and the pages of libraries take, whatever
the job's size: in the example job 64 MiB.
"""
SLOW_CHECKPOINTS = 2
TOLD = {
    (ConditionType.DEGRADED, ConditionStatus.TRUE),
    (ConditionType.PLAN_FITS, ConditionStatus.FALSE),
}
"""What is an event, too, when it begins."""


def with_degraded(view: JobView, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status of a running job with the condition; the same one where nothing is to be said."""
    workers = status.progress.workers if status.progress is not None else None
    if not workers or len(workers) < 2:
        return status
    before = _found(status.conditions, ConditionType.DEGRADED)
    was = before is not None and before.status is ConditionStatus.TRUE
    slowest, usual = workers[0], others_seconds([each.own_seconds for each in workers])
    slow = slowest.own_seconds > (KEEPS_PACE if was else SLOW_WORKER) * usual
    if before is None and not slow:
        return status
    reason, text = Reason.RUNNING, "No pod keeps the others waiting."
    if slow:
        nodes = status.admission.nodes if status.admission is not None else []
        engine = view.job.spec.engine
        pod = slowest.rank // (1 if engine is None else engine.processes_per_pod)
        where = f" It is on {nodes[pod]}." if pod < len(nodes) else ""
        reason, text = Reason.SLOW_POD, f"The others wait for {slowest_words(workers)}.{where}"
    return _with(view, status, ConditionType.DEGRADED, slow, reason, text)


def with_plan_fits(view: JobView, status: TrainingJobStatus, reading: TrainingStatus) -> TrainingJobStatus:
    """The status with the condition, by what the engine says; the same one where it says nothing of it."""
    if reading.error_code == DOES_NOT_FIT:
        return _with(view, status, ConditionType.PLAN_FITS, False, Reason.PLAN_REFUSED, reading.message)
    peaks = tuple(_peaks(reading))
    if not peaks:
        return status
    fits = all(peak <= max(ABOVE_PLAN * planned, planned + ABOVE_PLAN_BYTES) for _, planned, peak in peaks)
    shown = ", ".join(f"{name} {peak // 2**20} MiB of {planned // 2**20}" for name, planned, peak in peaks)
    reason, text = Reason.PLAN_KEPT, f"Memory so far, of what was planned: {shown}."
    if not fits:
        reason, text = Reason.PLAN_EXCEEDED, f"More memory is used than was planned: {shown}."
    return _with(view, status, ConditionType.PLAN_FITS, fits, reason, text)


def _peaks(reading: TrainingStatus) -> Iterator[tuple[str, int, int]]:
    """Name, plan and peak in bytes. Of the host, the most that any phase of the run needs and has needed so far."""
    phases = tuple(reading.memory.phases.values()) if reading.memory is not None else ()
    peaks = [phase.measured_bytes for phase in phases if phase.measured_bytes is not None]
    if peaks and (planned := max(phase.planned_bytes for phase in phases)) > 0:
        yield "host", planned, max(peaks)
    report = reading.report
    if report is not None and report.planned_device_bytes and report.peak_device_bytes is not None:
        yield "device", report.planned_device_bytes, report.peak_device_bytes


def _slow_disk(old: TrainingJobStatus | None, new: TrainingJobStatus) -> Iterator[tuple[str, str]]:
    """Once for each time that a disk becomes slow: a single checkpoint may have had bad luck."""
    before = old.checkpoint.slow_in_a_row if old is not None and old.checkpoint is not None else None
    now = new.checkpoint
    if now is not None and (before or 0) < SLOW_CHECKPOINTS <= (now.slow_in_a_row or 0):
        where = f" to {now.uri}" if now.uri else ""
        nodes = new.admission.nodes if new.admission is not None else []
        yield (
            Reason.SLOW_DISK,
            f"The last {now.slow_in_a_row} checkpoints were written{where} at less than half of the usual "
            f"{now.usual_mib_per_second or 0} MiB/s, the newest at {now.mib_per_second or 0} MiB/s. Look at the volume of the "
            f"claim{', and at node ' + nodes[0] if nodes else ''}: what else uses the disk, or the network to it?",
        )


def _slow_link(old: TrainingJobStatus | None, new: TrainingJobStatus) -> Iterator[tuple[str, str]]:
    """Once for each time that a link becomes slow."""
    before, now = (None if status is None else _link_of(status) for status in (old, new))
    if now is not None and before is None:
        nodes = new.admission.nodes if new.admission is not None else []
        where = f"node {nodes[0]}" if nodes else "the node"
        yield (
            Reason.SLOW_LINK,
            f"The link to the host is slow: {link_words(now)}, so each step takes longer. Look at {where}: has the card lost "
            "lanes (nvidia-smi -q shows the link's generation and width), or does something else use them?",
        )


def _link_of(status: TrainingJobStatus) -> SlowLink | None:
    return None if status.progress is None else status.progress.slow_link


def news(old: TrainingJobStatus | None, new: TrainingJobStatus) -> Iterator[tuple[str, str]]:
    """Reason and message of an event for each condition that has begun to say that something is not as it should be, and
    for a disk or a link that has become slow."""
    yield from _slow_disk(old, new)
    yield from _slow_link(old, new)
    for kind, bad in sorted(TOLD):
        before = _found(old.conditions if old is not None else None, kind)
        now = _found(new.conditions, kind)
        if now is not None and now.status is bad and (before is None or before.status is not bad):
            yield now.reason, now.message


def _found(every: Iterable[Condition] | None, kind: str) -> Condition | None:
    return next((c for c in every or () if c.type == kind), None)


def _with(
    view: JobView, status: TrainingJobStatus, kind: ConditionType, holds: bool, reason: str, text: str
) -> TrainingJobStatus:
    """The status with this condition in place of the one of its kind."""
    before = _found(status.conditions, kind)
    made = conditions(
        [before] if before is not None else None,
        {kind: holds},
        reason,
        clip(text),
        view.job.metadata.generation,
        view.now,
    )
    others_of_it = [c for c in status.conditions or () if c.type != kind]
    return status.model_copy(update={"conditions": [*others_of_it, *made]})
