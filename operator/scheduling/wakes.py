"""Which changes of objects wake a scheduling round."""

from __future__ import annotations

from typing import Any

from busbar.kube.types import TrainingJob, TrainingPhase
from busbar.kube.types.training_status import TERMINAL_PHASES
from busbar.operator.pods.volume_claims import lacks_claims
from busbar.operator.scheduling.power_domains import holds_boards, is_closed
from busbar.operator.training.view import without_node
from busbar.operator.watch.projections import Pod, Sleep


def matters(kind: str, old: Any, new: Any) -> bool:
    """Whether a change of an object asks for something or frees something; what only takes its place does not."""
    if kind == "Pod":
        return _pod_matters(old, new)
    if old is None or new is None:
        return True
    if kind == "TrainingJob":
        return _job_matters(old, new)
    if kind == "ModelService":
        return _service_facts(old) != _service_facts(new)
    if kind == "PowerDomain" and any(asked(old) != asked(new) for asked in (is_closed, holds_boards)):
        return True
    if kind in ("AcceleratorPool", "Tenant", "PerformanceProfile", "PowerDomain"):
        return bool(old.metadata.generation != new.metadata.generation)
    return kind == "Node"


def _pod_matters(old: Pod | None, new: Pod | None) -> bool:
    """Pods of our jobs take what their admission has set aside; what other pods take changes what a pool has."""
    pod = new or old
    if pod is None or not pod.kind:
        return old is None or new is None or _pod_facts(old) != _pod_facts(new)
    if old is None:
        return False
    if new is None:
        return not old.ended
    before, after = (
        (p.uid, p.owner_uid, p.ended, p.deleting, p.draining_since, p.sleep is Sleep.ASLEEP, p.requests)
        for p in (old, new)
    )
    return before != after or old.unanswered_since != new.unanswered_since


def _pod_facts(pod: Pod) -> tuple[object, ...]:
    facts = (pod.uid, pod.owner_uid, pod.place, pod.ended, pod.gated, pod.deleting)
    return (*facts, pod.draining_since, pod.requests)


def _job_matters(old: TrainingJob, new: TrainingJob) -> bool:
    if _identity(old) != _identity(new):
        return True
    before, after = _job_state(old), _job_state(new)
    return before != after and not (before[0] == "waits" and after[0] == "placed")


def _identity(job: TrainingJob) -> tuple[object, ...]:
    return job.metadata.uid, job.metadata.generation, job.metadata.deletion_timestamp


def _job_state(job: TrainingJob) -> tuple[object, ...]:
    """Whether the job waits, has a place or has ended; and what else of its status a plan depends on."""
    status = job.status
    if status is None:
        return "waits", None, False
    if status.phase in TERMINAL_PHASES:
        return ("ended",)
    if status.admission is not None:
        return "placed", status.admission.id, status.release, without_node(status.admission)
    return "waits", status.retry_at, status.phase is TrainingPhase.SUSPENDED, lacks_claims(status)


def _service_facts(service: Any) -> tuple[object, ...]:
    status = service.status
    desired = status.desired_replicas if status else None
    types = tuple((row.pool, row.desired) for row in (status.pools if status else None) or ())
    meta = service.metadata
    return (meta.uid, meta.generation, meta.deletion_timestamp, desired, types, lacks_claims(status))
