"""Lost work of training: what was computed twice, and what of it is charged to the services that took its place.

TrainingJob.status.lostWork.charged[]    by service: what attempts lost that gave way to its replicas
             │  added up once per job
ModelService.status.lostWorkCaused       all jobs, also deleted ones
             │  added up once per service
Tenant.status.lostWork                   caused by its services, and lost by its jobs to services
"""

from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import DnsLabel, ShortText, StatusModel

MOST_CHARGED = 64
"""Services in the status of a job, and tenants in that of a service."""
MOST_COUNTED = 512
_Count = Annotated[int, Field(ge=0)]
_Amount = Annotated[float, Field(ge=0)]


class Loss(StatusModel):
    """What was lost in all; it never decreases."""

    times: _Count = Field(default=0, description="How often an attempt gave way.")
    accelerator_seconds: _Amount = Field(
        default=0.0, description="Repeated steps, and saving the state, times the accelerators held."
    )
    cost: _Amount = Field(default=0.0, description="The same at the price of the pool.")


class ChargedLoss(Loss):
    """What attempts lost that gave way to replicas of one service."""

    uid: ShortText = Field(description="Of the ModelService.")
    namespace: DnsLabel = Field(description="Its namespace.")
    name: ShortText = Field(description="Its name.")
    tenant: DnsLabel = Field(description="Its tenant, which is charged.")


class GivesWayTo(StatusModel):
    """The service whose replica gets the place."""

    uid: ShortText = Field(description="Of the ModelService.")
    namespace: DnsLabel = Field(description="Its namespace.")
    name: ShortText = Field(description="Its name.")
    tenant: DnsLabel = Field(description="Its tenant.")


class UnsettledLoss(GivesWayTo):
    """An attempt gave way, and nobody knows yet how many of its steps are repeated."""

    accelerators: _Amount = Field(description="Accelerators that it held.")
    price_per_hour: _Amount = Field(default=0.0, description="Of one of them.")
    saving_seconds: _Amount = Field(default=0.0, description="From the request to its last pod's end.")
    ran_seconds: _Amount = Field(
        default=0.0,
        description="It held them for so long before, and can have lost no more; 0: its image is not known to be the "
        "platform's, and what it says of its steps is charged to nobody.",
    )


class LostWork(StatusModel):
    """Work repeated because of preemptions and failures."""

    steps: _Count = Field(default=0, description="Steps lost in all.")
    seconds: _Amount = Field(default=0.0, description="Seconds lost in all.")
    attempt: _Count | None = Field(default=None, description="The last attempt that is counted.")
    attempt_steps: _Count | None = Field(
        default=None, description="Steps lost by this attempt; more are added when its trainer crashes."
    )
    charged: (
        Annotated[
            list[ChargedLoss],
            Field(
                max_length=MOST_CHARGED,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["uid"]},
            ),
        ]
        | None
    ) = Field(default=None, description="What was lost to services, by service.")
    unsettled: UnsettledLoss | None = Field(
        default=None,
        description="The last attempt gave way to a service, and the next one has not resumed yet.",
    )


class TenantLoss(Loss):
    """What jobs of one tenant lost."""

    tenant: DnsLabel = Field(description="The tenant of the jobs.")


class CountedLoss(Loss):
    """What is counted already of one object."""

    uid: ShortText = Field(description="The object.")


Counted = Annotated[
    list[CountedLoss],
    Field(
        max_length=MOST_COUNTED,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["uid"]},
    ),
]


class LostWorkCaused(Loss):
    """What training lost that gave way to the replicas of a service."""

    tenants: (
        Annotated[
            list[TenantLoss],
            Field(
                max_length=MOST_CHARGED,
                json_schema_extra={
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["tenant"],
                },
            ),
        ]
        | None
    ) = Field(default=None, description="The same by the tenant of the jobs.")
    counted: Counted | None = Field(default=None, description="Of it, of jobs that still exist.")


class TenantLostWork(StatusModel):
    """Work that training lost because replicas of services took its place."""

    caused: Loss = Field(default_factory=Loss, description="By services of the tenant; it is charged for it.")
    suffered: Loss = Field(
        default_factory=Loss, description="By jobs of the tenant; it is not charged for it."
    )
    counted_caused: Counted | None = Field(
        default=None, description="Of caused, of services that still exist."
    )
    counted_suffered: Counted | None = Field(
        default=None, description="Of suffered, of services that still exist."
    )
