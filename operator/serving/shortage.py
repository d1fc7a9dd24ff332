"""Whether a service lacks nodes: for people, and for whoever adds nodes (a cloud's node autoscaler reads the event). Pure.

Quota, power and budgets are no shortage of nodes, nor is room that other work will be asked to leave.
"""

from __future__ import annotations

from collections.abc import Iterable

from busbar.kube.types.reasons import ConditionType, Reason
from busbar.operator.decisions import Decision, Wait
from busbar.operator.serving.view import ServiceView
from busbar.scheduler import WaitCode

LACKING = frozenset(
    {WaitCode.NO_ACCELERATOR, WaitCode.NODE_TOO_SMALL, WaitCode.CAPACITY, WaitCode.FRAGMENTED}
)
"""Reasons of the scheduler that more nodes would remove."""


def shortage(
    view: ServiceView, desired: int, decisions: Iterable[Decision]
) -> tuple[bool, Reason, str] | None:
    """Of the condition NodeShortage: whether it is true, its reason and its sentence; None: nothing was ever missing."""
    unknown = _without_pool(view)
    if missing := _missing(view, decisions):
        return True, Reason.NODE_SHORTAGE, f"{missing} {unknown}".rstrip()
    if unknown:
        return True, Reason.ACCELERATOR_WITHOUT_POOL, unknown
    before = next((c for c in view.status.conditions or () if c.type == ConditionType.NODE_SHORTAGE), None)
    if before is None:
        return None
    waits = any(isinstance(decision, Wait) for decision in decisions)
    if (
        before.reason == Reason.NODE_SHORTAGE
        and before.status == "True"
        and not waits
        and _lacks(view, desired)
    ):
        return True, Reason.NODE_SHORTAGE, before.message
    return False, Reason.NODES_SUFFICE, "No replica waits for nodes."


def _without_pool(view: ServiceView) -> str:
    """That no pool has a type of spec.accelerators; empty where all have one."""
    types = sorted({pool.spec.accelerator for pool in view.pools.values()})
    unknown = [name for name in view.service.spec.accelerators or () if name not in types]
    if not unknown or not types:
        return ""
    return f"spec.accelerators names {', '.join(unknown)}, and no AcceleratorPool has it; there are {', '.join(types)}."


def _missing(view: ServiceView, decisions: Iterable[Decision]) -> str:
    """What nodes would help; empty where none are missing."""
    if view.off is not None:
        return ""
    if view.plan is not None and view.plan.full:
        names = ", ".join(sorted(view.plan.full))
        text = f"The load needs more replicas, and the nodes of every pool that could serve it are full: {names}."
        return f"{text} Missing: nodes with {_types(view)}."
    wait = next((d for d in decisions if isinstance(d, Wait) and d.reason in LACKING), None)
    if wait is None:
        return ""
    return f"Replicas find no room: {wait.message} Missing: nodes with {_types(view)}."


def _lacks(view: ServiceView, desired: int) -> bool:
    """Whether replicas are wanted that have no pod yet."""
    return view.off is None and sum(pod.stays and not pod.parked for pod in view.pods) < desired


def _types(view: ServiceView) -> str:
    """Those that the service may use."""
    allowed = view.service.spec.accelerators
    if allowed:
        return " or ".join(allowed)
    pools = (p.spec for p in view.pools.values() if p.spec.tenants is None or view.tenant in p.spec.tenants)
    return " or ".join(sorted({pool.accelerator for pool in pools})) or "any accelerator"
