"""Builds a step's tensors from the scheduler's plan and runs the model on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from busbar.workloads.serving.adapter_pages import AdapterRows, group_rows
from busbar.workloads.serving.attention import MIN_ROWS, Span, padded_columns
from busbar.workloads.serving.block_attention import plan_blocks
from busbar.workloads.serving.blocks import SCRATCH_BLOCK
from busbar.workloads.serving.graphs import DecodeGraphs
from busbar.workloads.serving.kvcache import KvCache
from busbar.workloads.serving.model import Batch, Decoder
from busbar.workloads.serving.mover import BlockMover
from busbar.workloads.serving.sequence import Chunk, Step

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class Outcome:
    """What a step has computed."""

    chunks: list[Chunk]
    """Those that get a token; of one sequence by position."""
    logits: torch.Tensor
    """[n, vocabulary] float32, of that token."""
    states: list[tuple[Chunk, torch.Tensor]]
    """The hidden states that chunks keep."""


class Runner:
    """A decoder with its KV cache."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        adapters_together: bool = True,
        mover: BlockMover | None = None,
    ) -> None:
        """Without `adapters_together` what an adapter adds is computed for each adapter alone. The `mover` is for plans
        with a host tier."""
        self.mover = mover
        self.graphs: DecodeGraphs | None = None
        """For steps that only decode, where `step_probe.choose_graphs` finds that they can be recorded."""
        self.adapters_together = adapters_together
        self.decoder = decoder
        self.cache = cache

    def run(self, step: Step) -> Outcome:
        """Computes a step, and starts its copies."""
        self.start_copies(step)
        if self.graphs is not None and self.graphs.takes(step.chunks):
            logits = self.graphs.run(step.chunks)
            if logits is not None:
                return Outcome(list(step.chunks), logits, [])
        return self.launch(step)

    def launch(self, step: Step) -> Outcome:
        """Computes a step kernel by kernel."""
        batch, samplers, keepers = self.batch(step)
        logits, states = self.decoder.forward(batch, self.cache)
        parts = torch.split(states, [len(chunk.kept) for chunk in keepers]) if keepers else ()
        return Outcome(samplers, logits[: len(samplers)], list(zip(keepers, parts, strict=True)))

    def start_copies(self, step: Step) -> None:
        """Returns when the step may compute."""
        if self.mover is not None:
            self.mover.submit(step.moves)
            if step.waits_for:
                self.mover.wait(step.waits_for)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step that only decodes computes while its caller goes on."""
        return self.mover is None and self.graphs is not None and not self.graphs.failed

    def release(self) -> None:
        """Gives memory back but that of the weights; until `allocate` nothing may be computed."""
        if self.graphs is not None:
            self.graphs.forget()
        if self.mover is not None:
            self.mover.release()
        self.cache.release()

    def allocate(self) -> None:
        """The memory anew, without content."""
        self.cache.allocate()
        if self.mover is not None:
            self.mover.allocate()

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] float32, of tokens behind these hidden states."""
        return self.decoder.weights.head(states).float()

    def batch(self, step: Step) -> tuple[Batch, list[Chunk], list[Chunk]]:
        """(rows, chunks that sample, chunks that keep states): decoding rows first, by context length; then each
        prompt chunk; then padding."""
        size, device = self.cache.shape.block_tokens, self.cache.device
        singles = sorted((c for c in step.chunks if c.count == 1), key=lambda c: c.start)
        longer = [c for c in step.chunks if c.count > 1]
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        samplers: list[Chunk] = []
        sample_rows: list[int] = []
        keepers: list[Chunk] = []
        kept_rows: list[int] = []
        for chunk in (*singles, *longer):
            sequence, end = chunk.sequence, chunk.start + chunk.count
            tokens += chunk.tokens
            positions += range(chunk.start, end)
            blocks += [sequence.blocks[p // size] for p in range(chunk.start, end)]
            if chunk.samples:
                samplers.append(chunk)
                sample_rows.append(len(tokens) - 1)
            if kept := chunk.kept:
                keepers.append(chunk)
                shift = len(tokens) - end
                kept_rows += range(kept.start + shift, kept.stop + shift)
        spans: list[Span] = []
        plan = None
        if self.decoder.in_place is not None:
            plan = plan_blocks(self.decoder.in_place, singles, longer, self.cache)
            sample_rows = sample_rows or [0]
        else:
            spans = [*self._decode_spans(singles), *self._prompt_spans(longer, len(singles))]
            padding = max(1, MIN_ROWS - len(tokens))
            tokens += [0] * padding
            positions += [0] * padding
            blocks += [SCRATCH_BLOCK] * padding
            # One row more than needed, at least MIN_ROWS: the last one takes the vector loops' tails.
            sample_rows += [len(tokens) - 1] * max(1, MIN_ROWS - len(sample_rows))
        where = torch.tensor(positions, device=device)
        return (
            Batch(
                tokens=torch.tensor(tokens, device=device),
                positions=where,
                slot_index=self.cache.slot_index(torch.tensor(blocks, device=device), where % size),
                spans=tuple(spans),
                sample_rows=torch.tensor(sample_rows, device=device),
                kept_rows=torch.tensor(kept_rows, device=device) if kept_rows else None,
                plan=plan,
                adapters=self._adapters([*singles, *longer], sample_rows + kept_rows),
            ),
            samplers,
            keepers,
        )

    def _adapters(self, chunks: list[Chunk], wanted: list[int]) -> AdapterRows | None:
        """The rows of `chunks`, and of those the `wanted` ones, by adapter; None without any."""
        if all(chunk.sequence.adapter is None for chunk in chunks):
            return None
        places = [
            None if chunk.sequence.adapter is None else chunk.sequence.adapter.place
            for chunk in chunks
            for _ in range(chunk.count)
        ]
        left = [places[row] if row < len(places) else None for row in wanted]
        device, together = self.cache.device, self.adapters_together
        return AdapterRows(group_rows(places, device, together), group_rows(left, device, together))

    def _decode_spans(self, chunks: list[Chunk]) -> list[Span]:
        """Groups by context so that padding at most doubles what is gathered."""
        spans: list[Span] = []
        first = 0
        columns = [self._columns(chunk) for chunk in chunks]
        while first < len(chunks):
            limit = max(2 * columns[first], padded_columns(1, self.cache.shape.block_tokens))
            last = first
            while last < len(chunks) and columns[last] <= limit:
                last += 1
            spans.append(self._span(chunks[first:last], first))
            first = last
        return spans

    def _prompt_spans(self, chunks: list[Chunk], row: int) -> list[Span]:
        spans = []
        for chunk in chunks:
            spans.append(self._span([chunk], row))
            row += chunk.count
        return spans

    def _span(self, chunks: list[Chunk], row: int) -> Span:
        """Chunks of equal length; each query sees its own position and those before it."""
        device, count = self.cache.device, chunks[0].count
        width = max(self._columns(chunk) for chunk in chunks)
        tables = [
            table + [SCRATCH_BLOCK] * (width - len(table))
            for table in (chunk.sequence.blocks[:width] for chunk in chunks)
        ]
        context = width * self.cache.shape.block_tokens
        starts = torch.tensor([chunk.start for chunk in chunks], device=device)
        query_positions = starts[:, None] + torch.arange(count, device=device)
        hidden = torch.arange(context, device=device) > query_positions[..., None]
        mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, MINUS_INFINITY)
        return Span(
            start=row,
            stop=row + len(chunks) * count,
            batch=len(chunks),
            queries=count,
            run_index=self.cache.run_index(torch.tensor(tables, device=device)),
            mask=mask[:, None],
        )

    def _columns(self, chunk: Chunk) -> int:
        size = self.cache.shape.block_tokens
        return padded_columns(-(-(chunk.start + chunk.count) // size), size)
