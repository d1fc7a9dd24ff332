"""A step whose gradients are not finite changes nothing, is counted, and never loses an earlier checkpoint."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training.plain_loop import train_plainly
from tests.training.small import SEQUENCES, VOCABULARY, engine, manifest, with_text
from tests.training.states import write_state
from tests.training.test_bit_equality import CPU, packed, plan_for

from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.errors import CheckpointError
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import open_model
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.state_file import is_finite
from busbar.workloads.training.status import Status
from busbar.workloads.training.trainer import MicroBatch, Trainer

STEPS, BAD = 6, {1, 3}  # from 0


def spoil(step: int, model: torch.nn.Module) -> None:
    """One gradient element of two of the steps is not a number."""
    if step in BAD:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.view(-1)[5] = math.nan if step == 1 else math.inf


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Trainer._forward_and_backward

    def spoiling(trainer: Trainer, parts: Sequence[MicroBatch | None]) -> torch.Tensor:
        loss = backward(trainer, parts)
        spoil(trainer.done, trainer.model)
        return loss

    monkeypatch.setattr(Trainer, "_forward_and_backward", spoiling)


@pytest.mark.parametrize("placement", ["resident", "optimizer-offload", "parameter-offload"])
@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "bfloat16"}, {"optimizer": {"learningRate": 1e-3}}], ids=str
)
def test_a_bad_step_leaves_the_run_equal_to_a_plain_loop_that_skips_it(
    placement: str, changes: dict[str, Any], spoiled: None
) -> None:
    document = engine(steps=STEPS, **changes)
    document["optimizer"].setdefault("gradientClip", None)
    document["optimizer"].setdefault("schedule", "linear")
    spec = parse_engine(document)
    recipe = open_model(spec, None, VOCABULARY, 0)
    trainer = Trainer(spec, recipe, plan_for(spec, recipe, placement), CPU)
    data = packed()
    results = [trainer.step(data) for _ in range(STEPS)]
    trainer.close()
    losses, weights = train_plainly(
        document["model"]["config"],
        VOCABULARY,
        [torch.from_numpy(data.batch(step, SEQUENCES)) for step in range(STEPS)],
        document["batch"]["microBatch"],
        document["optimizer"],
        fused=True,
        dtype=recipe.dtype,
        spoil=spoil,
    )
    assert [result.loss for result in results] == losses
    assert {result.step - 1 for result in results if result.skipped} == BAD
    assert (trainer.optimizer.updates, trainer.optimizer.skipped) == (STEPS - 2, 2)
    assert [name for name, p in trainer.model.named_parameters() if not torch.equal(p, weights[name])] == []


def start(claims: Path, **changes: Any) -> tuple[int, Status]:
    status = Status()
    described = run_from_manifest(manifest(**changes), claims, None, {})
    return run(described, status, Control(), Lines("small", io.StringIO())), status


def test_a_resumed_run_counts_the_updates_that_were_applied(tmp_path: Path, spoiled: None) -> None:
    whole, halves = with_text(tmp_path / "a"), with_text(tmp_path / "b")
    assert start(whole)[0] == 0
    assert start(halves)[0] == 0
    for step in (8, 12):  # back to the checkpoint of step 4
        folder = halves / f"out/model/checkpoints/step-{step:08d}"
        (folder / "manifest.json").unlink(missing_ok=True)
    code, status = start(halves)
    assert (code, status.to_json()["skippedSteps"]) == (0, 2)
    first, second = (load_file(run / "out/model/model.safetensors") for run in (whole, halves))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_ends_after_ten_bad_steps_and_keeps_what_was_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = with_text(tmp_path)
    assert start(claims, steps=4)[0] == 0
    result = (claims / "out/model/model.safetensors").read_bytes()
    backward = Trainer._forward_and_backward

    def nothing_but_nan(trainer: Trainer, parts: Sequence[MicroBatch | None]) -> torch.Tensor:
        loss = backward(trainer, parts)
        if trainer.done >= 6:
            for parameter in trainer.model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(math.nan)
        return loss

    monkeypatch.setattr(Trainer, "_forward_and_backward", nothing_but_nan)
    code, status = start(claims, steps=40, seed=1)
    shown = status.to_json()
    assert (code, shown["phase"], shown["step"], shown["skippedSteps"]) == (2, "Failed", 16, 10)
    assert "weights are those after step 6" in shown["message"]
    assert (claims / "out/model/model.safetensors").read_bytes() == result
    kept = CheckpointFolder(claims / "out/model/checkpoints", 2).newest().checkpoint
    assert kept is not None
    assert all(is_finite(kept.tensor(name)) for name in kept.names)


def test_a_run_ends_after_as_many_bad_steps_as_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nan(trainer: Trainer, parts: Sequence[MicroBatch | None]) -> torch.Tensor:
        trainer.gates.reach_all()  # as a forward pass does
        for parameter in trainer.model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(math.inf)
        return torch.zeros(())

    monkeypatch.setattr(Trainer, "_forward_and_backward", nan)
    code, status = start(with_text(tmp_path), maxBadSteps=3)
    assert (code, status.step) == (2, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_checkpoint_that_is_not_finite_is_not_written(bad: float, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, 1)
    weights = torch.ones(1000)
    write_state(folder, 1, {"weights/a": weights}, {})
    weights[500] = bad
    with pytest.raises(CheckpointError, match="weights/a holds numbers that are not finite"):
        write_state(folder, 2, {"weights/a": weights}, {})
    assert folder.steps() == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_a_run_whose_state_is_not_finite_fails_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trying again would repeat it, so the exit code is not that of a disk that was full."""
    step = Trainer.step

    def break_a_weight(trainer: Trainer, data: Any) -> Any:
        result = step(trainer, data)
        if trainer.done == 12:
            next(trainer.model.parameters()).data.view(-1)[0] = math.nan
        return result

    claims = with_text(tmp_path)
    monkeypatch.setattr(Trainer, "step", break_a_weight)
    code, status = start(claims)
    assert (code, status.to_json()["phase"]) == (2, "Failed")
    assert "checkpoint of step 12 is not written" in status.to_json()["message"]
    assert CheckpointFolder(claims / "out/model/checkpoints", 2).steps() == [8, 4]


def test_a_result_that_is_not_finite_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def break_a_weight(trainer: Trainer, data: Any) -> Any:
        result = step(trainer, data)
        if trainer.done == 12:
            monkeypatch.setattr(CheckpointFolder, "write", lambda *arguments: 1)
            next(trainer.model.parameters()).data.view(-1)[0] = math.inf
        return result

    claims = with_text(tmp_path)
    monkeypatch.setattr(Trainer, "step", break_a_weight)
    code, status = start(claims)
    assert code == 2
    assert "no result is written" in status.to_json()["message"]
    assert not (claims / "out/model/config.json").exists()
