"""TrainingJob: train a model, with Busbar's engine or with an own image and command."""

from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from busbar.kube.types.checkpoint import MOST_PODS_OF_PARITIES, CheckpointPolicy, MemoryCopyPolicy
from busbar.kube.types.forecast import Promise, StartForecast
from busbar.kube.types.lost_work import GivesWayTo, LostWork
from busbar.kube.types.meta import (
    AGE,
    CamelReason,
    ClaimUri,
    Conditions,
    KindInfo,
    PrinterColumn,
    Resource,
    Sentence,
    ShortText,
    SpecModel,
    StatusModel,
    short_name_rule,
)
from busbar.kube.types.pod_template import PodTemplate
from busbar.kube.types.rules import Rule, exactly_one_of, immutable
from busbar.kube.types.shape import AcceleratorList, GangShape
from busbar.kube.types.training_engine import (
    MOST_ADAPTERS,
    EngineMode,
    OptimizerName,
    Order,
    Sharding,
    TrainingEngine,
)

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]
Percent = Annotated[int, Field(ge=0, le=100)]


class TrainingPhase(StrEnum):
    PENDING = "Pending"
    QUEUED = "Queued"
    ADMITTED = "Admitted"
    STARTING = "Starting"
    RUNNING = "Running"
    PREEMPTING = "Preempting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


TERMINAL_PHASES = frozenset({TrainingPhase.SUCCEEDED, TrainingPhase.FAILED})


class PreemptionPolicy(SpecModel):
    """How the job is asked to release its resources."""

    grace_period_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=60, description="Seconds to save and acknowledge before the pods are killed."
    )


class Output(SpecModel):
    """Destination of weights, tokenizer and checkpoints."""

    uri: ClaimUri = Field(description="pvc://claim/path in the same namespace.")


def _order_holds(engine: TrainingEngine | None, shape: GangShape) -> bool:
    """Whether the pods can add gradients up in the order that the job asks for."""
    if engine is None or engine.parallelism is None or engine.parallelism.order is not Order.FIXED:
        return True
    pods = shape.max_pods
    return shape.min_pods == pods and pods in (1, 2, 4, 8) and engine.batch.micro_batches % pods == 0


def _one_process(what: str, cel: str, asks: Callable[[TrainingEngine], bool]) -> Rule:
    """`what` a job asks for (by `cel` and `asks`) has one pod, which adds micro-batches up as they come."""

    def holds(spec: "TrainingJobSpec") -> bool:
        engine = spec.engine
        if engine is None or not asks(engine):
            return True
        fixed = engine.parallelism is not None and engine.parallelism.order is Order.FIXED
        return spec.shape.max_pods == 1 and not fixed

    return Rule(
        cel=f"!has(self.engine) || !({cel}) || "
        "(self.shape.maxPods == 1 && (!has(self.engine.parallelism) || self.engine.parallelism.order != 'fixed'))",
        message=f"{what} runs in one process; set shape.maxPods: 1 and remove parallelism.order",
        holds=holds,
    )


_SEQUENCE = "(has(self.engine.parallelism) && has(self.engine.parallelism.sequence) ? self.engine.parallelism.sequence : 1)"


def _sequences_are_shared(engine: TrainingEngine, shape: GangShape) -> bool:
    """Whether the pods make groups that can each divide a sequence."""
    size, pods = engine.pods_per_sequence, shape.max_pods
    if size == 1:
        return True
    return shape.min_pods == pods and pods % size == 0 and engine.data.sequence_length % size == 0


def _can_be_rebuilt(memory: MemoryCopyPolicy | None, shape: GangShape) -> bool:
    parity = (memory and memory.parity) or 0
    return parity < shape.min_pods and (parity <= 1 or shape.max_pods <= MOST_PODS_OF_PARITIES)


def _has_parts(engine: TrainingEngine | None, shape: GangShape) -> bool:
    """Whether there are pods for what the job wants to divide among them."""
    if engine is None or engine.parallelism is None or engine.parallelism.sharding is Sharding.OPTIMIZER:
        return True
    return shape.max_pods > 1


