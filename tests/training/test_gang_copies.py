"""Gangs with copies and parities in the memory of their pods: lost ranks come back, to the same bits, without the disk."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar

import pytest
import torch
from tests.free_port import free_port
from tests.training.crash import HURRIED, Point, SupervisedGang, start_supervised_gang, train_in_a_process
from tests.training.small import manifest, with_text
from tests.training.test_crash_and_resume import assert_same_result
from tests.training.test_gang import WIDE, steps

from busbar.workloads.machine.streams import Event
from busbar.workloads.training import gang_copies
from busbar.workloads.training.errors import CheckpointError, NotFinite, RankLost
from busbar.workloads.training.gang import Together
from busbar.workloads.training.gang_copies import GangCopies, Peers
from busbar.workloads.training.layout import Extent, Layout
from busbar.workloads.training.meeting import connect
from busbar.workloads.training.memory_copy import MemoryCopies, Slot
from busbar.workloads.training.parity import Stripes
from busbar.workloads.training.state_file import Block
from busbar.workloads.training.world import World

FROZEN = Point(
    "trainer:Trainer", "step", 8, signal.SIGSTOP
)  # before step 8, with the copy of step 6 in memory
T = TypeVar("T")
Start = Callable[..., SupervisedGang]
IN_MEMORY = "from the copy in the pods' memory"


def wanted(size: int, every: int = 2, parity: int | None = None, **changes: Any) -> dict[str, Any]:
    """12 steps, a copy in memory after every second one, and no checkpoint before the end."""
    document = manifest(**{**WIDE, **changes})
    document["spec"]["shape"] = {"minPods": size, "maxPods": size}
    memory = {"everySteps": every} | ({} if parity is None else {"parity": parity})
    document["spec"]["checkpoint"] = {"everySteps": 1000, "memory": memory}
    return document


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    claims = with_text(tmp_path_factory.mktemp("alone"))
    assert train_in_a_process(manifest(**WIDE), claims) == 0
    return claims


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts gangs of which nothing is left after the test: a process that is stopped would never end."""
    gangs: list[SupervisedGang] = []

    def begin(*given: Any) -> SupervisedGang:
        gangs.append(start_supervised_gang(*given))
        return gangs[-1]

    yield begin
    for gang in gangs:
        gang.end()


TRAINERS = {
    "rank 1 in a forward pass": (1, Point("trainer:Trainer", "_micro_batch", 13)),
    "rank 0 in the exchange": (0, Point("spread:Spread", "_start", 25)),
    "rank 1 in a copy": (1, Point("gang_copies", "write_state", 3)),
    "rank 0 before a copy's manifest": (0, Point("gang_copies", "write_document", 3)),
    "rank 1 while parities are added up": (1, Point("gang_copies", "add_times", 2)),
}


@pytest.mark.parametrize(("rank", "point"), TRAINERS.values(), ids=TRAINERS.keys())
def test_a_trainer_that_is_killed_brings_the_gang_back_from_memory(
    rank: int, point: Point, start: Start, alone: Path, tmp_path: Path
) -> None:
    claims = with_text(tmp_path)
    gang = start(wanted(2), claims, 2, {rank: [point]})
    assert gang.exit_codes() == [0, 0]
    assert "was killed by SIGKILL; another one goes on" in gang.told(rank)
    assert "ended with code 1; another one goes on" in gang.told(1 - rank)
    assert all(IN_MEMORY in gang.log(each) for each in (0, 1))
    assert gang.status(0)["replayMismatches"] == 0
    assert_same_result(claims, alone)


def lose(gang: SupervisedGang, *ranks: int) -> None:
    """Whole pods, which others replace."""
    for rank in ranks:
        gang.lose(rank)
    for rank in ranks:
        gang.start(rank, len(gang.processes))


LOST = {
    "rank 1 of 2": (2, None, (1,), "optimizer"),
    "rank 0 of 2": (2, None, (0,), "parameters"),
    "two of four": (4, 2, (0, 2), "gradients"),
}


