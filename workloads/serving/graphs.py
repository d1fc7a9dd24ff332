"""Decoding steps as CUDA graphs: the launches of a whole step are recorded once and started together.

A model of a few billion numbers computes a decoding step in less time than an interpreter takes to launch its hundreds of
kernels. A graph is recorded for a number of rows and a width of block tables, both rounded up to powers of two, when a step
first needs it. Its inputs are one flat buffer of whole numbers (tokens, positions, block tables), filled in pinned memory
and copied at once; rows without a sequence write to the scratch block. Everything else, also where keys and values go, is
computed from them on the device.

A step is for a graph if it only decodes: one token of each sequence, whose logits are wanted, without adapters and hidden
states, and attention reads blocks in place. Others run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from busbar.workloads.serving.block_attention import BlockPlan, Tables
from busbar.workloads.serving.blocks import SCRATCH_BLOCK
from busbar.workloads.serving.kvcache import KvCache
from busbar.workloads.serving.model import Batch, Decoder
from busbar.workloads.serving.sequence import Chunk
from busbar.workloads.serving.weights import ResidentLayers

log = logging.getLogger(__name__)

MOST_ROWS = 256
"""Of a graph. Larger steps keep a GPU busy for longer than their launches take."""
LEAST_COLUMNS = 8
"""Of a graph's block tables: contexts that are shorter share one graph."""

Compute = Callable[[], None]


class Recorder(Protocol):
    """Records what a call does to fixed tensors."""

    def __call__(self, compute: Compute) -> Compute:
        """Computes once, and returns what computes it again."""

    def forget(self) -> None:
        """What was recorded is used no more."""


class CudaRecorder:
    """CUDA graphs that share their memory: one runs at a time, and what they return lies elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget()

    def __call__(self, compute: Compute) -> Compute:
        """The first call, which compiles and allocates, runs on a stream of its own, as torch asks for."""
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        caller = torch.cuda.current_stream(self._device)
        beside.wait_stream(caller)
        with torch.cuda.stream(beside):
            compute()
        caller.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Other threads, as the one that moves blocks, may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            compute()

        def again(_read: Compute = compute) -> None:
            """Keeps what the graph reads, which is what `compute` holds."""
            graph.replay()

        return again

    def forget(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()


@dataclass
class _Inputs:
    """What one graph reads. The numbers of a row's table that lie behind its context are of no account."""

    rows: int
    columns: int
    host: torch.Tensor
    device: torch.Tensor
    written: list[list[int]] = field(default_factory=list)
    """The blocks that each row's table holds on the host."""

    @classmethod
    def on(cls, device: torch.device, rows: int, columns: int) -> _Inputs:
        size, pinned = rows * (2 + columns), device.type == "cuda"
        host = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        return cls(rows, columns, host, torch.zeros_like(host, device=device), [[] for _ in range(rows)])

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(tokens [rows], positions [rows], tables [rows, columns]) int32, on the device."""
        tokens, positions, tables = torch.split(self.device, [self.rows, self.rows, self.rows * self.columns])
        return tokens, positions, tables.view(self.rows, self.columns)

    def fill(self, chunks: Sequence[Chunk], block_tokens: int) -> None:
        """With a token of each sequence; the rows behind them are of position 0 of the scratch block.

        The host's side may be written again when the device has read it: every step waits for its tokens.
        """
        rows, count = self.rows, len(chunks)
        numbers: np.ndarray = self.host.numpy()
        numbers[: 2 * rows] = 0
        numbers[:count] = [chunk.tokens[0] for chunk in chunks]
        numbers[rows : rows + count] = [chunk.start for chunk in chunks]
        tables = numbers[2 * rows :].reshape(rows, self.columns)
        for row in range(rows):
            blocks = [SCRATCH_BLOCK]
            if row < count:
                blocks = chunks[row].sequence.blocks[: chunks[row].start // block_tokens + 1]
            if self.written[row] != blocks:
                tables[row, : len(blocks)] = blocks
                self.written[row] = blocks
        self.device.copy_(self.host, non_blocking=True)


class DecodeGraphs:
    """The graphs of one decoder and cache."""

    def __init__(self, decoder: Decoder, cache: KvCache, most_rows: int, recorder: Recorder) -> None:
        self._decoder, self._cache, self._recorder = decoder, cache, recorder
        self.most_rows = min(_power_of_two(most_rows), MOST_ROWS)
        self.failed = False
        """One could not be recorded; no more are."""
        self.forget()

    @staticmethod
    def possible(decoder: Decoder) -> bool:
        """Whether its steps do the same whatever the sequences are: layers that are read as they are needed do not."""
        way = decoder.in_place
        return way is not None and way.part is not None and isinstance(decoder.weights.layers, ResidentLayers)

    def __len__(self) -> int:
        return len(self._recorded)

    def forget(self) -> None:
        """Gives back what was recorded, before the memory of weights or cache moves."""
        self._recorded: dict[tuple[int, int], tuple[_Inputs, Compute]] = {}
        self._logits: torch.Tensor | None = None
        self._recorder.forget()

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        return len(chunks) <= self.most_rows and all(
            chunk.count == 1 and chunk.samples and not chunk.kept and chunk.sequence.adapter is None
            for chunk in chunks
        )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """[chunks, vocabulary] float32 logits, until the next step; the cache gains their keys and values. None, with a
        warning, where the step cannot be recorded; nothing has been computed then that does harm."""
        if self.failed:
            return None
        columns = max(chunk.start for chunk in chunks) // self._cache.shape.block_tokens + 1
        key = _power_of_two(len(chunks)), max(LEAST_COLUMNS, _power_of_two(columns))
        try:
            inputs, compute = self._recorded.get(key) or self._record(key, chunks)
        except Exception as problem:  # of torch, Triton, its compiler or the driver: any kind
            log.warning("steps go on without CUDA graphs: none for %d rows of %d blocks: %s", *key, problem)
            self.forget()
            self.failed = True
            return None
        inputs.fill(chunks, self._cache.shape.block_tokens)
        compute()
        assert self._logits is not None
        return self._logits[: len(chunks)]

    def _record(self, key: tuple[int, int], chunks: Sequence[Chunk]) -> tuple[_Inputs, Compute]:
        decoder, cache = self._decoder, self._cache
        rows, columns = key
        size, device = cache.shape.block_tokens, cache.device
        if self._logits is None:
            self._logits = torch.zeros((self.most_rows, decoder.arch.vocab_size), device=device)
        inputs, logits = _Inputs.on(device, rows, columns), self._logits[:rows]
        inputs.fill(chunks, size)
        way = decoder.in_place
        assert way is not None
        assert way.part is not None
        build = way.part

        def compute() -> None:
            tokens, positions, tables = inputs.parts
            positions = positions.long()
            own = tables.gather(1, (positions // size)[:, None])[:, 0].long()
            part = build(Tables(tables, (positions + 1).int(), columns * size), cache)
            batch = Batch(
                tokens=tokens.long(),
                positions=positions,
                slot_index=cache.slot_index(own, positions % size),
                spans=(),
                sample_rows=torch.arange(rows, device=device),
                plan=BlockPlan(part, ()),
            )
            logits.copy_(decoder.weights.head(decoder.states(batch, cache)))

        self._recorded[key] = inputs, self._recorder(compute)
        return self._recorded[key]


def _power_of_two(number: int) -> int:
    """The least that is not smaller."""
    result: int = 1 << (number - 1).bit_length()
    return result
