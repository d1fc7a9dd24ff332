"""The block-major KV pool as one tensor, and the index arithmetic that everything else shares.

Layout: [block, layer, key-or-value, kv head, slot, head_dim]. All layers of a block lie together, so
a block is one copy when it moves (swap, migration, host tier). Inside, a (block, layer, k/v, head)
is one contiguous run of `block_tokens x head_dim` numbers: gathering a context copies whole runs, and
the result is already the [batch x head, context, head_dim] that a batched product wants.

The index of layer 0's keys serves every layer: layer and k/v only shift the origin of a view.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from busbar.workloads.serving.architecture import Architecture


@dataclass(frozen=True)
class KvShape:
    """Sizes of one block."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @classmethod
    def of(cls, arch: Architecture, block_tokens: int, dtype: torch.dtype) -> KvShape:
        return cls(arch.layers, arch.kv_heads, arch.head_dim, block_tokens, dtype)

    @property
    def runs_per_block(self) -> int:
        return self.layers * 2 * self.kv_heads

    @property
    def block_bytes(self) -> int:
        return self.runs_per_block * self.block_tokens * self.head_dim * self.dtype.itemsize


class KvCache:
    """`blocks` usable blocks plus the scratch block 0."""

    def __init__(self, shape: KvShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.blocks = blocks
        self.device = device
        self._heads = torch.arange(shape.kv_heads, device=device)
        self.allocate()

    def allocate(self) -> None:
        """A pool of zeros, at the start and after a `release`."""
        shape = self.shape
        self.pool = torch.zeros(
            (self.blocks + 1, shape.layers, 2, shape.kv_heads, shape.block_tokens, shape.head_dim),
            dtype=shape.dtype,
            device=self.device,
        )
        runs = self.pool.view(-1, shape.block_tokens * shape.head_dim)
        slots = self.pool.view(-1, shape.head_dim)
        planes = [(layer * 2 + kv) * shape.kv_heads for layer in range(shape.layers) for kv in (0, 1)]
        self._runs = [runs[plane:] for plane in planes]
        self._slots = [slots[plane * shape.block_tokens :] for plane in planes]

    def release(self) -> None:
        """Gives the memory back; until `allocate` nothing may be computed."""
        self.pool = torch.empty(0, dtype=self.shape.dtype, device=self.device)
        self._runs.clear()
        self._slots.clear()

    @property
    def bytes(self) -> int:
        return self.pool.numel() * self.pool.element_size()

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
        width = self.shape.head_dim
        self._slots[2 * layer].index_copy_(0, slot_index, keys.reshape(-1, width).to(self.shape.dtype))
        self._slots[2 * layer + 1].index_copy_(0, slot_index, values.reshape(-1, width).to(self.shape.dtype))

    def gather(self, layer: int, run_index: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole contexts, each [batch x kv head, context, head_dim]."""
        shape = (batch * self.shape.kv_heads, -1, self.shape.head_dim)
        keys = self._runs[2 * layer].index_select(0, run_index).view(shape)
        values = self._runs[2 * layer + 1].index_select(0, run_index).view(shape)
        return keys, values
