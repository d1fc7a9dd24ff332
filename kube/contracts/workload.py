"""The contract between a workload pod and the platform.

The operator configures a pod by environment variables; the pod reports to the operator on one HTTP port. Every call to
the port, except `/health` and `/ready`, carries a bearer that is valid for one object and one kind of call
(`bearers.py`); the pod reads the bearers from files. At its end the container writes its last status as the
termination message, so that the numbers of a finished pod are not lost. Our engines and users' images follow the same
contract; a pod without the port is allowed, and the operator then knows nothing of its progress.
"""

import statistics
from collections.abc import Sequence
from datetime import datetime
from enum import IntEnum, StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from busbar.kube.contracts import bearers
from busbar.kube.contracts.report import MaybeServingReport, MaybeTrainingReport
from busbar.kube.contracts.wire import WireModel

PORT_NAME = "busbar"
PORT = 9400
MASTER_PORT = 29500
UID = 65532
ARTIFACTS_ROOT = "/artifacts"
SHARED_MEMORY = "/dev/shm"
"""A volume in memory. It outlives a container that is started again, and counts in the pod's limit of memory."""
KEPT_WEIGHTS = f"{SHARED_MEMORY}/busbar-weights"
"""Where a serving pod of the builtin engine keeps weights, if its arguments ask for it."""
TERMINATION_LOG = "/dev/termination-log"
TERMINATION_LIMIT_BYTES = 4096
STATUS_LIMIT_BYTES = 64 * 1024
STATUS_TIMEOUT_S = 2.0

STATUS_PATH = "/status"
METRICS_PATH = "/metrics"
CHECKPOINT_PATH = "/checkpoint"
DRAIN_PATH = "/drain"
"""Of a serving pod with `{"peers": [addresses]}`: streams that can be moved go on there."""
MIGRATE_PATH = "/migrate"
KV_SHARES_PATH = "/kv_shares"
"""Of a serving pod of the builtin engine, with `KvShares`: those of its tenants from now on."""
SLEEP_PATH = "/sleep"
"""Without a level: 1, with the weights in host memory."""
WAKE_PATH = "/wake_up"
HEALTH_PATH = "/health"
READY_PATH = "/ready"

SLOW_WORKER = 1.5
"""Times the median of the other pods of a gang: one that takes so much of a step for itself is said to be slow."""


def others_seconds(own_seconds: Sequence[float]) -> float:
    """What the pods of a gang but the slowest take of a step for themselves, as a median; the slowest is the first of two or
    more."""
    return statistics.median(own_seconds[1:])


MOST_RUNNING = 64
"""Requests that a serving pod computes together where no argument says otherwise."""
TENANT_HEADER = "x-busbar-tenant"
KEY_HEADER = "x-busbar-key"
WEIGHT_HEADER = "x-busbar-weight"
BATCH_HEADER = "x-busbar-batch"
"""Any value: nobody waits for the answer, so the request gets what the others leave."""
"""The tenant for whom a request to a serving pod runs, and its share; set only by the gateway."""


class Env(StrEnum):
    """Names of the environment variables that the operator sets."""

    JOB_NAME = "BUSBAR_JOB_NAME"
    NAMESPACE = "BUSBAR_NAMESPACE"
    JOB_UID = "BUSBAR_JOB_UID"
    KIND = "BUSBAR_KIND"
    ATTEMPT = "BUSBAR_ATTEMPT"
    REPLACEMENT = "BUSBAR_REPLACEMENT"
    """How often the pod of this rank was replaced in the attempt; not set: never."""
    SPEC = "BUSBAR_SPEC"
    """JSON of spec.engine of a TrainingJob, or of the spec of a ModelService."""
    MODE = "BUSBAR_MODE"
    """Training: the engine mode the scheduler chose."""
    ACCELERATOR = "BUSBAR_ACCELERATOR"
    """The accelerator type of the pool."""
    PORT = "BUSBAR_PORT"
    BEARERS_DIR = bearers.FOLDER_ENV
    """The folder of the files `read`, `infer` and `command`; only if the port is declared."""
    OUTPUT_DIR = "BUSBAR_OUTPUT_DIR"
    CHECKPOINT_DIR = "BUSBAR_CHECKPOINT_DIR"
    DATA_DIR = "BUSBAR_DATA_DIR"
    """Only if the data is on a claim."""
    MODEL_DIR = "BUSBAR_MODEL_DIR"
    """Serving, or training from a model.uri."""
    GRACE_SECONDS = "BUSBAR_GRACE_SECONDS"
    CPU_MILLICORES = "BUSBAR_CPU_MILLICORES"
    """The pod's CPU request, which its engine must not exceed."""
    MODEL_ID = "BUSBAR_MODEL_ID"
    """Serving: the name clients use."""
    ROLE = "BUSBAR_ROLE"
    """Serving by our engine: what the replica does with a request (`ReplicaRole`)."""
    CHECKPOINT = "BUSBAR_CHECKPOINT"
    """JSON of spec.checkpoint of a TrainingJob."""

    RANK = "RANK"
    WORLD_SIZE = "WORLD_SIZE"
    LOCAL_RANK = "LOCAL_RANK"
    LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
    NODE_RANK = "NODE_RANK"
    GROUP_RANK = "GROUP_RANK"
    MASTER_ADDR = "MASTER_ADDR"
    MASTER_PORT = "MASTER_PORT"
    PET_NNODES = "PET_NNODES"
    PET_NODE_RANK = "PET_NODE_RANK"
    PET_MASTER_ADDR = "PET_MASTER_ADDR"
    PET_MASTER_PORT = "PET_MASTER_PORT"
    PET_NPROC_PER_NODE = "PET_NPROC_PER_NODE"


