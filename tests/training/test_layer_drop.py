"""Steps that leave blocks out: those of a plain loop that does so, bit for bit, on every placement, and nothing moves."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.crash import Point, start_gang, train_in_a_process
from tests.training.small import GPT2, LLAMA, SEQUENCES, VOCABULARY, engine, manifest, with_text
from tests.training.test_bit_equality import CPU, STEPS, assert_equal_to_plain, packed, plan_for, train_ours
from tests.training.test_crash_and_resume import assert_same_result
from tests.training.test_parameter_offload import demand_of
from tests.training.test_scratch_disk import on_disk, open_trainer, steps
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.workloads.machine.streams import CallerStream, Streams, WorkerStream
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training.errors import InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.layer_drop import DroppedBlocks
from busbar.workloads.training.model import open_model
from busbar.workloads.training.settings import LayerDrop
from busbar.workloads.training.trainer import Trainer

BLOCKS = 4
DEEP = {**LLAMA, "num_hidden_layers": BLOCKS}
DROP = {"keep": 0.1, "rate": 1.0}
SEED = 259  # with which these steps leave out blocks at both ends and in the middle, all and none
LEFT_OUT = [set(), {0, 1, 2, 3}, {1, 2}, {0}, {1, 3}, {3}]
ALL = 1  # the step without a block


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


def document(**changes: Any) -> dict[str, Any]:
    return engine(**{"steps": STEPS, "model": {"config": DEEP}, "layerDrop": DROP, "seed": SEED, **changes})


def scales_of(given: dict[str, Any]) -> Callable[[int], Sequence[float]] | None:
    """Of a step: how many times each block counts, 0 being that it is left out."""
    if "layerDrop" not in given:
        return None
    keep, rate = given["layerDrop"]["keep"], given["layerDrop"]["rate"]
    config = given["model"]["config"]
    blocks = config.get("num_hidden_layers") or config["n_layer"]

    def scales(step: int) -> Sequence[float]:
        theta = (1 - keep) * math.exp(-rate * step) + keep
        out = LayerDrop(keep, rate).left_out(given.get("seed", 0), step, blocks)
        return [
            0.0 if number in out else 1 / (1 - (number + 1) / blocks * (1 - theta))
            for number in range(blocks)
        ]

    return scales


def equals_plain(
    placement: str,
    frozen: Callable[[str], bool] = lambda name: False,
    streams: Streams | None = None,
    **changes: Any,
) -> None:
    given = document(**changes)
    assert_equal_to_plain(given, placement, True, frozen=frozen, scales=scales_of(given), streams=streams)


def trainer_of(placement: str, **changes: Any) -> Trainer:
    spec = parse_engine(document(**changes))
    recipe = open_model(spec, None, VOCABULARY, 0)
    return Trainer(spec, recipe, plan_for(spec, recipe, placement), CPU)


def test_the_steps_of_these_tests_leave_out_what_they_say() -> None:
    drop = LayerDrop(**DROP)
    assert [drop.left_out(SEED, step, BLOCKS) for step in range(STEPS)] == LEFT_OUT


def test_blocks_are_kept_with_the_probabilities_of_the_paper() -> None:
    drop, steps, kept = LayerDrop(keep=0.5, rate=0.001), range(1000, 5000), [0, 0, 0]
    expected = [0.0, 0.0, 0.0]
    for step in steps:
        theta = 0.5 * math.exp(-0.001 * step) + 0.5
        out = drop.left_out(7, step, 3)
        for number in range(3):
            kept[number] += number not in out
            expected[number] += 1 - (number + 1) / 3 * (1 - theta)
            assert drop.probability(step, number, 3) == pytest.approx(1 - (number + 1) / 3 * (1 - theta))
    for seen, meant in zip(kept, expected, strict=True):
        assert seen == pytest.approx(meant, abs=4 * math.sqrt(len(steps)) / 2)  # four standard deviations
    assert drop.left_out(7, 0, 3) == frozenset()


def test_seeds_and_steps_differ_and_the_same_ones_do_not() -> None:
    drop = LayerDrop(keep=0.5, rate=0.1)
    found = {(seed, step): drop.left_out(seed, step, 24) for seed in range(4) for step in range(50, 60)}
    assert len(set(found.values())) == len(found)
    assert all(drop.left_out(seed, step, 24) == out for (seed, step), out in found.items())


@pytest.mark.parametrize("placement", ["resident", "half", "optimizer-offload", "parameter-offload"])
@pytest.mark.parametrize("schedule", ["gated", "blocking"])
def test_a_plain_loop_that_leaves_out_the_same_has_the_same_bits(placement: str, schedule: str) -> None:
    equals_plain(placement, schedule=schedule)


@pytest.mark.parametrize("placement", ["half", "parameter-offload"])
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"learningRate": 1e-3, "gradientClip": 0.01, "schedule": "linear"}},
        {"batch": {"sequences": SEQUENCES, "microBatch": 1}},
        {"activations": "recompute"},
        {"activations": "swap"},
        {"model": {"config": {**GPT2, "n_layer": BLOCKS}}},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "gradientSums": "float32", "activations": "swap"},
    ],
    ids=[
        "a clip that bites",
        "four micro-batches",
        "recomputed",
        "swapped",
        "dropout",
        "bfloat16",
        "float32 sums",
    ],
)
def test_so_it_has_with_everything_else(changes: dict[str, Any], placement: str) -> None:
    equals_plain(placement, **changes)


@pytest.mark.parametrize("placement", ["half", "parameter-offload"])
@pytest.mark.parametrize(
    "patterns",
    [["model.layers.[01].*", "lm_head.*"], ["model.embed_tokens.*", "model.norm.*", "model.layers.*.mlp.*"]],
    ids=["a beginning", "all around the blocks, so that a step may have nothing to train"],
)
def test_frozen_parts_may_be_left_out(patterns: list[str], placement: str) -> None:
    names = [each.replace("lm_head", "model.embed_tokens") for each in patterns]  # which are tied
    equals_plain(placement, lambda name: any(fnmatchcase(name, each) for each in names), freeze=patterns)


class Late(WorkerStream):
    """A thread whose every copy is late."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.submit(lambda: time.sleep(0.01))
        super().copy(target, source)


