"""MLPs in tiles: the bits of a plain loop that tiles as well, less memory inside a block, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from tests.training import test_adapter as adapters
from tests.training.plain_loop import train_model_plainly
from tests.training.small import GPT2, LLAMA, SEQUENCES, VOCABULARY, engine
from tests.training.test_adapter import bases
from tests.training.test_bit_equality import CPU, STEPS, batches, train_ours
from tests.training.test_tiled_loss import made
from torch import nn

from busbar.scheduler.fit import BatchShape, ModelShape
from busbar.scheduler.fit.accelerators import accelerator
from busbar.scheduler.fit.memory import activations, mlp_tile_rows
from busbar.scheduler.fit.speed import step_seconds
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training import tiled_mlp
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.plan_command import plan
from busbar.workloads.training.sizing import batch_shape
from busbar.workloads.training.tiled_mlp import check, tile

assert bases  # a fixture

ROWS = 20  # no divisor of a micro-batch's tokens
BLOOM: dict[str, Any] = {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 4}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)
    monkeypatch.setattr(tiled_mlp, "mlp_tile_rows", lambda tokens: ROWS)


class PlainTiles(nn.Module):
    """An MLP in tiles, all of which are kept until backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tiles = hidden.flatten(0, 1)[None].split(ROWS, 1)  # type: ignore[no-untyped-call]
        return torch.cat([self.inner(part) for part in tiles], 1).view(hidden.shape)


class Whole(nn.Module):
    """A model that gives its loss alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.model(input_ids=input_ids, labels=labels, use_cache=False).loss)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(
    ("changes", "placement"),
    [
        ({}, "resident"),
        ({"activations": "recompute"}, "half"),
        ({"activations": "swap"}, "resident"),
        ({"batch": {"sequences": SEQUENCES, "microBatch": 1}}, "optimizer-offload"),
        ({}, "parameter-offload"),
        ({"model": {"config": GPT2}}, "half"),
        ({"model": {"config": GPT2}, "activations": "recompute"}, "resident"),
        ({"model": {"config": {**LLAMA, "tie_word_embeddings": False}}, "dtype": "bfloat16"}, "half"),
    ],
    ids=[
        "resident",
        "recomputed",
        "swapped",
        "accumulation",
        "weights on the host",
        "dropout",
        "dropout, recomputed",
        "bfloat16",
    ],
)
def test_a_run_with_tiles_equals_a_plain_loop_with_tiles(changes: dict[str, Any], placement: str) -> None:
    document = engine(steps=STEPS, **{"mlp": "tiled", **changes})
    ours, trainer = train_ours(document, placement, True)
    dtype = torch.bfloat16 if document.get("dtype") == "bfloat16" else torch.float32
    plain = made(document["model"]["config"], dtype)
    for block in plain.transformer.h if "n_embd" in document["model"]["config"] else plain.model.layers:
        block.mlp = PlainTiles(block.mlp)
    micro = document["batch"]["microBatch"]
    losses, weights = train_model_plainly(Whole(plain), batches(), micro, document["optimizer"], True, dtype)
    assert ours == losses
    theirs = dict(trainer.model.named_parameters())
    named = {
        name.removeprefix("model.").replace("mlp.inner.", "mlp."): each for name, each in weights.items()
    }
    assert theirs.keys() == named.keys()
    assert all(torch.equal(theirs[name], value) for name, value in named.items())


@pytest.mark.usefixtures("_small_tiles")
def test_an_adapter_with_tiles_learns_what_one_without_does(bases: Path) -> None:
    given = {"rank": 4, "alpha": 8, "targets": ["up_proj", "v_proj"]}
    whole, _ = adapters.train(adapters.document(given), bases, "resident")
    tiled, _ = adapters.train(adapters.document(given, mlp="tiled", loss="tiled"), bases, "resident")
    assert tiled == pytest.approx(whole, rel=1e-5)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, BLOOM, QWEN3_MOE], ids=["llama", "gpt2", "bloom, two arguments", "experts"]
)
def test_gradients_are_those_of_the_whole_up_to_rounding(config: dict[str, Any]) -> None:
    model, tokens = made(config).eval(), batches()[0]
    gradients = {}
    for tiled in (False, True):
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        gradients[tiled] = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        if not tiled:
            tile(model)
            check(model, VOCABULARY)
    assert gradients[True].keys() == gradients[False].keys()
    for name, each in gradients[False].items():
        torch.testing.assert_close(gradients[True][name], each, rtol=1e-3, atol=1e-6)
    assert any(not torch.equal(gradients[True][name], each) for name, each in gradients[False].items())


def demand_of(tokens: int, **changes: Any) -> tuple[Any, Any]:
    config = {**LLAMA, "max_position_embeddings": tokens, "intermediate_size": 256}
    document = engine(
        data={"uri": "pvc://text", "sequenceLength": tokens, "holdoutFraction": 0.2},
        model={"config": config},
        batch={"sequences": 1, "microBatch": 1},
        evaluation={"ngramOrder": 2},
        loss="tiled",
        **changes,
    )
    spec = parse_engine(document)
    shape = ModelShape.from_config({"vocab_size": VOCABULARY, **config})
    return measure_demand(open_model(spec, None, VOCABULARY, 0), spec, CPU), (shape, batch_shape(spec))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_and_the_formulas_have_the_inside_of_one_tile(dtype: str) -> None:
    (whole, _), (tiled, (shape, batch)) = (
        demand_of(8192, dtype=dtype, mlp=mlp) for mlp in ("whole", "tiled")
    )
    assert tiled.swap_bytes < 0.7 * whole.swap_bytes
    assert tiled.activation_bytes < 0.6 * whole.activation_bytes
    assert tiled.evaluation_bytes < whole.evaluation_bytes
    for way, bytes_ in (
        ("keep", tiled.activation_bytes),
        ("recompute", tiled.recompute_bytes),
        ("swap", tiled.swap_bytes),
    ):
        assert activations(shape, replace(batch, activations=way)) == pytest.approx(bytes_, rel=0.1)


def test_a_tile_has_a_sixteenth_of_the_tokens_and_at_least_512() -> None:
    assert [mlp_tile_rows(tokens) for tokens in (1, 512, 8192, 8193, 160_000)] == [1, 512, 512, 513, 10_000]


def test_formulas_know_what_tiles_cost() -> None:
    shape = ModelShape.from_config({"vocab_size": 128_000, **LLAMA})
    batch = BatchShape(1, 8192, 1, activations="recompute")
    device = accelerator("H100-80GB")
    assert device is not None
    whole, tiled = (
        step_seconds(shape, each, "resident", device) for each in (batch, replace(batch, mlp="tiled"))
    )
    assert 1.0 < tiled / whole < 1.25


class Mixing(nn.Module):
    """An MLP that sees the tokens before."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.cumsum(-2)


