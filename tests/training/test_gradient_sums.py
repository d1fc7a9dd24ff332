"""Gradients that are added up in float32: the bits of a plain loop that does so, the bytes, and what it is for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import test_adapter as adapters
from tests.training.small import GPT2, LLAMA, SEQUENCES, VOCABULARY, engine
from tests.training.test_adapter import bases
from tests.training.test_bit_equality import CPU, STEPS, assert_equal_to_plain, train_ours

from busbar.scheduler.fit import BatchShape, ModelShape
from busbar.scheduler.fit.cells import workload_class
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training import tiled_mlp
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model

assert bases  # a fixture

ONE_EACH = {"sequences": SEQUENCES, "microBatch": 1}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


def document(**changes: Any) -> dict[str, Any]:
    return engine(
        **{
            "steps": STEPS,
            "dtype": "bfloat16",
            "batch": ONE_EACH,
            "gradientSums": "float32",
            "model": {"config": {**LLAMA, "tie_word_embeddings": False}},
            **changes,
        }
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("placement", ["resident", "half", "optimizer-offload", "parameter-offload"])
def test_a_plain_loop_that_adds_up_in_float32_has_the_same_bits(placement: str, fused: bool) -> None:
    assert_equal_to_plain(document(), placement, fused)
    narrow, _ = train_ours({**document(), "gradientSums": "weights"}, placement, fused)
    assert train_ours(document(), placement, fused)[0] != narrow


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "gated"},
        {"activations": "recompute"},
        {"activations": "swap"},
        {"model": {"config": LLAMA}},
        {"model": {"config": GPT2}, "activations": "recompute"},
        {"dtype": "float32"},
        {"optimizer": {"learningRate": 3e-3, "gradientClip": 0.01, "schedule": "linear"}},
    ],
    ids=["gated", "recomputed", "swapped", "tied", "dropout", "weights in float32", "a clip that bites"],
)
def test_so_it_has_with_everything_else(changes: dict[str, Any]) -> None:
    assert_equal_to_plain(document(**changes), "half", True)


def test_weights_in_float32_know_no_difference() -> None:
    losses = [
        train_ours(document(dtype="float32", gradientSums=sums), "resident", True)[0]
        for sums in ("weights", "float32")
    ]
    assert losses[0] == losses[1]


def test_an_adapter_adds_up_in_float32_too(bases: Path) -> None:
    given = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    own: dict[str, Any] = {"dtype": "bfloat16", "batch": ONE_EACH}
    narrow, _ = adapters.train(adapters.document(given, **own), bases, "resident")
    wide, _ = adapters.train(adapters.document(given, gradientSums="float32", **own), bases, "resident")
    assert wide == pytest.approx(narrow, rel=1e-2)
    assert wide != narrow


@pytest.mark.parametrize("placement", ["resident", "optimizer-offload", "parameter-offload"])
def test_the_plan_has_their_bytes(placement: str) -> None:
    _, narrow = train_ours(document(gradientSums="weights"), placement, True)
    _, wide = train_ours(document(), placement, True)
    side = "host" if placement == "parameter-offload" else "device"
    for trainer in (narrow, wide):
        for arena in (trainer.device_arena, trainer.host_arena):
            for owner in ("gradients", "staging", "parameters"):
                assert arena.used.get(owner, 0) == arena.grants.get(owner, 0)
        seen = trainer.device_arena.peak["activations"]
        assert seen == pytest.approx(trainer.plan.device["activations"], rel=0.05)
    assert getattr(wide.plan, side)["gradients"] == 2 * getattr(narrow.plan, side)["gradients"]


def error_of(parts: torch.Tensor, *ways: dict[str, Any], of: str = "") -> list[float]:
    """Relative errors of the gradient of many micro-batches, the first way being exact; `of` parameters with this in their
    names."""
    found = []
    for way in ways:
        spec = parse_engine(document(**way))
        model = open_model(spec, None, VOCABULARY, 0).build().eval()
        for each in parts:
            loss: torch.Tensor = model(input_ids=each, labels=each, use_cache=False).loss / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for name, p in model.named_parameters() if of in name and p.grad is not None]
        found.append(torch.cat([each.double().flatten() for each in gradients]))
    exact = found[0]
    return [float((each - exact).norm() / exact.norm()) for each in found[1:]]


def test_many_small_terms_are_not_lost() -> None:
    """256 micro-batches: in bfloat16 a sum is deaf to terms below a 256th of it."""
    tokens = torch.randint(0, VOCABULARY, (256, 1, 8), generator=torch.Generator().manual_seed(1))
    exact = {"dtype": "float32", "gradientSums": "weights"}
    narrow, wide = error_of(tokens, exact, {"gradientSums": "weights"}, {})
    assert wide < 0.5 * narrow


def test_tiles_of_one_micro_batch_are_added_up_in_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_mlp, "mlp_tile_rows", lambda tokens: 2)
    tokens = torch.randint(0, VOCABULARY, (1, 16, 32), generator=torch.Generator().manual_seed(1))
    exact = {"dtype": "float32", "gradientSums": "weights"}
    tiled = {"mlp": "tiled"}
    narrow, wide = error_of(tokens, exact, {**tiled, "gradientSums": "weights"}, tiled, of=".mlp.")
    assert wide < 0.7 * narrow


def test_it_is_a_part_of_a_runs_class_where_it_changes_something() -> None:
    shape = ModelShape.from_config({"vocab_size": VOCABULARY, **LLAMA})
    for dtype, differs in (("float32", False), ("bfloat16", True)):
        batch = BatchShape(4, 32, 2, dtype)
        wide = replace(batch, gradient_sums="float32")
        assert (workload_class(shape, batch) != workload_class(shape, wide)) is differs


def test_fake_tensors_count_what_float32_takes_while_it_is_added() -> None:
    demands = []
    for sums in ("weights", "float32"):
        spec = parse_engine(document(gradientSums=sums, activations="recompute"))
        demands.append(measure_demand(open_model(spec, None, VOCABULARY, 0), spec, CPU))
    narrow, wide = demands
    assert narrow.recompute_bytes is not None
    assert wide.recompute_bytes is not None
    assert wide.recompute_bytes >= narrow.recompute_bytes
    assert (narrow.gradient_element_bytes, wide.gradient_element_bytes) == (2, 4)
