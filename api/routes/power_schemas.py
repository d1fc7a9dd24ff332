"""The shapes of REST's answers about power."""

from __future__ import annotations

from pydantic import Field

from busbar.api.routes.schemas import Answer
from busbar.kube.contracts.power import Backend, LeaseState
from busbar.kube.contracts.power_view import Resolution


class MeterHourInfo(Answer):
    start_s: int = Field(description="When the hour began, in seconds since the epoch.")
    seconds: float = Field(description="How much of it both have seen.")
    ledger_joules: float
    meter_joules: float
    error: float | None = Field(
        description="By how much the ledger is above the meter, as a part of the meter; null: the meter has seen nothing."
    )


class FeedPowerInfo(Answer):
    name: str
    parent: str = Field(description="The domain above it; empty: none.")
    budget_watts: float
    ready: bool
    reason: str = Field(description="Why it is or is not ready.")
    nodes: int = Field(description="Nodes on this feed and on those below it.")
    draw_watts: float | None = Field(description="Mean of the last second of the nodes that report.")
    assumed_watts: float = Field(description="Nameplates of the nodes that have stopped reporting.")
    headroom_watts: float | None = Field(
        description="Budget less margin, draw and assumed watts; null while a node has never reported."
    )
    floor_watts: float | None = Field(description="The nodes with all boards at their lowest limit.")
    nameplate_watts: float | None = Field(description="The most that the nodes can draw.")
    policy: str = Field(description="Observe, Static or Lease: of the nodes that hang on it directly.")
    leased_watts: float | None = Field(
        description="The most that its nodes may draw by their leases; null: nothing on it is limited."
    )
    capped_nodes: int = Field(description="Nodes with a board whose limit is below its nameplate.")
    silent_nodes: int = Field(description="Nodes without a report of the last seconds.")
    simulated_nodes: int = Field(description="Nodes whose watts are invented.")
    work_per_kilowatt_hour: float | None = Field(
        description="What a kilowatt-hour costs the jobs on it, in unit-hours of work; 0: watts hold nobody back; null: not "
        "known, or the domain holds no jobs back."
    )
    metered: bool = Field(description="Whether it has a meter of its own (spec.meter).")
    meter_error: float | None = Field(
        description="Of the last whole hour: by how much the ledger is above the meter, as a part of the meter; null: there is "
        "none yet."
    )
    meter_hours: list[MeterHourInfo] = Field(
        description="The ledger beside the meter in the last hours, oldest first; the last one is still going on."
    )
    meter_problem: str = Field(description="Why the meter says nothing; empty for members, and if it does.")


class FeedPowerList(Answer):
    """All power domains for admins; for others those of nodes that they may use."""

    items: list[FeedPowerInfo]


class NodePowerInfo(Answer):
    name: str
    feeds: list[str] = Field(description="The domain on which it hangs, and those above it, nearest first.")
    watts: float | None = Field(description="Mean between its last two reports; null: it never reported.")
    floor_watts: float | None
    nameplate_watts: float | None
    boards: int = Field(description="Boards that report.")
    boards_from: Backend = Field(description="Where the boards' numbers come from.")
    host_from: Backend = Field(description="Where the host's numbers come from.")
    lease_watts: float | None = Field(description="The lease in force, as the node said; null: none.")
    capped: bool = Field(description="Whether a board's limit is below its nameplate.")
    limits: LeaseState | None = Field(
        description="What the agent holds the boards to; null: it may not limit them."
    )
    why: str = Field(
        description="Why it has the lease that it has, as the controller decided last; empty: no policy limits it."
    )
    refusing_boards: int = Field(
        description="Boards that take no limit, or ignore it; they count with their nameplates."
    )
    conflicting_boards: int = Field(description="Boards with a limit that something else has written.")
    boards_by_pod: bool = Field(description="Whether it is known which pods hold which of its boards.")
    age_seconds: float | None = Field(description="Time since the last report that was believed.")
    silent: bool = Field(description="Whether that is too long.")


class NodePowerList(Answer):
    """Draw per node; for others than admins of the pools that they may use."""

    items: list[NodePowerInfo]


class PowerSeriesInfo(Answer):
    name: str
    resolution: Resolution
    period_seconds: int
    watts: list[float | None] = Field(
        description="Means of the periods until now, oldest first; null where nothing was measured."
    )
    leased_watts: list[float | None] = Field(
        description="Of a domain, in the same periods: the most that its nodes might draw by their leases; empty of a node."
    )
    forecast_watts: list[float | None] = Field(
        description="Of a domain: what its nodes were expected to draw at most; empty of a node."
    )
