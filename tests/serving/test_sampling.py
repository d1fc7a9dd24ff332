"""The sampler against distributions computed another way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from busbar.workloads.serving.sampler import Draw, logprobs_of, sample
from busbar.workloads.serving.sampling import Randomness, SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draws(count: int, seed: int = 0, **params: Any) -> list[int]:
    asked = SamplingParams(**params)
    rows = [Draw(asked, Randomness(seed), index, {}) for index in range(count)]
    return sample(LOGITS.expand(count, -1), rows)


def frequencies(tokens: list[int]) -> list[float]:
    return [tokens.count(t) / len(tokens) for t in range(len(LOGITS))]


def test_temperature_zero_is_the_likeliest_token() -> None:
    assert draws(3, temperature=0.0) == [0, 0, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    weights = [math.exp(x / temperature) for x in LOGITS.tolist()]
    expected = [w / sum(weights) for w in weights]
    found = frequencies(draws(20_000, temperature=temperature))
    assert found == pytest.approx(expected, abs=0.012)


def test_top_k_keeps_k_tokens_and_their_proportions() -> None:
    found = frequencies(draws(20_000, top_k=2))
    share = 1 / (1 + math.exp(-1.0))
    assert found[:2] == pytest.approx([share, 1 - share], abs=0.012)
    assert sum(found[2:]) == 0


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probabilities = torch.softmax(LOGITS, -1).tolist()
    reached = probabilities[0] + probabilities[1]
    assert set(draws(5_000, top_p=reached - 0.01)) == {0, 1}
    assert set(draws(5_000, top_p=reached + 0.01)) == {0, 1, 2}


def test_a_tiny_top_p_still_leaves_the_likeliest() -> None:
    assert set(draws(200, top_p=1e-6)) == {0}


def test_top_k_of_one_is_greedy() -> None:
    assert set(draws(200, top_k=1, temperature=2.0)) == {0}


def test_a_seed_repeats_and_another_differs() -> None:
    assert draws(50, seed=1) == draws(50, seed=1)
    assert draws(50, seed=1) != draws(50, seed=2)


def test_rows_do_not_touch_each_other() -> None:
    mixed = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(),
        SamplingParams(presence_penalty=2.0),
    ]
    rows = [Draw(p, Randomness(i), i, {0: 3}) for i, p in enumerate(mixed)]
    together = sample(LOGITS.expand(len(rows), -1), rows)
    assert together == [sample(LOGITS[None], [row])[0] for row in rows]


def test_penalties_and_bias_shift_logits_by_their_definition() -> None:
    """Token 0 leads token 1 by 1.0: each shift is tried just below and just above that."""

    def first(counts: dict[int, int], **params: Any) -> int:
        return sample(
            LOGITS[None], [Draw(SamplingParams(temperature=0.0, **params), Randomness(), 0, counts)]
        )[0]

    assert first({0: 3}, presence_penalty=0.9) == 0
    assert first({0: 3}, presence_penalty=1.1) == 1
    assert first({0: 3}, frequency_penalty=0.3) == 0
    assert first({0: 3}, frequency_penalty=0.4) == 1
    assert first({}, logit_bias=((1, 0.9),)) == 0
    assert first({}, logit_bias=((1, 1.1),)) == 1


def test_forbidden_tokens_never_come() -> None:
    row = Draw(SamplingParams(temperature=0.0), Randomness(), 0, {}, frozenset({0, 1}))
    assert sample(LOGITS[None], [row]) == [2]


def test_editing_leaves_the_given_logits_alone() -> None:
    logits = LOGITS[None].clone()
    sample(logits, [Draw(SamplingParams(logit_bias=((1, 5.0),)), Randomness(), 0, {})])
    assert torch.equal(logits, LOGITS[None])


def test_logprobs_are_those_of_the_softmax() -> None:
    entry = logprobs_of(LOGITS, 3, 2)
    expected = torch.log_softmax(LOGITS.double(), -1).tolist()
    assert entry.logprob == pytest.approx(expected[3], abs=1e-6)
    assert [token for token, _ in entry.top] == [0, 1]
    assert [value for _, value in entry.top] == pytest.approx(expected[:2], abs=1e-6)


def test_uniform_numbers_are_in_range_and_spread() -> None:
    numbers = [Randomness(5).uniform(i) for i in range(10_000)]
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.01)
