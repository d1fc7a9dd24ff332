"""Lost pods of a gang are replaced, where the others have the state of all in memory: they need not end.

That is where the job asks for `checkpoint.memory`, and no more pods are lost at once than there are parities. The others'
trainers wait for the new pods, and go on with them from the newest copy; see `workloads/training/gang_copies.py`.

    lost ──► made again on its node
      └────► its node takes none: the scheduler finds another (`substitute.py`) ──► made there
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from busbar.kube.contracts.workload import ExitCode
from busbar.kube.types import TrainingPhase
from busbar.kube.types.reasons import Reason
from busbar.kube.types.training_status import Admission, ReplacedPod
from busbar.operator.training.lost_pods import is_lost
from busbar.operator.training.status import count_usage, in_phase
from busbar.operator.training.view import JobUpdate, JobView, pod_name, replaced_times
from busbar.operator.watch.projections import Pod

REBUILT_WITHIN_S = 60.0
"""A pod that has taken another's place has its part of the state again after so long, from when on it can stand in for
others."""


def replace_lost(view: JobView, current: dict[int, Pod], admission: Admission) -> JobUpdate | None:
    """The update that has lost pods replaced; None: none are lost, or what they held is lost with them."""
    lost = [rank for rank in range(admission.pods) if _is_lost(view, current, admission, rank)]
    if not lost or admission.started_at is None or view.suspended is not None or view.is_stopped:
        return None
    memory = view.job.spec.checkpoint.memory
    parity = memory.parity_of(admission.pods) if memory is not None else 0
    missing = (rank for rank in range(admission.pods) if rank not in current)
    fresh = (rank for rank, pod in current.items() if _is_fresh(view, pod))
    if len({*lost, *missing, *fresh}) > parity:
        return None
    others = [pod for rank, pod in current.items() if rank not in lost]
    if any(pod.deleting or pod.phase == "Succeeded" for pod in others):
        return None
    failed = [current[rank] for rank in lost if rank in current and current[rank].phase == "Failed"]
    restarts = (view.status.restarts or 0) + len(failed)
    if not all(map(_may_come_back, failed)) or (failed and restarts > view.job.spec.retry_limit):
        return None
    elsewhere = {rank for rank in lost if admission.nodes[rank] in view.absent_nodes}
    times = replaced_times(admission)
    entries = {each.rank: each for each in admission.replaced or ()} | {
        rank: ReplacedPod(
            rank=rank, times=times.get(rank, 0) + 1, since=view.now, needs_node=rank in elsewhere or None
        )
        for rank in lost
    }
    replaced = admission.model_copy(update={"replaced": [entries[rank] for rank in sorted(entries)]})
    status = count_usage(
        view, view.status.model_copy(update={"admission": replaced, "restarts": restarts}), view.now
    )
    how = f": {failed[0].problem or _code(failed[0])}" if failed else ""
    if silent := sorted(rank for rank in lost if rank in current and is_lost(view, current[rank])):
        how = f": node {current[silent[0]].place} does not answer"
    where = " on another node" if elsewhere else ""
    text = (
        f"The pod of {named(lost)} is lost{how}. It is made again{where}, and gets its state from the memory of the "
        "others."
    )
    return JobUpdate(in_phase(view, status, TrainingPhase.STARTING, Reason.POD_REPLACED, text))


def _is_lost(view: JobView, current: dict[int, Pod], admission: Admission, rank: int) -> bool:
    """Whether its pod has failed, is given up with its node, or was there and is gone; the one that was made first was, if
    all have run."""
    if rank in current:
        return current[rank].phase == "Failed" or is_lost(view, current[rank])
    return not replaced_times(admission).get(rank) or pod_name(view, rank) in view.gone_pods


def _is_fresh(view: JobView, pod: Pod) -> bool:
    """Whether it has taken another's place, and may not have its part of the state yet."""
    since = pod.started_at
    return pod.replacement > 0 and (since is None or view.now - since < timedelta(seconds=REBUILT_WITHIN_S))


def _may_come_back(pod: Pod) -> bool:
    """Whether it failed for itself, and not because its node or a person stopped it, or the job cannot run."""
    ended = (ExitCode.DONE, ExitCode.INVALID, ExitCode.SAVED_AFTER_SIGTERM)
    return not pod.evicted and pod.exit is not None and pod.exit.code not in ended


def named(ranks: Sequence[int]) -> str:
    """`ranks` in a sentence."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _code(pod: Pod) -> str:
    return f"exit code {pod.exit.code}" if pod.exit is not None else "no exit code was reported"
