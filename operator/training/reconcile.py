"""The reconcile of a TrainingJob: a pure function from its view to the status to write and the actions to do.

    (none) ──► Queued ──► Admitted ──► Starting ──► Running ──► Succeeded
                 ▲  ▲        │            │            │
                 │  └────────┴── attempt failed ───────┤  (retryLimit, back-off)
                 │                                     │
                 └────── Preempting ◄── preempt, suspend, gang incomplete
                             └──► Suspended                    Failed

Each call reads the object, its pods and what the pods report, and returns at most one new status and some
actions. The status is written first, under the resourceVersion it was decided on; the actions follow. So the
order is always: admission in the status → pods → gates → phases; and when the job stops: release in the status →
pods gone → admission cleared. If the operator is killed between any two steps, the same function continues from
there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

from busbar.kube.resources import PODS, SECRETS, SERVICES
from busbar.kube.types import TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_status import (
    TERMINAL_PHASES,
    Admission,
    PodCounts,
    Preview,
    TrainingJobStatus,
)
from busbar.operator.decisions import Admit, Deadline, Decision, Forecast, Lift, Release, Reserved, Wait
from busbar.operator.pods import manifests, training_pods
from busbar.operator.pods.unmounted import MOUNTED_WITHIN_S
from busbar.operator.pods.volume_claims import lacks_claims
from busbar.operator.training.attempt_end import attempt_over, fail, finished
from busbar.operator.training.deadline import with_deadline
from busbar.operator.training.health import with_degraded
from busbar.operator.training.lost_pods import removals
from busbar.operator.training.release import begin_release, releasing, stuck_pod
from busbar.operator.training.reservation import with_reservation
from busbar.operator.training.start_forecast import started, with_forecast, withdrawn
from busbar.operator.training.starting import incomplete, problem_of
from busbar.operator.training.status import (
    count_usage,
    counted_to,
    in_phase,
    numbers_due,
    numbers_due_in,
    use_due_in_s,
    with_image,
    with_power,
    with_readings,
    with_start,
)
from busbar.operator.training.substitute import on_another_node
from busbar.operator.training.view import (
    ENDING,
    JobUpdate,
    JobView,
    attempt_pods,
    is_held,
    is_managed,
    key_of_body,
    leftovers,
    per_pod_of,
    placement_of,
    replaced_times,
    without_node,
)
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Action, Apply, Create, LiftGate
from busbar.operator.write.status import (
    clip,
    seconds_until,
)
from busbar.scheduler.fit.accelerators import accelerator

NAME_TAKEN_AGAIN_S = 1.0
"""The end of another's pod is no event of this job, so it is looked for."""
POD_LIMIT_AGAIN_S = 30.0
"""After so long a job that its tenant's limit of pods keeps waiting may be planned again."""
ENDING_AGAIN_S = 600.0
"""The same for one whose namespace is being deleted, which does not come back."""
CLAIMS_THERE = "All claims exist; it waits for its turn."


def reconcile(
    view: JobView,
    decision: Decision | None = None,
    forecast: Forecast | None = None,
    reserved: Reserved | None = None,
    deadline: Deadline | None = None,
) -> JobUpdate:
    """See the module's head. A forecast and a place go with a reason to wait, in one status, or alone; what is said of a
    deadline goes with any status, or alone."""
    update = _reconciled(view, decision, forecast, reserved)
    status = update.status or view.status
    if not is_managed(view.job) or status.phase in TERMINAL_PHASES:
        return update
    if view.job.spec.deadline is None or view.suspended is not None:
        deadline = Deadline()  # it was taken away, or no plan counts with the job
    told = status if deadline is None else with_deadline(view.job, status, deadline, view.now)
    return update if told is status else replace(update, status=told)


def _reconciled(
    view: JobView, decision: Decision | None, forecast: Forecast | None, reserved: Reserved | None
) -> JobUpdate:
    if not is_managed(view.job):
        return JobUpdate()
    status = view.status
    if status.phase in TERMINAL_PHASES:
        return finished(view)
    if status.admission is None:
        return _waiting(view, decision, forecast, reserved)
    if status.release is not None:
        return releasing(view)
    return _admitted(view, decision)


