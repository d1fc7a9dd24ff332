"""The reconcile of a TrainingJob: a pure function from what is seen to what should be written and done.

    (none) ──► Queued ──► Admitted ──► Starting ──► Running ──► Succeeded
                 ▲  ▲        │            │            │
                 │  └────────┴── attempt failed ───────┤  (retryLimit, back-off)
                 │                                     │
                 └────── Preempting ◄── preempt, suspend, gang incomplete
                             └──► Suspended                    Failed

Each call looks at the object, its pods and what the pods said, and answers with at most one new status and
some actions. The status is written first, under the resourceVersion it was decided on; the actions follow.
So the order of truth is always: admission in the status → pods → gates → phases, and on the way back:
release in the status → pods gone → admission cleared. Killing the operator between any two leaves a state from
which the same function continues.
"""

from __future__ import annotations

from datetime import timedelta

from busbar.kube.resources import PODS, SERVICES
from busbar.kube.types import TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_job import (
    TERMINAL_PHASES,
    Admission,
    PerPod,
    PodCounts,
    Preview,
    TrainingJobStatus,
)
from busbar.operator import podspec
from busbar.operator.actions import Action, Create, LiftGate
from busbar.operator.job_end import attempt_over, fail, finished
from busbar.operator.job_forecast import foretold, started, withdrawn
from busbar.operator.job_release import begin_release, releasing, stuck_pod
from busbar.operator.job_status import count_usage, counted_to, in_phase, numbers_due, with_readings
from busbar.operator.job_view import (
    Decision,
    JobView,
    attempt_pods,
    delete_pod,
    is_managed,
    key_of_body,
    leftovers,
    placement_of,
)
from busbar.operator.orders import Admit, Foretold, Order, Release, Wait
from busbar.operator.pods import Pod
from busbar.operator.status import (
    clip,
    seconds_until,
)


def reconcile(view: JobView, order: Order | None = None) -> Decision:
    """See the module's head."""
    if not is_managed(view.job):
        return Decision()
    status = view.status
    if status.phase in TERMINAL_PHASES:
        return finished(view)
    if status.admission is None:
        return _waiting(view, order)
    if status.release is not None:
        return releasing(view)
    return _admitted(view, order)


def _waiting(view: JobView, order: Order | None) -> Decision:
    status, spec = view.status, view.job.spec
    alive = leftovers(status, view.pods)
    cleaning = tuple(delete_pod(p, view) for p in alive if not p.deleting)
    if spec.suspend:
        text = "The job is suspended; set spec.suspend to false to queue it."
        void = withdrawn(status)
        return Decision(in_phase(view, void, TrainingPhase.SUSPENDED, Reason.SUSPENDED, text), cleaning)
    if alive:
        stuck = stuck_pod(view, alive)
        told = in_phase(view, status, TrainingPhase.QUEUED, Reason.POD_STUCK, stuck) if stuck else None
        return Decision(told, cleaning, view.settings.unschedulable_s)
    if status.retry_at is not None and status.retry_at > view.now:
        return Decision(None, (), seconds_until(status.retry_at, view.now))
    if isinstance(order, Admit) and order.assumed_version == view.job.metadata.resource_version:
        return Decision(_admit(view, order))
    if isinstance(order, Wait):
        fields = {
            "waiting": order.record or None,
            "preview": Preview(starts_now=False, reason=clip(order.message)),
        }
        queued = status.model_copy(update=fields)
        return Decision(in_phase(view, queued, TrainingPhase.QUEUED, order.reason, order.message))
    if isinstance(order, Foretold) and status.phase is TrainingPhase.QUEUED:
        return Decision(foretold(view.job, order, view.now))
    return Decision(offer=status.retry_at is not None)


