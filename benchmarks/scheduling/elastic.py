"""Elastic jobs at measured speeds: 64 accelerators of two types, 160 jobs, beside two published integer programs.

The jobs are drawn from ElasticFlow's trace (model, batch size, iterations) in Pollux's proportions of small, medium,
large and extra-large jobs (72 / 20 / 6 / 2 per cent; OSDI'21). Each may have from one accelerator up to the largest
measured size that is faster than all smaller ones, at most 32. Speeds: on T4 Pollux's measurements by accelerators and
nodes; on A100 ElasticFlow's curve of the same model, or of the nearest (`CURVES`). From T4 to A100 with one accelerator
the ratio is measured for two models; the others have the geometric mean of these.

Restarts cost what Sia measured for the model (SOSP'23; 30 s where it did not), at every start after the first,
for all three alike. All plan on a grid of 60 s: the peers in every minute, ours at events and else every five. Loads:
the 160 jobs come within eight hours, as the papers have it, or within one: then more jobs are there than accelerators
for a while. `waiting_most` is how many waited at one moment.

A row of ours is judged by the better peer of the same load and seed, and a last one for each load by the means over the
seeds: of 160 jobs the 99th percentile lies between the second and the third longest, and hangs on the draw.
"""

from __future__ import annotations

import csv
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.progress import shown
from benchmarks.scheduling import elastic_peers

from busbar.scheduler import Policy
from busbar.scheduler.simulate.engine import Decide, Settings, simulate
from busbar.scheduler.simulate.metrics import Result
from busbar.scheduler.simulate.scaling import Cells, elastic_job, measured
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

CLUSTER = TraceCluster({"a100": 3, "t4": 10}, {"a100": 8, "t4": 4})
JOBS = 160
SEEDS = (1, 2, 3)
HOURS = (8.0, 1.0)
MOST = 32
SIZES = {"small": 72, "medium": 20, "large": 6, "extra-large": 2}
MODELS = {
    "cifar10": "small",
    "ncf": "small",
    "deepspeech2": "medium",
    "bert": "medium",
    "yolov3": "large",
    "imagenet": "extra-large",
}
CURVES = {
    "bert": ("bert", 128),
    "cifar10": ("resnet50_cifar10", 256),
    "deepspeech2": ("deepspeech2", 64),
    "imagenet": ("resnet50", 256),
}
"""Whose scaling on A100 stands for a model's, and with which batch size; the others scale as on T4."""
SAME_MODEL = ("deepspeech2", "imagenet")
"""Those whose curve is of the same model, so that samples per second compare."""
RESTART_S = {"cifar10": 30.0, "bert": 120.0, "imagenet": 250.0, "deepspeech2": 25.0, "yolov3": 45.0}
PEERS = {"sia": elastic_peers.sia, "pollux": elastic_peers.pollux}
NUMBERS = ("mean_h", "median_h", "p99_h", "makespan_h", "moves_per_job", "lost_h_per_job", "decision_ms_p50")
GPU_HOURS = 1.1
"""Of the better peer's."""


def speeds(data: Path) -> dict[tuple[str, int], dict[str, Cells]]:
    """Iterations per second of each (model, batch size), by type."""
    batches: dict[str, set[int]] = defaultdict(set)
    for row in _rows(data):
        batches[row["model_name"]].add(int(row["batch_size"]))
    t4 = {(m, b): measured(data / "pollux_t4", m, b, 4) for m, own in batches.items() for b in own}
    curves = {
        model: (batch, measured(data / "elasticflow" / "throughputs_A100", name, batch, 8))
        for model, (name, batch) in CURVES.items()
    }
    ratios = {}
    for model in SAME_MODEL:
        batch, curve = curves[model]
        least = min(batches[model])
        ratios[model] = batch * curve[1, 1] / (least * t4[model, least][1, 1])
    usual = math.prod(ratios.values()) ** (1 / len(ratios))
    found = {}
    for (model, batch), cells in t4.items():
        first = ratios.get(model, usual) * cells[1, 1]
        shape = curves[model][1] if model in curves else cells
        found[model, batch] = {
            "t4": cells,
            "a100": {size: first * speed / shape[1, 1] for size, speed in shape.items()},
        }
    return found


def _rows(data: Path) -> list[dict[str, str]]:
    with (data / "elasticflow" / "traces_for_ElasticFlow" / "elasticVpollux_e.csv").open() as file:
        return list(csv.DictReader(file))


