"""Pure scheduling decisions: snapshot in, plan out. No clock, no network, no Kubernetes, no torch.

snapshot = Snapshot(pools=..., nodes=..., tenants=..., jobs=..., table=...)
plan_, memo = plan(snapshot, Policy(), now, memo)
for action in plan_.actions: ...
for record in plan_.waiting: sentence(record, snapshot, viewer)
"""

from .check import Checker, check_plan
from .errors import DecodeError, SchedulerError, SnapshotError, SolverError, StaleActionError, TraceError
from .explain.sentences import sentence
from .forecast.history import Finished, History, Outcome
from .forecast.what_if import Forecast, what_if
from .model.apply import applied, stale
from .model.events import Event, Happened, Happening
from .model.plans import (
    Action,
    ActionKind,
    Change,
    DeadlineAnswer,
    DeadlineShare,
    Holder,
    Objective,
    Plan,
    Policy,
    Price,
    WaitCode,
    WaitingRecord,
)
from .model.snapshot import (
    DecayedUsage,
    Delta,
    Job,
    JobId,
    JobKind,
    Node,
    Placement,
    Pool,
    PowerDomain,
    Quota,
    Reservation,
    Resources,
    Run,
    Snapshot,
    Taint,
    Tenant,
    Toleration,
    User,
    updated,
)
from .model.table import Cell, Estimate, PerformanceTable, Rate, Source, TableView
from .planner import plan, react
from .search.state import Memo

__all__ = [
    "Action",
    "ActionKind",
    "Cell",
    "Change",
    "Checker",
    "DeadlineAnswer",
    "DeadlineShare",
    "DecayedUsage",
    "DecodeError",
    "Delta",
    "Estimate",
    "Event",
    "Finished",
    "Forecast",
    "Happened",
    "Happening",
    "History",
    "Holder",
    "Job",
    "JobId",
    "JobKind",
    "Memo",
    "Node",
    "Objective",
    "Outcome",
    "PerformanceTable",
    "Placement",
    "Plan",
    "Policy",
    "Pool",
    "PowerDomain",
    "Price",
    "Quota",
    "Rate",
    "Reservation",
    "Resources",
    "Run",
    "SchedulerError",
    "Snapshot",
    "SnapshotError",
    "SolverError",
    "Source",
    "StaleActionError",
    "TableView",
    "Taint",
    "Tenant",
    "Toleration",
    "TraceError",
    "User",
    "WaitCode",
    "WaitingRecord",
    "applied",
    "check_plan",
    "plan",
    "react",
    "sentence",
    "stale",
    "updated",
    "what_if",
]
