"""What Busbar says of a ModelService: its replicas, their measured speed, and how their number was decided."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from busbar.kube.types.lost_work import LostWorkCaused
from busbar.kube.types.meta import CamelReason, Conditions, DnsLabel, Sentence, ShortText, StatusModel
from busbar.kube.types.performance_profile import StepModel
from busbar.kube.types.training_status import Amount, Count, Usage

MOST_MEASURED = 16
MOST_DECISIONS = 50
MOST_DEPARTURES = 10
MOST_CRASHES = 10
MOST_TENANTS = 257
"""In a status: those of spec.access and the owner's."""
Share = Annotated[float, Field(ge=0, le=1)]


class ServicePhase(StrEnum):
    PENDING = "Pending"
    QUEUED = "Queued"
    STARTING = "Starting"
    READY = "Ready"
    IDLE = "Idle"
    DRAINING = "Draining"
    SUSPENDED = "Suspended"
    FAILED = "Failed"


class PoolReplicas(StatusModel):
    """Replicas in one pool."""

    pool: ShortText = Field(description="AcceleratorPool.")
    replicas: Count = Field(description="Replicas there.")
    ready: Count | None = Field(default=None, description="Of these, how many take requests.")
    starting: Count | None = Field(
        default=None, description="Of these, how many start or wake up; absent for none."
    )
    sleeping: Count | None = Field(
        default=None, description="Of these, how many sleep: any job that waits may take their place."
    )
    desired: Count | None = Field(
        default=None,
        description="Replicas wanted there, where the latency target or an external target decides.",
    )
    accelerator: ShortText | None = Field(default=None, description="Accelerator type of the pool.")
    cost_per_hour: Amount | None = Field(default=None, description="Price of one replica there.")
    watts: Amount | None = Field(
        default=None,
        description="What all replicas there draw together, the mean of about a minute, where it is measured.",
    )
    start_seconds: Amount | None = Field(
        default=None, description="From a replica's creation until it took requests, at its last start."
    )
    requests_per_second: Amount | None = Field(
        default=None, description="What one replica sustains within the latency target, with today's sizes."
    )
    mode: ShortText | None = Field(
        default=None, description="Engine mode of replicas there, where it is chosen by their memory."
    )
    predicted: bool | None = Field(
        default=None,
        description="True: no replica has measured its speed there; it is predicted by other types or modes.",
    )
    power_cap_percent: Annotated[int, Field(ge=1, le=99)] | None = Field(
        default=None,
        description="What the boards of each replica there may draw at most, per cent of their highest limit, where a power domain "
        "binds; absent: no cap.",
    )


class TenantRequests(StatusModel):
    """What one tenant asks of a shared service, as gateway and replicas counted it at the last write of the status."""

    name: DnsLabel = Field(description="The Tenant.")
    waiting: Count = Field(default=0, description="Requests that wait for a replica.")
    running: Count = Field(default=0, description="Requests at the replicas.")
    kv_blocks: Count | None = Field(
        default=None,
        description="KV blocks that its running requests hold, of all replicas; absent without shares of the KV cache.",
    )
    kv_blocks_guaranteed: Count | None = Field(
        default=None, description="KV blocks that it always gets, of all replicas."
    )
    kv_blocks_most: Count | None = Field(
        default=None, description="KV blocks that it may hold at most, of all replicas."
    )


class AdapterStatus(StatusModel):
    """What the replicas of the builtin engine say of an adapter."""

    name: ShortText = Field(description="Its name in spec.adapters.")
    replicas: Count = Field(description="Replicas that serve it.")
    message: Sentence | None = Field(default=None, description="Why a replica refuses it.")


class KvCacheStatus(StatusModel):
    """KV blocks of all replicas that take requests."""

    blocks: Count = Field(description="Blocks that they have.")
    held: Count = Field(
        description="Blocks that running requests hold; the others are free, or kept for prompts that begin alike."
    )


class MeasuredReplica(StatusModel):
    """Measurements of the replicas with one kind of placement, as reported by the busiest of them."""

    workload_class: ShortText = Field(description="Of the model as it is served; profiles have its speeds.")
    accelerator: ShortText = Field(description="Accelerator type.")
    accelerators: Count = Field(description="Accelerators of one replica.")
    mode: ShortText = Field(default="resident", description="Engine mode.")
    tokens_per_second: Amount | None = Field(default=None, description="Speed of decoding.")
    prefill_tokens_per_second: Amount | None = Field(default=None, description="Speed of processing prompts.")
    memory_gib: Amount | None = Field(default=None, description="Weights and KV cache.")
    kv_tokens: Count | None = Field(default=None, description="Tokens of context that fit into the KV cache.")
    step_model: StepModel = Field(description="Seconds of one step.")
    verified: bool = Field(
        default=False,
        description="It ran the platform's image under an accepted digest: its speeds are shared with other services.",
    )
    limited: bool = Field(
        default=False,
        description="Power limits held its boards while it measured: its speeds are this service's alone.",
    )


