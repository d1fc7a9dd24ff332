"""Offloaded and resident AdamW equal a plain torch loop bit for bit: every loss, every final weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.plain_loop import train_plainly
from tests.training.small import GPT2, LLAMA, SEQUENCE, SEQUENCES, VOCABULARY, engine

from busbar.workloads.machine.streams import Streams
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.plan import MemoryLimits, MemoryPlan, lay_out
from busbar.workloads.training.trainer import Trainer

STEPS = 6
CPU = torch.device("cpu")


def packed() -> Packed:
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, SEQUENCE * 40).astype(np.uint32)
    return Packed.cut(tokens, SEQUENCE, 0, SEQUENCES)


def plan_for(spec: Any, recipe: Any, placement: str) -> MemoryPlan:
    demand = measure_demand(recipe, spec, CPU)
    if placement == "half":  # some groups have their state on the host, some on the device
        return lay_out(demand, MemoryLimits(None, None, True), "optimizer-offload", len(demand.groups) // 2)
    return make_plan(demand, MemoryLimits(None, None, True), placement)


def train_ours(
    document: dict[str, Any], placement: str, fused: bool, streams: Streams | None = None
) -> tuple[list[float], Trainer]:
    spec = parse_engine(document)
    recipe = open_model(spec, None, VOCABULARY, 0)
    trainer = Trainer(spec, recipe, plan_for(spec, recipe, placement), CPU, fused=fused, streams=streams)
    data = packed()
    losses = [trainer.step(data).loss for _ in range(spec.steps)]
    trainer.close()
    return losses, trainer


def batches(lengths: Sequence[int] = ()) -> list[torch.Tensor]:
    """Whole sequences, but for the `lengths` of the first steps."""
    data = packed()
    every = [*lengths, *[SEQUENCE] * (STEPS - len(lengths))]
    return [
        torch.from_numpy(data.batch(step, SEQUENCES)[:, :length].copy()) for step, length in enumerate(every)
    ]


def assert_equal_to_plain(
    document: dict[str, Any],
    placement: str,
    fused: bool,
    updated: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
    lengths: Sequence[int] = (),
    frozen: Callable[[str], bool] = lambda name: False,
    scales: Callable[[int], Sequence[float]] | None = None,
    streams: Streams | None = None,
) -> None:
    ours, trainer = train_ours(document, placement, fused, streams)
    dtype = torch.bfloat16 if document.get("dtype") == "bfloat16" else torch.float32
    losses, weights = train_plainly(
        document["model"]["config"],
        VOCABULARY,
        batches(lengths),
        document["batch"]["microBatch"],
        document["optimizer"],
        seed=document.get("seed", 0),
        fused=fused or None,
        dtype=dtype,
        updated=updated,
        frozen=frozen,
        scales=scales,
        wide=document.get("gradientSums") == "float32",
    )
    assert ours == losses
    different = [
        name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, weights[name])
    ]
    assert different == []


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks far smaller than a block, so that parameters are cut and slots are reused many times."""
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


@pytest.mark.parametrize("placement", ["resident", "optimizer-offload", "half", "parameter-offload"])
@pytest.mark.parametrize("fused", [False, True], ids=["loop-kernel", "fused-kernel"])
def test_every_placement_equals_a_plain_loop(placement: str, fused: bool) -> None:
    assert_equal_to_plain(engine(steps=STEPS), placement, fused)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("no clipping", {"optimizer": {"learningRate": 1e-3, "gradientClip": None}}),
        ("a clip that bites", {"optimizer": {"learningRate": 1e-3, "gradientClip": 0.01}}),
        ("cosine", {"optimizer": {"learningRate": 1e-3, "warmupSteps": 2, "schedule": "cosine"}}),
        ("one micro-batch", {"batch": {"sequences": SEQUENCES, "microBatch": SEQUENCES}}),
        ("four micro-batches", {"batch": {"sequences": SEQUENCES, "microBatch": 1}}),
        ("untied head", {"model": {"config": {**LLAMA, "tie_word_embeddings": False}}}),
        ("another architecture, with dropout", {"model": {"config": GPT2}}),
        ("bfloat16 with fp32 masters", {"dtype": "bfloat16"}),
    ],
)
def test_offload_equals_a_plain_loop_under(name: str, changes: dict[str, Any]) -> None:
    document = engine(steps=STEPS)
    for key, value in changes.items():
        document[key] = value
    document["optimizer"].setdefault("gradientClip", 1.0)
    document["optimizer"].setdefault("schedule", "linear")
    assert_equal_to_plain(document, "optimizer-offload", fused=True)


def test_the_state_really_travels_through_the_staging_slots() -> None:
    _, trainer = train_ours(engine(steps=3), "optimizer-offload", fused=True)
    state = 3 * sum(chunk.state.numel() * 4 for chunk in trainer.optimizer.chunks)
    assert len(trainer.optimizer.chunks) > 3 * trainer.plan.slots
    assert trainer.optimizer.loaded_bytes == trainer.optimizer.stored_bytes == state
    assert trainer.device_arena.used["optimizer"] == 0
    assert trainer.host_arena.used["optimizer"] == trainer.plan.host["optimizer"]


def test_a_resident_run_moves_nothing() -> None:
    _, trainer = train_ours(engine(steps=3), "resident", fused=True)
    assert trainer.optimizer.loaded_bytes == trainer.optimizer.stored_bytes == 0
    assert trainer.host_arena.used["optimizer"] == 0


def test_weights_and_gradients_live_in_the_device_arena() -> None:
    _, trainer = train_ours(engine(steps=3), "optimizer-offload", fused=True)
    regions = trainer.device_arena.regions
    for parameter in trainer.model.parameters():
        assert parameter.grad is not None
        for tensor, owner in ((parameter, "parameters"), (parameter.grad, "gradients")):
            first = regions[owner].data_ptr()
            assert first <= tensor.data_ptr() < first + regions[owner].numel()


def test_activations_stay_within_what_the_plan_reserved() -> None:
    _, trainer = train_ours(engine(steps=3), "resident", fused=True)
    seen, reserved = trainer.device_arena.peak["activations"], trainer.plan.device["activations"]
    assert 0.7 * reserved < seen <= reserved
