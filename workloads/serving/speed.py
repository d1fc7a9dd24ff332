"""What the engine learns about its own speed, for the performance table.

The model of a step is t = a + b·B + c·Σctx + d·C with B decoding sequences, Σctx thousands of tokens
of context and C prompt tokens. It is fitted online by recursive least squares with slow forgetting
(Ljung, System Identification, §11.2), with the running error beside it; plain sums give tokens/s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

FORGETTING = 0.999
FEATURES = 4


@dataclass
class StepModel:
    """Coefficients in seconds: per step, per sequence, per 1000 tokens of context, per prompt token."""

    theta: list[float] = field(default_factory=lambda: [0.0] * FEATURES)
    covariance: list[list[float]] = field(
        default_factory=lambda: [[1e3 if i == j else 0.0 for j in range(FEATURES)] for i in range(FEATURES)]
    )
    steps: int = 0
    squared_error: float = 0.0

    def learn(self, decoding: int, context_tokens: int, prompt_tokens: int, seconds: float) -> None:
        x = (1.0, float(decoding), context_tokens / 1000.0, float(prompt_tokens))
        px = [sum(p * v for p, v in zip(row, x, strict=True)) for row in self.covariance]
        scale = FORGETTING + sum(v * p for v, p in zip(x, px, strict=True))
        error = seconds - self.predict(decoding, context_tokens, prompt_tokens)
        self.theta = [t + p / scale * error for t, p in zip(self.theta, px, strict=True)]
        self.covariance = [
            [min((c - px[i] * px[j] / scale) / FORGETTING, 1e6) for j, c in enumerate(row)]
            for i, row in enumerate(self.covariance)
        ]
        self.steps += 1
        settled = self.steps - 2 * FEATURES
        if settled > 0:  # the first errors are those of knowing nothing
            weight = max(1.0 / settled, 1 - FORGETTING)
            self.squared_error += weight * (error * error - self.squared_error)

    def predict(self, decoding: int, context_tokens: int, prompt_tokens: int) -> float:
        x = (1.0, float(decoding), context_tokens / 1000.0, float(prompt_tokens))
        return sum(t * v for t, v in zip(self.theta, x, strict=True))

    @property
    def rms_error_s(self) -> float:
        return sqrt(self.squared_error)


@dataclass
class Speed:
    """Sums over the steps since the start."""

    model: StepModel = field(default_factory=StepModel)
    decode_tokens: int = 0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0

    def record(self, decoding: int, context_tokens: int, prompt_tokens: int, seconds: float) -> None:
        """One step. Steps with more prompt than decode tokens count as prefill."""
        self.model.learn(decoding, context_tokens, prompt_tokens, seconds)
        if prompt_tokens > decoding:
            self.prefill_tokens += prompt_tokens + decoding
            self.prefill_s += seconds
        elif decoding:
            self.decode_tokens += decoding + prompt_tokens
            self.decode_s += seconds

    def report(self) -> dict[str, object]:
        """The part of /status that the performance table reads; null where nothing was measured."""
        a, b, c, d = self.model.theta
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