def _waiting(
    view: JobView, decision: Decision | None, forecast: Forecast | None, reserved: Reserved | None
) -> JobUpdate:
    status = view.status
    alive = leftovers(status, view.pods)
    cleaning = removals(view, alive)
    if view.suspended is not None:
        void = withdrawn(status).model_copy(update={"reservation": None})
        return JobUpdate(in_phase(view, void, TrainingPhase.SUSPENDED, *view.suspended), cleaning)
    if alive:
        stuck = stuck_pod(view, alive)
        waiting_status = (
            in_phase(view, status, TrainingPhase.QUEUED, Reason.POD_STUCK, stuck) if stuck else None
        )
        return JobUpdate(waiting_status, cleaning, view.settings.unschedulable_s)
    if status.retry_at is not None and status.retry_at > view.now:
        return JobUpdate(None, (), seconds_until(status.retry_at, view.now))
    if is_held(view.job, view.budget):
        return _held(view, Reason.BUDGET_SPENT, view.budget.why)
    if view.is_ending:
        return _out_of_plan(view, Reason.NAMESPACE_ENDING, ENDING, ENDING_AGAIN_S)
    if view.missing_claims:
        return _held(view, Reason.CLAIM_MISSING, view.missing_claims)
    if lacks_claims(status):
        waits = in_phase(view, status, TrainingPhase.QUEUED, Reason.WAITING, CLAIMS_THERE)
        return JobUpdate(waits.model_copy(update={"preview": None}))
    if view.pod_room is not None:
        least = view.job.spec.shape.min_pods
        lacking = view.pod_room.lacking(decision.placement.pods if isinstance(decision, Admit) else least)
        if lacking:
            return _out_of_plan(view, Reason.POD_LIMIT, lacking, POD_LIMIT_AGAIN_S)
    if view.held_back:
        said = status.message if status.reason == Reason.GUARANTEES_OF_OTHERS else None
        # The amounts in it may differ by now: a wait is told once.
        return _held(view, Reason.GUARANTEES_OF_OTHERS, said or view.held_back)
    if isinstance(decision, Admit) and decision.assumed_version == view.job.metadata.resource_version:
        return JobUpdate(_admit(view, decision))
    if isinstance(decision, Wait):
        fields = {
            "waiting": decision.record or None,
            "preview": Preview(starts_now=False, reason=clip(decision.message)),
        }
        queued = status.model_copy(update=fields)
        told = in_phase(view, queued, TrainingPhase.QUEUED, decision.reason, decision.message)
        return JobUpdate(_told(view, told, forecast, reserved))
    if status.phase is TrainingPhase.QUEUED and (forecast is not None or reserved is not None):
        told = _told(view, status, forecast, reserved)
        return JobUpdate(told if told is not status else None)
    return JobUpdate(offer=status.retry_at is not None)


def _out_of_plan(view: JobView, reason: Reason, text: str, again_s: float) -> JobUpdate:
    """It stays queued whole, and leaves the plan for a while: it keeps no capacity from others and preempts nobody."""
    later = view.status.model_copy(
        update={
            "waiting": None,
            "reservation": None,
            "retry_at": view.now + timedelta(seconds=again_s),
            "preview": Preview(starts_now=False, reason=clip(text)),
        }
    )
    queued = in_phase(view, withdrawn(later), TrainingPhase.QUEUED, reason, text)
    return JobUpdate(queued, (), again_s)


def _held(view: JobView, reason: Reason, text: str) -> JobUpdate:
    """It is in no plan until what holds it back is gone; the next round after that plans it."""
    before = view.status
    preview = Preview(starts_now=False, reason=clip(text))
    held = withdrawn(before).model_copy(update={"waiting": None, "reservation": None, "preview": preview})
    queued = in_phase(view, held, TrainingPhase.QUEUED, reason, text)
    return JobUpdate(queued if queued != before else None)


def _told(
    view: JobView, status: TrainingJobStatus, forecast: Forecast | None, reserved: Reserved | None
) -> TrainingJobStatus:
    """The status with what a waiting job is told of its start; the same one where nothing has changed."""
    if reserved is not None:
        status = with_reservation(view.job, status, reserved, view.now)
    if forecast is not None:
        status = with_forecast(view.job.model_copy(update={"status": status}), forecast, view.now) or status
    return status


