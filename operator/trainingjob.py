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

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from busbar.kube.contracts.workload import CHECKPOINT_PATH, ExitCode
from busbar.kube.informer import Key
from busbar.kube.resources import PODS, SERVICES, TRAINING_JOBS
from busbar.kube.types import AcceleratorPool, TrainingJob, TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_job import (
    TERMINAL_PHASES,
    Admission,
    PerPod,
    PodCounts,
    Preview,
    TrainingJobStatus,
)
from busbar.kube.types.training_job import Release as ReleaseStatus
from busbar.operator import podspec
from busbar.operator.actions import Action, Ask, Create, Delete, LiftGate
from busbar.operator.orders import Admit, Order, Release, Wait
from busbar.operator.pods import Pod
from busbar.operator.progress import Reading, from_termination_message, merge_reading
from busbar.operator.settings import Settings
from busbar.operator.status import (
    Held,
    add_usage,
    backoff_s,
    clip,
    conditions,
    job_conditions,
    seconds_until,
)
from busbar.operator.table import rates_of
from busbar.scheduler import Placement, Resources

INVALID_JOB = 2  # our engine's exit code for a job that no further try can help
MANAGER = "busbar.dev/operator"


@dataclass(frozen=True)
class JobView:
    """Everything that one reconcile of one job may look at."""

    job: TrainingJob
    pods: tuple[Pod, ...]  # all that this object owns
    now: datetime
    settings: Settings
    rendering: podspec.Rendering
    pool: AcceleratorPool | None = None  # the admission's, or the order's
    readings: Mapping[str, Reading] = field(default_factory=dict)  # by pod uid
    refusals: Mapping[str, str] = field(default_factory=dict)  # by pod uid: why its port is not read
    asked: Mapping[str, bool] = field(default_factory=dict)  # by pod uid: POST /checkpoint, answered or not
    refused: str = ""  # why the API server did not take its pods, the last time they were sent

    @property
    def status(self) -> TrainingJobStatus:
        return self.job.status or TrainingJobStatus()


@dataclass(frozen=True)
class Decision:
    """What to write, what to do after it, and when to look again at the latest."""

    status: TrainingJobStatus | None = None
    actions: tuple[Action, ...] = ()
    again_s: float | None = None
    offer: bool = False  # the scheduler should look at it now


def is_managed(job: TrainingJob) -> bool:
    """Whether the object is ours to act on."""
    return job.spec.managed_by in (None, MANAGER) and job.metadata.deletion_timestamp is None


def placement_of(admission: Admission) -> Placement:
    """The scheduler's form of an admission that stands in a status."""
    per_pod = admission.per_pod or PerPod(accelerators_m=admission.accelerators_per_pod * 1000)
    return Placement(
        pool=admission.pool,
        accelerator=admission.accelerator,
        mode=admission.mode or "resident",
        nodes=tuple(admission.nodes),
        per_pod=Resources(
            accelerators_m=per_pod.accelerators_m,
            cpu_m=per_pod.cpu_m,
            memory_mib=per_pod.memory_mib,
            ephemeral_mib=per_pod.ephemeral_mib,
        ),
    )


def attempt_pods(view: JobView) -> dict[int, Pod]:
    """The pods of the present attempt by rank."""
    attempt = view.status.attempt or 0
    return {p.rank: p for p in view.pods if p.attempt == attempt}


def leftovers(status: TrainingJobStatus, pods: tuple[Pod, ...]) -> list[Pod]:
    """Pods that still hold resources but belong to no admission: the job may not start before they are gone."""
    admitted = status.admission is not None
    return [p for p in pods if not p.ended and not (admitted and p.attempt == (status.attempt or 0))]


def reconcile(view: JobView, order: Order | None = None) -> Decision:
    """See the module's head."""
    if not is_managed(view.job):
        return Decision()
    status = view.status
    if status.phase in TERMINAL_PHASES:
        return _finished(view)
    if status.admission is None:
        return _waiting(view, order)
    if status.release is not None:
        return _releasing(view)
    return _admitted(view, order)


# -- not admitted --------------------------------------------------------------------------------------


