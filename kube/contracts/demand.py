"""`GET /demand` of the gateway: the current requests. The autoscaler needs no metrics stack."""

from datetime import datetime

from pydantic import Field

from busbar.kube.contracts.wire import WireModel

PATH = "/demand"


class ServiceDemand(WireModel):
    """One service's requests as the gateway sees them."""

    namespace: str
    name: str
    waiting: int = 0
    """Requests queued at the gateway because no replica can accept them yet."""
    in_flight: int = 0
    arrivals: int = 0
    """Requests since the gateway started."""
    last_request_age_seconds: float | None = None


class Demand(WireModel):
    """All services that the gateway knows."""

    services: list[ServiceDemand] = Field(default_factory=list)
    as_of: datetime
