"""Packing Alibaba's pods: ours against our own FGD on the same sequences.

The list once, shuffled, then draws with replacement until 130 % of the accelerators have been asked for; what
does not fit is dropped; nothing leaves, nothing moves.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from busbar.scheduler.packing import Machine, Packer, Request, typical

LISTS = {"default": 95.39, "gpuspec33": 94.55}
"""Lists and the published FGD result, % allocated at 130 % arrived."""
SEEDS = 20


class Fgd(Packer):
    """FGD as published: the score is truncated to whole per cent; the first of equals is taken."""

    def _score(self, i: int, cpu_m: int, free: Sequence[int]) -> float:
        gain_m = self._now[i] - self.fragmentation(i, cpu_m, free)
        return float(int(100 / (1 + math.exp(-gain_m / 1000))))


def machines(path: Path) -> list[Machine]:
    with path.open() as file:
        return [
            Machine(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"])
            for row in csv.DictReader(file)
        ]


def pods(path: Path) -> list[Request]:
    with path.open() as file:
        return [
            Request(
                int(row["cpu_milli"]),
                int(row["memory_mib"]),
                int(row["num_gpu"]),
                int(row["gpu_milli"]),
                frozenset(filter(None, (row.get("gpu_spec") or "").split("|"))),
            )
            for row in csv.DictReader(file)
        ]


def sequence(requests: list[Request], capacity_m: int, seed: int) -> list[Request]:
    random = Random(seed)
    out = random.sample(requests, len(requests))
    asked = sum(r.devices * r.share_m for r in out)
    while asked < 1.3 * capacity_m:
        out.append(random.choice(requests))
        asked += out[-1].devices * out[-1].share_m
    return out


def allocated(packer: Packer, order: list[Request], capacity_m: int) -> tuple[float, float]:
    """Per cent of the accelerators allocated, and pods per CPU second."""
    begin = time.process_time()
    for request in order:
        packer.place(request)
    spent = time.process_time() - begin
    left = sum(sum(free) for free in packer.free)
    return 100 * (1 - left / capacity_m), len(order) / spent


def rows(data: Path, seeds: int = SEEDS) -> list[dict[str, Any]]:
    root = data / "alibaba_openb_2023"
    nodes = machines(root / "openb_node_list_gpu_node.csv")
    capacity_m = 1000 * sum(node.devices for node in nodes)
    out = []
    for name, published in LISTS.items():
        requests = pods(root / f"openb_pod_list_{name}.csv")
        workload = typical(requests)
        ours, theirs, speed = [], [], []
        for seed in range(seeds):
            order = sequence(requests, capacity_m, seed)
            share, rate = allocated(Packer(nodes, workload), order, capacity_m)
            ours.append(share)
            speed.append(rate)
            theirs.append(allocated(Fgd(nodes, workload), order, capacity_m)[0])
        mean, fgd = sum(ours) / seeds, sum(theirs) / seeds
        out.append(
            {
                "list": name,
                "seeds": seeds,
                "ours_percent": round(mean, 3),
                "own_fgd_percent": round(fgd, 3),
                "published_fgd_percent": published,
                "pods_per_s": round(min(speed)),
                "per_seed": [[round(a, 2), round(b, 2)] for a, b in zip(ours, theirs, strict=True)],
                "bars": {
                    "above_fgd": {"at_least": 0.3, "met": mean - fgd >= 0.3},
                    "fgd_reproduced": {"within": 0.15, "met": abs(fgd - published) <= 0.15},
                    "pods_per_s": {"at_least": 900, "met": min(speed) >= 900},
                },
            }
        )
    return out
