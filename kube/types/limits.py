"""How many objects a Tenant may have, and what it has of them."""

from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import DnsLabel, SpecModel, StatusModel
from busbar.kube.types.training_job import Amount, Count

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
