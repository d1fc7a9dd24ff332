"""The KV cache as numbered blocks with reference counts. Pure Python, no torch.

Block 0 is scratch: padded positions of a batch read and write it, and it is never handed out, so a
pool of `total` usable blocks needs a tensor of `total + 1`. A block without holders is free. One that has a name
(`prefix.py`) keeps its content while it is free: a request for the name reuses it, and it is evicted only when no
nameless block is left, the least recently freed first. A sequence gives its last block back first, so the end of a
prefix goes before its beginning. Nameless blocks are last-in first-out, which keeps a small working set warm in the
processor's cache.

With a host tier (`hosttier.py`) what is evicted is copied to host memory first, where that is cheaper than computing
it again, and `locate` finds it there. The blocks that will be evicted next are copied ahead of that, so that nobody
has to wait for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from busbar.workloads.serving.hosttier import HostTier, Move

SCRATCH_BLOCK = 0
COPIED_AHEAD = 8
"""Blocks whose content is copied to the host before they have to be evicted."""


@dataclass(frozen=True)
class CopyCost:
    """What decides whether content is copied to the host, or computed again when it is needed. Seconds; None where
    nothing was measured yet."""

    block_s: float | None = None
    """To copy a block one way."""
    token_s: float | None = None
    """To compute a prompt token."""

    def pays(self, tokens: int) -> bool:
        """Whether a block of so many tokens is cheaper copied out and in again than computed again."""
        if self.block_s is None or self.token_s is None:
            return True
        return 2 * self.block_s < tokens * self.token_s


class BlockPool:
    """Hands out block ids 1..total and takes them back."""

    def __init__(self, total: int, block_tokens: int = 64, host_blocks: int = 0) -> None:
        if total < 1:
            raise ValueError(f"a block pool needs at least one block, not {total}")
        self.total = total
        self.block_tokens = block_tokens
        self.host = HostTier(host_blocks)
        self.cost = CopyCost()
        self.held: Counter[str] = Counter()
        """Blocks in use, by the tenant that holds them."""
        self._free = list(range(total, 0, -1))
        self._count = [0] * (total + 1)
        self._tenant: dict[int, str] = {}
        self._name: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._part: dict[int, int] = {}
        """Block → tokens, of named blocks that are not full."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Named blocks without holders, the next to go first."""
        self._waits_for = 0

    @property
    def free(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.free

    def take(self, n: int, tenant: str = "") -> list[int]:
        """`n` blocks with count 1 each. The caller has looked at `free` first."""
        if n > self.free:
            raise RuntimeError(f"asked for {n} blocks, {self.free} are free")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for block in taken:
            self._hold(block, tenant)
            self._waits_for = max(self._waits_for, self.host.waits_for(block))
        return taken

    def share(self, block: int, tenant: str = "") -> None:
        """Adds a reference to a block that is in use, or free with its content."""
        if self._count[block] < 1 and block not in self._idle:
            raise RuntimeError(f"block {block} is free and cannot be shared")
        self._idle.pop(block, None)
        if self._count[block]:
            self._count[block] += 1
        else:
            self._hold(block, tenant)

    def give_back(self, blocks: list[int]) -> None:
        """Drops one reference of each block; the last holder frees it."""
        for block in reversed(blocks):
            if self._count[block] < 1:
                raise RuntimeError(f"block {block} was given back twice")
            self._count[block] -= 1
            if self._count[block] == 0:
                self.held[self._tenant.pop(block)] -= 1
                if block in self._name:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def name(self, block: int, name: bytes, part: int | None = None) -> None:
        """The block's content is complete and will not change; of a block that is not full its `part` first tokens, as
        long as nobody holds it. Of two with one name the first keeps it."""
        if name not in self._named and block not in self._name:
            self._named[name] = block
            self._name[block] = name
            if part is not None:
                self._part[block] = part

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of `names` on the device. They must be shared before a `take`."""
        found: list[int] = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def locate(self, names: Sequence[bytes]) -> list[int | None]:
        """As `find`, with None for a block that has a copy in host memory only."""
        found: list[int | None] = []
        for name in names:
            block = self._named.get(name)
            if block is None and not self.host.has(name):
                break
            found.append(block)
        return found

    def claim(self, block: int, tenant: str = "") -> None:
        """Takes a free named block for good: its content will grow, so that nobody may find it any more."""
        self.share(block, tenant)
        self._unname(block)
        self._waits_for = max(self._waits_for, self.host.waits_for(block))

    def idle(self, blocks: list[int]) -> int:
        """How many of them count as free now."""
        return sum(block in self._idle for block in blocks)

    def foreign(self, blocks: list[int], tenant: str) -> int:
        """How many of them are in use, and another tenant's."""
        return sum(self._tenant.get(block, tenant) != tenant for block in blocks)

    def holders(self, block: int) -> int:
        return self._count[block]

    def copy_ahead(self) -> None:
        """Plans copies of the blocks that are evicted next, while no others are under way."""
        if len(self._free) >= COPIED_AHEAD or self.host.is_moving or not self.host.total:
            return
        for block in islice(self._idle, COPIED_AHEAD):
            self._save(block)

    def take_moves(self) -> tuple[tuple[Move, ...], int]:
        """(copies to start now, the number of the copy that the next step has to wait for before it computes)."""
        waits_for, self._waits_for = self._waits_for, 0
        return self.host.take_planned(), waits_for

    def _hold(self, block: int, tenant: str) -> None:
        self._count[block] = 1
        self._tenant[block] = tenant
        self.held[tenant] += 1

    def _evict(self) -> int:
        block = next(iter(self._idle))
        self._save(block)
        del self._idle[block]
        self._unname(block)
        return block

    def _unname(self, block: int) -> None:
        del self._named[self._name.pop(block)]
        self._part.pop(block, None)

    def _save(self, block: int) -> None:
        if self.cost.pays(self._part.get(block, self.block_tokens)):
            self.host.save(block, self._name[block])
