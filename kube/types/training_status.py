"""The status of a TrainingJob: what the operator has observed and decided, and what the engine has told."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from busbar.kube.types.forecast import Promise, StartForecast
from busbar.kube.types.lost_work import GivesWayTo, LostWork
from busbar.kube.types.meta import (
    CamelReason,
    Conditions,
    Sentence,
    ShortText,
    StatusModel,
)
from busbar.kube.types.training_sections import MOST_ADAPTERS

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
    needs_node: bool | None = Field(
        default=None, description="Its pod waits for another node, as its own takes none. Absent: it has one."
    )


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


class LinkDirection(StrEnum):
    """Of the link between device and host."""

    LOAD = "load"
    STORE = "store"


class SlowLink(StatusModel):
    """A direction of the link between an accelerator and its host that moves less than half of what it did before."""

    direction: LinkDirection = Field(description="load: to the accelerator; store: from it.")
    mib_per_second: Count = Field(default=0, description="Its rate in the last step.")
    usual_mib_per_second: Count = Field(default=0, description="The median of earlier steps, or a probe's.")


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
        description="Ranks of a gang, the slowest first; absent: it is one process, or does not tell.",
    )
    slow_link: SlowLink | None = Field(
        default=None,
        description="A link of the first process's accelerator that became slow; absent: none did, or nothing crosses it.",
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


class MemoryPlace(StrEnum):
    """Where bytes are."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


MOST_OWNERS = 48
"""Rows of a plan in the status, of which there are about twenty."""


class PlannedBytes(StatusModel):
    """What the engine's plan has a part of a memory, or of a disk, for."""

    place: MemoryPlace = Field(description="device, host or disk.")
    owner: Annotated[str, Field(max_length=63)] = Field(
        description="Such as parameters, gradients, optimizer, activations, checkpoint or tokens."
    )
    mib: Count = Field(description="Its size, rounded up.")


class MemoryUse(StatusModel):
    """Memory of one process of the engine: what its plan predicted, and the peak so far."""

    planned_device_mib: Count | None = Field(default=None, description="Device memory by plan.")
    peak_device_mib: Count | None = Field(default=None, description="Peak device memory.")
    planned_host_mib: Count | None = Field(default=None, description="Host memory by plan.")
    peak_host_mib: Count | None = Field(default=None, description="Peak host memory.")
    owners: Annotated[list[PlannedBytes], Field(max_length=MOST_OWNERS)] | None = Field(
        default=None,
        description="What the plan is made of, by place, the largest first; on disk are the checkpoints and the result of the whole "
        "job. Absent where the engine does not tell.",
    )


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

    @property
    def power_of_attempt(self) -> PowerUse | None:
        """What power limits have cost the present attempt; None: nothing is known of it."""
        return self.power if self.power is not None and self.power.attempt == self.attempt else None