def _waiting(view: JobView, order: Order | None) -> Decision:
    status, spec = view.status, view.job.spec
    alive = leftovers(status, view.pods)
    cleaning = tuple(_delete(p, view) for p in alive if not p.deleting)
    if spec.suspend:
        text = "The job is suspended; set spec.suspend to false to queue it."
        return Decision(_phase(view, status, TrainingPhase.SUSPENDED, Reason.SUSPENDED, text), cleaning)
    if alive:
        stuck = _stuck(view, alive)
        told = _phase(view, status, TrainingPhase.QUEUED, Reason.POD_STUCK, stuck) if stuck else None
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
        return Decision(_phase(view, queued, TrainingPhase.QUEUED, order.reason, order.message))
    return Decision(offer=status.retry_at is not None)


def _stuck(view: JobView, alive: list[Pod]) -> str:
    """What a person must do about a pod whose node does not confirm its end; nothing else can know that it is dead,
    and two attempts that write one output at a time would spoil it."""
    late = timedelta(seconds=view.settings.unschedulable_s)
    for pod in alive:
        if pod.deletes_at is not None and view.now - pod.deletes_at > late:
            where = f"node {pod.place}" if pod.place else "its node"
            return (
                f"Pod {pod.key.name} should have ended, and {where} does not confirm it; the job waits. If the node "
                f"is dead, delete it, or taint it node.kubernetes.io/out-of-service=:NoExecute."
            )
    return ""


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
    }
    return _phase(
        view, status.model_copy(update=fields), TrainingPhase.ADMITTED, Reason.ADMITTED, order.reason
    )


# -- admitted ------------------------------------------------------------------------------------------


def _admitted(view: JobView, order: Order | None) -> Decision:
    status, spec = view.status, view.job.spec
    admission = status.admission
    assert admission is not None
    current = attempt_pods(view)
    ended = _attempt_over(view, current, admission)
    if ended is not None:
        return ended
    if spec.suspend:
        return _begin_release(view, Reason.SUSPENDED, "The job is being suspended: it saves its state first.")
    if isinstance(order, Release) and order.assumed_version == view.job.metadata.resource_version:
        return _begin_release(view, order.reason, order.message, moved=order.moved)
    limit_s = spec.active_deadline_seconds
    if limit_s is not None and status.start_time is not None and _held_s(view, admission) >= limit_s:
        text = f"The job ran longer than activeDeadlineSeconds ({limit_s} s)."
        return _fail(view, Reason.DEADLINE_EXCEEDED, text)
    stale = [_delete(p, view) for p in leftovers(status, view.pods) if not p.deleting]
    # Ended pods of earlier attempts were kept for their logs; the new attempt replaces them.
    stale += [_delete(p, view) for p in view.pods if p.ended and p.attempt < (status.attempt or 0)]
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
    since = status.last_usage_time or admission.admitted_at or view.now
    return counted + max(0.0, (view.now - since) / timedelta(seconds=1))


def _create(view: JobView, admission: Admission, missing: list[int]) -> Decision:
    placement = placement_of(admission)
    actions: list[Action] = []
    if placement.pods > 1 or view.job.spec.template is not None:
        service = podspec.gang_service(view.job)
        actions.append(Create(SERVICES, _key_of(service), service))
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
        actions.append(Create(PODS, _key_of(body), body))
    if not view.refused:
        return Decision(None, tuple(actions))
    text = f"Its pods cannot be made, and are tried again: {view.refused}"
    said = _phase(view, view.status, TrainingPhase.ADMITTED, Reason.PODS_REFUSED, text)
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
        new = _phase(view, counted, TrainingPhase.STARTING, Reason.STARTING, text)
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
    new = _phase(view, status.model_copy(update=fields), TrainingPhase.RUNNING, Reason.RUNNING, text)
    new = _with_readings(view, new, current)
    if new.phase is status.phase and not _numbers_due(view, new):
        return Decision(None, (), view.settings.progress_period_s)
    return Decision(_count(view, new, view.now), (), view.settings.usage_period_s)


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
        return _begin_release(view, Reason.GANG_INCOMPLETE, text)
    if age > limit:
        text = _why(f"The gang was not complete within {view.settings.gang_timeout_s:.0f} s.", current)
        placed = [p for p in current.values() if p.node and not p.gated]
        if len(placed) == admission.pods:
            return _failed_to_start(view, text)
        return _begin_release(view, Reason.GANG_INCOMPLETE, f"{text} It is queued again.")
    for pod in current.values():
        if pod.unschedulable_since is not None and view.now - pod.unschedulable_since > stuck:
            text = f"Pod {pod.key.name} could not be placed on {pod.pinned}; the gang is queued again."
            return _begin_release(view, Reason.GANG_INCOMPLETE, _why(text, current))
    return None


