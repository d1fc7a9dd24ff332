"""How long one engine step takes, and the rate of requests that one replica sustains within an SLO.

A step runs B sequences with Σctx tokens of context between them, and C prompt tokens whose own sequence is
ctx tokens long so far:

    t = a + b·B + c·Σctx + d·C + e·C·ctx

`StepModel.prior` derives the five coefficients from an accelerator's data sheet and a model's size: `a` reads the
weights, `c` reads the KV cache, `b` and `d` are two floating-point operations per weight and token, `e` is attention.
`fitted` takes them from measured steps. Both give the same type, so a measurement replaces a prior without a change
anywhere else.

`max_rate` follows from the steady state. Requests of n prompt and m output tokens arrive at rate r; each costs
p = d·n + e·n²/2 seconds of prompt processing and k = b + c·(n + m/2) seconds in each of its m steps. A request meets
B = r·m·T others (arrivals see the average of the time) and is one more itself, so the steps that it sees take

    T = a + k·(1 + B) + T·r·p  =  (a + k) / (1 - r·(p + k·m))

Besides, prompts that come while its own waits and is processed are processed after it, and so between its first tokens:
r·S of them, where S is the time of its prompt in the queue of prompts (M/D/1). They delay its m - 1 later tokens by r·S·p in all,
which matters where prompts are long and outputs short. `token_s` counts them. `max_rate` does not: its step at the percentile is
longer than that mean at all rates but those far above what the target allows.

How many others there are is the state of a queue with processor sharing, in which n sequences get n·(1 - r·p) / (a + k·n)
tokens per second. Such a queue has a product form whatever the lengths (Kelly, Reversibility and Stochastic Networks, ch. 3), here a
negative binomial distribution with mean B and variance B / (1 - ρ), ρ = r·k·m / (1 - r·p): more than Poisson, because each
further sequence makes the others stay longer. Its quantiles are taken from the gamma distribution of the same mean and variance.

- KV cache: the contexts at the percentile of the batch must fit.
- TPOT is a mean over a request's own steps, and so over batches that it shares: the variance of what it sees is B·(2/3 + ρ/(1 - ρ)),
  where 2/3 is that of sequences of equal length. At its percentile a step with the smallest chunk must be within the target.
- TTFT: the engine sizes prompt chunks so that a step stays below the TPOT target, so a prompt that comes costs others no
  TPOT, but waits itself, like a customer of an M/D/1 queue whose server has the part of each step that decoding leaves. The
  batch changes slowly beside that: the share of late prompts is the mean over batches of what it is with each of them. The
  percentile of the wait at the percentile of the batch would count bad luck twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from ..errors import ServingModelError
from ..fit.accelerators import Accelerator
from ..fit.chunks import CHUNK_STEP_FRACTION, MIN_CHUNK_TOKENS
from ..fit.model import ModelShape

MEMORY_REACHED = 0.8
"""Part of the data sheet's memory bandwidth that a decode step reaches."""
STEP_OVERHEAD_S = 0.002
"""Scheduling, sampling and launches in each step."""
MEMORY_USED = 0.9
"""Part of the device memory that an engine takes."""
RUNTIME_GIB = 1.0
"""Driver context, libraries and activations of one step."""
WEIGHT_BYTES = 2
MAX_CHUNK_TOKENS = 2048
_BISECTIONS = 24
"""Of the rate: to 1e-7 of the highest."""
_NEWTON_STEPS = 5
"""To 1e-6 of the decay of a queue's tail, at all loads."""
_DEVIATIONS = tuple(3 - 0.75 * i for i in range(8))
"""Of the batches for which the share of late prompts is computed, in standard deviations above the mean; the worst first."""
_DENSITIES = tuple(math.exp(-z * z / 2) for z in _DEVIATIONS)
_WEIGHTS = tuple(density / sum(_DENSITIES) for density in _DENSITIES)


