"""Rows of `kit.py` for the step model alone, beside our engine's scheduler with steps of that model."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from busbar.scheduler.autoscale.step_model import (
    MAX_CHUNK_TOKENS,
    Bucket,
    Slo,
    StepModel,
    in_flight,
    max_rate,
)
from busbar.scheduler.fit import accelerator
from busbar.scheduler.simulate.serving_pools import LLAMA_8B
from busbar.workloads.serving.replay import StepTimes, replay, requests_of, simulated
from busbar.workloads.serving.scheduler import StepLimits

Row = dict[str, Any]

SLO = Slo(ttft_s=2.0, tpot_s=0.1, percentile=99.0)
"""Of all rows."""


def rows(data: Path) -> list[Row]:
    """The rate of the formula beside the largest rate at which our engine's scheduler keeps the SLO with steps of that model."""
    found: list[Row] = []
    for name in ("L4", "A10G", "A100", "H100"):
        device = accelerator(name)
        assert device is not None
        model = StepModel.prior(name, LLAMA_8B, device)
        for bucket in (
            Bucket(100, 150),
            Bucket(300, 200),
            Bucket(1155, 211),
            Bucket(2000, 200),
            Bucket(300, 1000),
        ):
            rate = max_rate(model, bucket, SLO)
            if rate < 0.1:
                continue
            simulated_rps = _sustained(model, bucket, rate)
            ratio = round(rate / simulated_rps, 3)
            found.append(
                {
                    "row": f"{name}, {bucket.prompt_tokens:.0f} prompt and {bucket.output_tokens:.0f} output tokens",
                    "measured": {
                        "formula_rps": round(rate, 3),
                        "simulated_rps": round(simulated_rps, 3),
                        "ratio": ratio,
                    },
                    "bars": {"error": 0.2},
                    "missed": ["error"] if abs(ratio - 1) > 0.2 else [],
                }
            )
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def _sustained(model: StepModel, bucket: Bucket, near: float) -> float:
    """To 2.5 % of the rate that it should be near."""
    requests = max(1500, int(5 * in_flight(model, bucket, near)))
    low, high = 0.6 * near, 1.4 * near
    for _ in range(5):
        middle = (low + high) / 2
        attained = _attained(model, bucket, middle, requests)
        low, high = (middle, high) if attained >= 0.99 else (low, middle)
    return low


def _attained(model: StepModel, bucket: Bucket, rate: float, requests: int) -> float:
    """Of requests at this rate; the first fifth fills the engine."""
    prompt, output = int(bucket.prompt_tokens), int(bucket.output_tokens)
    times = StepTimes(model.a_s, model.b_s, 1000 * model.c_s, model.prompt_s(prompt) / prompt)
    limits = StepLimits(max_batched_tokens=MAX_CHUNK_TOKENS, max_running=4096)
    engine = simulated(times, int(model.kv_tokens) // limits.block_tokens, limits, SLO.tpot_s)
    rng, at_s, sent = random.Random(1), 0.0, []
    for _ in range(requests):
        at_s += rng.expovariate(rate)
        sent.append((at_s, prompt, output))
    seen = replay(requests_of(sent, shared_tokens=prompt), engine)
    counted = seen[len(seen) // 5 :]
    return sum(one.ttft_s <= SLO.ttft_s and (one.tpot_s or 0) <= SLO.tpot_s for one in counted) / len(counted)
