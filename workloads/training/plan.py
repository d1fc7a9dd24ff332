"""Who needs how many bytes, and whether that fits: decided before anything is allocated. No torch here.

Device bytes (AdamW, P parameters, w bytes per weight: 4 for float32, 2 for bfloat16):

    parameters    w P
    gradients     w P        kept whole until the global norm is known, for exact clipping
    optimizer     s R        s = 8 (fp32 m and v), plus 4 for the fp32 master weight under bfloat16;
                             R = parameters of the groups whose state is resident
    staging       slots x chunk x s, and 4 bytes per element of one chunk for a bfloat16 gradient in fp32;
                             nothing when all state is resident in float32
    activations   what forward and backward of one micro-batch keep alive at their worst moment

Host bytes: the state that is not resident, one snapshot of everything for the checkpoint that is being
written, and, where the device *is* the host's memory (a CPU), the device bytes again.

`auto` moves state to the host only as far as needed, last groups first: the next forward needs them last
(the placement rule for overlapped updates). Where nothing fits, `InfeasiblePlan` lists the bytes per owner
and the cheapest changes that would make it fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from busbar.workloads.training.errors import InfeasiblePlan

ALIGN_BYTES = 256
SLOTS = 3  # one loading, one updating, one storing
MIN_CHUNK, MAX_CHUNK = 64 * 1024, 32 * 1024 * 1024  # parameters
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class GroupSize:
    """One flat group: a transformer block, or what stands before or after the blocks."""

    name: str
    parameters: int  # elements, alignment padding included


@dataclass(frozen=True)
class Demand:
    """What the run needs, independent of where it is put."""

    groups: tuple[GroupSize, ...]  # in forward order
    dtype: str
    micro_batch: int
    activation_bytes: int  # at `micro_batch` sequences

    @property
    def parameters(self) -> int:
        return sum(group.parameters for group in self.groups)

    @property
    def weight_bytes(self) -> int:
        return WEIGHT_BYTES[self.dtype]

    @property
    def state_bytes_per_parameter(self) -> int:
        return 8 if self.dtype == "float32" else 12


@dataclass(frozen=True)
class Limits:
    device_bytes: int | None  # None: not limited
    host_bytes: int | None
    device_is_host: bool  # a CPU: the device arena takes host memory too


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per owner on both sides, and the groups whose optimizer state lives on the host."""

    mode: str  # resident | optimizer-offload
    dtype: str
    offloaded: tuple[str, ...]  # group names
    chunk_parameters: int
    slots: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    limits: Limits
    offloaded_fraction: float  # of the parameters

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values()) + (self.device_bytes if self.limits.device_is_host else 0)

    def explain(self) -> str:
        """The plan as lines a person reads."""
        limit = "no limit" if self.limits.device_bytes is None else f"limit {mib(self.limits.device_bytes)}"
        share = f", {self.offloaded_fraction:.0%} of the state on the host" if self.offloaded else ""
        rows = [f"mode {self.mode}{share}", f"device {mib(self.device_bytes)} ({limit})"]
        rows += [f"  {owner:<12} {mib(size):>12}" for owner, size in self.device.items() if size]
        rows += [f"host {mib(self.host_bytes)}"]
        rows += [f"  {owner:<12} {mib(size):>12}" for owner, size in self.host.items() if size]
        return "\n".join(rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "offloadedFraction": round(self.offloaded_fraction, 4),
            "device": dict(self.device),
            "host": dict(self.host),
            "deviceBytes": self.device_bytes,
            "hostBytes": self.host_bytes,
            "deviceLimitBytes": self.limits.device_bytes,
        }


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def lay_out(demand: Demand, limits: Limits, mode: str, offloaded_groups: int) -> MemoryPlan:
    """Bytes per owner when the state of the last `offloaded_groups` groups is on the host."""
    cut = len(demand.groups) - offloaded_groups
    resident, offloaded = demand.groups[:cut], demand.groups[cut:]
    state = demand.state_bytes_per_parameter
    chunk = chunk_parameters(demand)
    scratch = chunk * 4 if demand.dtype != "float32" else 0
    weights = sum(aligned(group.parameters * demand.weight_bytes) for group in demand.groups)

    def state_bytes(groups: tuple[GroupSize, ...]) -> int:
        return sum(aligned(size * state) for group in groups for size in chunk_sizes(group.parameters, chunk))

    slots = SLOTS if offloaded else 0
    return MemoryPlan(
        mode=mode,
        dtype=demand.dtype,
        offloaded=tuple(group.name for group in offloaded),
        chunk_parameters=chunk,
        slots=slots,
        device={
            "parameters": weights,
            "gradients": weights,
            "optimizer": state_bytes(resident),
            "staging": slots * aligned(chunk * state) + aligned(scratch),
            "activations": demand.activation_bytes,
        },
        host={
            "optimizer": state_bytes(offloaded),
            "checkpoint": weights + sum(aligned(g.parameters * state) for g in demand.groups),
        },
        limits=limits,
        offloaded_fraction=sum(g.parameters for g in offloaded) / max(1, demand.parameters),
    )


