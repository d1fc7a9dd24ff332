"""The online step-time model against a known formula, and its running sums."""

from __future__ import annotations

import random

import pytest

from busbar.scheduler.fit.online import FORGETTING, OnlineStepModel, Speed


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
