"""Which blocks have a copy in host memory, in which slot, and which copies are on their way. Pure Python, no torch.

The host holds slots of a block's size. What is in a slot is known by the block's name (`prefix.py`), so a request that
comes back finds its blocks there whatever has become of them on the device. The slot that was not used for the longest
time is overwritten first.

All copies, out and in, are made one after another in the order of their numbers (`mover.py`). So a slot may be
promised to the next block as soon as a copy that reads it has a number: what comes later cannot overtake it. Only the
steps that compute stand outside this order: a block with a copy under way is known here as moving, and a step that
writes to it waits for that copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """One copy of a block between the device and the host."""

    number: int
    block: int
    slot: int
    out: bool
    """From the device to the host."""


class HostTier:
    """Slots 0..total-1, the names of what they hold, and the copies that are planned and not yet done."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.moves_total = {True: 0, False: 0}
        """Copies so far, out and in."""
        self._free = list(range(total - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """The longest unused first."""
        self._kept: set[bytes] = set()
        self._planned: list[Move] = []
        self._moving: dict[int, int] = {}
        """Block → number of its last copy that is not done."""
        self._last = 0
        self._done = 0

    @property
    def used(self) -> int:
        return len(self._slots)

    @property
    def is_moving(self) -> bool:
        return bool(self._moving)

    def has(self, name: bytes) -> bool:
        return name in self._slots

    def keep(self, names: Iterable[bytes]) -> None:
        """These are not overwritten until the next call: they will be fetched."""
        known = [name for name in names if name in self._slots]
        for name in known:
            self._slots.move_to_end(name)
        self._kept = set(known)

    def save(self, block: int, name: bytes) -> None:
        """Plans a copy of the block's content, which has this name; nothing where it is here already, or no slot may be
        overwritten."""
        if name in self._slots:
            self._slots.move_to_end(name)
            return
        if not self._free and (not self._slots or next(iter(self._slots)) in self._kept):
            return
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[name] = slot
        self._plan(block, slot, out=True)

    def fetch(self, name: bytes, block: int) -> int:
        """Plans a copy of what has this name into the block; the copy's number. The block must not be read, nor
        computed on, before `done` has reached it."""
        return self._plan(block, self._slots[name], out=False)

    def waits_for(self, block: int) -> int:
        """The number of the copy that must be done before a step writes to this block; 0: none."""
        return self._moving.get(block, 0)

    def take_planned(self) -> tuple[Move, ...]:
        """The copies planned since the last call, in order."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def done(self, number: int) -> None:
        """All copies up to this number are done."""
        if number > self._done:
            self._done = number
            self._moving = {block: last for block, last in self._moving.items() if last > number}

    def _plan(self, block: int, slot: int, out: bool) -> int:
        self._last += 1
        self._planned.append(Move(self._last, block, slot, out))
        self._moving[block] = self._last
        self.moves_total[out] += 1
        return self._last
