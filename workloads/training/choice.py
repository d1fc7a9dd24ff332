"""The plan of a run: the first layout that fits, or a refusal that says what is short and what would help."""

from __future__ import annotations

from collections.abc import Mapping

from busbar.workloads.training.demand import AGAIN, Demand, why_not_divided
from busbar.workloads.training.errors import InfeasiblePlan, InvalidJob
from busbar.workloads.training.fixes import find_fixes
from busbar.workloads.training.layouts import excess, first_that_fits, layouts
from busbar.workloads.training.plan import WAYS, MemoryLimits, MemoryPlan, shown_bytes
from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD, why_not_streamed
from busbar.workloads.training.zeroth_plan import why_not_zeroth


def make_plan(demand: Demand, limits: MemoryLimits, mode: str) -> MemoryPlan:
    """The plan for `mode` (`auto` decides).

    Raises:
        InfeasiblePlan: with bytes per owner and the cheapest fixes.
        InvalidJob: this job cannot run in that mode, whatever the memory.
    """
    if demand.zeroth_order:
        why, remedy = why_not_zeroth(demand, mode)
        if why:
            raise InvalidJob("spec.engine.optimizer.name", f"ZerothOrder is not possible here: {why}", remedy)
    elif mode == PARAMETER_OFFLOAD:
        why, remedy = why_not_streamed(demand)
        if why:
            raise InvalidJob("spec.engine.mode", f"parameter-offload is not possible here: {why}", remedy)
    why, remedy = why_not_divided(demand)
    if why:
        raise InvalidJob(
            "spec.engine.parallelism.sharding", f"parameters is not possible here: {why}", remedy
        )
    plan = first_that_fits(demand, limits, mode)
    if plan is None:
        fixes = find_fixes(demand, limits, mode)
        raise InfeasiblePlan(_why(demand, limits, mode), [fix.text(demand, limits) for fix in fixes])
    return plan


def closest(demand: Demand, limits: MemoryLimits, mode: str) -> MemoryPlan:
    """The layout that exceeds its limits by the least."""
    return min(layouts(demand, limits, mode), key=lambda plan: sum(excess(plan).values()))


def _why(demand: Demand, limits: MemoryLimits, mode: str) -> str:
    """Who needs how much of what is short; of the host, in the phase that needs the most."""
    plan = closest(demand, limits, mode)
    phase = max(plan.phases, key=lambda name: plan.phases[name])
    on_host = {**plan.host, **_device_owner(plan)}
    short = {
        "device": ("device", plan.device_bytes, limits.device_bytes, plan.device),
        "host": (f"host, in phase {phase},", plan.host_bytes, limits.host_bytes, on_host),
        "disk": ("scratch disk", plan.disk_bytes, limits.disk_bytes, {"optimizer": plan.disk_bytes}),
    }
    where = "weights and" if plan.weight_slots else f"{plan.offloaded_fraction:.0%} of the"
    best = [f"{where} state on the host"] if mode == "auto" else []
    best += [f"{WAYS[plan.activations]} activations"] if plan.activations in AGAIN else []
    share = f", at best with {' and '.join(best)}" if best else ""
    return f"mode {mode} does not fit{share}: {'; '.join(_side(*short[side]) for side in excess(plan))}"


def _side(name: str, needed: int, limit: int | None, owners: Mapping[str, int]) -> str:
    listed = ", ".join(f"{owner} {shown_bytes(size)}" for owner, size in owners.items() if size)
    has = limit or 0
    return (
        f"{name} needs {shown_bytes(needed)} and has {shown_bytes(has)}, "
        f"{shown_bytes(needed - has)} short ({listed})"
    )


def _device_owner(plan: MemoryPlan) -> dict[str, int]:
    return {"device arena": plan.device_bytes} if plan.limits.device_is_host else {}
