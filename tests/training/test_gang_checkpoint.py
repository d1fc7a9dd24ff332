"""Checkpoints that several ranks write and other numbers of ranks read; damage that all of them pass over alike."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.gang import run_gang
from tests.training.small import GPT2
from tests.training.test_ranks import case, make_trainer, packed

from busbar.workloads.training.async_checkpoint import Saver
from busbar.workloads.training.checkpoint import CheckpointFolder
from busbar.workloads.training.errors import CheckpointError
from busbar.workloads.training.gang_folder import GangFolder
from busbar.workloads.training.loaded import read, shard_name
from busbar.workloads.training.meeting import StoreMeeting
from busbar.workloads.training.ranks import Alone, Gang, Ranks
from busbar.workloads.training.trainer import Trainer

DOCUMENT = case(dtype="bfloat16", model={"config": GPT2})  # dropout, and three tensors of state per weight


@dataclass(frozen=True)
class Task:
    """Go on from `source` (None: start) up to step `until`, and save to `target` (None: do not)."""

    source: Path | None
    until: int
    target: Path | None = None
    damage: str = ""
    order: str = "fixed"
    sharding: str = "optimizer"


@dataclass(frozen=True)
class Outcome:
    losses: dict[int, float]
    weights: dict[str, torch.Tensor]
    passed_over: tuple[str, ...] = ()
    failed: str = ""


def spoil_disk(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def go(ranks: Ranks, open_folder: Callable[[Path], CheckpointFolder], task: Task) -> Outcome:
    document = {**DOCUMENT, "parallelism": {"order": task.order, "sharding": task.sharding}}
    trainer, data, losses = make_trainer(document, ranks), packed(document), dict[int, float]()
    passed_over: tuple[str, ...] = ()
    if task.source is not None:
        found = open_folder(task.source).newest()
        passed_over = found.passed_over
        if found.checkpoint is not None:
            trainer.restore(found.checkpoint)
    while trainer.done < task.until:
        result = trainer.step(data)
        losses[result.step] = result.loss
    trainer.drain()
    failed = ""
    if task.target is not None:
        failed = save(trainer, ranks, open_folder(task.target), task)
    weights = {name: whole.clone() for name, _, whole in trainer.weights()}
    trainer.close()
    return Outcome(losses, weights, passed_over, failed)


def save(trainer: Trainer, ranks: Ranks, folder: CheckpointFolder, task: Task) -> str:
    saver = Saver(folder, trainer.snapshot, {}, lambda: None, lambda *_: None, ranks.gather)
    if task.damage == "disk" and ranks.rank == 1:
        setattr(folder, "_write_own", spoil_disk)  # noqa: B010
    try:
        saver.save(trainer.done, trainer.counters())
        saver.drain()
    except CheckpointError as problem:
        return str(problem)
    assert saver.durable_step == trainer.done
    return ""


def go_in_gang(gang: Gang, meeting: StoreMeeting, tasks: list[Task]) -> list[Outcome]:
    def open_folder(path: Path) -> GangFolder:
        return GangFolder(path, 2, gang, meeting, f"session-{next(numbers)}")

    numbers = iter(range(100))
    return [go(gang, open_folder, task) for task in tasks]


def alone(task: Task) -> Outcome:
    torch.set_num_threads(1)  # also in a fixture of the module
    return go(Alone(), lambda path: CheckpointFolder(path, 2), task)


def damaged(source: Path, kind: str) -> Path:
    """A copy with a newer checkpoint, of step 4, in which a file of rank 1 is damaged."""
    copy = source.parent / f"{source.name}-{kind}"
    shutil.copytree(source, copy)
    newer = copy / "step-00000004"
    shutil.copytree(copy / "step-00000002", newer)
    state = newer / shard_name(1, 2)
    match kind:
        case "flipped":
            data = bytearray(state.read_bytes())
            data[-100] ^= 1
            state.write_bytes(bytes(data))
        case "truncated":
            state.write_bytes(state.read_bytes()[:-4096])
        case "missing":
            state.unlink()
        case "of another save":
            shutil.copy(newer / "state-0-of-2.json", newer / "state-1-of-2.json")
        case "without a manifest":
            (newer / "manifest.json").unlink()
    return copy


DAMAGE = ("flipped", "truncated", "missing", "of another save", "without a manifest")


@pytest.fixture(scope="module")
def whole() -> Outcome:
    return alone(Task(None, 4))


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "by-one"
    alone(Task(None, 2, folder))
    return folder


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("two")
    tasks = [Task(None, 2, place / "by-two"), Task(None, 1, place / "full", "disk")]
    tasks += [Task(None, 2, place / "divided", sharding="parameters")]
    for outcomes in run_gang(2, go_in_gang, tasks, place / "ranks"):
        assert "rank 1: [Errno 28] No space left on device" in outcomes[1].failed
    assert list((place / "full").glob("*step*")) == []  # neither a checkpoint nor what was begun
    return place / "by-two"


@pytest.fixture(scope="module")
def of_four(by_one: Path, by_two: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Outcome]]:
    """Each rank's outcomes: from two, from one, and from each kind of damage. The first is saved again."""
    place = tmp_path_factory.mktemp("four")
    tasks = [Task(by_two, 4, place / "by-four"), Task(by_one, 4)]
    tasks += [Task(damaged(by_two, kind), 3) for kind in DAMAGE]
    tasks += [Task(by_two, 3, place / "at-three")]
    tasks += [Task(by_two.with_name("divided"), 4, sharding="gradients")]
    tasks += [Task(by_two, 4, sharding="parameters")]
    outcomes: list[list[Outcome]] = run_gang(4, go_in_gang, tasks, place / "ranks")
    return outcomes


