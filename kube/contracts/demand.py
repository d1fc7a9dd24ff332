"""`GET /demand` of the gateway: the requests of each service, now and lately. The autoscaler needs no metrics stack.

The gateway counts requests when they arrive; their size and what their clients saw are known only when they end. So
`WindowDemand.arrivals` and `WindowDemand.sizes` count different requests: the first those that came within the window,
the second those that were answered within it.
"""

from datetime import datetime
from typing import Annotated

from pydantic import Field, WrapValidator

from busbar.kube.contracts.allowances import CostAllowance
from busbar.kube.contracts.report import none_if_unreadable
from busbar.kube.contracts.wire import WireModel

PATH = "/demand"
WINDOWS_S = (10, 60, 180)
PROMPT_EDGES = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
OUTPUT_EDGES = (16, 64, 128, 256, 512, 1024, 4096)
"""Upper ends of the classes of sizes in tokens; above the last edge is one more class."""
TIME_EDGES_MS = tuple(2 ** (i / 4) for i in range(80))
"""Upper ends of the classes of times, from 1 ms to 15 minutes, each 1.19 times the one before; above is one more class."""

Number = Annotated[int, Field(ge=0, le=2**53)]
Age = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""Seconds; the bound keeps it a moment that a calendar has."""


class Outcomes(WireModel):
    """What became of requests. Requests whose client left, and those that were wrong in themselves, are not counted."""

    answered: Number = 0
    within: Number = 0
    """Answered within all targets of the service; without a target every answer is."""
    late_first_token: Number = 0
    late_tokens: Number = 0
    refused: Number = 0
    """Turned away by the gateway, or failed at the replicas."""


TimeCounts = Annotated[
    dict[Annotated[int, Field(ge=0, le=len(TIME_EDGES_MS))], Number],
    Field(max_length=len(TIME_EDGES_MS) + 1),
]
"""By index of the class (`TIME_EDGES_MS`), how many answers took so long; classes of none are left out."""


class Totals(Outcomes):
    """What was answered since the gateway started; nothing of it ever falls but by a restart."""

    prompt_tokens: Number = 0
    output_tokens: Number = 0
    first_token: TimeCounts = Field(default_factory=dict)
    """Streams by the time to their first token."""
    per_token: TimeCounts = Field(default_factory=dict)
    """Streams of more than one token by the mean time of each but the first."""


class SizeCount(WireModel):
    """Answered requests of one class of sizes."""

    prompt: Annotated[int, Field(ge=0, le=len(PROMPT_EDGES))]
    """Index of the class, by `PROMPT_EDGES`."""
    output: Annotated[int, Field(ge=0, le=len(OUTPUT_EDGES))]
    count: Annotated[int, Field(ge=1, le=2**53)]
    prompt_tokens: Number
    output_tokens: Number
    """Sums over these requests."""


class WindowDemand(Outcomes):
    """The last seconds."""

    seconds: Annotated[int, Field(ge=1)]
    arrivals: Number = 0
    sizes: list[SizeCount] = Field(default_factory=list)


MaybeWindows = Annotated[list[WindowDemand] | None, WrapValidator(none_if_unreadable)]
MaybeTotals = Annotated[Totals | None, WrapValidator(none_if_unreadable)]


class TenantDemand(WireModel):
    """What one tenant asks of a shared service now."""

    tenant: str
    waiting: Number = 0
    in_flight: Number = 0


class ReplicaContact(WireModel):
    """What one gateway has had from one replica lately. A replica that it sent nothing to is not told of."""

    pod: str
    url: str
    """As the routes have it: another pod of this name has another one."""
    failures: Number = 0
    """Requests since its last answer that got none: they could not connect, broke off, or hear nothing while its health check
    does not answer either."""
    failing_seconds: Age | None = None
    """Since the first of these; None: there is none."""
    heard_seconds: Age | None = None
    """Since its last answer of any kind; None: there was none."""


MaybeContacts = Annotated[list[ReplicaContact] | None, WrapValidator(none_if_unreadable)]


class ServiceDemand(WireModel):
    """One service's requests as the gateway sees them."""

    namespace: str
    name: str
    waiting: Number = 0
    """Requests queued at the gateway because no replica can accept them yet."""
    in_flight: Number = 0
    arrivals: Number = 0
    """Requests since the gateway started."""
    last_request_age_seconds: Age | None = None
    overdue: Number = 0
    """Requests without a first token that have waited at least half of the service's target for it."""
    oldest_wait_seconds: Age | None = None
    """Of the request that has waited longest for its first token, or for a replica where it is no stream."""
    windows: MaybeWindows = None
    """By `WINDOWS_S`; empty: no request for longer than the longest. None: an older gateway, or unreadable."""
    totals: MaybeTotals = None
    """Since the gateway started."""
    tenants: list[TenantDemand] = Field(default_factory=list)
    """Of a service that is shared, those that may use it."""
    replicas: MaybeContacts = None
    """One row for each gateway that has had to do with a replica. None: an older gateway, or unreadable."""

    def window(self, seconds: int) -> WindowDemand | None:
        """One of the windows; zeros where nothing came; None where the gateway tells none."""
        if self.windows is None:
            return None
        return next((w for w in self.windows if w.seconds == seconds), WindowDemand(seconds=seconds))


class AccountUse(WireModel):
    """What a tenant with limits of inference uses now."""

    tenant: str
    requests: Number = 0
    tokens: Number = 0
    """Of the last minute."""
    costs: list[CostAllowance] = Field(default_factory=list)
    """Of the present periods; spent and reserved."""


class Demand(WireModel):
    """All services that the gateway knows."""

    services: list[ServiceDemand] = Field(default_factory=list)
    accounts: list[AccountUse] = Field(default_factory=list)
    as_of: datetime
    counted_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """How long this gateway has counted: a window is full only once it has lasted as long. None: an older gateway."""
