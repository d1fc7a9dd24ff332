"""What is learnt of a serving engine's speed while it runs: by our engine itself, and by the operator from the counters
of a model server that reports no more.

The model of a step is t = a + b·B + c·Σctx + d·C with B decoding sequences, Σctx thousands of tokens
of context and C prompt tokens. It is fitted online by recursive least squares with slow forgetting
(Ljung, System Identification, §11.2), with the running error beside it; plain sums give tokens/s. A row may also be
the mean of several steps: the model is linear, so the mean content of steps takes their mean time.

No work takes negative time, but noise can make a fitted coefficient negative where steps hardly differ in it. What is
reported is the best fit without negative coefficients: those that are held at zero change the others by their
covariance with them.

A row of n steps weighs n² / `ROW_STEPS`². Its error is that of its ends, where a step has begun and is not counted: the same
number of seconds however many steps there are, and so 1/n of it in their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from math import sqrt

FORGETTING = 0.999
FEATURES = 4
ROW_STEPS = 30
"""A row of so many steps weighs as much as one step that was measured by itself."""
TRUSTED_STEPS = 64
"""Steps the model must have seen before anything is decided by it."""


@dataclass
class OnlineStepModel:
    """Coefficients in seconds: per step, per sequence, per 1000 tokens of context, per prompt token."""

    theta: list[float] = field(default_factory=lambda: [0.0] * FEATURES)
    covariance: list[list[float]] = field(
        default_factory=lambda: [[1e3 if i == j else 0.0 for j in range(FEATURES)] for i in range(FEATURES)]
    )
    steps: int = 0
    squared_error: float = 0.0
    settled: float = 0.0
    """Weights of the rows that the error is of."""

    def learn(
        self,
        decoding: float,
        context_tokens: float,
        prompt_tokens: float,
        seconds: float,
        weight: float = 1.0,
    ) -> None:
        x = (1.0, decoding, context_tokens / 1000.0, prompt_tokens)
        px = [sum(p * v for p, v in zip(row, x, strict=True)) for row in self.covariance]
        scale = FORGETTING / weight + sum(v * p for v, p in zip(x, px, strict=True))
        error = seconds - self.predict(decoding, context_tokens, prompt_tokens)
        self.theta = [t + p / scale * error for t, p in zip(self.theta, px, strict=True)]
        self.covariance = [
            [min((c - px[i] * px[j] / scale) / FORGETTING, 1e6) for j, c in enumerate(row)]
            for i, row in enumerate(self.covariance)
        ]
        self.steps += 1
        if self.steps > 2 * FEATURES:  # the first errors are those of knowing nothing
            self.settled += weight
            part = max(weight / self.settled, min(1.0, weight * (1 - FORGETTING)))
            self.squared_error += part * (error * error - self.squared_error)

    def predict(self, decoding: float, context_tokens: float, prompt_tokens: float) -> float:
        x = (1.0, decoding, context_tokens / 1000.0, prompt_tokens)
        return sum(t * v for t, v in zip(self.theta, x, strict=True))

    @property
    def rms_error_s(self) -> float:
        return sqrt(self.squared_error)

    @property
    def nonnegative(self) -> list[float]:
        """The coefficients >= 0 that fit best; all subsets of them are tried as zeros."""
        if min(self.theta) >= 0:
            return self.theta
        best, least = [0.0] * FEATURES, float("inf")
        for zeros in chain.from_iterable(combinations(range(FEATURES), n) for n in range(1, FEATURES)):
            fitted = self._held_at_zero(zeros)
            if fitted is not None and fitted[1] < least and min(fitted[0]) >= 0:
                best, least = fitted
        return best

    def _held_at_zero(self, zeros: Sequence[int]) -> tuple[list[float], float] | None:
        """The best coefficients with these at zero, and what that costs; None where the covariance is singular."""
        shares = _solved(
            [[self.covariance[i][j] for j in zeros] for i in zeros], [self.theta[i] for i in zeros]
        )
        if shares is None:
            return None
        pairs = list(zip(zeros, shares, strict=True))
        theta = [
            t - sum(row[j] * s for j, s in pairs) for t, row in zip(self.theta, self.covariance, strict=True)
        ]
        return [0.0 if i in zeros else t for i, t in enumerate(theta)], sum(
            self.theta[j] * s for j, s in pairs
        )


def _solved(rows: list[list[float]], right: list[float]) -> list[float] | None:
    """x of a small linear system, by elimination with pivots; None where it is singular."""
    size = len(right)
    table = [[*row, value] for row, value in zip(rows, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(table[k][i]))
        if abs(table[pivot][i]) < 1e-300:
            return None
        table[i], table[pivot] = table[pivot], table[i]
        for k in range(size):
            if k != i:
                factor = table[k][i] / table[i][i]
                table[k] = [a - factor * b for a, b in zip(table[k], table[i], strict=True)]
    return [row[size] / row[i] for i, row in enumerate(table)]


@dataclass(frozen=True, slots=True)
class StepSums:
    """What steps were made of, and what they took, in all. Never changed, so any thread may read it whole."""

    steps: float = 0
    sequences: float = 0
    context_tokens: float = 0
    prompt_tokens: float = 0
    seconds: float = 0.0

    def plus(self, other: StepSums) -> StepSums:
        return StepSums(
            self.steps + other.steps,
            self.sequences + other.sequences,
            self.context_tokens + other.context_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.seconds + other.seconds,
        )


@dataclass
class Speed:
    """Sums over the steps since the start."""

    model: OnlineStepModel = field(default_factory=OnlineStepModel)
    prefill: StepSums = StepSums()
    """Of the steps with more prompt tokens than decoded ones."""
    decode: StepSums = StepSums()
    """Of all others."""
    decode_tokens: float = 0
    decode_s: float = 0.0
    prefill_tokens: float = 0
    prefill_s: float = 0.0
    for_prompts_s: float = 0.0
    """Of all steps, also those that decode besides: what their prompt tokens took, by the model."""
    for_decoding_s: float = 0.0

    def record(
        self,
        decoding: float,
        context_tokens: float,
        prompt_tokens: float,
        seconds: float,
        wrong: int = 0,
        steps: float = 1,
        beside_s: float = 0.0,
    ) -> None:
        """One step, or the totals of several. Where prompt tokens are more than those decoded, it counts as prefill;
        `wrong` of those decoded were guesses that gave no token. `beside_s` went to decoding besides, and is not what the
        model explains."""
        each = (decoding / steps, context_tokens / steps, prompt_tokens / steps, seconds / steps)
        self.model.learn(*each, weight=(steps / ROW_STEPS) ** 2 if steps > 1 else 1.0)
        prompts_s = seconds * self._prompt_part(decoding, prompt_tokens, seconds)
        self.for_prompts_s += prompts_s
        self.for_decoding_s += seconds - prompts_s + beside_s
        row = StepSums(steps, decoding, context_tokens, prompt_tokens, seconds)
        if prompt_tokens > decoding:
            self.prefill = self.prefill.plus(row)
            self.prefill_tokens += prompt_tokens + decoding - wrong
            self.prefill_s += seconds
        elif decoding:
            self.decode = self.decode.plus(row)
            self.decode_tokens += decoding - wrong + prompt_tokens
            self.decode_s += seconds + beside_s

    def _prompt_part(self, decoding: float, prompt_tokens: float, seconds: float) -> float:
        """Of the seconds of a step: of its tokens while nothing better is known."""
        if not prompt_tokens or not decoding or seconds <= 0:
            return float(bool(prompt_tokens))
        each = self.prompt_token_s if self.model.steps >= TRUSTED_STEPS else None
        if each is None:
            return prompt_tokens / (prompt_tokens + decoding)
        return min(1.0, prompt_tokens * each / seconds)

    @property
    def prompt_token_s(self) -> float | None:
        """What a further prompt token costs, None before anything was measured."""
        each = self.model.theta[3]
        if self.model.steps >= TRUSTED_STEPS and each > 0:
            return each
        return self.prefill_s / self.prefill_tokens if self.prefill_s else None

    def report(self) -> dict[str, object]:
        """The part of /status that the performance table reads; null where nothing was measured."""
        a, b, c, d = self.model.nonnegative
        return {
            "prefillTokensPerSecond": self.prefill_tokens / self.prefill_s if self.prefill_s else None,
            "decodeTokensPerSecond": self.decode_tokens / self.decode_s if self.decode_s else None,
            "stepModel": {
                "secondsPerStep": a,
                "secondsPerSequence": b,
                "secondsPerThousandContextTokens": c,
                "secondsPerPromptToken": d,
                "rmsErrorSeconds": self.model.rms_error_s,
                "steps": self.model.steps,
            }
            if self.model.steps >= 2 * FEATURES
            else None,
        }
