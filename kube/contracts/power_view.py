"""`GET /power` and `GET /power/series` on the operator's internal port: what feeds and nodes draw.

Only the operator has the readings and their means; the API passes on what its caller may see. None means "not known".
"""

from enum import StrEnum

from busbar.kube.contracts.power import Backend, LeaseState
from busbar.kube.contracts.wire import WireModel

PATH = "/power"
SERIES_PATH = "/power/series"


class Resolution(StrEnum):
    """Length of the periods of a series."""

    SECOND = "second"
    """Of the last 15 minutes."""
    MINUTE = "minute"
    """Of the last day."""

    @property
    def period_s(self) -> int:
        return 1 if self is Resolution.SECOND else 60


class MeterHour(WireModel):
    """The energy ledger beside a feed's own meter, over the same part of one hour."""

    start_s: int
    """Seconds since the epoch."""
    seconds: float
    """How much of the hour both have seen."""
    ledger_joules: float
    meter_joules: float
    error: float | None = None
    """By how much the ledger is above the meter, as a part of the meter; None: the meter has seen nothing."""


class FeedPower(WireModel):
    """A PowerDomain now."""

    name: str
    parent: str = ""
    budget_watts: float
    ready: bool
    reason: str
    """Why it is or is not ready."""
    nodes: int
    draw_watts: float | None = None
    """Of the nodes that report."""
    assumed_watts: float = 0.0
    """Of the nodes that have stopped reporting: their nameplates."""
    headroom_watts: float | None = None
    floor_watts: float | None = None
    nameplate_watts: float | None = None
    policy: str = "Observe"
    """Of the nodes that hang on it directly."""
    leased_watts: float | None = None
    """The most that its nodes may draw by their leases; None: nothing on it is limited."""
    capped_nodes: int = 0
    """Nodes with a board whose limit is below its nameplate."""
    silent_nodes: int = 0
    simulated_nodes: int = 0
    work_per_kilowatt_hour: float | None = None
    """What a kilowatt-hour costs the jobs on it, in unit-hours of work; 0: watts hold nobody back; None: not known, or it
    only observes."""
    metered: bool = False
    """It has a meter of its own."""
    meter_error: float | None = None
    """Of the last whole hour, as in `MeterHour`; None: there is none yet."""
    meter_hours: tuple[MeterHour, ...] = ()
    """Oldest first."""
    meter_problem: str = ""
    """Why the meter says nothing; a sentence for administrators."""


class NodePower(WireModel):
    """A node that has reported, or that hangs on a feed."""

    name: str
    feeds: tuple[str, ...] = ()
    """The domain on which it hangs, and those above it, nearest first."""
    watts: float | None = None
    """Mean since the report before the last; None: it has never reported."""
    floor_watts: float | None = None
    nameplate_watts: float | None = None
    boards: int = 0
    boards_from: Backend = Backend.NONE
    host_from: Backend = Backend.NONE
    lease_watts: float | None = None
    """The lease in force, as the node said; None: it has none."""
    capped: bool = False
    """A board's limit is below its nameplate."""
    limits: LeaseState | None = None
    """What the agent holds the boards to; None: it may not limit them."""
    why: str = ""
    """Why it has the lease that it has, as the controller decided last; empty: no policy limits it."""
    refusing_boards: int = 0
    """Boards that take no limit, or ignore it; they count with their nameplates."""
    conflicting_boards: int = 0
    """Boards with a limit that something else has written."""
    boards_by_pod: bool = False
    """It is known which pods hold which of its boards."""
    age_seconds: float | None = None
    silent: bool = True


class PowerPicture(WireModel):
    """Answer of `GET /power`; both by name."""

    feeds: tuple[FeedPower, ...] = ()
    nodes: tuple[NodePower, ...] = ()


class PowerSeries(WireModel):
    """Answer of `GET /power/series?feed=NAME&resolution=minute` or `?node=NAME`."""

    name: str
    resolution: Resolution
    watts: tuple[float | None, ...] = ()
    """Means of the periods, oldest first; the last one is still going on."""
    leased: tuple[float | None, ...] = ()
    """Of a feed, in the same periods: the most that its nodes might draw by their leases; empty of a node."""
    forecast: tuple[float | None, ...] = ()
    """Of a feed, in the same periods: what its nodes were expected to draw at most; empty of a node."""
