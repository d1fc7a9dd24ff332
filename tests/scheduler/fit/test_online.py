"""The online step-time model against a known formula, and its running sums."""

from __future__ import annotations

import random

import pytest

from busbar.scheduler.fit.online import (
    LEAST_CELL_STEPS,
    MOST_CELLS,
    PACE_STEPS,
    OnlineStepModel,
    Speed,
    StepSums,
)


def test_the_fit_recovers_the_coefficients_of_a_noisy_law() -> None:
    rng = random.Random(0)
    model = OnlineStepModel()
    for _ in range(3000):
        batch, context, prompt = rng.randrange(0, 32), rng.randrange(0, 20_000), rng.choice([0, 0, 64, 512])
        seconds = 0.002 + 0.0003 * batch + 0.0005 * context / 1000 + 0.00002 * prompt
        model.learn(batch, context, prompt, seconds + rng.gauss(0, 0.0002))
    assert model.theta == pytest.approx([0.002, 0.0003, 0.0005, 0.00002], rel=0.05, abs=3e-5)
    assert model.rms_error_s == pytest.approx(0.0002, rel=0.4)


def typical(batch: int, pace: float = 1.0, prompt: int = 0) -> tuple[float, float, float, float]:
    """A step whose sequences have 200 tokens each, and what it takes."""
    context = 200 * batch + prompt
    return batch, context, prompt, pace * (0.004 + 0.0003 * batch + 0.001 * context / 1000 + 0.0001 * prompt)


def mixed(model: OnlineStepModel, rng: random.Random, steps: int, pace: float = 1.0) -> None:
    """Steps of every size, which vary by a tenth."""
    for _ in range(steps):
        batch, prompt = rng.choice([1, 2, 4, 8, 16]), rng.choice([0, 0, 0, 128])
        model.learn(*typical(batch, pace * rng.lognormvariate(0, 0.1), prompt))


@pytest.mark.parametrize("pace", [0.6, 1.5, 3.0])
def test_a_machine_that_gets_slower_or_faster_is_followed_at_every_size(pace: float) -> None:
    rng, model = random.Random(1), OnlineStepModel()
    mixed(model, rng, 5000)
    mixed(model, rng, 4 * PACE_STEPS, pace)
    for batch, prompt in ((1, 0), (4, 128), (16, 0)):
        *step, seconds = typical(batch, pace, prompt)
        assert model.predict(*step) == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize("pace", [1.0, 1.5])
def test_an_hour_at_batch_one_does_not_forget_what_a_batch_of_sixteen_costs(pace: float) -> None:
    """And if the machine gets slower meanwhile, that counts for the sizes that do not come, too, but for the part that
    the cells of batch one have taken."""
    rng, model = random.Random(2), OnlineStepModel()
    mixed(model, rng, 5000)
    hour = 0.0
    while hour < 3600:
        done = typical(1, pace * rng.lognormvariate(0, 0.1))
        model.learn(*done)
        hour += 8 * done[-1]  # an eighth of the steps: the others would change nothing
    *step, seconds = typical(16, pace)
    assert model.predict(*step) == pytest.approx(seconds, rel=0.08)
    *step, seconds = typical(1, pace)
    assert model.predict(*step) == pytest.approx(seconds, rel=0.06)


def test_where_steps_are_no_plane_rare_large_ones_count_like_frequent_small_ones() -> None:
    """A further sequence costs less in a large batch. An engine that runs one request at a time nearly always must not
    expect of sixteen what the step from one to two costs."""
    rng, model = random.Random(3), OnlineStepModel()
    for _ in range(6000):
        batch = rng.choices([1, 2, 3, 4, 8, 16], [1000, 500, 100, 30, 20, 20])[0]
        model.learn(batch, 0, 0, 0.004 * batch**0.3 * rng.lognormvariate(0, 0.05))
    for batch in (1, 2, 4, 8, 16):
        assert model.predict(batch, 0, 0) == pytest.approx(0.004 * batch**0.3, rel=0.2)


def test_single_accidents_do_not_move_the_pace() -> None:
    rng, model = random.Random(4), OnlineStepModel()
    mixed(model, rng, 3000)
    *step, seconds = typical(4)
    before = model.predict(*step)
    for _ in range(3):
        model.learn(*typical(4, 1000.0))
        mixed(model, rng, 40)
    assert model.pace == pytest.approx(1.0, abs=0.03)
    assert before == pytest.approx(seconds, rel=0.03)


def test_the_number_of_cells_is_bounded_and_those_that_were_visited_last_are_kept() -> None:
    rng, model = random.Random(5), OnlineStepModel()
    for _ in range(5000):
        batch, context, prompt = (int(2 ** rng.uniform(0, most)) for most in (12, 24, 16))
        model.learn(batch, context, prompt, 0.001 * batch)
    assert len(model._cells) == MOST_CELLS
    model.learn(3, 600, 0, 0.003)
    assert list(model._cells)[-1] == (2, 5, 0)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_reported_is_the_best_fit_without_negative_coefficients(seed: int) -> None:
    rng = random.Random(seed)
    model, rows, times = OnlineStepModel(), [], []
    for _ in range(LEAST_CELL_STEPS - 1):  # too few for a pace
        for batch, context, prompt in ((1, 20, 0), (2, 20, 0), (4, 20, 0), (1, 20, 40), (2, 300, 40)):
            rows.append((1.0, float(batch), context / 1000, float(prompt)))
            times.append(0.003 + 0.00002 * prompt - 0.0003 * batch + rng.gauss(0, 0.0003))
            model.learn(batch, context, prompt, times[-1])
    model._fit()
    means = [sum(times[i::5]) / len(times[i::5]) for i in range(5)]

    def error(theta: list[float]) -> float:
        return sum(
            ((t - sum(a * b for a, b in zip(theta, row, strict=True))) / means[i % 5]) ** 2
            for i, (row, t) in enumerate(zip(rows, times, strict=True))
        )

    found = model.theta
    assert found[1] == 0, "the true one is negative"
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
    a, b, c, d = found.model.theta
    assert a == pytest.approx(0.012, rel=0.05)
    assert b + 0.3 * c == pytest.approx(0.0008, rel=0.05)
    assert d == pytest.approx(0.0004, rel=0.02)