def chunk_parameters(demand: Demand) -> int:
    """Elements per chunk: about a sixty-fourth of the model, within bounds, a multiple of 1024."""
    wanted = -(-demand.parameters // 64 // 1024) * 1024
    return min(MAX_CHUNK, max(MIN_CHUNK, wanted))


def chunk_sizes(parameters: int, chunk: int) -> list[int]:
    """Elements of each chunk of one group; chunks do not span groups."""
    full, rest = divmod(parameters, chunk)
    return [chunk] * full + ([rest] if rest else [])


def make_plan(demand: Demand, limits: Limits, mode: str) -> MemoryPlan:
    """The plan for `mode` (`auto` decides). Raises InfeasiblePlan with bytes per owner and the cheapest fixes."""
    total = len(demand.groups)
    if mode == "resident":
        candidates = [("resident", 0)]
    elif mode == "optimizer-offload":
        candidates = [("optimizer-offload", total)]
    else:
        candidates = [("resident", 0)] + [("optimizer-offload", n) for n in range(1, total + 1)]
    plans = [lay_out(demand, limits, name, count) for name, count in candidates]
    for plan in plans:
        if not _excess(plan):
            return plan
    raise InfeasiblePlan(_refusal(demand, limits, plans[-1] if mode == "auto" else plans[0], mode))


def _excess(plan: MemoryPlan) -> dict[str, int]:
    """Bytes over the limit, per side; empty when the plan fits."""
    over: dict[str, int] = {}
    if plan.limits.device_bytes is not None and plan.device_bytes > plan.limits.device_bytes:
        over["device"] = plan.device_bytes - plan.limits.device_bytes
    if plan.limits.host_bytes is not None and plan.host_bytes > plan.limits.host_bytes:
        over["host"] = plan.host_bytes - plan.limits.host_bytes
    return over


def _refusal(demand: Demand, limits: Limits, plan: MemoryPlan, mode: str) -> str:
    over = _excess(plan)
    sides = []
    for side, size in over.items():
        limit = limits.device_bytes if side == "device" else limits.host_bytes
        needed = plan.device_bytes if side == "device" else plan.host_bytes
        owners = plan.device if side == "device" else {**plan.host, **_device_owner(plan)}
        listed = ", ".join(f"{owner} {mib(count)}" for owner, count in owners.items() if count)
        sides.append(f"{side} needs {mib(needed)} and has {mib(limit or 0)}, {mib(size)} short ({listed})")
    fixes = _fixes(demand, limits, mode, over)
    return (
        f"mode {plan.mode} does not fit: {'; '.join(sides)}. Nothing was allocated. What would help: {fixes}"
    )


def _device_owner(plan: MemoryPlan) -> dict[str, int]:
    return {"device arena": plan.device_bytes} if plan.limits.device_is_host else {}


def _fixes(demand: Demand, limits: Limits, mode: str, over: Mapping[str, int]) -> str:
    """The smallest changes that make it fit, cheapest first."""
    fixes: list[str] = []
    total = len(demand.groups)
    resident = lay_out(demand, limits, "resident", 0)
    offload = lay_out(demand, limits, "optimizer-offload", total)
    if mode == "resident" and not _excess(offload):
        fixes.append(
            f"mode: optimizer-offload (or auto) needs {mib(offload.device_bytes)} on the device, with equal results"
        )
    best = "resident" if mode == "resident" else "optimizer-offload"
    micro = _largest_micro_batch(demand, limits, best)
    if micro:
        fixes.append(f"batch.microBatch: {micro} (now {demand.micro_batch}) with mode {best}")
    if "device" in over:
        wanted = (resident if best == "resident" else offload).device_bytes
        fixes.append(f"deviceMemory: at least {-(-wanted // 2**20)}Mi for mode {best}")
    if "host" in over:
        fixes.append(f"shape.memory: at least {mib(over['host'])} more")
    return "; ".join(fixes)


def _largest_micro_batch(demand: Demand, limits: Limits, mode: str) -> int | None:
    """The largest smaller micro-batch with which `mode` fits; activations grow in proportion to it."""
    count = 0 if mode == "resident" else len(demand.groups)
    for micro in range(demand.micro_batch - 1, 0, -1):
        if demand.micro_batch % micro:
            continue
        smaller = replace(
            demand,
            micro_batch=micro,
            activation_bytes=-(-demand.activation_bytes * micro // demand.micro_batch),
        )
        if not _excess(lay_out(smaller, limits, mode, count)):
            return micro
    return None
