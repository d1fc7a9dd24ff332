"""Errors of the scheduler.

SchedulerError            code
 ├─ DecodeError           DecodeError      JSON that is not a snapshot, plan or policy
 ├─ SnapshotError         InvalidSnapshot  a snapshot that contradicts itself
 ├─ StaleActionError      StaleAction      an action whose assumption no longer holds
 ├─ TraceError            InvalidTrace     a trace or cluster file that cannot be read
 ├─ ServingModelError     InvalidServing   a step model, SLO, pool or demand of a service that cannot be
 ├─ SolverError           SolverFailed     the optimizer is missing or failed
 └─ PowerError            InvalidPower     a node, curve or setting of the power controller that cannot be used
     └─ DomainError       InvalidPowerDomain  power domains that are no tree, or a budget that is none
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of every error this package raises on purpose."""

    code = "SchedulerError"


class DecodeError(SchedulerError, ValueError):
    """JSON that does not have the shape of the type asked for."""

    code = "DecodeError"


class SnapshotError(SchedulerError, ValueError):
    """A snapshot names something twice, or something that is not in it."""

    code = "InvalidSnapshot"


class StaleActionError(SchedulerError):
    """The job is no longer as the action assumed: look again and plan again."""

    code = "StaleAction"


class TraceError(SchedulerError, ValueError):
    """A trace or cluster description that cannot be read."""

    code = "InvalidTrace"


class ServingModelError(SchedulerError, ValueError):
    """A step model, an SLO, a pool or a demand that cannot be; the message says which number and why."""

    code = "InvalidServing"


class SolverError(SchedulerError):
    """The optimizer could not be loaded or did not answer."""

    code = "SolverFailed"


class PowerError(SchedulerError, ValueError):
    """A node, curve or setting of the power controller that cannot be used."""

    code = "InvalidPower"


class DomainError(PowerError):
    """Power domains that are no tree, or a budget that is none. `reason` is stable and CamelCase."""

    code = "InvalidPowerDomain"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
