"""What a run's plan needs of disks: who has which bytes, and why free space or a disk's speed does not do. Without torch."""

from __future__ import annotations

from busbar.workloads.training.demand import Demand
from busbar.workloads.training.errors import InfeasiblePlan
from busbar.workloads.training.plan import MemoryPlan, shown_bytes

MOST_DISK_S = 600  # of a step that waits for state on disk: a run of a thousand such steps takes a week


def scratch_shortage(plan: MemoryPlan, free: int) -> InfeasiblePlan | None:
    """Why `free` bytes of a scratch disk do not hold the state that the plan puts there, or None."""
    if plan.disk_bytes <= free:
        return None
    why = f"state on disk needs {shown_bytes(plan.disk_bytes)} of scratch disk, and {shown_bytes(free)} are free"
    return InfeasiblePlan(why, [f"shape.memory: at least {-(-plan.disk_bytes // 2**20)}Mi more"])


def too_slow(plan: MemoryPlan, seconds: float) -> InfeasiblePlan | None:
    """Why state on a disk that takes so many seconds in each step makes no sense, or None."""
    if seconds <= MOST_DISK_S:
        return None
    why = (
        f"each step would read {shown_bytes(plan.disk_bytes)} of state from disk and write them back in {seconds:.0f} s, and "
        f"more than {MOST_DISK_S} s are refused"
    )
    return InfeasiblePlan(
        why, [f"shape.memory: at least {-(-plan.disk_bytes // 2**20)}Mi more", "a faster disk"]
    )


def disk_owners(plan: MemoryPlan, demand: Demand, keep: int, tokens: int) -> dict[str, int]:
    """Bytes of what a run keeps on disks, of all ranks: checkpoints, one more being written, and the result; its tokens; and the
    state of one rank that is on a scratch disk."""
    found = {
        "checkpoints": plan.checkpoint_bytes * (keep + 1),
        "result": demand.result_bytes,
        "tokens": tokens,
        "state": plan.disk_bytes,
    }
    return {owner: size for owner, size in found.items() if size}


def disk_shortage(
    plan: MemoryPlan, demand: Demand, keep: int, free: int, tokens: int = 0
) -> InfeasiblePlan | None:
    """Why `free` bytes do not hold what the run writes beside its checkpoints, or None: those, one being written, the result, and
    so many bytes of tokens."""
    others = demand.result_bytes + tokens
    needed = plan.checkpoint_bytes * (keep + 1) + others
    if needed <= free:
        return None
    fits = (free - others) // plan.checkpoint_bytes - 1
    text = f", about {shown_bytes(tokens)} of tokens" if tokens else ""
    why = (
        f"{keep} checkpoints of {shown_bytes(plan.checkpoint_bytes)}, one more while it is written{text} and the result need "
        f"{shown_bytes(needed)} of disk, and {shown_bytes(free)} are free"
    )
    fewer = [f"checkpoint.keep: {fits}"] if fits >= 1 else []
    return InfeasiblePlan(why, [*fewer, f"a claim with at least {-(-(needed - free) // 2**20)}Mi more"])
