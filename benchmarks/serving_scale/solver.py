"""Rows of `kit.py` for the mix solver alone: generated instances, and a published allocation."""

from __future__ import annotations

import csv
import random
import time
from itertools import product
from pathlib import Path
from typing import Any

from busbar.operator.serving.fleet_input import EFFORT
from busbar.scheduler.autoscale.mix import Column, Effort, Limits, Switching, best_single_type, cheapest

Row = dict[str, Any]

SECONDS = EFFORT.seconds or 0.0
"""The limit of a whole answer of the solver in production."""


def rows(data: Path) -> list[Row]:
    """Generated instances: small ones beside brute force, large ones beside the best single type and the clock."""
    return [_small_instances(), *(_large_instances(share) for share in (1.0, 0.1))]


def _instance(rng: random.Random, buckets: int, types: int) -> tuple[list[Column], list[float], Limits]:
    columns = [
        Column(
            f"t{number}",
            f"t{number}",
            rng.uniform(0.5, 8),
            tuple(0.0 if rng.random() < 0.1 else rng.uniform(0.2, 10) for _ in range(buckets)),
            watts=rng.uniform(70, 700),
        )
        for number in range(types)
    ]
    load = [rng.uniform(0, 2) if any(c.rates[b] for c in columns) else 0.0 for b in range(buckets)]
    limits = Limits(stock={c.pool: rng.randint(3, 200 // types) for c in columns}, watts={"": 20_000.0})
    return columns, load, limits


def _small_instances() -> Row:
    """Every number of replicas of three types; whether one carries the load is decided by bisection of shares."""
    rng, equal, compared = random.Random(0), 0, 0
    worst = 1.0
    for _ in range(200):
        columns, load, _ = _instance(rng, 2, 3)
        now = {c.key: rng.randint(0, 2) for c in columns}
        switching = Switching(now, 0.2, 0.1)
        limits = Limits(stock={c.pool: 5 for c in columns})
        best = _brute_force(columns, load, switching, 5)
        if best is None:
            continue
        compared += 1
        mix = cheapest(columns, load, limits, switching, Effort(nodes=None, seconds=None, gap=0.0))
        worst = max(worst, mix.objective / best)
        equal += abs(mix.objective - best) <= 1e-6 * best
    return {
        "row": "mix solver, small instances (2 buckets x 3 types, switching cost) beside brute force",
        "measured": {"instances": compared, "equal": equal, "worst_ratio": round(worst, 6)},
        "bars": {"equal": compared},
        "missed": [] if equal == compared else ["equal"],
    }


def _brute_force(columns: list[Column], load: list[float], switching: Switching, most: int) -> float | None:
    """Exhaustive over replicas; two buckets over three types are carried iff the cut conditions below hold."""

    best: float | None = None
    for counts in product(range(most + 1), repeat=len(columns)):
        cost = sum(
            c.cost_per_h
            * (n + 0.2 * max(n - switching.now[c.key], 0) + 0.1 * max(switching.now[c.key] - n, 0))
            for c, n in zip(columns, counts, strict=True)
        )
        if (best is None or cost < best) and _two_buckets_fit(columns, load, counts):
            best = cost
    return best


def _two_buckets_fit(columns: list[Column], load: list[float], counts: tuple[int, ...]) -> bool:
    """The most of bucket 1 beside all of bucket 0: give bucket 0 the columns at which it is relatively best."""
    left, second = load[0], 0.0
    order = sorted(
        zip(columns, counts, strict=True),
        key=lambda item: -(item[0].rates[0] / item[0].rates[1]) if item[0].rates[1] else -1e18,
    )
    for column, count in order:
        used = 0.0
        if column.rates[0] > 0:
            used = min(float(count), left / column.rates[0])
            left -= used * column.rates[0]
        second += (count - used) * column.rates[1]
    return left <= 1e-9 and second >= load[1] - 1e-9


def _large_instances(share: float) -> Row:
    """`share` of a core is given as that share of the time limit."""
    rng, times, cpu, over, single_broken, infeasible = random.Random(1), [], [], [], 0, 0
    for _ in range(60):
        columns, load, limits = _instance(rng, 100, 6)
        switching = Switching({c.key: rng.randint(0, 4) for c in columns}, 0.1, 0.05)
        begin, used = time.perf_counter(), time.process_time()
        mix = cheapest(columns, load, limits, switching, Effort(seconds=SECONDS * share))
        times.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - used)
        exact = cheapest(columns, load, limits, switching, Effort(nodes=None, seconds=10.0, gap=1e-4))
        infeasible += mix.carried < exact.carried - 1e-6
        over.append(mix.objective / exact.objective)
        single = best_single_type(columns, load, limits)
        if single is not None:
            full = sum(
                c.cost_per_h
                * (n + 0.1 * max(n - switching.now[c.key], 0) + 0.05 * max(switching.now[c.key] - n, 0))
                for c in columns
                for n in [single[c.key]]
            )
            single_broken += mix.objective > full * (1 + 1e-6)
    order = sorted(times)
    p99 = order[int(0.99 * (len(order) - 1))]
    measured = {
        "instances": len(times),
        "seconds_p50": round(order[len(order) // 2], 3),
        "seconds_p99": round(p99, 3),
        "cpu_seconds_p99": round(sorted(cpu)[int(0.99 * (len(cpu) - 1))], 3),
        "mean_over_ten_seconds_of_search": round(sum(over) / len(over), 4),
        "worst_over_ten_seconds_of_search": round(max(over), 4),
        "above_the_best_single_type": single_broken,
        "carry_less": infeasible,
    }
    name = "" if share == 1 else f", {share:.0%} of the time limit (a starved core)"
    missed = [key for key in ("above_the_best_single_type", "carry_less") if measured[key]]
    missed += ["seconds_p99"] if p99 >= 0.5 else []
    missed += ["worst_over_ten_seconds_of_search"] if max(over) > 1.05 else []
    bars = {"seconds_p99": 0.5, "above_the_best_single_type": 0, "carry_less": 0}
    return {
        "row": f"mix solver, 100 buckets x 6 types{name}",
        "measured": measured,
        "bars": bars | {"worst_over_ten_seconds_of_search": 1.05},
        "missed": missed,
    }


def melange(data: Path) -> list[Row]:
    """Published allocations that the capacities backed out of the paper can carry: ours must cost no more."""
    prices = {"L4": 0.70, "A10G": 1.01, "A100": 3.67, "H100": 7.516}
    capacity: dict[tuple[str, str], dict[str, float]] = {}
    with (data / "melange_paper/capacity_backed_out.csv").open() as file:
        for row in csv.DictReader(file):
            cell = capacity.setdefault((row["dataset"], row["tpot_slo_ms"]), {})
            cell[row["gpu"]] = float(row["avg_capacity_rps_upper_bound"])
    determined, kept, saved, rows = 0, 0, [], []
    with (data / "melange_paper/allocations.csv").open() as file:
        for row in csv.DictReader(file):
            rates = capacity.get((row["dataset"], row["tpot_slo_ms"]), {})
            counts = {gpu: int(row[f"n_{gpu}"]) for gpu in prices}
            carried = sum(count * rates.get(gpu, 0.0) for gpu, count in counts.items())
            unknown = any(count and gpu not in rates for gpu, count in counts.items())
            if unknown or carried < float(row["rate_rps"]) - 1e-6:
                continue
            determined += 1
            columns = [Column(gpu, gpu, prices[gpu], (rate,)) for gpu, rate in sorted(rates.items())]
            mix = cheapest(columns, (float(row["rate_rps"]),), effort=Effort(seconds=None))
            ratio = mix.cost_per_h / float(row["cost_recomputed"])
            kept += ratio <= 1 + 1e-9
            saved.append(ratio)
            if row["strategy"] == "melange":
                rows.append([row["dataset"], row["tpot_slo_ms"], row["rate_rps"], round(ratio, 4)])
    measured = {
        "determined": determined,
        "no_dearer": kept,
        "worst_ratio": round(max(saved), 4),
        "mean_ratio": round(sum(saved) / len(saved), 4),
    }
    missed = [] if kept == determined else ["no_dearer"]
    row = {
        "row": "published Mélange allocations, where the average capacities carry them",
        "measured": measured,
        "bars": {"no_dearer": determined},
        "missed": missed,
        "mixes": rows,
    }
    return [row]