def _admit(view: JobView, order: Admit) -> TrainingJobStatus:
    """The status that lets the job in; the one write of an admission."""
    status, placement = view.status, order.placement
    attempt = (status.attempt or 0) + 1
    price = view.pool.spec.price_per_hour if view.pool is not None else 0.0
    per_pod = placement.per_pod
    admission = Admission(
        id=f"{view.job.metadata.uid[:8]}-{attempt}",
        pool=placement.pool,
        accelerator=placement.accelerator,
        mode=placement.mode,
        pods=placement.pods,
        accelerators_per_pod=view.job.spec.shape.accelerators_per_pod,
        nodes=list(placement.nodes),
        per_pod=PerPod(
            accelerators_m=per_pod.accelerators_m,
            cpu_m=per_pod.cpu_m,
            memory_mib=per_pod.memory_mib,
            ephemeral_mib=per_pod.ephemeral_mib,
        ),
        admitted_at=view.now,
        reason=clip(order.reason),
    )
    preview = Preview(
        starts_now=True,
        pool=placement.pool,
        mode=placement.mode,
        reason=clip(order.reason),
        cost_per_hour=round(placement.pods * admission.accelerators_per_pod * price, 6),
    )
    fields = {
        "attempt": attempt,
        "admission": admission,
        "preview": preview,
        "waiting": None,
        "retry_at": None,
        "last_usage_time": view.now,
        **started(view.job, view.now),
    }
    return in_phase(
        view, status.model_copy(update=fields), TrainingPhase.ADMITTED, Reason.ADMITTED, order.reason
    )


def _admitted(view: JobView, order: Order | None) -> Decision:
    status, spec = view.status, view.job.spec
    admission = status.admission
    assert admission is not None
    current = attempt_pods(view)
    ended = attempt_over(view, current, admission)
    if ended is not None:
        return ended
    if spec.suspend:
        return begin_release(view, Reason.SUSPENDED, "The job is being suspended: it saves its state first.")
    if isinstance(order, Release) and order.assumed_version == view.job.metadata.resource_version:
        return begin_release(view, order.reason, order.message, moved=True, taken=order.taken)
    limit_s = spec.active_deadline_seconds
    if limit_s is not None and status.start_time is not None and _held_s(view, admission) >= limit_s:
        text = f"The job ran longer than activeDeadlineSeconds ({limit_s} s)."
        return fail(view, Reason.DEADLINE_EXCEEDED, text)
    stale = [delete_pod(p, view) for p in leftovers(status, view.pods) if not p.deleting]
    # Ended pods of earlier attempts were kept for their logs; the new attempt replaces them.
    stale += [delete_pod(p, view) for p in view.pods if p.ended and p.attempt < (status.attempt or 0)]
    if stale:
        return Decision(None, tuple(stale))
    missing = [rank for rank in range(admission.pods) if rank not in current]
    gated = [p for p in current.values() if p.gated]
    if missing or gated:
        late = _incomplete(view, current, admission)
        if late is not None:
            return late
    if missing:
        return _create(view, admission, missing)
    if gated:
        lifts = tuple(LiftGate(p.key, p.uid, p.gate_index) for p in gated)
        return Decision(None, lifts, view.settings.gang_timeout_s)
    return _running(view, current, admission)


def _held_s(view: JobView, admission: Admission) -> float:
    """For how long the job has held its place in all: time in the queue and time suspended do not count."""
    status = view.status
    devices = admission.pods * admission.accelerators_per_pod
    counted = status.usage.accelerator_seconds / devices if status.usage is not None and devices else 0.0
    since = counted_to(status) or view.now
    return counted + max(0.0, (view.now - since) / timedelta(seconds=1))


def _create(view: JobView, admission: Admission, missing: list[int]) -> Decision:
    placement = placement_of(admission)
    actions: list[Action] = []
    if placement.pods > 1 or view.job.spec.template is not None:
        service = podspec.gang_service(view.job)
        actions.append(Create(SERVICES, key_of_body(service), service))
    for rank in missing:
        body = podspec.training_pod(
            view.job,
            attempt=view.status.attempt or 1,
            rank=rank,
            admission_id=admission.id,
            placement=placement,
            pool=view.pool,
            rendering=view.rendering,
        )
        actions.append(Create(PODS, key_of_body(body), body))
    if not view.refused:
        return Decision(None, tuple(actions))
    text = f"Its pods cannot be made, and are tried again: {view.refused}"
    said = in_phase(view, view.status, TrainingPhase.ADMITTED, Reason.PODS_REFUSED, text)
    return Decision(said, tuple(actions))


