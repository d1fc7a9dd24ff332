"""The layouts that a job allows, in the order in which they are tried. No torch here."""

from __future__ import annotations

from dataclasses import replace

from busbar.workloads.training.demand import AUTO, Demand
from busbar.workloads.training.plan import WAYS, MemoryLimits, MemoryPlan, lay_out, shown_bytes
from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD, streamed_layouts, why_not_streamed
from busbar.workloads.training.zeroth_plan import zeroth_layouts

RESIDENT, OPTIMIZER_OFFLOAD = "resident", "optimizer-offload"


def layouts(demand: Demand, limits: MemoryLimits, mode: str) -> list[MemoryPlan]:
    """What `mode` and `activations` allow: those that keep the activations first, of which the fastest first; then those that
    recompute and swap them; then the weights on the host, and last of all state on disk."""
    if demand.zeroth_order:
        return zeroth_layouts(demand, limits, mode)
    if mode == PARAMETER_OFFLOAD:
        return [] if why_not_streamed(demand)[0] else streamed_layouts(demand, limits)
    total = len(demand.groups)
    offload = {RESIDENT: [], OPTIMIZER_OFFLOAD: [total]}.get(mode, list(range(1, total + 1)))
    resident = [] if mode == OPTIMIZER_OFFLOAD else [(RESIDENT, 0)]
    found = [
        lay_out(demand, limits, name, count, activations=way)
        for way in _ways(demand)
        for name, count in [*resident, *((OPTIMIZER_OFFLOAD, count) for count in offload)]
    ]
    if mode != AUTO:
        return found
    found = [replace(plan, why_mode=_why(plan)) for plan in found]
    if not why_not_streamed(demand)[0]:
        found += streamed_layouts(demand, limits, _why_streamed(found))
    return found


def _ways(demand: Demand) -> list[str]:
    """What may happen to activations, in the order in which it is tried."""
    if demand.activations != AUTO:
        return [demand.activations]
    return [way for way in WAYS if demand.training_bytes(way) is not None]


def _why(plan: MemoryPlan) -> str:
    return (
        "the device has no room for all of the state" if plan.offloaded else "everything fits on the device"
    )


def _why_streamed(others: list[MemoryPlan]) -> str:
    """Why none of the other layouts is taken, which all keep the weights on the device."""
    nearest = min(others, key=lambda plan: sum(excess(plan).values()))
    over = " and ".join(f"{shown_bytes(size)} of {side} memory" for side, size in excess(nearest).items())
    return f"with the weights on the device {over} are missing"


def first_that_fits(demand: Demand, limits: MemoryLimits, mode: str) -> MemoryPlan | None:
    return next((plan for plan in layouts(demand, limits, mode) if not excess(plan)), None)


def excess(plan: MemoryPlan) -> dict[str, int]:
    """Bytes over the limit, per side; empty when the plan fits."""
    over: dict[str, int] = {}
    if plan.limits.device_bytes is not None and plan.device_bytes > plan.limits.device_bytes:
        over["device"] = plan.device_bytes - plan.limits.device_bytes
    if plan.limits.host_bytes is not None and plan.host_bytes > plan.limits.host_bytes:
        over["host"] = plan.host_bytes - plan.limits.host_bytes
    if plan.disk_bytes > plan.limits.disk_bytes:
        over["disk"] = plan.disk_bytes - plan.limits.disk_bytes
    return over
