"""`POST /forecast` on the operator's internal port: when a draft would start, and how such forecasts turned out.

The operator alone knows how jobs went here, so it alone forecasts; what leaves it are times and counts, never
whose jobs they come from.
"""

from typing import Annotated

from pydantic import Field

from busbar.kube.contracts.wire import WireModel

PATH = "/forecast"
_Seconds = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


class ForecastAnswer(WireModel):
    """Seconds from now; absent: it starts now, it can never start, or nothing can be said yet."""

    start_p50_seconds: _Seconds | None = None
    start_p90_seconds: _Seconds | None = None
    end_p50_seconds: _Seconds | None = None
    end_p90_seconds: _Seconds | None = None
    ended_jobs: _Count = 0
    """Jobs that it was learned from."""
    promises: _Count = 0
    """Earlier forecasts of this cluster whose ninth decile has passed."""
    before_p50: _Share | None = None
    """The share of earlier forecasts whose job started before the median (0.5 would be perfect)."""
    before_p90: _Share | None = None
