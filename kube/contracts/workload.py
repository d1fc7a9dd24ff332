"""The contract between a workload pod and the platform.

The operator tells a pod everything by environment variables; the pod tells the operator everything on one HTTP
port. Every call to the port, except `/health` and `/ready`, carries a bearer derived from the chart's secret and
the object's uid, so a tenant's pod cannot read another tenant's. At its end the container writes its last status
as the termination message, so that the numbers of a finished pod are not lost. Our engines and any user's image
keep the same contract; a pod without the port is legal and opaque.
"""

import hashlib
import hmac
from datetime import datetime
from enum import IntEnum, StrEnum
from typing import Any

from pydantic import Field

from busbar.kube.contracts.wire import WireModel

PORT_NAME = "busbar"
PORT = 9400
MASTER_PORT = 29500
UID = 65532
ARTIFACTS_ROOT = "/artifacts"
TERMINATION_LOG = "/dev/termination-log"
TERMINATION_LIMIT_BYTES = 4096
STATUS_LIMIT_BYTES = 64 * 1024
STATUS_TIMEOUT_S = 2.0

STATUS_PATH = "/status"
METRICS_PATH = "/metrics"
CHECKPOINT_PATH = "/checkpoint"
DRAIN_PATH = "/drain"
HEALTH_PATH = "/health"
READY_PATH = "/ready"
OPEN_PATHS = frozenset({HEALTH_PATH, READY_PATH})
"""Paths that need no bearer: the kubelet's probes."""


class Env(StrEnum):
    """Names of the environment variables that the operator sets."""

    JOB_NAME = "BUSBAR_JOB_NAME"
    NAMESPACE = "BUSBAR_NAMESPACE"
    JOB_UID = "BUSBAR_JOB_UID"
    KIND = "BUSBAR_KIND"
    ATTEMPT = "BUSBAR_ATTEMPT"
    SPEC = "BUSBAR_SPEC"
    """JSON of spec.engine of a TrainingJob, or of the spec of a ModelService."""
    MODE = "BUSBAR_MODE"
    """The engine mode the scheduler chose."""
    PORT = "BUSBAR_PORT"
    TOKEN = "BUSBAR_TOKEN"
    OUTPUT_DIR = "BUSBAR_OUTPUT_DIR"
    CHECKPOINT_DIR = "BUSBAR_CHECKPOINT_DIR"
    DATA_DIR = "BUSBAR_DATA_DIR"
    """Only where the data is a claim."""
    MODEL_DIR = "BUSBAR_MODEL_DIR"
    """Serving, or training from a model.uri."""
    GRACE_SECONDS = "BUSBAR_GRACE_SECONDS"
    MODEL_ID = "BUSBAR_MODEL_ID"
    """Serving: the name clients use."""
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
    """What a container's exit code means; any other code is a failure, tried again up to retryLimit."""

    DONE = 0
    SAVED_AFTER_SIGTERM = 143
    """State is saved; run me again to resume."""


class WorkloadKind(StrEnum):
    TRAINING = "training"
    SERVING = "serving"


class TrainingState(StrEnum):
    PREPARING = "Preparing"
    TRAINING = "Training"
    SAVING = "Saving"
    EVALUATING = "Evaluating"
    DONE = "Done"
    FAILED = "Failed"


class CheckpointReport(WireModel):
    """The last durable checkpoint."""

    step: int
    saved_at: datetime
    bytes: int = 0


class MemoryReport(WireModel):
    """Peaks so far, in bytes."""

    device_bytes: int = 0
    device_limit_bytes: int | None = None
    host_bytes: int = 0


class EvaluationReport(WireModel):
    """Bits per byte on held-out files."""

    bits_per_byte: float
    bigram_bits_per_byte: float | None = None
    ngram_bits_per_byte: float | None = None
    held_out_bytes: int


class FingerprintReport(WireModel):
    """Digests that let two runs be compared bit for bit, each SHA-256 in hex."""

    losses: str | None = None
    """Over (step, loss as float64) of all steps so far, also those before a restart."""
    weights: str | None = None
    """Of the final weights."""


class TrainingStatus(WireModel):
    """`GET /status` of a training pod; without `losses` it is also the termination message."""

    kind: WorkloadKind = WorkloadKind.TRAINING
    phase: TrainingState = TrainingState.PREPARING
    message: str = Field(default="", max_length=1024)
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    tokens: int = 0
    eta_seconds: float | None = None
    checkpoint: CheckpointReport | None = None
    resumed_from_step: int | None = None
    lost_steps: int = 0
    restored_attempt: int | None = None
    mode: str | None = None
    memory: MemoryReport | None = None
    evaluation: EvaluationReport | None = None
    fingerprint: FingerprintReport | None = None
    losses: list[tuple[int, float]] = Field(default_factory=list, max_length=200)
    report: dict[str, Any] = Field(default_factory=dict)
    """A cell for the performance table: class, mode, tokensPerSecond, peaks."""

    def termination_message(self) -> str:
        """This status in at most 4 KiB of JSON: without losses, and without the report where it would not fit."""
        slim = self.model_copy(update={"losses": []})
        for candidate in (slim, slim.model_copy(update={"report": {}, "message": self.message[:512]})):
            text = candidate.model_dump_json(by_alias=True, exclude_none=True)
            if len(text.encode()) <= TERMINATION_LIMIT_BYTES:
                return text
        return slim.model_copy(update={"report": {}, "message": ""}).model_dump_json(
            by_alias=True, exclude_none=True
        )


class ServingStatus(WireModel):
    """`GET /status` of a serving pod."""

    kind: WorkloadKind = WorkloadKind.SERVING
    ready: bool = False
    draining: bool = False
    model_id: str = ""
    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    requests_total: int = 0
    tokens_total: int = 0
    report: dict[str, Any] = Field(default_factory=dict)


class CheckpointAnswer(WireModel):
    """Answer of `POST /checkpoint`, sent when the state is durable."""

    step: int
    durable: bool


def bearer_for(secret: bytes, uid: str) -> str:
    """The bearer of every call to the pods of the object with this uid: HMAC-SHA256 in hex."""
    if len(secret) < 16:
        raise ValueError(
            "the workload key has fewer than 16 bytes; the chart's Secret busbar-workload-key is damaged"
        )
    return hmac.new(secret, uid.encode(), hashlib.sha256).hexdigest()


def is_authorised(header: str | None, token: str) -> bool:
    """Whether an Authorization header carries this bearer; the time taken does not depend on how much agrees."""
    scheme, _, given = (header or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())