class ExitCode(IntEnum):
    """The meaning of a container's exit code; any other code is a failure, retried up to retryLimit."""

    DONE = 0
    FAILED = 1
    INVALID = 2
    """The job cannot run as it is; from our engines, no retry can help."""
    SAVED_AFTER_SIGTERM = 143
    """State is saved; the operator must run the pod again to resume."""


class WorkloadKind(StrEnum):
    TRAINING = "training"
    SERVING = "serving"


DOES_NOT_FIT = "does-not-fit"
"""`TrainingStatus.error_code` of a job whose plan needs more memory or disk than there is."""


class TrainingState(StrEnum):
    PREPARING = "Preparing"
    TRAINING = "Training"
    SAVING = "Saving"
    EVALUATING = "Evaluating"
    DONE = "Done"
    FAILED = "Failed"


Digest = Annotated[str, Field(max_length=253)]


class CheckpointReport(WireModel):
    """The last durable checkpoint."""

    step: int
    saved_at: datetime
    bytes: int = 0
    bytes_per_second: float | None = None
    """At which the disk took it; None: it is too small to tell, or another process wrote it."""
    usual_bytes_per_second: float | None = None
    slow_in_a_row: int = 0
    """The newest checkpoints that the disk took at less than half of the usual rate."""


class PhaseMemory(WireModel):
    """Host memory of one phase of a run, in bytes."""

    planned_bytes: int = 0
    measured_bytes: int | None = None
    """None: the phase has not ended yet."""


class MemoryReport(WireModel):
    """Peaks so far, in bytes."""

    device_bytes: int = 0
    device_limit_bytes: int | None = None
    host_bytes: int = 0
    device_owners: dict[str, int] = Field(default_factory=dict, max_length=64)
    """Planned bytes by purpose."""
    host_owners: dict[str, int] = Field(default_factory=dict, max_length=64)
    disk_owners: dict[str, int] = Field(default_factory=dict, max_length=64)
    phases: dict[str, PhaseMemory] = Field(default_factory=dict, max_length=16)


class RunSeconds(WireModel):
    """Of a training run; None: not known."""

    step: float | None = None
    stall: float | None = None
    """That one checkpoint holds training up."""
    durable: float | None = None
    """From the step that asks for a checkpoint until it is durable."""


class TimingReport(WireModel):
    """What the plan predicted, before the model was made, and what was measured."""

    predicted: RunSeconds = RunSeconds()
    measured: RunSeconds = RunSeconds()
    ratio: float | None = None
    """Predicted seconds per step to measured ones."""


class EvaluationReport(WireModel):
    """Bits per byte on held-out files."""

    bits_per_byte: float
    bigram_bits_per_byte: float | None = None
    ngram_bits_per_byte: float | None = None
    held_out_bytes: int


class FingerprintReport(WireModel):
    """Digests for comparing two runs bit for bit, each SHA-256 in hex."""

    losses: Digest | None = None
    """Over (step, loss as float64) of all steps so far, also those before a restart."""
    weights: Digest | None = None
    """Of the final weights."""


class ModelReport(WireModel):
    """How much of the model is trained."""

    parameters: int = 0
    trainable_parameters: int = 0
    adapter: Annotated[str, Field(max_length=253)] | None = None
    """The adapter in words; None: the model's own weights are trained, all or some."""