def _failed_to_start(view: JobView, text: str) -> Decision:
    restarts, limit = view.status.restarts or 0, view.job.spec.retry_limit
    text = f"{text.rstrip('.')}. This was try {restarts + 1} of {limit + 1}."
    if restarts >= limit:
        return _fail(view, Reason.RETRY_LIMIT_REACHED, text)
    return _begin_release(view, Reason.GANG_INCOMPLETE, f"{text} It is queued again.", counts=True)


def _why(text: str, current: dict[int, Pod]) -> str:
    problem = next((p.problem for p in current.values() if p.problem), "")
    return f"{text} {problem}" if problem else text


def _attempt_over(view: JobView, current: dict[int, Pod], admission: Admission) -> Decision | None:
    """The attempt's end, if it has ended: all pods done, one failed, or one vanished after the start."""
    failed = [p for p in current.values() if p.phase == "Failed"]
    if failed:
        return _attempt_failed(view, current, failed)
    if len(current) == admission.pods and all(p.phase == "Succeeded" for p in current.values()):
        return Decision(_succeed(view, current))
    begun = view.status.phase in (TrainingPhase.STARTING, TrainingPhase.RUNNING) or any(
        not p.gated for p in current.values()
    )
    lost = [r for r in range(admission.pods) if r not in current or current[r].deleting]
    if begun and lost:
        text = f"Pod of rank {lost[0]} was deleted or its node is gone; the job starts again from its checkpoint."
        return _retry(view, Reason.RETRYING, text, counts=False)
    return None


