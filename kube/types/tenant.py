"""Tenant: a group of people, their namespaces, their share and their budget."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from busbar.kube.types.budget import Budget, BudgetUse
from busbar.kube.types.inference import InferenceLimits, InferenceUse
from busbar.kube.types.limits import Limits, LimitUse
from busbar.kube.types.lost_work import TenantLostWork
from busbar.kube.types.meta import (
    AGE,
    READY_REASON,
    Conditions,
    DnsLabel,
    KindInfo,
    PrinterColumn,
    Resource,
    SpecModel,
    StatusModel,
    short_name_rule,
)
from busbar.kube.types.rules import Rule
from busbar.kube.types.training_status import Amount, Count

Share = Annotated[float, Field(ge=0, le=1_000_000)]
MOST_USERS = 128
"""Upper limit on users in a tenant's status."""


class SubjectKind(StrEnum):
    USER = "User"
    GROUP = "Group"
    SERVICE_ACCOUNT = "ServiceAccount"


class Role(StrEnum):
    ADMIN = "admin"
    MEMBER = "member"
    VIEWER = "viewer"


class OnDelete(StrEnum):
    REFUSE = "refuse"
    STOP = "stop"


class Subject(SpecModel):
    """A user, a group, or a service account."""

    rules = (
        Rule(
            cel="(self.kind == 'ServiceAccount') == has(self.namespace)",
            message="a ServiceAccount needs its namespace, and nothing else has one",
            holds=lambda subject: (
                (subject.kind is SubjectKind.SERVICE_ACCOUNT) == (subject.namespace is not None)
            ),
        ),
    )

    kind: SubjectKind = Field(description="User, Group or ServiceAccount.")
    name: Annotated[str, Field(pattern=r"^[^\s]([^\n]*[^\s])?$", min_length=1, max_length=253)] = Field(
        description="Its user or group name at the API server."
    )
    namespace: DnsLabel | None = Field(default=None, description="Namespace of a ServiceAccount.")


class Member(SpecModel):
    """One subject and its role. The operator renders RoleBindings from it."""

    subject: Subject = Field(description="Who.")
    role: Role = Field(description="admin, member or viewer.")
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0,
        description="Of a User: weight of its fair share within the tenant.",
    )


class Quota(SpecModel):
    """The tenant's share of one accelerator type, in accelerators."""

    rules = (
        Rule(
            cel="!has(self.ceiling) || self.guaranteed <= self.ceiling",
            message="guaranteed must not be greater than ceiling",
            holds=lambda quota: quota.ceiling is None or quota.guaranteed <= quota.ceiling,
        ),
    )

    accelerator: Annotated[
        str, Field(pattern=r"^([*]|[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)$", max_length=63)
    ] = Field(description="Accelerator type, or * for all that have no entry.")
    guaranteed: Share = Field(
        default=0.0, description="Always available: lent out while idle, reclaimed on demand."
    )
    borrowable: Share | None = Field(
        default=None, description="Largest allocation beyond the guaranteed share; absent: no limit."
    )
    ceiling: Share | None = Field(default=None, description="Largest total allocation; absent: no limit.")


class TenantSpec(SpecModel):
    """The tenant's members, namespaces, shares and budgets."""

    rules = (
        Rule(
            cel="!has(self.namespaces) || self.namespaces.all(n, !n.startsWith('kube-'))",
            message="namespaces of Kubernetes itself (kube-*) cannot belong to a tenant",
            field_path=".namespaces",
            holds=lambda spec: not any(name.startswith("kube-") for name in spec.namespaces or ()),
        ),
        Rule(
            cel="!has(self.namespaces) || !('default' in self.namespaces)",
            message="the namespace default cannot belong to a tenant: events about all tenants and pools are kept there",
            field_path=".namespaces",
            holds=lambda spec: "default" not in (spec.namespaces or ()),
        ),
    )

    display_name: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None, description="Name for people; default metadata.name."
    )
    organisation: Annotated[str, Field(max_length=128)] | None = Field(
        default=None, description="Parent organisation."
    )
    namespaces: (
        Annotated[list[DnsLabel], Field(max_length=128, json_schema_extra={"x-kubernetes-list-type": "set"})]
        | None
    ) = Field(default=None, description="The tenant's namespaces; each belongs to one tenant only.")
    members: Annotated[list[Member], Field(max_length=512)] | None = Field(
        default=None, description="People, groups and service accounts, with their roles."
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0,
        description="Weight of the tenant's share of the capacity that is not guaranteed to anybody.",
    )
    quota: (
        Annotated[
            list[Quota],
            Field(
                max_length=64,
                json_schema_extra={
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["accelerator"],
                },
            ),
        ]
        | None
    ) = Field(default=None, description="Guaranteed, borrowable and ceiling share per accelerator type.")
    priority_ceiling: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=1000, description="Higher priorities of the tenant's jobs count as this one."
    )
    budgets: (
        Annotated[
            list[Budget],
            Field(
                max_length=3,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["period"]},
            ),
        ]
        | None
    ) = Field(default=None, description="Limits per period; what is used of them is in the status.")
    inference: InferenceLimits | None = Field(
        default=None,
        description="What all keys of the tenant together may use of served models, also of other tenants' services.",
    )
    limits: Limits | None = Field(
        default=None, description="How many objects the tenant may have; absent: no limits."
    )
    on_delete: OnDelete = Field(
        default=OnDelete.REFUSE,
        description=(
            "What happens when the tenant is deleted, or a namespace is left out of it, while its work runs there. "
            "refuse: the change is refused. stop: its services drain, and its jobs save their state and are suspended."
        ),
    )


