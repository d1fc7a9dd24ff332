"""How an admitted TrainingJob gives its place back: asked to save, acknowledged or overdue, deleted, all gone, released."""

from __future__ import annotations

from datetime import timedelta

from busbar.kube.contracts.workload import CHECKPOINT_PATH
from busbar.kube.types import TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_job import Release as ReleaseStatus
from busbar.kube.types.training_job import (
    TrainingJobStatus,
)
from busbar.operator.actions import Action, Ask
from busbar.operator.job_end import succeed
from busbar.operator.job_status import count_usage, ended_at, in_phase, with_exit_messages
from busbar.operator.job_view import Decision, JobView, attempt_pods, delete_pod
from busbar.operator.pods import Pod
from busbar.operator.status import (
    backoff_s,
    clip,
    seconds_until,
)


def begin_release(
    view: JobView,
    reason: str,
    message: str,
    *,
    moved: bool = False,
    taken: bool = False,
    counts: bool = False,
) -> Decision:
    status = view.status
    grace = timedelta(seconds=view.job.spec.preemption.grace_period_seconds)
    fields: dict[str, object] = {
        "release": ReleaseStatus(
            reason=reason, message=clip(message), requested_at=view.now, deadline=view.now + grace
        )
    }
    if taken:
        fields["preemptions"] = (status.preemptions or 0) + 1
    if moved:
        fields["last_move_time"] = view.now
    if counts:
        fields["restarts"] = (status.restarts or 0) + 1
    new = count_usage(view, status.model_copy(update=fields), view.now)
    return Decision(in_phase(view, new, TrainingPhase.PREEMPTING, reason, message))


def releasing(view: JobView) -> Decision:
    """Notify → acknowledged or deadline → delete → all gone → release."""
    status = view.status
    release, admission = status.release, status.admission
    assert release is not None
    assert admission is not None
    current = attempt_pods(view)
    alive = [p for p in view.pods if not p.ended]
    if not alive:
        if len(current) == admission.pods and all(p.phase == "Succeeded" for p in current.values()):
            return Decision(succeed(view, current))  # it finished while it was being asked
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
        actions = [delete_pod(pod, view) for pod in alive if not pod.deleting]
    again = 1.0 if overdue or release.deadline is None else seconds_until(release.deadline, view.now) + 0.05
    stuck = stuck_pod(view, alive)
    told = in_phase(view, status, TrainingPhase.PREEMPTING, Reason.POD_STUCK, stuck) if stuck else None
    return Decision(told, tuple(actions), again)


def _acknowledged(view: JobView, alive: list[Pod]) -> bool:
    """Whether nobody has to be waited for: rank 0 answered, or cannot be asked."""
    for pod in alive:
        if pod.rank == 0 and pod.port and pod.phase == "Running" and not pod.gated and not pod.deleting:
            return view.asked.get(pod.uid, False)
    return True


def _released(view: JobView, release: ReleaseStatus, current: dict[int, Pod]) -> TrainingJobStatus:
    status = count_usage(view, with_exit_messages(view, view.status, current), ended_at(current, view.now))
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
        return in_phase(view, status, TrainingPhase.SUSPENDED, Reason.SUSPENDED, text)
    return in_phase(view, status, TrainingPhase.QUEUED, release.reason, release.message)


def stuck_pod(view: JobView, alive: list[Pod]) -> str:
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
