"""When a draft model guesses, for whom and how deep, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from tests.serving.test_guesses import guessers

from busbar.scheduler.fit.online import OnlineStepModel
from busbar.workloads.serving.drafting import (
    TRIAL_GUESSES,
    VIEW,
    Candidate,
    Drafts,
)
from busbar.workloads.serving.live import Live
from busbar.workloads.serving.sequence import Sequence
from busbar.workloads.serving.speculation import KNOWN_STEPS, TRIAL_STEPS, Guesser, Rate, StepCosts


class Model:
    """Guesses 1, 2, 3, and takes a given time for it."""

    def __init__(self, pass_s: float = 0.0, request_s: float = 0.0, token_s: float = 0.0) -> None:
        self.costs = OnlineStepModel()
        self.seconds = 0.0
        self.lags: dict[Sequence, int] = {}
        self.asked: list[list[int]] = []
        self.budgets: list[int] = []
        for step in range(8 * KNOWN_STEPS if pass_s or request_s or token_s else 0):
            rows, further = step % 5, step % 3 * 10
            self.costs.learn(rows, 0, further, pass_s + rows * request_s + further * token_s)

    def lag(self, sequence: Sequence, guesses: int) -> int | None:
        return self.lags.get(sequence, 1)

    def guess(self, wanted: Mapping[Live, int], budget: int) -> dict[Live, list[int]]:
        self.asked.append(list(wanted.values()))
        self.budgets.append(budget)
        return {live: [1, 2, 3, 4, 5, 6, 7][:depth] for live, depth in wanted.items()}

    def forget(self, sequence: Sequence) -> None:
        self.lags.pop(sequence, None)


def candidates(*rates: float, lag: int = 1, left: int = 100) -> list[Candidate]:
    return [Candidate(rate, 7, lag, left) for rate in rates]


def live_of(rate: float, number: int = 0) -> Live:
    guesser = Guesser(Rate(0.5, 1.0, 0.9), Rate(0.5, 1.0, 0.9), drafting=Rate(rate, 1.0, 0.95))
    sequence = Sequence(number, [1, 2, 3], 100)
    nothing: Any = None
    return Live(str(number), nothing, sequence, nothing, nothing, 0.0, guesser=guesser)


def depths(model: Model, found: list[Candidate], step: StepCosts, wait: bool = False) -> list[int]:
    return Drafts(model, 512).depths(found, 0, len(found), step, wait)


@pytest.mark.parametrize(("pass_s", "expected"), [(0.0005, 7), (0.002, 4), (0.004, 2), (0.02, 0)])
def test_guesses_go_as_deep_as_passes_and_rows_are_worth(pass_s: float, expected: int) -> None:
    """A step of 10 ms and rows of 0.5 ms; a request whose guesses are right nine times in ten."""
    step = StepCosts(1.0, 0.01, 0.0005)
    assert depths(Model(pass_s), candidates(0.9), step) == [expected]


def test_passes_are_dearer_in_a_large_batch_because_rows_are() -> None:
    """A step whose time is that of its rows yields nothing more by guesses, however cheap the draft is."""
    model = Model(0.0001, 0.0001)
    assert depths(model, candidates(*[0.8] * 16), StepCosts(16.0, 0.032, 0.002)) == [0] * 16
    assert depths(model, candidates(0.8), StepCosts(1.0, 0.012, 0.002))[0] > 0


def test_a_pass_is_shared_by_those_whose_guesses_are_likely() -> None:
    model, step = Model(0.002, 0.0001), StepCosts(4.0, 0.02, 0.0002)
    assert depths(model, candidates(0.9, 0.1, 0.9, 0.9), step)[1] == 0
    found = depths(model, candidates(0.95, 0.6, 0.95, 0.95), step)
    assert 0 < found[1] < found[0]
    alone = Drafts(model, 512).passes(candidates(0.5), step)
    assert alone.depths == [0]  # a pass for one of four
    assert min(Drafts(model, 512).passes(candidates(*[0.5] * 4), step).depths) > 0


def test_while_nothing_is_measured_chances_decide() -> None:
    assert depths(Model(), candidates(0.5, 0.1, 0.7), StepCosts(3.0), wait=True) == [2, 0, 4]


def test_where_nobody_waits_all_of_the_batch_must_have_good_guesses() -> None:
    found, step = candidates(0.9, 0.9, 0.1, 0.1), StepCosts(4.0)
    drafts = Drafts(Model(), 512)
    assert drafts.depths(found, 0, 4, step, True) == [7, 7, 0, 0]
    assert drafts.depths(found, 0, 4, step, False) == [0] * 4
    assert drafts.depths(found[:2], 1, 4, step, False) == [0, 0]
    assert drafts.depths(found[:2], 2, 4, step, False) == [7, 7]  # the others have good guesses by lookup


def test_where_nobody_waits_a_small_gain_is_not_worth_the_risk() -> None:
    model, step = Model(0.0025, 0.0001), StepCosts(4.0, 0.02, 0.001)
    assert depths(model, candidates(*[0.65] * 4), step, wait=True) == [1] * 4
    assert depths(model, candidates(*[0.65] * 4), step) == [0] * 4


def test_a_prompt_is_computed_where_the_rest_of_the_answer_is_worth_it() -> None:
    model, step = Model(0.001, 0.0001, 0.001), StepCosts(1.0, 0.01, 0.0005)
    assert depths(model, candidates(0.9, lag=200), step)[0] > 0
    assert depths(model, candidates(0.9, lag=200, left=20), step) == [0]
    assert depths(model, candidates(0.9, lag=20 * VIEW, left=10**6), step) == [0]
    mixed = [*candidates(0.9), *candidates(0.9, lag=20 * VIEW), *candidates(0.9)]
    found = depths(model, mixed, StepCosts(3.0, 0.012, 0.0005), wait=True)
    assert found[1] == 0
    assert min(found[0], found[2]) > 0


def test_no_guess_makes_a_step_longer_than_promised() -> None:
    model = Model(0.001, 0.0, 0.0001)
    assert depths(model, candidates(0.95), StepCosts(1.0, 0.01, 0.0, 0.0135)) == [3]
    drafts = Drafts(model, 512)
    live = live_of(0.95)
    drafts.propose({live: 7}, 0, 1, StepCosts(1.0, 0.01, 0.0, 0.0135), False)
    assert model.budgets == [pytest.approx(35, abs=1)]  # tokens of prompts, too


def test_those_who_are_caught_up_come_first() -> None:
    model = Model()
    first, second = live_of(0.5, 0), live_of(0.9, 1)
    model.lags[first.sequence] = 40
    found = Drafts(model, 512).propose({first: 7, second: 3}, 0, 2, StepCosts(2.0), True)
    assert found == {second: [1, 2, 3], first: [1, 2]}
    assert list(found) == [second, first]


def test_a_draft_that_is_switched_off_is_tried_again_and_again_later() -> None:
    model = Model(0.02)
    drafts, step = Drafts(model, 512), StepCosts(1.0, 0.01)
    live = live_of(0.9)
    tried = []
    for number in range(8 * TRIAL_STEPS):
        if drafts.propose({live: 7}, 0, 1, step, True):
            tried.append(number)
    starts = tried[::TRIAL_GUESSES]
    assert all(asked == [1] for asked in model.asked)
    assert len(starts) == 3
    assert [b - a for a, b in pairwise(starts)] == [
        TRIAL_STEPS * factor + TRIAL_GUESSES - 1 for factor in (2, 4)
    ]


def test_a_trial_waits_until_the_prompt_that_it_computes_is_a_small_part_of_the_time() -> None:
    model = Model(0.02, 0.0, 0.001)
    drafts, step, live = Drafts(model, 512), StepCosts(1.0, 0.01), live_of(0.9)
    model.lags[live.sequence] = 52  # 50 ms, and 2 % of 250 steps
    tried = [bool(drafts.propose({live: 7}, 0, 1, step, True)) for _ in range(300)]
    assert tried.index(True) == pytest.approx(250, abs=3)


def test_rates_are_learned_from_the_first_guess_that_was_wrong() -> None:
    drafts = Drafts(Model(), 512)
    (guesser,) = guessers(0.5)
    guesser.drafting = drafts.rate()
    for _ in range(80):
        guesser.drafted = [1, 2, 3, 4]
        drafts.learn(guesser, 4, [1, 9])
    assert guesser.drafting.value == pytest.approx(0.5, abs=0.03)
    assert (drafts.proposed_total, drafts.accepted_total) == (320, 80)
    assert guesser.drafted == []
    for _ in range(80):
        guesser.drafted = [1, 2]
        drafts.learn(guesser, 2, [8])
    assert guesser.drafting.value < 0.1
    assert drafts.rate().value < 0.3
