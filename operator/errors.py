"""What can go wrong inside the operator.

    OperatorError            code
    ├── Fenced               OperatorFenced     a write was stopped: this process does not hold the lease
    ├── TakenOver            OperatorTaken      another process leads: this one becomes a standby
    ├── LaneFull             OperatorLane       a write that only tells something found no place; it is tried again soon
    ├── ShellEnded           OperatorShell      the watches of our kinds ended; they are started again
    ├── PlanRefused          OperatorPlan       the independent checker refused what the planner made
    ├── Busy                 OperatorBusy       too many ask for previews at once
    ├── ForecastFailed       OperatorForecast   the process that computes forecasts ended with an error
    ├── PreviewFailed        OperatorPreview    the process that computes previews failed or was too slow
    └── ProbeRefused         OperatorProbe      a workload port that may not or could not be read

    ServingModelError        of busbar.scheduler
    └── TargetUnreachable    OperatorTarget     no type keeps a service's latency target at any load

Errors of the API server are those of ``busbar.kube.errors``; both trees meet in ``queue/controller.py``,
which reconciles the object again after a growing back-off.
"""

from __future__ import annotations

from typing import ClassVar

from busbar.scheduler.errors import ServingModelError


class OperatorError(Exception):
    """Root of the operator's own errors."""

    code: ClassVar[str] = "Operator"


class Fenced(OperatorError):
    """This process does not hold the lease (any more): it may write nothing."""

    code = "OperatorFenced"


class TakenOver(OperatorError):
    """Another process holds the lease, or may have held it meanwhile: nothing that is known here counts any more."""

    code = "OperatorTaken"


class LaneFull(OperatorError):
    """As many writes are in flight as the API server answers in time."""

    code = "OperatorLane"


class ShellEnded(OperatorError):
    """Kopf ended without being asked to."""

    code = "OperatorShell"


class PlanRefused(OperatorError):
    """A plan that must not be carried out, not even in part; the message names the faults."""

    code = "OperatorPlan"


class Busy(OperatorError):
    """The limit of concurrent requests is reached; try again."""

    code = "OperatorBusy"


class ForecastFailed(OperatorError):
    """No forecasts were computed this time; earlier ones stay in the statuses."""

    code = "OperatorForecast"


class PreviewFailed(OperatorError):
    """No preview this time; the next one gets a new process."""

    code = "OperatorPreview"


class ProbeRefused(OperatorError):
    """A pod's port was not read; the message says which rule or failure."""

    code = "OperatorProbe"


class TargetUnreachable(ServingModelError):
    """No type keeps the latency target at any load; the message names the one that comes nearest."""

    code = "OperatorTarget"
