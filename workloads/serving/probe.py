"""Start-up checks by measurement: which attention back end, and is the result batch-independent here?

Whether a row of a product depends on its neighbours is a property of the BLAS library, the processor
and the number of threads. So it is tested on this machine, with this model's own weights, and the
answer is reported; the engine never promises what it has not just seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from busbar.workloads.serving.attention import BACKENDS, MIN_ROWS, AttentionBackend, Span
from busbar.workloads.serving.block_attention import PRODUCTS, InPlace, plan_blocks
from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.errors import ModelUnsupported
from busbar.workloads.serving.kvcache import KvCache, KvShape
from busbar.workloads.serving.model import Decoder
from busbar.workloads.serving.runner import Runner
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Chunk, Sequence

log = logging.getLogger(__name__)
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}

UNIT = 4
LAYOUTS = (((1, 2), 5, 1), ((4,), 3, 1), ((1, 7), 6, 1), ((6, 3), 4, 3), ((5,), 0, 2))
"""Three decoding sequences, two of which share a block, and two chunks of prompts: blocks, first query in quarters of
a block, queries."""
TIMED = (8, 1024)
"""Sequences and tokens of each, for which a GPU's ways of decoding are timed."""


@dataclass(frozen=True)
class Trial:
    """One back end on this machine."""

    name: str
    max_error: float
    """Largest absolute difference from float64; of a whole step: of the logits from those of what else would compute it, as a
    share of the largest."""
    microseconds: float = 0.0
    """Of a decode of 8 sequences, or a whole step of one, the fastest of a few calls; 0: not timed."""
    instead: tuple[float, str] | None = None
    """Microseconds of what else would compute the same, and what that is."""

    def __str__(self) -> str:
        spent = f" {self.microseconds:.0f} µs" if self.microseconds else ""
        if self.instead is not None:
            spent += f" instead of {self.instead[0]:.0f} {self.instead[1]}"
        return f"{self.name}{spent}, off by {self.max_error:.1g}"


