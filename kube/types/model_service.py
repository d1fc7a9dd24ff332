"""ModelService: serve a model over the OpenAI API, with replicas that follow demand."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from busbar.kube.types.accelerator_pool import TenantList
from busbar.kube.types.engine_rules import engine_rules
from busbar.kube.types.engines import ServiceEngine
from busbar.kube.types.inference import InferencePrice
from busbar.kube.types.meta import (
    AGE,
    ClaimUri,
    DnsLabel,
    KindInfo,
    ObjectName,
    PrinterColumn,
    Quantity,
    Resource,
    SpecModel,
    short_name_rule,
)
from busbar.kube.types.quantity import to_bytes
from busbar.kube.types.rules import Rule, exactly_one_of, immutable
from busbar.kube.types.service_access import Access
from busbar.kube.types.service_status import ModelServiceStatus
from busbar.kube.types.shape import AcceleratorList, PodShape

MAX_REPLICAS = 256
ModelId = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?$", max_length=128)]


_MOUNTED = (
    "(has(oldSelf.model.uri) && oldSelf.model.uri.split('/')[2] == a.uri.split('/')[2]) ||"
    " (has(oldSelf.adapters) && oldSelf.adapters.exists(b, b.uri.split('/')[2] == a.uri.split('/')[2]))"
)
"""CEL: whether the claim of the adapter `a` is one that the pods mount already."""


class ServedModel(SpecModel):
    """Which weights to serve; exactly one of uri and trainingJob."""

    rules = (exactly_one_of("uri", "trainingJob", message="model needs exactly one of uri and trainingJob"),)

    uri: ClaimUri | None = Field(
        default=None, description="A folder in safetensors layout: pvc://claim/path."
    )
    training_job: ObjectName | None = Field(
        default=None,
        description="A TrainingJob in the same namespace; its output is served once it has succeeded.",
    )


class ServedAdapter(SpecModel):
    """A LoRA adapter of the model."""

    name: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", min_length=1, max_length=63)
    ] = Field(description="Clients ask for it as MODEL:NAME.")
    uri: ClaimUri = Field(
        description="The adapter's folder, as PEFT or a TrainingJob writes it: pvc://claim/path."
    )
    tenants: TenantList | None = Field(
        default=None, description="Tenants that may use it; default all that may use the service."
    )
    price: InferencePrice | None = Field(
        default=None, description="What tokens of its requests cost, in place of the service's price."
    )


class WarmLevel(StrEnum):
    """What the engine of a replica that sleeps still holds."""

    SLEEPING = "sleeping"
    LOADED = "loaded"


class Warm(SpecModel):
    """Replicas that sleep instead of leaving, while that may save more than it costs."""

    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = Field(
        description="At most so many surplus replicas stay, without requests, in places that any waiting job may take."
    )
    level: WarmLevel = Field(
        default=WarmLevel.SLEEPING,
        description="sleeping: weights in host memory, the accelerator's memory free; loaded: everything stays.",
    )


class Scaling(SpecModel):
    """When replicas are added and removed."""

    rules = (
        Rule(
            cel="!has(self.zoneReserve) || has(self.minZones)",
            message="zoneReserve needs minZones: it is kept for the loss of one of these zones",
            holds=lambda scaling: scaling.zone_reserve is None or scaling.min_zones is not None,
        ),
    )

    idle_seconds: Annotated[int, Field(ge=1, le=604_800)] = Field(
        default=300,
        description="With minReplicas 0: seconds without a request before the last replica is removed.",
    )
    target_in_flight_per_replica: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=8, description="Requests in flight that one replica should carry."
    )
    down_after_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = Field(
        default=None,
        description="Fewer replicas must have been enough for so long before one leaves; default 300 with a latency target (or a "
        "start, if that takes longer), 60 by requests in flight.",
    )
    warm: Warm | None = Field(
        default=None,
        description="Replicas that sleep instead of leaving while that may save more than it costs, and wake before others start.",
    )
    external: (
        Annotated[
            dict[DnsLabel, Annotated[int, Field(ge=0, le=MAX_REPLICAS)]], Field(min_length=1, max_length=32)
        ]
        | None
    ) = Field(
        default=None,
        description="Replicas by AcceleratorPool, decided from outside, that Busbar obeys and never writes. In place of "
        "spec.replicas.",
    )
    max_cost_per_hour: Annotated[float, Field(gt=0, le=1_000_000)] | None = Field(
        default=None,
        description="The most that all replicas may cost per hour by their pools' pricePerHour; needs slo.ttftMilliseconds.",
    )
    min_zones: Annotated[int, Field(ge=2, le=16)] | None = Field(
        default=None,
        description="Replicas stand in at least so many zones (topology.kubernetes.io/zone); a pool is in a zone if all of "
        "its nodes are. Needs slo.ttftMilliseconds.",
    )
    zone_reserve: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="With any one zone lost, the replicas in the others carry this part of the load for which replicas are chosen. "
        "Needs minZones. Default: nothing is kept for that.",
    )


class ServiceLevel(SpecModel):
    """The latency target. With both times set, it decides the number of replicas."""

    rules = (
        Rule(
            cel="!has(self.ttftMilliseconds) || has(self.tpotMilliseconds)",
            message="ttftMilliseconds needs tpotMilliseconds beside it: replicas are counted for both targets",
            holds=lambda slo: slo.ttft_milliseconds is None or slo.tpot_milliseconds is not None,
        ),
        Rule(
            cel="!has(self.percentile) || has(self.ttftMilliseconds)",
            message="percentile needs ttftMilliseconds and tpotMilliseconds: only replicas counted by both use it",
            holds=lambda slo: slo.percentile is None or slo.ttft_milliseconds is not None,
        ),
    )

    ttft_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)] | None = Field(
        default=None,
        description="Time to the first token; replicas are added so that it is met. Needs tpotMilliseconds.",
    )
    tpot_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)] | None = Field(
        default=None, description="Time per later token: prompts are processed in chunks that keep it."
    )
    percentile: Annotated[float, Field(ge=50, le=99.99)] | None = Field(
        default=None,
        description="Share of requests, in percent, that must meet both targets; default 99.",
    )


class ModelServiceSpec(SpecModel):
    """The model, its latency target, and the number of replicas."""

    rules = (
        *engine_rules(),
        Rule(
            cel="!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            message="minReplicas must not be greater than maxReplicas",
            holds=lambda spec: spec.max_replicas is None or spec.min_replicas <= spec.max_replicas,
        ),
        Rule(
            cel="!has(self.scaling) || !has(self.scaling.warm) || self.scaling.warm.replicas <="
            " (has(self.maxReplicas) ? self.maxReplicas : (self.minReplicas > 1 ? self.minReplicas : 1))",
            message="scaling.warm.replicas must not be greater than maxReplicas, which is minReplicas, at least 1,"
            " where it is not set",
            holds=lambda spec: (
                spec.scaling.warm is None or spec.scaling.warm.replicas <= spec.replica_ceiling
            ),
        ),
        Rule(
            cel="!has(self.replicas) || !has(self.scaling) || !has(self.scaling.external)",
            message="replicas and scaling.external each decide the number of replicas; give one of them",
            holds=lambda spec: spec.replicas is None or spec.scaling.external is None,
        ),
        Rule(
            cel="!has(self.scaling) || !has(self.scaling.maxCostPerHour)"
            " || (has(self.slo) && has(self.slo.ttftMilliseconds))",
            message="scaling.maxCostPerHour needs slo.ttftMilliseconds and slo.tpotMilliseconds: only replicas counted by"
            " the latency target are chosen by price",
            holds=lambda spec: (
                spec.scaling.max_cost_per_hour is None
                or (spec.slo is not None and spec.slo.ttft_milliseconds is not None)
            ),
        ),
        Rule(
            cel="!has(self.scaling) || !has(self.scaling.minZones)"
            " || (has(self.slo) && has(self.slo.ttftMilliseconds))",
            message="scaling.minZones needs slo.ttftMilliseconds and slo.tpotMilliseconds: only replicas counted by the"
            " latency target are spread over zones",
            holds=lambda spec: (
                spec.scaling.min_zones is None
                or (spec.slo is not None and spec.slo.ttft_milliseconds is not None)
            ),
        ),
        Rule(
            cel="!has(self.scaling) || !has(self.scaling.minZones) || self.scaling.minZones <= self.minReplicas",
            message="scaling.minZones must not be greater than minReplicas: each zone needs a replica",
            holds=lambda spec: spec.scaling.min_zones is None or spec.scaling.min_zones <= spec.min_replicas,
        ),
        Rule(
            cel="!has(self.scaling) || !has(self.scaling.minZones) || !has(self.scaling.external)",
            message="scaling.external chooses the pools, and with them the zones; leave scaling.minZones out",
            holds=lambda spec: spec.scaling.min_zones is None or spec.scaling.external is None,
        ),
        Rule(
            cel="!has(self.prefillReplicas) || (has(self.replicas) &&"
            " (self.replicas == 0 || self.replicas > self.prefillReplicas))",
            message="prefillReplicas needs spec.replicas above it (or 0): the autoscaler does not divide replicas by what they do,"
            " and a stream that is handed over needs a replica that decodes it",
            holds=lambda spec: (
                spec.prefill_replicas is None
                or spec.replicas == 0
                or (spec.replicas or 0) > spec.prefill_replicas
            ),
        ),
        Rule(
            cel="!has(self.prefillReplicas) || !has(self.scaling) || !has(self.scaling.minZones)",
            message="prefillReplicas and scaling.minZones are not built together; leave one of them out",
            holds=lambda spec: spec.prefill_replicas is None or spec.scaling.min_zones is None,
        ),
        Rule(
            cel="!has(self.kvCacheMemory) || string(self.kvCacheMemory).matches('^[0-9.]*[1-9]')",
            message="kvCacheMemory must be more than 0; write an amount such as 2Gi, or leave it out",
            holds=lambda spec: spec.kv_cache_memory is None or to_bytes(spec.kv_cache_memory) > 0,
        ),
        immutable("prefillReplicas", while_running=True),
        immutable("engine", required=True),
        immutable("modelId"),
        immutable("model", required=True, while_running=True),
        immutable("image", while_running=True),
        immutable("args", while_running=True),
        immutable("shape", required=True, while_running=True),
        immutable("accelerators", while_running=True),
        immutable("maxModelLen", while_running=True),
        immutable("kvCacheMemory", while_running=True),
        Rule(
            cel=f"oldSelf.suspend || self.engine != 'builtin' || !has(self.adapters) || self.adapters.all(a, {_MOUNTED})",
            message="a new adapter of a service that runs must be on a claim that its pods mount: that of model.uri or of"
            " another adapter; put it there, or suspend the object first",
        ),
    )

    model: ServedModel = Field(description="Which weights. It can change while the service is suspended.")
    model_id: ModelId | None = Field(
        default=None, description="The name clients use; default metadata.name. namespace/name always works."
    )
    adapters: (
        Annotated[
            list[ServedAdapter],
            Field(
                max_length=64,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="LoRA adapters of the model. They can change while replicas of the builtin engine serve, on the claims that "
        "model.uri and the adapters have already.",
    )
    engine: ServiceEngine = Field(
        default=ServiceEngine.BUILTIN, description="Busbar's own engine, or vLLM or SGLang from an image."
    )
    image: Annotated[str, Field(pattern=r"^[^\s]+$", min_length=1, max_length=512)] | None = Field(
        default=None,
        description="Container image; needed with vllm and sglang, default the platform's with builtin.",
    )
    args: Annotated[list[Annotated[str, Field(max_length=8192)]], Field(max_length=128)] | None = Field(
        default=None, description="More arguments for the server."
    )
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = Field(
        default=None,
        description="Present: an external target (kubectl scale, HPA, KEDA) that Busbar never writes. "
        "Absent: the autoscaler decides within minReplicas and maxReplicas.",
    )
    prefill_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS - 1)] | None = Field(
        default=None,
        description="So many of the replicas compute prompts and hand each stream, at its first token, to one of the others, which "
        "decode. Needs spec.replicas. It can change while the service is suspended.",
    )
    min_replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = Field(
        default=1, description="The autoscaler's floor; at 0 a request wakes the service."
    )
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = Field(
        default=None, description="The autoscaler's ceiling; default minReplicas, at least 1."
    )
    scaling: Scaling = Field(
        default_factory=Scaling,
        description="When replicas are added and removed.",
        json_schema_extra={"default": {}},
    )
    shape: PodShape = Field(
        default_factory=PodShape, description="What each replica needs.", json_schema_extra={"default": {}}
    )
    accelerators: AcceleratorList | None = Field(
        default=None, description="Accelerator types allowed; default any that fits."
    )
    slo: ServiceLevel | None = Field(
        default=None,
        description="Latency targets of the builtin engine; with ttftMilliseconds they decide the replicas.",
    )
    access: Access | None = Field(
        default=None,
        description="Other tenants that may use the service; only an admin of the owner's tenant may set it.",
    )
    price: InferencePrice | None = Field(
        default=None,
        description="What its tokens cost the tenants and keys that use it; absent: nothing.",
    )
    max_model_len: Annotated[int, Field(ge=16, le=16_777_216)] | None = Field(
        default=None, description="Longest context in tokens; default the model's."
    )
    kv_cache_memory: Quantity | None = Field(
        default=None, description="Memory for the KV cache, e.g. 256Mi; default what is left."
    )
    suspend: bool = Field(default=False, description="True: no replicas, whatever the demand.")
    priority: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=500, description="Higher goes first within the tenant, up to the tenant's ceiling."
    )
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        default=30, description="Seconds that a draining replica may take to finish its requests."
    )

    @property
    def replica_ceiling(self) -> int:
        """The autoscaler's ceiling with its default filled in."""
        return self.max_replicas if self.max_replicas is not None else max(self.min_replicas, 1)

    @property
    def external_replicas(self) -> int | None:
        """The number of replicas that somebody outside decides; None: Busbar decides."""
        by_pool = self.scaling.external
        return self.replicas if by_pool is None else sum(by_pool.values())