def test_state_is_not_loaded_before_it_has_come_home() -> None:
    queues = Streams(WorkerStream("load"), CallerStream(), WorkerStream("update"), Late("store"))
    frozen = [
        "model.embed_tokens.*"
    ]  # so that what stands behind the blocks is all that a step without them has
    equals_plain(
        "optimizer-offload",
        lambda name: fnmatchcase(name, frozen[0]),
        streams=queues,
        schedule="gated",
        freeze=frozen,
    )


@pytest.mark.parametrize("state", ["exact", "int8"])
def test_state_on_a_disk_has_the_same_bits(state: str, tmp_path: Path) -> None:
    given = document(state=state, schedule="gated")
    expected, theirs = train_ours(given, "resident", True)
    trainer = open_trainer(
        given, on_disk(demand_of(given), 2), tmp_path
    )  # of the last block and what stands behind
    assert steps(trainer, STEPS) == expected
    trainer.drain()
    weights = dict(theirs.model.named_parameters())
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, weights[name]), name
    kept = STEPS - sum(BLOCKS - 1 in out for out in LEFT_OUT)
    sizes = {
        name: sum(
            chunk.state.numel() * 4 for chunk in trainer.optimizer.chunks if chunk.flat.group.name == name
        )
        for name in trainer.plan.on_disk
    }
    assert trainer.optimizer.loaded_bytes == STEPS * sizes["head"] + kept * sizes["block-3"]
    trainer.close()


@pytest.mark.parametrize("placement", ["resident", "optimizer-offload"])
def test_what_is_left_out_stays_as_it_is_and_does_not_move(placement: str) -> None:
    trainer, data = trainer_of(placement), packed()
    for step in range(STEPS):
        names = {f"block-{number}" for number in LEFT_OUT[step]}
        before = {flat.group.name: flat.weights.clone() for flat in trainer.groups}
        states = [(chunk, torch.as_tensor(chunk.state).clone()) for chunk in trainer.optimizer.chunks]
        moved = trainer.optimizer.loaded_bytes, trainer.optimizer.stored_bytes
        trainer.step(data)
        trainer.drain()
        for flat in trainer.groups:
            assert torch.equal(flat.weights, before[flat.group.name]) == (flat.group.name in names)
            assert not flat.gradients.any()
        for chunk, state in states:
            assert torch.equal(chunk.state, state) == (chunk.flat.group.name in names)  # type: ignore[arg-type]
        kept = sum(
            chunk.state.numel() * 4
            for chunk in trainer.optimizer.chunks
            if chunk.flat.group.name not in names and placement != "resident"
        )
        assert trainer.optimizer.loaded_bytes - moved[0] == kept
        assert trainer.optimizer.stored_bytes - moved[1] == kept
    trainer.close()


def test_weights_on_the_host_that_are_left_out_do_not_move() -> None:
    trainer, data = trainer_of("parameter-offload"), packed()
    assert trainer.blocks is not None
    traffic = trainer.blocks.traffic
    size = trainer.groups[1].weights.numel() * 4
    outer = sum(flat.weights.numel() * 4 for flat in trainer.groups if not flat.group.size.is_block)
    for step in range(STEPS):
        before = traffic.loaded, traffic.collected
        trainer.step(data)
        trainer.drain()
        kept, parts = BLOCKS - len(LEFT_OUT[step]), 2  # micro-batches
        assert traffic.collected - before[1] == outer + parts * kept * size
        if (
            step == ALL
        ):  # nothing but the first blocks of the next step is loaded, and what stands around the blocks
            assert traffic.loaded - before[0] <= outer + len(trainer.blocks._slots) * size
    trainer.close()