@dataclass(frozen=True)
class _Decoding:
    """Random sequences that decode, and what float64 makes of them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    span: Span
    kv_heads: int
    exact: torch.Tensor

    def run(self, candidate: AttentionBackend) -> torch.Tensor:
        return candidate(self.q, self.k, self.v, self.span, self.kv_heads)


def _decoding(shape: KvShape, heads: int, device: torch.device) -> _Decoding:
    generator = torch.Generator().manual_seed(0)
    batch, context, queries, width = 8, 128, 1, shape.head_dim

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device=device, dtype=shape.dtype)

    k, v = (random(batch * shape.kv_heads, context, width) for _ in range(2))
    q = random(batch, queries, heads, width) * width**-0.5
    ends = torch.arange(context - batch + 1, context + 1, device=device)
    hidden = torch.arange(context, device=device) >= ends[:, None]
    mask = torch.zeros((batch, 1, 1, context), device=device).masked_fill_(
        hidden[:, None, None], float("-inf")
    )
    span = Span(0, batch, batch, queries, torch.empty(0, dtype=torch.int64), mask)
    group = heads // shape.kv_heads
    k64, v64 = (t.double().view(batch, shape.kv_heads, context, width) for t in (k, v))
    q64 = q.double().view(batch, shape.kv_heads, group, width)
    weights = torch.softmax(q64 @ k64.transpose(-1, -2) + mask.double(), -1)
    return _Decoding(q, k, v, span, shape.kv_heads, weights @ v64)


def try_backend(candidate: AttentionBackend, decoding: _Decoding, device: torch.device) -> Trial:
    """Compares with float64 and times."""
    got = decoding.run(candidate).double()
    error = (got.view(decoding.exact.shape) - decoding.exact).abs().max().item()
    best = fastest(lambda: decoding.run(candidate), device)
    return Trial(candidate.name, error, best * 1e6)


def choose_backend(
    shape: KvShape, heads: int, device: torch.device, candidates: Iterable[AttentionBackend] = BACKENDS
) -> tuple[AttentionBackend, list[Trial]]:
    """On a CPU the first correct one (they stand in order of repeatability), on a GPU the fastest."""
    decoding = _decoding(shape, heads, device)
    trials = [(c, try_backend(c, decoding, device)) for c in candidates]
    right = [(c, t) for c, t in trials if t.max_error < TOLERANCE[shape.dtype]]
    if not right:
        raise ModelUnsupported(
            "no attention back end computes correctly on this device: "
            + ", ".join(f"{t.name} is off by {t.max_error:.2g}" for _, t in trials)
        )
    chosen = right[0] if device.type == "cpu" else min(right, key=lambda pair: pair[1].microseconds)
    return chosen[0], [t for _, t in trials]


def fastest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of five calls."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def _paged() -> InPlace:
    from busbar.workloads.serving.paged_decode import PAGED

    return PAGED


def _kernel() -> InPlace:
    from busbar.workloads.serving.decode_kernel import KERNEL

    return KERNEL


GPU_WAYS: dict[str, Callable[[], InPlace]] = {"paged-varlen": _paged, "split-kv-kernel": _kernel}
"""Imported only where they are tried: they need what a CPU has not."""


def choose_in_place(
    shape: KvShape, heads: int, device: torch.device, gathering: AttentionBackend
) -> tuple[InPlace | None, list[Trial]]:
    """How decoding sequences are computed without gathering, and what was tried. None where no way is correct here or, on
    a GPU, none is faster than gathering contexts for `gathering`."""
    if device.type == "cpu":
        trial = try_blocks(shape, heads)
        return (PRODUCTS if trial.max_error < TOLERANCE[shape.dtype] else None), [trial]
    best, shortest, trials = None, float("inf"), []
    for name, find in GPU_WAYS.items():
        try:
            way = find()
            if shape.form is not None and not way.reads_codes:
                continue
            error = try_blocks(shape, heads, way=way, device=device).max_error
            within, gathered = time_decoding(shape, heads, device, way, gathering, *TIMED)
        except Exception as problem:  # of torch, Triton, its compiler or the driver: any kind
            log.warning("attention by %s does not run here: %s", name, problem)
            continue
        trials.append(Trial(name, error, within * 1e6, (gathered * 1e6, "gathered")))
        if error < TOLERANCE[shape.dtype] and within < min(shortest, gathered):
            best, shortest = way, within
    return best, trials


def time_decoding(
    shape: KvShape,
    heads: int,
    device: torch.device,
    way: InPlace,
    gathering: AttentionBackend,
    rows: int,
    context: int,
) -> tuple[float, float]:
    """Seconds of one layer for `rows` sequences of `context` tokens, whole blocks: in place, and gathered."""
    shape = replace(shape, layers=1)
    columns = context // shape.block_tokens
    cache = KvCache(shape, rows * columns, device)
    tables = torch.arange(rows * columns).view(rows, columns) + 1
    chunks = []
    for blocks in tables.tolist():
        sequence = Sequence(0, [0] * context, 0)
        sequence.blocks = blocks
        chunks.append(Chunk(sequence, context - 1, 1))
    part = way.plan(chunks, cache)
    q = torch.zeros((rows, heads, shape.head_dim), dtype=shape.dtype, device=device)
    mask = torch.zeros((rows, 1, 1, columns * shape.block_tokens), device=device)
    span = Span(0, rows, rows, 1, cache.run_index(tables.to(device)), mask)

    def gathered() -> object:
        k, v = cache.gather(0, span.run_index, span.batch)
        return gathering(q[:, None], k, v, span, shape.kv_heads)

    return fastest(lambda: part.attend(0, q, cache), device), fastest(gathered, device)


def try_blocks(
    shape: KvShape,
    heads: int,
    layouts: Iterable[tuple[tuple[int, ...], int, int]] = LAYOUTS,
    way: InPlace = PRODUCTS,
    device: torch.device = CPU,
) -> Trial:
    """Attention in place against float64: sequences given as (blocks, first query, queries)."""
    generator = torch.Generator().manual_seed(0)
    layouts = list(layouts)
    shape = replace(shape, layers=min(shape.layers, 2))  # the second one shows that layers are told apart
    cache = KvCache(shape, max(max(blocks) for blocks, _, _ in layouts), device)
    _fill(cache, generator)
    chunks = []
    for blocks, start, count in layouts:
        sequence = Sequence(0, [0] * (start * shape.block_tokens // UNIT + count), 0)
        sequence.blocks = list(blocks)
        chunks.append(Chunk(sequence, start * shape.block_tokens // UNIT, count))
    single = [c for c in chunks if c.count == 1]
    longer = [c for c in chunks if c.count > 1]
    rows = sum(c.count for c in chunks)
    width, layer = shape.head_dim, shape.layers - 1
    q = torch.randn((rows, heads, width), generator=generator) * width**-0.5
    q = q.to(device=device, dtype=shape.dtype)
    contexts = []
    k, v = torch.zeros((2, rows, shape.kv_heads, width), dtype=shape.dtype, device=device)
    row = 0
    for chunk in (*single, *longer):
        own = torch.tensor(chunk.sequence.blocks, device=device)
        both = cache.contents(layer, own).transpose(0, 1).transpose(1, 2)
        keys, values = both.reshape(2, shape.kv_heads, -1, width)[:, :, : chunk.start + chunk.count]
        contexts.append((row, chunk, keys, values))
        for new, whole in ((k, keys), (v, values)):
            new[row : row + chunk.count] = whole[:, chunk.start :].transpose(0, 1)
        row += chunk.count
    plan = plan_blocks(way, single, longer, cache)
    got = plan.attend(layer, q, k, v, cache).view(rows, heads, width)
    error = 0.0
    for row, chunk, keys, values in contexts:
        for i in range(chunk.count):
            seen = chunk.start + i + 1
            group = q[row + i].double().view(shape.kv_heads, -1, width)
            weights = torch.softmax(group @ keys[:, :seen].double().transpose(1, 2), -1)
            exact = (weights @ values[:, :seen].double()).view(heads, width)
            error = max(error, (got[row + i] - exact).abs().max().item())
    return Trial(way.name, error)


def _fill(cache: KvCache, generator: torch.Generator) -> None:
    """Random keys and values in every slot."""
    shape = cache.shape
    slots = torch.arange((cache.blocks + 1) * shape.block_tokens, device=cache.device)
    index = cache.slot_index(slots // shape.block_tokens, slots % shape.block_tokens)
    for layer in range(shape.layers):
        keys, values = torch.randn((2, len(slots), shape.kv_heads, shape.head_dim), generator=generator)
        cache.store(layer, index, keys.to(cache.device), values.to(cache.device))


def batch_invariant(decoder: Decoder, shape: KvShape, device: torch.device, positions: int) -> bool:
    """Whether one sequence's logits come out bit-equal alone, in company, and after a preemption."""
    length = min(150, positions - 4)
    if length < 4:
        return False
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, decoder.arch.vocab_size, (length,), generator=generator).tolist()
    blocks = -(-(length + 4) // shape.block_tokens)
    alone = _logits(decoder, shape, device, [tokens], blocks, budget=length, decode=3)
    crowd = [tokens, tokens[: length // 2], tokens[1 : length // 3], tokens[2:4]]
    together = _logits(decoder, shape, device, crowd, 4 * blocks, budget=37, decode=3)
    recomputed = _logits(decoder, shape, device, [tokens], blocks, budget=length, decode=3, restart=True)
    return all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(alone, together, recomputed, strict=True)
    )


def _logits(
    decoder: Decoder,
    shape: KvShape,
    device: torch.device,
    prompts: list[list[int]],
    blocks: int,
    budget: int,
    decode: int,
    restart: bool = False,
) -> list[torch.Tensor]:
    """Logits of the first prompt's next `decode` tokens (always token 0, for comparability)."""
    scheduler = Scheduler(BlockPool(blocks), StepLimits(shape.block_tokens, budget, len(prompts) + MIN_ROWS))
    runner = Runner(decoder, KvCache(shape, blocks, device))
    watched = [Sequence(i, list(p), len(p) + decode) for i, p in enumerate(prompts)]
    for sequence in watched:
        scheduler.add(sequence)
    rows: list[torch.Tensor] = []
    while len(rows) < decode:
        if restart and len(rows) == decode - 1:
            watched[0].computed, restart = 0, False
        step = scheduler.plan()
        outcome = runner.run(step)
        sequences, logits = [chunk.sequence for chunk in outcome.chunks], outcome.logits
        scheduler.commit(step, dict.fromkeys(sequences, 0))
        rows += [logits[i].clone() for i, s in enumerate(sequences) if s is watched[0]]
        for sequence in sequences:
            if len(sequence.tokens) == sequence.max_total:
                scheduler.finish(sequence)
    return rows
