"""What would make a job fit, cheapest first. No torch here.

No copies in memory, more that the ranks of a gang divide, another mode, recomputed or swapped activations, a smaller
micro-batch, and then disk or more memory.

Every fix is tried before it is named: with it, `plan.first_that_fits` finds a plan. Where no single change is enough
they are joined, as in "mode: auto and shape.memory: at least 20480Mi more".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from busbar.workloads.training.demand import AGAIN, KEEP, RECOMPUTE, SWAP, Demand, why_not_divided
from busbar.workloads.training.layouts import excess, first_that_fits, layouts
from busbar.workloads.training.plan import MemoryLimits, MemoryPlan, shown_bytes
from busbar.workloads.training.settings import GRADIENTS, OPTIMIZER, PARAMETERS

MOST = 4  # in one refusal
_COSTS = {
    RECOMPUTE: "one more forward pass per step",
    SWAP: "one more forward pass per step, and inputs of blocks in host memory",
}


@dataclass(frozen=True)
class Fix:
    """A job that would fit; what is None stays as it is."""

    plan: MemoryPlan
    mode: str | None = None
    activations: str | None = None
    micro_batch: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    copies: bool = True  # False: the job has none in memory
    sharding: str | None = None

    def text(self, demand: Demand, limits: MemoryLimits) -> str:
        parts = []
        if self.mode is not None:
            parts.append(f"mode: {self.mode}")
        if self.activations is not None:
            parts.append(f"activations: {self.activations}")
        if self.micro_batch is not None:
            parts.append(f"batch.microBatch: {self.micro_batch} (now {demand.micro_batch})")
        if not self.copies:
            parts.append("no checkpoint.memory")
        if self.sharding is not None:
            parts.append(f"parallelism.sharding: {self.sharding}")
        if self.device_bytes is not None:
            parts.append(_more_device(self.device_bytes, limits))
        if self.host_bytes is not None:
            missing = max(0, self.host_bytes - (limits.host_bytes or 0))
            parts.append(f"shape.memory: at least {-(-missing // 2**20)}Mi more")
        if self.disk_bytes is not None:
            parts.append(f"scratchDisk: at least {-(-self.disk_bytes // 2**20)}Mi")
        how = [] if self.mode is None else [_placement(self.plan)]
        how += [] if self.activations is None else [_COSTS[self.activations]]
        how += [] if self.disk_bytes is None else ["state that each step reads from disk and writes back"]
        how += ["equal results"] if how and self.micro_batch is None else []
        return " and ".join(parts) + (f" ({', '.join(how)})" if how else "")


def _placement(plan: MemoryPlan) -> str:
    share = f"{plan.offloaded_fraction:.0%}" if plan.offloaded else "none"
    what = "weights and state" if plan.weight_slots else f"{share} of the optimizer's state"
    return (
        f"{what} on the host: {shown_bytes(plan.device_bytes)} on the device, "
        f"{shown_bytes(plan.host_bytes)} on the host"
    )


def find_fixes(demand: Demand, limits: MemoryLimits, mode: str) -> list[Fix]:
    """Up to MOST fixes of a job that does not fit, cheapest first."""
    other = None if mode == "auto" else "auto"
    single = [
        *_without_copies(demand, limits, mode),
        *_divided_more(demand, limits, mode),
        *_other_mode(demand, limits, other),
        *_recomputed(demand, limits, mode, None),
        *_smaller(demand, limits, mode, None),
    ]
    both = [] if single else [*_two_changes(demand, limits, mode, other)]
    free = [*single, *both]
    bought = [*_more_memory(demand, limits, mode, None), *_on_disk(demand, limits, mode, None)]
    if other is not None and not free:
        bought += [*_more_memory(demand, limits, other, other), *_on_disk(demand, limits, other, other)]
    if demand.micro_batch > 1 and not free:
        bought += _more_memory(_with_micro_batch(demand, 1), limits, "auto", other, 1)
    return [*free, *sorted(_useful(bought), key=lambda fix: _price(fix, limits))][:MOST]


def _two_changes(demand: Demand, limits: MemoryLimits, mode: str, other: str | None) -> Iterator[Fix]:
    """Of mode, activations and micro-batch, where no single one is enough; the last resort changes all that it can."""
    if other is not None:
        yield from _recomputed(demand, limits, other, other)
        yield from _smaller(demand, limits, other, other)
    for way in _other_ways(demand):
        for fix in _smaller(replace(demand, activations=way), limits, other or mode, other):
            yield replace(fix, activations=way)
            return


def _without_copies(demand: Demand, limits: MemoryLimits, mode: str) -> Iterator[Fix]:
    if demand.memory_copies and (plan := first_that_fits(replace(demand, memory_copies=0), limits, mode)):
        yield Fix(plan, copies=False)


def _divided_more(demand: Demand, limits: MemoryLimits, mode: str) -> Iterator[Fix]:
    """The least that the ranks would have to divide."""
    stages = (OPTIMIZER, GRADIENTS, PARAMETERS)
    for sharding in stages[stages.index(demand.sharding) + 1 :] if demand.ranks > 1 else ():
        changed = replace(demand, sharding=sharding)
        if not why_not_divided(changed)[0] and (plan := first_that_fits(changed, limits, mode)):
            yield Fix(plan, sharding=sharding)
            return


def _other_mode(demand: Demand, limits: MemoryLimits, mode: str | None) -> Iterator[Fix]:
    if mode is not None and (plan := first_that_fits(demand, limits, mode)):
        yield Fix(plan, mode)


def _other_ways(demand: Demand) -> list[str]:
    """What else a job may say of its activations that says `keep` or `recompute`; `auto` has tried it."""
    ways = {KEEP: AGAIN, RECOMPUTE: (SWAP,)}.get(demand.activations, ())
    return [way for way in ways if demand.training_bytes(way) is not None]


def _recomputed(demand: Demand, limits: MemoryLimits, mode: str, named: str | None) -> Iterator[Fix]:
    for way in _other_ways(demand):
        if plan := first_that_fits(replace(demand, activations=way), limits, mode):
            yield Fix(plan, named, way)
            return


def _smaller(demand: Demand, limits: MemoryLimits, mode: str, named: str | None) -> Iterator[Fix]:
    """The largest smaller micro-batch with which `mode` fits."""
    for micro in range(demand.micro_batch - 1, 0, -1):
        if demand.micro_batch % micro == 0 and (
            plan := first_that_fits(_with_micro_batch(demand, micro), limits, mode)
        ):
            yield Fix(plan, named, micro_batch=micro)
            return


def _with_micro_batch(demand: Demand, micro: int) -> Demand:
    """Activations grow in proportion to the micro-batch."""

    def share(size: int) -> int:
        return -(-size * micro // demand.micro_batch)

    return replace(
        demand,
        micro_batch=micro,
        activation_bytes=share(demand.activation_bytes),
        recompute_bytes=None if demand.recompute_bytes is None else share(demand.recompute_bytes),
        swap_bytes=None if demand.swap_bytes is None else share(demand.swap_bytes),
        swapped_bytes=share(demand.swapped_bytes),
        sequence_bytes=share(demand.sequence_bytes),
        evaluation_bytes=share(demand.evaluation_bytes),
    )


def _more_memory(
    demand: Demand, limits: MemoryLimits, mode: str, named: str | None, micro: int | None = None
) -> list[Fix]:
    """More memory on the device, or on the host; on both where neither is enough alone."""
    fewest = replace(limits, host_bytes=0)  # snapshot buffers
    least = [plan for plan in layouts(demand, fewest, mode) if "disk" not in excess(plan)]
    on_device = [plan for plan in least if limits.host_bytes is None or plan.host_bytes <= limits.host_bytes]
    on_host = [plan for plan in least if "device" not in excess(plan)]
    fixes = []
    if on_device:
        plan = min(on_device, key=lambda plan: plan.device_bytes)
        fixes.append(Fix(plan, named, None, micro, device_bytes=plan.device_bytes))
    if on_host:
        plan = min(on_host, key=lambda plan: plan.host_bytes)
        fixes.append(Fix(plan, named, None, micro, host_bytes=plan.host_bytes))
    if not on_host:
        plan = min(least, key=lambda plan: plan.device_bytes)
        fixes.append(Fix(plan, named, None, micro, plan.device_bytes, plan.host_bytes))
    return fixes


def _on_disk(demand: Demand, limits: MemoryLimits, mode: str, named: str | None) -> Iterator[Fix]:
    """The least scratch disk with which it fits, where it is the host's memory that is short."""
    if plan := first_that_fits(demand, replace(limits, disk_bytes=2**63), mode):
        yield Fix(plan, named, disk_bytes=plan.disk_bytes)


def _useful(fixes: list[Fix]) -> Iterator[Fix]:
    """Those for which no other one asks for as little everywhere."""
    asked = [(fix.device_bytes or 0, fix.host_bytes or 0, fix.disk_bytes or 0) for fix in fixes]
    for index, own in enumerate(asked):
        less = [
            other
            for place, other in enumerate(asked)
            if all(a <= b for a, b in zip(other, own, strict=True)) and (other != own or place < index)
        ]
        if not less:
            yield fixes[index]


def _price(fix: Fix, limits: MemoryLimits) -> int:
    """A raised limit is cheaper than disk, disk than memory, and memory than another device."""
    device = 4 if _needs_another_device(fix.device_bytes, limits) else 0
    return device + (0 if fix.host_bytes is None else 2) + (0 if fix.disk_bytes is None else 1)


def _needs_another_device(needed: int | None, limits: MemoryLimits) -> bool:
    capacity = limits.device_capacity_bytes
    return needed is not None and capacity is not None and needed > capacity


def _more_device(needed: int, limits: MemoryLimits) -> str:
    size = f"{-(-needed // 2**20)}Mi"
    if _needs_another_device(needed, limits):
        return f"a device with at least {size}"
    return f"deviceMemory: at least {size}"
