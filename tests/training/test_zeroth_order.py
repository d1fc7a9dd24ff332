"""Training without a backward pass: a plain loop's bits wherever the weights are, in the memory that was planned."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.small import LLAMA, SEQUENCE, SEQUENCES, VOCABULARY, engine
from tests.training.test_bit_equality import CPU, batches, packed
from tests.training.test_parameter_offload import LARGE, UNLIMITED, demand_of

from busbar.workloads.training import demand as demand_module
from busbar.workloads.training.activations import LiveBytes
from busbar.workloads.training.async_checkpoint import Saver
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.directions import Direction
from busbar.workloads.training.errors import InfeasiblePlan, InvalidJob
from busbar.workloads.training.groups import make_groups
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.packing import Packed
from busbar.workloads.training.plan import MemoryPlan
from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD
from busbar.workloads.training.trainer import Trainer
from busbar.workloads.training.zeroth_plan import SIGN_BYTES

STEPS = 6
OPTIMIZER = {"name": "ZerothOrder", "learningRate": 1e-3, "schedule": "constant", "gradientClip": None}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


def document(optimizer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return engine(
        **{"steps": STEPS, "mode": "auto", "optimizer": {**OPTIMIZER, **(optimizer or {})}, **changes}
    )


def open_trainer(given: dict[str, Any], plan: MemoryPlan) -> Trainer:
    spec = parse_engine(given)
    return Trainer(spec, open_model(spec, None, VOCABULARY, 0), plan, CPU)


def train(given: dict[str, Any], mode: str, count: int = STEPS) -> tuple[list[float], Trainer]:
    trainer, data = open_trainer(given, make_plan(demand_of(given), UNLIMITED, mode)), packed()
    losses = [trainer.step(data).loss for _ in range(count)]
    trainer.drain()
    trainer.close()
    return losses, trainer


class PlainLoop:
    """Whole models at the two points, made one after the other from master weights in fp32."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.spec = parse_engine(given)
        recipe = open_model(self.spec, None, VOCABULARY, 0)
        self.model = recipe.build().eval()
        self.low = recipe.dtype == torch.bfloat16
        self.groups = make_groups(self.model)
        self.masters = {name: p.detach().float().clone() for name, p in self.model.named_parameters()}

    def signs(self, step: int) -> dict[str, torch.Tensor]:
        direction = Direction(self.spec.seed, step)
        return {
            member.name: direction.signs(index, member.start, member.parameter.numel(), CPU).view(
                member.parameter.shape
            )
            for index, group in enumerate(self.groups)
            for member in group.members
        }

    def rounded(self, master: torch.Tensor) -> torch.Tensor:
        """Half away from zero, as the engine's split masters are."""
        if not self.low:
            return master
        return (((master.view(torch.int32) + 0x8000) >> 16) << 16).view(torch.float32)

    def loss(self, tokens: torch.Tensor, signs: dict[str, torch.Tensor], distance: float) -> float:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(signs[name] * distance + self.rounded(self.masters[name]))
            total = torch.zeros(())
            parts = torch.split(tokens, self.spec.batch.micro_batch)
            for part in parts:
                total += self.model(input_ids=part, labels=part).loss / len(parts)
        return float(total)

    def step(self, step: int, tokens: torch.Tensor) -> float:
        settings, signs = self.spec.optimizer, self.signs(step)
        ahead, behind = (self.loss(tokens, signs, each * settings.perturbation) for each in (1, -1))
        slope = (ahead - behind) / (2 * settings.perturbation)
        if settings.gradient_clip is not None:
            slope = max(-settings.gradient_clip, min(settings.gradient_clip, slope))
        for name, master in self.masters.items():
            decay = settings.weight_decay if master.ndim >= 2 else 0.0
            rate = settings.learning_rate
            master.mul_(1.0 - rate * decay).add_(signs[name], alpha=-rate * slope)
        return float((torch.tensor(ahead) + torch.tensor(behind)) / 2)