class TrainingJobSpec(SpecModel):
    """The training and its scheduling constraints. Exactly one of engine and template."""

    rules = (
        exactly_one_of("engine", "template", message="spec needs exactly one of engine and template"),
        Rule(
            cel="!has(self.engine) || has(self.output)",
            message="a job with spec.engine needs spec.output.uri, where its weights go",
            holds=lambda spec: spec.engine is None or spec.output is not None,
        ),
        Rule(
            cel=f"!has(self.engine) || !has(self.engine.batch) || "
            f"self.shape.maxPods * self.engine.batch.microBatch <= self.engine.batch.sequences * {_SEQUENCE}",
            message="each pod of spec.engine, or each group of parallelism.sequence pods, needs a micro-batch of its own; "
            "raise batch.sequences, or lower batch.microBatch or maxPods",
            field_path=".shape",
            holds=lambda spec: (
                spec.engine is None
                or spec.shape.max_pods * spec.engine.batch.micro_batch
                <= spec.engine.batch.sequences * spec.engine.pods_per_sequence
            ),
        ),
        Rule(
            cel=f"!has(self.engine) || {_SEQUENCE} == 1 || (self.shape.minPods == self.shape.maxPods && "
            f"self.shape.maxPods % {_SEQUENCE} == 0 && self.engine.data.sequenceLength % {_SEQUENCE} == 0)",
            message="parallelism.sequence divides the pods, of which it needs as many at least as at most, and "
            "data.sequenceLength; set shape.minPods and maxPods to a multiple of it, and a length that it divides",
            field_path=".shape",
            holds=lambda spec: spec.engine is None or _sequences_are_shared(spec.engine, spec.shape),
        ),
        Rule(
            cel="!has(self.engine) || !has(self.engine.parallelism) || self.engine.parallelism.order != 'fixed' || "
            "(self.shape.minPods == self.shape.maxPods && self.shape.maxPods in [1, 2, 4, 8] && "
            "(self.engine.batch.sequences / self.engine.batch.microBatch) % self.shape.maxPods == 0)",
            message="parallelism.order: fixed needs 1, 2, 4 or 8 pods (minPods equal to maxPods) that share the step's "
            "micro-batches evenly; set the shape so, or order: fast",
            field_path=".shape",
            holds=lambda spec: _order_holds(spec.engine, spec.shape),
        ),
        _one_process(
            "mode: parameter-offload",
            "has(self.engine.mode) && self.engine.mode == 'parameter-offload'",
            lambda engine: engine.mode is EngineMode.PARAMETER_OFFLOAD,
        ),
        _one_process(
            "optimizer.name: ZerothOrder",
            "has(self.engine.optimizer) && self.engine.optimizer.name == 'ZerothOrder'",
            lambda engine: engine.optimizer.name is OptimizerName.ZEROTH_ORDER,
        ),
        _one_process(
            "engine.scratchDisk",
            "has(self.engine.scratchDisk)",
            lambda engine: engine.scratch_disk is not None,
        ),
        Rule(
            cel="!has(self.engine) || !has(self.engine.parallelism) || "
            "self.engine.parallelism.sharding == 'optimizer' || self.shape.maxPods > 1",
            message="parallelism.sharding divides the model among the pods of a gang; raise shape.maxPods, or remove it",
            field_path=".shape",
            holds=lambda spec: _has_parts(spec.engine, spec.shape),
        ),
        Rule(
            cel="!has(self.checkpoint) || !has(self.checkpoint.memory) || has(self.engine)",
            message="checkpoint.memory is for jobs with spec.engine; remove it, or copy the state in your own image",
            field_path=".checkpoint",
            holds=lambda spec: spec.checkpoint.memory is None or spec.engine is not None,
        ),
        Rule(
            cel="!has(self.checkpoint) || !has(self.checkpoint.memory) || !has(self.checkpoint.memory.parity) || "
            "(self.checkpoint.memory.parity < self.shape.minPods && "
            f"(self.checkpoint.memory.parity <= 1 || self.shape.maxPods <= {MOST_PODS_OF_PARITIES}))",
            message="of so many pods the others cannot rebuild the parts: checkpoint.memory.parity has to be less than "
            f"shape.minPods, and at most 1 for more than {MOST_PODS_OF_PARITIES} pods",
            field_path=".checkpoint.memory.parity",
            holds=lambda spec: _can_be_rebuilt(spec.checkpoint.memory, spec.shape),
        ),
        Rule(
            cel="!has(self.engine) || !has(self.engine.adapters) || "
            "(self.shape.maxPods == 1 && (!has(self.checkpoint) || !has(self.checkpoint.memory)))",
            message="engine.adapters are trained in one pod, without checkpoint.memory; set shape.maxPods: 1, or give each a job "
            "of its own",
            field_path=".engine.adapters",
            holds=lambda spec: (
                spec.engine is None
                or spec.engine.adapters is None
                or (spec.shape.max_pods == 1 and spec.checkpoint.memory is None)
            ),
        ),
        Rule(
            cel="!has(self.deadline) || has(self.engine)",
            message="nothing knows how long an own image runs; remove spec.deadline, or use spec.engine",
            field_path=".deadline",
            holds=lambda spec: spec.deadline is None or spec.engine is not None,
        ),
        immutable("engine"),
        immutable("template"),
        immutable("output"),
        immutable("checkpoint", required=True),
        immutable("preemption", required=True),
        immutable("managedBy"),
        immutable("shape", required=True, while_running=True),
        immutable("accelerators", while_running=True),
    )

    engine: TrainingEngine | None = Field(default=None, description="Busbar's own training engine.")
    template: PodTemplate | None = Field(default=None, description="An own image and command.")
    shape: GangShape = Field(
        default_factory=GangShape,
        description="How many pods and what each needs. It can change while the job is suspended.",
        json_schema_extra={"default": {}},
    )
    accelerators: AcceleratorList | None = Field(
        default=None, description="Accelerator types allowed, e.g. [H100, A100]; default any that fits."
    )
    priority: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=100, description="Higher goes first within the tenant, up to the tenant's ceiling."
    )
    preemptible: bool = Field(
        default=True,
        description="The job may be asked to save its state and release its resources; one that may not does not "
        "borrow what other tenants are guaranteed.",
    )
    checkpoint: CheckpointPolicy = Field(
        default_factory=CheckpointPolicy,
        description="When state is saved and how much is kept.",
        json_schema_extra={"default": {}},
    )
    preemption: PreemptionPolicy = Field(
        default_factory=PreemptionPolicy,
        description="How the job is asked to release its resources.",
        json_schema_extra={"default": {}},
    )
    deadline: datetime | None = Field(
        default=None,
        description="When the job should have ended. status.deadline says whether that is promised; a promised job gets "
        "what it needs for it before its tenant's other jobs of at most its priority.",
    )
    suspend: bool = Field(default=False, description="True: save, release everything and wait.")
    output: Output | None = Field(
        default=None, description="Destination of weights, tokenizer and checkpoints."
    )
    retry_limit: Annotated[int, Field(ge=0, le=100)] = Field(
        default=3, description="Number of retries after failed attempts; preemptions do not count."
    )
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = Field(
        default=None, description="Delete the job this long after it ended; default keep it."
    )
    active_deadline_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = Field(
        default=None, description="Fail the job after this total run time."
    )
    managed_by: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._/-]+$", max_length=253)] | None = (
        Field(default=None, description="Another controller's name: Busbar then leaves the object alone.")
    )