@pytest.mark.parametrize(("size", "parity", "ranks", "sharding"), LOST.values(), ids=LOST.keys())
def test_lost_pods_come_back_without_the_disk(
    size: int,
    parity: int | None,
    ranks: tuple[int, ...],
    sharding: str,
    start: Start,
    alone: Path,
    tmp_path: Path,
) -> None:
    claims = with_text(tmp_path)
    document = wanted(size, parity=parity, parallelism={"order": "fixed", "sharding": sharding})
    gang = start(document, claims, size, {rank: [FROZEN] for rank in ranks})
    assert all(map(gang.stops, ranks))
    assert not steps(claims)
    lose(gang, *ranks)
    assert gang.exit_codes() == [0] * size
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    for rank in range(size):
        assert f"in memory was rebuilt for {named} from the others'" in gang.log(rank)
    assert IN_MEMORY in gang.log(0)
    assert gang.status(0)["replayMismatches"] == 0
    assert_same_result(claims, alone)


def test_when_more_pods_are_lost_the_checkpoint_counts(start: Start, alone: Path, tmp_path: Path) -> None:
    claims = with_text(tmp_path)
    document = wanted(4)
    document["spec"]["checkpoint"]["everySteps"] = 4
    gang = start(document, claims, 4, {1: [FROZEN], 3: [FROZEN]})
    assert all(map(gang.stops, (1, 3)))
    lose(gang, 1, 3)
    assert gang.exit_codes() == [0] * 4
    assert IN_MEMORY not in gang.log(0)
    assert "resumed from step 4; 3 finished steps were lost" in gang.log(0)
    assert_same_result(claims, alone)


def test_a_second_loss_after_a_copy_is_survived_too(start: Start, alone: Path, tmp_path: Path) -> None:
    claims = with_text(tmp_path)
    gang = start(wanted(2), claims, 2, {1: [FROZEN]})
    assert gang.stops(1)
    gang.lose(1)
    again = Point("trainer:Trainer", "step", 5, signal.SIGSTOP)  # when a copy has followed another one
    gang.start(1, 2, [again])
    assert gang.stops(1)
    lose(gang, 1)
    assert gang.exit_codes() == [0, 0]
    assert gang.log(0).count("was rebuilt for rank 1 from the others'") == 2
    assert_same_result(claims, alone)


def test_a_rank_that_comes_back_to_a_gang_that_does_not_end_gives_up() -> None:
    world = World(1, 2, "127.0.0.1", free_port())
    store = connect(replace(world, rank=0), timedelta(seconds=10), serve=True)
    store.add("here/1", 1)
    short = replace(HURRIED, join_s=0.5)
    with pytest.raises(RankLost, match="the one that it was lost from goes on without it"):
        Together(world, torch.device("cpu"), short, "x", lambda verdict: None, lambda: None)
    assert b"another one has taken its place" in store.get("left/1")


# The copies alone, with a thread for each rank.


class Thread(Peers):
    """A rank in a thread."""

    def __init__(
        self, rank: int, size: int, barrier: threading.Barrier, board: list[Any], lines: Any
    ) -> None:
        self.rank, self._size, self._barrier, self._board, self._lines = rank, size, barrier, board, lines

    def gather(self, thing: Any) -> list[Any]:
        self._board[self.rank] = pickle.dumps(thing)
        self._barrier.wait()
        found = [pickle.loads(each) for each in self._board]
        self._barrier.wait()
        return found

    def send(self, data: torch.Tensor, to: int) -> None:
        self._lines[self.rank, to].put(data.clone())

    def receive(self, data: torch.Tensor, source: int) -> None:
        data.copy_(self._lines[source, self.rank].get(timeout=30))

    def exchange(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int) -> None:
        self.send(sent, to)
        self.receive(received, source)


