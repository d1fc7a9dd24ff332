"""`GET /routes` of the operator: the replicas of each service, as a stream of complete documents.

NDJSON: one document for each change and one every 15 s. So a gateway that missed a line is current again within 15 s,
and one that has received nothing for longer knows that its routes are stale (it keeps using them).
"""

from typing import Annotated

from pydantic import Field

from busbar.kube.contracts.allowances import Price
from busbar.kube.contracts.demand import PROMPT_EDGES
from busbar.kube.contracts.wire import WireModel
from busbar.kube.contracts.workload import ReplicaRole

PATH = "/routes"
RESEND_S = 15.0


class ReplicaSpeed(WireModel):
    """Seconds of one step of a replica's engine: a linear model of the step's content, as the engine has fitted it."""

    per_step_s: float = 0.0
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0
    per_prompt_token_s: float = 0.0


class Endpoint(WireModel):
    """One replica."""

    pod: str
    pool: str = ""
    url: str
    ready: bool
    draining: bool = False
    bearer: str | None = Field(default=None, repr=False)
    """Set where it differs from the service's: a replica made by a release without roles (`bearers.py`)."""
    speed: ReplicaSpeed | None = None
    """None: not measured yet, or an engine that tells none."""
    kv_tokens: int | None = None
    """Tokens of context that it holds."""
    most_running: int | None = None
    """Requests that it computes together."""
    role: ReplicaRole = ReplicaRole.BOTH
    lacks: list[str] = Field(default_factory=list)
    """Adapters of the service that this replica does not serve, or not yet."""


class Promise(WireModel):
    """The service's latency targets, against which the gateway holds its answers."""

    ttft_ms: int | None = None
    tpot_ms: int | None = None


class BucketShares(WireModel):
    """Where the requests of one class of prompts (`demand.PROMPT_EDGES`) go."""

    prompt: Annotated[int, Field(ge=0, le=len(PROMPT_EDGES))]
    """Index of the class."""
    pools: dict[str, Annotated[float, Field(ge=0, le=1)]]
    """Shares of the pools that serve it within the target; 0: only where the others wait too long."""


class AdapterRoute(WireModel):
    """A LoRA adapter of a service's model."""

    name: str
    tenants: list[str] | None = None
    """Who may use it; None: all that may use the service."""
    problem: str | None = None
    """Why no replica serves it; None: some do, or may."""
    price: Price | None = None
    """None: the service's."""


class AccessRoute(WireModel):
    """A tenant that may use a service besides the owner's, or the owner's own with a weight."""

    tenant: str
    weight: float = 1.0
    tokens_per_minute: int | None = None


class ServiceRoute(WireModel):
    """One ModelService, with the bearer for inference that its replicas require."""

    tenant: str
    namespace: str
    name: str
    uid: str
    model_id: str
    desired_replicas: int = 0
    ready_replicas: int = 0
    suspended: bool = False
    min_replicas: int = 0
    max_replicas: int = 1
    max_model_len: int | None = None
    """Longest prompt plus output in tokens that every replica takes; None: nobody has told."""
    slo: Promise | None = None
    access: list[AccessRoute] = Field(default_factory=list)
    price: Price | None = None
    """None: its tokens cost nothing."""
    adapters: list[AdapterRoute] = Field(default_factory=list)
    ranked: bool = False
    """Its model server orders requests by the field `priority`, lowest first: vLLM or SGLang with arguments that say so."""
    bearer: str = Field(repr=False)
    endpoints: list[Endpoint] = Field(default_factory=list)
    shares: list[BucketShares] = Field(default_factory=list)
    """By the mix of pools that keeps the latency target; a class that is not here goes where the gateway thinks best."""

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    def price_of(self, adapter: str) -> Price | None:
        """Of the tokens of a request with this adapter; empty: with the model alone."""
        own = next((each.price for each in self.adapters if each.name == adapter), None)
        return own or self.price

    def terms_of(self, tenant: str) -> AccessRoute | None:
        """What a tenant has of this service; None: it may not use it."""
        named = next((entry for entry in self.access if entry.tenant == tenant), None)
        if not self.tenant or not tenant:
            return None
        return named or (AccessRoute(tenant=tenant) if tenant == self.tenant else None)


class Routes(WireModel):
    """One whole document of the stream; the revision grows with each change until the operator restarts."""

    revision: int
    services: list[ServiceRoute] = Field(default_factory=list)