class AdapterProgressReport(WireModel):
    """One of several adapters that a job trains one after another."""

    name: Annotated[str, Field(max_length=63)]
    step: int = 0
    steps: int = 0
    loss: float | None = None
    """Of its last step."""
    finished: bool = False
    """Its result is written."""
    evaluation: EvaluationReport | None = None
    fingerprint: FingerprintReport | None = None
    """Equal to that of the same adapter in a job of its own."""


class StepPhaseSeconds(WireModel):
    """What the steps of a training process were spent on, as the engine says (`workloads/training/step_clock.py`)."""

    forward: float = 0.0
    backward: float = 0.0
    exchange: float = 0.0
    load: float = 0.0
    wait: float = 0.0
    update: float = 0.0
    other: float = 0.0


class SlowLinkReport(WireModel):
    """A direction of the link between device and host that has moved less than half of the usual rate for some steps."""

    direction: Literal["load", "store"]
    """To the device, or from it."""
    bytes_per_second: float = Field(ge=0)
    """In the last step."""
    usual_bytes_per_second: float = Field(ge=0)


class WorkerReport(WireModel):
    """One rank of a gang."""

    rank: int = Field(ge=0)
    own_seconds: float = Field(ge=0)
    """Of a step that it does not spend in exchanges: the others wait for the rank with the most."""


class TrainingStatus(WireModel):
    """`GET /status` of a training pod; without `losses` it is also the termination message."""

    kind: WorkloadKind = WorkloadKind.TRAINING
    phase: TrainingState = TrainingState.PREPARING
    message: str = Field(default="", max_length=1024)
    error_code: Annotated[str, Field(max_length=63)] | None = None
    """A stable word for the error that ended it (`workloads/training/errors.py`); None: another one, or none."""
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    model_tflops: float | None = None
    """The same in 10^12 operations per second of the whole job, without what is computed twice; None: not known."""
    tokens: int = 0
    eta_seconds: float | None = None
    checkpoint: CheckpointReport | None = None
    resumed_from_step: int | None = None
    lost_steps: int = 0
    restored_attempt: int | None = None
    skipped_steps: int = 0
    """Steps that were skipped because their gradient norm was not finite."""
    bad_rows: int = 0
    """Rows of the data that were left out (data.onBadRow: skip), of those that were read for training."""
    replayed_steps: int = 0
    replay_mismatches: int = 0
    """Steps that were repeated after a restart and gave another loss."""
    mode: str | None = None
    activations: Annotated[str, Field(max_length=63)] | None = None
    """keep or recompute: what the plan chose for those inside a block; none: there is no backward pass."""
    model: ModelReport | None = None
    memory: MemoryReport | None = None
    timing: TimingReport | None = None
    """None: nothing was predicted."""
    phase_seconds: StepPhaseSeconds | None = None
    """None: no step is done, or it does not tell."""
    workers: list[WorkerReport] = Field(default_factory=list, max_length=1024)
    """Of a gang, the slowest first; empty: not known yet, or it is one pod."""
    link: SlowLinkReport | None = None
    """None: it is not slow, or nothing crosses it."""
    evaluation: EvaluationReport | None = None
    fingerprint: FingerprintReport | None = None
    adapters: list[AdapterProgressReport] = Field(default_factory=list, max_length=16)
    """Of a job that trains several; steps of the whole job then count through all of them."""
    losses: list[tuple[int, float]] = Field(default_factory=list, max_length=200)
    report: MaybeTrainingReport = None

    def termination_message(self) -> str:
        """This status in at most 4 KiB of JSON: without losses, and without the report if that does not fit."""
        memory = self.memory and self.memory.model_copy(
            update={"device_owners": {}, "host_owners": {}, "disk_owners": {}}
        )
        slim = self.model_copy(update={"losses": [], "memory": memory, "workers": self.workers[:16]})
        short = slim.model_copy(update={"report": None, "message": self.message[:512], "workers": []})
        bare = [each.model_copy(update={"evaluation": None, "fingerprint": None}) for each in self.adapters]
        for candidate in (slim, short, short.model_copy(update={"adapters": bare})):
            text = candidate.model_dump_json(by_alias=True, exclude_none=True)
            if len(text.encode()) <= TERMINATION_LIMIT_BYTES:
                return text
        return short.model_copy(update={"message": "", "adapters": []}).model_dump_json(
            by_alias=True, exclude_none=True
        )


