"""The examples of the training engine: valid, equal to their documentation, and run for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.free_port import free_port

from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.environment import read_manifest, run_from_manifest
from busbar.workloads.training.errors import InfeasiblePlan
from busbar.workloads.training.job import parse_job
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.plan import MemoryLimits
from busbar.workloads.training.plan_command import answers_for, machine_of
from busbar.workloads.training.rows import RowReader

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "pytorch_two_pods.py"


def test_the_demos_job_fits_its_device_with_offload_and_not_without() -> None:
    job = run_from_manifest(read_manifest(EXAMPLES / "train-python-stdlib.yaml"), Path("claims"), None, {})
    assert job.spec.device_memory_bytes is not None
    assert job.checkpoint.every_steps == 50
    cpu = torch.device("cpu")
    demand = measure_demand(open_model(job.spec, None, 4096, 0), job.spec, cpu)
    limits = MemoryLimits(job.spec.device_memory_bytes, None, device_is_host=True)
    assert make_plan(demand, limits, "optimizer-offload").device_bytes <= job.spec.device_memory_bytes
    assert make_plan(demand, limits, "auto").mode == "optimizer-offload"
    with pytest.raises(InfeasiblePlan, match="mode: auto"):
        make_plan(replace(demand, activations="keep"), limits, "resident")
    assert make_plan(demand, limits, "resident").activations == "recompute"


def test_the_model_that_is_larger_than_its_device_fits_with_its_weights_on_the_host_alone(
    tmp_path: Path,
) -> None:
    answer = answers_for(EXAMPLES / "train-larger-than-device.yaml", machine_of("cpu"), 1, tmp_path)[""]
    assert [mode for mode, found in answer["modes"].items() if found["fits"]] == ["parameter-offload", "auto"]
    assert 4 * answer["parameters"] > 9.5 * answer["deviceBytes"]
    plan = answer["modes"]["auto"]["plan"]
    assert plan["mode"] == "parameter-offload"
    assert plan["modeWhy"].startswith("with the weights on the device ")


def documents(name: str = "pytorch-two-pods.yaml") -> dict[str, Any]:
    text = (EXAMPLES / name).read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_the_two_pod_manifest_carries_the_script_and_is_valid() -> None:
    found = documents()
    assert found["ConfigMap"]["data"][SCRIPT.name] == SCRIPT.read_text()
    job = parse_job(found["TrainingJob"])
    assert job.spec.template is not None
    assert job.spec.shape.min_pods == job.spec.shape.max_pods == 2


def test_the_manifest_that_writes_rows_carries_the_script_and_is_valid() -> None:
    found = documents("docstring-rows.yaml")
    script = EXAMPLES / "docstring_rows.py"
    assert found["ConfigMap"]["data"][script.name] == script.read_text()
    assert parse_job(found["TrainingJob"]).spec.template is not None


def test_the_rows_of_the_script_are_signatures_and_what_they_do(tmp_path: Path) -> None:
    out = tmp_path / "rows/a.jsonl"
    script = [sys.executable, str(EXAMPLES / "docstring_rows.py"), str(out)]
    assert "rows in" in subprocess.run(script, check=True, capture_output=True, text=True).stdout
    reader = RowReader()
    found = [reader.read(line.encode()) for line in out.read_text().splitlines()]
    assert len(found) > 3000
    wanted = ('def isclass(object):\n    """', 'Return true if the object is a class."""\n')
    assert wanted in {tuple(part.text for part in row.parts) for row in found}


def test_the_tuning_example_adapts_the_demos_model_to_the_rows_of_the_script() -> None:
    base = parse_job(read_manifest(EXAMPLES / "train-python-stdlib.yaml"))
    tuned = run_from_manifest(read_manifest(EXAMPLES / "fine-tune.yaml"), Path("claims"), None, {})
    rows = documents("docstring-rows.yaml")["TrainingJob"]["spec"]["template"]
    assert base.spec.output is not None
    assert tuned.spec.model.uri == base.spec.output.uri
    assert tuned.places.tokenizer == tuned.places.model
    assert tuned.spec.adapter is not None
    assert tuned.spec.adapter.merge
    written = rows["command"][-1].removeprefix(rows["volumes"][1]["mountPath"])
    assert tuned.spec.data.uri == f"pvc://{rows['volumes'][1]['claim']}{written}"


def test_the_adapters_example_adapts_the_demos_model_to_those_rows_and_to_the_library() -> None:
    tuned = run_from_manifest(read_manifest(EXAMPLES / "fine-tune.yaml"), Path("claims"), None, {})
    several = run_from_manifest(read_manifest(EXAMPLES / "several-adapters.yaml"), Path("claims"), None, {})
    first, second = several.parts
    assert first.spec.model == second.spec.model == tuned.spec.model
    assert first.spec.data == tuned.spec.data
    assert second.spec.data.uri == "builtin://python-stdlib"
    assert [(part.part, part.spec.steps) for part in several.parts] == [("docstrings", 300), ("reader", 100)]


def start(rank: int, port: int, out: Path, steps: int) -> subprocess.Popen[str]:
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OUT": str(out),
        "STEPS": str(steps),
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    ended = []
    for process in processes:
        output, _ = process.communicate(timeout=300)
        ended.append((process.returncode, output))
    return ended


def weights_of(outcome: list[tuple[int, str]]) -> set[str]:
    """The sum over the final weights that each rank prints."""
    assert [code for code, _ in outcome] == [0, 0], outcome
    return {output.rpartition("weights sum ")[2].strip() for _, output in outcome}


def test_two_ranks_stop_together_when_one_is_told_and_resume_to_the_same_weights(tmp_path: Path) -> None:
    port = free_port()
    stopped = [start(rank, port, tmp_path / "a", steps=1_000_000) for rank in (0, 1)]
    first_output = stopped[0].stdout
    assert first_output is not None
    assert "step 50/" in first_output.readline()
    stopped[1].send_signal(signal.SIGTERM)
    assert [code for code, _ in finish(stopped)] == [143, 143]

    steps = torch.load(tmp_path / "a/checkpoint.pt")["step"] + 70
    port = free_port()
    resumed = weights_of(finish([start(rank, port, tmp_path / "a", steps) for rank in (0, 1)]))
    port = free_port()
    whole = weights_of(finish([start(rank, port, tmp_path / "b", steps) for rank in (0, 1)]))
    assert resumed == whole
    assert len(whole) == 1