@pytest.mark.parametrize("activations", ["keep", "recompute", "swap"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_has_the_peak_of_a_step_with_all_blocks(activations: str, dtype: str) -> None:
    trainer = trainer_of("resident", activations=activations, dtype=dtype)
    assert not trainer.step(packed()).skipped
    planned, seen = trainer.plan.device["activations"], trainer.device_arena.peak["activations"]
    assert 0.95 * planned < seen <= planned
    trainer.close()


@pytest.mark.parametrize("placement", ["resident", "parameter-offload"])
def test_evaluation_has_all_blocks(placement: str) -> None:
    trainer, data = trainer_of(placement), packed()
    for _ in range(ALL + 1):
        trainer.step(data)
    trainer.drain()
    assert trainer.drop is not None
    assert trainer.drop.left_out == LEFT_OUT[ALL]
    given: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, **DEEP}
    make: Any = AutoModelForCausalLM.from_config
    plain = make(AutoConfig.for_model(given.pop("model_type"), **given)).eval()
    plain.load_state_dict(trainer.model.state_dict())
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        ours, theirs = trainer.model.eval()(input_ids=tokens), plain(input_ids=tokens)
    assert torch.equal(ours.logits, theirs.logits)
    trainer.close()


def test_it_belongs_to_a_runs_identity() -> None:
    whole, dropping = engine(steps=STEPS), engine(steps=STEPS, layerDrop={})
    assert parse_engine(dropping).identity != parse_engine(whole).identity
    usual = engine(steps=STEPS, layerDrop={"keep": 0.5, "rate": 0.001})
    assert parse_engine(dropping).identity == parse_engine(usual).identity


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = layer(given)
        return given


class Pair(nn.Linear):
    def forward(self, given: torch.Tensor) -> Any:
        return super().forward(given), None


SHARED = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear(4, 4), "has no list of blocks"),
        (Stack(SHARED, nn.Sequential(SHARED)), "has blocks that share weights"),
        (Stack(nn.Linear(4, 4), Pair(4, 4)), "do not make one tensor"),
        (Stack(nn.Linear(4, 8), nn.Linear(8, 4)), "change the shape"),
    ],
)
def test_a_model_without_such_blocks_is_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(InvalidJob, match=says):
        compute(model)


def compute(model: nn.Module) -> None:
    DroppedBlocks(model, LayerDrop(0.5, 0.001), 0)
    model(torch.zeros(2, 4))


WIDE: dict[str, Any] = {
    "model": {"config": DEEP},
    "batch": {
        "sequences": SEQUENCES,
        "microBatch": SEQUENCES // 2,
    },  # one leaf of the tree for each of two ranks
    "parallelism": {"order": "fixed"},
    "layerDrop": {"keep": 0.3, "rate": 0.2},
}


def test_a_run_that_was_killed_and_gangs_end_with_the_same_bits(tmp_path: Path) -> None:
    whole, killed = (with_text(tmp_path / name) for name in ("whole", "killed"))
    assert train_in_a_process(manifest(**WIDE), whole) == 0
    assert train_in_a_process(manifest(**WIDE), killed, Point("trainer:Trainer", "step", 10)) == -9
    assert train_in_a_process(manifest(**WIDE, mode="resident"), killed) == 0  # elsewhere
    assert_same_result(killed, whole)
    for sharding in ("optimizer", "gradients"):
        given = manifest(**{**WIDE, "parallelism": {"order": "fixed", "sharding": sharding}})
        given["spec"]["shape"] = {"minPods": 2, "maxPods": 2}
        gang = with_text(tmp_path / sharding)
        assert start_gang([given] * 2, gang, {}).exit_codes() == [0, 0]
        assert_same_result(gang, whole)


def test_a_run_with_its_weights_on_the_host_goes_on_from_one_without(tmp_path: Path) -> None:
    changes = {key: value for key, value in WIDE.items() if key != "parallelism"}
    whole, moved = (with_text(tmp_path / name) for name in ("whole", "moved"))
    assert train_in_a_process(manifest(**changes), whole) == 0
    assert train_in_a_process(manifest(**changes), moved, Point("trainer:Trainer", "step", 10)) == -9
    assert train_in_a_process(manifest(**changes, mode="parameter-offload"), moved) == 0
    assert_same_result(moved, whole)
    kept = sorted(moved.glob("out/**/manifest.json"))
    assert json.loads(kept[-1].read_text())["body"]["missedUpdates"]
    assert (
        json.loads((whole / "status.json").read_text()).get("report") is None
    )  # its steps are not those of whole models
