"""Weights on the host: a model ten times as large as `deviceMemory`, every bit that of the plain loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training.plain_loop import train_plainly
from tests.training.small import GPT2, LLAMA, SEQUENCE, SEQUENCES, VOCABULARY, engine
from tests.training.test_bit_equality import CPU, STEPS, assert_equal_to_plain, batches, packed, plan_for

from busbar.workloads.training import demand as demand_module
from busbar.workloads.training.block_slots import BlockSlots, shares_blocks
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.demand import Demand
from busbar.workloads.training.errors import InfeasiblePlan, InvalidJob
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.layouts import first_that_fits
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.plan import MemoryLimits, MemoryPlan, shown_bytes
from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD, lay_out_streamed
from busbar.workloads.training.trainer import Trainer

UNLIMITED = MemoryLimits(None, None, True)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


def document(**changes: Any) -> dict[str, Any]:
    return engine(**{"steps": STEPS, "mode": PARAMETER_OFFLOAD, **changes})


def demand_of(given: dict[str, Any]) -> Demand:
    spec = parse_engine(given)
    return measure_demand(open_model(spec, None, VOCABULARY, 0), spec, CPU)


def run(given: dict[str, Any], plan: MemoryPlan, steps: int = STEPS) -> tuple[list[float], Trainer]:
    spec = parse_engine(given)
    trainer, data = Trainer(spec, open_model(spec, None, VOCABULARY, 0), plan, CPU), packed()
    losses = [trainer.step(data).loss for _ in range(steps)]
    trainer.close()
    return losses, trainer


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("no clipping", {"optimizer": {"learningRate": 1e-3, "gradientClip": None}}),
        ("a clip that bites", {"optimizer": {"learningRate": 1e-3, "gradientClip": 0.01}}),
        ("four micro-batches", {"batch": {"sequences": SEQUENCES, "microBatch": 1}}),
        ("one micro-batch, blocking", {"batch": {"sequences": 4, "microBatch": 4}, "schedule": "blocking"}),
        ("untied head", {"model": {"config": {**LLAMA, "tie_word_embeddings": False}}}),
        ("dropout", {"model": {"config": {**GPT2, "attn_pdrop": 0.3}}}),
        ("one block", {"model": {"config": {**LLAMA, "num_hidden_layers": 1}}}),
        ("bfloat16", {"dtype": "bfloat16", "batch": {"sequences": SEQUENCES, "microBatch": 1}}),
    ],
)
def test_it_equals_a_plain_loop_under(name: str, changes: dict[str, Any]) -> None:
    given = document(**changes)
    given["optimizer"] = {"gradientClip": 1.0, "schedule": "linear", **given["optimizer"]}
    assert_equal_to_plain(given, PARAMETER_OFFLOAD, fused=True)


LARGE = {**LLAMA, "intermediate_size": 448, "num_hidden_layers": 76}


def test_a_model_ten_times_the_device_memory_trains_to_the_bits_of_the_plain_loop() -> None:
    given = document(model={"config": LARGE}, batch={"sequences": 4, "microBatch": 1}, mode="auto")
    need = demand_of(given)
    given["deviceMemory"] = f"{need.model_bytes // 10}"
    limits = MemoryLimits(parse_engine(given).device_memory_bytes, None, True)
    plan = make_plan(need, limits, "auto")
    assert plan.mode == PARAMETER_OFFLOAD
    resident = make_plan(need, UNLIMITED, "resident").device_bytes
    losses, trainer = run(given, plan, steps=2)
    assert trainer.device_arena.peak_bytes <= plan.device_bytes <= need.model_bytes // 10
    assert trainer.device_arena.peak_bytes <= 0.4 * resident
    settings = {**given["optimizer"], "schedule": "constant"}  # the same rates as in the first of many steps
    expected, weights = train_plainly(LARGE, VOCABULARY, batches()[:2], 1, settings, fused=True)
    assert losses == expected
    theirs = dict(trainer.model.named_parameters())
    assert [name for name, weight in weights.items() if not torch.equal(weight, theirs[name])] == []


@pytest.fixture(scope="module")
def need() -> Demand:
    return demand_of(document(model={"config": {**LLAMA, "num_hidden_layers": 12}}, mode="auto"))


def test_auto_says_why_the_weights_are_on_the_host(need: Demand) -> None:
    least = lay_out_streamed(need, UNLIMITED).device_bytes
    plan = make_plan(need, replace(UNLIMITED, device_bytes=least), "auto")
    assert plan.mode == PARAMETER_OFFLOAD
    offloaded = make_plan(replace(need, activations="swap"), UNLIMITED, "optimizer-offload")
    missing = shown_bytes(offloaded.device_bytes - least)
    assert plan.why_mode == f"with the weights on the device {missing} of device memory are missing"
    assert f"2 blocks at a time on the device ({plan.why_mode})" in plan.explain()
    enough = make_plan(need, replace(UNLIMITED, device_bytes=offloaded.device_bytes), "auto")
    assert enough.mode == "optimizer-offload"


@pytest.mark.parametrize("side", ["device_bytes", "host_bytes"])
def test_with_five_percent_less_it_is_refused_and_nothing_is_allocated(side: str, need: Demand) -> None:
    need = replace(need, activations="recompute")
    free = lay_out_streamed(need, replace(UNLIMITED, host_bytes=0))  # with the fewest snapshot buffers
    enough: Any = {side: int(getattr(free, side))}
    assert first_that_fits(need, replace(UNLIMITED, **enough), PARAMETER_OFFLOAD) is not None
    less: Any = {side: int(getattr(free, side) * 0.95)}
    with pytest.raises(InfeasiblePlan, match=r"mode parameter-offload does not fit.*Nothing was allocated"):
        make_plan(need, replace(UNLIMITED, **less), PARAMETER_OFFLOAD)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that are loaded, in that order."""
    found: list[int] = []
    load = BlockSlots._load

    def recorded(slots: BlockSlots, number: int, **how: Any) -> Any:
        before = slots.traffic.loaded
        slot = load(slots, number, **how)
        found.extend([number] * (slots.traffic.loaded > before))
        return slot

    monkeypatch.setattr(BlockSlots, "_load", recorded)
    return found


