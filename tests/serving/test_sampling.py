"""The sampler against distributions computed another way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from busbar.workloads.serving.constraint import Constraint
from busbar.workloads.serving.folding import FOLD, SMALL
from busbar.workloads.serving.sampler import Draw, Sampled
from busbar.workloads.serving.sampler import sample as sample_all
from busbar.workloads.serving.sampling import Randomness, SamplingParams
from busbar.workloads.serving.token_counts import TokenCounts

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


@pytest.fixture(autouse=True, params=["row by row", "at once"])
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, and as on a GPU."""
    for module in ("folding", "sampler"):
        monkeypatch.setattr(
            f"busbar.workloads.serving.{module}.at_once", lambda device: request.param == "at once"
        )


def sample(logits: torch.Tensor, rows: list[Draw]) -> list[int]:
    return [each.token for each in sample_all(logits.contiguous(), rows)]


def counts_of(counts: dict[int, int]) -> TokenCounts:
    made = TokenCounts()
    for token, times in counts.items():
        for _ in range(times):
            made.add(token)
    return made


def draws(count: int, seed: int = 0, **params: Any) -> list[int]:
    asked = SamplingParams(**params)
    rows = [Draw(asked, Randomness(seed), index) for index in range(count)]
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


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_a_top_p_of_zero_is_the_likeliest_token_at_any_temperature(temperature: float) -> None:
    assert set(draws(200, temperature=temperature, top_p=0.0)) == {0}


def test_top_k_of_one_is_greedy() -> None:
    assert set(draws(200, top_k=1, temperature=2.0)) == {0}


def test_a_seed_repeats_and_another_differs() -> None:
    assert draws(50, seed=1) == draws(50, seed=1)
    assert draws(50, seed=1) != draws(50, seed=2)


def test_sampling_of_a_row_does_not_depend_on_the_other_rows() -> None:
    mixed = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(),
        SamplingParams(presence_penalty=2.0),
    ]
    rows = [Draw(p, Randomness(i), i, counts_of({0: 3})) for i, p in enumerate(mixed)]
    together = sample(LOGITS.expand(len(rows), -1), rows)
    assert together == [sample(LOGITS[None], [row])[0] for row in rows]


def test_penalties_and_bias_shift_logits_by_their_definition() -> None:
    """Token 0 leads token 1 by 1.0: each shift is tried just below and just above that."""

    def first(counts: dict[int, int], **params: Any) -> int:
        return sample(
            LOGITS[None],
            [Draw(SamplingParams(temperature=0.0, **params), Randomness(), 0, counts_of(counts))],
        )[0]

    assert first({0: 3}, presence_penalty=0.9) == 0
    assert first({0: 3}, presence_penalty=1.1) == 1
    assert first({0: 3}, frequency_penalty=0.3) == 0
    assert first({0: 3}, frequency_penalty=0.4) == 1
    assert first({}, logit_bias=((1, 0.9),)) == 0
    assert first({}, logit_bias=((1, 1.1),)) == 1


def test_forbidden_tokens_never_come() -> None:
    row = Draw(SamplingParams(temperature=0.0), Randomness(), 0, None, frozenset({0, 1}))
    assert sample(LOGITS[None], [row]) == [2]


def test_editing_leaves_the_given_logits_alone() -> None:
    logits = LOGITS[None].clone()
    sample(logits, [Draw(SamplingParams(logit_bias=((1, 5.0),)), Randomness(), 0)])
    assert torch.equal(logits, LOGITS[None])


def test_logprobs_are_those_of_the_softmax() -> None:
    row = Draw(SamplingParams(temperature=0.0, logprobs=2, logit_bias=((3, 9.0),)), Randomness(), 0)
    entry = sample_all(LOGITS[None].clone(), [row])[0].logprob
    assert entry is not None
    assert entry.token == 3  # sampled with its bias, its logprob reported without it
    expected = torch.log_softmax(LOGITS.double(), -1).tolist()
    assert entry.logprob == pytest.approx(expected[3], abs=1e-6)
    assert [token for token, _ in entry.top] == [0, 1]
    assert [value for _, value in entry.top] == pytest.approx(expected[:2], abs=1e-6)


def test_uniform_numbers_are_in_range_and_spread() -> None:
    numbers = [Randomness(5).uniform(i) for i in range(10_000)]
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.01)


WIDE = SMALL + 5 * FOLD + 7
"""A vocabulary large enough to be folded, whose size is no multiple of `FOLD`."""
ASKED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "temperature near 0": {"temperature": 0.05},
    "top_k": {"top_k": 40},
    "top_k beyond the first candidates": {"top_k": 700},
    "top_k of all": {"top_k": WIDE},
    "top_p of few": {"top_p": 0.3},
    "top_p of most": {"top_p": 0.95, "temperature": 1.5},
    "top_p of all": {"top_p": 0.9999999},
    "min_p": {"min_p": 0.2},
    "min_p of many": {"min_p": 0.001, "temperature": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "everything": {"top_k": 90, "top_p": 0.8, "min_p": 0.05, "temperature": 0.8, "repetition_penalty": 0.6},
}
ALLOWED = Constraint(WIDE, frozenset(range(3, 290, 3)))
BANNED = Constraint(WIDE, None, frozenset(range(0, 200, 2)))
ASKED |= {
    "allowed tokens": {"constraint": ALLOWED},
    "allowed tokens, temperature near 0": {"constraint": ALLOWED, "temperature": 0.05},
    "allowed tokens, fewer than top_k": {"constraint": ALLOWED, "top_k": 700},
    "allowed tokens, top_p of all": {"constraint": ALLOWED, "top_p": 0.9999999},
    "allowed tokens and everything": {**ASKED["everything"], "constraint": ALLOWED},
    "banned tokens": {"constraint": BANNED},
    "banned tokens and everything": {**ASKED["everything"], "constraint": BANNED},
}
PROMPT_TOKENS = list(range(0, 60, 2))


