"""Experts that are read one by one because the memory does not hold them all: the same answers, and clear ends."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.models import greedy, save_model
from tests.serving.streamed import CPU, expert_settings, needs_of, streamed_settings
from tests.serving.test_metrics import value
from tests.serving.test_stream import cut, touch

from busbar.workloads.machine.direct_file import DirectReader, page_memory
from busbar.workloads.machine.streams import CallerStream, WorkerStream
from busbar.workloads.serving.architecture import read_architecture
from busbar.workloads.serving.checkpoint import Checkpoint
from busbar.workloads.serving.errors import MemoryTooSmall, ModelCorrupt, ModelFileMissing, SettingsError
from busbar.workloads.serving.expert_stream import ExpertCache, ExpertStreamedLayers, _Reader
from busbar.workloads.serving.layer_file import FileLayout
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.report import table_report
from busbar.workloads.serving.settings import EngineSettings, ServerSettings
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake
from busbar.workloads.serving.stream import HostSource, Link
from busbar.workloads.serving.weights import FusedModel

LAYERS, EXPERTS, PER_TOKEN = 5, 8, 3
PROMPTS = [[5, 6, 7, 8], [9, 10, 11] * 9, [12, 13], [14, 15, 16, 17, 18]]
PARAMS = greedy_params(10, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, transformers model) of a tiny Qwen3-MoE with five layers."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("moe")
    return folder, save_model(folder, "qwen3_moe", num_hidden_layers=LAYERS)


def stream(folder: Path, where: Path, places: int = 12, **changes: Any) -> Loaded:
    return load_engine(folder, **expert_settings(folder, places, where, **changes))


def layers_of(loaded: Loaded) -> ExpertStreamedLayers:
    layers = loaded.core.runner.decoder.weights.layers
    assert isinstance(layers, ExpertStreamedLayers)
    return layers


def answers(loaded: Loaded, params: Any = PARAMS) -> list[list[Any]]:
    """Tokens and log-probabilities."""
    return [[(d.tokens, d.logprobs) for d in deltas] for deltas in generate(loaded, PROMPTS, params)]


@pytest.fixture(scope="module")
def whole(moe: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The answers of the model that is streamed by layer, whose tokens are those of transformers."""
    where = tmp_path_factory.mktemp("whole")
    settings = streamed_settings(moe[0], 0, where, stream_unit="layers", deterministic=True)
    loaded = load_engine(moe[0], **settings)
    assert not isinstance(loaded.core.runner.decoder.weights.layers, ExpertStreamedLayers)
    found = generate(loaded, PROMPTS, PARAMS)
    model = moe[1]
    assert [tokens_of(each) for each in found] == [greedy(model, p, 10, eos_token_id=None) for p in PROMPTS]
    return [[(d.tokens, d.logprobs) for d in deltas] for deltas in found]


@pytest.mark.parametrize(
    ("places", "depth"),
    [(6, 1), (6, 0), (13, 1), (13, 0), (39, None)],
    ids=["fewest", "fewest, none ahead", "some", "some, none ahead", "all but one"],
)
def test_answers_are_those_of_whole_layers_bit_for_bit(
    moe: tuple[Path, Any], whole: list[list[Any]], places: int, depth: int | None, tmp_path: Path
) -> None:
    loaded = stream(moe[0], tmp_path, places, stream_depth=depth, deterministic=True)
    assert loaded.streaming is not None
    assert loaded.streaming.plan.places == places
    assert answers(loaded) == whole
    counts, cache = layers_of(loaded).cache.counts, layers_of(loaded).cache
    assert (counts.prefetches > 0) is (depth != 0)
    assert counts.prefetch_hits <= counts.prefetches
    size = needs_of(EngineSettings(moe[0])).experts
    assert size is not None
    assert counts.read_bytes % size.bytes == 0
    assert cache.counts.hit_rate == counts.hits / counts.queries
    if places == 39:
        assert counts.hit_rate is not None
        assert counts.hit_rate > 0.97


def test_speculation_prefix_cache_and_preemption_change_nothing(
    moe: tuple[Path, Any], tmp_path: Path
) -> None:
    params = greedy_params(30, ignore_eos=True)
    plain = [greedy(moe[1], prompt, 30, eos_token_id=None) for prompt in PROMPTS]
    block = needs_of(EngineSettings(moe[0], block_tokens=16)).block_bytes
    more: dict[str, Any] = {"speculate": 4, "host_kv_bytes": 4 * block, "max_model_len": 64}
    loaded = stream(moe[0], tmp_path, kv_bytes=6 * block, **more)
    for _ in range(2):
        assert [tokens_of(each) for each in generate(loaded, PROMPTS, params)] == plain
    assert loaded.core.scheduler.preemption_count > 0
    assert loaded.core.scheduler.cache_hits > 0