def test_one_stay_on_the_device_serves_recomputation_and_backward(loads: list[int]) -> None:
    layers = 5
    given = document(model={"config": {**LLAMA, "num_hidden_layers": layers}})
    plan = lay_out_streamed(demand_of(given), UNLIMITED)
    run(given, plan, steps=3)
    up, down = list(range(layers)), list(range(layers))[::-1]
    micro = [*up, *down[2:]]  # the last two are still there when backward begins
    later = micro[2:]  # and the first two when the next micro-batch does
    assert SEQUENCES // parse_engine(given).batch.micro_batch == 2
    step = [*micro, *later]
    assert loads[-2 * len(step) - 2 :] == [*step, *step, 0, 1]  # an update makes all that is there old


def test_more_device_memory_is_slots_and_saves_traffic(loads: list[int]) -> None:
    given = document(model={"config": {**LLAMA, "num_hidden_layers": 5}})
    need = demand_of(given)
    least = lay_out_streamed(need, UNLIMITED)
    slot = least.device["slots"] // 2
    loaded = []
    for more in (0, 2, 9):
        plan = lay_out_streamed(need, replace(UNLIMITED, device_bytes=least.device_bytes + more * slot))
        assert plan.weight_slots == min(5, 2 + more)
        loads.clear()
        losses, _ = run(given, plan, steps=2)
        loaded.append((losses, len(loads)))
    assert len({tuple(losses) for losses, _ in loaded}) == 1
    assert loaded[0][1] > loaded[1][1] > loaded[2][1] == 3 * 5  # at the start, and after each update


def test_parameters_refer_to_their_homes_between_steps() -> None:
    given = document()
    _, trainer = run(given, make_plan(demand_of(given), UNLIMITED, PARAMETER_OFFLOAD), 3)
    regions = trainer.host_arena.regions
    for parameter in trainer.model.parameters():
        assert parameter.grad is not None
        for tensor, owner in ((parameter, "parameters"), (parameter.grad, "gradients")):
            first = regions[owner].data_ptr()
            assert first <= tensor.data_ptr() < first + regions[owner].numel()
    assert trainer.host_arena.used["optimizer"] == trainer.plan.host["optimizer"]


def test_evaluation_runs_through_the_slots() -> None:
    given = document()
    need = demand_of(given)
    tokens = torch.arange(SEQUENCE)[None]
    found = []
    for plan in (make_plan(need, UNLIMITED, "resident"), make_plan(need, UNLIMITED, PARAMETER_OFFLOAD)):
        spec = parse_engine(given)
        trainer = Trainer(spec, open_model(spec, None, VOCABULARY, 0), plan, CPU)
        data = packed()
        trainer.step(data)
        trainer.drain()
        with torch.no_grad():
            found.append([trainer.model.eval()(input_ids=tokens, use_cache=False).logits for _ in range(2)])
        trainer.model.train()
        found[-1].append(torch.tensor(trainer.step(data).loss))
        trainer.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"ranks": 2},
            "it runs in one process, and the job has 2; set shape.maxPods: 1, and remove parallelism",
        ),
        ({"fixed_order": True}, "not in a fixed tree; remove parallelism.order: fixed"),
        ({"activations": "keep"}, "it recomputes activations, .*; remove activations: keep"),
        ({"recompute_bytes": None}, "no list of blocks that can be computed again; take another mode"),
        ({"shared_blocks": True}, "blocks of this model have weights in common; take another mode"),
    ],
)
def test_what_cannot_run_so_is_refused_with_a_sentence(change: dict[str, Any], said: str) -> None:
    need = replace(demand_of(document()), **change)
    with pytest.raises(
        InvalidJob, match=f"spec.engine.mode: parameter-offload is not possible here: .*{said}"
    ):
        make_plan(need, UNLIMITED, PARAMETER_OFFLOAD)
    assert first_that_fits(need, replace(UNLIMITED, device_bytes=1), "auto") is None


def test_kept_activations_are_refused_by_the_manifest() -> None:
    with pytest.raises(
        InvalidJob, match="parameter-offload recomputes activations; remove activations: keep"
    ):
        parse_engine(document(activations="keep"))


def test_weights_that_blocks_share_are_found() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
            self.head = torch.nn.Linear(8, 8)

    model = Model()
    assert not shares_blocks(model)
    model.head.weight = model.layers[0].weight  # type: ignore[assignment]
    assert shares_blocks(model)
    model = Model()
    model.layers[0].weight = model.layers[1].weight
    assert shares_blocks(model)


def test_a_failing_copy_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given = document()
    spec = parse_engine(given)
    recipe = open_model(spec, None, VOCABULARY, 0)
    trainer = Trainer(spec, recipe, plan_for(spec, recipe, PARAMETER_OFFLOAD), CPU)
    data = packed()
    trainer.step(data)

    def fail() -> None:
        raise OSError("the link is gone")

    trainer.streams.load.submit(fail)
    with pytest.raises(OSError, match="the link is gone"):
        _ = [trainer.step(data) for _ in range(2)]
    trainer.streams.store.close()
