"""What `busbar simulate-serving` says callers wait for, beside the engine that it simulates.

    python benchmarks/serving_replay.py [--requests 200] [--repeats 3] [--output benchmarks/results/serving_replay.json]

A random Llama (4 layers x 256) on this CPU, one thread, float32; requests of 32 to 384 prompt and 8 to 96 output tokens, Poisson
arrivals at 0.5, 0.7 and 0.85 of what the engine answers when all requests are there at once. Time is CPU time of the process
plus the gaps in which nothing is to do, because wall time on a shared machine is noise.

The engine first serves mixed requests at changing rates and fits its step model. Then each load runs on the engine, and is
replayed with the step model of before the load, that is, predicted. Bar: the 50th and 90th percentile of the time to the first
token and per further token within 15 % of the engine's, medians of the repeats. Beside each prediction stands the replay with the
step model of after the load, which has seen these steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.gpu.serving import make_engine, make_model
from benchmarks.result import circumstances, publish
from benchmarks.serving_scale.engine import (
    KV_BYTES,
    MAX_RUNNING,
    MODELS,
    Clock,
    Seen,
    learn,
    poisson,
    serve,
)

from busbar.scheduler.simulate.metrics import percentile
from busbar.workloads.serving import replay
from busbar.workloads.serving.core import EngineCore

LOADS = (0.5, 0.7, 0.85)
BAR = 0.15
NAME = "4 layers x 256"
Sizes = list[tuple[int, int]]


def loads(rate: float, count: int, rng: random.Random) -> tuple[list[float], Sizes]:
    """Arrivals, and prompt and output tokens."""
    sizes = [(rng.randint(32, 384), rng.randint(8, 96)) for _ in range(count)]
    return poisson(rate, count, rng), sizes


def saturation(core: EngineCore, clock: Clock, count: int, rng: random.Random) -> float:
    """Requests per second when all are there at once."""
    _, sizes = loads(1.0, count, rng)
    seen = serve(core, clock, [0.0] * count, sizes, rng)
    return count / max(one.times_s[-1] for one in seen)


def predicted(core: EngineCore, arrivals: Sequence[float], sizes: Sizes) -> list[replay.Seen]:
    """The replay with the step model that the engine would report now."""
    limits = core.scheduler.limits
    times = replay.StepTimes(*core.speed.model.theta)
    engine = replay.simulated(times, core.scheduler.pool.total, limits, core.tpot_s)
    rows = [(at, *size) for at, size in zip(arrivals, sizes, strict=True)]
    return replay.replay(replay.requests_of(rows), engine)


def figures(seen: Sequence[Seen] | Sequence[replay.Seen]) -> dict[str, float]:
    """Milliseconds."""
    first = [one.ttft_s for one in seen]
    each = [one.tpot_s for one in seen if one.tpot_s is not None]
    return {
        f"{name}_p{percent}": 1000 * percentile(values, percent)
        for name, values in (("ttft", first), ("tpot", each))
        for percent in (50, 90)
    }


def measured(
    core: EngineCore, clock: Clock, part: float, full: float, asked: argparse.Namespace
) -> dict[str, Any]:
    """The row of one load: predicted over measured."""
    runs: list[dict[str, dict[str, float]]] = []
    for repeat in range(asked.repeats):
        rng = random.Random(f"{part} {repeat}")
        arrivals, sizes = loads(part * full, asked.requests, rng)
        before = figures(predicted(core, arrivals, sizes))
        real = figures(serve(core, clock, arrivals, sizes, rng))
        after = figures(predicted(core, arrivals, sizes))
        runs.append({"before": before, "real": real, "after": after})
        print(f"{part}: {repeat + 1} of {asked.repeats}", file=sys.stderr, flush=True)

    def middle(which: str, name: str) -> float:
        return statistics.median(run[which][name] / run["real"][name] for run in runs)

    ratios = {name: round(middle("before", name), 3) for name in runs[0]["real"]}
    return {
        "load": part,
        "requests_per_s": round(part * full, 3),
        "measured_ms": {
            name: round(statistics.median(run["real"][name] for run in runs), 3) for name in ratios
        },
        "predicted_over_measured": ratios,
        "with_the_step_model_of_after": {name: round(middle("after", name), 3) for name in ratios},
        "misses": [name for name, ratio in ratios.items() if abs(ratio - 1) > BAR],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of each load")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    clock, rng = Clock(), random.Random(0)
    core = make_engine(make_model(MODELS[NAME], torch.device("cpu"), torch.float32), KV_BYTES, MAX_RUNNING)
    core._clock = clock
    learn(core, clock, rng)
    full = saturation(core, clock, asked.requests, rng)
    rows = [measured(core, clock, part, full, asked) for part in LOADS]
    publish(circumstances() | {"model": NAME, "saturation_requests_per_s": full, "rows": rows}, asked.output)


if __name__ == "__main__":
    main()
