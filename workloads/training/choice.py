"""The plan of a run: the first layout that fits, or a refusal that says what is short and what would help."""

from __future__ import annotations

from busbar.workloads.training.errors import InfeasiblePlan
from busbar.workloads.training.fixes import find_fixes
from busbar.workloads.training.plan import (
    Demand,
    MemoryLimits,
    MemoryPlan,
    excess,
    first_that_fits,
    layouts,
    shown_bytes,
)


def make_plan(demand: Demand, limits: MemoryLimits, mode: str) -> MemoryPlan:
    """The plan for `mode` (`auto` decides). Raises InfeasiblePlan with bytes per owner and the cheapest fixes."""
    plan = first_that_fits(demand, limits, mode)
    if plan is None:
        fixes = find_fixes(demand, limits, mode)
        raise InfeasiblePlan(_why(demand, limits, mode), [fix.text(demand, limits) for fix in fixes])
    return plan


def closest(demand: Demand, limits: MemoryLimits, mode: str) -> MemoryPlan:
    """The layout that exceeds its limits by the least."""
    return min(layouts(demand, limits, mode), key=lambda plan: sum(excess(plan).values()))


def _why(demand: Demand, limits: MemoryLimits, mode: str) -> str:
    """Who needs how much of what is short."""
    plan = closest(demand, limits, mode)
    sides = []
    for side, size in excess(plan).items():
        limit = plan.limits.device_bytes if side == "device" else plan.limits.host_bytes
        needed = plan.device_bytes if side == "device" else plan.host_bytes
        owners = plan.device if side == "device" else {**plan.host, **_device_owner(plan)}
        listed = ", ".join(f"{owner} {shown_bytes(count)}" for owner, count in owners.items() if count)
        sides.append(
            f"{side} needs {shown_bytes(needed)} and has {shown_bytes(limit or 0)}, {shown_bytes(size)} short ({listed})"
        )
    share = f", at best with {plan.offloaded_fraction:.0%} of the state on the host" if mode == "auto" else ""
    return f"mode {mode} does not fit{share}: {'; '.join(sides)}"


def _device_owner(plan: MemoryPlan) -> dict[str, int]:
    return {"device arena": plan.device_bytes} if plan.limits.device_is_host else {}
