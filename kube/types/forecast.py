"""When a waiting TrainingJob would start: what is said now, and what was promised first.

Two forms, as they serve two readers. People read the newest forecast, which goes when the job starts. The first
one of a wait is kept until the next wait begins, with the moment of the start: how promises turned out corrects
later forecasts, and a restarted operator reads it from here.
"""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from busbar.kube.types.meta import StatusModel

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class StartForecast(StatusModel):
    """When a waiting job is expected to start and to end, simulated from how jobs went here before."""

    made_at: datetime = Field(description="When this was said; it is said again only when it has moved.")
    start_p50: datetime = Field(description="The start, as likely earlier as later.")
    start_p90: datetime = Field(description="The start, with nine chances in ten to be earlier.")
    end_p50: datetime | None = Field(default=None, description="The end, where the job's speed is known.")
    end_p90: datetime | None = Field(
        default=None, description="The same for the later start and the lowest likely speed."
    )


class Promise(StatusModel):
    """The first forecast of the last wait, and what came of it: later forecasts are corrected by it."""

    made_at: datetime = Field(description="When.")
    start_p50: datetime = Field(description="The median that was told.")
    start_p90: datetime = Field(description="The ninth decile that was told.")
    simulated_p50_seconds: Seconds = Field(description="The simulated median wait, before any correction.")
    simulated_p90_seconds: Seconds = Field(description="The simulated ninth decile, before any correction.")
    generation: Count | None = Field(default=None, description="Of the job that it was made for.")
    attempt: Count = Field(default=0, description="Attempts before this wait.")
    started_at: datetime | None = Field(
        default=None, description="When the wait ended; absent: it still waits."
    )
