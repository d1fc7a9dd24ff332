"""Start-up checks of whole decoding steps on a GPU: as graphs, and with kernels between the products of a layer.

As in `probe.py`, what is taken is what computes the same here, and is faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from busbar.workloads.serving.graphs import CudaRecorder, DecodeGraphs
from busbar.workloads.serving.kvcache import KvCache, KvShape
from busbar.workloads.serving.model import Decoder, LayerCalls
from busbar.workloads.serving.probe import TOLERANCE, Trial, fastest
from busbar.workloads.serving.runner import Runner
from busbar.workloads.serving.sequence import Chunk, Sequence, Step

log = logging.getLogger(__name__)
WHOLE = 5.0
"""By how much more than a single result the logits of two whole steps may differ: roundings of all layers add up."""


def choose_graphs(runner: Runner, most_rows: int) -> list[Trial]:
    """Gives the runner graphs for its decoding steps, where they compute the same and are faster, and the decoder kernels
    for what lies between its products, where the graphs are faster with them; what was tried."""
    decoder, cache = runner.decoder, runner.cache
    if cache.device.type != "cuda" or not DecodeGraphs.possible(decoder):
        return []
    graphs = DecodeGraphs(decoder, cache, most_rows, CudaRecorder(cache.device))
    trials = try_graphs(runner, graphs)
    return trials if runner.graphs is None else trials + try_calls(runner, graphs)


def try_graphs(runner: Runner, graphs: DecodeGraphs) -> list[Trial]:
    """Against launching kernel by kernel."""
    step = _one_row(runner.decoder)
    exact = runner.launch(step).logits.clone()
    found = graphs.run(step.chunks)
    if found is None:
        return []
    error = _off_by(found, exact)
    recorded = fastest(lambda: graphs.run(step.chunks), runner.cache.device)
    launched = fastest(lambda: runner.launch(step), runner.cache.device)
    if error < TOLERANCE[runner.decoder.dtype] and recorded < launched:
        runner.graphs = graphs
    else:
        graphs.forget()
    return [Trial("decode-graphs", error, recorded * 1e6, (launched * 1e6, "kernel by kernel"))]


def _layer_kernels() -> LayerCalls:
    from busbar.workloads.serving.layer_kernels import LAYER_KERNELS

    return LAYER_KERNELS


def try_calls(
    runner: Runner, graphs: DecodeGraphs, find: Callable[[], LayerCalls] = _layer_kernels
) -> list[Trial]:
    """Graphs with these calls against graphs with torch's; the decoder keeps the faster."""
    decoder, device, step = runner.decoder, runner.cache.device, _one_row(runner.decoder)
    exact = graphs.run(step.chunks)
    if exact is None or runner.cache.shape.form is not None:  # they store no codes
        return []
    exact = exact.clone()
    before, torchs = fastest(lambda: graphs.run(step.chunks), device), decoder.calls
    graphs.forget()
    try:
        decoder.calls = find()
        error = calls_off_by(decoder.calls, decoder, runner.cache.shape)
        whole = _off_by(runner.launch(step).logits, exact)
        after = fastest(lambda: graphs.run(step.chunks), device)
    except Exception as problem:  # of Triton, its compiler or the driver: any kind
        log.warning("kernels between a layer's products do not run here: %s", problem)
        decoder.calls = torchs
        return []
    right = error < TOLERANCE[decoder.dtype] and whole < WHOLE * TOLERANCE[decoder.dtype]
    if not (right and after < before) or graphs.failed:
        decoder.calls, graphs.failed = torchs, False
        graphs.forget()
    return [Trial("layer-kernels", error, after * 1e6, (before * 1e6, "by torch's calls"))]


def calls_off_by(calls: LayerCalls, decoder: Decoder, shape: KvShape) -> float:
    """The largest difference from float64, as a share of each result's largest number, for random rows: those of a model
    may hardly depend on some of its layers."""
    arch, device, dtype = decoder.arch, decoder.weights.embedding.device, decoder.dtype
    generator = torch.Generator().manual_seed(2)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device=device, dtype=dtype)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.double(), weight.shape, weight.double(), arch.norm_eps)

    rows, width, half = 3, arch.head_dim, arch.head_dim // 2
    x, added, weight = random(rows, arch.hidden), random(rows, arch.hidden), random(arch.hidden)
    total, normed = calls.add_norm(x, added, weight, arch.norm_eps)
    pairs = [(total, (x + added).double()), (normed, norm(x + added, weight))]
    gate, up = random(rows, 96), random(rows, 96)
    pairs.append((calls.gated(torch.cat((gate, up), 1)), F.silu(gate.double()) * up.double()))
    cache = KvCache(replace(shape, layers=1), rows, device)
    places = torch.arange(1, rows + 1, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    qkv = random(rows, arch.heads + 2 * arch.kv_heads, width)
    turns = random(rows, width), random(rows, width)
    swapped = torch.cat((qkv[..., half:], qkv[..., :half]), -1).double()
    turned = qkv.double() * turns[0].double()[:, None] + swapped * turns[1].double()[:, None]
    queries, keys = calls.turn_and_store(
        qkv.view(rows, -1), turns, None, 0.5, arch.norm_eps, 0, cache.slot_index(*places), cache
    )
    stored = cache.pool[1:, 0, :, :, 0]  # [rows, 2, kv heads, dim]
    pairs += [(queries, 0.5 * turned[:, : arch.heads]), (keys, turned[:, arch.heads : -arch.kv_heads])]
    pairs += [(stored[:, 0], pairs[-1][1]), (stored[:, 1], qkv[:, -arch.kv_heads :].double())]
    return max(_off_by(found.double(), exact) for found, exact in pairs)


def _one_row(decoder: Decoder) -> Step:
    """The sixth token of a sequence, in a cache that holds nothing yet. Its tokens are none of the first, some of which have
    embeddings of zeros in many models."""
    sequence = Sequence(0, [decoder.arch.vocab_size // 2] * 6, 7)
    sequence.blocks = [1]
    return Step((Chunk(sequence, 5, 1),), (), ())


def _off_by(found: torch.Tensor, exact: torch.Tensor) -> float:
    """As a share of the largest exact number."""
    return ((found - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()
