"""The shapes of REST's answers and requests, apart from our kinds (those are in `busbar.kube.types`)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from busbar.api.access.identity import CallerRole, Scope
from busbar.api.access.token_rules import MAX_OVERLAP_HOURS, OVERLAP_HOURS
from busbar.api.errors import ErrorBody
from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile, Tenant, TrainingJob
from busbar.kube.types.inference import InferenceLimits
from busbar.kube.types.model_service import MAX_REPLICAS


class Answer(BaseModel):
    """Base of answers: camelCase."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, from_attributes=True
    )


class Ask(BaseModel):
    """Base of requests: camelCase, unknown fields are refused. Numbers are `strict`: pydantic would take true for 1, and texts."""

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
    """Pools that the caller may see, sorted by name."""

    items: list[AcceleratorPool]


class ProfileList(Answer):
    """Speeds of workload classes: all for admins, those of one's own jobs otherwise."""

    items: list[PerformanceProfile]


class TenantList(Answer):
    """All tenants for admins, one's own otherwise."""

    items: list[Tenant]


class PlaceInfo(Answer):
    """Accelerators of one pool that an object holds."""

    pool: str
    accelerator: str
    accelerators: float
    cost_per_hour: float = Field(description="At the pool's price.")


class RunningInfo(Answer):
    """An object that holds accelerators."""

    kind: str
    namespace: str
    name: str
    tenant: str
    phase: str
    places: list[PlaceInfo]
    cost_per_hour: float
    since: datetime | None = Field(description="A job: when this attempt was admitted.")
    percent: float | None = Field(description="A job: share of its steps done.")
    ends_at: datetime | None = Field(description="A job: its end at this speed, without interruption.")


class WaitingInfo(Answer):
    """An object that asks for accelerators and does not have all of them."""

    kind: str
    namespace: str
    name: str
    tenant: str
    since: datetime | None
    reason: str
    message: str
    start_p50: datetime | None = Field(description="Expected start, as likely earlier as later.")
    start_p90: datetime | None = Field(description="Nine times in ten it starts before.")


class FailedInfo(Answer):
    """A job that failed in the last 24 hours."""

    namespace: str
    name: str
    tenant: str
    at: datetime
    reason: str
    message: str


class HeldInfo(Answer):
    """What one tenant holds of one accelerator type."""

    accelerator: str
    held: float
    guaranteed: float | None


class HolderInfo(Answer):
    """A tenant that the caller may see, or all other tenants together, of which only amounts are given."""

    tenant: str = Field(description="Empty: all other tenants together.")
    title: str
    held: list[HeldInfo]
    running: int | None
    waiting: int | None
    cost_per_hour: float | None


class OverviewInfo(Answer):
    """What runs, what waits and why, who holds what, and what it costs per hour."""

    as_of: datetime
    running: list[RunningInfo] = Field(description="The most expensive first.")
    waiting: list[WaitingInfo] = Field(description="The longest wait first.")
    failed: list[FailedInfo] = Field(description="In the last 24 hours, newest first.")
    succeeded: int = Field(description="Jobs that succeeded in the last 24 hours.")
    holders: list[HolderInfo]
    capacity: float = Field(description="Accelerators of the pools the caller may use.")
    allocated: float = Field(description="Of these, held by any tenant.")
    cost_per_hour: float = Field(description="Of everything in `running`.")


class MembershipInfo(Answer):
    tenant: str
    role: str
    namespaces: list[str]


class Me(Answer):
    """The authenticated caller."""

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
    replicas: int = Field(
        default=0,
        description="That a service begins with; 0 for a job. Where some start and others wait, startsNow is false, and pool, "
        "pods, costs and watts are of those that start.",
    )
    replicas_starting: int = 0
    pods: int
    accelerators: float
    nodes: list[str] = Field(description="For admins; else empty.")
    cost_per_hour: float | None = None
    finishes_in_seconds: float | None = None
    finishes_in_low_seconds: float | None = None
    finishes_in_high_seconds: float | None = None
    estimated_cost: float | None = None
    accelerator_hours: float | None = Field(default=None, description="Until it has finished.")
    watts: float | None = Field(
        default=None, description="What its accelerators draw together; without the hosts."
    )
    kilowatt_hours: float | None = Field(
        default=None, description="What its accelerators use until it has finished."
    )
    kilowatt_hours_low: float | None = None
    kilowatt_hours_high: float | None = None
    power_cap_percent: int | None = Field(
        default=None,
        description="It would start with its boards limited to this part of their highest limit, as its power domains "
        "carry no more; null: without a limit.",
    )
    power_cap_speed: float | None = Field(
        default=None, description="Its speed then, as a part of that without the limit."
    )
    changes: list[ChangeInfo] = Field(description="Smallest changes that would let it start now.")
    deadline: str = Field(
        default="",
        description="Whether its deadline would be promised, and if not what that would break; empty without one.",
    )
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


class PlannedPoolInfo(Answer):
    """Replicas in one pool."""

    pool: str
    accelerator: str
    replicas: int = Field(description="In the cheapest mix.")
    requests_per_second: float = Field(description="What one replica sustains within the target.")
    cost_per_hour: float | None = Field(default=None, description="Of one; null: not every pool has a price.")
    alone: int | None = Field(
        default=None, description="Replicas that carry the load without other pools; null: it cannot."
    )


class ServicePlanInfo(Answer):
    """The cheapest replicas for a load, or why there are none."""

    possible: bool = Field(description="Whether they carry the whole load within the target.")
    reason: str
    rate: float
    ttft_milliseconds: float | None = None
    tpot_milliseconds: float | None = None
    percentile: float | None = None
    pools: list[PlannedPoolInfo] = Field(description="Those with a measured speed.")
    cost_per_hour: float | None = Field(default=None, description="Of all; null: not every pool has a price.")
    prompt_tokens: float | None = Field(default=None, description="Mean of the service's requests now.")
    output_tokens: float | None = None
    notes: list[str] = Field(description="What is not known or not looked at.")


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

    replicas: Annotated[int, Field(strict=True, ge=0, le=MAX_REPLICAS)] | None