def _succeed(view: JobView, current: dict[int, Pod]) -> TrainingJobStatus:
    status = _with_exit_messages(view, view.status, current)
    end = _ended_at(current, view.now)
    status = _count(view, status, end)
    output = view.job.spec.output
    fields = {
        "completion_time": end,
        "output_uri": output.uri if output is not None else None,
        "pods": PodCounts(ready=0, total=len(current)),
    }
    steps = f" after {status.progress.step} steps" if status.progress and status.progress.step else ""
    return _phase(
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
        return _fail(view, Reason.INVALID_SPEC, f"The engine refuses the job: {_cause(first)}.")
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
        return _fail(view, Reason.RETRY_LIMIT_REACHED, f"{cause} This was try {restarts + 1} of {limit + 1}.")
    current = attempt_pods(view)
    status = _count(view, _with_exit_messages(view, status, current), _ended_at(current, view.now))
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
    new = _phase(view, status.model_copy(update=fields), TrainingPhase.QUEUED, reason, text)
    return Decision(new, (), wait)


def _fail(view: JobView, reason: str, text: str) -> Decision:
    current = attempt_pods(view)
    end = _ended_at(current, view.now)
    status = _count(view, _with_exit_messages(view, view.status, current), end)
    fields = {"completion_time": view.now, "release": None}
    new = _phase(view, status.model_copy(update=fields), TrainingPhase.FAILED, reason, text)
    actions = tuple(_delete(p, view) for p in view.pods if not p.ended and not p.deleting)
    return Decision(new, actions)


# -- releasing -----------------------------------------------------------------------------------------


def _begin_release(
    view: JobView, reason: str, message: str, *, moved: bool = False, counts: bool = False
) -> Decision:
    status = view.status
    grace = timedelta(seconds=view.job.spec.preemption.grace_period_seconds)
    fields: dict[str, object] = {
        "release": ReleaseStatus(
            reason=reason, message=clip(message), requested_at=view.now, deadline=view.now + grace
        )
    }
    if reason == Reason.PREEMPTED:
        fields["preemptions"] = (status.preemptions or 0) + 1
    if moved:
        fields["last_move_time"] = view.now
    if counts:
        fields["restarts"] = (status.restarts or 0) + 1
    new = _count(view, status.model_copy(update=fields), view.now)
    return Decision(_phase(view, new, TrainingPhase.PREEMPTING, reason, message))


def _releasing(view: JobView) -> Decision:
    """Notify → acknowledged or deadline → delete → all gone → release."""
    status = view.status
    release, admission = status.release, status.admission
    assert release is not None
    assert admission is not None
    current = attempt_pods(view)
    alive = [p for p in view.pods if not p.ended]
    if not alive:
        if len(current) == admission.pods and all(p.phase == "Succeeded" for p in current.values()):
            return Decision(_succeed(view, current))  # it finished while it was being asked
        return Decision(_released(view, release, current))
    overdue = release.deadline is None or view.now >= release.deadline
    actions: list[Action] = []
    for pod in alive:
        if pod.deleting:
            continue
        waits = not overdue and pod.rank == 0 and pod.port and pod.phase == "Running" and not pod.gated
        if waits and pod.uid not in view.asked:
            assert release.deadline is not None
            seconds = seconds_until(release.deadline, view.now)
            actions.append(Ask(pod.key, pod.uid, CHECKPOINT_PATH, max(1.0, seconds)))
    # The gang goes together: rank 0 saves for all, so nobody is stopped before it has answered.
    if not actions and (overdue or _acknowledged(view, alive)):
        actions = [_delete(pod, view) for pod in alive if not pod.deleting]
    again = 1.0 if overdue or release.deadline is None else seconds_until(release.deadline, view.now) + 0.05
    stuck = _stuck(view, alive)
    told = _phase(view, status, TrainingPhase.PREEMPTING, Reason.POD_STUCK, stuck) if stuck else None
    return Decision(told, tuple(actions), again)


def _acknowledged(view: JobView, alive: list[Pod]) -> bool:
    """Whether nobody has to be waited for: rank 0 answered, or cannot be asked."""
    for pod in alive:
        if pod.rank == 0 and pod.port and pod.phase == "Running" and not pod.gated and not pod.deleting:
            return view.asked.get(pod.uid, False)
    return True


def _released(view: JobView, release: ReleaseStatus, current: dict[int, Pod]) -> TrainingJobStatus:
    status = _count(view, _with_exit_messages(view, view.status, current), _ended_at(current, view.now))
    fields: dict[str, object] = {"admission": None, "release": None, "pods": None}
    # The room was cleared for another job (or did not work out): it must not be taken again at once.
    hold_s, settings = view.settings.preempt_hold_s, view.settings
    if release.reason == Reason.GANG_INCOMPLETE:
        hold_s = backoff_s(status.restarts or 0, hold_s, max(hold_s, settings.backoff_limit_s))
    if release.reason in (Reason.PREEMPTED, Reason.GANG_INCOMPLETE):
        fields["retry_at"] = view.now + timedelta(seconds=hold_s)
    status = status.model_copy(update=fields)
    if view.job.spec.suspend:
        text = "The job is suspended; set spec.suspend to false to queue it."
        return _phase(view, status, TrainingPhase.SUSPENDED, Reason.SUSPENDED, text)
    return _phase(view, status, TrainingPhase.QUEUED, release.reason, release.message)


# -- finished ------------------------------------------------------------------------------------------


def _finished(view: JobView) -> Decision:
    alive = tuple(_delete(p, view) for p in view.pods if not p.ended and not p.deleting)
    ttl, ended = view.job.spec.ttl_seconds_after_finished, view.status.completion_time
    if ttl is None or ended is None:
        return Decision(None, alive)
    left = seconds_until(ended + timedelta(seconds=ttl), view.now)
    if left > 0:
        return Decision(None, alive, left)
    meta = view.job.metadata
    key = Key(meta.namespace or "", meta.name)
    return Decision(None, (*alive, Delete(TRAINING_JOBS, key, meta.uid)))


# -- parts ---------------------------------------------------------------------------------------------


def _phase(
    view: JobView, status: TrainingJobStatus, phase: TrainingPhase, reason: str, message: str
) -> TrainingJobStatus:
    """The status in a phase, with the conditions that follow from it."""
    generation = view.job.metadata.generation
    message = clip(message)
    same = (status.phase, status.reason, status.observed_generation) == (phase, reason, generation)
    fields: dict[str, object] = {
        "phase": phase,
        "reason": str(reason),
        "message": message,
        "observed_generation": generation,
    }
    if not same or not status.conditions:
        fields["conditions"] = conditions(
            status.conditions, job_conditions(phase), reason, message, generation, view.now
        )
    return status.model_copy(update=fields)


def _held(view: JobView, admission: Admission) -> Held:
    rate = rates_of([view.pool])[view.pool.spec.accelerator] if view.pool is not None else 1.0
    return Held.of(float(admission.pods * admission.accelerators_per_pod), view.pool, rate)


def _count(view: JobView, status: TrainingJobStatus, until: datetime) -> TrainingJobStatus:
    """Usage up to ``until``, written with the moment it is counted to."""
    admission = view.status.admission
    if admission is None:
        return status
    since = view.status.last_usage_time or admission.admitted_at or until
    until = max(until, since)
    usage = add_usage(status.usage, _held(view, admission), (until - since) / timedelta(seconds=1))
    return status.model_copy(update={"usage": usage, "last_usage_time": until})


def _numbers_due(view: JobView, new: TrainingJobStatus) -> bool:
    """Whether progress or usage should be written now although nothing else changed."""
    old = view.status
    counted = old.last_usage_time
    age = (view.now - counted) / timedelta(seconds=1) if counted is not None else float("inf")
    if age >= view.settings.usage_period_s:
        return True
    if old.admission is not None and old.admission.started_at is None:
        return True
    changed = new.model_copy(update={"conditions": old.conditions}) != old
    return changed and age >= view.settings.progress_period_s


def _with_readings(view: JobView, status: TrainingJobStatus, current: dict[int, Pod]) -> TrainingJobStatus:
    lead = current.get(0)
    reading = view.readings.get(lead.uid) if lead is not None else None
    return _merged(view, status, reading) if reading is not None else status


def _merged(view: JobView, status: TrainingJobStatus, reading: Reading) -> TrainingJobStatus:
    merged = merge_reading(status, reading, view.now)
    spec = view.job.spec
    if merged.checkpoint is None or spec.output is None:
        return merged
    uri = spec.checkpoint.uri or f"{spec.output.uri.rstrip('/')}/checkpoints"
    return merged.model_copy(update={"checkpoint": merged.checkpoint.model_copy(update={"uri": uri})})


def _with_exit_messages(
    view: JobView, status: TrainingJobStatus, current: dict[int, Pod]
) -> TrainingJobStatus:
    """The last numbers of an ended attempt, from rank 0's termination message; else what was read last."""
    lead = current.get(0)
    if lead is None:
        return status
    last = from_termination_message(lead.exit.message) if lead.exit is not None else None
    if last is None:
        return _with_readings(view, status, current)
    return _merged(view, status, last)


def _ended_at(current: dict[int, Pod], now: datetime) -> datetime:
    """When the last pod ended; now while one still runs, nothing is known, or it ended just now.

    Kubelets report whole seconds; only an operator that was away needs them.
    """
    times = [p.exit.finished_at if p.exit is not None else None for p in current.values()]
    known = [t for t in times if t is not None]
    if not known or len(known) < len(times) or now - max(known) < timedelta(seconds=5):
        return now
    return max(known)


def _delete(pod: Pod, view: JobView) -> Delete:
    started = pod.phase == "Running"
    grace = view.job.spec.preemption.grace_period_seconds if started else None
    return Delete(PODS, pod.key, pod.uid, grace)


def _key_of(body: dict[str, object]) -> Key:
    meta = body["metadata"]
    assert isinstance(meta, dict)
    return Key(str(meta["namespace"]), str(meta["name"]))
