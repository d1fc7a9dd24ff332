"""`GET /service-series?namespace=NS&name=NAME&span=1h` on the operator's internal port: a service's load over time, and the
replicas that there were for it.

Only the operator has these numbers: it reads every gateway's counts, and knows which replicas took requests. None means
"not known". All series of an answer have the same periods, oldest first; the last one is still going on.
"""

from datetime import datetime
from enum import StrEnum

from busbar.kube.contracts.wire import WireModel

PATH = "/service-series"

Numbers = tuple[float | None, ...]


class SeriesSpan(StrEnum):
    """How far back the series go."""

    HOUR = "1h"
    """In periods of a minute."""
    DAY = "24h"
    """In periods of five minutes."""

    @property
    def period_s(self) -> int:
        return 60 if self is SeriesSpan.HOUR else 300

    @property
    def periods(self) -> int:
        return 60 if self is SeriesSpan.HOUR else 288


class PoolSeries(WireModel):
    """A pool that had replicas within the span."""

    pool: str
    accelerator: str = ""
    """Empty: the pool is deleted."""
    ready_replicas: Numbers = ()
    """That took requests, in the mean."""
    capacity_per_second: Numbers = ()
    """Their part of `ServiceSeries.capacity_per_second`."""


class ServiceSeries(WireModel):
    """The answer."""

    namespace: str
    name: str
    span: SeriesSpan
    begins: datetime
    """When the first period began."""
    percentile: float
    """Of the times that are no medians."""
    requests_per_second: Numbers = ()
    """That came."""
    capacity_per_second: Numbers = ()
    """Requests per second that the ready replicas sustain within the latency target; None without one, or without speeds."""
    tokens_per_second: Numbers = ()
    """Output tokens of the requests that were answered in the period."""
    attainment: Numbers = ()
    """Requests answered within the latency target over all that were answered or refused; None where there were none."""
    ttft_milliseconds: Numbers = ()
    ttft_median_milliseconds: Numbers = ()
    """Time to the first token of streams that ended in the period."""
    tpot_milliseconds: Numbers = ()
    tpot_median_milliseconds: Numbers = ()
    """Mean time of each later token of a stream."""
    pools: tuple[PoolSeries, ...] = ()
    """By name."""
