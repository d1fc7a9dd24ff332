"""How an admitted TrainingJob is stopped: rank 0 saves or times out, its pods are deleted, its admission is cleared."""

from __future__ import annotations

from datetime import timedelta

from busbar.kube.contracts.workload import CHECKPOINT_PATH
from busbar.kube.types import TrainingPhase
from busbar.kube.types.lost_work import GivesWayTo
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_status import Release as ReleaseStatus
from busbar.kube.types.training_status import TrainingJobStatus
from busbar.operator.accounting.lost_work import gave_way
from busbar.operator.training.attempt_end import succeed
from busbar.operator.training.lost_pods import is_lost, removals
from busbar.operator.training.status import count_usage, ended_at, in_phase, with_exit_messages
from busbar.operator.training.view import JobUpdate, JobView, attempt_pods
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Action, PostToPod
from busbar.operator.write.status import (
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
    to: GivesWayTo | None = None,
) -> JobUpdate:
    """Asks the job to save and stop. `to`: the service whose replica gets its place."""
    status = view.status
    grace = timedelta(seconds=view.job.spec.preemption.grace_period_seconds)
    fields: dict[str, object] = {
        "release": ReleaseStatus(
            reason=reason,
            message=clip(message),
            requested_at=view.now,
            deadline=view.now + grace,
            gives_way_to=to,
        )
    }
    if taken:
        fields["preemptions"] = (status.preemptions or 0) + 1
    if moved:
        fields["last_move_time"] = view.now
    if counts:
        fields["restarts"] = (status.restarts or 0) + 1
    new = count_usage(view, status.model_copy(update=fields), view.now)
    return JobUpdate(in_phase(view, new, TrainingPhase.PREEMPTING, reason, message))


def releasing(view: JobView) -> JobUpdate:
    """Continues a release: ask to save → answer or deadline → delete the pods → all gone → clear the admission."""
    status = view.status
    release, admission = status.release, status.admission
    assert release is not None
    assert admission is not None
    current = attempt_pods(view)
    alive = [p for p in view.pods if not p.ended]
    if not alive:
        if len(current) == admission.pods and all(p.phase == "Succeeded" for p in current.values()):
            return JobUpdate(succeed(view, current))  # it finished while it was asked to save
        return JobUpdate(_released(view, release, current))
    overdue = release.deadline is None or view.now >= release.deadline
    actions: list[Action] = []
    for pod in alive:
        if pod.deleting or is_lost(view, pod):
            continue
        waits = not overdue and pod.rank == 0 and pod.port and pod.phase == "Running" and not pod.gated
        if waits and pod.uid not in view.asked:
            assert release.deadline is not None
            seconds = seconds_until(release.deadline, view.now)
            actions.append(PostToPod(pod.key, pod.uid, CHECKPOINT_PATH, max(1.0, seconds)))
    # Rank 0 saves for the whole gang, so no pod is deleted before it has answered.
    if not actions and (overdue or _acknowledged(view, alive)):
        actions = [*removals(view, alive)]
    again = 1.0 if overdue or release.deadline is None else seconds_until(release.deadline, view.now) + 0.05
    stuck = stuck_pod(view, alive)
    waiting_status = (
        in_phase(view, status, TrainingPhase.PREEMPTING, Reason.POD_STUCK, stuck) if stuck else None
    )
    return JobUpdate(waiting_status, tuple(actions), again)


def _acknowledged(view: JobView, alive: list[Pod]) -> bool:
    """Whether the pods may be deleted now: rank 0 answered, or cannot be asked."""
    for pod in alive:
        if pod.deleting or is_lost(view, pod):
            continue
        if pod.rank == 0 and pod.port and pod.phase == "Running" and not pod.gated:
            return view.asked.get(pod.uid, False)
    return True


def _released(view: JobView, release: ReleaseStatus, current: dict[int, Pod]) -> TrainingJobStatus:
    ended = ended_at(current, view.now)
    status = count_usage(view, with_exit_messages(view, view.status, current), ended)
    fields: dict[str, object] = {"admission": None, "release": None, "pods": None}
    if release.gives_way_to is not None and status.admission is not None and status.start_time is not None:
        price = view.pool.spec.price_per_hour if view.pool is not None else 0.0
        asked = release.requested_at or ended
        lost = gave_way(status.lost_work, release.gives_way_to, status.admission, price, asked, ended)
        fields["lost_work"] = lost
    # The devices are for another job (or the gang did not start): this job must not take them again at once.
    hold_s, settings = view.settings.preempt_hold_s, view.settings
    if release.reason == Reason.GANG_INCOMPLETE:
        hold_s = backoff_s(status.restarts or 0, hold_s, max(hold_s, settings.backoff_limit_s))
    if release.reason in (Reason.PREEMPTED, Reason.GANG_INCOMPLETE):
        fields["retry_at"] = view.now + timedelta(seconds=hold_s)
    status = status.model_copy(update=fields)
    if view.suspended is not None:
        return in_phase(view, status, TrainingPhase.SUSPENDED, *view.suspended)
    return in_phase(view, status, TrainingPhase.QUEUED, release.reason, release.message)


def stuck_pod(view: JobView, alive: list[Pod]) -> str:
    """The message for a pod whose node does not confirm its end. Only a person can know that it is dead, and two
    attempts that write one output at the same time would corrupt it."""
    late = timedelta(seconds=view.settings.unschedulable_s)
    for pod in alive:
        if pod.deletes_at is not None and view.now - pod.deletes_at > late:
            where = f"node {pod.place}" if pod.place else "its node"
            return (
                f"Pod {pod.key.name} should have ended, and {where} does not confirm it; the job waits. If the node "
                f"is dead, delete it, or taint it node.kubernetes.io/out-of-service=:NoExecute."
            )
    return ""
