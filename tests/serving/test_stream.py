"""Layers that are streamed because the memory does not hold them: the same answers, and clear ends."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from tests.serving.adapted import Family
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.models import VOCAB, config_of, greedy, save_model
from tests.serving.pair import paired
from tests.serving.streamed import CPU, needs_of, streamed_settings
from tests.serving.test_adapters import run
from tests.serving.test_equality import random_prompts

from busbar.scheduler.fit.memory import RUNTIME_BYTES
from busbar.scheduler.fit.model import ModelShape
from busbar.scheduler.fit.serving import ServingShape, serving_memory
from busbar.workloads.machine.direct_file import DirectFile, DirectReader, NoRoom, page_memory
from busbar.workloads.machine.streams import CallerStream, WorkerStream
from busbar.workloads.serving.architecture import parse_architecture, read_architecture
from busbar.workloads.serving.checkpoint import Checkpoint
from busbar.workloads.serving.engine import EngineState
from busbar.workloads.serving.errors import DiskTooSmall, MemoryTooSmall, ModelCorrupt, ModelFileMissing
from busbar.workloads.serving.layer_file import LayerLayout
from busbar.workloads.serving.loader import Loaded, load
from busbar.workloads.serving.report import table_report
from busbar.workloads.serving.settings import EngineSettings, ServerSettings
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake
from busbar.workloads.serving.stream import HostSource, Link, StreamedLayers
from busbar.workloads.serving.stream_load import own_folder
from busbar.workloads.serving.termination import write_termination_message
from busbar.workloads.serving.text_model import read_text_files
from busbar.workloads.serving.weightcodes import FORMS
from busbar.workloads.serving.weights import FusedModel

LAYERS = 6
PROMPTS = [[5, 6, 7, 8], [9, 10, 11] * 9, [12, 13], [14, 15, 16, 17, 18]]
PARAMS = greedy_params(12, ignore_eos=True)


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, transformers model) of a tiny Llama with six layers."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("six")
    return folder, save_model(folder, num_hidden_layers=LAYERS)


def stream(folder: Path, where: Path, stay: int = 2, **changes: Any) -> Loaded:
    return load_engine(folder, **streamed_settings(folder, stay, where, **changes))


def layers_of(loaded: Loaded) -> StreamedLayers:
    layers = loaded.core.runner.decoder.weights.layers
    assert isinstance(layers, StreamedLayers)
    return layers


def answers(loaded: Loaded, params: Any = PARAMS) -> list[list[int]]:
    return [tokens_of(deltas) for deltas in generate(loaded, PROMPTS, params)]


@pytest.mark.parametrize(
    ("stay", "depth"),
    [(0, 1), (2, 1), (2, 2), (0, 0)],
    ids=["none stays", "two stay", "three slots", "one slot"],
)
def test_tokens_are_those_of_transformers(
    six: tuple[Path, Any], stay: int, depth: int, tmp_path: Path
) -> None:
    folder, model = six
    loaded = stream(folder, tmp_path, stay, stream_depth=depth)
    assert loaded.streaming is not None
    assert len(loaded.streaming.plan.streamed) == LAYERS - stay
    assert answers(loaded) == [greedy(model, prompt, 12, eos_token_id=None) for prompt in PROMPTS]
    report = table_report(loaded, ServerSettings(EngineSettings(folder), "tiny"))
    assert report.mode == "stream"
    assert report.streamed_bytes == (LAYERS - stay) * needs_of(EngineSettings(folder)).layer_bytes
    assert report.weight_bytes == load_engine(folder).weight_bytes
    assert report.stream_bytes_per_second is not None
    assert report.stream_bytes_per_second > 0


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_codes_are_streamed_as_they_are(six: tuple[Path, Any], form: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"weights_dtype": form, "deterministic": True}
    loaded = stream(six[0], tmp_path, **changes)
    assert answers(loaded) == answers(load_engine(six[0], **changes))
    assert loaded.streaming is not None
    plain = needs_of(EngineSettings(six[0])).layer_bytes
    assert loaded.streaming.plan.needs.layer_bytes < plain / (2.5 if form == "int8" else 4)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_biases_beside_codes_are_those_of_their_own_layer(form: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen2", num_hidden_layers=4)
    changes: dict[str, Any] = {"weights_dtype": form, "dtype": "bfloat16", "deterministic": True}
    loaded = stream(tmp_path / "model", tmp_path, 0, **changes)
    assert answers(loaded) == answers(load_engine(tmp_path / "model", **changes))


def test_bfloat16_is_kept_and_streamed_as_such(six: tuple[Path, Any], tmp_path: Path) -> None:
    loaded = stream(six[0], tmp_path, dtype="bfloat16")
    assert loaded.weights_stored == "bfloat16"
    same = [
        a == b for a, b in zip(answers(loaded), answers(load_engine(six[0], dtype="bfloat16")), strict=True)
    ]
    assert sum(same) >= 3  # packed and plain products round differently


def test_speculation_prefix_cache_and_preemption_change_nothing(
    six: tuple[Path, Any], tmp_path: Path
) -> None:
    params = greedy_params(30, ignore_eos=True)
    plain = answers(load_engine(six[0], deterministic=True), params)
    block = needs_of(EngineSettings(six[0], block_tokens=16)).block_bytes
    loaded = stream(
        six[0],
        tmp_path,
        deterministic=True,
        speculate=4,
        kv_bytes=6 * block,
        host_kv_bytes=4 * block,
        max_model_len=64,
    )
    assert answers(loaded, params) == plain
    assert answers(loaded, params) == plain
    assert loaded.core.scheduler.preemption_count > 0
    assert loaded.core.scheduler.cache_hits > 0


def test_adapters_are_added_to_streamed_layers(tiny: Family, tmp_path: Path) -> None:
    settings = streamed_settings(tiny.folder, 0, tmp_path, adapters=tiny.sources, stream_depth=0)
    loaded, plain = load_engine(tiny.folder, **settings), load_engine(tiny.folder, adapters=tiny.sources)
    names: list[str | None] = [None, *(source.name for source in tiny.sources)]
    prompts = random_prompts(5, len(names), 40)
    found, expected = (run(each, prompts, names, PARAMS) for each in (loaded, plain))
    assert [tokens_of(deltas) for deltas in found] == [tokens_of(deltas) for deltas in expected]


@pytest.mark.parametrize("level", [SleepLevel.WEIGHTS_KEPT, SleepLevel.WEIGHTS_DROPPED])
def test_sleep_gives_the_slots_back_and_waking_goes_on(
    six: tuple[Path, Any], level: SleepLevel, tmp_path: Path
) -> None:
    loaded = stream(six[0], tmp_path)
    before, layers = answers(loaded), layers_of(loaded)
    held = [layers.is_open]
    fall_asleep(loaded, level)
    assert [*held, layers.is_open] == [True, False]
    wake(loaded)
    assert answers(loaded) == before


def test_a_later_start_finds_the_file_and_another_model_gets_its_own(
    six: tuple[Path, Any], tmp_path: Path
) -> None:
    stream(six[0], tmp_path)
    (first,) = tmp_path.glob("*.layers")
    made = first.stat().st_mtime_ns
    stream(six[0], tmp_path)
    assert first.stat().st_mtime_ns == made
    other = tmp_path / "other"
    save_model(other, seed=1, num_hidden_layers=LAYERS)
    stream(other, tmp_path)
    assert len(list(tmp_path.glob("*.layers"))) == 2
    first.write_bytes(b"\0" * 100)  # what a failed copy would leave
    assert answers(stream(six[0], tmp_path)) == answers(load_engine(six[0]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def touch(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"otherwise"[:8])


@pytest.mark.parametrize("harm", [cut, touch])
def test_a_file_that_changes_meanwhile_ends_the_engine(
    six: tuple[Path, Any], harm: Callable[[Path], None], tmp_path: Path
) -> None:
    loaded = stream(six[0], tmp_path)
    generate(loaded, PROMPTS[:1], PARAMS)
    (path,) = tmp_path.glob("*.layers")
    harm(path)
    with pytest.raises(ModelCorrupt, match=f"{path.name} was cut or changed while its layers .* delete it"):
        generate(loaded, PROMPTS, PARAMS)


def test_a_flipped_bit_on_the_disk_is_found_when_a_layer_is_read_first(
    six: tuple[Path, Any], tmp_path: Path
) -> None:
    stream(six[0], tmp_path)
    (path,) = tmp_path.glob("*.layers")
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelCorrupt, match=f"layer {LAYERS - 1} of .* is not what was written"):
        answers(stream(six[0], tmp_path))


def test_a_disk_without_room_is_refused_with_the_bytes(
    six: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise NoRoom(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("busbar.workloads.machine.direct_file._reserve", full)
    with pytest.raises(DiskTooSmall, match=r"has no room for the \d+ MiB of layers .* \(--stream-dir\)"):
        stream(six[0], tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_a_folder_that_cannot_be_written_to_is_named(six: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileMissing, match=r"layers cannot be streamed from .*file"):
        stream(six[0], tmp_path / "file")


def test_a_read_error_names_the_layer(
    six: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = stream(six[0], tmp_path)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DirectReader, "read", broken)
    with pytest.raises(ModelFileMissing, match=r"layer \d of .* cannot be read: Input/output error"):
        generate(loaded, PROMPTS, PARAMS)


def test_a_slow_disk_is_told_once_and_so_is_its_end(
    six: tuple[Path, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("busbar.workloads.serving.stream.WINDOW_S", 0.0)
    loaded = stream(six[0], tmp_path)
    rate = layers_of(loaded).rate
    caplog.set_level(logging.INFO)
    before = rate.probed
    rate.probed = 1e15
    answers(loaded)
    report = table_report(loaded, ServerSettings(EngineSettings(six[0]), "tiny"))
    assert report.stream_is_slow
    assert [record.levelname for record in caplog.records if "layers come from disk" in record.message] == [
        "WARNING"
    ]
    rate.probed = before / 1e6
    answers(loaded)
    told = [record for record in caplog.records if "layers come from disk" in record.message]
    assert [record.levelname for record in told] == ["WARNING", "INFO"]
    assert "under 50 % of the 1000000000 MB/s at the start" in told[0].message


def test_too_little_memory_is_refused_before_anything_is_written(
    six: tuple[Path, Any], tmp_path: Path
) -> None:
    settings = streamed_settings(six[0], 0, tmp_path)
    settings["memory_bytes"] -= 1
    with pytest.raises(
        MemoryTooSmall, match=r"even with its layers streamed.* It fits with --weights-dtype int8"
    ):
        load_engine(six[0], **settings)
    assert not list(tmp_path.iterdir())


def test_resident_weights_that_do_not_fit_are_refused_and_auto_streams_them(
    six: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("busbar.workloads.serving.stream_plan.IN_FLIGHT_BYTES", 0)
    needs = needs_of(EngineSettings(six[0], block_tokens=16, kv_bytes=2**20))
    coded = needs_of(EngineSettings(six[0], block_tokens=16, kv_bytes=2**20, weights_dtype="int4"))
    enough, less = needs.resident_bytes, needs.resident_bytes - 1
    assert load_engine(six[0], kv_bytes=2**20, memory_bytes=enough).streaming is None
    assert load_engine(six[0], kv_bytes=2**20, memory_bytes=enough, weights="auto").streaming is None
    with pytest.raises(MemoryTooSmall, match=r"MiB of memory are free\. It fits with --weights-dtype int8"):
        load_engine(six[0], kv_bytes=2**20, memory_bytes=less)
    with pytest.raises(MemoryTooSmall, match="It fits with --weights stream"):
        load_engine(six[0], kv_bytes=2**20, memory_bytes=coded.least_bytes, weights_dtype="int4")
    loaded = load_engine(
        six[0], kv_bytes=2**20, memory_bytes=needs.least_bytes, weights="auto", stream_dir=tmp_path
    )
    assert loaded.streaming is not None


def test_layers_are_streamed_from_no_folder_that_others_may_write_to(tmp_path: Path) -> None:
    folder = own_folder(tmp_path)
    assert own_folder(tmp_path) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ModelFileMissing, match="somebody else may write"):
        own_folder(tmp_path)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ModelFileMissing, match="somebody else may write"):
        own_folder(tmp_path)
    folder.unlink()
    folder.write_text("")
    with pytest.raises(ModelFileMissing, match="cannot be made"):
        own_folder(tmp_path)


def test_a_step_computes_at_least_the_prompt_tokens_that_cost_nothing(
    six: tuple[Path, Any], tmp_path: Path
) -> None:
    loaded = stream(six[0], tmp_path, tpot_ms=1e-6)
    assert loaded.streaming is not None
    assert loaded.core.speed.model.predict(0, 0, 0) == loaded.streaming.pass_s
    slow = replace(loaded.streaming, pass_s=48.5 * loaded.streaming.token_s)
    assert slow.hidden_tokens == 48
    assert replace(slow, pass_s=1e9).hidden_tokens == 64  # the step's limit
    core = loaded.core
    core.least_prompt_tokens = slow.hidden_tokens
    core.submit("a", PROMPTS[0], greedy_params(40, ignore_eos=True), 0.0)
    core.step()
    core.speed.model.steps = 1000
    core.speed.model.theta = [1.0, 0.0, 0.0, 0.001]
    core.submit("b", [7] * 200, greedy_params(1), 0.0)
    core.step()
    assert core.sequence_of("b").computed == 48  # type: ignore[union-attr]
    assert core.saturated


def test_the_largest_step_is_planned_for_where_none_is_asked_for(
    six: tuple[Path, Any], tmp_path: Path
) -> None:
    settings = streamed_settings(six[0], 0, tmp_path, kv_bytes=None, max_batched_tokens=None)
    needs = needs_of(EngineSettings(six[0], **{k: v for k, v in settings.items() if k != "memory_bytes"}))
    settings["memory_bytes"] = needs.least_bytes + 4 * 1000 * needs.token_bytes
    loaded = load_engine(six[0], **settings)
    assert loaded.core.scheduler.limits.max_batched_tokens == 1024
    assert loaded.kv_bytes > needs.least_kv


@pytest.mark.parametrize("depth", [0, 1])
def test_a_pass_that_was_given_up_is_begun_anew(six: tuple[Path, Any], depth: int, tmp_path: Path) -> None:
    loaded = stream(six[0], tmp_path, stream_depth=depth)
    for stopped_at in (1, 3, LAYERS):
        for number, _ in enumerate(layers_of(loaded), 1):
            if number == stopped_at:
                break
        assert answers(loaded) == answers(load_engine(six[0]))


# -- the way of a GPU, with a thread as the stream of its copies ---------------------------------------


@pytest.mark.parametrize("from_host", [True, False], ids=["host memory", "disk"])
def test_layers_reach_a_device_by_copies_on_a_stream_of_their_own(
    six: tuple[Path, Any], from_host: bool, tmp_path: Path
) -> None:
    loaded = stream(six[0], tmp_path, stay=0)
    decoder, before = loaded.core.runner.decoder, answers(loaded)
    arch = read_architecture(six[0])
    layout = LayerLayout.of(arch, torch.float32, None)
    source: Any = layers_of(loaded).source
    if from_host:
        model, records = FusedModel(Checkpoint(six[0]), arch, CPU, torch.float32), {}
        for index in range(LAYERS):
            records[index] = page_memory(layout.size)
            layout.store(model.layer(index), records[index], None)
        source = HostSource(records)
    links: list[Link] = []

    def link(_: torch.device) -> Link:
        links.append(Link(WorkerStream("reading"), WorkerStream("loading"), CallerStream))
        return links[-1]

    layers = StreamedLayers({}, range(LAYERS), source, layout, 2, CPU, link)
    decoder.weights = replace(decoder.weights, layers=layers)
    layers.probe()
    assert answers(loaded) == before
    assert layers.rate.lately > 0
    assert len(links) == 1
    layers.rest()  # as asleep: the slots are made anew within a pass
    assert answers(loaded) == before
    layers.rest()


def test_any_record_arrives_where_direct_reads_are_not_supported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = page_memory(3 * 4096).copy_(torch.arange(3 * 4096) % 251)
    with DirectFile(tmp_path / "x", 3 * 4096) as file:
        file.write(data, 0)
    real, said = os.open, list[str]()

    def no_direct(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_direct)
    reader, found = DirectReader(tmp_path / "x", said.append), page_memory(2 * 4096)
    assert reader.read(found, 4096) == 2 * 4096
    assert torch.equal(found, data[4096:])
    assert reader.read(found, 2 * 4096) == 4096
    assert not reader.changed
    reader.close()
    assert "does not support O_DIRECT" in said[0]
    assert len(said) == 1


def test_threads_that_are_refused_direct_reads_at_the_same_time_all_read_the_one_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = page_memory(4096).copy_(torch.arange(4096) % 251)
    with DirectFile(tmp_path / "x", 4096) as file:
        file.write(data, 0)
    real, together, used = os.preadv, threading.Barrier(2, timeout=10), set[int]()

    def no_direct(descriptor: int, rooms: Any, offset: int) -> int:
        used.add(descriptor)
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            together.wait()
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, rooms, offset)

    monkeypatch.setattr(os, "preadv", no_direct)
    said = list[str]()
    reader, found = DirectReader(tmp_path / "x", said.append), [page_memory(4096) for _ in range(2)]
    os.replace(shutil.copy(tmp_path / "x", tmp_path / "y"), tmp_path / "x")  # what is open stays
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(reader.read, found, (0, 0))) == [4096, 4096]
    assert all(torch.equal(each, data) for each in found)
    assert not reader.changed
    assert len(used) == 1
    reader.close()
    assert len(said) == 1


# -- the scheduler's formula ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("form", "mode"), [("auto", "stream"), ("auto", "resident"), ("int8", "int8")])
def test_the_schedulers_formula_is_that_of_the_engine(form: str, mode: str, family: str) -> None:
    """Without what the formula adds for libraries, and the engine for a step."""
    changes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "vocab_size": VOCAB}
    more = {"head_dim": 64, "moe_intermediate_size": 256} if family == "qwen3_moe" else {}
    config = config_of(family, **changes, **more).to_dict()
    arch = parse_architecture(config | {"dtype": "float32"})
    layer = LayerLayout.of(arch, torch.float32, FORMS.get(form)).size
    serving = ServingShape(context=512, weight_bytes=4)
    found = serving_memory(ModelShape.from_config(config), serving, mode).device_bytes - RUNTIME_BYTES
    tables = 2 * VOCAB * 256 * 4
    kv = arch.kv_values_per_token * 4 * 512
    assert found == pytest.approx(tables + kv + (2 if mode == "stream" else 12) * layer, rel=0.02)


# -- a whole replica -----------------------------------------------------------------------------------


def test_a_replica_whose_file_is_cut_fails_its_streams_and_ends_with_the_sentence(
    six: tuple[Path, Any], tmp_path: Path
) -> None:
    engine = EngineSettings(six[0], **streamed_settings(six[0], 2, tmp_path))
    settings = ServerSettings(engine, "tiny", drain_s=0)
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "stream": True}

    async def life() -> tuple[str, str]:
        changed = asyncio.Event()
        files = read_text_files(six[0])
        async with paired(settings, lambda: load(engine, "tiny"), files, changed.set) as pair:

            async def leave(state: EngineState) -> None:
                while pair.link.state is state:
                    await changed.wait()
                    changed.clear()

            await leave(EngineState.LOADING)
            client: TestClient[web.Request, web.Application] = TestClient(
                TestServer(pair.server.application())
            )
            async with client:
                report = (await (await client.get("/status")).json())["report"]
                assert (report["mode"], report["streamIsSlow"]) == ("stream", False)
                answer = await client.post("/v1/completions", json=body)
                await answer.content.readline()
                (path,) = tmp_path.glob("*.layers")
                cut(path)
                rest = (await answer.read()).decode()
            await leave(EngineState.READY)
            assert isinstance(pair.link.failure, ModelCorrupt)
            return rest, f"{pair.link.failure.code}: {pair.link.failure}"

    rest, last_words = asyncio.run(life())
    assert "the engine failed; the request may be sent again" in rest
    log = tmp_path / "termination-log"
    log.write_text("the last words of a server before it in this container" * 50)
    write_termination_message(str(log), last_words)
    said = json.loads(log.read_text())["message"]
    assert said.startswith("ModelCorrupt: ")
    assert "was cut or changed while its layers are streamed from it; delete it and start anew" in said