@dataclass(frozen=True, slots=True)
class Slo:
    """What `percentile` per cent of the requests must see."""

    ttft_s: float = 2.0
    """Time to the first token."""
    tpot_s: float = 0.1
    """Mean time per output token after the first."""
    percentile: float = 99.0

    def __post_init__(self) -> None:
        for name, value in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s)):
            if not (math.isfinite(value) and value > 0):
                raise ServingModelError(f"the SLO's {name} is {value:g} s; it must be above zero")
        if not 50 <= self.percentile < 100:
            raise ServingModelError(f"the SLO's percentile is {self.percentile:g}; it must be in [50, 100)")

    @property
    def z(self) -> float:
        """Standard deviations above the mean at the percentile."""
        return NormalDist().inv_cdf(self.percentile / 100)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A class of requests of similar size, by its means."""

    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            if not (math.isfinite(value) and value >= 1):
                raise ServingModelError(f"a bucket has {value:g} {name} tokens; it needs at least one")


def kv_token_bytes(model: ModelShape) -> int:
    """Keys and values of one token of context."""
    return 2 * model.layers * model.kv_heads * model.head_dim * WEIGHT_BYTES


@dataclass(frozen=True, slots=True)
class StepModel:
    """One (model, accelerator, mode): seconds of a step, and the tokens of context that fit."""

    name: str
    a_s: float
    b_s: float
    c_s: float
    d_s: float
    e_s: float
    kv_tokens: float
    watts: float = 0.0

    def __post_init__(self) -> None:
        for name in ("a_s", "b_s", "c_s", "d_s", "e_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ServingModelError(
                    f"the step model of {self.name} has {name[0]} = {value:g}: no work takes negative time;"
                    " measure more and more varied steps"
                )
        if self.a_s + self.b_s <= 0 or self.d_s <= 0:
            raise ServingModelError(f"the step model of {self.name} has steps that take no time")
        if self.kv_tokens < 1:
            raise ServingModelError(f"{self.name} has no room for the KV cache of one token")

    @classmethod
    def prior(cls, name: str, model: ModelShape, device: Accelerator, accelerators: int = 1) -> StepModel:
        """The roofline of a data sheet; `accelerators` of them share the work (tensor parallel) without loss.

        Raises:
            ServingModelError: the weights leave no room for the KV cache of one token.
        """
        bandwidth = device.memory_gb_per_s * 1e9 * MEMORY_REACHED * accelerators
        flops = device.tflops * 1e12 * device.utilisation * accelerators
        kv_bytes = kv_token_bytes(model)
        weights = model.parameters * WEIGHT_BYTES
        used = (device.memory_mib * MEMORY_USED / 1024 - RUNTIME_GIB) * 2**30 * accelerators
        if used - weights < kv_bytes:
            raise ServingModelError(
                f"{name}: the weights need {weights / 2**30:.1f} GiB of the {max(used, 0) / 2**30:.1f} GiB that"
                f" {accelerators} x {device.name} can use, which leaves no room for the KV cache of one token"
            )
        return cls(
            name,
            a_s=STEP_OVERHEAD_S + weights / bandwidth,
            b_s=2 * model.active_parameters / flops,
            c_s=kv_bytes / bandwidth,
            d_s=2 * model.active_parameters / flops,
            e_s=4 * model.layers * model.heads * model.head_dim / flops,
            kv_tokens=math.floor((used - weights) / kv_bytes),
            watts=device.watts * accelerators,
        )

    def under_cap(self, name: str, cap: float, prefill: float, decode: float) -> StepModel:
        """The same with its boards limited to a part of their watts, which makes prompts and decoding slower by these factors."""
        return StepModel(
            name,
            decode * self.a_s,
            decode * self.b_s,
            decode * self.c_s,
            prefill * self.d_s,
            prefill * self.e_s,
            self.kv_tokens,
            cap * self.watts,
        )

    def decode_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of a step without prompt tokens."""
        return self.a_s + self.b_s * batch + self.c_s * context_tokens

    def prompt_s(self, tokens: float) -> float:
        """Seconds that a prompt adds to the steps in which it is processed."""
        return self.d_s * tokens + self.e_s * tokens * tokens / 2

    def chunk_tokens(self, batch: float, context_tokens: float, done: float, step_s: float) -> int:
        """Prompt tokens of the next step, so that it takes about `step_s`; never less than `MIN_CHUNK_TOKENS`."""
        left = step_s - self.decode_s(batch, context_tokens)
        return int(min(max(left / (self.d_s + self.e_s * done), MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS))


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step."""

    batch: float
    context_tokens: float
    chunk_tokens: float
    chunk_context: float
    seconds: float


def fitted(name: str, steps: Sequence[Step], kv_tokens: float, watts: float = 0.0) -> tuple[StepModel, float]:
    """Least squares over relative errors; the model and the mean relative error of its steps.

    Raises:
        ServingModelError: fewer than five steps, a step that took no time, or a coefficient below zero.
    """
    import numpy as np

    if len(steps) < 5:
        raise ServingModelError(f"{name}: {len(steps)} measured steps; five coefficients need at least five")
    if any(not (math.isfinite(s.seconds) and s.seconds > 0) for s in steps):
        raise ServingModelError(f"{name}: a measured step took no time")
    rows = np.array(
        [(1.0, s.batch, s.context_tokens, s.chunk_tokens, s.chunk_tokens * s.chunk_context) for s in steps]
    )
    seconds = np.array([s.seconds for s in steps])
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
    found = np.linalg.lstsq(rows / scale / seconds[:, None], np.ones(len(steps)), rcond=None)[0] / scale
    # Round-off around zero is no negative coefficient: it must matter in some step to be refused.
    noise = 1e-6 * float(seconds.min()) / scale
    a, b, c, d, e = (0.0 if abs(v) <= n else float(v) for v, n in zip(found, noise, strict=True))
    model = StepModel(name, a, b, c, d, e, kv_tokens, watts)
    error = float(np.mean(np.abs(rows @ np.array((a, b, c, d, e)) / seconds - 1)))
    return model, error


def max_rate(model: StepModel, bucket: Bucket, slo: Slo) -> float:
    """Requests per second of this bucket alone that one replica serves within the SLO; 0 if it cannot."""
    if bucket.prompt_tokens + bucket.output_tokens > model.kv_tokens or not _meets(model, bucket, slo, 1e-6):
        return 0.0
    low, high = 1e-6, 1 / (model.prompt_s(bucket.prompt_tokens) + _decode_work_s(model, bucket))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _meets(model, bucket, slo, middle) else (low, middle)
    return low


def token_s(model: StepModel, bucket: Bucket, rate: float) -> float:
    """Mean seconds per token after the first that requests see at a rate; infinite where the replica cannot do their work."""
    step_s = _mean_step_s(model, bucket, rate)
    if math.isinf(step_s):
        return math.inf
    prompt_s = model.prompt_s(bucket.prompt_tokens)
    used = rate * prompt_s
    idle = 1 - used - rate * _decode_work_s(model, bucket)
    before_first_s = step_s * (1 - used) + prompt_s * (1 + used / (2 * (1 - used)))
    return step_s + used * before_first_s / max(bucket.output_tokens - 1, 1.0) / idle


def in_flight(model: StepModel, bucket: Bucket, rate: float) -> float:
    """Mean requests in flight at a sustainable rate (Little's law)."""
    busy = rate * (model.prompt_s(bucket.prompt_tokens) + _decode_work_s(model, bucket))
    step_s = (model.a_s + _own_s(model, bucket)) / max(1 - busy, 1e-9)
    return rate * (model.prompt_s(bucket.prompt_tokens) + bucket.output_tokens * step_s)


def _mean_step_s(model: StepModel, bucket: Bucket, rate: float) -> float:
    """Mean seconds of the steps that a request sees, with the prompts that come meanwhile."""
    busy = rate * (model.prompt_s(bucket.prompt_tokens) + _decode_work_s(model, bucket))
    return (model.a_s + _own_s(model, bucket)) / (1 - busy) if busy < 1 else math.inf


def _own_s(model: StepModel, bucket: Bucket) -> float:
    """What one sequence adds to a step, at half of its output."""
    return model.b_s + model.c_s * (bucket.prompt_tokens + bucket.output_tokens / 2)


def _decode_work_s(model: StepModel, bucket: Bucket) -> float:
    return bucket.output_tokens * _own_s(model, bucket)


def _meets(model: StepModel, bucket: Bucket, slo: Slo, rate: float) -> bool:
    prompt_s, step_s = model.prompt_s(bucket.prompt_tokens), _mean_step_s(model, bucket, rate)
    if not math.isfinite(step_s):
        return False
    context = bucket.prompt_tokens + bucket.output_tokens / 2
    others = rate * bucket.output_tokens * step_s
    used = rate * _decode_work_s(model, bucket) / (1 - rate * prompt_s)
    spread = others / (1 - used)
    if (1 + _quantile(others, spread, slo.z)) * context > model.kv_tokens:
        return False
    batch = 1 + _quantile(others, spread - others / 3, slo.z)
    if model.decode_s(batch, batch * context) + MIN_CHUNK_TOKENS * model.d_s > slo.tpot_s:
        return False
    late, most = 0.0, 1 - slo.percentile / 100
    for z, weight in zip(_DEVIATIONS, _WEIGHTS, strict=True):
        batch = _quantile(others, spread, z)
        late += weight * _late(prompt_s, model.decode_s(batch, batch * context), model.d_s, slo, rate)
        if late > most:
            return False
    return True


def _quantile(mean: float, variance: float, z: float) -> float:
    """Of a gamma distribution (Wilson and Hilferty 1931)."""
    shape = mean * mean / variance
    return mean * max(0.0, 1 - 1 / (9 * shape) + z / (3 * math.sqrt(shape))) ** 3


def _late(prompt_s: float, decode_s: float, token_s: float, slo: Slo, rate: float) -> float:
    """The part of prompts whose first token is late while a step's decoding takes so long: the running step, the queue of
    prompts, and the prompt itself.

    The wait in an M/D/1 queue has the tail (1 - ρ) / (ρ·e^x - 1) · exp(-x·t/s) with ρ·(e^x - 1) = x (Tijms, A First Course in
    Stochastic Models, §9.2), and is never more often above zero than ρ."""
    step_s = max(CHUNK_STEP_FRACTION * slo.tpot_s, decode_s + MIN_CHUNK_TOKENS * token_s)
    service_s = prompt_s * step_s / (step_s - decode_s)
    used, left_s = rate * service_s, slo.ttft_s - service_s - step_s
    if left_s < 0 or used >= 1:
        return 1.0
    x = min(
        -2 * math.log(used), 1.3 - 1.2 * math.log(used)
    )  # right of the root, from where Newton's steps descend to it
    for _ in range(_NEWTON_STEPS):
        power = math.exp(x)
        x -= (used * (power - 1) - x) / (used * power - 1)
    return min(used, (1 - used) / (used * math.exp(x) - 1) * math.exp(-x * left_s / service_s))
