"""The KV cache as numbered blocks with reference counts. Pure Python, no torch.

Block 0 is scratch: padded positions of a batch read and write it, and it is never handed out, so a
pool of `total` usable blocks needs a tensor of `total + 1`. A block without holders is free. One that has a name
(`prefix.py`) keeps its content while it is free: a request for the name reuses it, and it is evicted only when no
nameless block is left, the least recently freed first. A sequence gives its last block back first, so the end of a
prefix goes before its beginning. Nameless blocks are last-in first-out, which keeps a small working set warm in the
processor's cache.
"""

from __future__ import annotations

from collections import OrderedDict

SCRATCH_BLOCK = 0


class BlockPool:
    """Hands out block ids 1..total and takes them back."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a block pool needs at least one block, not {total}")
        self.total = total
        self._free = list(range(total, 0, -1))
        self._count = [0] * (total + 1)
        self._name: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Named blocks without holders, the next to go first."""

    @property
    def free(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.free

    def take(self, n: int) -> list[int]:
        """`n` blocks with count 1 each. The caller has looked at `free` first."""
        if n > self.free:
            raise RuntimeError(f"asked for {n} blocks, {self.free} are free")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for block in taken:
            self._count[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Adds a reference to a block that is in use, or free with its content."""
        if self._count[block] < 1 and block not in self._idle:
            raise RuntimeError(f"block {block} is free and cannot be shared")
        self._idle.pop(block, None)
        self._count[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """Drops one reference of each block; the last holder frees it."""
        for block in reversed(blocks):
            if self._count[block] < 1:
                raise RuntimeError(f"block {block} was given back twice")
            self._count[block] -= 1
            if self._count[block] == 0:
                if block in self._name:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def name(self, block: int, name: bytes) -> None:
        """The block's content is complete and will not change. Of two with one name the first keeps it."""
        if name not in self._named and block not in self._name:
            self._named[name] = block
            self._name[block] = name

    def find(self, names: list[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `names`. They must be shared before a `take`."""
        found: list[int] = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: list[int]) -> int:
        """How many of them count as free now."""
        return sum(block in self._idle for block in blocks)

    def holders(self, block: int) -> int:
        return self._count[block]

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._named[self._name.pop(block)]
        return block