def test_a_router_foresees_more_than_chance(moe: tuple[Path, Any], tmp_path: Path) -> None:
    """One request: of eight experts a layer uses three."""
    loaded = stream(moe[0], tmp_path, 12)
    params = greedy_params(60, ignore_eos=True, logit_bias=((5, 30.0), (6, 30.0), (7, 30.0), (8, 30.0)))
    generate(loaded, PROMPTS[:1], params)
    counts = layers_of(loaded).cache.counts
    assert counts.prefetch_hits > 1.3 * counts.prefetches * PER_TOKEN / EXPERTS


# -- the plan ------------------------------------------------------------------------------------------


def test_the_plan_is_told_and_so_are_hits_and_bytes(moe: tuple[Path, Any], tmp_path: Path) -> None:
    loaded = stream(moe[0], tmp_path, 12, stream_unit="auto")
    assert loaded.streaming is not None
    assert (
        "all 5 layers stay in memory but for their experts, which have 12 places of" in loaded.streaming.text
    )
    assert "for 40 (read ahead as the next layer's router foresees), at most 1 MiB in a step" in (
        loaded.streaming.text
    )
    answers(loaded)
    report = table_report(loaded, ServerSettings(EngineSettings(moe[0]), "tiny"))
    needs, counts = needs_of(EngineSettings(moe[0])), layers_of(loaded).cache.counts
    assert needs.experts is not None
    assert (report.mode, report.expert_places) == ("stream", 12)
    assert report.streamed_bytes == (40 - 12) * needs.experts.bytes
    assert (report.expert_queries, report.expert_hits) == (counts.queries, counts.hits)
    assert (report.expert_prefetches, report.expert_prefetch_hits) == (
        counts.prefetches,
        counts.prefetch_hits,
    )
    assert report.expert_read_bytes == counts.read_bytes > 0
    assert report.stream_bytes_per_second
    core = loaded.core
    assert value(core, "busbar:expert_queries_total") == counts.queries > 0
    assert value(core, "busbar:expert_hits_total") == counts.hits > 0
    assert value(core, "busbar:expert_prefetch_hits_total") == counts.prefetch_hits > 0
    assert 0 < value(core, "busbar:expert_read_bytes_total") <= counts.read_bytes
    assert 0 < value(core, "busbar:expert_prefetches_total") <= counts.prefetches


def test_a_model_that_fits_has_no_places(moe: tuple[Path, Any], tmp_path: Path) -> None:
    loaded = stream(moe[0], tmp_path, 40)
    assert loaded.streaming is None
    assert not list(tmp_path.iterdir())
    report = table_report(loaded, ServerSettings(EngineSettings(moe[0]), "tiny"))
    assert (report.expert_places, report.expert_queries) == (0, 0)


def test_too_little_memory_is_refused_with_what_helps(moe: tuple[Path, Any], tmp_path: Path) -> None:
    settings = expert_settings(moe[0], 6, tmp_path)
    settings["memory_bytes"] -= 1
    said = r"even with its experts streamed.* 5 layers without their experts and 6 of these.*--weights-dtype int8"
    with pytest.raises(MemoryTooSmall, match=said):
        load_engine(moe[0], **settings)
    assert not list(tmp_path.iterdir())


def test_a_model_without_experts_has_none_to_stream(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    with pytest.raises(SettingsError, match=r"has no experts to stream \(--stream-unit experts\)"):
        load_engine(tmp_path / "model", weights="stream", stream_unit="experts", stream_dir=tmp_path)


# -- a long life ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [SleepLevel.WEIGHTS_KEPT, SleepLevel.WEIGHTS_DROPPED])
def test_sleep_gives_the_places_back_and_waking_goes_on(
    moe: tuple[Path, Any], level: SleepLevel, tmp_path: Path
) -> None:
    loaded = stream(moe[0], tmp_path, deterministic=True)
    before, layers = answers(loaded), layers_of(loaded)
    queries = value(loaded.core, "busbar:expert_queries_total")
    held = [layers.is_open]
    fall_asleep(loaded, level)
    assert [*held, layers.is_open] == [True, False]
    wake(loaded)
    assert answers(loaded) == before
    assert value(loaded.core, "busbar:expert_queries_total") > queries


def test_a_pass_that_was_given_up_leaves_no_place_busy(moe: tuple[Path, Any], tmp_path: Path) -> None:
    loaded = stream(moe[0], tmp_path, 6, deterministic=True)
    before, cache = answers(loaded), layers_of(loaded).cache
    for _ in range(4):
        iter(cache.use(0, range(EXPERTS))).__next__()
    assert answers(loaded) == before


def test_a_later_start_finds_the_file(moe: tuple[Path, Any], tmp_path: Path) -> None:
    stream(moe[0], tmp_path)
    (first,) = tmp_path.glob("*.experts")
    made = first.stat().st_mtime_ns
    stream(moe[0], tmp_path, 20)
    assert first.stat().st_mtime_ns == made


@pytest.mark.parametrize("harm", [cut, touch])
def test_a_file_that_changes_meanwhile_ends_the_engine(
    moe: tuple[Path, Any], harm: Callable[[Path], None], tmp_path: Path
) -> None:
    loaded = stream(moe[0], tmp_path, 6)
    generate(loaded, PROMPTS[:1], PARAMS)
    (path,) = tmp_path.glob("*.experts")
    harm(path)
    with pytest.raises(ModelCorrupt, match=f"{path.name} was cut or changed while"):
        generate(loaded, PROMPTS, PARAMS)


def test_a_flipped_bit_is_found_when_an_expert_is_read_first(moe: tuple[Path, Any], tmp_path: Path) -> None:
    stream(moe[0], tmp_path)
    (path,) = tmp_path.glob("*.experts")
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelCorrupt, match=r"expert 7 of layer 4 of .* is not what was written"):
        answers(stream(moe[0], tmp_path, 39))