class PerPod(StatusModel):
    """Resources of each pod, in whole numbers."""

    accelerators_m: Count = Field(default=0, description="Thousandths of an accelerator.")
    cpu_m: Count = Field(default=0, description="Thousandths of a core.")
    memory_mib: Count = Field(default=0, description="Memory in MiB.")
    ephemeral_mib: Count = Field(default=0, description="Scratch disk in MiB.")


class Release(StatusModel):
    """The job was asked to release its resources; present until it has."""

    reason: CamelReason = Field(description="A stable word that says why.")
    message: Sentence = Field(default="", description="One sentence that says why.")
    requested_at: datetime | None = Field(default=None, description="When it was asked.")
    deadline: datetime | None = Field(default=None, description="When its pods are killed.")
    gives_way_to: GivesWayTo | None = Field(
        default=None,
        description="The service whose replica gets the place, which is charged for what is lost.",
    )


class DeadlineAnswer(StrEnum):
    """What is said of a deadline."""

    UNKNOWN = "Unknown"
    KEEPS = "Keeps"
    LATE = "Late"
    OUT_OF_REACH = "OutOfReach"
    CROWDED = "Crowded"
    NOT_TRIED = "NotTried"

    @property
    def is_promise(self) -> bool:
        return self in (DeadlineAnswer.KEEPS, DeadlineAnswer.LATE)


