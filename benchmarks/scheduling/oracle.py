"""How far is a plan from the best one? Small clusters where every assignment can be tried.

One to four nodes of two types with four or eight accelerators each, and one to six waiting jobs of one tenant: one or
two pods of one to eight accelerators, of classes that prefer one type or the other, some with known lengths. All jobs
have one priority, so the best plan is the one of the highest value (`candidates/value.py`); it is found by trying every
candidate of every job on every node. A row is a thousand seeded cases: the plan's value as a part of the best one, at
the median (bar 0.95), the first percentile and in the worst case, which is printed. Rights, reservations, running jobs and shares
of accelerators are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement
from random import Random
from typing import Any

from benchmarks.progress import shown
from benchmarks.scheduling.scenario_parts import H, cluster, job

from busbar.scheduler import Node, Policy, Resources, Snapshot, TableView, plan
from busbar.scheduler.candidates.candidate import Candidate
from busbar.scheduler.candidates.candidates import CandidateBuilder
from busbar.scheduler.simulate.metrics import percentile

CASES = 1000
LEAST_MEDIAN = 0.95
POLICY = Policy(solver_seconds=None, reservations=0)
"""Without reservations: a place that is kept for a patient job is not for the most value."""
NOW = 0.0
SPEEDS = {
    "train": {"A": 3.0, "B": 1.0},
    "fast": {"A": 8.0, "B": 1.0},
    "flat": {"A": 1.2, "B": 1.0},
    "odd": {"A": 1.0, "B": 2.0},
}


def case(seed: int) -> Snapshot:
    """A cluster and its waiting jobs."""
    random = Random(seed)
    base = cluster({"A": 1, "B": 1}, speeds=SPEEDS)
    nodes = tuple(
        Node(f"n{i}", random.choice("ab"), Resources(1000 * random.choice((4, 8)), 64_000, 524_288))
        for i in range(random.randint(1, 4))
    )
    jobs = []
    for i in range(random.randint(1, 6)):
        one = job(
            f"j{i}", 1, gpus=random.choice((1, 1, 2, 3, 4, 8)), pods=random.choice((1, 1, 2)),
            workload=random.choice(sorted(SPEEDS)), at=-random.uniform(0, 20) * H,
        ).job  # fmt: skip
        left = random.choice((None, random.uniform(0.2, 20) * H))
        jobs.append(replace(one, remaining_work=left))
    return replace(base, nodes=nodes, jobs=tuple(jobs))


def best(snapshot: Snapshot) -> float:
    """The highest value of any assignment."""
    builder = CandidateBuilder(snapshot, TableView(snapshot.table), POLICY, NOW)
    options = [builder.of(one).candidates for one in snapshot.jobs]
    pools = [node.pool for node in snapshot.nodes]

    @cache
    def most(number: int, free: tuple[int, ...]) -> float:
        if number == len(options):
            return 0.0
        found = most(number + 1, free)
        for candidate in options[number]:
            for left in _places(candidate, pools, free):
                found = max(found, candidate.value + most(number + 1, left))
        return found

    return most(0, tuple(node.capacity.accelerators_m for node in snapshot.nodes))


def _places(candidate: Candidate, pools: list[str], free: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """What is left of each node, for every way to place the candidate."""
    own = [i for i, pool in enumerate(pools) if pool == candidate.pool]
    for nodes in combinations_with_replacement(own, candidate.pods):
        left = list(free)
        for i in nodes:
            left[i] -= candidate.per_pod.accelerators_m
        if min(left) >= 0:
            yield tuple(left)


def rows() -> list[dict[str, Any]]:
    """One row."""
    found = list(shown("oracle", _measured()))
    parts = [part for _, part in found]
    worst_seed, worst = min(found, key=lambda item: item[1])
    median = percentile(parts, 50)
    return [
        {
            "cases": CASES,
            "median_part": round(median, 4),
            "p10_part": round(percentile(parts, 10), 4),
            "p1_part": round(percentile(parts, 1), 4),
            "worst_part": round(worst, 4),
            "worst_seed": worst_seed,
            "worst_case": [
                f"{one.min_pods} x {one.per_pod.accelerators_m // 1000} {one.workload_class}"
                for one in case(worst_seed).jobs
            ],
            "worst_nodes": [
                f"{node.capacity.accelerators_m // 1000} {node.pool}" for node in case(worst_seed).nodes
            ],
            "best_found": sum(part >= 1 - 1e-9 for part in parts),
            "met": median >= LEAST_MEDIAN,
        }
    ]


def _measured() -> Iterator[tuple[float, tuple[int, float]]]:
    for seed in range(CASES):
        snapshot = case(seed)
        most = best(snapshot)
        value = plan(snapshot, POLICY, NOW)[0].value
        yield (seed + 1) / CASES, (seed, 1.0 if most <= 0 else value / most)
