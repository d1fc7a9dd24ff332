"""Updates that run beside the next forward pass change no bit, and each block waits for its own update only."""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training.plain_loop import train_plainly
from tests.training.small import GPT2, LLAMA, SEQUENCES, VOCABULARY, engine, manifest, with_text
from tests.training.test_bit_equality import CPU, packed, plan_for

from busbar.workloads.machine.streams import CallerStream, Stream, Streams, WorkerStream
from busbar.workloads.training import demand as demand_module
from busbar.workloads.training import trainer as trainer_module
from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import run_from_manifest
from busbar.workloads.training.gates import Gates
from busbar.workloads.training.groups import FlatGroup, blocks
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.model import open_model
from busbar.workloads.training.ranks import Pending
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.status import Status
from busbar.workloads.training.trainer import Trainer

STEPS = 5


class SlowStream(WorkerStream):
    """A thread that is late by some random time before each work, so that what does not wait for it goes wrong."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._random = random.Random(name)

    def submit(self, work: Callable[[], object]) -> None:
        delay = self._random.choice((0.0, 0.0, 0.001, 0.004))

        def late() -> None:
            time.sleep(delay)
            work()

        super().submit(late)


def slow_streams(*, gated: bool = True) -> Streams:
    caller = CallerStream()
    return Streams(SlowStream("load"), caller, SlowStream("update") if gated else caller, SlowStream("store"))


def make_trainer(
    document: dict[str, Any], placement: str = "optimizer-offload", streams: Streams | None = None
) -> Trainer:
    spec = parse_engine(document)
    recipe = open_model(spec, None, VOCABULARY, 0)
    return Trainer(spec, recipe, plan_for(spec, recipe, placement), CPU, streams=streams)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_module, "MIN_CHUNK", 8192)


CLIPS: dict[str, Any] = {"learningRate": 1e-3, "gradientClip": 0.01, "schedule": "linear"}


@pytest.mark.parametrize("placement", ["resident", "half", "optimizer-offload", "parameter-offload"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "blocking"},
        {"dtype": "bfloat16", "optimizer": CLIPS},
        {"model": {"config": GPT2}, "optimizer": CLIPS},
        {"model": {"config": {**LLAMA, "tie_word_embeddings": False}}, "activations": "recompute"},
    ],
    ids=["gated", "blocking", "bfloat16", "another architecture, with dropout", "untied head, recomputed"],
)
def test_late_streams_change_no_bit(changes: dict[str, Any], placement: str) -> None:
    document = engine(steps=STEPS, **{"schedule": "gated", **changes})
    gated = document.get("schedule") != "blocking"
    trainer = make_trainer(document, placement, slow_streams(gated=gated))
    data = packed()
    ours = [trainer.step(data).loss for _ in range(STEPS)]
    trainer.drain()
    losses, weights = train_plainly(
        document["model"]["config"],
        VOCABULARY,
        [torch.from_numpy(data.batch(step, SEQUENCES)) for step in range(STEPS)],
        document["batch"]["microBatch"],
        document["optimizer"],
        fused=True,
        dtype=torch.bfloat16 if document.get("dtype") == "bfloat16" else torch.float32,
    )
    assert ours == losses
    assert [name for name, p in trainer.model.named_parameters() if not torch.equal(p, weights[name])] == []
    trainer.close()


class HeldStream(WorkerStream):
    """A thread that goes on only when it is let."""

    def __init__(self) -> None:
        super().__init__("held")
        self.let = threading.Semaphore(0)

    def submit(self, work: Callable[[], object]) -> None:
        def held() -> None:
            assert self.let.acquire(timeout=60)
            work()

        super().submit(held)


@contextmanager
def held_trainer() -> Iterator[tuple[Trainer, HeldStream]]:
    update, caller = HeldStream(), CallerStream()
    streams = Streams(WorkerStream("load"), caller, update, WorkerStream("store"))
    trainer = make_trainer(engine(steps=3, schedule="gated"), "resident", streams)
    try:
        yield trainer, update
    finally:
        update.let.release(10_000)
        trainer.close()


def test_a_step_ends_before_its_updates_and_drain_waits_for_them() -> None:
    with held_trainer() as (trainer, update):
        before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        trainer.step(packed())
        assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.named_parameters())
        update.let.release(10_000)
        trainer.drain()
        assert not any(torch.equal(weight, before[name]) for name, weight in trainer.model.named_parameters())


def test_a_block_waits_for_its_own_update_and_not_for_later_ones() -> None:
    with held_trainer() as (trainer, update):
        trainer.step(packed())
        reached, groups = list[str](), [flat.group.name for flat in trainer.groups]
        arrived = [threading.Event() for _ in groups]

        def passed(flat: Any) -> None:
            reached.append(flat.group.name)
            arrived[len(reached) - 1].set()

        setattr(trainer.gates, "_passed", passed)  # noqa: B010
        forward = threading.Thread(
            target=lambda: trainer.model(input_ids=torch.zeros(1, 8, dtype=torch.long))
        )
        forward.start()
        for index, (flat, event) in enumerate(zip(trainer.groups, arrived, strict=True)):
            assert reached == groups[:index]
            chunks = sum(chunk.flat is flat for chunk in trainer.optimizer.chunks)
            update.let.release(
                chunks + 2
            )  # and what a checkpoint copies first, and the gradients, which are set to zero
            assert event.wait(60)
        forward.join(60)
        assert reached == groups == ["embedding", "block-0", "block-1", "head"]


def test_a_model_without_blocks_waits_for_all_of_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    from busbar.workloads.training.arena import Arena
    from busbar.workloads.training.demand import aligned
    from busbar.workloads.training.groups import bind, make_groups

    groups = make_groups(model)
    size = sum(aligned(group.elements * 4) for group in groups)
    flat = bind(groups, Arena("device", {"parameters": size, "gradients": size}, CPU), torch.float32)
    stream: Stream = WorkerStream("update")
    seen = list[str]()
    gates = Gates(model, flat, CallerStream(), lambda each: seen.append(each.group.name))
    model(torch.zeros(1, 4))
    assert seen == []  # nothing is under way
    gates.shut([stream.record() for _ in flat])
    model(torch.zeros(1, 4))
    assert seen == [each.group.name for each in flat]
    stream.close()


class Gathers:
    """What begins and ends for groups of weights, and when blocks compute, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin(self, flat: FlatGroup) -> Pending:
        name = flat.group.name
        self.log.append(f"begin {name}")
        return _Ends(self.log, name)