class DeadlineStatus(StatusModel):
    """What the plan says of the deadline."""

    at: datetime = Field(description="The deadline that this is about.")
    answer: DeadlineAnswer = Field(
        description="Keeps: promised. Late: promised, and out of reach by now. OutOfReach, Crowded, NotTried: not promised. "
        "Unknown: not planned yet, or nobody knows how long the job is."
    )
    message: Sentence = Field(default="", description="The same in one sentence.")
    accelerator: ShortText | None = Field(default=None, description="The type that it needs from now on.")
    accelerators: Amount = Field(default=0.0, description="How many; 0: earlier deadlines come first.")
    ends_by: datetime | None = Field(
        default=None, description="When it would end with these; written again only when it has moved."
    )
    breaks: Annotated[list[ShortText], Field(max_length=16)] = Field(
        default_factory=list, description="Crowded: jobs of the tenant whose promises it would break."
    )
    met: bool | None = Field(default=None, description="Of an ended job: whether it ended in time.")


class Fingerprint(StatusModel):
    """Digests for comparing two runs bit for bit."""

    losses: ShortText | None = Field(default=None, description="SHA-256 over every step's loss.")
    weights: ShortText | None = Field(default=None, description="SHA-256 of the final weights.")


class CheckedImage(StatusModel):
    """Whether the platform's own engine runs, by the digest of its image."""

    verified: bool = Field(
        description="All pods of this admission run the platform's image: their reported speeds are shared with other jobs."
    )
    digest: ShortText | None = Field(
        default=None, description="Image digest that the nodes report for the pods."
    )
    message: Sentence = Field(default="", description="Why it is not verified.")


class ReplacedPod(StatusModel):
    """A rank of a gang whose pod was lost and made again, as the others have its state in memory."""

    rank: Count = Field(description="Its rank.")
    times: Annotated[int, Field(ge=1)] = Field(description="How often in this attempt.")
    since: datetime = Field(description="When the last time.")


