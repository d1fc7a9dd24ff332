"""When a waiting TrainingJob would start: the current forecast, and the first one of its wait.

They have different readers. People read the newest forecast, which is removed when the job starts. The first forecast
of a wait is kept until the next wait begins, with the time of the start: its error corrects later forecasts, and a
restarted operator reads it from here.
"""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import StatusModel

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class StartForecast(StatusModel):
    """When a waiting job is expected to start and to end, simulated from earlier jobs on this cluster."""

    made_at: datetime = Field(
        description="When this was written; it is written again only when the forecast has changed."
    )
    start_p50: datetime = Field(description="Median of the start.")
    start_p90: datetime = Field(description="Ninth decile of the start.")
    end_p50: datetime | None = Field(
        default=None, description="Median of the end, where the job's speed is known."
    )
    end_p90: datetime | None = Field(
        default=None, description="Ninth decile of the end, at the lowest likely speed."
    )


class Promise(StatusModel):
    """The first forecast of the last wait, and the true wait: its error corrects later forecasts."""

    made_at: datetime = Field(description="When.")
    start_p50: datetime = Field(description="The median that was written.")
    start_p90: datetime = Field(description="The ninth decile that was written.")
    simulated_p50_seconds: Seconds = Field(description="The simulated median wait, before any correction.")
    simulated_p90_seconds: Seconds = Field(description="The simulated ninth decile, before any correction.")
    generation: Count | None = Field(default=None, description="Generation of the job that it was made for.")
    attempt: Count = Field(default=0, description="Attempts before this wait.")
    started_at: datetime | None = Field(
        default=None, description="When the wait ended; absent: it still waits."
    )