class Pooling(nn.Module):
    """One that gives a row for each text."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(-2, keepdim=True)


class Telling(nn.Module):
    """One that also gives what a router has chosen."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, hidden[..., 0]


def test_an_mlp_that_gives_more_than_one_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_mlp, "mlp_tile_rows", lambda tokens: 3)
    model = made(LLAMA)
    model.model.layers[0].mlp = Telling()
    with pytest.raises(InvalidJob, match="Telling gives more than one tensor") as refused:
        tile(model)(input_ids=batches()[0], use_cache=False)
    assert refused.value.field == "spec.engine.mlp"


@pytest.mark.parametrize("other", [Mixing, Pooling])
def test_mlps_that_mix_tokens_are_refused(other: type[nn.Module]) -> None:
    model = made(LLAMA)
    for block in model.model.layers:
        block.mlp = other()
    was_training = model.training
    with pytest.raises(InvalidJob, match="give something else for a few tokens") as refused:
        check(tile(model), VOCABULARY)
    assert refused.value.field == "spec.engine.mlp"
    assert model.training == was_training


def test_a_model_whose_blocks_name_no_mlp_is_refused() -> None:
    opt = {
        "model_type": "opt",
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
    }
    with pytest.raises(InvalidJob, match="OPTForCausalLM name no MLP"):
        train_ours(engine(steps=STEPS, model={"config": opt}, mlp="tiled"), "resident", True)


def test_a_plan_says_what_tiles_save_of_a_long_micro_batch(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "train-python-stdlib.yaml"
    document = next(each for each in yaml.safe_load_all(example.read_text()) if each["kind"] == "TrainingJob")
    own = document["spec"]["engine"]
    own["data"]["sequenceLength"] = own["model"]["config"]["max_position_embeddings"] = 8192
    job = tmp_path / "long.yaml"
    job.write_text(yaml.safe_dump(document))
    found = json.loads(CliRunner().invoke(plan, [str(job), "--gpu", "H100", "--json"]).output)["mlp"]
    assert found["asked"] == "whole"
    assert found["tiledBytes"] < 0.6 * found["wholeBytes"]
    assert 1.0 < found["computeRatio"] < 4 / 3
    assert (
        "with its MLP (now whole) as a whole" in CliRunner().invoke(plan, [str(job), "--gpu", "H100"]).output
    )
    short = CliRunner().invoke(plan, [str(example), "--gpu", "H100"]).output
    assert "MLP" not in short  # one tile has all of its tokens