class Admission(StatusModel):
    """Placement and mode of the admission, written before any pod exists."""

    id: ShortText = Field(description="Identity of this admission; every pod of the gang carries it.")
    pool: ShortText = Field(description="AcceleratorPool.")
    accelerator: ShortText = Field(description="Accelerator type.")
    link_class: ShortText | None = Field(default=None, description="Link class of the pool.")
    mode: ShortText | None = Field(default=None, description="Engine mode.")
    pods: Count = Field(description="Pods in the gang.")
    accelerators_per_pod: Count = Field(default=1, description="Accelerators of each pod.")
    nodes: Annotated[list[ShortText], Field(max_length=1024)] = Field(
        default_factory=list, description="Node of each rank."
    )
    per_pod: PerPod | None = Field(default=None, description="Resources of each pod.")
    power_cap_percent: Annotated[int, Field(ge=1, le=99)] | None = Field(
        default=None,
        description="What its boards may draw at most, per cent of their highest limit, as its power domains carried no "
        "more. Absent: it is not capped.",
    )
    power_cap_watts: Amount | None = Field(
        default=None, description="The same for one board of this type; absent: not capped, or not known."
    )
    power_cap_changed_at: datetime | None = Field(
        default=None, description="When the cap was raised while it ran; absent: never."
    )
    admitted_at: datetime | None = Field(default=None, description="When.")
    started_at: datetime | None = Field(default=None, description="When all its pods were running.")
    replaced: Annotated[list[ReplacedPod], Field(max_length=1024)] | None = Field(
        default=None, description="Pods that were lost and made again while the others went on; absent: none."
    )
    image: CheckedImage | None = Field(
        default=None, description="The image of its pods; absent until all of them run."
    )
    reason: Sentence = Field(default="", description="Reason for this placement and mode.")


class CollectedNode(StatusModel):
    """One node of a reservation."""

    name: ShortText = Field(description="Its name.")
    pods: Annotated[int, Field(ge=1)] = Field(default=1, description="Pods that will run there.")
    since: datetime = Field(description="Since when it is collected.")


class Reservation(StatusModel):
    """The place that is collected for a waiting job which is first in line.

    A restarted operator reads it, so that the job keeps its place in line and its nodes.
    """

    pool: ShortText = Field(description="AcceleratorPool.")
    accelerator: ShortText = Field(description="Accelerator type.")
    mode: ShortText | None = Field(default=None, description="Engine mode.")
    pods: Count = Field(description="Pods in the gang.")
    accelerators_per_pod: Count = Field(default=1, description="Accelerators of each pod.")
    per_pod: PerPod | None = Field(default=None, description="Resources of each pod.")
    nodes: Annotated[list[CollectedNode], Field(max_length=1024)] = Field(
        default_factory=list, description="Nodes in order of rank."
    )
    start_by: datetime = Field(
        description="When its room is expected to be there; written again only when it has moved."
    )
    collected: Count = Field(
        default=0, description="Nodes whose room is there or can be taken at once, of `needed`."
    )
    needed: Count = Field(description="How many different nodes it needs.")

    def sentence(self, now: datetime) -> str:
        """The reservation as one sentence, as people read it everywhere."""
        start = self.start_by.astimezone(UTC)
        when = (
            f"{start:%H:%M} UTC" if start.date() == now.astimezone(UTC).date() else f"{start:%d %b %H:%M} UTC"
        )
        starts = f"Starts by {when}" if start > now else "Starts any moment"
        shape = f"{self.pods} × {self.accelerators_per_pod} {self.accelerator}"
        nodes = f"{self.collected} of {self.needed} node{'' if self.needed == 1 else 's'} collected"
        return f"{starts} on {shape} in pool {self.pool}: {nodes}."


class Preview(StatusModel):
    """The scheduler's current decision about this job."""

    starts_now: bool = Field(description="Whether it would start in this round.")
    pool: ShortText | None = Field(default=None, description="Where.")
    mode: ShortText | None = Field(default=None, description="In which engine mode.")
    reason: Sentence = Field(default="", description="Why, or exactly why not.")
    cost_per_hour: Amount | None = Field(default=None, description="At the pool's price.")


class StepSeconds(StatusModel):
    """Seconds of one step: as the engine predicted them before it made the model, and as they are."""

    predicted: Amount | None = Field(default=None, description="By the engine's plan and its probe.")
    measured: Amount | None = Field(default=None, description="Median over the last steps.")
    ratio: Amount | None = Field(default=None, description="Predicted to measured.")


class StepPhases(StatusModel):
    """What the time of the steps was spent on, in percent."""

    forward: Percent = Field(default=0, description="Forward passes.")
    backward: Percent = Field(default=0, description="Backward passes, with recomputation.")
    exchange: Percent = Field(default=0, description="Adding up gradients over the pods.")
    load: Percent = Field(default=0, description="Waiting for weights on the host.")
    wait: Percent = Field(default=0, description="Waiting for updates of the step before.")
    update: Percent = Field(default=0, description="Updates at the end of the step.")
    other: Percent = Field(default=0, description="Batches, and what is between steps.")