def warped(logits: torch.Tensor, asked: dict[str, Any]) -> torch.Tensor:
    """transformers' own processors, in the order in which it applies them: probabilities in float64."""
    scores = logits[None].double()
    ids = torch.tensor([PROMPT_TOKENS])
    steps: list[Any] = []
    if "repetition_penalty" in asked:
        steps.append(RepetitionPenaltyLogitsProcessor(asked["repetition_penalty"]))
    if "constraint" in asked:
        allowed, banned = asked["constraint"].allowed, asked["constraint"].banned
        outside = [t for t in range(len(logits)) if t in banned or (allowed and t not in allowed)]
        steps.append(SuppressTokensLogitsProcessor(outside))
    if "temperature" in asked:
        steps.append(TemperatureLogitsWarper(asked["temperature"]))
    if "top_k" in asked:
        steps.append(TopKLogitsWarper(asked["top_k"]))
    if "top_p" in asked:
        steps.append(TopPLogitsWarper(asked["top_p"]))
    if "min_p" in asked:
        steps.append(MinPLogitsWarper(asked["min_p"]))
    for step in steps:
        scores = step(ids, scores)
    return torch.softmax(scores, -1)[0]


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("width", [300, WIDE])
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_the_distribution_is_that_of_transformers_processors(name: str, width: int, scale: float) -> None:
    """Token by token: the point drawn falls where the reference's cumulative distribution says."""
    asked, count = ASKED[name], 10
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn((count, width), generator=generator) * scale
    params = SamplingParams(**asked)
    rows = [Draw(params, Randomness(11), i, TokenCounts(PROMPT_TOKENS)) for i in range(count)]
    found = sample(logits.clone(), rows)
    for i, token in enumerate(found):
        expected = warped(logits[i], asked)
        order = torch.arange(width)
        if params.needs_order:
            order = expected.sort(descending=True, stable=True).indices
        place = int((order == token).nonzero())
        heap = expected[order].cumsum(0)
        low = float(heap[place] - expected[token])
        assert expected[token] > 0
        assert low - 2e-6 <= Randomness(11).uniform(i) <= float(heap[place]) + 2e-6


def test_rows_with_and_without_order_and_edits_are_sampled_together_as_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn((len(ASKED), WIDE), generator=generator) * 3
    before = logits.clone()
    rows = [
        Draw(SamplingParams(**asked, logprobs=i % 3 or None), Randomness(i), i, TokenCounts(PROMPT_TOKENS))
        for i, asked in enumerate(ASKED.values())
    ]
    together: list[Sampled] = sample_all(logits, rows)
    assert together == [sample_all(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert torch.equal(logits, before)


def test_the_largest_logit_of_a_folded_row_is_found_wherever_it_stands() -> None:
    places = [0, FOLD, WIDE - 1, WIDE - 8, WIDE // FOLD, WIDE // FOLD * FOLD]
    logits = torch.zeros((len(places), WIDE))
    for row, place in enumerate(places):
        logits[row, place] = 1.0
    rows = [Draw(SamplingParams(temperature=0.0, logprobs=1), Randomness(), 0) for _ in places]
    found = sample_all(logits, rows)
    assert [each.token for each in found] == places
    assert [each.logprob.top[0][0] for each in found if each.logprob] == places
    assert sample(torch.zeros((1, WIDE)), rows[:1]) == [0]  # of equal logits the first, as argmax does


@pytest.mark.parametrize("width", [300, 8 * 128, WIDE])
@pytest.mark.parametrize("asked", [{}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20}], ids=str)
def test_rows_at_once_draw_what_each_draws_alone(
    width: int, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = 4 * torch.randn(24, width, generator=generator)
    rows = [
        Draw(
            SamplingParams(temperature=0.0 if i % 5 == 0 else 0.3 + i % 3, **asked),
            Randomness(i),
            i,
            forbidden=frozenset(range(width - 3, width)) if i % 4 == 0 else frozenset(),
        )
        for i in range(24)
    ]
    found = []
    for way in (False, True):
        for module in ("folding", "sampler"):
            monkeypatch.setattr(f"busbar.workloads.serving.{module}.at_once", lambda device, way=way: way)
        found.append(sample(logits, rows))
    assert found[0] == found[1]


def test_counts_grow_beyond_their_first_arrays() -> None:
    counts = TokenCounts([5, 5, 3])
    for token in [3, *range(200), 3]:
        counts.add(token)
    found = dict(zip(counts.ids.tolist(), counts.sampled.tolist(), strict=True))
    assert found == dict.fromkeys(range(200), 1.0) | {3: 3.0}
