"""The condition Degraded of a gang: one of its pods is so slow that the others wait for it.

The engine tells how many seconds of a step each pod takes for itself (`workloads/training/pace.py`). The condition is absent
until it is true once, and then says either.
"""

from __future__ import annotations

from busbar.kube.contracts.workload import SLOW_WORKER, others_seconds
from busbar.kube.types import ConditionStatus
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.kube.types.training_job import TrainingJobStatus
from busbar.kube.types.training_words import slowest_words
from busbar.operator.training.view import JobView
from busbar.operator.write.status import clip, conditions

KEEPS_PACE = 1.25  # times the others' median: below it a pod that was slow is so no more


def with_degraded(view: JobView, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status of a running job with the condition; the same one where nothing is to be said."""
    workers = status.progress.workers if status.progress is not None else None
    if not workers or len(workers) < 2:
        return status
    before = next((c for c in status.conditions or () if c.type == ConditionType.DEGRADED), None)
    was = before is not None and before.status is ConditionStatus.TRUE
    slowest, usual = workers[0], others_seconds([each.own_seconds for each in workers])
    slow = slowest.own_seconds > (KEEPS_PACE if was else SLOW_WORKER) * usual
    if before is None and not slow:
        return status
    reason, text = Reason.RUNNING, "No pod keeps the others waiting."
    if slow:
        nodes = status.admission.nodes if status.admission is not None else []
        where = f" It is on {nodes[slowest.rank]}." if slowest.rank < len(nodes) else ""
        reason, text = Reason.SLOW_POD, f"The others wait for {slowest_words(workers)}.{where}"
    made = conditions(
        [before] if before is not None else None,
        {ConditionType.DEGRADED: slow},
        reason,
        clip(text),
        view.job.metadata.generation,
        view.now,
    )
    others_of_it = [c for c in status.conditions or () if c.type != ConditionType.DEGRADED]
    return status.model_copy(update={"conditions": [*others_of_it, *made]})


def news(old: TrainingJobStatus | None, new: TrainingJobStatus) -> tuple[str, str] | None:
    """Reason and message of an event, when a pod becomes slow."""

    def found(status: TrainingJobStatus | None) -> str | None:
        every = (status and status.conditions) or ()
        return next(
            (
                c.message
                for c in every
                if c.type == ConditionType.DEGRADED and c.status is ConditionStatus.TRUE
            ),
            None,
        )

    message = found(new)
    return (Reason.SLOW_POD, message) if message is not None and found(old) is None else None