def test_a_read_error_names_the_expert(
    moe: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = stream(moe[0], tmp_path, 6)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DirectReader, "read", broken)
    with pytest.raises(
        ModelFileMissing, match=r"expert \d of layer \d of .* cannot be read: Input/output error"
    ):
        generate(loaded, PROMPTS, PARAMS)


@pytest.mark.parametrize("from_host", [True, False], ids=["host memory", "disk"])
def test_experts_reach_a_device_by_copies_on_a_stream_of_their_own(
    moe: tuple[Path, Any], whole: list[list[Any]], from_host: bool, tmp_path: Path
) -> None:
    """The way of a GPU, with a thread as the stream of its copies."""
    loaded = stream(moe[0], tmp_path, 6, deterministic=True)
    decoder, arch = loaded.core.runner.decoder, read_architecture(moe[0])
    layout = FileLayout.by_expert(arch, torch.float32, None)
    source: Any = layers_of(loaded).source
    model, made = FusedModel(Checkpoint(moe[0]), arch, CPU, torch.float32), {}
    for number in range(layout.records):
        made[number] = page_memory(layout.layout(number).size)
        layout.store(model, number, made[number], None)
    if from_host:
        source = HostSource(made)

    def link(_: torch.device) -> Link:
        return Link(WorkerStream("reading"), WorkerStream("loading"), CallerStream)

    cache = ExpertCache(layout, 9, PER_TOKEN, source, CPU, ahead=True, link=link)
    layers = ExpertStreamedLayers([made[i] for i in range(LAYERS)], layout, cache)
    decoder.weights = replace(decoder.weights, layers=layers)
    layers.probe()
    assert answers(loaded) == whole
    assert layers.rate.lately > 0
    assert cache.counts.prefetch_hits > 0
    layers.rest()  # as asleep: the places are made anew within a pass
    assert answers(loaded) == whole
    layers.rest()


def test_what_a_layer_waits_for_goes_ahead_of_what_is_foreseen_and_the_rest_of_that_is_not_read(
    moe: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arch = read_architecture(moe[0])
    layout = FileLayout.by_expert(arch, torch.float32, None)
    model, made = FusedModel(Checkpoint(moe[0]), arch, CPU, torch.float32), {}
    for number in range(layout.records):
        made[number] = page_memory(layout.layout(number).size)
        layout.store(model, number, made[number], None)
    begun, gate, read = threading.Event(), threading.Event(), list[tuple[int, int]]()

    class Held(HostSource):
        """The second layer's experts come when the gate is open."""

        def fetch(self, index: int, staging: torch.Tensor | None) -> torch.Tensor:
            layer, expert = divmod(index - LAYERS, EXPERTS)
            read.append((layer, expert))
            if layer == 1:
                begun.set()
                assert gate.wait(60)
            return super().fetch(index, staging)

    cache = ExpertCache(layout, 12, PER_TOKEN, Held(made), CPU, ahead=True)
    layers = ExpertStreamedLayers([made[i] for i in range(LAYERS)], layout, cache)
    for _ in layers:  # takes the places
        pass
    cache.foresee(0, torch.randn((1, arch.hidden), generator=torch.Generator().manual_seed(0)))
    assert [expert for expert, _ in cache.use(0, [0, 1, 2])] == [0, 1, 2]
    _, foreseen = cache._places._foreseen
    other = next(expert for expert in range(EXPERTS) if expert not in foreseen)
    order = _Reader.order

    def open_gate(reader: _Reader, reads: Any, *, urgent: bool) -> None:
        order(reader, reads, urgent=urgent)
        gate.set()

    monkeypatch.setattr(_Reader, "order", open_gate)
    assert begun.wait(60)  # the first of what is foreseen, which is not taken back
    assert {expert for expert, _ in cache.use(1, [foreseen[2], other])} == {foreseen[2], other}
    assert read[3:] == [(1, foreseen[0]), (1, foreseen[2]), (1, other)]
    layers.close()