class Pods:
    """The memory of each rank's pod, which outlives the gangs of threads that use it."""

    def __init__(self, size: int, parity: int) -> None:
        self.size, self.parity = size, parity
        self.memory = [MemoryCopies() for _ in range(size)]
        self.layouts = [layout_of(rank, size) for rank in range(size)]

    def together(self, session: str, work: Callable[[int, GangCopies], T]) -> list[T]:
        """What `work` returns on each rank of a new gang."""
        barrier, board = threading.Barrier(self.size, timeout=30), [b""] * self.size
        lines = {pair: Queue[torch.Tensor]() for pair in itertools.permutations(range(self.size), 2)}

        def run(rank: int) -> T:
            peers = Thread(rank, self.size, barrier, board, lines)
            return work(rank, GangCopies(self.memory[rank], Stripes(self.size, self.parity), peers, session))

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(run, range(self.size)))

    def write(self, session: str, step: int) -> None:
        self.together(
            session,
            lambda rank, copies: copies.write(
                step, self.layouts[rank], State(self.layouts[rank], content(rank, step)), {"by": "test"}
            ),
        )

    def newest(self) -> tuple[int | None, list[list[str]]]:
        """The step of what every rank finds, whose bytes are checked, and what each was told."""
        found = self.together("later", lambda rank, copies: self._found(rank, copies))
        assert len({step for step, _ in found}) == 1
        return found[0][0], [notes for _, notes in found]

    def _found(self, rank: int, copies: GangCopies) -> tuple[int | None, list[str]]:
        loaded, notes = copies.newest()
        if loaded is None:
            return None, notes
        for entry in self.layouts[rank].entries:
            target = torch.empty(entry.elements, dtype=entry.dtype)
            extent = self.layouts[rank].extents.get(entry.name)
            loaded.read_into(entry.name, 0 if extent is None else extent.start, target)
            wanted = content(rank, loaded.step)[entry.begin : entry.end]
            assert torch.equal(target.view(torch.uint8), wanted)
        states = content(0, loaded.step)[self.layouts[0].entries[-1].begin :]
        assert torch.equal(loaded.tensor("rng/cpu"), states)  # on every rank
        assert loaded.manifest["by"] == "test"
        return loaded.step, notes

    def slot(self, rank: int, step: int) -> Slot:
        return next(slot for slot in self.memory[rank].slots if slot.step == step)

    def lose(self, *ranks: int) -> None:
        for rank in ranks:
            self.memory[rank] = MemoryCopies()


def layout_of(rank: int, size: int) -> Layout:
    """Parts of one tensor that differ in size, and on rank 0 the random states."""
    whole, counts = 0, [5000 + 700 * each for each in range(size)]
    whole = sum(counts)
    tensors = [("m/a", torch.float32, counts[rank])]
    if rank == 0:
        tensors.append(("rng/cpu", torch.uint8, 500))
    extents = {"m/a": Extent(sum(counts[:rank]), whole)}
    return Layout.of(tensors, extents, {"m/a": whole, "rng/cpu": 500})


def content(rank: int, step: int) -> torch.Tensor:
    """The data section of a rank's state; its numbers are finite."""
    size = layout_of(rank, 8).size
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size // 4 + 1, generator=numbers).view(torch.uint8)[:size]


class State:
    """Its blocks."""

    def __init__(self, layout: Layout, data: torch.Tensor) -> None:
        starts = range(0, layout.size, 4096)
        self._blocks = [Block(start, data[start : start + 4096], Done(), data) for start in starts]

    def take(self) -> Block | None:
        return self._blocks.pop() if self._blocks else None

    def give_back(self, block: Block) -> None:
        return


class Done(Event):
    def wait(self) -> None:
        return

    def is_set(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_copies, "PARITY_PIECE_BYTES", 4096 * 2)


@pytest.mark.parametrize(("size", "parity"), [(2, 1), (3, 1), (3, 2), (4, 2), (5, 1)])
def test_any_ranks_that_may_be_lost_have_their_bytes_again(size: int, parity: int) -> None:
    for lost in itertools.combinations(range(size), parity):
        pods = Pods(size, parity)
        pods.write("first", 5)
        pods.write("first", 10)
        pods.lose(*lost)
        step, notes = pods.newest()
        assert step == 10
        assert all("was rebuilt for rank" in told[-1] for told in notes)
        others = [rank for rank in range(size) if rank not in lost][:parity]
        pods.lose(*others)  # what was rebuilt stands in for others at once
        assert pods.newest()[0] == 10


