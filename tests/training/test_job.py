"""Validation of a job: each row of the table is refused with its field's path, beside a neighbour that is accepted."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.training.small import LLAMA, engine, manifest

from busbar.workloads.training import environment
from busbar.workloads.training.command import train
from busbar.workloads.training.environment import read_manifest, run_from_manifest, run_from_pod
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_checkpoint, parse_engine
from busbar.workloads.training.world import ALONE, World, world_of

BAD = [
    ("steps", 0, 3, "spec.engine.steps"),
    ("steps", "ten", 10, "spec.engine.steps"),
    ("steps", "10", 1e3, "spec.engine.steps"),
    ("steps", True, 10.0, "spec.engine.steps"),
    ("threads", "1", 1, "spec.engine.threads"),
    ("seed", False, 0, "spec.engine.seed"),
    ("optimizer", {"learningRate": "0.1"}, {"learningRate": 1}, "spec.engine.optimizer.learningRate"),
    (
        "data",
        {"uri": "pvc://a", "holdoutFraction": True},
        {"uri": "pvc://a", "holdoutFraction": 0},
        "spec.engine.data.holdoutFraction",
    ),
    ("batch", {"sequences": 6, "microBatch": 4}, {"sequences": 8, "microBatch": 4}, "spec.engine.batch"),
    ("batch", {"sequences": 4, "micro": 4}, {"sequences": 4, "microBatch": 4}, "spec.engine.batch.micro"),
    ("mode", "offload", "optimizer-offload", "spec.engine.mode"),
    ("activations", "spill", "swap", "spec.engine.activations"),
    ("activations", "drop", "keep", "spec.engine.activations"),
    ("schedule", "fused", "blocking", "spec.engine.schedule"),
    ("dtype", "float16", "bfloat16", "spec.engine.dtype"),
    ("deviceMemory", "lots", "256Mi", "spec.engine.deviceMemory"),
    ("state", "int4", "int8", "spec.engine.state"),
    ("data", {"uri": "builtin://books"}, {"uri": "builtin://python-stdlib"}, "spec.engine.data.uri"),
    ("data", {"uri": "/etc"}, {"uri": "pvc://etc"}, "spec.engine.data.uri"),
    ("data", {"uri": "pvc://a/../b"}, {"uri": "pvc://a/b"}, "spec.engine.data.uri"),
    ("model", {"config": {"hidden_size": 8}}, {"config": LLAMA}, "spec.engine.model.config.model_type"),
    ("model", {"config": LLAMA, "uri": "pvc://a/b"}, {"uri": "pvc://a/b"}, "spec.engine.model"),
    (
        "model",
        {"config": {**LLAMA, "vocab_size": 999}},
        {"config": {**LLAMA, "vocab_size": 320}},
        "spec.engine",
    ),
    (
        "tokenizer",
        {"train": {"vocabSize": 10}},
        {"train": {"vocabSize": 320}},
        "spec.engine.tokenizer.train.vocabSize",
    ),
    ("tokenizer", None, {"train": {"vocabSize": 320}}, "spec.engine"),
    ("optimizer", {"name": "SGD"}, {"name": "AdamW"}, "spec.engine.optimizer.name"),
    ("optimizer", {"betas": [0.9, 1.5]}, {"betas": [0.9, 0.95]}, "spec.engine.optimizer.betas[1]"),
    ("optimizer", {"learningRate": -1}, {"learningRate": 0.1}, "spec.engine.optimizer.learningRate"),
    ("threads", 0, 1, "spec.engine.threads"),
    ("surprise", 1, None, "spec.engine.surprise"),
]


def with_field(field: str, value: Any) -> dict[str, Any]:
    document = engine()
    document[field] = value
    if value is None:
        del document[field]
    return document


@pytest.mark.parametrize(
    ("field", "bad", "good", "path"), BAD, ids=[f"{row[0]}-{i}" for i, row in enumerate(BAD)]
)
def test_a_bad_field_is_refused_with_its_path_and_its_neighbour_passes(
    field: str, bad: Any, good: Any, path: str
) -> None:
    with pytest.raises(InvalidJob) as refusal:
        parse_engine(with_field(field, bad))
    assert refusal.value.field == path
    parse_engine(with_field(field, good))


def test_mode_memory_steps_and_threads_do_not_change_what_a_run_is() -> None:
    same = parse_engine(
        engine(
            mode="resident",
            activations="recompute",
            schedule="gated",
            deviceMemory="1Gi",
            evaluation={"ngramOrder": 3},
            maxBadSteps=3,
            steps=99,
            threads=4,
        )
    )
    assert same.identity == parse_engine(engine()).identity
    assert parse_engine(engine(seed=1)).identity != same.identity


def test_defaults_written_out_do_not_change_what_a_run_is() -> None:
    assert parse_engine(engine(seed=0)).identity == parse_engine(engine()).identity


def test_a_checkpoint_policy_without_an_interval_saves_every_fifty_steps() -> None:
    policy = parse_checkpoint({})
    assert policy.due(50, 0.0)
    assert not policy.due(49, 1e9)


def test_a_checkpoint_policy_in_seconds_ignores_steps() -> None:
    policy = parse_checkpoint({"everySeconds": 60})
    assert not policy.due(50, 59.0)
    assert policy.due(7, 60.0)


def test_without_a_cluster_claims_are_folders(tmp_path: Path) -> None:
    places = run_from_manifest(manifest(), tmp_path, None, {}).places
    assert places.output == tmp_path / "out/model"
    assert places.checkpoints == tmp_path / "out/model/checkpoints"
    assert places.data == tmp_path / "text"


def test_the_operators_folders_win_in_a_pod(tmp_path: Path) -> None:
    import json

    run = run_from_pod(
        {
            "BUSBAR_SPEC": json.dumps(engine(mode="auto")),
            "BUSBAR_MODE": "optimizer-offload",
            "BUSBAR_CHECKPOINT": json.dumps({"everySteps": 7, "keep": 3}),
            "BUSBAR_OUTPUT_DIR": "/artifacts/out/model",
            "BUSBAR_CHECKPOINT_DIR": "/artifacts/out/ck",
            "BUSBAR_DATA_DIR": "/artifacts/text",
            "BUSBAR_JOB_NAME": "small",
            "BUSBAR_NAMESPACE": "demo",
            "BUSBAR_JOB_UID": "u-1",
            "BUSBAR_ATTEMPT": "4",
        }
    )
    assert run.spec.mode == "optimizer-offload"
    assert (run.checkpoint.every_steps, run.checkpoint.keep) == (7, 3)
    assert (run.places.checkpoints, run.places.data) == (Path("/artifacts/out/ck"), Path("/artifacts/text"))
    assert (run.name, run.owner, run.attempt) == ("demo/small", "u-1", 4)


def test_a_pod_of_a_gang_knows_its_place() -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-1-0.job", "MASTER_PORT": "29500"}
    assert world_of(given) == World(1, 2, "job-1-0.job", 29500)
    assert world_of({}) == ALONE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "2"}, "RANK: is 2, and WORLD_SIZE is 2"),
        ({"RANK": "first"}, "'first' and not a number"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: is not set"),
    ],
)
def test_a_place_in_no_gang_is_refused(changes: dict[str, str | None], said: str) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-1-0.job", **changes}
    with pytest.raises(InvalidJob, match=said):
        world_of({name: value for name, value in given.items() if value is not None})


@pytest.mark.parametrize("spec", [None, [], "x"])
def test_a_job_without_a_spec_is_refused_with_a_sentence(spec: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="spec"):
        run_from_manifest({**manifest(), "spec": spec}, tmp_path, None, {"steps": 3})


def test_values_that_do_not_go_together_are_refused_here_as_by_the_api_server(tmp_path: Path) -> None:
    job = manifest()
    job["spec"]["engine"]["state"] = "int8"
    run_from_manifest(job, tmp_path, None, {})
    job["spec"]["engine"]["optimizer"]["betas"] = [0.9, 0.999]
    with pytest.raises(InvalidJob, match=r"with optimizer.betas\[1\] of at most 0.99"):
        run_from_manifest(job, tmp_path, None, {})


def test_a_port_that_is_taken_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own value
    monkeypatch.setattr(environment, "fix_threads", lambda spec: None)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifest()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = CliRunner().invoke(train, [str(file), "--claims", str(tmp_path), "--port", port])
    assert ran.exit_code == 2
    assert f"--port {port}: Address already in use; choose another" in ran.output


def test_a_file_with_other_documents_is_read(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("kind: PersistentVolumeClaim\n---\nkind: TrainingJob\nspec: {}\n")
    assert read_manifest(file) == {"kind": "TrainingJob", "spec": {}}


@pytest.mark.parametrize("text", ["kind: Pod\n", "{", "kind: TrainingJob\n---\nkind: TrainingJob\n"])
def test_a_file_without_exactly_one_job_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(InvalidJob, match=r"job\.yaml"):
        read_manifest(file)


def test_the_command_says_what_is_wrong_and_exits_2(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("kind: TrainingJob\nmetadata: {name: x}\nspec: {engine: {steps: 0}}\n")
    result = CliRunner().invoke(train, [str(file)])
    assert result.exit_code == 2
    assert "spec.engine." in result.output
    assert "Traceback" not in result.output


def test_the_commands_help_has_examples() -> None:
    result = CliRunner().invoke(train, ["--help"])
    assert result.exit_code == 0
    assert "busbar train examples/train-python-stdlib.yaml" in result.output
