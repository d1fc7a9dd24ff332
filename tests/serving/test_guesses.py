"""Prompt lookup, the decision what to check, and the scheduler's part of it, without a model."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence
from busbar.workloads.serving.speculation import (
    KNOWN_STEPS,
    LEAST_CHANCE,
    MATCH,
    MOST_AT_ONCE,
    TRIAL_STEPS,
    Guesser,
    Lookup,
    Rate,
    Speculation,
)


def slow_lookup(tokens: list[int], most: int) -> list[int]:
    """What `Lookup` should say."""
    last = tokens[-MATCH:]
    places = [i for i in range(MATCH, len(tokens)) if tokens[i - MATCH : i] == last]
    if len(tokens) < MATCH or not places:
        return []
    whole = list(tokens)
    for i in range(most):
        whole.append(whole[places[-1] + i])
    return whole[len(tokens) :]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    most=st.integers(0, 9),
)
def test_a_lookup_finds_the_latest_place_however_the_tokens_come(
    tokens: list[int], parts: list[int], most: int
) -> None:
    lookup, end = Lookup(), 0
    for part in parts:
        end = min(end + part, len(tokens))
        assert lookup.propose(tokens[:end], most) == slow_lookup(tokens[:end], most)


def test_a_long_prompt_is_read_in_pieces() -> None:
    tokens = [*range(3 * MOST_AT_ONCE), 5, 6, 7]
    tokens += [*range(20_000, 20_000 + MOST_AT_ONCE), 5, 6, 7, 1, 5, 6, 7]
    lookup = Lookup()
    found = [lookup.propose(tokens, 1) for _ in range(5)]
    assert found == [[8], [8], [8], [20_000], [1]]


def test_large_ids_are_told_apart() -> None:
    high = 2**21 - 1
    assert Lookup().propose([0, high, 0, 5, high, 0, 0, 6, 0, high, 0], 2) == [5, high]


def speculation_with(step_s: float, row_s: float, decoding: int) -> Speculation:
    """One that has seen steps of this batch size."""
    found = Speculation(7)
    for step in range(4 * KNOWN_STEPS):
        found.costs.learn(decoding, 100 * decoding, step % 5, step_s + row_s * (step % 5))
    return found


def guessers(*rates: float, guesses: int = 7) -> list[Guesser]:
    return [Guesser(Rate(rate, 1.0, 0.9), Rate(rate, 1.0, 0.9), guesses=[1] * guesses) for rate in rates]


def test_likely_guesses_are_checked_as_deep_as_their_rows_are_worth() -> None:
    speculation = speculation_with(0.01, 0.0005, 1)
    assert [speculation.depths(guessers(rate), 1, 100) for rate in (1.0, 0.8, 0.5)] == [[7], [7], [2]]
    assert speculation.depths(guessers(LEAST_CHANCE / 2), 1, 100) == [0]


def test_nothing_is_checked_where_a_row_costs_as_much_as_a_token() -> None:
    """A processor at its limit: time is proportional to rows, so no guess wins, whatever its chance."""
    speculation = speculation_with(0.032, 0.002, 16)
    assert speculation.depths(guessers(*[0.99] * 16), 16, 1600) == [0] * 16


def test_the_same_guesses_are_checked_alone_and_not_in_a_large_batch() -> None:
    alone, large = speculation_with(0.013, 0.001, 1), speculation_with(0.075, 0.001, 64)
    assert alone.depths(guessers(0.6), 1, 100)[0] > 0
    assert large.depths(guessers(0.6), 64, 6400) == [0]


def test_in_one_batch_rows_go_to_those_whose_guesses_are_right() -> None:
    good, bad = speculation_with(0.03, 0.0006, 16).depths(guessers(0.95, 0.25), 16, 1600)
    assert (good, bad) == (7, 0)


def test_no_guess_makes_a_step_longer_than_promised() -> None:
    """Two rows fit, whoever they are for."""
    speculation = speculation_with(0.01, 0.0002, 4)
    assert speculation.depths(guessers(0.9, 0.9), 4, 400) == [7, 7]
    speculation.limit_s = 0.0105
    assert sum(speculation.depths(guessers(0.9, 0.9), 4, 400)) == 2
    speculation.limit_s = 0.005  # the step is too long already, so nothing is tried either
    for _ in range(TRIAL_STEPS + 1):
        assert speculation.depths(guessers(0.9, 0.9), 4, 400) == [0, 0]


def test_before_anything_is_measured_likely_guesses_are_checked() -> None:
    assert Speculation(7).depths(guessers(0.5), 1, 0) == [2]
    other_size = speculation_with(0.032, 0.002, 16)
    assert other_size.depths(guessers(0.5), 1, 0) == [2]


def test_likely_guesses_are_tried_again_after_a_while() -> None:
    """What a row costs may have changed, and steps without guesses do not tell."""
    speculation = speculation_with(0.032, 0.002, 16)
    found = [speculation.depths(guessers(0.9, 0.3), 16, 1600) for _ in range(2 * TRIAL_STEPS)]
    assert [i for i, each in enumerate(found) if any(each)] == [TRIAL_STEPS - 1, 2 * TRIAL_STEPS - 1]
    assert found[-1] == [1, 0]


def test_what_is_not_checked_is_learned_too() -> None:
    speculation = Speculation(7)
    guesser = speculation.guesser()
    for _ in range(50):
        guesser.guesses = [1, 2, 3]
        speculation.learn(guesser, 0, [9])
    assert guesser.rate.value < 0.1
    assert (speculation.drafts_total, speculation.proposed_total) == (0, 0)
    assert speculation.guesser().rate.value < 0.1  # others begin with as little hope
    for _ in range(60):
        guesser.guesses = [1, 2, 3]
        speculation.learn(guesser, 0, [1])
    assert guesser.rate.value > 0.9


def test_tokens_without_a_guess_are_none_that_was_guessed_right() -> None:
    speculation = Speculation(3)
    guesser = speculation.guesser()
    for _ in range(40):
        guesser.guesses = []
        speculation.learn(guesser, 0, [1])
    assert guesser.rate.value == 0.5
    assert guesser.hits.value < 0.1


def test_right_and_wrong_guesses_are_counted() -> None:
    speculation = Speculation(7)
    guesser = speculation.guesser()
    guesser.guesses = [1, 2, 3, 4]
    before = guesser.rate.value
    speculation.learn(guesser, 3, [1, 2, 9])
    assert (speculation.drafts_total, speculation.proposed_total, speculation.accepted_total) == (1, 3, 2)
    assert guesser.rate.value > before


# -- the scheduler ------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    blocks=st.integers(4, 24),
    budget=st.integers(1, 24),
    running=st.integers(1, 6),
    cache=st.booleans(),
    arrivals=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 6)), min_size=1, max_size=10
    ),
    seed=st.integers(0, 3),
)
def test_guesses_keep_to_budget_and_free_blocks_and_leave_nothing_behind(
    blocks: int, budget: int, running: int, cache: bool, arrivals: list[tuple[int, int, int]], seed: int
) -> None:
    """The same requests end with the same number of tokens, and never does one wait or lose blocks for a guess."""
    rng = random.Random(seed)
    scheduler = Scheduler(BlockPool(blocks), StepLimits(4, budget, running, prefix_cache=cache))
    asked = [Sequence(i, [7] * p, p + o) for i, (p, o, _) in enumerate(arrivals)]
    asked = [s for s in asked if s.max_total <= scheduler.capacity_tokens]
    for each in asked:
        scheduler.add(each)
    accepted = 0
    while not scheduler.idle:
        decoding = [s for s in scheduler.running if s.missing == 1]
        wishes = {s: [7] * min(rng.randrange(6), s.max_total - len(s.tokens) - 1) for s in decoding}
        step = scheduler.plan(None, wishes)
        guesses = [c for c in step.chunks if c.guess is not None]
        assert step.token_count <= budget
        assert not (guesses and step.preempted)
        for chunk in step.chunks:
            assert len(chunk.sequence.blocks) * 4 >= chunk.start + chunk.count
        scheduler.commit(step, {c.sequence: 7 for c in step.chunks if c.samples and c.guess is None})
        for sequence in dict.fromkeys(c.sequence for c in guesses):
            own = [c for c in guesses if c.sequence is sequence]
            assert [c.start for c in own] == list(range(sequence.computed, sequence.computed + len(own)))
            for _ in range(rng.randrange(len(own) + 1)):
                scheduler.accept(sequence, 7)
                accepted += 1
            scheduler.roll_back(sequence)
            assert len(sequence.blocks) == -(-sequence.computed // 4)
            assert sequence.missing == 1
        for done in [s for s in scheduler.running if len(s.tokens) == s.max_total]:
            scheduler.finish(done)
    assert scheduler.pool.used == 0
    assert all(len(s.tokens) == s.max_total for s in asked)


def test_a_guess_takes_no_block_that_others_need() -> None:
    scheduler = Scheduler(BlockPool(4), StepLimits(4, 16, 4))
    first, second = Sequence(0, [7] * 4, 16), Sequence(1, [7] * 4, 16)
    for each in (first, second):
        scheduler.add(each)
    scheduler.commit(scheduler.plan(), {first: 7, second: 7})
    step = scheduler.plan(None, {first: [7] * 8, second: [7] * 8})
    # Each has its fifth token's block; the two places behind a block are all that guesses get.
    assert [(c.sequence.order, c.start) for c in step.chunks if c.guess is not None] == [
        (order, place) for order in (0, 1) for place in (5, 6, 7)
    ]
    assert scheduler.pool.free == 0
    assert not step.preempted
