"""Turns: each pool gets its share, from any number of routers, also while pools come and go."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busbar.scheduler.autoscale.shares import MOST_DEBT, Turns, prompts_wait_s

TWO = {"fast": 0.7, "slow": 0.3}


def taken(turns: Turns, count: int, shares: Mapping[str, float] = TWO, **waits: float) -> Counter[str | None]:
    return Counter(
        turns.next(0, shares, shares, lambda name: waits.get(name, 0.0), 1.0) for _ in range(count)
    )


@given(
    shares=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 50), min_size=2),
    requests=st.integers(1, 400),
    routers=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_each_pool_gets_its_share_within_one_request_per_pool_and_router(
    shares: dict[str, int], requests: int, routers: int, seed: int
) -> None:
    if not any(shares.values()):
        assert Turns().next(0, shares, shares, lambda _: 0.0, 1.0) is None
        return
    rng, all_turns = random.Random(seed), [Turns() for _ in range(routers)]
    got = Counter(rng.choice(all_turns).next(0, shares, shares, lambda _: 0.0, 1.0) for _ in range(requests))
    for name, share in shares.items():
        exact = requests * share / sum(shares.values())
        assert abs(got[name] - exact) <= routers * len(shares)
        assert share or not got[name]


def test_a_pool_that_comes_back_gets_its_share_and_not_what_it_has_missed() -> None:
    turns = Turns()
    for _ in range(100):
        assert turns.next(0, TWO, ["slow"], lambda _: 0.0, 1.0) == "slow"
    assert taken(turns, 100) == {"fast": 70, "slow": 30}


def test_a_pool_whose_prompts_wait_too_long_is_passed_over() -> None:
    assert taken(Turns(), 100, fast=1.1) == {"slow": 100}
    assert taken(Turns(), 100, fast=1.1, slow=1.2) == {"fast": 100}, (
        "the shortest wait, where all wait too long"
    )
    assert taken(Turns(), 100, fast=1.0) == {"fast": 70, "slow": 30}
    assert taken(Turns(), 100, {"fast": 1.0, "slow": 0.0}, fast=1.1) == {"slow": 100}


@pytest.mark.parametrize(
    ("decode_s", "most_tokens", "tpot_s", "wait_s"),
    [
        (0.045, 2048, 0.1, 2.0),  # decoding takes half of the 90 ms that a step may take
        (0.081, 2048, 0.1, 10.0),
        (0.2, 2048, 0.1, 63.5),  # the promise is broken, and 32 tokens are computed in each step all the same
        (0.045, 100, 0.1, 5.5),  # a step takes 100 tokens at most
        (0.2, 10000, None, 1.2),
        (0.0, 2048, 0.1, 1.0),
    ],
)
def test_prompts_wait_for_the_part_of_each_step_that_decoding_leaves(
    decode_s: float, most_tokens: int, tpot_s: float | None, wait_s: float
) -> None:
    assert prompts_wait_s(1.0, decode_s, 0.0001, most_tokens, tpot_s) == pytest.approx(wait_s)
    assert prompts_wait_s(0.0, decode_s, 0.0001, most_tokens, tpot_s) == 0
    assert prompts_wait_s(0.0, decode_s, 0.0, most_tokens, tpot_s) == 0


def test_what_went_elsewhere_for_another_reason_is_charged_and_not_for_ever() -> None:
    turns = Turns()
    for _ in range(3):
        turns.charge(0, TWO, TWO, "fast")
    assert taken(turns, 97) == {"fast": 67, "slow": 30}
    for _ in range(1000):
        turns.charge(0, TWO, TWO, "slow")
    assert taken(turns, 100)["slow"] >= 30 - 2 * MOST_DEBT


def test_buckets_have_turns_of_their_own() -> None:
    turns = Turns()
    first = [turns.next(bucket, TWO, TWO, lambda _: 0.0, 1.0) for bucket in range(5)]
    assert first == ["fast"] * 5