class NodeInfo(Answer):
    name: str
    pool: str
    accelerator: str
    ready: bool
    capacity: float = Field(description="Accelerators that jobs may hold.")
    allocated: float = Field(description="Accelerators that jobs hold.")


class NodeList(Answer):
    """Load per node of the pools that the caller may see."""

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
    """Models that the caller may use, and the address to use them at."""

    items: list[ModelInfo]
    base_url: str = Field(description="Base URL of the OpenAI API.")


class InferenceUsage(Answer):
    group: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = Field(description="Of the prompt tokens, those that a prefix cache had.")
    cost: float = Field(description="At the services' spec.price when the requests were accepted.")


class ComputeUsage(Answer):
    group: str
    jobs: int
    accelerator_seconds: float
    work_units: float
    energy_joules: float
    cost: float
    lost_seconds: float
    caused_seconds: float = Field(
        description="Accelerator-seconds that training lost because it gave way to replicas of these services."
    )
    caused_cost: float = Field(description="The same at the pools' prices.")


class UsageTotals(Answer):
    """Sums over a time range. Compute is not summed by model, key or day."""

    by: str
    since: datetime
    until: datetime
    inference: list[InferenceUsage]
    compute: list[ComputeUsage]


class UsageLine(Answer):
    """One line of an export; texts that it is not summed by are empty."""

    tenant: str
    namespace: str
    name: str
    user: str
    objects: int
    accelerator_hours: float
    work_units: float
    kilowatt_hours: float | None = Field(description="Null: none was measured.")
    cost: float = Field(description="At the pools' prices.")
    lost_hours: float = Field(description="Hours of work that were done twice.")
    caused_hours: float = Field(
        description="Accelerator-hours that training lost because it gave way to replicas of these services."
    )
    caused_cost: float = Field(description="The same at the pools' prices.")
    requests: int
    prompt_tokens: int
    completion_tokens: int
    joules_per_token: float | None = Field(description="Of services whose energy was measured.")


class UsageExport(Answer):
    """Use of a range of time, as an export has it."""

    by: str
    since: datetime
    until: datetime
    items: list[UsageLine]


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
    role: CallerRole
    scopes: list[Scope]
    tenant: str | None = None
    created_at: datetime
    created_by: str
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None
    limits: InferenceLimits | None = None


class TokenPage(Answer):
    """Newest first; pass `next` as `before` for the following page."""

    items: list[TokenInfo]
    next: str | None = None


class RevokeAsk(Ask):
    """Whose live tokens to revoke; exactly one of the two."""

    subject: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        default=None, description="All of this person; one's own, or for admins anybody's."
    )
    everyone: Literal[True] | None = Field(default=None, description="For admins: all of everybody.")

    @model_validator(mode="after")
    def _exactly_one(self) -> RevokeAsk:
        if (self.subject is None) == (self.everyone is None):
            raise ValueError("name a subject, or say everyone: true, and not both")
        return self


class Revoked(Answer):
    """What was revoked. The token and the session that the request came with stay."""

    revoked: int = Field(description="Tokens that were live.")


class DatabaseState(Answer):
    """Whether a backup can be restored into this database."""

    revision: str = Field(description="Schema revision; a backup must have the same.")
    version: str = Field(description="Version of this Busbar.")
    unused: bool = Field(description="Whether a restore would be accepted from this caller.")
    found: list[str] = Field(description="What stands in the way.")


class DatabaseRestored(Answer):
    """What a restore wrote."""

    rows: int
    made_at: datetime = Field(description="When the backup was made.")
    made_by: str = Field(description="The version that made it.")


class TokenCreated(Answer):
    """The token's text, this once."""

    token: str
    info: TokenInfo


class RotateAsk(Ask):
    """How long the former token stays valid beside the one that replaces it."""

    overlap_hours: Annotated[float, Field(strict=True, ge=0, le=MAX_OVERLAP_HOURS)] = Field(
        default=OVERLAP_HOURS, description="0: the former token ends at once."
    )


class TokenRotated(TokenCreated):
    """The new token, and the one that it replaces."""

    former: TokenInfo = Field(description="Its `expiresAt` is the end of the overlap.")


class TokenAsk(Ask):
    """A new token."""

    description: Annotated[str, Field(max_length=200)] = ""
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=2)] = Field(
        default_factory=lambda: [Scope.REST, Scope.INFERENCE]
    )
    role: CallerRole = CallerRole.USER
    subject: Annotated[str, Field(max_length=253)] | None = Field(
        default=None, description="For admins: somebody else's name."
    )
    tenant: Annotated[str, Field(max_length=253)] | None = Field(
        default=None,
        description="Tenant that inference counts for; default the only one you are a member of.",
    )
    expires_in_days: Annotated[float, Field(strict=True, gt=0, le=3650)] | None = Field(
        default=None, description="Default and longest are settings of the API (90 and 365 days)."
    )
    limits: InferenceLimits | None = Field(
        default=None,
        description="What inference with this token may use; the tenant's own limits apply as well.",
    )


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


_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for OpenAPI. Where a bearer may be wrong, too many may be."""
    wanted = {*statuses, 429} if 401 in statuses else {*statuses}
    found: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": _STATUS[status]} for status in sorted(wanted)
    }
    for status in wanted & {429, 503}:
        found[status]["headers"] = _RETRY_AFTER
    return found
