"""The scheduler and the block pool, without a model: random arrivals, cancels and small pools."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.workloads.serving.blocks import SCRATCH_BLOCK, BlockPool
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence, State, Step


def make(blocks: int, block_tokens: int = 4, budget: int = 16, running: int = 8) -> Scheduler:
    return Scheduler(BlockPool(blocks), StepLimits(block_tokens, budget, running))


def sequence(order: int, prompt: int, output: int) -> Sequence:
    return Sequence(order, [7] * prompt, prompt + output)


def run_step(scheduler: Scheduler) -> Step:
    """Plans, simulates the computation, and ends sequences that have all their tokens."""
    step = scheduler.plan()
    sampled = {c.sequence: 7 for c in step.chunks if c.samples}
    scheduler.commit(step, sampled)
    for done in [s for s in sampled if len(s.tokens) == s.max_total]:
        scheduler.finish(done)
    return step


def check(scheduler: Scheduler, step: Step) -> None:
    """The invariants after every plan."""
    held = [block for s in scheduler.running for block in s.blocks]
    assert len(held) == len(set(held)) == scheduler.pool.used
    assert SCRATCH_BLOCK not in held
    assert all(not s.blocks and s.computed == 0 for s in scheduler.waiting)
    assert step.token_count <= scheduler.limits.max_batched_tokens
    assert len(scheduler.running) <= scheduler.limits.max_running
    for chunk in step.chunks:
        assert chunk.count >= 1
        assert chunk.start == chunk.sequence.computed
        assert len(chunk.sequence.blocks) * scheduler.limits.block_tokens >= chunk.start + chunk.count
    kept = [s.order for s in scheduler.running]
    assert all(victim.order > min(kept) for victim in step.preempted if kept)


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.integers(4, 24),
    budget=st.integers(1, 24),
    running=st.integers(1, 6),
    arrivals=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=12
    ),
    cancels=st.dictionaries(st.integers(0, 40), st.integers(0, 11), max_size=4),
)
def test_everything_ends_and_no_block_stays_behind(
    blocks: int,
    budget: int,
    running: int,
    arrivals: list[tuple[int, int, int]],
    cancels: dict[int, int],
) -> None:
    scheduler = make(blocks, 4, budget, running)
    todo = [sequence(i, prompt, output) for i, (prompt, output, _) in enumerate(arrivals)]
    starts = sorted((delay, i) for i, (_, _, delay) in enumerate(arrivals))
    cancelled: set[int] = set()
    for tick in range(5000):
        while starts and starts[0][0] <= tick:
            scheduler.add(todo[starts.pop(0)[1]])
        victim = cancels.get(tick)
        if victim is not None and victim < len(todo) and victim not in {i for _, i in starts}:
            cancelled.add(victim)
            scheduler.finish(todo[victim])
        if scheduler.idle and not starts:
            break
        step = scheduler.plan()
        check(scheduler, step)
        sampled = {c.sequence: 7 for c in step.chunks if c.samples}
        scheduler.commit(step, sampled)
        for done in [s for s in sampled if len(s.tokens) == s.max_total]:
            scheduler.finish(done)
    assert scheduler.idle
    assert scheduler.pool.free == scheduler.pool.total
    assert all(s.state is State.FINISHED for s in todo)
    assert all(len(s.tokens) == s.max_total for i, s in enumerate(todo) if i not in cancelled)


def test_decoding_goes_before_prompts_and_a_long_prompt_is_split_to_the_budget() -> None:
    scheduler = make(blocks=64, budget=8)
    first = sequence(0, 3, 20)
    scheduler.add(first)
    run_step(scheduler)
    long = sequence(1, 20, 1)
    scheduler.add(long)
    counts = []
    while long.missing > 1 or not long.tokens[20:]:
        step = run_step(scheduler)
        assert step.chunks[0].sequence is first
        counts.append(step.chunks[1].count)
        if step.chunks[1].samples:
            break
    assert counts == [7, 7, 6]


def test_short_prompts_share_one_step() -> None:
    scheduler = make(blocks=64, budget=16)
    for order in range(3):
        scheduler.add(sequence(order, 4, 1))
    assert [c.count for c in scheduler.plan().chunks] == [4, 4, 4]


def test_a_dry_pool_preempts_the_newest_and_keeps_its_tokens() -> None:
    scheduler = make(blocks=4, budget=64)
    old, new = sequence(0, 4, 8), sequence(1, 4, 8)
    scheduler.add(old)
    run_step(scheduler)
    scheduler.add(new)
    run_step(scheduler)
    while not (step := run_step(scheduler)).preempted:
        pass
    assert step.preempted == (new,)
    assert new.state is State.WAITING
    assert len(new.tokens) > 4
    assert old.state is State.RUNNING


def test_a_preempted_sequence_goes_back_to_its_place_in_the_queue() -> None:
    scheduler = make(blocks=4, budget=64)
    for order in range(2):
        scheduler.add(sequence(order, 4, 8))
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(sequence(2, 1, 1))
    for _ in range(40):
        if run_step(scheduler).preempted:
            break
    assert [s.order for s in scheduler.waiting] == [1, 2]


def test_a_sequence_that_cannot_fit_alone_is_refused_and_its_neighbour_is_not() -> None:
    scheduler = make(blocks=4, block_tokens=4)
    with pytest.raises(ValueError, match="does not fit the KV cache of 16 tokens"):
        scheduler.add(sequence(0, 10, 7))
    scheduler.add(sequence(0, 10, 6))


def test_joining_keeps_room_for_those_that_run() -> None:
    scheduler = make(blocks=10, block_tokens=4, budget=64)
    scheduler.add(sequence(0, 32, 4))  # eight blocks
    run_step(scheduler)
    scheduler.add(sequence(1, 8, 1))  # two more would leave no block for growth
    assert scheduler.plan().joined == ()


def test_a_block_given_back_twice_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(RuntimeError, match="given back twice"):
        pool.give_back(blocks)


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.share(block)
    pool.give_back([block])
    assert (pool.free, pool.holders(block)) == (1, 1)
    pool.give_back([block])
    assert pool.free == 2
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share(block)


class Holders:
    """What a pool must do, kept in the plainest way: who holds which block, and what each block was named."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held: list[list[int]] = []
        self.names: dict[int, bytes] = {}
        self.freed: list[int] = []
        """Named blocks without holders, the longest free first."""

    @property
    def used(self) -> set[int]:
        return {block for blocks in self.held for block in blocks}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    total=st.integers(1, 6),
    acts=st.lists(
        st.tuples(st.sampled_from(["take", "share", "back", "name"]), st.integers(0, 7)), max_size=60
    ),
)
def test_no_block_is_lost_or_used_twice_and_the_longest_free_content_goes_first(
    total: int, acts: list[tuple[str, int]]
) -> None:
    pool, model = BlockPool(total), Holders(total)
    for act, number in acts:
        if act == "take" and pool.free:
            count = 1 + number % pool.free
            taken = pool.take(count)
            assert len(set(taken)) == count
            assert SCRATCH_BLOCK not in taken
            assert model.used.isdisjoint(taken)
            lost = [block for block in taken if block in model.freed]
            assert lost == model.freed[: len(lost)]  # the others had no content
            model.freed = model.freed[len(lost) :]
            for block in lost:
                del model.names[block]
            model.held.append(taken)
        elif act == "share" and (known := sorted(model.names)):
            block = known[number % len(known)]
            assert pool.find([model.names[block]]) == [block]
            pool.share(block)
            model.freed = [b for b in model.freed if b != block]
            model.held.append([block])
        elif act == "back" and model.held:
            blocks = model.held.pop(number % len(model.held))
            pool.give_back(blocks)
            gone = [b for b in reversed(blocks) if b not in model.used and b in model.names]
            model.freed += gone
        elif act == "name" and model.used:
            block = sorted(model.used)[number % len(model.used)]
            name = bytes((number,))
            pool.name(block, name)
            if block not in model.names and name not in model.names.values():
                model.names[block] = name
        assert pool.used == len(model.used)
        assert all(pool.holders(b) == sum(b in blocks for blocks in model.held) for b in range(1, total + 1))
        for name in {bytes((n,)) for n in range(8)}:
            assert pool.find([name]) == [b for b, n in model.names.items() if n == name]
    for blocks in model.held:
        pool.give_back(blocks)
    assert pool.free == total
