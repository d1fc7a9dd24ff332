"""The number of prompt tokens in a step with which running requests keep their time per token. Pure Python.

The step model (`scheduler/fit/online.py`) predicts the time of a step; the time that the promise leaves after decoding is used for
prompts: C = (promise - t(B, context)) / t(prompt token), within bounds. If that is below the minimum, no step size
keeps the promise, and the engine reports that it is saturated.
"""

from __future__ import annotations

from dataclasses import dataclass

from busbar.scheduler.fit.chunks import CHUNK_STEP_FRACTION
from busbar.scheduler.fit.online import TRUSTED_STEPS, OnlineStepModel


@dataclass(frozen=True)
class Budget:
    """Of one step."""

    tokens: int
    """Of prompts and decoding together."""
    saturated: bool = False
    """Even the least budget for prompts breaks the promise."""


def step_budget(
    model: OnlineStepModel, tpot_s: float | None, decoding: int, context_tokens: int, least: int, most: int
) -> Budget:
    """The budget of a step in which `decoding` sequences with so much context decode."""
    if tpot_s is None or decoding == 0 or model.steps < TRUSTED_STEPS:
        return Budget(most)
    each = model.theta[3]
    left = CHUNK_STEP_FRACTION * tpot_s - model.predict(decoding, context_tokens, 0)
    prompt = most if each <= 0 else int(max(0.0, left) / each)
    bounded = min(max(prompt, least), most)
    return Budget(min(decoding + bounded, most), saturated=left < least * max(each, 0.0))