class ScalingCause(StrEnum):
    """What changed the desired replicas."""

    FORECAST = "Forecast"
    PANIC = "Panic"
    IDLE = "Idle"
    SWITCH = "Switch"
    IN_FLIGHT = "InFlight"
    EXTERNAL = "External"
    WOKEN = "Woken"
    NO_ROOM = "NoRoom"
    BOUNDS = "Bounds"
    BUDGET = "Budget"
    QUOTA = "Quota"
    POWER = "Power"
    OFF = "Off"


ByPool = Annotated[dict[str, Count], Field(max_length=64)]


class ScalingDecision(StatusModel):
    """One change of the desired replicas, or a limit that kept them from one."""

    time: datetime = Field(description="When.")
    previous: Count = Field(description="Replicas desired before.")
    desired: Count = Field(description="Replicas desired after.")
    previous_pools: ByPool | None = Field(
        default=None, description="Replicas desired before, by AcceleratorPool, where pools were chosen."
    )
    desired_pools: ByPool | None = Field(
        default=None, description="Replicas desired after, by AcceleratorPool, where pools are chosen."
    )
    cause: ScalingCause | None = Field(default=None, description="Why, as one stable word.")
    requests_per_second: Amount | None = Field(default=None, description="The load that they are for.")
    capacity_per_second: Amount | None = Field(
        default=None, description="What the replicas that were ready sustained within the latency target."
    )
    reason: Sentence = Field(default="", description="Why.")


class Departure(StatusModel):
    """A replica that has left while other replicas went on with its streams."""

    time: datetime = Field(description="When its last request had left.")
    replica: ShortText = Field(description="Its pod.")
    uid: ShortText = Field(description="UID of the pod.")
    requests: Count = Field(description="Requests that were there when it began to drain.")
    copied: Count = Field(description="Streams that others took with their keys and values.")
    recomputed: Count = Field(description="Streams that others went on with by computing their tokens again.")


class ServerCrash(StatusModel):
    """A crash of a replica's server, which was started again while its container went on."""

    time: datetime = Field(description="When it crashed, as the next server says.")
    replica: ShortText = Field(description="Its pod.")
    uid: ShortText = Field(description="UID of the pod.")
    restarts: Count = Field(
        description="Times that servers were started again in this container, with this one."
    )
    cause: Sentence = Field(description="What ended the server.")


class ScaledBy(StrEnum):
    """The rule that decides the number of replicas."""

    PROMISE = "Promise"
    IN_FLIGHT = "InFlight"
    EXTERNAL = "External"


class ServiceLevelStatus(StatusModel):
    """How well the latency target is kept, and whether it decides the number of replicas."""

    scaled_by: ScaledBy = Field(description="What decides the number of replicas.")
    message: Sentence | None = Field(
        default=None, description="Why the latency target does not, or not alone."
    )
    attainment_recent: Share | None = Field(
        default=None, description="Answers within the target over all, of the last five minutes."
    )
    attainment_hour: Share | None = Field(default=None, description="The same of the last hour.")
    requests_recent: Count | None = Field(default=None, description="Requests in the last five minutes.")
    requests_hour: Count | None = Field(default=None, description="Requests in the last hour.")
    attainment_day: Share | None = Field(
        default=None, description="Answers within the target over all, of the last 24 hours."
    )
    requests_day: Count | None = Field(default=None, description="Requests in the last 24 hours.")
    ttft_milliseconds: Amount | None = Field(
        default=None,
        description="The time to the first token that spec.slo.percentile of the last day's streams did not exceed, within "
        "10 %.",
    )
    tpot_milliseconds: Amount | None = Field(
        default=None, description="The same of the mean time of each further token."
    )