MOST_WORKERS = 64
"""Pods of a gang whose pace is in the status: of larger ones the slowest."""


class Worker(StatusModel):
    """The pace of one pod of a gang."""

    rank: Count = Field(description="Its rank.")
    own_seconds: Amount = Field(
        description="Seconds of a step that it does not spend in exchanges. The others wait for the pod with the most."
    )


class Progress(StatusModel):
    """Progress of the run."""

    step: Count = Field(default=0, description="Optimizer steps done.")
    total_steps: Count = Field(default=0, description="Optimizer steps of the whole run.")
    loss: float | None = Field(default=None, description="Training loss of the last step, in nats per token.")
    tokens_per_second: Amount | None = Field(default=None, description="Speed over the last steps.")
    model_tflops: Amount | None = Field(
        default=None,
        description="The same in TFLOP/s of all pods, without what is computed twice; absent where it is not known.",
    )
    step_seconds: StepSeconds | None = Field(
        default=None, description="Seconds of a step; absent where the engine predicts none."
    )
    phases: StepPhases | None = Field(
        default=None, description="What the steps are spent on; absent where the engine does not tell."
    )
    workers: Annotated[list[Worker], Field(max_length=MOST_WORKERS)] | None = Field(
        default=None,
        description="Pods of a gang, the slowest first; absent: it is one pod, or does not tell.",
    )
    tokens: Count = Field(default=0, description="Tokens trained on.")
    bad_rows: Count = Field(default=0, description="Rows of the data left out (data.onBadRow: skip).")
    activations: ShortText | None = Field(
        default=None,
        description="keep, recompute or swap: what the engine does with those inside a block; none without a backward pass.",
    )
    eta_seconds: Amount | None = Field(default=None, description="Seconds until the last step at this speed.")
    eta: ShortText | None = Field(default=None, description="The same for people, e.g. 4m10s.")
    eta_p50: datetime | None = Field(default=None, description="The end at this speed, without interruption.")
    eta_p90: datetime | None = Field(
        default=None,
        description="The same at the lower end of the cell's speed interval; absent without an estimate.",
    )
    percent: Annotated[float, Field(ge=0, le=100)] | None = Field(
        default=None, description="Share of the steps done."
    )


class TrainedModel(StatusModel):
    """How much of the model is trained."""

    parameters: Count = Field(default=0, description="Parameters in all.")
    trainable_parameters: Count = Field(default=0, description="Those that are trained.")
    adapter: ShortText | None = Field(
        default=None, description="The adapter; absent when the model's own weights are trained."
    )


class AdapterProgress(StatusModel):
    """One of several adapters, which are trained one after another."""

    name: ShortText = Field(description="Its name in spec.engine.adapters, and its subfolder of the output.")
    step: Count = Field(default=0, description="Optimizer steps done.")
    steps: Count = Field(default=0, description="Optimizer steps of its run.")
    loss: float | None = Field(default=None, description="Training loss of its last step, in nats per token.")
    finished: bool = Field(default=False, description="Its result is written.")
    bits_per_byte: Amount | None = Field(
        default=None, description="Of the model with it on its held-out text, where that is evaluated."
    )
    fingerprint: Fingerprint | None = Field(
        default=None, description="Equal to that of the same adapter in a job of its own."
    )


class MemoryUse(StatusModel):
    """Memory of one process of the engine: what its plan predicted, and the peak so far."""

    planned_device_mib: Count | None = Field(default=None, description="Device memory by plan.")
    peak_device_mib: Count | None = Field(default=None, description="Peak device memory.")
    planned_host_mib: Count | None = Field(default=None, description="Host memory by plan.")
    peak_host_mib: Count | None = Field(default=None, description="Peak host memory.")