def _admit(view: JobView, decision: Admit) -> TrainingJobStatus:
    """The status that admits the job; an admission is this one write."""
    status, placement = view.status, decision.placement
    attempt = (status.attempt or 0) + 1
    price = view.pool.spec.price_per_hour if view.pool is not None else 0.0
    admission = Admission(
        id=f"{view.job.metadata.uid[:8]}-{attempt}",
        pool=placement.pool,
        accelerator=placement.accelerator,
        link_class=placement.link or None,
        mode=placement.mode,
        pods=placement.pods,
        accelerators_per_pod=view.job.spec.shape.accelerators_per_pod,
        nodes=list(placement.nodes),
        per_pod=per_pod_of(placement),
        **_cap(placement.accelerator, placement.power_cap),
        admitted_at=view.now,
        reason=clip(decision.reason),
    )
    preview = Preview(
        starts_now=True,
        pool=placement.pool,
        mode=placement.mode,
        reason=clip(decision.reason),
        cost_per_hour=round(placement.pods * admission.accelerators_per_pod * price, 6),
    )
    fields = {
        "attempt": attempt,
        "admission": admission,
        "preview": preview,
        "waiting": None,
        "reservation": None,
        "retry_at": None,
        "last_usage_time": view.now,
        **started(view.job, view.now),
    }
    return in_phase(
        view, status.model_copy(update=fields), TrainingPhase.ADMITTED, Reason.ADMITTED, decision.reason
    )


def _admitted(view: JobView, decision: Decision | None) -> JobUpdate:
    status, spec = view.status, view.job.spec
    admission = status.admission
    assert admission is not None
    current = attempt_pods(view)
    ended = attempt_over(view, current, admission)
    if ended is not None:
        return ended
    if view.suspended is not None:
        reason = view.suspended[0]
        return begin_release(view, reason, "The job is being suspended: it saves its state first.")
    if view.is_stopped:
        return begin_release(view, Reason.BUDGET_SPENT, view.budget.why)
    if isinstance(decision, Release) and decision.assumed_version == view.job.metadata.resource_version:
        return begin_release(
            view, decision.reason, decision.message, moved=True, taken=decision.taken, to=decision.to
        )
    if isinstance(decision, Lift) and decision.assumed == placement_of(admission):
        return JobUpdate(_lifted(view, admission, decision))
    if status.start_time is not None and _left_s(view, admission) <= 0:
        text = f"The job ran longer than activeDeadlineSeconds ({spec.active_deadline_seconds} s)."
        return fail(view, Reason.DEADLINE_EXCEEDED, text)
    # Ended pods of earlier attempts were kept for their logs; the new attempt replaces them.
    earlier = (p for p in view.pods if p.ended and p.attempt < (status.attempt or 0))
    given_up = (
        p for p in view.pods if not p.ended and p.attempt == status.attempt and current.get(p.rank) is not p
    )
    stale = removals(view, (*leftovers(status, view.pods), *earlier, *given_up))
    if stale:
        return JobUpdate(None, stale)
    waiting = without_node(admission)
    missing = [rank for rank in range(admission.pods) if rank not in current and rank not in waiting]
    gated = [p for p in current.values() if p.gated]
    if missing or gated:
        late = incomplete(view, current, admission)
        if late is not None:
            return late
    if missing and view.holders:
        return _name_taken(view, admission)
    if missing:
        return _create(view, admission, missing)
    if gated:
        lifts = tuple(LiftGate(p.key, p.uid, p.gate_index) for p in gated)
        return JobUpdate(None, lifts, view.settings.gang_timeout_s)
    if waiting:
        return on_another_node(view, admission, decision)
    return _running(view, current, admission)


def _lifted(view: JobView, admission: Admission, decision: Lift) -> TrainingJobStatus:
    """The status under a higher power cap: the pods run on, and the node's agent is told with its next lease."""
    fields = {
        **_cap(admission.accelerator, decision.power_cap),
        "power_cap_changed_at": view.now,
        "reason": clip(decision.message),
    }
    return view.status.model_copy(update={"admission": admission.model_copy(update=fields)})


def _cap(kind: str, power_cap: float) -> dict[str, Any]:
    """The fields of an admission that say under which power cap its boards are."""
    if power_cap >= 1:
        return {"power_cap_percent": None, "power_cap_watts": None}
    known = accelerator(kind)
    watts = None if known is None else round(power_cap * known.watts, 1)
    return {"power_cap_percent": round(100 * power_cap), "power_cap_watts": watts}


