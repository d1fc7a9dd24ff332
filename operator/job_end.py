"""How an attempt of a TrainingJob ends: done, tried again from its checkpoint, or failed; and what becomes of the job then."""

from __future__ import annotations

import json
from datetime import timedelta

from busbar.kube.contracts.workload import ExitCode
from busbar.kube.informer import Key
from busbar.kube.resources import TRAINING_JOBS
from busbar.kube.types import TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_job import (
    Admission,
    PodCounts,
    TrainingJobStatus,
)
from busbar.operator.actions import Delete
from busbar.operator.job_status import count_usage, ended_at, in_phase, with_exit_messages
from busbar.operator.job_view import Decision, JobView, attempt_pods, delete_pod
from busbar.operator.pods import Pod
from busbar.operator.status import (
    backoff_s,
    seconds_until,
)

COUNTED_WITHIN_S = 60.0
"""A job whose time is up stays so much longer at most, until its measured speed is kept in a PerformanceProfile."""
INVALID_JOB = 2  # our engine's exit code for a job that no further try can help


def attempt_over(view: JobView, current: dict[int, Pod], admission: Admission) -> Decision | None:
    """The attempt's end, if it has ended: all pods done, one failed, or one vanished after the start."""
    failed = [p for p in current.values() if p.phase == "Failed"]
    if failed:
        return _attempt_failed(view, current, failed)
    if len(current) == admission.pods and all(p.phase == "Succeeded" for p in current.values()):
        return Decision(succeed(view, current))
    begun = view.status.phase in (TrainingPhase.STARTING, TrainingPhase.RUNNING) or any(
        not p.gated for p in current.values()
    )
    lost = [r for r in range(admission.pods) if r not in current or current[r].deleting]
    if begun and lost:
        text = f"Pod of rank {lost[0]} was deleted or its node is gone; the job starts again from its checkpoint."
        return _retry(view, Reason.RETRYING, text, counts=False)
    return None


def succeed(view: JobView, current: dict[int, Pod]) -> TrainingJobStatus:
    status = with_exit_messages(view, view.status, current)
    end = ended_at(current, view.now)
    status = count_usage(view, status, end)
    output = view.job.spec.output
    fields = {
        "completion_time": end,
        "output_uri": output.uri if output is not None else None,
        "pods": PodCounts(ready=0, total=len(current)),
    }
    steps = f" after {status.progress.step} steps" if status.progress and status.progress.step else ""
    return in_phase(
        view,
        status.model_copy(update=fields),
        TrainingPhase.SUCCEEDED,
        Reason.SUCCEEDED,
        f"The job is done{steps}.",
    )


def _attempt_failed(view: JobView, current: dict[int, Pod], failed: list[Pod]) -> Decision:
    # The first to end is the cause; the others of a gang usually follow it.
    first = min(failed, key=lambda p: ((p.exit.finished_at if p.exit else None) or view.now, p.rank))
    code = first.exit.code if first.exit is not None else None
    if code == ExitCode.SAVED_AFTER_SIGTERM:
        return _retry(
            view, Reason.RETRYING, "The pod was stopped from outside and saved its state.", counts=False
        )
    if first.evicted:
        why = first.problem.rstrip(". ") or "its node went away"
        text = f"Pod {first.key.name} was evicted: {why}."
        return _retry(view, Reason.RETRYING, text, counts=False)
    if code == INVALID_JOB and view.job.spec.engine is not None:
        return fail(view, Reason.INVALID_SPEC, f"The engine refuses the job: {_cause(first)}.")
    return _retry(view, Reason.RETRYING, f"Pod {first.key.name} failed: {_cause(first)}.", counts=True)


def _cause(pod: Pod) -> str:
    """One sentence's worth of why a pod failed."""
    if pod.problem or pod.exit is None:  # the kubelet ended it, and says why
        return pod.problem.rstrip(". ") or "no exit code was reported"
    how = f"exit code {pod.exit.code}" + (
        f" ({pod.exit.reason})" if pod.exit.reason not in ("", "Error") else ""
    )
    said = pod.exit.message.strip()
    if said.startswith("{"):
        try:
            said = str(json.loads(said).get("message") or "")
        except (ValueError, RecursionError):
            said = ""
    tail = said.splitlines()[-1].strip() if said else ""
    return f"{how}: {tail[:300].rstrip('.')}" if tail else how


def _retry(view: JobView, reason: str, cause: str, *, counts: bool) -> Decision:
    """Ends the attempt; the job goes back to the queue, or fails when its tries are used up."""
    status, settings = view.status, view.settings
    restarts = status.restarts or 0
    limit = view.job.spec.retry_limit
    if counts and restarts >= limit:
        return fail(view, Reason.RETRY_LIMIT_REACHED, f"{cause} This was try {restarts + 1} of {limit + 1}.")
    current = attempt_pods(view)
    status = count_usage(view, with_exit_messages(view, status, current), ended_at(current, view.now))
    restarts += counts
    wait = backoff_s(max(1, restarts), settings.backoff_base_s, settings.backoff_limit_s)
    fields = {
        "admission": None,
        "release": None,
        "restarts": restarts,
        "retry_at": view.now + timedelta(seconds=wait),
        "pods": None,
    }
    text = f"{cause} The next attempt starts in {wait:.0f} s."
    new = in_phase(view, status.model_copy(update=fields), TrainingPhase.QUEUED, reason, text)
    return Decision(new, (), wait)


def fail(view: JobView, reason: str, text: str) -> Decision:
    current = attempt_pods(view)
    end = ended_at(current, view.now)
    status = count_usage(view, with_exit_messages(view, view.status, current), end)
    fields = {"completion_time": view.now, "release": None}
    new = in_phase(view, status.model_copy(update=fields), TrainingPhase.FAILED, reason, text)
    actions = tuple(delete_pod(p, view) for p in view.pods if not p.ended and not p.deleting)
    return Decision(new, actions)


def finished(view: JobView) -> Decision:
    alive = tuple(delete_pod(p, view) for p in view.pods if not p.ended and not p.deleting)
    ttl, ended = view.job.spec.ttl_seconds_after_finished, view.status.completion_time
    if ttl is None or ended is None:
        return Decision(None, alive)
    left = seconds_until(ended + timedelta(seconds=ttl), view.now)
    if left > 0:
        return Decision(None, alive, left)
    late = (view.now - ended) / timedelta(seconds=1) - ttl
    if not view.counted and late < COUNTED_WITHIN_S:
        return Decision(None, alive, min(view.settings.profile_period_s, COUNTED_WITHIN_S - late))
    meta = view.job.metadata
    key = Key(meta.namespace or "", meta.name)
    return Decision(None, (*alive, Delete(TRAINING_JOBS, key, meta.uid)))
