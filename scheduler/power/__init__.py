"""Power: how many watts each node may draw, so that no feed is ever above its budget.

A node holds a *lease*: so many watts, until a moment. For every domain of the tree the sum of what its nodes may
draw, by leases in force or on their way, never exceeds the budget. Leases are lowered first, and raised only after
the lowering was read back or the old lease has ended. A delay or a lost message then costs speed, never an overrun.
"""

from .control import control
from .decision import ControlSettings, Decision, DomainReport, Memory, NodeReport, begin
from .domains import Domain, DomainFault, DomainTree, PowerPolicy, domain_tree
from .leases import HeldLease, Lease, LeaseReason, accepted, allowed_w
from .relief import NodeLeast, Relief, Stop, Tier, Work, relieve
from .telemetry import PRIOR_CURVES, CapCurve, NodePower, NodeTelemetry, Phase, PhaseLoad

__all__ = [
    "PRIOR_CURVES",
    "CapCurve",
    "ControlSettings",
    "Decision",
    "Domain",
    "DomainFault",
    "DomainReport",
    "DomainTree",
    "HeldLease",
    "Lease",
    "LeaseReason",
    "Memory",
    "NodeLeast",
    "NodePower",
    "NodeReport",
    "NodeTelemetry",
    "Phase",
    "PhaseLoad",
    "PowerPolicy",
    "Relief",
    "Stop",
    "Tier",
    "Work",
    "accepted",
    "allowed_w",
    "begin",
    "control",
    "domain_tree",
    "relieve",
]