def _held_s(view: JobView, admission: Admission) -> float:
    """For how long the job has been admitted in all: time in the queue and time suspended do not count."""
    status = view.status
    devices = admission.pods * admission.accelerators_per_pod
    counted = status.usage.accelerator_seconds / devices if status.usage is not None and devices else 0.0
    since = counted_to(status) or view.now
    return counted + max(0.0, (view.now - since) / timedelta(seconds=1))


def _left_s(view: JobView, admission: Admission) -> float:
    """Until its activeDeadlineSeconds are over."""
    limit_s = view.job.spec.active_deadline_seconds
    return limit_s - _held_s(view, admission) if limit_s is not None else math.inf


def _create(view: JobView, admission: Admission, missing: list[int]) -> JobUpdate:
    placement = placement_of(admission)
    actions: list[Action] = []
    secret = manifests.bearers_secret(view.job, view.rendering)
    if secret is not None:
        actions.append(Apply(SECRETS, secret))
    if placement.pods > 1:
        service = training_pods.gang_service(view.job)
        actions.append(Create(SERVICES, key_of_body(service), service))
    for rank in missing:
        body = training_pods.training_pod(
            view.job,
            attempt=view.status.attempt or 1,
            rank=rank,
            admission_id=admission.id,
            placement=placement,
            pool=view.pool,
            rendering=view.rendering,
            replacement=replaced_times(admission).get(rank, 0),
        )
        actions.append(Create(PODS, key_of_body(body), body))
    if not view.refused:
        return JobUpdate(None, tuple(actions))
    text = f"Its pods cannot be made, and are tried again: {view.refused}"
    status = in_phase(view, view.status, TrainingPhase.ADMITTED, Reason.PODS_REFUSED, text)
    return JobUpdate(status, tuple(actions))


def _running(view: JobView, current: dict[int, Pod], admission: Admission) -> JobUpdate:
    status = view.status
    running = sum(p.phase == "Running" for p in current.values())
    if running < admission.pods and not any(p.ended for p in current.values()):
        late = incomplete(view, current, admission)
        if late is not None:
            return late
        if not view.counts_due:
            return JobUpdate(None, (), view.settings.count_period_s)
        text = (
            problem_of(view, current) or f"{running} of {admission.pods} pods run; the others are starting."
        )
        counted = status.model_copy(update={"pods": PodCounts(ready=running, total=len(current))})
        new = in_phase(view, counted, TrainingPhase.STARTING, Reason.STARTING, text)
        return JobUpdate(
            new, (), min(MOUNTED_WITHIN_S, view.settings.unschedulable_s, view.settings.gang_timeout_s)
        )
    counted = status.model_copy(update={"pods": PodCounts(ready=running, total=len(current))})
    text = f"Attempt {status.attempt} runs on {', '.join(dict.fromkeys(admission.nodes))}."
    refused = view.refusals.get(current[0].uid) if 0 in current else None
    if refused is not None:
        text = f"{text} Its progress cannot be read: {refused}."
    new = with_image(view, with_start(counted, current, view.now), current)
    new = in_phase(view, new, TrainingPhase.RUNNING, Reason.RUNNING, text)
    new = with_degraded(view, with_power(view, with_readings(view, new, current)))
    if new.phase is status.phase and not numbers_due(view, new):
        return JobUpdate(None, (), min(numbers_due_in(view), _left_s(view, admission)))
    again_s = min(use_due_in_s(view, view.now), _left_s(view, admission))
    return JobUpdate(count_usage(view, new, view.now), (), again_s)


def _name_taken(view: JobView, admission: Admission) -> JobUpdate:
    """Gives the place back: under the next attempt's names the pods can be made.

    The pods of an earlier object of this name go by themselves, so they are waited for as long as for one that cannot
    be placed.
    """
    holder = view.holders[0]
    earlier = bool(holder.kind)
    owner = f"an earlier object named {holder.job}" if earlier else holder.owner or "nobody"
    text = f"Pod {holder.key.name} exists already and belongs to {owner}, so this job's pod cannot be made."
    waited = view.now - admission.admitted_at if admission.admitted_at is not None else timedelta(0)
    limit_s = view.settings.unschedulable_s
    if (earlier or holder.deleting) and waited <= timedelta(seconds=limit_s):
        status = in_phase(view, view.status, TrainingPhase.ADMITTED, Reason.PODS_REFUSED, text)
        return JobUpdate(status, (), NAME_TAKEN_AGAIN_S)
    return begin_release(view, Reason.GANG_INCOMPLETE, f"{text} It is queued again.")
