"""Priorities order the requests of one key, and move nobody else's turn."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.workloads.serving.ageing import MOST_OVERTAKEN
from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence

OWNERS = [Owner("a", "1"), Owner("a", "2"), Owner("b", "1")]
ALONE = OWNERS[0]


def make(blocks: int = 64, budget: int = 8, running: int = 1) -> Scheduler:
    return Scheduler(BlockPool(blocks), StepLimits(4, budget, running))


def sequence(order: int, priority: int, owner: Owner = ALONE, prompt: int = 6, output: int = 3) -> Sequence:
    return Sequence(order, [7] * prompt, prompt + output, owner=owner, priority=priority)


def joined_until_idle(scheduler: Scheduler) -> list[Sequence]:
    """Those that join, in order, while everything runs to its end."""
    found: list[Sequence] = []
    for _ in range(10_000):
        if scheduler.idle:
            return found
        step = scheduler.plan()
        found += step.joined
        sampled = {chunk.sequence: 7 for chunk in step.chunks if chunk.samples}
        scheduler.commit(step, sampled)
        for done in [s for s in sampled if len(s.tokens) == s.max_total]:
            scheduler.finish(done)
    raise AssertionError("something never ends")


def test_the_smallest_number_of_a_key_is_first_then_the_first_come() -> None:
    scheduler = make()
    asked = [sequence(order, priority) for order, priority in enumerate([0, 5, -3, 0, -3, 5])]
    for each in asked:
        scheduler.add(each)
    assert [asked.index(s) for s in joined_until_idle(scheduler)] == [2, 4, 0, 3, 1, 5]


def test_what_runs_is_not_stopped_for_a_smaller_number() -> None:
    scheduler = make()
    scheduler.add(first := sequence(0, 5))
    scheduler.plan()
    scheduler.add(sequence(1, -5))
    step = scheduler.plan()
    assert [chunk.sequence for chunk in step.chunks] == [first]
    assert not step.preempted


ASKED = st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(-2, 2)), min_size=1, max_size=14)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(asked=ASKED, running=st.integers(1, 4), budget=st.integers(4, 20), blocks=st.integers(8, 40))
def test_no_number_moves_a_turn_between_keys(
    asked: list[tuple[Owner, int]], running: int, budget: int, blocks: int
) -> None:
    """Requests of equal size, so that only the order within a key can differ; also under preemption everything ends."""

    def turns(with_priority: bool) -> list[Owner]:
        scheduler = make(64, budget, running)
        for order, (owner, priority) in enumerate(asked):
            scheduler.add(sequence(order, priority if with_priority else 0, owner))
        found = joined_until_idle(scheduler)
        assert {s.order for s in found} == set(range(len(asked)))
        assert scheduler.pool.used == 0
        return [s.owner for s in found]

    assert turns(with_priority=True) == turns(with_priority=False)
    scheduler = make(blocks, budget, running)
    for order, (owner, priority) in enumerate(asked):
        scheduler.add(sequence(order, priority, owner, prompt=2 + order, output=8))
    assert {s.order for s in joined_until_idle(scheduler)} == set(range(len(asked)))
    assert scheduler.pool.used == 0


def turns_until(scheduler: Scheduler, late: Sequence, numbers: list[int]) -> int:
    """How many of ALONE's requests begin from when `late` comes until it does, while in every step another one of each
    number comes."""
    order = itertools.count(late.order + 1)
    scheduler.add(late)
    begun = 0
    for _ in range(1_000):
        for number in numbers:
            scheduler.add(sequence(next(order), number))
        step = scheduler.plan()
        begun += sum(s.owner.same(ALONE) for s in step.joined)
        if late in step.joined:
            return begun
        sampled = {chunk.sequence: 7 for chunk in step.chunks if chunk.samples}
        scheduler.commit(step, sampled)
        for done in [s for s in sampled if len(s.tokens) == s.max_total]:
            scheduler.finish(done)
    raise AssertionError("it waits for ever")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    before=st.lists(st.integers(-(10**6), 10**6), max_size=5),
    late=st.integers(-(10**6), 10**6),
    numbers=st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=2),
    running=st.integers(1, 3),
    others=st.integers(0, 3),
)
def test_a_large_number_waits_for_a_bounded_number_of_turns_under_a_stream_of_small_ones(
    before: list[int], late: int, numbers: list[int], running: int, others: int
) -> None:
    scheduler = make(256, 8, running)
    for order, number in enumerate(before):
        scheduler.add(sequence(order, number))
    for order in range(others):
        scheduler.add(sequence(100 + order, 0, OWNERS[2]))
    asked = sequence(200, late)
    assert turns_until(scheduler, asked, numbers) <= (MOST_OVERTAKEN + 1) * (len(before) + 1)


def test_of_eight_turns_seven_are_those_of_the_smallest_number() -> None:
    scheduler = make()
    large = [sequence(order, 9) for order in range(5)]
    small = [sequence(100 + order, 0) for order in range(30)]
    for each in large + small:
        scheduler.add(each)
    begun = joined_until_idle(scheduler)
    assert [i for i, each in enumerate(begun) if each in large] == [7, 15, 23, 31, 34]
    assert [s.came for s in begun if s in large] == list(range(5))
    assert [s.came for s in begun if s in small] == list(range(100, 130))


def test_of_equal_numbers_the_first_that_came_starts_also_after_others_overtook_it() -> None:
    scheduler = make()
    asked = [sequence(order, number) for order, number in enumerate([5, 5, -3])]
    for each in asked:
        scheduler.add(each)
    assert [asked.index(s) for s in joined_until_idle(scheduler)] == [2, 0, 1]
