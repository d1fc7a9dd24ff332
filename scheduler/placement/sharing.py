"""Shares: the device of a node that a part of an accelerator is taken from.

In a pool that shares (`Pool.shareable`) a pod may request less than one accelerator and is then placed on one
device of its node: `Placement.devices` names it, one number per rank, counted from 0. Pods that request whole
accelerators name no devices: they hold that many of the devices without shares.

The free resources of a node are a list of numbers (`pool.py`): accelerators_m, cpu_m, memory_mib,
ephemeral_mib, and then, for each device, minus what shares hold of it. So taking and giving back add up in
all entries alike. A share that names no device (the snapshot came from elsewhere) counts as a whole
accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..model.snapshot import Placement

FIRST = 4
"""Index of the first device in a node's list."""


def is_share(accelerators_m: int) -> bool:
    """Whether this amount is a part of one accelerator."""
    return 0 < accelerators_m < 1000


def partial_devices(free: Sequence[int]) -> tuple[int, ...]:
    """What is left of each device that has shares and is not full, in order of the devices."""
    return tuple([1000 + taken for taken in free[FIRST:] if -1000 < taken < 0])


def whole_devices(free: Sequence[int]) -> int:
    """Devices without shares that are free."""
    return max(0, (free[0] - sum(max(0, 1000 + taken) for taken in free[FIRST:] if taken < 0)) // 1000)


def room(free: Sequence[int], accelerators_m: int) -> int:
    """How many pods that request this much fit on the devices."""
    if not is_share(accelerators_m):
        return whole_devices(free) // (accelerators_m // 1000)
    return sum(left // accelerators_m for left in partial_devices(free)) + whole_devices(free) * (
        1000 // accelerators_m
    )


def device_with(free: Sequence[int], left_m: int) -> int:
    """The first device with exactly this much left (1000: a device without shares)."""
    return next(k for k, taken in enumerate(free[FIRST:]) if 1000 + taken == left_m)


def is_consistent(free: Sequence[int]) -> bool:
    """Whether the devices can hold what is placed on them."""
    held = [taken for taken in free[FIRST:] if taken < 0]
    return all(taken >= -1000 for taken in held) and free[0] >= sum(1000 + taken for taken in held)


def taken_from_node(placement: Placement, rank: int, amounts: Sequence[int], width: int) -> list[int]:
    """What one pod takes from a node's list; `width` devices are counted."""
    vector = [*amounts, *([0] * width)]
    if is_share(amounts[0]):
        device = placement.devices[rank] if rank < len(placement.devices) else -1
        if 0 <= device < width:
            vector[FIRST + device] = amounts[0]
        else:
            vector[0] = 1000
    return vector


def _of(placement: Placement, names: Sequence[str], last: bool) -> tuple[int, ...]:
    """The devices of as many ranks on each node as the node is named: its first ones, or its last."""
    own: dict[str, list[int]] = {}
    for name, device in zip(placement.nodes, placement.devices, strict=False):
        own.setdefault(name, []).append(device)
    if any(names.count(name) > len(own.get(name, ())) for name in set(names)):
        return ()
    return tuple(own[name].pop(-1 if last else 0) for name in names)


def leaving(placement: Placement, names: Sequence[str]) -> Placement:
    """The part of a placement that is given back when one pod leaves each of these nodes."""
    return replace(placement, nodes=tuple(names), devices=_of(placement, names, last=True))


def staying(placement: Placement, names: Sequence[str]) -> tuple[int, ...]:
    """The devices of the pods that stay on these nodes; empty if there are not as many."""
    return _of(placement, names, last=False)