class DemandForecastStatus(StatusModel):
    """Requests per second, now and when a replica asked for now would be ready."""

    now: Amount = Field(description="Of the last ten seconds.")
    at_ready: Amount = Field(description="Expected when a replica asked for now would be ready.")
    p90: Amount = Field(description="The same at the 90 % quantile of the forecast's past errors.")
    ready_in_seconds: Amount = Field(description="Until a replica asked for now would be ready.")
    method: ShortText | None = Field(default=None, description="level, trend or day: which forecast is used.")
    inside: Share | None = Field(
        default=None, description="Share of past forecasts whose p90 the load did not exceed."
    )
    capacity: Amount | None = Field(
        default=None, description="What the ready replicas sustain within the latency target."
    )


class ModelServiceStatus(StatusModel):
    """Busbar's observations and decisions; only the operator writes it."""

    observed_generation: Count | None = Field(default=None, description="The metadata.generation acted upon.")
    phase: ServicePhase | None = Field(default=None, description="One word for the state of the service.")
    reason: CamelReason | None = Field(default=None, description="A stable word that says why.")
    message: Sentence | None = Field(default=None, description="One sentence that says why.")
    conditions: Conditions | None = Field(default=None, description="Observations in the standard form.")
    replicas: Count | None = Field(default=None, description="Replicas that exist.")
    ready_replicas: Count | None = Field(default=None, description="Replicas that take requests.")
    desired_replicas: Count | None = Field(default=None, description="Replicas wanted now.")
    sleeping_replicas: Count | None = Field(
        default=None, description="Of those that exist, how many sleep; absent for none."
    )
    selector: ShortText | None = Field(
        default=None, description="Label selector of the replicas, for autoscalers."
    )
    url: ShortText | None = Field(default=None, description="Base URL of the OpenAI API.")
    model_id: ShortText | None = Field(default=None, description="The name clients use.")
    pools: (
        Annotated[
            list[PoolReplicas],
            Field(
                max_length=64,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["pool"]},
            ),
        ]
        | None
    ) = Field(default=None, description="Replicas per pool.")
    measured: Annotated[list[MeasuredReplica], Field(max_length=MOST_MEASURED)] | None = Field(
        default=None, description="Measurements that the replicas report."
    )
    adapters: (
        Annotated[
            list[AdapterStatus],
            Field(
                max_length=64,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = Field(default=None, description="The adapters, as the replicas report them.")
    tenants: (
        Annotated[
            list[TenantRequests],
            Field(
                max_length=MOST_TENANTS,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = Field(default=None, description="Requests by tenant; absent where the service is not shared.")
    slo: ServiceLevelStatus | None = Field(
        default=None, description="How the latency target is kept; absent without one."
    )
    forecast: DemandForecastStatus | None = Field(
        default=None, description="Demand that the replicas are counted for; absent where it is not forecast."
    )
    scaling_history: Annotated[list[ScalingDecision], Field(max_length=MOST_DECISIONS)] | None = Field(
        default=None, description="The last changes of the desired replicas, the newest last."
    )
    departures: Annotated[list[Departure], Field(max_length=MOST_DEPARTURES)] | None = Field(
        default=None, description="The last replicas whose streams moved when they left, the newest last."
    )
    crashes: Annotated[list[ServerCrash], Field(max_length=MOST_CRASHES)] | None = Field(
        default=None,
        description="The last crashes of replicas' servers that were started again within their containers, the newest last.",
    )
    tokens_per_second: Amount | None = Field(
        default=None, description="Tokens of the answers that ended in the last minute, per second."
    )
    kv_cache: KvCacheStatus | None = Field(
        default=None, description="The KV cache of all replicas, as they report it; absent where none does."
    )
    saturated_replicas: Count | None = Field(
        default=None,
        description="Replicas that do not keep spec.slo.tpotMilliseconds even with the smallest pieces of prompts; absent for "
        "none.",
    )
    usage: Usage | None = Field(default=None, description="Total use.")
    cost_per_million_tokens: Amount | None = Field(
        default=None,
        description="What its replicas cost in the last 24 hours at the pools' prices, over the tokens of prompts and answers "
        "in that time.",
    )
    joules_per_token: Amount | None = Field(
        default=None,
        description="Its energy of the last 24 hours over the same tokens, where it is measured.",
    )
    lost_work_caused: LostWorkCaused | None = Field(
        default=None, description="What training lost that gave way to its replicas."
    )
    last_usage_time: datetime | None = Field(default=None, description="Until when usage is counted.")
    last_scale_time: datetime | None = Field(
        default=None, description="When the desired replicas last changed."
    )
    restarts: Count | None = Field(
        default=None,
        description="Restarts of the current replicas: of their containers, and of the servers in them.",
    )
    last_request_time: datetime | None = Field(
        default=None, description="When the gateway last saw a request."
    )