class PowerUse(StatusModel):
    """What power limits have cost one attempt, where its nodes hang on a feed with leases."""

    attempt: Count = Field(default=0, description="The attempt.")
    limit_percent: Count | None = Field(
        default=None,
        description="Limit of its boards, per cent of their highest; of several nodes the lowest. Absent: not known.",
    )
    seconds: Count = Field(default=0, description="Of the attempt, that its limits are known of.")
    slowdown: Amount = Field(
        default=1.0,
        description="Mean over them of the time for the same work, over that without limits, or under its power cap.",
    )


class CheckpointStatus(StatusModel):
    """The last durable checkpoint."""

    step: Count = Field(default=0, description="Its step.")
    saved_at: datetime | None = Field(default=None, description="When it became durable.")
    uri: ShortText | None = Field(default=None, description="Where it is.")
    mib_per_second: Count | None = Field(
        default=None, description="Rate at which the disk took it; absent: not known."
    )
    usual_mib_per_second: Count | None = Field(
        default=None, description="What the disk did before: the median of earlier ones, or a probe's."
    )
    slow_in_a_row: Count | None = Field(
        default=None, description="The newest ones that took more than twice as long as usual; absent: none."
    )


class EvaluationResult(StatusModel):
    """Bits per byte on held-out files; lower is better."""

    bits_per_byte: Amount | None = Field(default=None, description="The trained model.")
    bigram_bits_per_byte: Amount | None = Field(default=None, description="A bigram model on the same bytes.")
    ngram_bits_per_byte: Amount | None = Field(default=None, description="The larger n-gram model.")
    held_out_bytes: Count | None = Field(default=None, description="Bytes evaluated.")


class Usage(StatusModel):
    """Total use of the object; totals never decrease."""

    accelerator_seconds: Amount = Field(default=0.0, description="Accelerator-seconds.")
    work_units: Amount = Field(default=0.0, description="The same in exchange-rate units.")
    energy_joules: Amount | None = Field(default=None, description="Energy, where it was measured.")
    cost: Amount = Field(default=0.0, description="At the pools' prices.")


class PodCounts(StatusModel):
    """Pods of the running gang."""

    ready: Count = Field(default=0, description="Pods that run and are ready.")
    total: Count = Field(default=0, description="Pods that exist.")