def assert_continues(found: Outcome, whole: Outcome) -> None:
    assert found.losses == {step: whole.losses[step] for step in (3, 4)}
    assert [name for name in whole.weights if not torch.equal(found.weights[name], whole.weights[name])] == []


def test_two_ranks_write_and_one_goes_on(by_two: Path, whole: Outcome) -> None:
    assert_continues(alone(Task(by_two, 4)), whole)


def test_two_ranks_write_and_four_go_on(of_four: list[list[Outcome]], whole: Outcome) -> None:
    for outcomes in of_four:
        assert_continues(outcomes[0], whole)


def test_divided_weights_of_two_ranks_go_on_in_one_process(by_two: Path, whole: Outcome) -> None:
    assert_continues(alone(Task(by_two.with_name("divided"), 4)), whole)


def test_two_ranks_that_divide_weights_write_and_four_that_divide_gradients_go_on(
    of_four: list[list[Outcome]], whole: Outcome
) -> None:
    for outcomes in of_four:
        assert_continues(outcomes[-2], whole)


def test_two_ranks_write_whole_weights_and_four_that_divide_them_go_on(
    of_four: list[list[Outcome]], whole: Outcome
) -> None:
    first, *others = (outcomes[-1] for outcomes in of_four)
    assert_continues(first, whole)  # where all weights were gathered
    assert all(other.losses == first.losses for other in others)


def test_one_writes_and_four_ranks_go_on(of_four: list[list[Outcome]], whole: Outcome) -> None:
    for outcomes in of_four:
        assert_continues(outcomes[1], whole)


def test_four_ranks_write_and_two_go_on(
    of_four: list[list[Outcome]], whole: Outcome, tmp_path_factory: pytest.TempPathFactory, by_two: Path
) -> None:
    place = tmp_path_factory.mktemp("four-to-two")
    written = next(by_two.parent.parent.glob("four*/by-four"))
    for (outcome,) in run_gang(2, go_in_gang, [Task(written, 4)], place):
        assert outcome.losses == {}
        assert all(torch.equal(outcome.weights[name], each) for name, each in whole.weights.items())


def test_four_ranks_write_three_go_on_and_one_after_them(
    of_four: list[list[Outcome]], whole: Outcome, tmp_path_factory: pytest.TempPathFactory, by_two: Path
) -> None:
    """Three ranks cannot share a fixed order: the sums of order fast may differ from it in their last bits."""
    place = tmp_path_factory.mktemp("four-to-three")
    written = next(by_two.parent.parent.glob("four*/at-three"))
    tasks = [Task(written, 3, place / "again", order="fast"), Task(written, 4, order="fast")]
    for again, further in run_gang(3, go_in_gang, tasks, place / "ranks"):
        assert again.failed == ""
        assert further.losses == {4: pytest.approx(whole.losses[4], rel=1e-6)}
    before, after = (read(folder / "step-00000003") for folder in (written, place / "again"))
    assert before.names == after.names
    differ = [name for name in before.names if not torch.equal(before.tensor(name), after.tensor(name))]
    assert differ in ([], ["rng/cpu"])
    assert alone(Task(place / "again", 4)).losses == {4: whole.losses[4]}


@pytest.mark.parametrize("kind", DAMAGE)
def test_all_ranks_pass_over_what_one_cannot_read(
    kind: str, of_four: list[list[Outcome]], whole: Outcome
) -> None:
    outcomes = [outcome[2 + DAMAGE.index(kind)] for outcome in of_four]
    assert {outcome.passed_over for outcome in outcomes} == {outcomes[0].passed_over}
    assert len(outcomes[0].passed_over) == 1
    assert all(outcome.losses == {3: whole.losses[3]} for outcome in outcomes)


def test_a_rank_writes_its_share_alone(by_two: Path, by_one: Path) -> None:
    sizes = [(by_two / "step-00000002" / shard_name(rank, 2)).stat().st_size for rank in (0, 1)]
    one = (by_one / "step-00000002/state.safetensors").stat().st_size
    assert max(sizes) < 0.75 * one  # small groups have more padding than weights
    assert one < sum(sizes) < 1.15 * one
