"""Whether the disks have room for what a run writes: checkpoints, its result and its tokens, and state on a scratch disk.

What is known before anything is made is compared with what is free when the plan is made, and the tokens when the tokenizer is
there; a run that a full disk would end later is refused then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from busbar.workloads.training.demand import Demand
from busbar.workloads.training.disk_plan import disk_shortage, scratch_shortage, too_slow
from busbar.workloads.training.disk_tensor import measure_disk
from busbar.workloads.training.paths import Places, free_disk
from busbar.workloads.training.plan import MemoryPlan, shown_bytes

if TYPE_CHECKING:
    from busbar.workloads.training.run import Run


def scratch_folder(places: Places) -> Path:
    """Where state goes that is on a disk."""
    return places.scratch or places.checkpoints


def check_disks(run: Run, plan: MemoryPlan, demand: Demand, note: Callable[[str], object]) -> None:
    """Refuse a run for whose files, or for whose state, there is no room, or whose disk is too slow for its state. Raises
    InfeasiblePlan."""
    scratch = scratch_folder(run.places)
    if plan.on_disk:
        scratch.mkdir(parents=True, exist_ok=True)
        if (shortage := scratch_shortage(plan, free_disk(scratch))) is not None:
            raise shortage
    check_files(run, plan, demand)
    if plan.on_disk:
        rates = measure_disk(scratch, note)
        seconds = rates.seconds(plan.disk_bytes)
        if (refusal := too_slow(plan, seconds)) is not None:
            raise refusal
        note(
            f"each step reads {shown_bytes(plan.disk_bytes)} of state from {scratch} and writes them back: {seconds:.3g} s "
            f"one after the other, at {rates.read / 1e9:.2g} and {rates.write / 1e9:.2g} GB/s measured here"
        )


def check_files(run: Run, plan: MemoryPlan, demand: Demand, token_bytes: int = 0) -> None:
    """Refuse a run for whose checkpoints, result and tokens, so many bytes of which are still to be made, there is no room.
    Raises InfeasiblePlan."""
    checkpoints = run.places.checkpoints
    free = free_disk(checkpoints)
    if plan.on_disk and scratch_folder(run.places).stat().st_dev == checkpoints.stat().st_dev:
        free -= plan.disk_bytes
    shortage = disk_shortage(plan, demand, run.checkpoint.keep, free, token_bytes)
    if shortage is not None:
        raise shortage