@pytest.mark.parametrize("mode", ["resident", PARAMETER_OFFLOAD])
@pytest.mark.parametrize(
    ("name", "optimizer", "changes"),
    [
        ("one micro-batch", {}, {"batch": {"sequences": SEQUENCES, "microBatch": SEQUENCES}}),
        ("four micro-batches", {}, {"batch": {"sequences": SEQUENCES, "microBatch": 1}}),
        ("a clip that bites", {"gradientClip": 0.01}, {}),
        ("decay and a far point", {"weightDecay": 0.5, "perturbation": 0.01}, {}),
        ("untied head", {}, {"model": {"config": {**LLAMA, "tie_word_embeddings": False}}}),
        ("bfloat16", {"perturbation": 0.01, "learningRate": 1e-4}, {"dtype": "bfloat16"}),
        ("another seed", {}, {"seed": 3}),
    ],
)
def test_it_equals_a_plain_loop_under(
    name: str, optimizer: dict[str, Any], changes: dict[str, Any], mode: str
) -> None:
    given = document(optimizer, **changes)
    losses, trainer = train(given, mode)
    plain = PlainLoop(given)
    assert losses == [plain.step(step, tokens) for step, tokens in enumerate(batches()[:STEPS])]
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter.detach().float(), plain.rounded(plain.masters[name])), name
    assert trainer.optimizer.updates == STEPS


def test_the_loss_of_a_text_that_repeats_itself_falls() -> None:
    given = document({"learningRate": 1e-3, "weightDecay": 0.0}, steps=120)
    trainer = open_trainer(given, make_plan(demand_of(given), UNLIMITED, "resident"))
    data = Packed.cut(np.tile(np.arange(16, dtype=np.uint32), 4000), SEQUENCE, 0, SEQUENCES)
    losses = [trainer.step(data).loss for _ in range(120)]
    assert sum(losses[-10:]) < sum(losses[:10]) - 10 * 0.3
    trainer.close()


