"""Sleep and wake: what is refused meanwhile, what is kept, and that answers are the same afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.inside import serving_inside
from tests.serving.models import save_model
from tests.serving.processes import OpenStream, Service

from busbar.workloads.serving.errors import ModelCorrupt, ModelFileMissing
from busbar.workloads.serving.linear import PlainLinear
from busbar.workloads.serving.settings import AdapterSource, EngineSettings
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake
from busbar.workloads.serving.weights import ResidentLayers, Weights

PROMPTS = [list(range(20, 60)), list(range(90, 107))]
LEVELS = (SleepLevel.WEIGHTS_KEPT, SleepLevel.WEIGHTS_DROPPED)


@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_the_same_after_sleep(llama: tuple[Path, Any], level: SleepLevel) -> None:
    loaded = load_engine(llama[0], deterministic=True)
    params = greedy_params(20, ignore_eos=True, logprobs=2)
    before = [[d.logprobs for d in each] for each in generate(loaded, PROMPTS, params)]
    assert loaded.core.runner.cache.bytes > 0
    fall_asleep(loaded, level)
    weights = loaded.core.runner.decoder.weights
    assert loaded.core.runner.cache.bytes == 0
    assert (weights.bytes == 0) == (level is SleepLevel.WEIGHTS_DROPPED)
    wake(loaded)
    hits = loaded.core.scheduler.cache_hits
    assert [[d.logprobs for d in each] for each in generate(loaded, PROMPTS, params)] == before
    assert loaded.core.scheduler.cache_hits == hits  # the first time again: no block was kept
    assert loaded.core.scheduler.pool.used == 0


def test_what_runs_keeps_the_engine_awake(llama: tuple[Path, Any]) -> None:
    loaded = load_engine(llama[0])
    loaded.core.submit("one", PROMPTS[0], greedy_params(4, ignore_eos=True), 0.0)
    loaded.core.step()
    with pytest.raises(RuntimeError, match="in use"):
        fall_asleep(loaded, SleepLevel.WEIGHTS_KEPT)
    rest = []
    while not loaded.core.idle:
        rest += loaded.core.step()
    assert len(tokens_of(rest)) == 3


def test_a_deeper_sleep_drops_the_weights_and_adapters_come_back_when_asked_for(
    tiny: Any,
) -> None:
    source: AdapterSource = tiny.sources[0]
    loaded = load_engine(tiny.folder, adapters=(source,))
    for level in LEVELS:
        fall_asleep(loaded, level)
        assert loaded.adapters.resident == ([source.name] if level is SleepLevel.WEIGHTS_KEPT else [])
    assert loaded.adapters.bytes == 0
    wake(loaded)
    assert loaded.adapters.names == [source.name]
    assert loaded.adapters.bring(source.name)
    assert loaded.adapters.resident == [source.name]


def test_a_model_folder_that_has_changed_or_gone_is_not_woken(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama[0], folder)
    loaded = load_engine(folder)
    fall_asleep(loaded, SleepLevel.WEIGHTS_DROPPED)
    save_model(folder, seed=1)
    with pytest.raises(ModelCorrupt, match="another model"):
        wake(loaded)
    shutil.rmtree(folder)
    with pytest.raises(ModelFileMissing, match="cannot be read any more"):
        wake(loaded)


def test_tensors_that_matrices_share_are_moved_once() -> None:
    shared, norm = torch.ones(4, 3), torch.ones(3)
    moved = Weights(shared, ResidentLayers(()), norm, PlainLinear(shared, None)).moved(
        lambda tensor: tensor.clone()
    )
    assert moved.embedding is not shared
    assert isinstance(moved.head, PlainLinear)
    assert moved.head._weight is moved.embedding
    assert torch.equal(moved.norm, norm)


# -- over HTTP ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(llama: tuple[Path, Any]) -> Iterator[Service]:
    with serving_inside(EngineSettings(llama[0], block_tokens=16, threads=1), "tiny") as service:
        yield service


def command(server: Service, path: str) -> tuple[int, dict[str, str], Any]:
    status, headers, data = server.call("POST", path, b"")
    return status, headers, json.loads(data)


def ask(server: Service, **changes: Any) -> tuple[int, dict[str, str], Any]:
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
    return server.post("/v1/completions", body | changes)


def states(server: Service) -> tuple[bool, int, int, str]:
    """(asleep, level in /status, status of /ready, its word)."""
    ready, _, data = server.get("/ready")
    asleep = json.loads(server.get("/is_sleeping")[2])["is_sleeping"]
    return asleep, server.status()["sleepLevel"], ready, json.loads(data)["state"]


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_it_is_alive_and_not_ready_and_refuses_requests(server: Service, level: int) -> None:
    text = ask(server)[2]["choices"][0]["text"]
    assert states(server) == (False, 0, 200, "Ready")
    assert command(server, f"/sleep?level={level}")[2] == {"is_sleeping": True, "level": level}
    assert states(server) == (True, level, 503, "Sleeping")
    assert server.get("/health")[0] == 200
    gauge = f'vllm:engine_sleep_state{{engine="0",model_name="tiny",sleep_state="{["", "weights_offloaded", "discard_all"][level]}"}} 1.0'
    assert gauge in server.get("/metrics")[2].decode()
    for status, headers, data in (
        ask(server),
        server.post("/v1/embeddings", {"model": "tiny", "input": "a"}),
        server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}),
    ):
        assert (status, headers["Retry-After"]) == (503, "2")
        assert "asleep; POST /wake_up" in data["error"]["message"]
    assert command(server, f"/sleep?level={level}")[0] == 200  # it sleeps already
    assert command(server, "/wake_up")[2] == {"is_sleeping": False}
    assert states(server) == (False, 0, 200, "Ready")
    assert ask(server)[2]["choices"][0]["text"] == text
    assert command(server, "/wake_up")[0] == 200  # it is awake already


def test_from_the_deeper_level_it_must_wake_first(server: Service) -> None:
    assert command(server, "/sleep?level=1")[0] == 200
    assert command(server, "/sleep?level=2")[0] == 200
    status, _, data = command(server, "/sleep?level=1")
    assert (status, data["error"]["type"]) == (409, "ConflictError")
    assert "wake it first" in data["error"]["message"]
    assert command(server, "/wake_up")[0] == 200
    assert ask(server)[0] == 200


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=", "level"),
        ("/sleep?mode=x", "mode"),
        ("/wake_up?tags=kv_cache", "tags"),
    ],
)
def test_a_bad_parameter_is_named_and_changes_nothing(server: Service, path: str, param: str) -> None:
    status, _, data = command(server, path)
    assert (status, data["error"]["param"]) == (400, param)
    assert states(server) == (False, 0, 200, "Ready")


def test_a_running_stream_is_not_put_to_sleep(deep: Path) -> None:
    settings = EngineSettings(deep, block_tokens=16, threads=1)
    with serving_inside(replace(settings, max_running=2), "tiny") as server:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with OpenStream(server, body) as stream:
            assert stream.line().startswith(b"data: ")
            status, _, data = command(server, "/sleep")
            assert (status, data["error"]["type"]) == (409, "ConflictError")
            assert "1 requests run" in data["error"]["message"]
            assert stream.line() is not None  # it goes on
        assert server.get("/ready")[0] == 200


def test_an_engine_that_cannot_wake_has_failed_and_says_why(llama: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama[0], folder)
    with serving_inside(EngineSettings(folder, block_tokens=16, threads=1), "tiny") as server:
        assert command(server, "/sleep?level=2")[0] == 200
        shutil.rmtree(folder)
        status, _, data = command(server, "/wake_up")
        assert status == 500
        assert "cannot be read any more" in data["error"]["message"]
        health, _, body = server.get("/health")
        assert (health, json.loads(body)["state"]) == (503, "Failed")