def test_more_ranks_than_parities_leave_nothing() -> None:
    pods = Pods(4, 1)
    pods.write("first", 5)
    pods.lose(1, 2)
    assert pods.newest() == (None, [[]] * 4)
    assert all(
        copies.step is None for copies in pods.memory
    )  # on the others neither: no later gang meets a part


def test_without_parity_a_trainer_is_survived_and_a_pod_is_not() -> None:
    pods = Pods(3, 0)
    pods.write("first", 5)
    assert pods.newest()[0] == 5
    pods.lose(2)
    assert pods.newest()[0] is None


@pytest.mark.parametrize("file", ["state", "parity", "manifest"])
def test_a_damaged_part_is_named_and_rebuilt(file: str) -> None:
    pods = Pods(4, 2)
    pods.write("first", 5)
    path: Path = getattr(pods.slot(1, 5), file)
    damaged = bytearray(path.read_bytes())
    damaged[5000 if file != "manifest" else 50] ^= 1
    path.write_bytes(damaged)
    step, notes = pods.newest()
    assert step == 5
    assert "rebuilt for rank 1" in notes[0][-1]
    if file != "manifest":
        assert "the copy of step 5 in memory" in notes[1][0]
    assert pods.newest() == (5, [[]] * 4)  # it is whole again


def test_a_copy_that_not_all_ranks_finished_is_passed_over_for_the_one_before() -> None:
    pods = Pods(4, 1)
    pods.write("first", 5)
    pods.write("first", 10)
    for rank in (0, 3):
        pods.slot(rank, 10).empty()
    assert pods.newest() == (5, [[]] * 4)
    pods.write("second", 15)  # on every rank in the place of what was passed over
    assert all(sorted(slot.step or 0 for slot in copies.slots) == [5, 15] for copies in pods.memory)
    assert pods.newest()[0] == 15


def test_copies_of_one_step_from_two_sessions_are_not_mixed() -> None:
    pods = Pods(3, 1)
    pods.write("first", 5)
    pods.write("second", 5)
    pods.slot(0, 5).empty()  # that of the first
    assert pods.newest()[0] == 5
    assert {sum(slot.step == 5 for slot in copies.slots) for copies in pods.memory} == {1}
    assert all('"second"' in pods.slot(rank, 5).manifest.read_text() for rank in range(3))


def test_a_rank_whose_state_is_not_finite_fails_the_copy_of_all() -> None:
    pods = Pods(3, 1)
    pods.write("first", 5)

    def write(rank: int, copies: GangCopies) -> str:
        data = content(rank, 10).clone()
        if rank == 1:
            data[:4] = torch.tensor([float("nan")]).view(torch.uint8)
        with pytest.raises(NotFinite) as raised:
            copies.write(10, pods.layouts[rank], State(pods.layouts[rank], data), {})
        return str(raised.value)

    assert all("rank 1: " in told for told in pods.together("first", write))
    assert pods.newest()[0] == 5


def test_a_rank_without_memory_fails_the_copy_of_all_and_blocks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = Pods(3, 1)
    pods.write("first", 5)
    written = os.pwritev

    def fail(file: int, *data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{file}") == os.readlink(pods.memory[2].slots[1].parity):
            raise OSError(12, "Cannot allocate memory")
        return written(file, *data)

    def write(rank: int, copies: GangCopies) -> str:
        with pytest.raises(CheckpointError) as raised:
            copies.write(10, pods.layouts[rank], State(pods.layouts[rank], content(rank, 10)), {})
        return str(raised.value)

    for copies in pods.memory:  # names that differ
        for number, slot in enumerate(copies.slots):
            assert slot.parity != copies.slots[1 - number].parity
    monkeypatch.setattr(os, "pwritev", fail)
    told = pods.together("first", write)
    assert all("Cannot allocate memory" in each for each in told)
    monkeypatch.undo()
    assert pods.newest()[0] == 5