def test_a_model_ten_times_the_device_memory_trains_to_the_bits_of_the_resident_run() -> None:
    given = document(model={"config": LARGE}, batch={"sequences": 4, "microBatch": 1})
    need = demand_of(given)
    given["deviceMemory"] = f"{need.model_bytes // 10}"
    plan = make_plan(need, replace(UNLIMITED, device_bytes=need.model_bytes // 10), "auto")
    assert (plan.mode, plan.why_mode) == (PARAMETER_OFFLOAD, "the device has no room for all weights")
    trainer, data = open_trainer(given, plan), packed()
    losses = [trainer.step(data).loss for _ in range(2)]
    trainer.close()
    resident, whole = train(given, "resident", 2)
    assert losses == resident
    assert trainer.device_arena.peak_bytes <= need.model_bytes // 10
    assert trainer.device_arena.peak_bytes <= 0.4 * whole.device_arena.peak_bytes
    with_moments = make_plan(demand_of(engine(mode="auto", model={"config": LARGE})), UNLIMITED, "resident")
    assert whole.device_arena.peak_bytes < 0.4 * with_moments.device_bytes


@pytest.mark.parametrize("mode", ["resident", PARAMETER_OFFLOAD])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_measured_peak_is_within_five_percent_of_the_plan(mode: str, dtype: str) -> None:
    given = document(dtype=dtype, model={"config": {**LLAMA, "num_hidden_layers": 6}})
    _, trainer = train(given, mode, 1)
    assert 0.95 * trainer.plan.device_bytes < trainer.device_arena.peak_bytes <= trainer.plan.device_bytes
    for owner in ("parameters", "optimizer", "moved"):
        for arena in (trainer.device_arena, trainer.host_arena):
            assert arena.used.get(owner, 0) == arena.grants.get(owner, 0), owner


def test_a_checkpoint_continues_to_the_same_bits_with_the_weights_elsewhere(tmp_path: Path) -> None:
    given = document({"perturbation": 0.01}, dtype="bfloat16")
    need = demand_of(given)
    expected, whole = train(given, "resident")
    first, data = open_trainer(given, make_plan(need, UNLIMITED, "resident")), packed()
    assert [first.step(data).loss for _ in range(3)] == expected[:3]
    first.drain()
    saver = Saver(CheckpointFolder(tmp_path, 1), first.snapshot, {}, lambda: None, lambda *_: None)
    saver.save(3, first.counters())
    assert first.step(data).loss == expected[3]  # while it is written: an update waits for the copy
    saver.drain()
    first.close()
    loaded = CheckpointFolder(tmp_path, 1).newest().checkpoint
    assert loaded is not None
    assert {name.partition("/")[0] for name in loaded.names} == {"weights", "low", "rng"}
    for mode in ("resident", PARAMETER_OFFLOAD):
        other = open_trainer(given, make_plan(need, UNLIMITED, mode))
        other.restore(loaded)
        assert [other.step(data).loss for _ in range(3)] == expected[3:]
        for (name, ours), theirs in zip(
            other.model.named_parameters(), whole.model.parameters(), strict=True
        ):
            assert torch.equal(ours, theirs), name
        other.close()


@pytest.mark.parametrize("mode", ["resident", PARAMETER_OFFLOAD])
def test_a_slope_that_is_not_finite_changes_nothing_and_is_counted(mode: str) -> None:
    given = document()
    trainer, data = open_trainer(given, make_plan(demand_of(given), UNLIMITED, mode)), packed()
    trainer.step(data)
    trainer.drain()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    loss = trainer.loss
    setattr(trainer, "loss", lambda *parts: loss(*parts) * math.nan)  # noqa: B010
    assert trainer.step(data).skipped
    setattr(trainer, "loss", loss)  # noqa: B010
    trainer.drain()
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert (trainer.optimizer.skipped, trainer.optimizer.updates) == (1, 1)
    assert not trainer.step(data).skipped
    trainer.close()


@pytest.mark.parametrize("mode", ["resident", PARAMETER_OFFLOAD])
def test_an_adapter_is_trained_beside_weights_that_stay(mode: str, tmp_path: Path) -> None:
    whole = parse_engine(document())
    base = open_model(whole, None, VOCABULARY, 0).build()
    save: Any = base
    save.save_pretrained(tmp_path)
    given = document(model={"uri": "pvc://base"}, tokenizer={"uri": "pvc://base"}, adapter={"rank": 4})
    spec = parse_engine(given)
    recipe = open_model(spec, tmp_path, VOCABULARY, 0)
    trainer = Trainer(spec, recipe, make_plan(measure_demand(recipe, spec, CPU), UNLIMITED, mode), CPU)
    data = packed()
    trained = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    for _ in range(2):
        trainer.step(data)
    trainer.drain()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, trained[name]) is not parameter.requires_grad, name
    trainer.close()


def test_what_it_has_not_is_refused_with_a_sentence() -> None:
    need = demand_of(document())
    with pytest.raises(InvalidJob, match="ZerothOrder is not possible here: it has no state that mode"):
        make_plan(need, UNLIMITED, "optimizer-offload")
    with pytest.raises(InvalidJob, match="ZerothOrder is not possible here: it runs in one process"):
        make_plan(replace(need, ranks=2), UNLIMITED, "auto")
    with pytest.raises(InfeasiblePlan, match=r"mode resident does not fit.*What would help: mode: auto"):
        make_plan(need, replace(UNLIMITED, device_bytes=need.model_bytes), "resident")
    wrong: tuple[dict[str, Any], ...] = ({"scratchDisk": "1Gi"}, {"activations": "recompute"})
    for changes in (*wrong, {"mode": "optimizer-offload"}):
        with pytest.raises(InvalidJob, match="has no state that could move and keeps no activations"):
            parse_engine(document(**changes))


def test_a_direction_is_the_same_however_it_is_cut_and_differs_by_step_group_and_seed() -> None:
    whole = Direction(5, 7).signs(2, 0, 4096, CPU)
    assert set(whole.tolist()) == {-1.0, 1.0}
    parts = [Direction(5, 7).signs(2, start, 96, CPU) for start in range(0, 4032, 96)]
    assert torch.equal(torch.cat(parts), whole[:4032])
    for other in (Direction(6, 7).signs(2, 0, 4096, CPU), Direction(5, 8).signs(2, 0, 4096, CPU)):
        assert abs(float(whole @ other)) / 4096 < 0.06
    assert abs(float(whole @ Direction(5, 7).signs(3, 0, 4096, CPU))) / 4096 < 0.06


def test_telling_signs_takes_what_the_plan_says() -> None:
    count = 2**16
    with LiveBytes([]) as live:
        signs = Direction(1, 2).signs(0, 0, count, CPU)
    assert signs.numel() == count
    assert 0.9 * SIGN_BYTES * count < live.peak <= SIGN_BYTES * count


def test_directions_have_mean_zero_and_no_correlation() -> None:
    signs = torch.stack([Direction(1, step).signs(0, 0, 2**16, CPU) for step in range(64)])
    count = signs.numel()
    assert abs(float(signs.mean())) < 4 / math.sqrt(count)
    for shift in (1, 2, 31, 32, 1024):
        assert abs(float((signs[:, shift:] * signs[:, :-shift]).mean())) < 4.5 / math.sqrt(count), shift
    between = (signs @ signs.T / 2**16 - torch.eye(64)).abs().max()
    assert float(between) < 5 / math.sqrt(2**16)
