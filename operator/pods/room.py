"""How many more pods a namespace may have under its tenant's ``spec.limits.pods``, so that a gang begins whole or not.

Kubernetes' quota refuses one pod at a time, and would leave half a gang holding devices. So an admission is given only
where all its pods are left: the limit, less the pods that have not ended, less those that admitted jobs will still make.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from busbar.kube.informer import Key
from busbar.kube.types import Tenant, TrainingJob
from busbar.kube.types.training_status import TERMINAL_PHASES
from busbar.operator.watch.projections import Pod


@dataclass(frozen=True)
class PodRoom:
    """What is left of a namespace's limit of pods."""

    most: int
    left: int

    def lacking(self, pods: int) -> str:
        """Why a job of so many pods cannot begin, and what helps; empty where it can."""
        if pods <= self.left:
            return ""
        text = f"It needs {pods} pods, and {self.left} of the {self.most} are left that its tenant's limits.pods allows "
        if pods > self.most:
            return f"{text}in a namespace: ask for fewer pods, or ask an administrator of the platform for a higher limit."
        return f"{text}in a namespace: it waits until others have ended; ending some helps."


@dataclass
class Promised:
    """Admissions that are being written, so that two jobs of one round do not get the same pods."""

    pods: dict[Key, int] = field(default_factory=dict)  # by job


def pod_room(
    tenant: Tenant | None,
    job: Key,
    pods: Iterable[Pod],
    jobs: Iterable[TrainingJob],
    promised: Promised,
) -> PodRoom | None:
    """What is left in the job's namespace; None where nothing is limited."""
    limits = tenant.spec.limits if tenant is not None else None
    if limits is None or limits.pods is None:
        return None
    alive, made = 0, dict[tuple[str, int], int]()  # ended pods are not made again in their attempt
    for pod in pods:
        if pod.key.namespace == job.namespace:
            alive += not pod.ended
            made[pod.owner_uid, pod.attempt] = made.get((pod.owner_uid, pod.attempt), 0) + 1
    owed = sum(count for key, count in promised.pods.items() if key.namespace == job.namespace and key != job)
    for other in jobs:
        if (
            other.metadata.namespace != job.namespace
            or Key(job.namespace, other.metadata.name) in promised.pods
        ):
            continue
        status = other.status
        if status is None or status.admission is None or status.release or status.phase in TERMINAL_PHASES:
            continue
        owed += max(0, status.admission.pods - made.get((other.metadata.uid, status.attempt or 0), 0))
    return PodRoom(limits.pods, max(0, limits.pods - alive - owed))