class AdapterReport(WireModel):
    """An adapter of a serving pod."""

    name: Annotated[str, Field(max_length=63)]
    in_memory: bool = False
    message: Annotated[str, Field(max_length=1024)] | None = None
    """Why it is not served; None: it is."""


class TenantBlocks(WireModel):
    """KV blocks of one tenant in one replica."""

    tenant: str
    held: int = Field(ge=0)
    guaranteed: int = Field(ge=0)
    most: int = Field(ge=0)


class KvShare(WireModel):
    """Of the KV cache of one replica, for one tenant: parts of 1."""

    tenant: Annotated[str, Field(min_length=1, max_length=253)]
    guaranteed: float = Field(default=0.0, ge=0, le=1)
    most: float = Field(default=1.0, ge=0, le=1)


class KvShares(WireModel):
    """The body of `POST /kv_shares`: all of them; who is not named has none."""

    tenants: list[KvShare] = Field(max_length=256)


class PhaseSeconds(WireModel):
    """What an engine has spent its time on since its start."""

    prefill: float = Field(ge=0)
    """Reading prompts; of steps that decode besides, by the step model."""
    decode: float = Field(ge=0)
    idle: float = Field(ge=0)


class StepSums(WireModel):
    """What the steps of one kind were made of since an engine's start, and what they took: the sums of what its step model
    is fitted to, so that the model's time for just these steps can be told from them."""

    steps: float = Field(ge=0)
    sequences: float = Field(ge=0)
    """That got their next token."""
    context_tokens: float = Field(ge=0)
    prompt_tokens: float = Field(ge=0)
    seconds: float = Field(ge=0)


class PhaseSteps(WireModel):
    """An engine's steps by what there was more of in them."""

    prefill: StepSums
    """More tokens of prompts than decoded ones."""
    decode: StepSums
    """All others."""


class ReplicaRole(StrEnum):
    """What a serving replica does with a request."""

    BOTH = "both"
    PREFILL = "prefill"
    """It computes prompts, and hands each stream to another replica at its first token."""
    DECODE = "decode"
    """It goes on with streams whose prompts others have computed."""


MOST_CAUSE = 512


class RestartReport(WireModel):
    """Of a server that was started again after a crash while its container went on."""

    count: int = Field(ge=1)
    """Times since the container's start."""
    cause: Annotated[str, Field(max_length=MOST_CAUSE)]
    """What ended the last one."""
    at: AwareDatetime
    """When it ended."""


class DrainReport(WireModel):
    """What has become of the requests of a serving pod since its drain began."""

    requests: int = Field(ge=0)
    """That were there then."""
    copied: int = Field(default=0, ge=0)
    """Of these, streams that another replica has taken with their keys and values."""
    recomputed: int = Field(default=0, ge=0)
    """Streams that another replica goes on with by computing their tokens again."""


class ServingStatus(WireModel):
    """`GET /status` of a serving pod."""

    kind: WorkloadKind = WorkloadKind.SERVING
    ready: bool = False
    draining: bool = False
    model_id: str = ""
    role: ReplicaRole = ReplicaRole.BOTH
    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    kv_tenants: list[TenantBlocks] = Field(default_factory=list)
    """Tenants with a share of the KV cache of their own."""
    kv_shares: list[KvShare] | None = Field(default=None, max_length=256)
    """Those that the operator asked for last, at the start or since; None: it cannot be asked."""
    kv_shares_refused: Annotated[str, Field(max_length=1024)] = ""
    """Why they are not kept, and the former ones are; empty: they are."""
    requests_total: int = 0
    tokens_total: int = 0
    adapters: list[AdapterReport] = Field(default_factory=list, max_length=64)
    """The first 64 of those that are known by name."""
    adapters_asked: Annotated[str, Field(max_length=64)] | None = None
    """The digest of those that the operator asked for last, at the start or since (`adapters.py`); None: it cannot be
    asked."""
    saturated: bool = False
    """Whether the promised time per token would need steps smaller than the minimum."""
    sleep_level: int = 0
    """0: awake; 1: without KV cache; 2: without weights."""
    drain: DrainReport | None = None
    """None: it does not drain, or does not tell."""
    restarted: RestartReport | None = None
    """None: no crash was before it in its container, or it does not tell."""
    phase_seconds: PhaseSeconds | None = None
    """None: it has not begun, or does not tell."""
    phase_steps: PhaseSteps | None = None
    """None: the same."""
    report: MaybeServingReport = None


class CheckpointAnswer(WireModel):
    """Answer of `POST /checkpoint`, sent after the state is durable."""

    step: int
    durable: bool