def _running(view: JobView, current: dict[int, Pod], admission: Admission) -> Decision:
    status = view.status
    running = sum(p.phase == "Running" for p in current.values())
    if running < admission.pods and not any(p.ended for p in current.values()):
        late = _incomplete(view, current, admission)
        if late is not None:
            return late
        problem = next((p.problem for p in current.values() if p.problem), "")
        text = problem or f"{running} of {admission.pods} pods run; the others are starting."
        counted = status.model_copy(update={"pods": PodCounts(ready=running, total=len(current))})
        new = in_phase(view, counted, TrainingPhase.STARTING, Reason.STARTING, text)
        return Decision(new, (), min(view.settings.unschedulable_s, view.settings.gang_timeout_s))
    started = max((p.started_at or view.now for p in current.values()), default=view.now)
    fields = {
        "pods": PodCounts(ready=running, total=len(current)),
        "start_time": status.start_time or started,
    }
    if admission.started_at is None:
        fields["admission"] = admission.model_copy(update={"started_at": started})
    text = f"Attempt {status.attempt} runs on {', '.join(dict.fromkeys(admission.nodes))}."
    refused = view.refusals.get(current[0].uid) if 0 in current else None
    if refused is not None:
        text = f"{text} Its progress cannot be read: {refused}."
    new = in_phase(view, status.model_copy(update=fields), TrainingPhase.RUNNING, Reason.RUNNING, text)
    new = with_readings(view, new, current)
    if new.phase is status.phase and not numbers_due(view, new):
        return Decision(None, (), view.settings.progress_period_s)
    return Decision(count_usage(view, new, view.now), (), view.settings.usage_period_s)


def _incomplete(view: JobView, current: dict[int, Pod], admission: Admission) -> Decision | None:
    """Tears down a gang that cannot come up, so that nobody holds half a gang's devices.

    When every pod has its node and still does not run (an image that cannot be pulled, a Secret that is not there),
    the try counts: the next would take the same devices for the same end. Want of room is nobody's fault.
    """
    limit = timedelta(seconds=view.settings.gang_timeout_s)
    stuck = timedelta(seconds=view.settings.unschedulable_s)
    age = view.now - admission.admitted_at if admission.admitted_at is not None else timedelta(0)
    if view.refused and len(current) < admission.pods and age > stuck:
        text = f"The API server does not take its pods; it is queued again. {view.refused}"
        return begin_release(view, Reason.GANG_INCOMPLETE, text)
    if age > limit:
        text = _why(f"The gang was not complete within {view.settings.gang_timeout_s:.0f} s.", current)
        placed = [p for p in current.values() if p.node and not p.gated]
        if len(placed) == admission.pods:
            return _failed_to_start(view, text)
        return begin_release(view, Reason.GANG_INCOMPLETE, f"{text} It is queued again.")
    for pod in current.values():
        if pod.unschedulable_since is not None and view.now - pod.unschedulable_since > stuck:
            text = f"Pod {pod.key.name} could not be placed on {pod.pinned}; the gang is queued again."
            return begin_release(view, Reason.GANG_INCOMPLETE, _why(text, current))
    return None


def _failed_to_start(view: JobView, text: str) -> Decision:
    restarts, limit = view.status.restarts or 0, view.job.spec.retry_limit
    text = f"{text.rstrip('.')}. This was try {restarts + 1} of {limit + 1}."
    if restarts >= limit:
        return fail(view, Reason.RETRY_LIMIT_REACHED, text)
    return begin_release(view, Reason.GANG_INCOMPLETE, f"{text} It is queued again.", counts=True)


def _why(text: str, current: dict[int, Pod]) -> str:
    problem = next((p.problem for p in current.values() if p.problem), "")
    return f"{text} {problem}" if problem else text
