"""Why the pods of an admitted job do not run yet, and when that ends the attempt. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_status import Admission
from busbar.operator.pods.unmounted import mounts_of_job, why_not_started
from busbar.operator.training.attempt_end import fail
from busbar.operator.training.release import begin_release
from busbar.operator.training.view import ENDING, JobUpdate, JobView
from busbar.operator.watch.projections import Pod


def incomplete(view: JobView, current: dict[int, Pod], admission: Admission) -> JobUpdate | None:
    """Tears down a gang that does not start, so that half a gang does not hold devices for ever.

    When every pod has its node and still does not run (an image that cannot be pulled, a missing Secret), the attempt
    counts against ``retryLimit``, as the next one would fail the same way. Lack of room does not count.
    """
    limit = timedelta(seconds=view.settings.gang_timeout_s)
    stuck = timedelta(seconds=view.settings.unschedulable_s)
    since = max((each.since for each in admission.replaced or ()), default=admission.admitted_at)
    age = view.now - since if since is not None else timedelta(0)
    if view.is_ending and len(current) < admission.pods:
        return begin_release(view, Reason.NAMESPACE_ENDING, ENDING)
    if view.missing_claims and any(not pod.node for pod in current.values()):
        return begin_release(view, Reason.CLAIM_MISSING, view.missing_claims)
    if view.refused and len(current) < admission.pods and age > stuck:
        text = f"The API server does not take its pods; it is queued again. {view.refused}"
        return begin_release(view, Reason.GANG_INCOMPLETE, text)
    if age > limit:
        text = _why(view, f"The gang was not complete within {view.settings.gang_timeout_s:.0f} s.", current)
        placed = [p for p in current.values() if p.node and not p.gated]
        if len(placed) == admission.pods:
            return _failed_to_start(view, text)
        return begin_release(view, Reason.GANG_INCOMPLETE, f"{text} It is queued again.")
    for pod in current.values():
        if pod.unschedulable_since is not None and view.now - pod.unschedulable_since > stuck:
            text = f"Pod {pod.key.name} could not be placed on {pod.pinned}; the gang is queued again."
            return begin_release(view, Reason.GANG_INCOMPLETE, _why(view, text, current))
    return None


def _failed_to_start(view: JobView, text: str) -> JobUpdate:
    restarts, limit = view.status.restarts or 0, view.job.spec.retry_limit
    text = f"{text.rstrip('.')}. This was try {restarts + 1} of {limit + 1}."
    if restarts >= limit:
        return fail(view, Reason.RETRY_LIMIT_REACHED, text)
    return begin_release(view, Reason.GANG_INCOMPLETE, f"{text} It is queued again.", counts=True)


def _why(view: JobView, text: str, current: Mapping[int, Pod]) -> str:
    problem = problem_of(view, current)
    return f"{text} {problem}" if problem else text


def problem_of(view: JobView, current: Mapping[int, Pod]) -> str:
    """Why the pods do not run, as far as they tell; empty: nothing is wrong yet."""
    return why_not_started(current.values(), view.now, mounts_of_job(view.job))
