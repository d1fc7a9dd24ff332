"""`POST /service-plan` on the operator's internal port: the cheapest replicas of a service for a stated load.

Only the operator has the sizes of a service's requests, the speeds that replicas measured, and the program that chooses
between pools. The API passes its answer on to those who may read the service.
"""

from typing import Annotated

from pydantic import Field

from busbar.kube.contracts.wire import WireModel

PATH = "/service-plan"
MOST_RATE = 1e6
Rate = Annotated[float, Field(gt=0, le=MOST_RATE, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=1, le=3_600_000, allow_inf_nan=False)]
Percentile = Annotated[float, Field(ge=50, le=99.99, allow_inf_nan=False)]


class ServicePlanRequest(WireModel):
    """POST body. A target that is absent is that of `spec.slo`."""

    namespace: str
    name: str
    rate: Rate
    """Requests per second, of the sizes that the service's requests have now."""
    ttft_milliseconds: Milliseconds | None = None
    tpot_milliseconds: Milliseconds | None = None
    percentile: Percentile | None = None


class PlannedPool(WireModel):
    """Replicas in one pool."""

    pool: str
    accelerator: str
    replicas: int
    """In the cheapest mix."""
    requests_per_second: float
    """What one replica there sustains within the target."""
    cost_per_hour: float | None = None
    """Price of one replica; None: not every pool has a price."""
    alone: int | None = None
    """Replicas that carry the load without other pools; None: it holds too few, or one serves not all sizes."""


class ServicePlanAnswer(WireModel):
    """The cheapest mix, or why there is none."""

    possible: bool
    """Whether the replicas of `pools` carry the whole load within the target."""
    reason: str
    """One sentence: what carries it, or why nothing does."""
    rate: float
    ttft_milliseconds: float | None = None
    tpot_milliseconds: float | None = None
    percentile: float | None = None
    pools: tuple[PlannedPool, ...] = ()
    """Those with a known speed, also where the mix has no replicas, by name."""
    cost_per_hour: float | None = None
    """Of the whole mix; None: not every pool has a price."""
    prompt_tokens: float | None = None
    """Mean of the service's requests now."""
    output_tokens: float | None = None
    notes: tuple[str, ...] = ()
    """What is not known or not looked at, a sentence each."""