class _Ends:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"end {self._name}")


@pytest.mark.parametrize("ahead", [False, True])
def test_the_weights_of_a_group_are_gathered_beside_the_group_before(ahead: bool) -> None:
    trainer, gathers = make_trainer(engine(steps=STEPS), "resident"), Gathers()
    log = gathers.log
    model, flat, caller = trainer.model, trainer.groups, CallerStream()
    for number, block in enumerate(blocks(model)):
        block.register_forward_hook(lambda *_, number=number: log.append(f"computed block-{number}"))
    gates = Gates(model, flat, caller, gathers.begin, ahead=ahead)
    for _ in range(2):  # a pass, and another one behind it, of the same weights
        gates.shut([caller.record() for _ in flat])
        log.clear()
        with torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.long))
        behind = [
            f"{what} {name}" for name in ("block-0", "block-1") for what in ("begin", "end", "computed")
        ]
        early = [
            "begin block-0", "end block-0", "begin block-1", "computed block-0",
            "end block-1", "begin head", "computed block-1",
        ]  # fmt: skip
        inner = [each for each in log if "embedding" not in each and each != "end head"]
        assert inner == (early if ahead else [*behind, "begin head"])
        assert sorted(each for each in log if each.startswith("begin")) == sorted(
            f"begin {each.group.name}" for each in flat
        )
        assert log.count("end head") == 1
    trainer.close()


def test_a_failed_update_ends_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(engine(steps=3, schedule="gated"), "optimizer-offload")
    trainer.step(packed())
    trainer.drain()

    def fail(*_: object) -> None:
        raise MemoryError("no memory for the update")

    monkeypatch.setattr(type(trainer.optimizer), "_update", fail)
    trainer.step(packed())
    with pytest.raises(MemoryError, match="no memory for the update"):
        trainer.step(packed())
    trainer.close()


def start(claims: Path, **changes: Any) -> Status:
    status = Status()
    described = run_from_manifest(manifest(**changes), with_text(claims), None, {})
    assert run(described, status, Control(), Lines("small", io.StringIO())) == 0
    return status


def test_checkpoints_and_the_result_hold_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With late streams, saved every few steps, resumed in the other schedule: as in one blocking run."""
    start(tmp_path / "whole", schedule="blocking")
    monkeypatch.setattr(
        trainer_module, "open_streams", lambda device, gated, on_host: slow_streams(gated=gated)
    )
    start(tmp_path / "halves", schedule="gated")
    for step in (8, 12):  # back to the checkpoint of step 4
        folder = tmp_path / f"halves/out/model/checkpoints/step-{step:08d}"
        (folder / "manifest.json").unlink(missing_ok=True)
    status = start(tmp_path / "halves", schedule="gated")
    assert status.to_json()["replayMismatches"] == 0
    first, second = (load_file(tmp_path / run / "out/model/model.safetensors") for run in ("whole", "halves"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_weights_whose_update_is_not_over_are_gathered_when_the_pass_comes_to_them() -> None:
    trainer, gathers = make_trainer(engine(steps=STEPS), "resident"), Gathers()
    log, inner = gathers.log, blocks(trainer.model)
    gates = Gates(trainer.model, trainer.groups, CallerStream(), gathers.begin, ahead=True)
    names = [flat.group.name for flat in trainer.groups]
    events = [threading.Event() for _ in names]
    late = events[names.index("block-1")]
    for event in events:
        if event is not late:
            event.set()

    def computed(*_: Any) -> None:
        log.append("computed block-0")
        late.set()

    inner[0].register_forward_hook(computed)
    inner[1].register_forward_hook(lambda *_: log.append("computed block-1"))
    gates.shut(events)
    with torch.no_grad():
        trainer.model(torch.zeros(1, 8, dtype=torch.long))
    shown = [each for each in log if "embedding" not in each and each != "end head"]
    assert shown == [
        "begin block-0", "end block-0", "computed block-0",
        "begin block-1", "end block-1", "begin head", "computed block-1",
    ]  # fmt: skip
    trainer.close()
