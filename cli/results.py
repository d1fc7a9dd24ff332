"""What the client returns: REST's answers as typed, immutable values.

They have the fields that this version knows and ignore others, so that an older client works with a newer server.
Objects of our kinds stay whole: `Object.document` is the JSON of the answer, and `Object.typed()` the full model.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import Field

from busbar.kube.contracts.wire import WireModel


@dataclass(frozen=True)
class Kind:
    """One of the two kinds that REST manages."""

    name: str
    plural: str
    aliases: frozenset[str]


TRAINING_JOB = Kind(
    "TrainingJob", "trainingjobs", frozenset({"trainingjob", "trainingjobs", "bbtj", "job", "jobs"})
)
MODEL_SERVICE = Kind(
    "ModelService",
    "modelservices",
    frozenset({"modelservice", "modelservices", "bbms", "service", "services"}),
)
KINDS = (TRAINING_JOB, MODEL_SERVICE)


class Progress(WireModel):
    """Progress of a training run."""

    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None


class ResourceMeta(WireModel):
    """What is read of an object's metadata."""

    name: str = Field(min_length=1)
    namespace: str = ""
    creation_timestamp: datetime | None = None


class Resource(WireModel):
    """What each object of Kubernetes has."""

    metadata: ResourceMeta
    spec: dict[str, Any] | None = None
    status: dict[str, Any] | None = None


@dataclass(frozen=True)
class Object:
    """A TrainingJob or ModelService."""

    kind: Kind
    document: dict[str, Any]

    @property
    def metadata(self) -> dict[str, Any]:
        return self.document.get("metadata") or {}

    @property
    def spec(self) -> dict[str, Any]:
        return self.document.get("spec") or {}

    @property
    def status(self) -> dict[str, Any]:
        return self.document.get("status") or {}

    @property
    def name(self) -> str:
        return str(self.metadata.get("name", ""))

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace", ""))

    @property
    def reference(self) -> str:
        """`trainingjob/name`, as commands take and print it."""
        return f"{self.kind.name.lower()}/{self.name}"

    @property
    def phase(self) -> str:
        return str(self.status.get("phase") or "Pending")

    @property
    def reason(self) -> str:
        return str(self.status.get("reason") or "")

    @property
    def message(self) -> str:
        return str(self.status.get("message") or "")

    @property
    def progress(self) -> Progress:
        return Progress.model_validate(self.status.get("progress") or {})

    @property
    def created_at(self) -> datetime | None:
        text = self.metadata.get("creationTimestamp")
        return datetime.fromisoformat(text) if text else None

    def typed(self) -> Any:
        """The full model of `busbar.kube.types`; raises pydantic.ValidationError for fields it does not know."""
        from busbar.kube import types

        return getattr(types, self.kind.name).model_validate(self.document)


class Membership(WireModel):
    """One tenant of the caller."""

    tenant: str
    role: str = ""
    namespaces: list[str] = Field(default_factory=list)


class Me(WireModel):
    """The caller as the server has identified it."""

    subject: str
    admin: bool = False
    tenants: list[Membership] = Field(default_factory=list)

    @property
    def namespaces(self) -> list[str]:
        return sorted({name for tenant in self.tenants for name in tenant.namespaces})


class Change(WireModel):
    """The smallest change of one kind that would let a draft start now."""

    kind: str
    current: str = ""
    needed: str = ""


class Preview(WireModel):
    """The decision that the next scheduling round would make about a draft."""

    starts_now: bool
    possible: bool = True
    reason: str = ""
    when: str = ""
    code: str = ""
    pool: str = ""
    accelerator: str = ""
    mode: str = ""
    replicas: int = 0
    replicas_starting: int = 0
    pods: int = 0
    accelerators: float = 0.0
    cost_per_hour: float | None = None
    finishes_in_seconds: float | None = None
    finishes_in_low_seconds: float | None = None
    finishes_in_high_seconds: float | None = None
    estimated_cost: float | None = None
    accelerator_hours: float | None = None
    watts: float | None = None
    kilowatt_hours: float | None = None
    kilowatt_hours_low: float | None = None
    kilowatt_hours_high: float | None = None
    power_cap_percent: int | None = None
    power_cap_speed: float | None = None
    changes: list[Change] = Field(default_factory=list)
    deadline: str = ""
    start_p50_seconds: float | None = None
    start_p90_seconds: float | None = None
    end_p50_seconds: float | None = None
    end_p90_seconds: float | None = None
    past_forecasts: int = 0
    past_before_p50: float | None = None
    past_before_p90: float | None = None


