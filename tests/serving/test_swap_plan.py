"""Swapping without a model: what every block and slot holds is followed copy by copy, with copies as late as allowed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.workloads.serving.blocks import BlockPool, CopyCost
from busbar.workloads.serving.hosttier import HostTier, Move
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence, State, Step

SIZE = 4
Content = dict[int, tuple[int, ...]]
"""Slot of a block → all tokens up to the one whose keys and values it holds."""


@dataclass
class Memory:
    """The device and the host, and a copier that is behind."""

    device: dict[int, Content] = field(default_factory=dict)
    host: dict[int, Content] = field(default_factory=dict)
    queue: deque[Move] = field(default_factory=deque)
    done: int = 0
    computed: int = 0

    def copy(self, until: int) -> None:
        while self.queue and self.queue[0].number <= until:
            move = self.queue.popleft()
            if move.out:
                self.host[move.slot] = dict(self.device.get(move.block, {}))
            else:
                self.device[move.block] = dict(self.host[move.slot])
            self.done = move.number

    def run(self, step: Step) -> None:
        """Computes a step: every token may look only at what is really in its blocks."""
        self.queue.extend(step.moves)
        self.copy(step.waits_for)
        for chunk in step.chunks:
            tokens, blocks = chunk.sequence.tokens, chunk.sequence.blocks
            for position in range(chunk.start):
                held = self.device[blocks[position // SIZE]][position % SIZE]
                assert held == tuple(tokens[: position + 1])
            for position in range(chunk.start, chunk.start + chunk.count):
                block = self.device.setdefault(blocks[position // SIZE], {})
                block[position % SIZE] = tuple(tokens[: position + 1])
            self.computed += chunk.count


def make(
    blocks: int, host: int, *, prefix_cache: bool = True, budget: int = 16, running: int = 6
) -> Scheduler:
    limits = StepLimits(SIZE, budget, running, prefix_cache=prefix_cache)
    return Scheduler(BlockPool(blocks, SIZE, host), limits)


def advance(scheduler: Scheduler, memory: Memory, behind: int = 0) -> Step:
    """One step; afterwards the copier is `behind` copies late."""
    scheduler.copied(memory.done)
    step = scheduler.plan()
    memory.run(step)
    sampled = {c.sequence: 100 + len(c.sequence.tokens) for c in step.chunks if c.samples}
    scheduler.commit(step, sampled)
    for sequence in sampled:
        if len(sequence.tokens) == sequence.max_total:
            scheduler.finish(sequence)
    if memory.queue:
        memory.copy(memory.queue[-1].number - behind)
    return step


def finish_all(scheduler: Scheduler, memory: Memory, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.idle:
        advance(scheduler, memory)


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.integers(4, 14),
    host=st.integers(0, 12),
    prefix_cache=st.booleans(),
    arrivals=st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 9), st.integers(0, 12), st.integers(0, 2)),
        min_size=1,
        max_size=10,
    ),
    cancels=st.dictionaries(st.integers(0, 40), st.integers(0, 9), max_size=3),
    behind=st.lists(st.integers(0, 6), min_size=1, max_size=9),
)
def test_blocks_hold_what_is_read_from_them_however_late_copies_are(
    blocks: int,
    host: int,
    prefix_cache: bool,
    arrivals: list[tuple[int, int, int, int]],
    cancels: dict[int, int],
    behind: list[int],
) -> None:
    scheduler, memory = make(blocks, host, prefix_cache=prefix_cache), Memory()
    todo = [
        Sequence(i, [kind] * prompt, min(prompt + output, blocks * SIZE))
        for i, (prompt, output, _, kind) in enumerate(arrivals)
    ]
    starts = sorted((delay, i) for i, (_, _, delay, _) in enumerate(arrivals))
    for tick in range(3000):
        while starts and starts[0][0] <= tick:
            scheduler.add(todo[starts.pop(0)[1]])
        victim = cancels.get(tick)
        if victim is not None and victim < len(todo) and victim not in {i for _, i in starts}:
            scheduler.finish(todo[victim])
        if scheduler.idle and not starts:
            break
        # A copier that never catches up would be a broken machine: every ninth step it has.
        advance(scheduler, memory, 0 if tick % 9 == 8 else behind[tick % len(behind)])
        held = {block for s in (*scheduler.running, *scheduler.fetching) for block in s.blocks}
        assert len(held) == scheduler.pool.used == sum(scheduler.pool.held.values())
        assert scheduler.pool.host.used <= host
    assert scheduler.idle
    assert scheduler.pool.free == scheduler.pool.total
    assert all(s.state is State.FINISHED for s in todo)


def pressed(host: int, cost: CopyCost | None = None) -> tuple[Scheduler, Memory, list[Sequence]]:
    """Four sequences of six blocks each in a pool of eight, to their end."""
    scheduler, memory = make(8, host, budget=64), Memory()
    scheduler.pool.cost = cost or CopyCost()
    todo = [Sequence(i, [i] * (8 + i), 24) for i in range(4)]
    finish_all(scheduler, memory, *todo)
    return scheduler, memory, todo


def test_with_a_host_tier_nothing_is_computed_twice() -> None:
    scheduler, memory, todo = pressed(host=32)
    assert scheduler.preemption_count > 0
    assert memory.computed == sum(s.max_total - 1 for s in todo)
    assert scheduler.pool.host.moves_total[True] > 0 < scheduler.pool.host.moves_total[False]


def test_without_one_it_is() -> None:
    scheduler, memory, todo = pressed(host=0)
    assert scheduler.preemption_count > 0
    assert memory.computed > sum(s.max_total - 1 for s in todo)


def test_where_computing_is_cheaper_than_copying_nothing_is_copied() -> None:
    scheduler, memory, todo = pressed(32, CopyCost(block_s=1.0, token_s=0.1))
    assert scheduler.pool.host.moves_total == {True: 0, False: 0}
    assert memory.computed > sum(s.max_total - 1 for s in todo)


def test_a_short_last_block_is_not_copied_where_only_full_ones_pay() -> None:
    pool = BlockPool(2, SIZE, host_blocks=4)
    pool.cost = CopyCost(block_s=1.0, token_s=0.6)  # two copies take as long as 3.3 tokens
    full, part = pool.take(2)
    pool.name(full, b"full")
    pool.name(part, b"part", 3)
    pool.give_back([full, part])
    pool.take(2)
    assert pool.locate([b"full"]) == [None]
    assert pool.locate([b"part"]) == []
    moves, waits_for = pool.take_moves()
    assert [(move.block, move.out) for move in moves] == [(full, True)]
    assert waits_for == moves[0].number


def test_what_is_evicted_next_is_copied_ahead_once() -> None:
    pool = BlockPool(4, SIZE, host_blocks=8)
    blocks = pool.take(3)
    for block in blocks:
        pool.name(block, bytes((block,)))
    pool.give_back(blocks)
    for _ in range(2):
        pool.copy_ahead()
    moves, waits_for = pool.take_moves()
    assert [move.block for move in moves] == blocks[::-1]
    assert waits_for == 0
    pool.host.done(moves[-1].number)
    pool.take(4)  # evicts all three, and waits for nobody
    assert pool.take_moves() == ((), 0)


def test_an_idle_conversation_goes_to_the_host_before_a_running_one_is_preempted_and_comes_back() -> None:
    scheduler, memory = make(8, 16, budget=64), Memory()
    first = Sequence(0, list(range(12)), 14)
    finish_all(scheduler, memory, first)
    finish_all(scheduler, memory, Sequence(1, [50] * 28, 32))  # the whole pool
    assert scheduler.preemption_count == 0
    before = memory.computed
    again = Sequence(2, [*first.tokens, 9, 9], 17)
    finish_all(scheduler, memory, again)
    assert again.cached == 12
    assert memory.computed - before == 17 - 1 - 12


def test_others_go_on_while_a_sequence_fetches() -> None:
    scheduler, memory = make(8, 16, budget=64), Memory()
    finish_all(scheduler, memory, Sequence(0, list(range(12)), 13))
    finish_all(scheduler, memory, Sequence(1, [50] * 28, 29))
    other, back = Sequence(2, [60] * 4, 20), Sequence(3, [*range(12), 1], 16)
    scheduler.add(other)
    advance(scheduler, memory)
    scheduler.add(back)
    for _ in range(3):  # the copies are not done
        step = advance(scheduler, memory, behind=99)
        assert [c.sequence for c in step.chunks] == [other]
        assert back.state is State.FETCHING
    memory.copy(99)
    assert {c.sequence for c in advance(scheduler, memory).chunks} == {other, back}


def test_what_is_about_to_be_fetched_is_not_overwritten() -> None:
    host = HostTier(2)
    host.save(1, b"a")
    host.save(2, b"b")
    host.keep([b"a", b"b"])
    host.save(3, b"c")  # finds no slot
    assert host.fetch(b"a", 4) == 3
    host.keep([])
    host.save(3, b"c")
    assert [(m.slot, m.out) for m in host.take_planned()] == [(0, True), (1, True), (0, False), (0, True)]
    assert not host.has(b"a") or not host.has(b"b")
