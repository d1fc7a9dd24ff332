"""The step model: its prior, its fit, and the rate that follows from it, beside an engine simulated step by step."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from busbar.scheduler.autoscale.step_model import (
    Bucket,
    Slo,
    Step,
    StepModel,
    _late,
    fitted,
    in_flight,
    max_rate,
    token_s,
)
from busbar.scheduler.errors import ServingModelError
from busbar.scheduler.fit import ModelShape, accelerator
from busbar.scheduler.simulate.serving_replica import Replica, Request

LLAMA_8B = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, tied=False)
SLO = Slo()


def prior(name: str, count: int = 1) -> StepModel:
    device = accelerator(name)
    assert device is not None
    return StepModel.prior(name, LLAMA_8B, device, count)


def attainment(model: StepModel, bucket: Bucket, rate: float, requests: int = 3000) -> float:
    rng, now = random.Random(1), 0.0
    replica, sent = Replica.of(model, SLO, 0.0), []
    for _ in range(requests):
        now += rng.expovariate(rate)
        sent.append(Request(now, int(bucket.prompt_tokens), int(bucket.output_tokens)))
        replica.take(sent[-1], now)
    replica.advance(1e12)
    counted = sent[requests // 10 :]
    return sum(item.within(SLO) for item in counted) / len(counted)


@pytest.mark.parametrize(
    ("name", "bucket"),
    [
        ("L4", Bucket(100, 150)),
        ("L4", Bucket(300, 200)),
        ("A10G", Bucket(300, 200)),
        ("A100", Bucket(300, 1000)),
        ("A100", Bucket(1155, 211)),
        ("H100", Bucket(300, 200)),
        ("H100", Bucket(4000, 200)),
    ],
)
def test_the_rate_is_within_twenty_per_cent_of_a_simulated_engine(name: str, bucket: Bucket) -> None:
    model = prior(name)
    rate = max_rate(model, bucket, SLO)
    assert attainment(model, bucket, 0.8 * rate) >= 0.99
    assert attainment(model, bucket, 1.2 * rate) < 0.99


def test_the_share_of_late_prompts_is_that_of_a_queue_with_fixed_service() -> None:
    """Decoding leaves half of each step of 90 ms to prompts of 100 ms, so one is served in 200 ms."""
    rng, slo = random.Random(4), Slo(1.0, 0.1)
    for rate, within in ((2.0, 0.25), (3.0, 0.15), (4.0, 0.15)):
        free_s, now, late = 0.0, 0.0, 0
        for _ in range(40_000):
            now += rng.expovariate(rate)
            free_s = max(free_s, now) + 0.2
            late += free_s - now > slo.ttft_s - 0.09
        assert _late(0.1, 0.045, 1e-4, slo, rate) == pytest.approx(late / 40_000, rel=within)


def test_rates_fall_with_length_and_rise_with_the_type() -> None:
    lengths = [max_rate(prior("A100"), Bucket(n, 200), SLO) for n in (100, 400, 1600, 3200)]
    assert lengths == sorted(lengths, reverse=True)
    types = [max_rate(prior(name), Bucket(300, 200), SLO) for name in ("L4", "A10G", "A100", "H100")]
    assert types == sorted(types)
    assert max_rate(prior("A100"), Bucket(400, 200), replace(SLO, tpot_s=0.05)) < lengths[1]


def test_a_slo_that_the_weights_alone_break_has_rate_zero() -> None:
    """An L4 reads 16 GB of weights in 67 ms."""
    assert max_rate(prior("L4"), Bucket(300, 200), Slo(tpot_s=0.06)) == 0
    assert max_rate(prior("L4"), Bucket(300, 200), Slo(tpot_s=0.1)) > 0


def test_a_request_that_never_fits_the_cache_has_rate_zero() -> None:
    model = prior("A10G")
    assert max_rate(model, Bucket(model.kv_tokens, 1), Slo(ttft_s=1e4)) == 0


def test_a_model_whose_cache_does_not_fit_once_is_refused() -> None:
    with pytest.raises(ServingModelError, match="no room for the KV cache"):
        prior("T4")
    assert prior("T4", 2).kv_tokens > 1000


def test_measured_steps_give_their_coefficients_back() -> None:
    true, rng = prior("A100"), random.Random(2)
    steps = []
    for _ in range(60):
        batch, chunk, done = rng.randint(1, 64), rng.choice([0, 128, 512]), rng.randint(0, 4000)
        context = batch * rng.randint(50, 3000)
        seconds = true.decode_s(batch, context) + chunk * (true.d_s + true.e_s * done)
        steps.append(Step(batch, context, chunk, done, seconds))
    model, error = fitted("A100", steps, true.kv_tokens)
    assert error < 1e-6
    for name in ("a_s", "b_s", "c_s", "d_s", "e_s"):
        assert getattr(model, name) == pytest.approx(getattr(true, name), rel=1e-3)


def test_a_fit_with_a_negative_coefficient_is_refused() -> None:
    falling = [Step(b, 100 * b + b * b, 64 * (b % 3), b * 7, 0.1 - 0.001 * b) for b in range(1, 20)]
    with pytest.raises(ServingModelError, match="negative time"):
        fitted("odd", falling, 1000)
    with pytest.raises(ServingModelError, match="at least five"):
        fitted("few", falling[:4], 1000)


@pytest.mark.parametrize("values", [(0.0, -1.0), (-0.1, 2.0), (0.0, 0.0), (2.0, float("nan"))])
def test_bad_targets_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ServingModelError, match="must be above zero"):
        Slo(*values)
    with pytest.raises(ServingModelError, match="percentile"):
        Slo(percentile=100)
    with pytest.raises(ServingModelError, match="at least one"):
        Bucket(0, 10)


def test_in_flight_follows_littles_law() -> None:
    model, bucket = prior("H100"), Bucket(300, 200)
    rate = max_rate(model, bucket, SLO)
    assert in_flight(model, bucket, rate / 2) < in_flight(model, bucket, rate) / 2


def test_a_prompt_waits_until_its_context_fits() -> None:
    model = replace(prior("A100"), kv_tokens=1000)
    replica = Replica.of(model, SLO, 0.0)
    first, second = Request(0.0, 600, 100), Request(0.0, 600, 100)
    replica.take(first, 0.0)
    replica.take(second, 0.0)
    replica.advance(1e9)
    assert second.first_token_s > first.end_s
    assert replica.in_flight == 0
    assert replica.work_s == pytest.approx(0.0)


def test_a_replica_gives_the_same_times_however_often_it_is_advanced() -> None:
    ends = []
    for pause in (0.05, 1000.0):
        replica, sent = Replica.of(prior("A10G"), SLO, 0.0), [Request(0.0, 300, 120), Request(0.0, 80, 60)]
        for request in sent:
            replica.take(request, 0.0)
        now = 0.0
        while replica.in_flight:
            now += pause
            replica.advance(now)
        ends.append([r.end_s for r in sent])
    assert ends[0] == pytest.approx(ends[1])


@pytest.mark.parametrize(("part", "error"), [(0.02, 0.02), (0.3, 0.05), (0.7, 0.12)])
def test_the_time_per_token_counts_the_request_itself_and_is_that_of_a_simulated_engine(
    part: float, error: float
) -> None:
    model, bucket = StepModel("cpu", 0.0056, 0.0001, 4e-6, 6e-5, 0.0, 50_000), Bucket(384, 24)
    slo = Slo(0.5, 0.03, 95.0)
    rate = part * max_rate(model, bucket, slo)
    rng, now, replica, sent = random.Random(1), 0.0, Replica.of(model, slo, 0.0), []
    for _ in range(4000):
        now += rng.expovariate(rate)
        sent.append(Request(now, 384, 24))
        replica.take(sent[-1], now)
    replica.advance(1e12)
    seen = sum((one.end_s - one.first_token_s) / 23 for one in sent) / len(sent)
    assert token_s(model, bucket, rate) == pytest.approx(seen, rel=error)
    assert token_s(model, bucket, 1e-9) == pytest.approx(model.decode_s(1, 384 + 12), rel=1e-6)
    assert token_s(model, bucket, 1e9) == math.inf


@pytest.mark.parametrize(
    ("rate", "prompt", "output", "error"),
    [
        (2.0, 128, 64, 0.05),
        (4.0, 128, 64, 0.08),
        (1.0, 512, 32, 0.06),
        (2.0, 512, 32, 0.15),
        (0.5, 1500, 64, 0.12),
    ],
)
def test_prompts_that_come_before_the_first_token_delay_the_others_in_an_engine_that_does_not_hold_back_prompts(
    rate: float, prompt: int, output: int, error: float
) -> None:
    """With steps as a vLLM had on a CPU: prompts are processed whole. Without them the fourth row is 28 % too low."""
    model, slo = StepModel("cpu", 0.012, 0.0008, 1.6e-6, 4e-4, 0.0, 1e6), Slo(60.0, 60.0)
    rng, now, replica, sent = random.Random(2), 0.0, Replica.of(model, slo, 0.0), []
    for _ in range(1500):
        now += rng.expovariate(rate)
        sent.append(Request(now, prompt, output))
        replica.take(sent[-1], now)
    replica.advance(1e12)
    seen = sum((one.end_s - one.first_token_s) / (output - 1) for one in sent) / len(sent)
    assert token_s(model, Bucket(prompt, output), rate) == pytest.approx(seen, rel=error)


@pytest.mark.parametrize("bucket", [Bucket(128, 64), Bucket(512, 32), Bucket(1500, 64)])
@pytest.mark.parametrize("tpot_s", [0.03, 0.04, 0.06])
def test_at_the_highest_rate_the_mean_time_per_token_is_within_the_target(
    bucket: Bucket, tpot_s: float
) -> None:
    model, slo = StepModel("cpu", 0.012, 0.0008, 1.6e-6, 4e-4, 0.0, 1e6), Slo(60.0, tpot_s)
    assert 0 < token_s(model, bucket, max_rate(model, bucket, slo)) < tpot_s
