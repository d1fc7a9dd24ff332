"""Readers of public traces. Each says what it takes from a file and what it makes of it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import TraceError
from .csv_rows import cells_of, fault, moment_s, named_rows, value_of, whole
from .trace import Trace, TraceJob

Throughputs = Mapping[str, Mapping[tuple[str, int], float]]
"""Accelerator -> (job type, accelerators) -> steps per second alone."""

GAVEL_COLUMNS = {10: (5, 6, 9, 8), 7: (4, 6, 5, None)}
"""By the number of columns: where total steps, scale factor, arrival and SLO stand."""
GAVEL_REFERENCE = "v100"
"""An SLO is a multiple of the job's time on this type."""


def gavel_throughputs(path: Path) -> dict[str, dict[tuple[str, int], float]]:
    """Gavel's measured rates: the `"null"` entries (no co-location), consolidated workers only. Raises TraceError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
        return {
            kind: {_type_and_scale(key): float(row["null"]) for key, row in by_job.items()}
            for kind, by_job in data.items()
            if not kind.endswith("_unconsolidated")
        }
    except (AttributeError, KeyError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise TraceError(
            f"{path} holds no throughputs of Gavel ({fault(error)}); name a file such as simulation_throughputs.json"
        ) from error


def _type_and_scale(key: str) -> tuple[str, int]:
    """Of a key such as `('LM (batch size 5)', 2)`."""
    kind, scale = ast.literal_eval(key)
    return str(kind), int(scale)


def gavel(path: Path, throughputs: Throughputs, measured: tuple[int, int] | None = None) -> Trace:
    """A Gavel trace, tab-separated, in one of two layouts:

    10 columns   job type, command, directory, argument, flag, total steps, scale factor, priority weight, SLO, arrival
    7 columns    job type, command, argument, flag, total steps, arrival, scale factor (Gavel's `traces/msr`)

    An SLO above 0 is a deadline: that many times the job's time on a V100 after its arrival. The weight is not used. Jobs
    keep the order of the file; arrivals need not."""
    jobs: list[TraceJob] = []
    for number, (line, row) in enumerate(cells_of(path, delimiter="\t")):
        if len(row) not in GAVEL_COLUMNS:
            raise TraceError(f"{path}:{line}: expected 10 or 7 columns, found {len(row)}")
        try:
            jobs.append(_of_gavel(f"{number:05d}", row, throughputs))
        except ValueError as error:
            raise TraceError(f"{path}:{line}: not a job of Gavel: {error}") from error
    return Trace(path.stem, tuple(jobs), measured)


def _of_gavel(name: str, row: list[str], throughputs: Throughputs) -> TraceJob:
    """Raises ValueError."""
    steps_at, scale_at, arrival_at, slo_at = GAVEL_COLUMNS[len(row)]
    kind, scale = row[0], int(row[scale_at])
    steps, arrival_s = float(row[steps_at]), float(row[arrival_at])
    slo = -1.0 if slo_at is None else float(row[slo_at])
    speeds = {
        accelerator: by_job[kind, scale]
        for accelerator, by_job in throughputs.items()
        if by_job.get((kind, scale), 0.0) > 0
    }
    if not speeds:
        raise ValueError(f"there is no throughput for {kind!r} on {scale} accelerators")
    reference = speeds.get(GAVEL_REFERENCE)
    return TraceJob(
        id=name,
        arrival_s=arrival_s,
        work=steps,
        speeds=speeds,
        workload_class=f"{kind} x{scale}",
        pods=scale,
        deadline_s=arrival_s + slo * steps / reference if slo > 0 and reference else None,
    )


def philly(path: Path, accelerator: str = "gpu", per_node: int = 8) -> Trace:
    """Philly's jobs: submit time, duration, GPUs, virtual cluster (the tenant). Durations are the work at
    speed 1. Jobs of more than one node are gangs of whole nodes, as far as their size divides."""
    jobs: list[TraceJob] = []
    for number, (line, row) in enumerate(named_rows(path)):
        try:
            at = moment_s(row, "timestamp")
            count, seconds = whole(row, "num_gpus"), value_of(row, "duration")
            if count <= 0 or seconds <= 0:
                continue
            pods = 1 if count <= per_node else -(-count // per_node)
            per_pod = count if count <= per_node else per_node
            jobs.append(
                TraceJob(
                    id=f"{number:06d}",
                    arrival_s=at,
                    work=seconds,
                    speeds={accelerator: 1.0},
                    pods=pods,
                    per_pod_m=1000 * per_pod,
                    tenant=row["cluster"],
                )
            )
        except (KeyError, OverflowError, ValueError) as error:
            raise TraceError(f"{path}:{line}: not a job of Philly: {fault(error)}") from error
    return Trace(path.stem, tuple(sorted(jobs, key=lambda job: (job.arrival_s, job.id))))


def openb(path: Path, accelerators: Iterable[str]) -> Trace:
    """Alibaba's pods (openb): those that ran on accelerators, as far as the trace goes.

    A pod's work is its time from being scheduled to its end, at speed 1 on each of `accelerators` (of the
    cluster, in any case of letters) that its `gpu_spec` allows; empty: all. Left out are pods without
    accelerators, as a simulated node counts nothing else, and pods that were never scheduled, as nobody knows
    how long they are. Pods that outlived the trace end with it."""
    known = {name.lower(): name for name in accelerators}
    jobs: list[TraceJob] = []
    for number, (line, row) in enumerate(named_rows(path)):
        try:
            job = _of_openb(f"{number:05d}", row, known)
        except (KeyError, ValueError) as error:
            raise TraceError(f"{path}:{line}: not an openb pod: {fault(error)}") from error
        if job is not None:
            jobs.append(job)
    return Trace(path.stem, tuple(sorted(jobs, key=lambda job: (job.arrival_s, job.id))))


def _of_openb(name: str, row: Mapping[str, str], known: Mapping[str, str]) -> TraceJob | None:
    """None: it is left out. Raises KeyError, ValueError.

    Args:
        known: the cluster's types by their names in small letters.
    """
    at, scheduled, end = value_of(row, "creation_time"), row["scheduled_time"], row["deletion_time"]
    size_m = whole(row, "num_gpu") * whole(row, "gpu_milli")
    named = sorted(set(filter(None, row.get("gpu_spec", "").split("|"))))
    seconds = value_of(row, "deletion_time") - value_of(row, "scheduled_time") if scheduled and end else 0.0
    if size_m <= 0 or seconds <= 0:
        return None
    allowed = [known[one.lower()] for one in named if one.lower() in known] if named else known.values()
    if not allowed:
        raise ValueError(
            f"pod {row['name']} runs on {' or '.join(named)} only, and the cluster has {', '.join(known.values())}; add one"
            " of those types to it"
        )
    return TraceJob(
        id=name,
        arrival_s=at,
        work=seconds,
        speeds=dict.fromkeys(allowed, 1.0),
        workload_class=f"{'|'.join(named) or 'any'} {size_m}m",
        per_pod_m=size_m,
    )
