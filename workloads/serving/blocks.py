"""The KV cache as numbered blocks with reference counts. Pure Python, no torch.

Block 0 is scratch: padded positions of a batch read and write it, and it is never handed out, so a
pool of `total` usable blocks needs a tensor of `total + 1`. A block is free when its count is zero;
it returns to the free list exactly then. The list is last-in first-out, which keeps a small working
set warm in the processor's cache.
"""

from __future__ import annotations

SCRATCH_BLOCK = 0


class BlockPool:
    """Hands out block ids 1..total and takes them back."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a block pool needs at least one block, not {total}")
        self.total = total
        self._free = list(range(total, 0, -1))
        self._count = [0] * (total + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def take(self, n: int) -> list[int]:
        """`n` blocks with count 1 each. The caller has looked at `free` first."""
        if n > len(self._free):
            raise RuntimeError(f"asked for {n} blocks, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            self._count[block] = 1
        return taken

    def share(self, block: int) -> None:
        """One more holder of a block that somebody holds already."""
        if self._count[block] < 1:
            raise RuntimeError(f"block {block} is free and cannot be shared")
        self._count[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """Drops one reference of each block; the last holder frees it."""
        for block in reversed(blocks):
            if self._count[block] < 1:
                raise RuntimeError(f"block {block} was given back twice")
            self._count[block] -= 1
            if self._count[block] == 0:
                self._free.append(block)

    def holders(self, block: int) -> int:
        return self._count[block]
