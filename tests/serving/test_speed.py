"""The online step-time model against a known formula, and its running sums."""

from __future__ import annotations

import random

import pytest

from busbar.workloads.serving.speed import Speed, StepModel


def test_the_fit_recovers_the_coefficients_of_a_noisy_law() -> None:
    rng = random.Random(0)
    model = StepModel()
    for _ in range(3000):
        batch, context, prompt = rng.randrange(0, 32), rng.randrange(0, 20_000), rng.choice([0, 0, 64, 512])
        seconds = 0.002 + 0.0003 * batch + 0.0005 * context / 1000 + 0.00002 * prompt
        model.learn(batch, context, prompt, seconds + rng.gauss(0, 0.0002))
    assert model.theta == pytest.approx([0.002, 0.0003, 0.0005, 0.00002], rel=0.05, abs=3e-5)
    assert model.rms_error_s == pytest.approx(0.0002, rel=0.4)


def test_the_fit_follows_a_change_of_speed() -> None:
    model = StepModel()
    for batch in range(2000):
        model.learn(batch % 16, 0, 0, 0.001 + 0.0001 * (batch % 16))
    for batch in range(6000):
        model.learn(batch % 16, 0, 0, 0.002 + 0.0002 * (batch % 16))
    assert model.predict(8, 0, 0) == pytest.approx(0.0036, rel=0.05)


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
