"""The block-major KV pool, and the index arithmetic that everything else shares.

Layout: [block, layer, key-or-value, kv head, slot, numbers of a head]. All layers of a block lie together, so
a block is one copy when it moves (migration, host tier). Inside, a (block, layer, k/v, head)
is one contiguous run of slots: gathering a context copies whole runs, and
the result is already the [batch x head, context, head_dim] that a batched product wants.

The index of layer 0's keys serves every layer: layer and k/v only shift the origin of a view.

With a form (`kvcodes.py`) the pool holds codes of 8 bits, and a second tensor of the same layout the float16 terms of
every slot.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod

import torch

from busbar.workloads.serving.architecture import Architecture
from busbar.workloads.serving.kvcodes import INT8, KvForm, decode, encode, numbers_of


@dataclass(frozen=True)
class KvShape:
    """Sizes of one block."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype
    """In which attention computes; without a form, also that of the pool."""
    form: KvForm | None = None

    @classmethod
    def of(
        cls, arch: Architecture, block_tokens: int, dtype: torch.dtype, form: KvForm | None = None
    ) -> KvShape:
        return cls(arch.layers, arch.kv_heads, arch.head_dim, block_tokens, dtype, form)

    @property
    def runs_per_block(self) -> int:
        return self.layers * 2 * self.kv_heads

    @property
    def slot_bytes(self) -> int:
        """Of one token's keys or values in one head."""
        return self.head_dim * self.dtype.itemsize if self.form is None else self.form.bytes(self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.runs_per_block * self.block_tokens * self.slot_bytes

    @property
    def stored(self) -> str:
        """The name of what a number is stored as."""
        return str(self.dtype).removeprefix("torch.") if self.form is None else self.form.name


class _Planes:
    """A tensor of the pool's layout, as runs and as slots of every layer's keys and values."""

    def __init__(self, pool: torch.Tensor) -> None:
        _, layers, _, kv_heads, block_tokens, width = pool.shape
        self.pool = pool
        self.width = width
        runs = pool.view(-1, block_tokens * width)
        slots = pool.view(-1, width)
        planes = [(layer * 2 + kv) * kv_heads for layer in range(layers) for kv in (0, 1)]
        self.runs = [runs[plane:] for plane in planes]
        self.slots = [slots[plane * block_tokens :] for plane in planes]

    def gather(self, plane: int, run_index: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, slots, width]."""
        return self.runs[plane].index_select(0, run_index).view(rows, -1, self.width)


class KvCache:
    """`blocks` usable blocks plus the scratch block 0."""

    def __init__(self, shape: KvShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.blocks = blocks
        self.device = device
        self._heads = torch.arange(shape.kv_heads, device=device)
        self.allocate()

    def allocate(self) -> None:
        """A pool of zeros, at the start and after a `release`. On a CPU a page of it takes memory, and time, when it is first
        written to: nobody waits for blocks that are not used."""
        shape, form = self.shape, self.shape.form
        if form is None:
            self._set(self._zeros(shape.head_dim, shape.dtype), None)
        else:
            codes = self._zeros(form.code_bytes(shape.head_dim), torch.int8 if form is INT8 else torch.uint8)
            self._set(codes, self._zeros(form.terms, torch.float16))

    def release(self) -> None:
        """Gives the memory back; until `allocate` nothing may be computed."""
        nothing = torch.empty((0, 0, 2, 1, 1, 1), dtype=self.shape.dtype, device=self.device)
        self._set(nothing, None)

    def _zeros(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        shape = self.shape
        sizes = (self.blocks + 1, shape.layers, 2, shape.kv_heads, shape.block_tokens, width)
        if self.device.type != "cpu":
            return torch.zeros(sizes, dtype=dtype, device=self.device)
        pages = mmap.mmap(-1, prod(sizes) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=dtype).view(sizes)

    def _set(self, numbers: torch.Tensor, terms: torch.Tensor | None) -> None:
        self._numbers = _Planes(numbers)
        self._terms = None if terms is None else _Planes(terms)

    @property
    def pool(self) -> torch.Tensor:
        """The numbers, or their codes."""
        return self._numbers.pool

    @property
    def terms(self) -> torch.Tensor | None:
        """Of the codes, if the cache has a form."""
        return None if self._terms is None else self._terms.pool

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.pool, self.terms) if each is not None)

    @property
    def stored(self) -> list[torch.Tensor]:
        """Numbers or codes, then their terms, each with the block in front."""
        return [plane for plane in (self.pool, self.terms) if plane is not None]

    def read(self, blocks: list[int]) -> bytearray:
        """What is stored in these blocks: numbers or codes of all, then their terms. Any thread may read blocks that
        nobody writes."""
        # The type is named because a list of no blocks would give floats, which index nothing.
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        parts = [plane.index_select(0, index).cpu().view(torch.uint8) for plane in self.stored]
        return bytearray().join(part.numpy().tobytes() for part in parts)

    def write(self, blocks: list[int], data: memoryview) -> None:
        """The reverse of `read`, for blocks that nobody uses. Raises ValueError for another number of bytes."""
        if len(data) != len(blocks) * self.shape.block_bytes:
            raise ValueError(f"{len(blocks)} blocks have {len(blocks) * self.shape.block_bytes} bytes")
        if not blocks:
            return
        index, start = torch.tensor(blocks, dtype=torch.int64, device=self.device), 0
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for plane in self.stored:
            sizes = (len(blocks), *plane.shape[1:])
            end = start + len(blocks) * plane[0].numel() * plane.element_size()
            part = whole[start:end].view(plane.dtype).view(sizes)
            plane.index_copy_(0, index, part.to(self.device))
            start = end
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def run_index(self, tables: torch.Tensor) -> torch.Tensor:
        """[batch, columns] block ids → flat index of runs, ordered [batch, kv head, column]."""
        first = tables * self.shape.runs_per_block
        return (first[:, None, :] + self._heads[None, :, None]).reshape(-1)

    def slot_index(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Per token its block id and offset in it → flat index of slots, ordered [token, kv head]."""
        run = (blocks * self.shape.runs_per_block)[:, None] + self._heads[None, :]
        return (run * self.shape.block_tokens + offsets[:, None]).reshape(-1)

    def store(self, layer: int, slot_index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes [token, kv head, head_dim] keys and values to their slots."""
        for plane, given in ((2 * layer, keys), (2 * layer + 1, values)):
            numbers = given.reshape(-1, self.shape.head_dim)
            if self.shape.form is None or self._terms is None:
                self._numbers.slots[plane].index_copy_(0, slot_index, numbers.to(self.shape.dtype))
            else:
                codes, terms = encode(numbers, self.shape.form)
                self._numbers.slots[plane].index_copy_(0, slot_index, codes)
                self._terms.slots[plane].index_copy_(0, slot_index, terms)

    def as_stored(self, numbers: torch.Tensor) -> torch.Tensor:
        """[..., head_dim] keys or values as they will be read again."""
        form, dtype = self.shape.form, self.shape.dtype
        if form is None:
            return numbers.to(dtype)
        return decode(*encode(numbers.reshape(-1, self.shape.head_dim), form), form, dtype).view(
            numbers.shape
        )

    def gather(self, layer: int, run_index: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole contexts, each [batch x kv head, context, head_dim]."""
        return self._gather(2 * layer, run_index, batch), self._gather(2 * layer + 1, run_index, batch)

    def _gather(self, plane: int, run_index: torch.Tensor, batch: int) -> torch.Tensor:
        rows = batch * self.shape.kv_heads
        numbers = self._numbers.gather(plane, run_index, rows)
        if self.shape.form is None or self._terms is None:
            return numbers
        terms = self._terms.gather(plane, run_index, rows)
        return decode(numbers, terms, self.shape.form, self.shape.dtype)

    def contents(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """[n, 2, kv heads, slots, head_dim] keys and values of these blocks."""
        numbers = self.pool[:, layer].index_select(0, blocks)
        if self.shape.form is None or self._terms is None:
            return numbers
        return decode(
            numbers, self._terms.pool[:, layer].index_select(0, blocks), self.shape.form, self.shape.dtype
        )

    def blocks_of(self, layer: int, first: int | None, blocks: torch.Tensor) -> StoredBlocks:
        """What is stored in these blocks: a view where they are the range that begins with `first`."""

        def part(pool: torch.Tensor) -> torch.Tensor:
            if first is not None:
                return pool[first : first + len(blocks), layer]
            return pool[:, layer].index_select(0, blocks)

        terms = None if self._terms is None else part(self._terms.pool)
        return StoredBlocks(part(self.pool), terms, self.shape)


@dataclass(frozen=True)
class StoredBlocks:
    """A layer of some blocks as they are stored."""

    numbers: torch.Tensor
    """[n, 2, kv heads, slots, ...] numbers or codes."""
    terms: torch.Tensor | None
    shape: KvShape

    def part(self, kv: int, head: int) -> torch.Tensor:
        """[n, slots, head_dim] of keys (0) or values (1): a view, or the codes as numbers."""
        stored = self.numbers[:, kv, head]
        return stored if self.shape.form is None else numbers_of(stored, self.shape.form, self.shape.dtype)

    def scale(self, kv: int, head: int) -> torch.Tensor | None:
        """[n, 1, slots] by which the numbers of a slot are multiplied."""
        return self._term(kv, head, 0)

    def added(self, kv: int, head: int) -> torch.Tensor | None:
        """[n, 1, slots] what is added to each of them then."""
        return self._term(kv, head, 1)

    def _term(self, kv: int, head: int, which: int) -> torch.Tensor | None:
        if self.terms is None or which >= self.terms.shape[-1]:
            return None
        return self.terms[:, kv, head, :, which].to(self.shape.dtype).unsqueeze(1)