class ModelService(Resource):
    """A model served over the OpenAI API, with replicas that follow demand."""

    rules = (short_name_rule(46, "pods and a Service are"),)
    info: ClassVar[KindInfo] = KindInfo(
        plural="modelservices",
        singular="modelservice",
        short_names=["bbms"],
        namespaced=True,
        columns=[
            PrinterColumn(name="Phase", type="string", json_path=".status.phase", description="Its state."),
            PrinterColumn(name="Reason", type="string", json_path=".status.reason", description="Why."),
            PrinterColumn(
                name="Ready",
                type="integer",
                json_path=".status.readyReplicas",
                description="Taking requests.",
            ),
            PrinterColumn(
                name="Desired", type="integer", json_path=".status.desiredReplicas", description="Wanted."
            ),
            PrinterColumn(
                name="SLO",
                type="number",
                json_path=".status.slo.attainmentRecent",
                description="Share of answers within the latency target, of five minutes.",
            ),
            PrinterColumn(
                name="Tokens/s",
                type="number",
                json_path=".status.tokensPerSecond",
                description="Generated in the last minute.",
            ),
            PrinterColumn(
                name="Model", type="string", json_path=".status.modelId", description="Name for clients."
            ),
            PrinterColumn(name="URL", type="string", json_path=".status.url", description="OpenAI base URL."),
            AGE,
            PrinterColumn(
                name="Message",
                type="string",
                json_path=".status.message",
                description="The sentence.",
                priority=1,
            ),
        ],
        scale={
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    )

    kind: Literal["ModelService"] = "ModelService"
    spec: ModelServiceSpec = Field(description="The model, its latency target, and the number of replicas.")
    status: ModelServiceStatus | None = Field(
        default=None, description="Busbar's observations and decisions."
    )
