"""How many objects a Tenant may have, and what it has of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import DnsLabel, SpecModel, StatusModel
from busbar.kube.types.training_status import Amount, Count

QUOTA = "busbar-tenant-limits"
"""The ResourceQuota that the operator renders in each namespace."""
Most = Annotated[int, Field(ge=0, le=1_000_000)]


class Limits(SpecModel):
    """How many objects the tenant may have; what is absent is not limited.

    All but waitingJobs apply in each of the tenant's namespaces by itself: two namespaces may have twice as much. The
    operator renders them as the ResourceQuota busbar-tenant-limits.
    """

    training_jobs: Most | None = Field(
        default=None, description="TrainingJobs in each namespace, ended ones included."
    )
    model_services: Most | None = Field(default=None, description="ModelServices in each namespace.")
    waiting_jobs: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None,
        description=(
            "TrainingJobs of the whole tenant that are queued and not suspended: as long as status.waitingJobs, which "
            "may be some seconds old, is not below it, new ones are refused. trainingJobs bounds a burst."
        ),
    )
    pods: Most | None = Field(
        default=None,
        description=(
            "Pods in each namespace that have not ended, whoever made them. A job that needs more than are left waits, "
            "whole."
        ),
    )
    persistent_volume_claims: Most | None = Field(
        default=None, description="PersistentVolumeClaims in each namespace."
    )
    storage_gib: Most | None = Field(
        default=None,
        description="What the PersistentVolumeClaims of each namespace request together, in GiB.",
    )


class LimitUse(StatusModel):
    """What Kubernetes counts in one namespace against spec.limits; only what is limited is counted."""

    namespace: DnsLabel = Field(description="The namespace.")
    training_jobs: Count | None = Field(default=None, description="TrainingJobs.")
    model_services: Count | None = Field(default=None, description="ModelServices.")
    pods: Count | None = Field(default=None, description="Pods that have not ended.")
    persistent_volume_claims: Count | None = Field(default=None, description="PersistentVolumeClaims.")
    storage_gib: Amount | None = Field(default=None, description="Requested storage, in GiB.")


@dataclass(frozen=True)
class LimitRow:
    """One limit in one namespace, for people."""

    namespace: str  # empty: of the whole tenant
    what: str
    used: float | None  # None: not counted yet
    most: int


_COUNTED = (
    ("training_jobs", "TrainingJobs"),
    ("model_services", "ModelServices"),
    ("pods", "pods"),
    ("persistent_volume_claims", "claims"),
    ("storage_gib", "storage, GiB"),
)


def limit_rows(
    limits: Limits | None, namespaces: Iterable[str], used: Iterable[LimitUse], waiting_jobs: int | None
) -> list[LimitRow]:
    """Each limit with its use: that of the whole tenant first, then by namespace."""
    if limits is None:
        return []
    rows = []
    if limits.waiting_jobs is not None:
        rows.append(LimitRow("", "waiting jobs", waiting_jobs, limits.waiting_jobs))
    use_in = {use.namespace: use for use in used}
    for namespace in sorted(namespaces):
        use = use_in.get(namespace)
        for field, what in _COUNTED:
            most: int | None = getattr(limits, field)
            if most is not None:
                rows.append(LimitRow(namespace, what, getattr(use, field) if use is not None else None, most))
    return rows
