"""Decoding steps as graphs, with a recorder that computes again what it was given. What a GPU's recorder does, and how fast,
is for `benchmarks/gpu/serving.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.graphed import PROMPTS, graphs_of, with_graphs
from tests.serving.models import greedy

from busbar.workloads.serving import step_probe
from busbar.workloads.serving.block_attention import PRODUCTS, InPlace
from busbar.workloads.serving.decode_kernel import KERNEL
from busbar.workloads.serving.graphs import LEAST_COLUMNS, DecodeGraphs
from busbar.workloads.serving.paged_decode import PAGED
from busbar.workloads.serving.sequence import Chunk, Pooling, Sequence, Step
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake
from busbar.workloads.serving.step_probe import try_graphs

pytestmark = pytest.mark.usefixtures("paged")


@pytest.mark.parametrize("way", [PAGED, KERNEL], ids=lambda way: way.name)
def test_tokens_are_those_of_transformers(llama: tuple[Path, Any], way: InPlace) -> None:
    folder, model = llama
    loaded, recorder = with_graphs(folder, way=way)
    lasting = (12, 3, 20, 9, 1)
    found = generate(loaded, PROMPTS, [greedy_params(count) for count in lasting])
    assert [tokens_of(d) for d in found] == [
        greedy(model, p, n) for p, n in zip(PROMPTS, lasting, strict=True)
    ]
    assert recorder.replayed >= 10  # the steps behind the last prompt


def test_a_pool_too_small_for_all_and_contexts_that_outgrow_a_table_change_nothing(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = llama
    monkeypatch.setattr("busbar.workloads.serving.graphs.LEAST_COLUMNS", 1)
    loaded, recorder = with_graphs(folder, kv_bytes=22 * block_bytes(folder))
    found = generate(loaded, PROMPTS, greedy_params(40))
    assert [tokens_of(d) for d in found] == [greedy(model, p, 40) for p in PROMPTS]
    assert loaded.core.scheduler.preemption_count
    assert recorder.recorded == len(graphs_of(loaded)) > 3


def block_bytes(folder: Path) -> int:
    return load_engine(folder).core.runner.cache.shape.block_bytes


def test_graphs_are_for_powers_of_two(llama: tuple[Path, Any]) -> None:
    loaded, recorder = with_graphs(llama[0])
    generate(loaded, [[5] * 9, [6] * 9, [7] * 9], greedy_params(6))
    assert (recorder.recorded, recorder.replayed) == (1, 5)
    generate(loaded, [[5] * 9] * 4, greedy_params(6))
    assert recorder.recorded == 1
    generate(loaded, [[5] * 9], greedy_params(6))
    generate(loaded, [[5] * (16 * LEAST_COLUMNS - 3)], greedy_params(6))  # outgrows the narrowest table
    assert recorder.recorded == len(graphs_of(loaded)) == 3


def test_steps_that_do_more_than_decode_are_not_for_a_graph(llama: tuple[Path, Any]) -> None:
    loaded, _ = with_graphs(llama[0], most_rows=3)
    graphs = graphs_of(loaded)

    def chunk(count: int = 1, **changes: Any) -> Chunk:
        return Chunk(Sequence(0, [5, 6, 7], 9, **changes), 3 - count, count)

    assert graphs.takes([chunk()] * 4)  # rows are rounded up
    assert not graphs.takes([chunk()] * 5)
    assert not graphs.takes([chunk(), chunk(count=2)])
    assert not graphs.takes([Chunk(Sequence(0, [5, 6, 7], 9), 1, 1)])  # no token is sampled behind it
    assert not graphs.takes([chunk(pooling=Pooling.LAST)])
    adapter: Any = object()
    assert not graphs.takes([chunk(adapter=adapter)])


def test_without_a_graph_steps_go_on(llama: tuple[Path, Any], caplog: pytest.LogCaptureFixture) -> None:
    folder, model = llama
    loaded, recorder = with_graphs(folder)
    recorder.problem = RuntimeError("operation not permitted when stream is capturing")
    found = generate(loaded, PROMPTS, greedy_params(5))
    assert [tokens_of(d) for d in found] == [greedy(model, p, 5) for p in PROMPTS]
    assert caplog.text.count("steps go on without CUDA graphs") == 1
    assert "4 rows of 8 blocks: operation not permitted" in caplog.text
    assert graphs_of(loaded).failed


@pytest.mark.parametrize("level", [SleepLevel.WEIGHTS_KEPT, SleepLevel.WEIGHTS_DROPPED])
def test_sleep_gives_them_back(llama: tuple[Path, Any], level: SleepLevel) -> None:
    folder, model = llama
    loaded, recorder = with_graphs(folder)
    generate(loaded, PROMPTS[:1], greedy_params(4))
    assert len(graphs_of(loaded)) == 1
    before = recorder.forgotten
    fall_asleep(loaded, level)
    assert not len(graphs_of(loaded))
    assert recorder.forgotten == before + 1
    wake(loaded)
    (found,) = generate(loaded, PROMPTS[:1], greedy_params(4))
    assert tokens_of(found) == greedy(model, PROMPTS[0], 4)
    assert recorder.recorded == 2


def test_they_are_possible_where_every_step_does_the_same(llama: tuple[Path, Any]) -> None:
    decoder = load_engine(llama[0]).core.runner.decoder

    def possible(way: InPlace | None) -> bool:
        decoder.in_place = way
        return DecodeGraphs.possible(decoder)

    assert possible(PAGED)
    assert possible(KERNEL)
    assert not possible(PRODUCTS)  # on a CPU
    assert not possible(None)  # gathered contexts
    read_as_needed: Any = object()
    decoder.weights = replace(decoder.weights, layers=read_as_needed)
    assert not possible(PAGED)


def test_the_start_takes_graphs_that_are_right_and_faster(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = llama
    loaded, _ = with_graphs(folder)
    runner, graphs = loaded.core.runner, graphs_of(loaded)
    seconds = {"first": 1.0, "second": 2.0}

    def timed(call: Any, device: torch.device) -> float:
        call()
        return seconds["first"] if len(called) % 2 else seconds["second"]

    called: list[object] = []

    def fastest(call: Any, device: torch.device) -> float:
        called.append(call)
        return timed(call, device)

    monkeypatch.setattr(step_probe, "fastest", fastest)

    def trial() -> tuple[bool, str]:
        called.clear()
        runner.graphs = None
        (told,) = try_graphs(runner, graphs)
        return runner.graphs is graphs, str(told)

    assert trial() == (True, "decode-graphs 1000000 µs instead of 2000000 kernel by kernel, off by 0")
    seconds["first"] = 3.0
    assert not trial()[0]
    seconds["first"] = 1.0
    monkeypatch.setattr(
        "busbar.workloads.serving.graphs.DecodeGraphs.run",
        lambda *_: torch.ones(1, runner.decoder.arch.vocab_size),
    )
    assert not trial()[0]


def test_a_model_that_cannot_be_recorded_is_started_without(llama: tuple[Path, Any]) -> None:
    loaded, recorder = with_graphs(llama[0])
    runner, graphs = loaded.core.runner, graphs_of(loaded)
    runner.graphs, recorder.problem = None, RuntimeError("no")
    assert try_graphs(runner, graphs) == []
    assert runner.graphs is None
    step = Step((Chunk(Sequence(0, [5], 2), 0, 1),), (), ())
    step.chunks[0].sequence.blocks = [1]
    assert runner.run(step).logits.shape == (1, runner.decoder.arch.vocab_size)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_cache_of_codes_gives_the_tokens_that_it_gives_without_graphs(
    llama: tuple[Path, Any], form: str
) -> None:
    expected = generate(load_engine(llama[0], kv_dtype=form), PROMPTS[:3], greedy_params(6))
    loaded, recorder = with_graphs(llama[0], way=KERNEL, kv_dtype=form)
    found = generate(loaded, PROMPTS[:3], greedy_params(6))
    assert [tokens_of(d) for d in found] == [tokens_of(d) for d in expected]
    assert recorder.replayed >= 4