class Event(WireModel):
    """A Kubernetes event of an object or its pods."""

    type: str = ""
    reason: str = ""
    message: str = ""
    object: str = ""
    count: int = 1
    last_seen: str | None = None


class TokenBudget(WireModel):
    """Money for inference in a period."""

    period: str
    cost: float

    def __str__(self) -> str:
        return f"{self.cost:g}/{self.period}"


class TokenLimits(WireModel):
    """What inference with a token may use; None: not limited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budgets: list[TokenBudget] | None = None

    def __str__(self) -> str:
        rates = (
            (self.requests_per_minute, "requests/min"),
            (self.tokens_per_minute, "tokens/min"),
        )
        parts = [f"{most} {what}" for most, what in rates if most is not None]
        return ", ".join([*parts, *map(str, self.budgets or ())])


class Token(WireModel):
    """An API token without its text."""

    id: str
    subject: str = ""
    description: str = ""
    prefix: str = ""
    role: str = ""
    scopes: list[str] = Field(default_factory=list)
    tenant: str | None = None
    created_at: datetime | None = None
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None
    limits: TokenLimits | None = None


class NewToken(WireModel):
    """A token with its text, which is shown only once."""

    token: str = Field(repr=False)
    info: Token


class RotatedToken(NewToken):
    """A token in place of another, which ends at its new `expires_at`."""

    former: Token


class InferenceUsage(WireModel):
    """Requests and tokens of one group."""

    group: str
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost: float = 0.0


class ComputeUsage(WireModel):
    """Accelerator time of one group."""

    group: str
    jobs: int = 0
    accelerator_seconds: float = 0.0
    work_units: float = 0.0
    energy_joules: float = 0.0
    cost: float = 0.0
    lost_seconds: float = 0.0
    caused_seconds: float = 0.0
    caused_cost: float = 0.0


class Usage(WireModel):
    """Sums over a time range."""

    by: str
    since: datetime
    until: datetime
    inference: list[InferenceUsage] = Field(default_factory=list)
    compute: list[ComputeUsage] = Field(default_factory=list)


class UsageLine(WireModel):
    """One line of an export; texts that it is not summed by are empty."""

    tenant: str = ""
    namespace: str = ""
    name: str = ""
    user: str = ""
    objects: int = 0
    accelerator_hours: float = 0.0
    work_units: float = 0.0
    kilowatt_hours: float | None = None
    cost: float = 0.0
    lost_hours: float = 0.0
    caused_hours: float = 0.0
    caused_cost: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    joules_per_token: float | None = None


class UsageLines(WireModel):
    """Use of a range of time, as an export has it."""

    by: str
    since: datetime
    until: datetime
    items: list[UsageLine] = Field(default_factory=list)


class DatabaseState(WireModel):
    """Whether a backup can be restored into the server's database."""

    revision: str
    version: str = ""
    unused: bool
    found: list[str] = Field(default_factory=list)


class DatabaseRestored(WireModel):
    """What a restore wrote."""

    rows: int
    made_at: datetime
    made_by: str = ""


class Node(WireModel):
    """One node and what jobs have allocated on it."""

    name: str
    pool: str = ""
    accelerator: str = ""
    ready: bool = False
    capacity: float = 0.0
    allocated: float = 0.0


class Model(WireModel):
    """A model that the caller may use."""

    id: str
    namespace: str = ""
    service: str = ""
    tenant: str = ""
    ready: bool = False
    phase: str = ""
    replicas: int = 0
