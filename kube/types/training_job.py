"""TrainingJob: train a model, with Busbar's engine or with an own image and command."""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from busbar.kube.types.checkpoint import MOST_PROCESSES_OF_PARITIES, CheckpointPolicy
from busbar.kube.types.meta import (
    AGE,
    ClaimUri,
    KindInfo,
    PrinterColumn,
    Resource,
    SpecModel,
    short_name_rule,
)
from busbar.kube.types.pod_template import PodTemplate
from busbar.kube.types.rules import Rule, exactly_one_of, immutable
from busbar.kube.types.shape import AcceleratorList, GangShape
from busbar.kube.types.training_engine import TrainingEngine
from busbar.kube.types.training_sections import EngineMode, OptimizerName, Order, Sharding
from busbar.kube.types.training_status import TrainingJobStatus


class PreemptionPolicy(SpecModel):
    """How the job is asked to release its resources."""

    grace_period_seconds: Annotated[int, Field(ge=1, le=3600)] = Field(
        default=60, description="Seconds to save and acknowledge before the pods are killed."
    )


class Output(SpecModel):
    """Destination of weights, tokenizer and checkpoints."""

    uri: ClaimUri = Field(description="pvc://claim/path in the same namespace.")


def _order_holds(engine: TrainingEngine | None, shape: GangShape) -> bool:
    """Whether the processes can add gradients up in the order that the job asks for."""
    if engine is None or engine.parallelism is None or engine.parallelism.order is not Order.FIXED:
        return True
    processes = _processes(engine, shape)
    evenly = processes in (1, 2, 4, 8) and engine.batch.micro_batches % processes == 0
    return shape.min_pods == shape.max_pods and evenly


def _processes(engine: TrainingEngine, shape: GangShape) -> int:
    """Of the largest gang."""
    return shape.max_pods * engine.processes_per_pod


def _one_process(what: str, cel: str, asks: Callable[[TrainingEngine], bool]) -> Rule:
    """`what` a job asks for (by `cel` and `asks`) has one process, which adds micro-batches up as they come."""

    def holds(spec: "TrainingJobSpec") -> bool:
        engine = spec.engine
        if engine is None or not asks(engine):
            return True
        fixed = engine.parallelism is not None and engine.parallelism.order is Order.FIXED
        return _processes(engine, spec.shape) == 1 and not fixed

    return Rule(
        cel=f"!has(self.engine) || !({cel}) || "
        f"({_PROCESSES} == 1 && (!has(self.engine.parallelism) || self.engine.parallelism.order != 'fixed'))",
        message=f"{what} runs in one process; set shape.maxPods: 1 and remove parallelism",
        holds=holds,
    )


_PER_POD = (
    "(has(self.engine.parallelism) && has(self.engine.parallelism.processesPerPod) ? "
    "self.engine.parallelism.processesPerPod : 1)"
)
_PROCESSES = f"(self.shape.maxPods * {_PER_POD})"
_SEQUENCE = "(has(self.engine.parallelism) && has(self.engine.parallelism.sequence) ? self.engine.parallelism.sequence : 1)"


def _sequences_are_shared(engine: TrainingEngine, shape: GangShape) -> bool:
    """Whether the processes make groups that can each divide a sequence."""
    size, processes = engine.processes_per_sequence, _processes(engine, shape)
    if size == 1:
        return True
    evenly = processes % size == 0 and engine.data.sequence_length % size == 0
    return shape.min_pods == shape.max_pods and evenly


def _can_be_rebuilt(spec: "TrainingJobSpec") -> bool:
    memory, shape, engine = spec.checkpoint.memory, spec.shape, spec.engine
    if memory is None or engine is None:  # the latter is another rule's
        return True
    lost = engine.processes_per_pod * (1 if memory.parity is None else memory.parity)
    few = lost <= 1 or _processes(engine, shape) <= MOST_PROCESSES_OF_PARITIES
    return (memory.parity or 0) < shape.min_pods and few