class TrainingJobStatus(StatusModel):
    """Busbar's observations and decisions; only the operator writes it."""

    observed_generation: Count | None = Field(default=None, description="The metadata.generation acted upon.")
    phase: TrainingPhase | None = Field(default=None, description="Phase of the job, in one word.")
    reason: CamelReason | None = Field(default=None, description="A stable word that says why.")
    message: Sentence | None = Field(default=None, description="One sentence that says why.")
    conditions: Conditions | None = Field(default=None, description="Observations in the standard form.")
    attempt: Count | None = Field(default=None, description="How often pods were made.")
    workload_class: ShortText | None = Field(
        default=None,
        description="Digest of everything that its speed depends on; the PerformanceProfile of this class has the speeds.",
    )
    admission: Admission | None = Field(default=None, description="Placement and mode of the admission.")
    preview: Preview | None = Field(default=None, description="The scheduler's current decision about it.")
    forecast: StartForecast | None = Field(
        default=None, description="When it is expected to start; present only while it waits."
    )
    reservation: Reservation | None = Field(
        default=None,
        description="The place that is collected for it; present only while it is first in line.",
    )
    promise: Promise | None = Field(default=None, description="The first forecast of its last wait.")
    deadline: DeadlineStatus | None = Field(default=None, description="What is said of its deadline.")
    progress: Progress | None = Field(default=None, description="Progress of the run.")
    model: TrainedModel | None = Field(default=None, description="How much of the model is trained.")
    adapters: (
        Annotated[
            list[AdapterProgress],
            Field(
                max_length=MOST_ADAPTERS,
                json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="Each of several adapters; progress then counts the steps of all of them.",
    )
    memory: MemoryUse | None = Field(default=None, description="Memory by plan and as measured.")
    power: PowerUse | None = Field(default=None, description="What power limits have cost it.")
    checkpoint: CheckpointStatus | None = Field(default=None, description="The last durable checkpoint.")
    lost_work: LostWork | None = Field(default=None, description="Work done twice.")
    release: Release | None = Field(default=None, description="Why it was asked to release its resources.")
    retry_at: datetime | None = Field(default=None, description="When a failed attempt is tried again.")
    fingerprint: Fingerprint | None = Field(default=None, description="Digests of losses and weights.")
    preemptions: Count | None = Field(default=None, description="Number of preemptions.")
    restarts: Count | None = Field(default=None, description="Number of retries after failed attempts.")
    last_move_time: datetime | None = Field(default=None, description="Time of the last migration.")
    evaluation: EvaluationResult | None = Field(default=None, description="Bits per byte on held-out files.")
    usage: Usage | None = Field(default=None, description="Total use.")
    start_time: datetime | None = Field(default=None, description="When the first attempt started.")
    completion_time: datetime | None = Field(default=None, description="When it ended.")
    last_usage_time: datetime | None = Field(default=None, description="Until when usage is counted.")
    output_uri: ShortText | None = Field(default=None, description="URI of the weights.")
    pods: PodCounts | None = Field(default=None, description="Pods of the running gang.")
    waiting: Annotated[dict[str, Any], Field(max_length=64)] | None = Field(
        default=None, description="The scheduler's record of why the job waits."
    )


class TrainingJob(Resource):
    """A training run: model, data and optimizer for Busbar's engine, or an own image for a gang of pods."""

    rules = (short_name_rule(46, "pods and a Service are"),)
    info: ClassVar[KindInfo] = KindInfo(
        plural="trainingjobs",
        singular="trainingjob",
        short_names=["bbtj"],
        namespaced=True,
        columns=[
            PrinterColumn(name="Phase", type="string", json_path=".status.phase", description="Where it is."),
            PrinterColumn(name="Reason", type="string", json_path=".status.reason", description="Why."),
            PrinterColumn(
                name="Step", type="integer", json_path=".status.progress.step", description="Steps done."
            ),
            PrinterColumn(
                name="Of", type="integer", json_path=".status.progress.totalSteps", description="All steps."
            ),
            PrinterColumn(
                name="Loss", type="number", json_path=".status.progress.loss", description="Training loss."
            ),
            PrinterColumn(
                name="Tok/s",
                type="number",
                json_path=".status.progress.tokensPerSecond",
                description="Speed.",
            ),
            PrinterColumn(
                name="ETA", type="string", json_path=".status.progress.eta", description="Time left."
            ),
            PrinterColumn(
                name="Checkpoint",
                type="date",
                json_path=".status.checkpoint.savedAt",
                description="Checkpoint's age.",
            ),
            AGE,
            PrinterColumn(
                name="Pool",
                type="string",
                json_path=".status.admission.pool",
                description="Where it runs.",
                priority=1,
            ),
            PrinterColumn(
                name="Mode",
                type="string",
                json_path=".status.admission.mode",
                description="Engine mode.",
                priority=1,
            ),
            PrinterColumn(
                name="Start",
                type="string",
                json_path=".status.forecast.startP50",
                description="Expected start (median).",
                priority=1,
            ),
            PrinterColumn(
                name="Lost",
                type="integer",
                json_path=".status.lostWork.steps",
                description="Steps lost.",
                priority=1,
            ),
            PrinterColumn(
                name="Message",
                type="string",
                json_path=".status.message",
                description="The sentence.",
                priority=1,
            ),
        ],
    )

    kind: Literal["TrainingJob"] = "TrainingJob"
    spec: TrainingJobSpec = Field(description="The training and its scheduling constraints.")
    status: TrainingJobStatus | None = Field(default=None, description="Busbar's observations and decisions.")
