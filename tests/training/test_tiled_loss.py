"""Logits in tiles: the bits of a plain loop that tiles as well, memory that does not grow, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.training import test_adapter as adapters
from tests.training.plain_loop import train_model_plainly
from tests.training.small import GPT2, LLAMA, SEQUENCE, SEQUENCES, VOCABULARY, engine
from tests.training.test_adapter import bases
from tests.training.test_bit_equality import CPU, STEPS, batches, train_ours
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.scheduler.fit import BatchShape, ModelShape
from busbar.scheduler.fit.accelerators import accelerator
from busbar.scheduler.fit.memory import TILE_TOKENS, activations
from busbar.scheduler.fit.speed import step_seconds
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training import tiled_loss
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.plan_command import plan
from busbar.workloads.training.tiled_loss import loss_of, tile, token_losses

assert bases  # a fixture


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No divisor of a micro-batch's tokens."""
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)
    monkeypatch.setattr(tiled_loss, "TILE", 20)


class PlainTiles(nn.Module):
    """A causal model whose loss is made of tiles, all of which are kept until backward."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.inner.base_model(input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        wanted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        total = torch.zeros(())
        for start in range(0, len(wanted), 20):
            logits = self.inner.lm_head(hidden[start : start + 20]).float()
            total = total + nn.functional.cross_entropy(logits, wanted[start : start + 20], reduction="sum")
        return SimpleNamespace(loss=total / (wanted != -100).sum())


def made(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    given = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, **config}
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    return make(AutoConfig.for_model(given.pop("model_type"), **given), dtype=dtype)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(
    ("changes", "placement"),
    [
        ({}, "resident"),
        ({"activations": "recompute"}, "half"),
        ({"batch": {"sequences": SEQUENCES, "microBatch": 1}}, "optimizer-offload"),
        ({}, "parameter-offload"),
        ({"model": {"config": GPT2}}, "half"),
        ({"model": {"config": {**LLAMA, "tie_word_embeddings": False}}, "dtype": "bfloat16"}, "half"),
    ],
    ids=["resident", "recomputed", "accumulation", "weights on the host", "dropout", "bfloat16"],
)
def test_a_tiled_run_equals_a_plain_loop_with_tiles(changes: dict[str, Any], placement: str) -> None:
    document = engine(steps=STEPS, **{"loss": "tiled", **changes})
    ours, trainer = train_ours(document, placement, True)
    dtype = torch.bfloat16 if document.get("dtype") == "bfloat16" else torch.float32
    plain = PlainTiles(made(document["model"]["config"], dtype))
    micro = document["batch"]["microBatch"]
    losses, weights = train_model_plainly(plain, batches(), micro, document["optimizer"], True, dtype)
    assert ours == losses
    theirs = dict(trainer.model.named_parameters())
    assert all(torch.equal(theirs[name.removeprefix("inner.")], value) for name, value in weights.items())


@pytest.mark.usefixtures("_small_tiles")
def test_a_tiled_adapter_learns_what_a_whole_one_does(bases: Path) -> None:
    given = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    whole, _ = adapters.train(adapters.document(given), bases, "resident")
    tiled, trainer = adapters.train(adapters.document(given, loss="tiled"), bases, "resident")
    assert tiled == pytest.approx(whole, rel=1e-5)
    assert tiled != whole
    assert token_losses(trainer.model, batches()[0]).shape == (SEQUENCES, SEQUENCE - 1)


@pytest.mark.usefixtures("_small_tiles")
def test_losses_are_those_of_the_whole_up_to_rounding_whatever_is_learned() -> None:
    model = made({**LLAMA, "tie_word_embeddings": False})
    tokens = batches()[0]
    labels = tokens.clone()
    labels[0, 3:20] = labels[2] = -100
    whole, each = loss_of(model, tokens, labels), token_losses(model, tokens)
    whole.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    tile(model)
    tiled = loss_of(model, tokens, labels)
    torch.testing.assert_close(tiled, whole)
    torch.testing.assert_close(token_losses(model, tokens), each, rtol=1e-5, atol=1e-6)
    tiled.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7)
    assert model(input_ids=tokens).logits.shape == (SEQUENCES, SEQUENCE, VOCABULARY)  # as ever


def demand_of(tokens: int, **changes: Any) -> Any:
    config = {**LLAMA, "max_position_embeddings": tokens}
    document = engine(
        data={"uri": "pvc://text", "sequenceLength": tokens, "holdoutFraction": 0.2},
        model={"config": config},
        tokenizer={"train": {"vocabSize": 16_000}},
        batch={"sequences": 1, "microBatch": 1},
        activations="recompute",
        evaluation={"ngramOrder": 2},
        **changes,
    )
    spec = parse_engine(document)
    return measure_demand(open_model(spec, None, 16_000, 0), spec, CPU)


def test_the_plan_has_one_tile_and_neither_training_nor_evaluation_grows_with_the_vocabulary() -> None:
    whole, tiled = demand_of(4096), demand_of(4096, loss="tiled")
    one_tile = 4 * TILE_TOKENS * 16_000
    assert whole.recompute_bytes > 3 * 4 * 4096 * 16_000
    assert tiled.recompute_bytes < 5 * one_tile
    assert tiled.evaluation_bytes < whole.evaluation_bytes / 4
    longer = demand_of(8192, loss="tiled")
    assert longer.recompute_bytes - tiled.recompute_bytes < one_tile  # of blocks, not of logits


def test_formulas_know_what_tiles_save_and_cost() -> None:
    shape = ModelShape.from_config({"vocab_size": 128_000, **LLAMA})
    batch = BatchShape(1, 8192, 1, activations="recompute")
    tiled = replace(batch, loss="tiled")
    saved = activations(shape, batch) - activations(shape, tiled)
    assert saved == pytest.approx(3 * 4 * (8192 - TILE_TOKENS) * 128_000, rel=0.05)
    device = accelerator("H100-80GB")
    assert device is not None
    seconds = [step_seconds(shape, each, "resident", device) for each in (batch, tiled)]
    assert 1.0 < seconds[1] / seconds[0] < 4 / 3


def test_a_model_that_does_more_behind_its_head_is_refused() -> None:
    gemma = {
        "model_type": "gemma2",
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "final_logit_softcapping": 0.05,
    }
    with pytest.raises(InvalidJob) as refused:
        train_ours(engine(steps=STEPS, model={"config": gemma}, loss="tiled"), "resident", True)
    assert refused.value.field == "spec.engine.loss"
    assert "Gemma2ForCausalLM has a loss of" in str(refused.value)


def test_a_model_without_a_head_of_its_own_is_refused() -> None:
    with pytest.raises(InvalidJob, match="names no head"):
        tile(nn.Linear(2, 2))


def test_a_plan_says_what_tiles_save() -> None:
    job = str(Path(__file__).parents[2] / "examples" / "train-python-stdlib.yaml")
    ran = CliRunner().invoke(plan, [job, "--gpu", "H100", "--json"])
    found = json.loads(ran.output)["logits"]
    assert found["asked"] == "whole"
    assert found["tiledBytes"] < found["wholeBytes"]
    assert 1.0 < found["computeRatio"] < 4 / 3
    text = CliRunner().invoke(plan, [job, "--gpu", "H100"]).output
    assert "Of them logits (now whole) take 24.0 MiB" in text
