"""Gavel's job generator, re-implemented: 80 % short and 20 % long jobs, gangs of 1, 2, 4, 8, Poisson arrivals.

Duration on a V100: 60 * 10 ** U(1.5, 3) s with probability 0.8, else 60 * 10 ** U(3, 4) s. Accelerators
1 / 2 / 4 / 8 with 70 / 10 / 15 / 5 %. The job type is drawn from those measured at that size.
"""

from __future__ import annotations

from random import Random

from busbar.scheduler.simulate.readers import Throughputs
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob


def _duration_s(random: Random) -> float:
    low, high = (1.5, 3.0) if random.random() < 0.8 else (3.0, 4.0)
    return 60.0 * float(10.0 ** random.uniform(low, high))


def _size(random: Random) -> int:
    return random.choices((1, 2, 4, 8), (70, 10, 15, 5))[0]


def _job(random: Random, number: int, at: float, throughputs: Throughputs) -> TraceJob:
    size = _size(random)
    kinds = sorted(kind for kind, scale in throughputs["v100"] if scale == size)
    kind = random.choice(kinds)
    speeds = {
        accelerator: rows[kind, size]
        for accelerator, rows in throughputs.items()
        if rows.get((kind, size), 0.0) > 0
    }
    return TraceJob(
        id=f"{number:05d}",
        arrival_s=at,
        work=_duration_s(random) * speeds["v100"],
        speeds=speeds,
        workload_class=f"{kind} x{size}",
        pods=size,
    )


def generate(
    throughputs: Throughputs,
    cluster: TraceCluster,
    seed: int,
    jobs: int,
    measured: tuple[int, int],
    load: float = 0.9,
) -> Trace:
    """A trace whose offered load is `load` of the cluster.

    Load: accelerator-seconds requested, at the capacity-weighted mean speed of each job over the types, divided by the
    available accelerator-seconds. It is set by scaling the arrival times of the drawn jobs.
    """
    random = Random(seed)
    drawn = [_job(random, number, 0.0, throughputs) for number in range(jobs)]
    capacity = cluster.capacity()
    total = sum(capacity.values())
    asked = 0.0
    for job in drawn:
        speed = sum(job.speeds.get(kind, 0.0) * count for kind, count in capacity.items()) / total
        asked += job.accelerators * job.work / speed
    gap_s = asked / jobs / (load * total)
    at, out = 0.0, []
    for job in drawn:
        out.append(TraceJob(job.id, at, job.work, job.speeds, job.workload_class, job.pods))
        at += random.expovariate(1 / gap_s)
    return Trace(f"gavel_multi_seed{seed}", tuple(out), measured)
