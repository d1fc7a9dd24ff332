"""Packing by the planner itself: openb's accelerator pods are submitted one by one to `react`, on a quarter of the
nodes.

For comparison the packer and FGD run on the same sequences. They know how often each kind of request occurs; the
planner knows only the jobs of its snapshot. A pod that does not start at once is dropped; no pod ends or moves; after
every N pods, N being the number of nodes, the full plan is made again, as an operator does. Pods without accelerators
are left out for all three, because they belong in a pool of CPUs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.scheduling.openb import Fgd, Machine, Packer, machines, pods, run

from busbar.scheduler import (
    Event,
    Job,
    JobId,
    Node,
    Policy,
    Pool,
    Resources,
    Snapshot,
    Tenant,
    applied,
    check_plan,
    plan,
    react,
    updated,
)
from busbar.scheduler.model.snapshot import Delta
from busbar.scheduler.placement.packing import PodRequest, Scorer, typical

LISTS = ("default", "gpuspec33")
SEEDS = 3
PART = 4
"""One node in so many."""


def rows(
    data: Path, lists: Sequence[str] = LISTS, seeds: int = SEEDS, part: int = PART
) -> list[dict[str, Any]]:
    """One row per list: per cent of the accelerators allocated when 130 % have been requested."""
    root = data / "alibaba_openb_2023"
    nodes = machines(root / "openb_node_list_gpu_node.csv")
    out = []
    for name in lists:
        requests = [request for request in pods(root / f"openb_pod_list_{name}.csv") if request.devices]
        workload = typical(Counter(requests))
        found: list[tuple[float, float, float]] = []
        spent = 0.0
        for seed in range(seeds):
            own = Random(seed).sample(nodes, len(nodes) // part)
            capacity_m = 1000 * sum(node.devices for node in own)
            order = _drawn(requests, capacity_m, seed)
            begin = time.process_time()
            planned = planner(own, order)
            spent = max(spent, (time.process_time() - begin) / len(order))
            packed, fgd = (run(Packer(own, workload, kind), order, capacity_m) for kind in (Scorer, Fgd))
            found.append((planned, packed.allocated, fgd.allocated))
        means = [round(fmean(column), 3) for column in zip(*found, strict=True)]
        out.append(
            {
                "list": name,
                "seeds": seeds,
                "nodes": len(nodes) // part,
                "planner_percent": means[0],
                "packer_percent": means[1],
                "own_fgd_percent": means[2],
                "planner_ms_per_pod": round(1000 * spent, 2),
                "per_seed": [[round(value, 2) for value in row] for row in found],
            }
        )
    return out


def _drawn(requests: Sequence[PodRequest], capacity_m: int, seed: int) -> list[PodRequest]:
    """Random pods of the list until 130 % of the accelerators have been requested."""
    random, asked, out = Random(seed), 0, []
    while asked < 1.3 * capacity_m:
        out.append(random.choice(requests))
        asked += out[-1].devices * out[-1].share_m
    return out


def planner(nodes: Sequence[Machine], order: Sequence[PodRequest]) -> float:
    """Per cent of the accelerators that the planner allocates."""
    models = sorted({machine.model for machine in nodes})
    snapshot = Snapshot(
        tuple(Pool(model, model, shareable=True) for model in models),
        tuple(
            Node(f"n{i:04d}", m.model, Resources(1000 * m.devices, m.cpu_m, m.memory_mib))
            for i, m in enumerate(nodes)
        ),
        (Tenant("all"),),
    )
    policy = Policy(solver=False)
    made, memo = plan(snapshot, policy, 0.0)
    for number, request in enumerate(order, start=1):
        now = float(number)
        job = _job(number, request, now)
        wanted = updated(snapshot, Delta(jobs=(job,)))
        made, memo = react(wanted, made, Event.arrived(now, job.id), memo)
        if not any(action.job == job.id for action in made.actions):
            continue  # dropped
        assert check_plan(wanted, made) == []
        snapshot = applied(wanted, made, now)
        if number % len(nodes) == 0:
            made, memo = plan(snapshot, policy, now, memo)
            assert not made.actions
    held = sum(job.run.placement.accelerators_m for job in snapshot.jobs if job.run is not None)
    return 100 * held / (1000 * sum(machine.devices for machine in nodes))


def _job(number: int, request: PodRequest, now: float) -> Job:
    size_m = request.share_m if request.devices == 1 else 1000 * request.devices
    return Job(
        JobId(f"pod-{number:06d}"),
        f"pod-{number:06d}",
        "ns",
        "all",
        per_pod=Resources(size_m, request.cpu_m, request.memory_mib),
        accelerators=tuple(sorted(request.models)),
        preemptible=False,
        submitted_at_s=now,
    )
