"""Inputs of blocks in host memory until backward: every bit that of the plain loop, and two of them on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training.plain_loop import train_plainly
from tests.training.small import GPT2, LLAMA, SEQUENCE, SEQUENCES, VOCABULARY, engine
from tests.training.test_bit_equality import CPU, STEPS, assert_equal_to_plain, batches, packed, train_ours

from busbar.workloads.machine.streams import CallerStream, Event, Streams, WorkerStream
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training.choice import make_plan
from busbar.workloads.training.demand import AUTO, RECOMPUTE, SWAP, Demand, aligned
from busbar.workloads.training.errors import InfeasiblePlan, InvalidJob, OutOfArena
from busbar.workloads.training.input_swap import InputSwap
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.layouts import first_that_fits
from busbar.workloads.training.model import measure_demand, open_model
from busbar.workloads.training.plan import MemoryLimits
from busbar.workloads.training.step_clock import PHASES, StepClock
from busbar.workloads.training.streamed_plan import PARAMETER_OFFLOAD
from busbar.workloads.training.trainer import Trainer

UNLIMITED = MemoryLimits(None, None, True)
DEEP = {**LLAMA, "num_hidden_layers": 6}
LAYERS = 6


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 4096)


def document(**changes: Any) -> dict[str, Any]:
    changes.setdefault("optimizer", {"learningRate": 1e-3, "schedule": "linear", "gradientClip": 0.01})
    changes.setdefault("model", {"config": DEEP})
    return engine(**{"steps": STEPS, "activations": SWAP, **changes})


def demand_of(given: dict[str, Any]) -> Demand:
    spec = parse_engine(given)
    return measure_demand(open_model(spec, None, VOCABULARY, 0), spec, CPU)


@pytest.mark.parametrize(
    ("changes", "placement"),
    [
        ({}, "resident"),
        ({"batch": {"sequences": SEQUENCES, "microBatch": 1}}, "half"),
        ({"model": {"config": {**GPT2, "n_layer": 4}}}, "half"),  # which has dropout in every block
        ({"model": {"config": {**GPT2, "n_layer": 4}}, "dtype": "bfloat16"}, "optimizer-offload"),
        ({"model": {"config": {**DEEP, "tie_word_embeddings": False}}, "loss": "whole"}, PARAMETER_OFFLOAD),
        ({"dtype": "bfloat16", "batch": {"sequences": SEQUENCES, "microBatch": 1}}, PARAMETER_OFFLOAD),
        ({"model": {"config": {**LLAMA, "num_hidden_layers": 1}}}, "resident"),  # whose input stays
        ({"freeze": ["model.embed_tokens.*", "model.layers.0.*"]}, "resident"),
    ],
    ids=[
        "clip",
        "accumulation",
        "dropout",
        "dropout in bfloat16",
        "weights on the host",
        "weights on the host, bfloat16, accumulation",
        "one block",
        "a frozen beginning",
    ],
)
def test_a_swapped_run_equals_a_plain_loop(changes: dict[str, Any], placement: str) -> None:
    given = document(**changes)
    if "freeze" not in changes:
        assert_equal_to_plain(given, placement, fused=True)
        return
    ours, trainer = train_ours(given, placement, fused=True)
    recomputed, other = train_ours({**given, "activations": RECOMPUTE}, placement, fused=True)
    assert ours == recomputed
    theirs = dict(other.model.named_parameters())
    assert all(torch.equal(theirs[name], each) for name, each in trainer.model.named_parameters())


class Late(WorkerStream):
    """A thread whose every copy is late."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.submit(lambda: time.sleep(0.01))
        super().copy(target, source)


