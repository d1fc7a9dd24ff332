"""From an engine's steps to the rate that is expected of it, offline: what the fit and the formula err by without the noise of a
machine.

    python -m benchmarks.serving_scale.recorded [--out benchmarks/results/serving_scale/recorded.json]

Our engine's scheduler runs with step times of a table, fits its step model as it goes and sizes its prompts' pieces by it. It
serves mixed requests, then requests of one size at a low rate for some time, and is then asked for what `max_rate` says of
the model it has. The rate that it sustains is found by halving. SLO and sizes are those of `engine.py`.

The tables were made of the steps of that engine: least squares over the seconds of 24,600 steps, piecewise linear in the
batch and in the prompt tokens, with the pace of the machine (a running median of 200 steps) taken out. `CONCAVE` has other
seconds for the batch: a further sequence costs less in a larger one, as the same CPU showed when nothing ran beside.

Bar: the sustained rate is within 20 % of `max_rate`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from bisect import bisect_left
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from busbar.scheduler.autoscale.step_model import Bucket, Slo, StepModel, max_rate
from busbar.scheduler.fit.online import OnlineStepModel
from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.replay import SimulatedEngine, StepTimes, replay, requests_of
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Step

RATE_BAR = 0.20
PERCENTILE = 95.0
BLOCKS = 2048
SIZES = (Bucket(128, 48), Bucket(384, 24))
LOW_RATE, LOW_REQUESTS = 0.15, 600
"""Part of `max_rate` at which the engine serves before it is asked, and how many requests."""


@dataclass(frozen=True)
class StepTable:
    """Seconds of a step by its content; between the sizes and behind the last ones linear."""

    batch_ms: Mapping[int, float]
    chunk_ms: Mapping[int, float]
    context_ms: float
    """Per thousand tokens of context."""
    chunk_context_ms: float
    """Per prompt token and thousand tokens before it."""
    noise: float
    """Standard deviation, as a part of the step."""
    pace: float = 1.0

    def seconds(self, step: Step, rng: random.Random) -> float:
        chunks = [chunk for chunk in step.chunks if chunk.count > 1]
        batch, tokens = len(step.chunks) - len(chunks), sum(chunk.count for chunk in chunks)
        context = sum(chunk.start + chunk.count for chunk in step.chunks)
        reads = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in chunks)
        ms = _between(self.batch_ms, batch) + _between(self.chunk_ms, tokens)
        ms += (self.context_ms * context + self.chunk_context_ms * reads) / 1000
        return self.pace * ms / 1000 * rng.lognormvariate(0, self.noise)


def _between(table: Mapping[int, float], at: int) -> float:
    sizes = list(table)
    after = min(max(bisect_left(sizes, at), 1), len(sizes) - 1)
    low, high = sizes[after - 1], sizes[after]
    return table[low] + (at - low) / (high - low) * (table[high] - table[low])


RECORDED = StepTable(
    batch_ms={0: 2.3, 1: 4.9, 2: 4.9, 4: 4.9, 8: 6.0, 16: 9.3},
    chunk_ms={0: 0.0, 1: 1.2, 32: 2.8, 64: 6.7, 128: 10.8, 256: 20.1, 384: 31.7, 512: 43.2},
    context_ms=2.5,
    chunk_context_ms=0.074,
    noise=0.1,
)
CONCAVE = replace(RECORDED, batch_ms={0: 2.0, 1: 3.6, 2: 4.1, 4: 4.6, 8: 5.3, 16: 6.6, 32: 9.0, 64: 13.0})
TABLES = {"recorded": RECORDED, "concave": CONCAVE}


@dataclass
class LearningEngine(SimulatedEngine):
    """Steps by the table; the model is what the engine has learnt."""

    table: StepTable = RECORDED
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    model: OnlineStepModel = field(default_factory=OnlineStepModel)

    def __post_init__(self) -> None:
        self._model = self.model

    def seconds(self, step: Step) -> float:
        found = self.table.seconds(step, self.rng)
        ends = [chunk.start + 1 for chunk in step.chunks if chunk.count == 1]
        self.model.learn(len(ends), sum(ends), step.token_count - len(ends), found)
        return found


@dataclass(frozen=True)
class Trial:
    """An engine that has served, and what is expected of it."""

    table: StepTable
    bucket: Bucket
    slo: Slo
    learnt: OnlineStepModel
    seed: int

    @property
    def expected_rps(self) -> float:
        return max_rate(_told(self.learnt), self.bucket, self.slo)

    def attained(self, rate: float, requests: int = 400) -> float:
        """The part of requests within both targets; the first tenth fills the engine."""
        engine = _engine(self.table, deepcopy(self.learnt), self.slo.tpot_s, self.seed + 1)
        seen = replay(
            requests_of(_arrivals(rate, requests, self.bucket, random.Random(self.seed + 7))), engine
        )
        counted = seen[requests // 10 :]
        good = sum(one.ttft_s <= self.slo.ttft_s and (one.tpot_s or 0) <= self.slo.tpot_s for one in counted)
        return good / len(counted)

    def sustained_rps(self) -> float:
        """To 1.6 % of what is expected."""
        low, high = 0.5 * self.expected_rps, 1.5 * self.expected_rps
        for _ in range(6):
            middle = (low + high) / 2
            low, high = (middle, high) if self.attained(middle) >= PERCENTILE / 100 else (low, middle)
        return low


def trial(table: StepTable, bucket: Bucket, slower: float = 1.0, seed: int = 0) -> Trial:
    """An engine that has served mixed requests, and then few of a size, on a machine that is `slower` from then on."""
    rng = random.Random(seed)
    engine = _engine(table, OnlineStepModel(), None, seed)
    mixed: list[tuple[float, int, int]] = []
    for rate in (2.0, 8.0, 20.0, 5.0):
        begin_s = mixed[-1][0] if mixed else 0.0
        for at_s, _, _ in _arrivals(rate, 40, bucket, rng):
            mixed.append((begin_s + at_s, rng.choice((16, 64, 128, 256, 512)), rng.choice((8, 24, 64))))
    replay(requests_of(mixed), engine)
    learnt, now = engine.model, replace(table, pace=slower)
    model = _told(learnt)
    alone_s = model.decode_s(1, bucket.prompt_tokens + bucket.output_tokens)
    slo = Slo(slower * 20 * model.prompt_s(bucket.prompt_tokens), slower * 4 * alone_s, PERCENTILE)
    low = LOW_RATE * max_rate(model, bucket, slo) / slower
    replay(requests_of(_arrivals(low, LOW_REQUESTS, bucket, rng)), _engine(now, learnt, slo.tpot_s, seed + 3))
    return Trial(now, bucket, slo, learnt, seed)


def _engine(table: StepTable, model: OnlineStepModel, tpot_s: float | None, seed: int) -> LearningEngine:
    scheduler = Scheduler(BlockPool(BLOCKS), StepLimits())
    return LearningEngine(
        StepTimes(0.0, 0.0, 0.0, 0.0), scheduler, tpot_s, table=table, rng=random.Random(seed), model=model
    )


def _arrivals(rate: float, count: int, bucket: Bucket, rng: random.Random) -> list[tuple[float, int, int]]:
    at_s, found = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        found.append((at_s, int(bucket.prompt_tokens), int(bucket.output_tokens)))
    return found


def _told(model: OnlineStepModel) -> StepModel:
    """As the operator takes it from a report."""
    a, b, c, d = model.theta
    return StepModel("cpu", a, b, c / 1000, d, 0.0, BLOCKS * StepLimits().block_tokens)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name, table in TABLES.items():
        for bucket in SIZES:
            for slower in (1.0, 1.3):
                found = [trial(table, bucket, slower, seed) for seed in range(arguments.seeds)]
                ratios = [round(each.sustained_rps() / each.expected_rps, 3) for each in found]
                rows.append(
                    {
                        "steps": name, "size": f"{bucket.prompt_tokens:g} in, {bucket.output_tokens:g} out", "slower": slower,
                        "max_rate": [round(each.expected_rps, 2) for each in found], "sustained_over_max_rate": ratios,
                        "misses": ["rate"] if any(abs(ratio - 1) > RATE_BAR for ratio in ratios) else [],
                    }
                )  # fmt: skip
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    document = {
        "command": " ".join(["python -m benchmarks.serving_scale.recorded", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "percentile": PERCENTILE,
        "rows": rows,
    }
    text = json.dumps(document, indent=1) + "\n"
    if arguments.out is not None:
        arguments.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
