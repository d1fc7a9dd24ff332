"""Shares: which accelerator of a node a part of one is taken from.

In a pool that shares (`Pool.shareable`) a pod may ask for less than one accelerator, and then stands on one device
of its node: `Placement.devices` says on which, one number per rank. Devices are counted from 0. Pods that ask for
whole accelerators do not name theirs: they hold so many of the devices that no share stands on.

What is free of a node is a list of numbers (`cluster.py`): accelerators_m, cpu_m, memory_mib, ephemeral_mib, and
here, for each device, what shares hold of it, with a minus. Taking adds up in all of them alike, so books are kept
and rewound as without shares. A share that names no device (somebody else wrote the snapshot) counts as a whole
accelerator, wherever it stands: nothing is ever put on top of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .types import Placement

FIRST = 4
"""Where the devices begin in a node's list."""


def is_share(accelerators_m: int) -> bool:
    """Whether so much is a part of one accelerator."""
    return 0 < accelerators_m < 1000


def parts(free: Sequence[int]) -> tuple[int, ...]:
    """What is left of each device that shares stand on and do not fill, in order of their numbers."""
    return tuple([1000 + taken for taken in free[FIRST:] if -1000 < taken < 0])


def whole(free: Sequence[int]) -> int:
    """Devices that nobody stands on."""
    return max(0, (free[0] - sum(max(0, 1000 + taken) for taken in free[FIRST:] if taken < 0)) // 1000)


def room(free: Sequence[int], accelerators_m: int) -> int:
    """How many pods that ask for so much the devices hold."""
    if not is_share(accelerators_m):
        return whole(free) // (accelerators_m // 1000)
    return sum(left // accelerators_m for left in parts(free)) + whole(free) * (1000 // accelerators_m)


def device_with(free: Sequence[int], left_m: int) -> int:
    """The first device with exactly so much left (1000: that nobody stands on)."""
    return next(k for k, taken in enumerate(free[FIRST:]) if 1000 + taken == left_m)


def sound(free: Sequence[int]) -> bool:
    """Whether the devices can hold what stands on them."""
    held = [taken for taken in free[FIRST:] if taken < 0]
    return all(taken >= -1000 for taken in held) and free[0] >= sum(1000 + taken for taken in held)


def taken(placement: Placement, rank: int, amounts: Sequence[int], width: int) -> list[int]:
    """What one pod takes of a node's list; `width` devices are counted."""
    vector = [*amounts, *([0] * width)]
    if is_share(amounts[0]):
        device = placement.devices[rank] if rank < len(placement.devices) else -1
        if 0 <= device < width:
            vector[FIRST + device] = amounts[0]
        else:
            vector[0] = 1000
    return vector


def _of(placement: Placement, names: Sequence[str], last: bool) -> tuple[int, ...]:
    """The devices of as many ranks on each node as it is named, the first ones of it or the last."""
    own: dict[str, list[int]] = {}
    for name, device in zip(placement.nodes, placement.devices, strict=False):
        own.setdefault(name, []).append(device)
    if any(names.count(name) > len(own.get(name, ())) for name in set(names)):
        return ()
    return tuple(own[name].pop(-1 if last else 0) for name in names)


def leaving(placement: Placement, names: Sequence[str]) -> Placement:
    """The part of a placement that is given back when one pod on each of these nodes goes."""
    return replace(placement, nodes=tuple(names), devices=_of(placement, names, last=True))


def staying(placement: Placement, names: Sequence[str]) -> tuple[int, ...]:
    """The devices of the pods that stay on these nodes; none if there are not so many."""
    return _of(placement, names, last=False)
