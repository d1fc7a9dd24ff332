"""What can go wrong inside the operator.

    OperatorError            code
    ├── SettingsError        OperatorSettings   an environment variable is missing, unknown or not a number
    ├── Fenced               OperatorFenced     a write was stopped: this process does not hold the lease
    ├── ShellEnded           OperatorShell      the watches of our kinds ended; the process starts again
    ├── PlanRefused          OperatorPlan       the independent checker refused what the planner made
    ├── Busy                 OperatorBusy       too many ask for forecasts at once
    ├── ForetellFailed       OperatorForetell   the process that computes forecasts ended with an error
    └── ProbeRefused         OperatorProbe      a workload port that we may not or could not read

Errors of the API server are those of ``busbar.kube.errors``; both trees meet in ``controller.py``, where a
conflict means "look again", a refusal means a condition on the object, and anything else a back-off.
"""

from __future__ import annotations

from typing import ClassVar


class OperatorError(Exception):
    """Root of the operator's own errors."""

    code: ClassVar[str] = "Operator"


class SettingsError(OperatorError):
    code = "OperatorSettings"


class Fenced(OperatorError):
    """Not the holder of the lease (any more): nothing may be written."""

    code = "OperatorFenced"


class ShellEnded(OperatorError):
    """Kopf ended by itself."""

    code = "OperatorShell"


class PlanRefused(OperatorError):
    """A plan that must not be carried out, in whole or in part; the message says what is wrong with it."""

    code = "OperatorPlan"


class Busy(OperatorError):
    """As many are being answered as may be at once; try again."""

    code = "OperatorBusy"


class ForetellFailed(OperatorError):
    """No forecasts this time; the ones that stand stay."""

    code = "OperatorForetell"


class ProbeRefused(OperatorError):
    """A pod's port was not read; the message says which rule or failure."""

    code = "OperatorProbe"
