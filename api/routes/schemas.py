"""The shapes of REST's answers and requests, apart from our kinds (those are in `busbar.kube.types`)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from busbar.api.errors import ErrorBody
from busbar.api.identity import Role, Scope
from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile, Tenant, TrainingJob


class Answer(BaseModel):
    """Something the API says: camelCase on the wire."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, from_attributes=True
    )


class Ask(BaseModel):
    """Something the API is told: unknown fields are refused."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, extra="forbid"
    )


class TrainingJobList(Answer):
    """Training jobs, newest first."""

    items: list[TrainingJob]


class ModelServiceList(Answer):
    """Model services, newest first."""

    items: list[ModelService]


class PoolList(Answer):
    """Pools the caller may know, by name."""

    items: list[AcceleratorPool]


class ProfileList(Answer):
    """Speeds of workload classes: all for admins, those of one's own jobs otherwise."""

    items: list[PerformanceProfile]


class TenantList(Answer):
    """All tenants for admins, one's own otherwise."""

    items: list[Tenant]


class MembershipInfo(Answer):
    tenant: str
    role: str
    namespaces: list[str]


class Me(Answer):
    """Who the API takes the caller for."""

    subject: str
    groups: list[str]
    admin: bool
    source: Literal["token", "kubernetes", "oidc"]
    scopes: list[Scope]
    tenants: list[MembershipInfo]


class ChangeInfo(Answer):
    kind: str
    current: str
    needed: str


class PreviewInfo(Answer):
    """What the next scheduling round would do with the draft."""

    starts_now: bool
    possible: bool = Field(description="False: waiting will not help, something must be changed.")
    reason: str = Field(description="One sentence: why here, or exactly why not.")
    when: str
    code: str = Field(description="The scheduler's reason code when it waits; else empty.")
    pool: str
    accelerator: str
    mode: str
    pods: int
    accelerators: float
    nodes: list[str] = Field(description="For admins; else empty.")
    cost_per_hour: float | None = None
    finishes_in_seconds: float | None = None
    finishes_in_low_seconds: float | None = None
    finishes_in_high_seconds: float | None = None
    estimated_cost: float | None = None
    changes: list[ChangeInfo] = Field(description="Smallest changes that would let it start now.")
    start_p50_seconds: float | None = Field(
        default=None, description="Until it starts, if it waits: as likely sooner as later."
    )
    start_p90_seconds: float | None = Field(
        default=None, description="The same with nine chances in ten to be sooner."
    )
    end_p50_seconds: float | None = Field(
        default=None, description="Until it has ended, where its speed is known."
    )
    end_p90_seconds: float | None = None
    past_forecasts: int = Field(default=0, description="Earlier forecasts here whose moment has passed.")
    past_before_p50: float | None = Field(
        default=None, description="Share of them that started before the median told; 0.5 is perfect."
    )
    past_before_p90: float | None = Field(
        default=None, description="Share of them that started before the ninth decile told; 0.9 is perfect."
    )


class EventInfo(Answer):
    type: str
    reason: str
    message: str
    object: str
    count: int
    last_seen: str | None = None


class EventList(Answer):
    """Events of the object and its pods, newest first."""

    items: list[EventInfo]


class PodInfo(Answer):
    name: str
    rank: int
    attempt: int
    phase: str


class PodList(Answer):
    """Pods of the object, newest attempt first."""

    items: list[PodInfo]


class SamplePoint(Answer):
    at: datetime
    attempt: int
    step: int
    loss: float | None = None
    tokens_per_second: float | None = None
    ready_replicas: int | None = None


class SampleList(Answer):
    """Points of the object's curves in time order, thinned to about 500."""

    items: list[SamplePoint]


class ScaleTo(Ask):
    """How many replicas; null gives the count back to the autoscaler."""

    replicas: Annotated[int, Field(ge=0, le=1024)] | None


class NodeInfo(Answer):
    name: str
    pool: str
    accelerator: str
    ready: bool
    capacity: float = Field(description="Accelerators that jobs may hold.")
    allocated: float = Field(description="Accelerators that jobs hold.")


class NodeList(Answer):
    """Load per node of the pools the caller may know."""

    items: list[NodeInfo]


class ModelInfo(Answer):
    id: str
    namespace: str
    service: str
    tenant: str
    ready: bool
    phase: str
    replicas: int


class ModelList(Answer):
    """Models the caller may ask, and where."""

    items: list[ModelInfo]
    base_url: str = Field(description="Base URL of the OpenAI API.")


class InferenceUsage(Answer):
    group: str
    requests: int
    prompt_tokens: int
    completion_tokens: int


class ComputeUsage(Answer):
    group: str
    jobs: int
    accelerator_seconds: float
    work_units: float
    energy_joules: float
    cost: float
    lost_seconds: float


class Usage(Answer):
    """Sums over a time range. Compute is not summed by model, key or day."""

    by: str
    since: datetime
    until: datetime
    inference: list[InferenceUsage]
    compute: list[ComputeUsage]


class PastJob(Answer):
    """A job that was deleted, with the last totals of its status."""

    uid: str
    kind: str
    namespace: str
    name: str
    tenant: str
    requester: str
    phase: str
    reason: str
    message: str
    attempt: int
    preemptions: int
    step: int
    accelerator_seconds: float
    cost: float
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    deleted_at: datetime


class PastJobList(Answer):
    items: list[PastJob]


class TokenInfo(Answer):
    """A token without its text."""

    id: str
    subject: str
    description: str
    prefix: str
    role: Role
    scopes: list[Scope]
    tenant: str | None = None
    created_at: datetime
    created_by: str
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None


class TokenList(Answer):
    items: list[TokenInfo]


class TokenCreated(Answer):
    """The token's text, this once."""

    token: str
    info: TokenInfo


class TokenAsk(Ask):
    """A new token."""

    description: Annotated[str, Field(max_length=200)] = ""
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=2)] = Field(
        default_factory=lambda: [Scope.REST, Scope.INFERENCE]
    )
    role: Role = Role.USER
    subject: Annotated[str, Field(max_length=253)] | None = Field(
        default=None, description="For admins: somebody else's name."
    )
    tenant: Annotated[str, Field(max_length=253)] | None = Field(
        default=None,
        description="Tenant that inference counts for; default the only one you are a member of.",
    )
    expires_in_days: Annotated[float, Field(gt=0, le=3650)] | None = None


class AuditEntry(Answer):
    id: int
    at: datetime
    subject: str
    action: str
    kind: str
    namespace: str
    name: str
    outcome: str
    message: str
    source: str


class AuditPage(Answer):
    """Newest first; pass `next` as `before` for the following page."""

    items: list[AuditEntry]
    next: int | None = None


_STATUS = {
    400: "The request cannot be read.",
    401: "Who is asking is not known.",
    403: "The caller may look, but not do this.",
    404: "Absent, or none of the caller's business.",
    409: "The name is taken, or the object changed.",
    413: "The body is too large.",
    422: "A field is wrong; `error.field` says which.",
    429: "Too many requests; wait `Retry-After` seconds.",
    503: "Another part is away; wait `Retry-After` seconds.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for OpenAPI."""
    return {status: {"model": ErrorBody, "description": _STATUS[status]} for status in sorted(statuses)}
