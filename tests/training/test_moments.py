"""Moments in fewer bytes: the plan's bytes, the same bits on every placement, and errors that stay small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.small import GPT2, LLAMA, SEQUENCES, VOCABULARY, engine, with_text
from tests.training.test_bit_equality import CPU, STEPS, assert_equal_to_plain, packed, train_ours
from tests.training.test_continuation import CONSTANT, start, weights
from tests.training.test_parameter_offload import UNLIMITED
from tests.training.test_scratch_disk import open_trainer, steps

from busbar.workloads.training import demand as demand_module
from busbar.workloads.training import moments as moments_module
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.demand import Demand
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.moments import BLOCK, elements_of, narrow, state_parts, widen
from busbar.workloads.training.plan import lay_out
from busbar.workloads.training.settings import BF16, EXACT, INT8
from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD, lay_out_streamed

MANY = 1 << 16


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


def document(state: str, **changes: Any) -> dict[str, Any]:
    changes.setdefault("optimizer", {"learningRate": 1e-3, "schedule": "linear", "gradientClip": 0.5})
    return engine(**{"steps": STEPS, "state": state, **changes})


def demand_of(given: dict[str, Any]) -> Demand:
    spec = parse_engine(given)
    return measure_demand(open_model(spec, None, VOCABULARY, 0), spec, CPU)


def by_blocks(whole: torch.Tensor) -> torch.Tensor:
    flat = whole.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)


def first_in_eight_bits(whole: torch.Tensor) -> torch.Tensor:
    """What is left of it, by the definition of the format."""
    rows = by_blocks(whole)
    scale = rows.abs().max(1, keepdim=True).values
    shares = torch.where(scale > 0, rows.abs() / scale, 0.0)
    codes = torch.sign(rows) * torch.round(shares.sqrt() * 127)
    return (codes / 127 * (codes / 127).abs() * scale).flatten()[: whole.numel()].view(whole.shape)


def second_in_eight_bits(whole: torch.Tensor) -> torch.Tensor:
    rows = by_blocks(whole)
    scale = rows.max(1, keepdim=True).values
    shares = torch.where(scale > 0, rows / scale, 0.0)
    codes = torch.round(shares.sqrt().sqrt() * 255)
    codes = torch.where((rows > 0) & (codes == 0), 1.0, codes)
    roots = (codes / 255) * (codes / 255)
    return (roots * roots * scale).flatten()[: whole.numel()].view(whole.shape)


def reduce_moments(optimizer: torch.optim.Optimizer, state: str) -> None:
    for kept in optimizer.state.values():
        first, second = kept["exp_avg"], kept["exp_avg_sq"]
        if state == BF16:
            first.copy_(first.bfloat16())
            second.copy_(second.bfloat16())
        if state == INT8:
            first.copy_(first_in_eight_bits(first))
            second.copy_(second_in_eight_bits(second))


@pytest.mark.parametrize("state", [BF16, INT8])
@pytest.mark.parametrize(
    ("changes", "placement"),
    [
        ({}, "resident"),
        ({"batch": {"sequences": SEQUENCES, "microBatch": 1}, "schedule": "gated"}, "half"),
        ({"model": {"config": GPT2}, "dtype": "bfloat16"}, "optimizer-offload"),  # whose biases fill no block
        ({"dtype": "bfloat16", "batch": {"sequences": SEQUENCES, "microBatch": 1}}, PARAMETER_OFFLOAD),
        ({"model": {"config": {**LLAMA, "tie_word_embeddings": False}}}, PARAMETER_OFFLOAD),
    ],
    ids=[
        "resident",
        "gated, accumulation",
        "bfloat16",
        "weights on the host, bfloat16",
        "weights on the host",
    ],
)
def test_a_plain_loop_that_reduces_its_moments_has_the_same_bits(
    changes: dict[str, Any], placement: str, state: str
) -> None:
    given = document(state, **changes)
    assert_equal_to_plain(given, placement, True, lambda optimizer: reduce_moments(optimizer, state))
    exact, _ = train_ours({**given, "state": EXACT}, placement, fused=True)
    assert train_ours(given, placement, fused=True)[0] != exact


def kept_of(state: str, parameters: int) -> dict[str, torch.Tensor]:
    return {
        part.kind: torch.zeros(part.elements(parameters), dtype=part.dtype)
        for part in state_parts(state, "float32")
    }


def some_moments() -> tuple[torch.Tensor, torch.Tensor]:
    """Over many orders of magnitude, with zeros, and a block of nothing else."""
    generator = torch.Generator().manual_seed(4)
    size = torch.exp(torch.randn(MANY, generator=generator) * 4)
    first = torch.randn(MANY, generator=generator) * size * 1e-4
    second = (torch.randn(MANY, generator=generator) * size * 1e-4).square()
    first[:BLOCK] = second[:BLOCK] = 0
    first[1000:1010] = second[2000:2010] = 0
    return first, second


@pytest.mark.parametrize("run", [BLOCK * 4, 2**20])
@pytest.mark.parametrize("state", [BF16, INT8])
def test_what_was_narrow_stays_as_it_is_and_the_rest_comes_near(
    state: str, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments_module, "NARROW_RUN", run)
    (first, second), kept = some_moments(), kept_of(state, MANY)
    room = torch.empty(run)
    narrow(state, first.clone(), second.clone(), kept, room)
    wide = torch.full_like(first, 7.0), torch.full_like(second, 7.0)
    widen(state, kept, *wide, room)
    again = kept_of(state, MANY)
    narrow(state, wide[0].clone(), wide[1].clone(), again, room)
    assert all(torch.equal(again[kind], each) for kind, each in kept.items())
    assert torch.equal(wide[0] == 0, first == 0) or state == INT8
    assert torch.equal(wide[1] == 0, second == 0)  # an update divides by it
    if state == BF16:
        for near, exact in zip(wide, (first, second), strict=True):
            assert bool(((near - exact).abs() <= exact.abs() * 2**-8).all())
        return
    assert torch.equal(wide[0], first_in_eight_bits(first))
    assert torch.equal(wide[1], second_in_eight_bits(second))
    top = first.view(-1, BLOCK).abs().amax(1, keepdim=True)
    assert bool(((wide[0] - first).view(-1, BLOCK).abs() <= top / 127).all())
    roots = [each.sqrt().view(-1, BLOCK) for each in (wide[1], second)]
    assert bool(((roots[0] - roots[1]).abs() <= roots[1].amax(1, keepdim=True) / 255).all())


@pytest.mark.parametrize(
    ("state", "dtype", "each"),
    [(EXACT, "bfloat16", 10), (BF16, "float32", 4), (BF16, "bfloat16", 6), (INT8, "float32", 2.03125)],
)
def test_the_plan_has_the_bytes_of_the_format(state: str, dtype: str, each: float) -> None:
    need = demand_of(document(state, dtype=dtype))
    assert need.state_bytes_per_parameter == each
    plan = lay_out(need, UNLIMITED, "optimizer-offload", len(need.groups))
    assert plan.host["optimizer"] == pytest.approx(need.parameters * each, rel=0.02)
    assert plan.checkpoint_bytes == pytest.approx(need.parameters * (need.weight_bytes + each), rel=0.05)
    spec = parse_engine(document(state, dtype=dtype))
    trainer = train_ours(document(state, dtype=dtype), "optimizer-offload", fused=True)[1]
    for arena in (trainer.device_arena, trainer.host_arena):
        for owner in ("optimizer", "staging", "checkpoint"):
            assert arena.used.get(owner, 0) == arena.grants.get(owner, 0)
    assert trainer.snapshot.layout.size <= trainer.plan.checkpoint_bytes
    assert spec.state == trainer.plan.state == state
    assert (f"moments: {state}" in trainer.plan.explain()) is (state != EXACT)
    assert trainer.plan.to_json()["state"] == state


def test_state_on_a_disk_may_be_reduced_too(tmp_path: Path) -> None:
    given = document(INT8, mode=PARAMETER_OFFLOAD, dtype="bfloat16", optimizer={"learningRate": 1e-3})
    expected, theirs = train_ours(given, PARAMETER_OFFLOAD, fused=True)
    need = demand_of(given)
    plan = lay_out_streamed(need, replace(UNLIMITED, disk_bytes=2**30), "", 3)
    trainer = open_trainer(given, plan, tmp_path)
    losses = steps(trainer, STEPS)
    trainer.drain()
    assert losses == expected
    own = dict(theirs.model.named_parameters())
    assert all(torch.equal(each, own[name]) for name, each in trainer.model.named_parameters())
    trainer.close()


@pytest.mark.parametrize("state", [BF16, INT8])
def test_a_run_goes_on_from_its_reduced_moments_wherever_they_are(tmp_path: Path, state: str) -> None:
    whole, claims = with_text(tmp_path / "whole"), with_text(tmp_path / "claims")
    asked: dict[str, Any] = {"optimizer": CONSTANT, "state": state}
    assert start(whole, steps=8, mode="resident", **asked)[0] == 0
    assert start(claims, steps=4, mode="optimizer-offload", **asked)[0] == 0
    code, status, _ = start(claims, steps=8, mode=PARAMETER_OFFLOAD, **asked)
    assert (code, status["resumedFromStep"], status["replayMismatches"]) == (0, 4, 0)
    ours, theirs = weights(claims), weights(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    code, status, log = start(claims, steps=4, mode="resident", optimizer=CONSTANT)
    assert (code, status["resumedFromStep"]) == (0, None)  # exact moments are another run
    assert "belong to another job, or to other settings" in log


@pytest.mark.parametrize("state", [BF16, INT8])
def test_a_step_whose_gradients_are_not_finite_changes_no_moment(state: str) -> None:
    given = document(state)
    spec = parse_engine(given)
    recipe = open_model(spec, None, VOCABULARY, 0)
    plan = make_plan(measure_demand(recipe, spec, CPU), UNLIMITED, "resident")
    trainer = open_trainer(given, plan, Path())
    data = packed()
    trainer.step(data)
    before = {
        name: part.clone() for name, part, _ in trainer.optimizer.atoms() if isinstance(part, torch.Tensor)
    }
    assert any(bool(part.any()) for part in before.values())
    trainer.groups[1].gradients[3] = torch.nan
    norm, _ = trainer.optimizer.step(1e-3)
    trainer.drain()
    assert norm != norm
    after = {name: part for name, part, _ in trainer.optimizer.atoms() if isinstance(part, torch.Tensor)}
    assert all(torch.equal(after[name], part) for name, part in before.items())
    trainer.close()


def test_a_checkpoint_has_whole_blocks_of_codes() -> None:
    assert [elements_of("m-code", 300), elements_of("v-scale", 300), elements_of("m", 300)] == [512, 2, 300]
    assert elements_of("weights", 300) == 300


@pytest.mark.parametrize(
    "optimizer",
    [{"learningRate": 1e-3, "betas": [0.9, 0.999]}, {"learningRate": 1e-3, "name": "ZerothOrder"}],
    ids=["a moment that decays too slowly", "no moments"],
)
def test_what_has_no_such_moments_is_refused(optimizer: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=r"betas\[1\] of at most 0.99"):
        parse_engine(document(INT8, optimizer=optimizer, mode="resident"))
    assert parse_engine(document(EXACT, optimizer=optimizer, mode="resident")).state == EXACT
