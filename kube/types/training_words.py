"""What a job's status says of its adapters and its steps, in words for people: the same in the command line and in the portal."""

from __future__ import annotations

from collections.abc import Sequence

from busbar.kube.contracts.workload import others_seconds
from busbar.kube.types.training_status import (
    AdapterProgress,
    CheckpointStatus,
    LinkDirection,
    MemoryPlace,
    MemoryUse,
    PlannedBytes,
    PowerUse,
    ReplacedPod,
    SlowLink,
    StepPhases,
    Worker,
)


def adapter_words(row: AdapterProgress) -> str:
    """How far one of several adapters is, and how good."""
    words = [f"{row.step} of {row.steps} steps"]
    if row.loss is not None:
        words.append(f"loss {row.loss:.4g}")
    if row.bits_per_byte is not None:
        words.append(f"{row.bits_per_byte:.3f} bits per byte")
    words.append("written" if row.finished else "waits" if not row.step else "in training")
    return ", ".join(words)


def phase_words(phases: StepPhases) -> str:
    """What steps are spent on, the most first; what is below a percent is left out."""
    named = sorted(((share, phase) for phase, share in phases if share), key=lambda each: -each[0])
    return ", ".join(f"{phase} {share} %" for share, phase in named)


def replaced_words(replaced: Sequence[ReplacedPod]) -> str:
    """Which pods of a gang were lost and made again; empty where none was."""
    named = [
        f"rank {each.rank}"
        + (f" ({each.times} times)" if each.times > 1 else "")
        + (" (waits for another node)" if each.needs_node else "")
        for each in replaced
    ]
    return f"made again: {', '.join(named)}" if named else ""


def slowest_words(workers: Sequence[Worker]) -> str:
    """For which pod of a gang the others wait, and how much; empty where that is not known."""
    if len(workers) < 2:
        return ""
    slowest, usual = workers[0], others_seconds([each.own_seconds for each in workers])
    times = f", {slowest.own_seconds / usual:.2f} times the others" if usual else ""
    return f"rank {slowest.rank}: {slowest.own_seconds:g} s of each step{times}"


def link_words(slow: SlowLink | None) -> str:
    """Which direction of an accelerator's link is slow, and how slow; empty: none is."""
    if slow is None:
        return ""
    way = "to" if slow.direction is LinkDirection.LOAD else "from"
    return f"{slow.mib_per_second} MiB/s {way} the accelerator (usually {slow.usual_mib_per_second})"


def disk_words(checkpoint: CheckpointStatus) -> str:
    """How fast the disk took the last checkpoint, and what is usual where it was slow; empty where that is not known."""
    if checkpoint.mib_per_second is None:
        return ""
    usual = f" (usually {checkpoint.usual_mib_per_second})" if checkpoint.slow_in_a_row else ""
    return f"{checkpoint.mib_per_second} MiB/s{usual}"


def cap_words(percent: int | None, board_w: float | None) -> str:
    """The power cap of a job's boards, in per cent and where their nameplate is known in watts; empty without one."""
    if percent is None:
        return ""
    watts = f" ({board_w:,.0f} W)" if board_w is not None else ""
    return f"{percent} % of each board's limit{watts}"


def limit_words(power: PowerUse | None) -> str:
    """Under which power limit a job's boards are, and what limits have cost it; empty where no feed limits them."""
    if power is None:
        return ""
    now = "" if power.limit_percent is None else f"boards at {power.limit_percent} % of their highest, "
    if power.seconds < 1:
        return now.removesuffix(", ")
    return f"{now}{power.slowdown:.2f} times as long as without limits so far"


_OWNERS = {
    "parameters": "weights",
    "base": "frozen weights",
    "slots": "blocks on their way",
    "optimizer": "optimizer's state",
    "staging": "staging of updates",
    "checkpoint": "snapshot",
    "copies": "copies of the state",
    "state": "optimizer's state",
}


def owner_words(row: PlannedBytes) -> str:
    """What a part of the plan is for."""
    return _OWNERS.get(row.owner, row.owner)


def size_words(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib} MiB"


def owners_at(memory: MemoryUse, place: MemoryPlace) -> list[PlannedBytes]:
    """Of the plan."""
    return [row for row in memory.owners or () if row.place is place]


def memory_words(memory: MemoryUse, place: MemoryPlace) -> str:
    """What is planned of a memory and what for, and its peak; empty where that is not known."""
    rows = owners_at(memory, place)
    planned, peak = {
        MemoryPlace.DEVICE: (memory.planned_device_mib, memory.peak_device_mib),
        MemoryPlace.HOST: (memory.planned_host_mib, memory.peak_host_mib),
        MemoryPlace.DISK: (sum(row.mib for row in rows) or None, None),
    }[place]
    if planned is None:
        return ""
    measured = "" if peak is None else f", peak {size_words(peak)}"
    parts = ", ".join(f"{owner_words(row)} {size_words(row.mib)}" for row in rows)
    return f"{size_words(planned)} planned{measured}" + (f": {parts}" if parts else "")


def moment_words(state: str | None) -> str:
    """In which format a job keeps AdamW's moments; empty where they are exact."""
    return "" if state in (None, "exact") else f"in {state}"
