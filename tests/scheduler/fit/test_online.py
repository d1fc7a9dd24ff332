"""The online step-time model against a known formula, and its running sums."""

from __future__ import annotations

import random

import pytest

from busbar.scheduler.fit.online import FORGETTING, OnlineStepModel, Speed, StepSums


def test_the_fit_recovers_the_coefficients_of_a_noisy_law() -> None:
    rng = random.Random(0)
    model = OnlineStepModel()
    for _ in range(3000):
        batch, context, prompt = rng.randrange(0, 32), rng.randrange(0, 20_000), rng.choice([0, 0, 64, 512])
        seconds = 0.002 + 0.0003 * batch + 0.0005 * context / 1000 + 0.00002 * prompt
        model.learn(batch, context, prompt, seconds + rng.gauss(0, 0.0002))
    assert model.theta == pytest.approx([0.002, 0.0003, 0.0005, 0.00002], rel=0.05, abs=3e-5)
    assert model.rms_error_s == pytest.approx(0.0002, rel=0.4)


def test_the_fit_follows_a_change_of_speed() -> None:
    model = OnlineStepModel()
    for batch in range(2000):
        model.learn(batch % 16, 0, 0, 0.001 + 0.0001 * (batch % 16))
    for batch in range(6000):
        model.learn(batch % 16, 0, 0, 0.002 + 0.0002 * (batch % 16))
    assert model.predict(8, 0, 0) == pytest.approx(0.0036, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_reported_is_the_best_fit_without_negative_coefficients(seed: int) -> None:
    rng = random.Random(seed)
    model, rows, times = OnlineStepModel(), [], []
    for _ in range(300):
        batch, context, prompt = rng.randrange(1, 4), rng.randrange(0, 40), rng.choice([0, 0, 32])
        rows.append((1.0, float(batch), context / 1000, float(prompt)))
        times.append(0.002 + 0.00002 * prompt - 0.0001 * batch + rng.gauss(0, 0.0005))
        model.learn(batch, context, prompt, times[-1])
    assert min(model.theta) < 0

    def error(theta: list[float]) -> float:
        ages = reversed(range(len(rows)))
        return sum(
            FORGETTING**age * (t - sum(a * b for a, b in zip(theta, row, strict=True))) ** 2
            for age, row, t in zip(ages, rows, times, strict=True)
        )

    found = model.nonnegative
    assert min(found) >= 0
    for i in range(4):
        for step in (-1e-5, 1e-5):
            other = [max(0.0, v + step) if k == i else v for k, v in enumerate(found)]
            assert error(found) <= error(other) * (1 + 1e-6), "no neighbour fits better"
    reported = Speed(model=model).report()["stepModel"]
    assert isinstance(reported, dict)
    assert reported["secondsPerSequence"] == found[1]


def test_nothing_is_reported_before_it_was_measured() -> None:
    assert Speed().report() == {
        "prefillTokensPerSecond": None,
        "decodeTokensPerSecond": None,
        "stepModel": None,
    }


def test_tokens_per_second_are_counted_by_kind_of_step() -> None:
    speed = Speed()
    speed.record(decoding=2, context_tokens=100, prompt_tokens=98, seconds=1.0)
    for _ in range(4):
        speed.record(decoding=5, context_tokens=100, prompt_tokens=0, seconds=0.5)
    report = speed.report()
    assert report["prefillTokensPerSecond"] == 100.0
    assert report["decodeTokensPerSecond"] == 10.0


def test_what_steps_were_made_of_is_summed_by_kind_of_step() -> None:
    speed = Speed()
    speed.record(decoding=2, context_tokens=100, prompt_tokens=98, seconds=1.0)
    for _ in range(2):
        speed.record(decoding=5, context_tokens=300, prompt_tokens=3, seconds=0.5, beside_s=0.25)
    speed.record(decoding=40, context_tokens=4000, prompt_tokens=0, seconds=1.5, steps=10)
    assert speed.prefill == StepSums(1, 2, 100, 98, 1.0)
    assert speed.decode == StepSums(12, 50, 4600, 6, 2.5), "without what a draft took beside them"


def test_seconds_of_steps_that_do_both_are_divided_by_tokens_and_then_by_the_model() -> None:
    speed = Speed()
    speed.record(decoding=3, context_tokens=100, prompt_tokens=1, seconds=1.0)
    assert (speed.for_prompts_s, speed.for_decoding_s) == (0.25, 0.75)
    rng = random.Random(3)
    for _ in range(300):
        batch, prompt = rng.randrange(0, 16), rng.choice([0, 64, 512])
        seconds = 0.01 + 0.001 * batch + 0.0004 * prompt
        if batch or prompt:
            speed.record(batch, 100 * batch, prompt, seconds)
    before = speed.for_prompts_s, speed.for_decoding_s
    speed.record(decoding=4, context_tokens=400, prompt_tokens=64, seconds=0.01 + 0.004 + 0.0256)
    assert speed.for_prompts_s - before[0] == pytest.approx(0.0256, rel=0.02)
    assert speed.for_decoding_s - before[1] == pytest.approx(0.014, rel=0.04)
    speed.record(decoding=4, context_tokens=400, prompt_tokens=4096, seconds=1.0)  # no more than there was
    assert speed.for_decoding_s - before[1] == pytest.approx(0.014, rel=0.04)


def test_a_row_of_twice_the_weight_counts_like_two_rows() -> None:
    rng = random.Random(3)
    heavy, twice = OnlineStepModel(), OnlineStepModel()
    for _ in range(60):
        batch, prompt = rng.randrange(1, 16), rng.choice([0, 64, 512])
        seconds = 0.01 + 0.001 * batch + 0.0004 * prompt + rng.gauss(0, 0.003)
        heavy.learn(batch, 100 * batch, prompt, seconds, weight=2.0)
        for _ in range(2):
            twice.learn(batch, 100 * batch, prompt, seconds)
    assert heavy.predict(4, 400, 64) == pytest.approx(twice.predict(4, 400, 64), rel=0.02)
    assert heavy.predict(4, 400, 512) == pytest.approx(twice.predict(4, 400, 512), rel=0.02)


def test_means_of_many_steps_weigh_more_than_those_of_few_whose_ends_err_more() -> None:
    """Each row's seconds err by a part of a step, whatever their number."""
    rng = random.Random(5)
    found = Speed()
    for _ in range(400):
        steps, batch, prompt = rng.choice([6, 100]), rng.randrange(1, 12), rng.choice([0, 20, 60])
        seconds = steps * (0.012 + 0.0008 * batch + 0.0004 * prompt) + rng.uniform(-0.1, 0.1)
        found.record(steps * batch, steps * 300 * batch, steps * prompt, seconds, steps=steps)
    a, b, c, d = found.model.nonnegative
    assert a == pytest.approx(0.012, rel=0.05)
    assert b + 0.3 * c == pytest.approx(0.0008, rel=0.05)
    assert d == pytest.approx(0.0004, rel=0.02)
