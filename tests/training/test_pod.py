"""The engine as a pod starts it: `python -m busbar.workloads.training`, its port, SIGTERM, and the result."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.free_port import free_port
from tests.training.pod import Pod
from tests.training.small import manifest, with_text
from tests.training.test_status_server import COMMAND
from transformers import AutoModelForCausalLM, AutoTokenizer

from busbar.kube.contracts.workload import DOES_NOT_FIT
from busbar.workloads.training.arena import Arena
from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.model import ModelRecipe
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.status import Status

STEPS = 250


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One job: checkpointed on request, stopped by SIGTERM, resumed, its trainer killed, and trained to its end."""
    folder = with_text(tmp_path_factory.mktemp("pod"))
    facts: dict[str, Any] = {"folder": folder}

    first = Pod(folder, attempt=1, port=free_port(), steps=STEPS, evaluation={"ngramOrder": 3})
    facts["running"] = first.wait_for_step(10)
    facts["ready"] = first.client.get("/ready").status_code
    facts["metrics"] = first.client.get("/metrics").text
    facts["saved"] = first.client.post("/checkpoint", headers={"Authorization": f"Bearer {COMMAND}"}).json()
    facts["saved_files"] = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    first.process.send_signal(signal.SIGTERM)
    facts["stopped"] = first.end()

    second = Pod(folder, 2, free_port(), {"everySteps": 5}, steps=STEPS, evaluation={"ngramOrder": 3})
    facts["resumed"] = second.wait_for_step(1)
    facts["crashed"] = second.wait_for_step(facts["resumed"]["resumedFromStep"] + 12)
    second.crash()
    facts["again"] = second.wait_for_step(1)
    facts["done"] = second.end()
    return facts


def test_it_reports_while_it_runs(life: dict[str, Any]) -> None:
    status = life["running"]
    assert status["phase"] == "Training"
    assert status["totalSteps"] == STEPS
    assert status["mode"] == "optimizer-offload"
    assert status["memory"]["deviceOwners"]["staging"] > 0
    assert status["report"]["class"].startswith("llama-")
    assert status["report"]["samples"] >= 5
    assert status["report"]["peakDeviceBytes"] <= status["memory"]["deviceBytes"]
    assert life["ready"] == 200
    assert "busbar_training_tokens_per_second" in life["metrics"]
    assert "busbar_training_model_tflops" in life["metrics"]
    assert 'busbar_training_phase_seconds_total{phase="backward"}' in life["metrics"]


def test_a_save_on_request_is_on_disk_when_it_is_answered(life: dict[str, Any]) -> None:
    assert life["saved"]["durable"] is True
    assert life["saved_files"] == [f"step-{life['saved']['step']:08d}"]


def test_sigterm_saves_and_exits_143(life: dict[str, Any]) -> None:
    code, output = life["stopped"]
    assert code == 143, output
    assert "stopped on request: the state after step" in output


def test_the_next_attempt_loses_nothing(life: dict[str, Any]) -> None:
    assert life["resumed"]["restoredAttempt"] == 1
    assert life["resumed"]["resumedFromStep"] >= life["saved"]["step"]
    assert life["resumed"]["lostSteps"] == 0


def test_a_crash_of_the_trainer_is_repaired_in_the_same_pod(life: dict[str, Any]) -> None:
    again, before = life["again"], life["crashed"]
    assert before["resumedFromStep"] < again["resumedFromStep"]
    assert again["restoredAttempt"] == 2
    assert again["lostSteps"] < 12
    assert "goes on from the copy of step" in life["done"][1]


def test_it_ends_with_a_model_that_beats_the_ngrams(life: dict[str, Any]) -> None:
    code, output = life["done"]
    assert code == 0, output
    scores = json.loads((life["folder"] / "model/busbar.json").read_text())["evaluation"]
    assert scores["bitsPerByte"] < scores["bigramBitsPerByte"]
    assert scores["heldOutBytes"] > 1000


def test_transformers_loads_the_result(life: dict[str, Any]) -> None:
    folder = life["folder"] / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied to the embedding: written once
    assert torch.equal(model.get_input_embeddings().weight, weights["model.embed_tokens.weight"])
    ids = tokenizer("the pump", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0])
    assert text.startswith("the pump")
    assert any(verb in text for verb in ("opens", "feeds", "drops", "holds"))
    assert tokenizer.eos_token_id == model.config.eos_token_id == 0


def test_a_wrong_spec_ends_with_2_and_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    pod = Pod(tmp_path, attempt=1, port=free_port(), dtype="float64")
    code, output = pod.end()
    assert code == 2
    assert "spec.engine.dtype" in output
    assert "Traceback" not in output


def test_a_plan_that_does_not_fit_is_refused_before_allocation(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_allocation(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was allocated")

    monkeypatch.setattr(Arena, "__init__", no_allocation)
    monkeypatch.setattr(ModelRecipe, "build", no_allocation)
    job = run_from_manifest(manifest(mode="resident", deviceMemory="1800Ki"), tmp_path, None, {})
    status = Status()
    assert run(job, status, Control(), Lines("small", io.StringIO())) == 2
    message = status.to_json()["message"]
    assert status.phase == "Failed"
    assert status.to_json()["errorCode"] == DOES_NOT_FIT
    assert "Nothing was allocated" in message
    assert "deviceMemory: at least" in message