class AcceleratorCount(StatusModel):
    """A number of accelerators of one type."""

    accelerator: Annotated[str, Field(max_length=63)] = Field(description="Accelerator type.")
    count: Amount = Field(description="How many.")


ByAccelerator = Annotated[
    list[AcceleratorCount],
    Field(
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["accelerator"]},
    ),
]


class TenantUsage(StatusModel):
    """Totals of all jobs and services, also of deleted ones; they never decrease."""

    accelerator_seconds: Amount = Field(default=0.0, description="Accelerator-seconds of all types.")
    work_units: Amount = Field(default=0.0, description="In exchange-rate units.")
    energy_joules: Amount = Field(default=0.0, description="Energy, if it was measured.")
    cost: Amount = Field(default=0.0, description="At the pools' prices.")


class DecayedUsage(StatusModel):
    """Past use with a half-life, in work units, as fair share counts it."""

    work: Amount = Field(default=0.0, description="Work units, decayed to asOf.")
    rate: Amount = Field(default=0.0, description="Work units per second in use at asOf.")
    as_of: datetime | None = Field(default=None, description="Time of the value.")


class UserUse(StatusModel):
    """Past use of one user with a half-life, in work units, as of decayed.asOf."""

    name: Annotated[str, Field(max_length=253)] = Field(
        description="The requester; empty for objects without one."
    )
    work: Amount = Field(default=0.0, description="Work units, decayed to decayed.asOf.")
    rate: Amount = Field(default=0.0, description="Work units per second in use at that time.")


class TenantStatus(StatusModel):
    """The tenant's allocation and use; only the operator writes it."""

    observed_generation: Count | None = Field(default=None, description="The metadata.generation acted upon.")
    conditions: Conditions | None = Field(default=None, description="Observations in the standard form.")
    allocated: ByAccelerator | None = Field(default=None, description="Accelerators allocated now, by type.")
    borrowed: ByAccelerator | None = Field(default=None, description="Of these, beyond the guaranteed share.")
    lent: ByAccelerator | None = Field(
        default=None, description="Guaranteed accelerators that are lent to others."
    )
    held: Amount | None = Field(default=None, description="Accelerators allocated now, of all types.")
    usage: TenantUsage | None = Field(default=None, description="Totals.")
    lost_work: TenantLostWork | None = Field(
        default=None, description="Work that training lost because replicas of services took its place."
    )
    decayed: DecayedUsage | None = Field(default=None, description="Past use as fair share counts it.")
    users: (
        Annotated[
            list[UserUse],
            Field(
                max_length=MOST_USERS,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = Field(
        default=None, description="The same by user: those with an allocation, then those with the most use."
    )
    budgets: (
        Annotated[
            list[BudgetUse],
            Field(
                max_length=3,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["period"]},
            ),
        ]
        | None
    ) = Field(default=None, description="Use in the current periods.")
    inference: InferenceUse | None = Field(
        default=None,
        description="Use of spec.inference; absent without it, or as long as the gateway has not told.",
    )
    running: Count | None = Field(default=None, description="Jobs and replicas that run.")
    waiting: Count | None = Field(default=None, description="Jobs and replicas that wait.")
    waiting_jobs: Count | None = Field(
        default=None, description="TrainingJobs that wait, counted where spec.limits.waitingJobs is set."
    )
    limit_use: (
        Annotated[
            list[LimitUse],
            Field(
                max_length=128,
                json_schema_extra={
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["namespace"],
                },
            ),
        ]
        | None
    ) = Field(default=None, description="Use of spec.limits by namespace.")
    running_in: Annotated[list[DnsLabel], Field(max_length=128)] | None = Field(
        default=None, description="Namespaces in which something of the tenant runs."
    )
    last_updated: datetime | None = Field(default=None, description="When this was written.")


class Tenant(Resource):
    """A group of people with their namespaces, their share of the accelerators and their budget."""

    rules = (short_name_rule(40, "a label and RoleBindings are"),)
    info: ClassVar[KindInfo] = KindInfo(
        plural="tenants",
        singular="tenant",
        short_names=["bbtenant"],
        namespaced=False,
        columns=[
            PrinterColumn(
                name="Weight", type="number", json_path=".spec.weight", description="Relative share."
            ),
            PrinterColumn(
                name="Held", type="number", json_path=".status.held", description="Accelerators held."
            ),
            PrinterColumn(
                name="Running", type="integer", json_path=".status.running", description="Jobs that run."
            ),
            PrinterColumn(
                name="Waiting", type="integer", json_path=".status.waiting", description="Jobs that wait."
            ),
            READY_REASON,
            AGE,
        ],
    )

    kind: Literal["Tenant"] = "Tenant"
    spec: TenantSpec = Field(description="The tenant's members, namespaces, shares and budgets.")
    status: TenantStatus | None = Field(default=None, description="Its allocation and use.")
