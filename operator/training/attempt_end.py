"""The end of an attempt of a TrainingJob: the job succeeds, is retried from its checkpoint, or fails."""

from __future__ import annotations

import json
from datetime import timedelta

from busbar.kube.contracts.workload import ExitCode
from busbar.kube.informer import Key
from busbar.kube.resources import TRAINING_JOBS
from busbar.kube.types import TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_status import Admission, PodCounts, TrainingJobStatus
from busbar.operator.training.lost_pods import is_lost, removals
from busbar.operator.training.replace import replace_lost
from busbar.operator.training.status import count_usage, ended_at, in_phase, with_exit_messages
from busbar.operator.training.view import (
    JobUpdate,
    JobView,
    attempt_pods,
    pod_name,
    replaced_times,
)
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Delete
from busbar.operator.write.status import (
    backoff_s,
    seconds_until,
)

COUNTED_WITHIN_S = 60.0
"""An ended job is kept at most this much longer than its TTL, until its PerformanceProfile has its measured speed."""


def attempt_over(view: JobView, current: dict[int, Pod], admission: Admission) -> JobUpdate | None:
    """The update that ends the attempt: all pods done, one failed, one vanished after the start, or one that was seen
    is gone; or that has lost pods replaced, where the others hold their state; else None.

    A pod's name is never used again in an attempt. What ends it is a status, which the API server refuses where the job
    was deleted and its watch has not said so: a pod made here instead would run for a job that is gone.
    """
    replaced = replace_lost(view, current, admission)
    if replaced is not None:
        return replaced
    failed = [p for p in current.values() if p.phase == "Failed"]
    silent = [p for p in current.values() if p.place in view.silent]
    if any(is_lost(view, p) for p in silent) or (failed and silent):  # the others fail for what they lack
        where = ", ".join(sorted({p.place for p in silent}))
        text = f"Node {where} does not answer; the job starts again from its checkpoint elsewhere."
        return retry(view, Reason.NODE_LOST, text, counts=False)
    if failed:
        return _attempt_failed(view, current, failed)
    if len(current) == admission.pods and all(p.phase == "Succeeded" for p in current.values()):
        return JobUpdate(succeed(view, current))
    begun = (
        view.status.phase in (TrainingPhase.STARTING, TrainingPhase.RUNNING)
        or any(not p.gated for p in current.values())
        or any(pod_name(view, rank) in view.gone_pods for rank in range(admission.pods))
    )
    lost = [r for r in range(admission.pods) if _is_gone(view, current, admission, r)]
    if begun and lost:
        text = f"Pod of rank {lost[0]} was deleted or its node is gone; the job starts again from its checkpoint."
        return retry(view, Reason.RETRYING, text, counts=False)
    return None


def _is_gone(view: JobView, current: dict[int, Pod], admission: Admission, rank: int) -> bool:
    """Whether its pod was there; one that is to take the place of a lost one may not be made yet."""
    if rank in current:
        return current[rank].deleting
    return rank not in replaced_times(admission) or pod_name(view, rank) in view.gone_pods


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


def _attempt_failed(view: JobView, current: dict[int, Pod], failed: list[Pod]) -> JobUpdate:
    # The first pod that failed is the cause; the others of the gang usually fail after it.
    first = min(failed, key=lambda p: ((p.exit.finished_at if p.exit else None) or view.now, p.rank))
    code = first.exit.code if first.exit is not None else None
    if code == ExitCode.SAVED_AFTER_SIGTERM:
        return retry(
            view, Reason.RETRYING, "The pod was stopped from outside and saved its state.", counts=False
        )
    if first.evicted:
        why = first.problem.rstrip(". ") or "its node went away"
        text = f"Pod {first.key.name} was evicted: {why}."
        return retry(view, Reason.RETRYING, text, counts=False)
    if code == ExitCode.INVALID and view.job.spec.engine is not None:
        return fail(view, Reason.INVALID_SPEC, f"The engine refuses the job: {_cause(first)}.")
    return retry(view, Reason.RETRYING, f"Pod {first.key.name} failed: {_cause(first)}.", counts=True)


def _cause(pod: Pod) -> str:
    """Why a pod failed, in a few words."""
    if pod.problem or pod.exit is None:  # the kubelet ended it and gives the reason
        return pod.problem.rstrip(". ") or "no exit code was reported"
    how = f"exit code {pod.exit.code}" + (
        f" ({pod.exit.reason})" if pod.exit.reason not in ("", "Error") else ""
    )
    message = pod.exit.message.strip()
    if message.startswith("{"):
        try:
            message = str(json.loads(message).get("message") or "")
        except (ValueError, RecursionError):
            message = ""
    tail = message.splitlines()[-1].strip() if message else ""
    return f"{how}: {tail[:300].rstrip('.')}" if tail else how


def retry(view: JobView, reason: str, cause: str, *, counts: bool) -> JobUpdate:
    """Ends the attempt; the job returns to the queue, or fails when its retries are used up."""
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
    return JobUpdate(new, (), wait)


def fail(view: JobView, reason: str, text: str) -> JobUpdate:
    current = attempt_pods(view)
    end = ended_at(current, view.now)
    status = count_usage(view, with_exit_messages(view, view.status, current), end)
    fields = {"completion_time": view.now, "release": None}
    new = in_phase(view, status.model_copy(update=fields), TrainingPhase.FAILED, reason, text)
    return JobUpdate(new, removals(view, (p for p in view.pods if not p.ended)))


def finished(view: JobView) -> JobUpdate:
    alive = removals(view, (p for p in view.pods if not p.ended))
    ttl, ended = view.job.spec.ttl_seconds_after_finished, view.status.completion_time
    if ttl is None or ended is None:
        return JobUpdate(None, alive)
    left = seconds_until(ended + timedelta(seconds=ttl), view.now)
    if left > 0:
        return JobUpdate(None, alive, left)
    late = (view.now - ended) / timedelta(seconds=1) - ttl
    if not view.counted and late < COUNTED_WITHIN_S:
        return JobUpdate(None, alive, min(view.settings.profile_period_s, COUNTED_WITHIN_S - late))
    meta = view.job.metadata
    key = Key(meta.namespace or "", meta.name)
    return JobUpdate(None, (*alive, Delete(TRAINING_JOBS, key, meta.uid)))