def _has_parts(engine: TrainingEngine | None, shape: GangShape) -> bool:
    """Whether there are processes for what the job wants to divide among them."""
    if engine is None or engine.parallelism is None or engine.parallelism.sharding is Sharding.OPTIMIZER:
        return True
    return _processes(engine, shape) > 1


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
            f"{_PROCESSES} * self.engine.batch.microBatch <= self.engine.batch.sequences * {_SEQUENCE}",
            message="each process of spec.engine, or each group of parallelism.sequence processes, needs a micro-batch of its "
            "own; raise batch.sequences, or lower batch.microBatch or maxPods",
            field_path=".shape",
            holds=lambda spec: (
                spec.engine is None
                or _processes(spec.engine, spec.shape) * spec.engine.batch.micro_batch
                <= spec.engine.batch.sequences * spec.engine.processes_per_sequence
            ),
        ),
        Rule(
            cel=f"!has(self.engine) || {_PER_POD} <= self.shape.acceleratorsPerPod",
            message="each process of a pod needs an accelerator, or a core of a cpu pool, of its own; raise "
            "shape.acceleratorsPerPod, or lower engine.parallelism.processesPerPod",
            field_path=".shape.acceleratorsPerPod",
            holds=lambda spec: (
                spec.engine is None or spec.engine.processes_per_pod <= spec.shape.accelerators_per_pod
            ),
        ),
        Rule(
            cel=f"!has(self.engine) || {_SEQUENCE} == 1 || (self.shape.minPods == self.shape.maxPods && "
            f"{_PROCESSES} % {_SEQUENCE} == 0 && self.engine.data.sequenceLength % {_SEQUENCE} == 0)",
            message="parallelism.sequence divides the processes, with as many pods at least as at most, and "
            "data.sequenceLength; set shape.minPods and maxPods so that it does, and a length that it divides",
            field_path=".shape",
            holds=lambda spec: spec.engine is None or _sequences_are_shared(spec.engine, spec.shape),
        ),
        Rule(
            cel="!has(self.engine) || !has(self.engine.parallelism) || self.engine.parallelism.order != 'fixed' || "
            f"(self.shape.minPods == self.shape.maxPods && {_PROCESSES} in [1, 2, 4, 8] && "
            f"(self.engine.batch.sequences / self.engine.batch.microBatch) % {_PROCESSES} == 0)",
            message="parallelism.order: fixed needs 1, 2, 4 or 8 processes (minPods equal to maxPods) that share the step's "
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
            f"self.engine.parallelism.sharding == 'optimizer' || {_PROCESSES} > 1",
            message="parallelism.sharding divides the model among several processes; raise shape.maxPods or "
            "parallelism.processesPerPod, or remove it",
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
            cel="!has(self.engine) || !has(self.checkpoint) || !has(self.checkpoint.memory) || "
            "((has(self.checkpoint.memory.parity) ? self.checkpoint.memory.parity : 0) < self.shape.minPods && "
            f"((has(self.checkpoint.memory.parity) ? self.checkpoint.memory.parity : 1) * {_PER_POD} <= 1 || "
            f"{_PROCESSES} <= {MOST_PROCESSES_OF_PARITIES}))",
            message="of so many pods the others cannot rebuild the parts: checkpoint.memory.parity has to be less than "
            f"shape.minPods, and of more than {MOST_PROCESSES_OF_PARITIES} processes at most one may be lost at once",
            field_path=".checkpoint.memory.parity",
            holds=_can_be_rebuilt,
        ),
        Rule(
            cel="!has(self.engine) || !has(self.engine.adapters) || "
            f"({_PROCESSES} == 1 && (!has(self.checkpoint) || !has(self.checkpoint.memory)))",
            message="engine.adapters are trained in one process, without checkpoint.memory; set shape.maxPods: 1, or give each "
            "a job of its own",
            field_path=".engine.adapters",
            holds=lambda spec: (
                spec.engine is None
                or spec.engine.adapters is None
                or (_processes(spec.engine, spec.shape) == 1 and spec.checkpoint.memory is None)
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
