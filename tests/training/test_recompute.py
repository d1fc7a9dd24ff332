"""Recomputed activations: every bit that of kept ones and of the plain loop, and a peak that is the plan's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import test_adapter as adapters
from tests.training.plain_loop import train_model_plainly
from tests.training.small import GPT2, LLAMA, SEQUENCE, SEQUENCES, VOCABULARY, engine, with_text
from tests.training.test_adapter import bases
from tests.training.test_bit_equality import CPU, STEPS, assert_equal_to_plain, batches, packed, train_ours
from tests.training.test_continuation import CONSTANT, start, weights

from busbar.workloads.training import demand as demand_module
from busbar.workloads.training.activations import peak_activation_bytes
from busbar.workloads.training.demand import AGAIN, AUTO, KEEP, RECOMPUTE, SWAP, Demand
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.layouts import first_that_fits
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.plan import MemoryLimits, lay_out
from busbar.workloads.training.trainer import Trainer

assert bases  # a fixture


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


def document(**changes: Any) -> dict[str, Any]:
    changes.setdefault("optimizer", {"learningRate": 1e-3, "schedule": "linear", "gradientClip": 0.01})
    return engine(steps=STEPS, **{"activations": RECOMPUTE, **changes})


@pytest.mark.parametrize(
    ("changes", "placement"),
    [
        ({}, "resident"),
        ({"batch": {"sequences": SEQUENCES, "microBatch": 1}}, "half"),
        ({"model": {"config": GPT2}}, "half"),  # which has dropout in every block
        ({"model": {"config": {**GPT2, "attn_pdrop": 0.3}}, "dtype": "bfloat16"}, "optimizer-offload"),
        ({"model": {"config": {**LLAMA, "tie_word_embeddings": False}}, "dtype": "bfloat16"}, "resident"),
    ],
    ids=["clip", "accumulation", "dropout", "dropout in bfloat16", "bfloat16"],
)
def test_a_recomputed_run_equals_a_plain_loop(changes: dict[str, Any], placement: str) -> None:
    assert_equal_to_plain(document(**changes), placement, fused=True)


@pytest.mark.parametrize("activations", AGAIN)
def test_a_recomputed_adapter_with_dropout_is_that_of_peft(bases: Path, activations: str) -> None:
    given = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"], "dropout": 0.2}
    asked = adapters.document(given, activations=activations)
    ours, trainer = adapters.train(asked, bases, "half")
    assert trainer.plan.activations == activations
    plain = adapters.plain_adapter(
        bases / "llama",
        torch.float32,
        r=4,
        lora_alpha=8,
        lora_dropout=0.2,
        target_modules=["q_proj", "v_proj"],
    )
    given_batches = batches()[: adapters.STEPS]
    losses, weights = train_model_plainly(plain, given_batches, 2, asked["optimizer"], True, torch.float32)
    assert ours == losses
    theirs = dict(trainer.model.named_parameters())
    assert all(torch.equal(theirs[name], value) for name, value in weights.items())


def test_each_block_runs_twice_in_training_and_once_in_evaluation() -> None:
    spec = parse_engine(document())
    recipe = open_model(spec, None, VOCABULARY, 0)
    trainer = Trainer(spec, recipe, lay_out(demand(spec), UNLIMITED, "resident", 0), CPU)
    calls: list[int] = []
    blocks: Any = trainer.model.model.layers  # type: ignore[union-attr]
    blocks[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    trainer.step(packed())
    assert len(calls) == 2 * SEQUENCES // spec.batch.micro_batch
    calls.clear()
    trainer.model.eval()
    trainer.model(input_ids=torch.zeros((1, SEQUENCE), dtype=torch.long))
    trainer.close()
    assert len(calls) == 1


UNLIMITED = MemoryLimits(None, None, True)


def demand(spec: Any) -> Demand:
    return measure_demand(open_model(spec, None, VOCABULARY, 0), spec, CPU)


DEEP = {**LLAMA, "num_hidden_layers": 6}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [DEEP, {**GPT2, "n_layer": 5}], ids=["llama", "gpt2"])
def test_the_measured_peak_is_the_planned_one(config: dict[str, Any], dtype: str) -> None:
    asked = document(model={"config": config}, dtype=dtype)
    _, trainer = train_ours(asked, "resident", fused=True)
    seen, planned = trainer.device_arena.peak["activations"], trainer.plan.device["activations"]
    assert 0.95 * planned < seen <= planned
    kept = demand(parse_engine(asked)).activation_bytes
    assert planned < kept / 1.5
    assert trainer.plan.activations == RECOMPUTE


def test_auto_keeps_what_fits_and_recomputes_where_only_that_does() -> None:
    asked = engine(steps=3, model={"config": DEEP}, activations=AUTO, mode="auto")
    need = demand(parse_engine(asked))
    least = lay_out(need, UNLIMITED, "optimizer-offload", len(need.groups), activations=KEEP)
    enough = first_that_fits(need, replace(UNLIMITED, device_bytes=least.device_bytes), "auto")
    assert enough is not None
    assert (enough.activations, enough.why) == (KEEP, "because they fit")
    less = first_that_fits(need, replace(UNLIMITED, device_bytes=least.device_bytes - 1), "auto")
    assert less is not None
    assert less.activations == RECOMPUTE
    assert "activations: recompute, because no layout fits that keeps them (" in less.explain()
    kept = replace(need, activations=KEEP)
    limits = replace(UNLIMITED, device_bytes=least.device_bytes - 1)
    assert first_that_fits(kept, limits, "auto") is None


@pytest.mark.parametrize(("before", "after"), [(KEEP, RECOMPUTE), (RECOMPUTE, SWAP)])
def test_a_run_that_goes_on_may_do_something_else_with_activations(
    before: str, after: str, tmp_path: Path
) -> None:
    whole, claims = with_text(tmp_path / "whole"), with_text(tmp_path / "claims")
    assert start(whole, steps=8, optimizer=CONSTANT, activations=before)[0] == 0
    assert start(claims, steps=4, optimizer=CONSTANT, activations=before)[0] == 0
    code, status, log = start(claims, steps=8, optimizer=CONSTANT, activations=after)
    assert (code, status["resumedFromStep"], status["replayMismatches"]) == (0, 4, 0)
    assert status["activations"] == after
    assert f"activations: {after}, as the job says" in log
    ours, theirs = weights(claims), weights(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


class Counting(torch.nn.Module):
    """A block that changes a buffer whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.runs, torch.Tensor)
        self.runs.add_(1)
        moved: torch.Tensor = self.linear(hidden)
        return moved


class Model(torch.nn.Module):
    """What the engine asks of a causal model, without blocks or with some."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList(Counting() for _ in range(layers))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> Any:
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return type("Output", (), {"loss": hidden.square().mean()})


@pytest.mark.parametrize(("layers", "said"), [(0, "no list of blocks"), (2, "changes buffers")])
def test_a_model_that_cannot_recompute_says_why(layers: int, said: str) -> None:
    _, peaks = peak_activation_bytes(lambda: Model(layers), 1, 8, CPU)
    assert peaks.recomputed is None
    assert said in peaks.why_not


def test_a_job_that_asks_for_it_is_refused_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busbar.workloads.training.activations.blocks", lambda model: [])
    with pytest.raises(
        InvalidJob, match=r"spec.engine.activations: recompute is not possible with this Llama"
    ):
        demand(parse_engine(document()))
    assert demand(parse_engine(engine(activations=AUTO))).recompute_bytes is None