def trace(data: Path, seed: int, hours: float, jobs: int = JOBS) -> Trace:
    """The jobs of one replay, with arrivals spread evenly at random over so many hours."""
    table, random = speeds(data), Random(seed)
    rows: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in _rows(data):
        rows[MODELS[row["model_name"]]].append(row)
    arrivals = sorted(random.uniform(0, 3600 * hours) for _ in range(jobs))
    made: list[TraceJob] = []
    for number, at in enumerate(arrivals):
        size = random.choices(list(SIZES), list(SIZES.values()))[0]
        model = random.choice(sorted({row["model_name"] for row in rows[size]}))
        row = random.choice([row for row in rows[size] if row["model_name"] == model])
        key = model, int(row["batch_size"])
        made.append(
            elastic_job(
                f"{number:05d}",
                at,
                float(row["iteration"]),
                f"{model} batch {key[1]}",
                table[key],
                MOST,
                RESTART_S.get(model),
            )
        )
    return Trace(f"elastic, {jobs} jobs in {hours:g} h, seed {seed}", tuple(made))


def load(found: Trace, cluster: TraceCluster, hours: float) -> float:
    """Accelerator-seconds that the jobs need with one accelerator each, at their mean speed over the types, over what
    there is while they arrive."""
    capacity = cluster.capacity()
    total = sum(capacity.values())
    asked = 0.0
    for job in found.jobs:
        asked += job.work / (sum(job.speeds.get(kind, 0.0) * n for kind, n in capacity.items()) / total)
    return asked / (3600 * hours * total)


def rows(data: Path) -> list[dict[str, Any]]:
    """For each load and seed the peers, and ours with steps known and unknown; then the means over the seeds."""
    found = list(shown("elastic", _measured(data)))
    for hours in HOURS:
        own = [row for row in found if row["hours"] == hours]
        peers = [_mean([row for row in own if row["who"] == who]) for who in PEERS]
        found += peers
        for known in (True, False):
            ours = _mean([row for row in own if row.get("steps_known") is known])
            found.append(_judged(ours, peers))
    return found


def _mean(of: list[dict[str, Any]]) -> dict[str, Any]:
    kept = {name: of[0][name] for name in ("hours", "who", "steps_known") if name in of[0]}
    means = {name: round(sum(row[name] for row in of) / len(of), 4) for name in (*NUMBERS, "gpu_h_per_job")}
    return kept | {"seeds": len(of)} | means


def _measured(data: Path) -> Iterator[tuple[float, dict[str, Any]]]:
    cases = [(hours, seed) for hours in HOURS for seed in SEEDS]
    for number, (hours, seed) in enumerate(cases):
        found = trace(data, seed, hours)
        about = {"hours": hours, "seed": seed, "load": round(load(found, CLUSTER, hours), 2)}
        peers = []
        for who, decide in PEERS.items():
            peers.append(about | _replayed(who, found, decide(found, CLUSTER)))
            yield (number + 0.25 * len(peers)) / len(cases), peers[-1]
        for place, known in enumerate((True, False)):
            row = about | {"steps_known": known} | _replayed("busbar", found, None, known)
            yield (number + (3 + place) / 4) / len(cases), _judged(row, peers)


def _replayed(who: str, found: Trace, peer: Decide | None, known: bool = True) -> dict[str, Any]:
    begin = time.perf_counter()
    grid_s = elastic_peers.ROUND_S
    if peer is None:
        ours = Settings(steps_known=known, grid_s=grid_s, round_s=5 * grid_s)
        result = simulate(found, CLUSTER, Policy(), ours, who)
    else:
        # Not checked: a peer's plan does not say why jobs wait.
        theirs = Settings(check=False, grid_s=grid_s, round_s=grid_s)
        result = simulate(found, CLUSTER, Policy(), theirs, who, decide=peer)
    return _row(who, result, time.perf_counter() - begin)


def _row(who: str, result: Result, seconds: float) -> dict[str, Any]:
    numbers = result.to_json()
    assert isinstance(numbers, dict)
    held_h = result.utilisation * result.makespan_s / 3600 * sum(CLUSTER.capacity().values())
    return {
        "who": who,
        **{name: round(float(str(numbers[name])), 4) for name in NUMBERS},
        "gpu_h_per_job": round(held_h / len(result.jobs), 4),
        "waiting_most": max((waiting for _, waiting, _ in result.series), default=0),
        "seconds": round(seconds, 1),
    }


def _judged(row: dict[str, Any], peers: list[dict[str, Any]]) -> dict[str, Any]:
    bars = {
        name: factor * min(peer[name] for peer in peers)
        for name, factor in (("mean_h", 1.0), ("p99_h", 1.0), ("gpu_h_per_job", GPU_HOURS))
    }
    return row | {
        "bars": {
            name: {"at_most": round(bar, 4), "ratio": round(row[name] / bar, 3), "met": row[name] <= bar}
            for name, bar in bars.items()
        }
    }