@pytest.mark.parametrize("late", ["load", "store"])
def test_a_link_that_is_late_changes_no_bit(late: str) -> None:
    given = document(batch={"sequences": SEQUENCES, "microBatch": SEQUENCES // 2})
    spec = parse_engine(given)
    recipe = open_model(spec, None, VOCABULARY, 0)
    caller = CallerStream()
    queues = {name: Late(name) if name == late else WorkerStream(name) for name in ("load", "store")}
    streams = Streams(queues["load"], caller, caller, queues["store"])
    plan = make_plan(measure_demand(recipe, spec, CPU), UNLIMITED, "resident")
    trainer, data = Trainer(spec, recipe, plan, CPU, swap_streams=streams), packed()
    losses = [trainer.step(data).loss for _ in range(STEPS)]
    trainer.close()
    settings = {**given["optimizer"], "schedule": "linear"}
    micro = given["batch"]["microBatch"]
    expected, theirs = train_plainly(DEEP, VOCABULARY, batches(), micro, settings, fused=True)
    assert losses == expected
    own = dict(trainer.model.named_parameters())
    assert [name for name, weight in theirs.items() if not torch.equal(weight, own[name])] == []


class OnDemand:
    """A queue that does its work when it is waited for, and whose copies take a second each."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[Callable[[], object]] = []

    def submit(self, work: Callable[[], object]) -> None:
        self._waiting.append(work)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def second() -> None:
            target.copy_(source)
            self.now += 1.0

        self.submit(second)

    def record(self) -> Event:
        return _Reached(self)

    def wait(self, event: Event) -> None:
        self.submit(event.wait)

    def synchronize(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()

    def close(self) -> None:
        self.synchronize()


class _Reached(Event):
    def __init__(self, queue: OnDemand) -> None:
        self._queue, self._is_set = queue, False
        queue.submit(self._happen)

    def _happen(self) -> None:
        self._is_set = True

    def wait(self) -> None:
        while not self._is_set:
            self._queue._waiting.pop(0)()

    def is_set(self) -> bool:
        return self._is_set


def test_what_backward_waits_for_inputs_is_told() -> None:
    """In each micro-batch, for the inputs of all blocks but the last."""
    spec = parse_engine(document(batch={"sequences": SEQUENCES, "microBatch": SEQUENCES // 2}))
    recipe = open_model(spec, None, VOCABULARY, 0)
    caller, load = CallerStream(), OnDemand()
    plan = make_plan(measure_demand(recipe, spec, CPU), UNLIMITED, "resident")
    streams = Streams(load, caller, caller, caller)
    trainer = Trainer(spec, recipe, plan, CPU, swap_streams=streams, clock=lambda: load.now)
    told = trainer.step(packed()).seconds
    trainer.close()
    assert told == 2 * (LAYERS - 1)
    assert trainer.clock.seconds == {**dict.fromkeys(PHASES, 0.0), "load": told}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["resident", PARAMETER_OFFLOAD])
def test_the_measured_peaks_are_the_planned_ones(mode: str, dtype: str) -> None:
    given = document(dtype=dtype, mode=mode)
    _, trainer = train_ours(given, mode, fused=True)
    planned, need = trainer.plan, demand_of(given)
    seen = trainer.device_arena.peak["activations"]
    assert 0.95 * planned.device["activations"] < seen <= planned.device["activations"]
    one = aligned(need.micro_batch * SEQUENCE * LLAMA["hidden_size"] * need.weight_bytes)
    assert planned.host["activations"] == (LAYERS - 1) * one
    assert trainer.swap is not None
    assert trainer.swap.used == planned.host["activations"]
    saved = (need.recompute_bytes or 0) - planned.device["activations"]
    assert saved in ((LAYERS - 2) * one, (LAYERS - 1) * one)  # beside a block, beside the logits


def test_auto_swaps_where_nothing_else_fits() -> None:
    need = demand_of(document(activations=AUTO, mode="auto"))
    assert need.swap_bytes is not None
    recomputed = make_plan(replace(need, activations=RECOMPUTE), UNLIMITED, "optimizer-offload")
    enough = replace(UNLIMITED, device_bytes=recomputed.device_bytes)
    found = make_plan(need, enough, "auto")
    assert (found.mode, found.activations) == ("optimizer-offload", RECOMPUTE)
    found = make_plan(need, replace(UNLIMITED, device_bytes=recomputed.device_bytes - 1), "auto")
    assert found.activations == SWAP
    assert "activations: swap, because no layout fits that recomputes them (" in found.explain()


def test_a_job_that_recomputes_is_told_that_swapping_would_help() -> None:
    need = demand_of(document(activations=RECOMPUTE, mode="resident"))
    least = make_plan(replace(need, activations=SWAP), UNLIMITED, "resident").device_bytes
    with pytest.raises(InfeasiblePlan) as refusal:
        make_plan(need, replace(UNLIMITED, device_bytes=least), "resident")
    said = "activations: swap (one more forward pass per step, and inputs of blocks in host memory, equal results)"
    assert said in refusal.value.fixes
    with pytest.raises(InfeasiblePlan, match=r"at best with .*swapped activations"):
        make_plan(
            replace(need, activations=AUTO), replace(UNLIMITED, device_bytes=least // 4), "optimizer-offload"
        )


def test_more_than_was_planned_is_an_error_and_never_silent() -> None:
    caller = CallerStream()
    swap = InputSwap(
        torch.empty(256, dtype=torch.uint8), 1, Streams(caller, caller, caller, caller), StepClock(CPU)
    )
    hidden = torch.ones(65, requires_grad=True) * 1.0
    refused = pytest.raises(OutOfArena, match="need 512 bytes of the host, and their plan has 256")
    with refused, swap.moving(0, [hidden]):
        hidden.square()


def test_a_model_without_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busbar.workloads.training.activations.blocks", lambda model: [])
    with pytest.raises(InvalidJob, match=r"spec.engine.activations: swap is not possible with this Llama"):
        demand_of(document())
    need = demand_of(document(activations=AUTO))
    assert need.swap_bytes is None
    assert first_that_fits(need, UNLIMITED, "auto") is not None
