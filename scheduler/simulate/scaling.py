"""Measured speeds of elastic jobs by accelerators and nodes, and the traces that use them.

Two public layouts of a folder, told apart by what is in it:

    Pollux (OSDI'21)        <model>/placements.csv and scalability.csv: seconds of one step by placement (accelerators on
                            each node) and local batch size, and the part of it that synchronises
    ElasticFlow (ASPLOS'23) <model>.csv: iterations per second by global batch size and accelerators; empty, 0 or nan:
                            it cannot run so

A job keeps its global batch size M. On K accelerators it has M/K samples for each; if that is more than was measured it
accumulates gradients over as few equal parts as possible, and only the last of them synchronises (as Pollux does):

    seconds per iteration = (parts - 1) x (step - synchronisation) + step

With `goodput` a job adapts its batch size, as in Pollux: with the gradient's noise r (its variance over its squared norm at
the job's own batch size M0, Pollux's files validation-M0.csv) a step of M samples makes the progress of

    (r + 1) / (r M0/M + 1) steps of M0

At each size a job has the batch size, of those that were measured, with which it progresses fastest. The noise grows
during a job's life, so that large batches, and with them many accelerators, pay later: the life is cut into phases in
which the noise changes by at most `STEP` times (`Phase`).

Step times between two measured local batch sizes are interpolated linearly; below the smallest the time is that of
the smallest. Several placements with the same numbers of accelerators and nodes count by their median.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from ..errors import TraceError
from .csv_rows import fault, named_rows
from .trace import Phase, Trace, TraceJob

STEP = 1.5
"""Factor between the least and the most noise of a phase."""
MOST_PHASES = 8
"""Noise that changes more often is averaged over longer parts."""

Cells = dict[tuple[int, int], float]
"""(accelerators, nodes) -> iterations per second."""
_Point = tuple[float, float, float]
"""Local batch size, seconds of a step, seconds of it that synchronise."""


def measured(folder: Path, model: str, batch: int, per_node: int) -> Cells:
    """What a folder says of a model with this global batch size; empty: nothing.

    Args:
        per_node: accelerators of a node, for files that do not name nodes: as few as possible.
    """
    if (folder / model / "placements.csv").is_file():
        return pollux(folder / model, batch)
    path = folder / f"{model}.csv"
    return elasticflow_speeds(path, per_node).get(batch, {}) if path.is_file() else {}


def pollux(folder: Path, batch: int) -> Cells:
    """Iterations per second of one Pollux model."""
    points: dict[tuple[int, int], dict[str, list[_Point]]] = defaultdict(lambda: defaultdict(list))
    for name in ("placements.csv", "scalability.csv"):
        path = folder / name
        if not path.is_file():
            continue
        for line, row in named_rows(path):
            try:
                placement = row.get("placement") or f"{row['num_replicas']}/{row['num_nodes']}"
                point = (float(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"]))
                points[_size(placement)][placement].append(point)
            except (KeyError, ValueError) as error:
                raise TraceError(f"{path}:{line}: not a measurement of Pollux: {fault(error)}") from error
    return {
        (count, nodes): median(1 / _iteration_s(sorted(one), batch / count) for one in placements.values())
        for (count, nodes), placements in sorted(points.items())
    }


def _size(placement: str) -> tuple[int, int]:
    """`24`: two and four accelerators on two nodes; `32/8`: 32 on 8 nodes."""
    count, _, nodes = placement.partition("/")
    return (int(count), int(nodes)) if nodes else (sum(map(int, placement)), len(placement))


def _iteration_s(points: list[_Point], local: float) -> float:
    parts = max(1, math.ceil(local / points[-1][0] - 1e-9))
    step_s, sync_s = _at(points, local / parts)
    return (parts - 1) * max(step_s - sync_s, 0.0) + step_s


def _at(points: list[_Point], local: float) -> tuple[float, float]:
    """Step and synchronisation time at a local batch size."""
    above = bisect_left(points, (local,))
    if above == 0:
        return points[0][1:]
    if above == len(points):
        return points[-1][1:]
    (x0, *low), (x1, *high) = points[above - 1], points[above]
    part = (local - x0) / (x1 - x0)
    return low[0] + part * (high[0] - low[0]), low[1] + part * (high[1] - low[1])


def noise(path: Path) -> list[tuple[float, float]]:
    """(part of the life, noise) of a model at one batch size, in order; from a validation file of Pollux."""
    found: list[tuple[float, float]] = []
    for line, row in named_rows(path):
        try:
            found.append((float(row["progress"]), float(row["grad_var"]) / float(row["grad_sqr"])))
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise TraceError(f"{path}:{line}: not a validation of Pollux: {fault(error)}") from error
    end = max((progress for progress, _ in found), default=0.0)
    return [(progress / end, max(ratio, 0.0)) for progress, ratio in sorted(found) if end > 0]


def phases_of(noises: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(part of the life at which it begins, its mean noise) of each phase, at most `MOST_PHASES` of them.

    A row of a validation stands for the part of the life that ends with it."""
    step = STEP
    while True:
        found: list[tuple[float, list[float]]] = []
        begin = 0.0
        for end, ratio in noises:
            own = found[-1][1] if found else []
            if not own or max(*own, ratio) > step * max(min(*own, ratio), 1e-12):
                found.append((begin, [ratio]))
            else:
                own.append(ratio)
            begin = end
        if len(found) <= MOST_PHASES:
            return [(at, sum(own) / len(own)) for at, own in found]
        step *= STEP


def goodput(by_batch: Mapping[int, Cells], own: int, ratio: float) -> Cells:
    """Progress per second, in steps of the batch size `own`, at the best batch size for each (accelerators, nodes).

    Args:
        by_batch: iterations per second by global batch size.
        ratio: the gradient's noise at the batch size `own`.
    """
    best: Cells = {}
    for batch, cells in by_batch.items():
        if batch >= own:
            progress = (ratio + 1) / (ratio * own / batch + 1)
            for size, speed in cells.items():
                best[size] = max(best.get(size, 0.0), speed * progress)
    return best


def adaptive(
    model: str, batch: int, folders: Mapping[str, Path], per_node: Mapping[str, int]
) -> list[tuple[float, dict[str, Cells]]]:
    """A model's phases at this batch size: (part of the life at which it begins, progress per second by type). Empty: no
    folder has Pollux's validation of it.
    """
    found = sorted((folder for folder in folders.values()), key=str)
    known = next((one / model for one in found if (one / model / f"validation-{batch}.csv").is_file()), None)
    if known is None:
        return []
    batches = sorted(int(one.stem.partition("-")[2]) for one in known.glob("validation-*.csv"))
    by_type = {
        kind: {size: measured(folder, model, size, per_node[kind]) for size in batches}
        for kind, folder in folders.items()
    }
    return [
        (begin, {kind: goodput(by_batch, batch, ratio) for kind, by_batch in by_type.items()})
        for begin, ratio in phases_of(noise(known / f"validation-{batch}.csv"))
    ]


def elasticflow_speeds(path: Path, per_node: int) -> dict[int, Cells]:
    """Iterations per second of one ElasticFlow model, by global batch size."""
    found: dict[int, Cells] = {}
    for line, row in named_rows(path):
        try:
            batch = int(row.pop("global_batch_size"))
            speeds = {int(count): float(text) for count, text in row.items() if text}
        except (KeyError, ValueError) as error:
            raise TraceError(f"{path}:{line}: not a row of ElasticFlow: {fault(error)}") from error
        found[batch] = {(count, -(-count // per_node)): speed for count, speed in speeds.items() if speed > 0}
    return found


def elastic_job(
    name: str,
    arrival_s: float,
    iterations: float,
    workload_class: str,
    cells: Mapping[str, Cells],
    most: int,
    restart_s: float | None = None,
    deadline_s: float | None = None,
    phases: Sequence[tuple[float, Mapping[str, Cells]]] = (),
) -> TraceJob:
    """A job that may have from one accelerator up to the largest measured size, at most `most`, that is faster than
    all smaller ones on some type.

    Args:
        phases: as of `adaptive`; the first one replaces `cells`.

    Raises:
        ValueError: it was measured with one accelerator on no type.
    """
    life = [(begin, _usable(rows, most)) for begin, rows in phases] or [(0.0, _usable(cells, most))]
    usable = life[0][1]
    if not usable:
        raise ValueError(f"{workload_class} was not measured with one accelerator")
    largest = [
        max(rows.items(), key=lambda item: (item[1], -item[0][0]))[0][0]
        for _, own in life
        for rows in own.values()
    ]
    return TraceJob(
        id=name,
        arrival_s=arrival_s,
        work=iterations,
        speeds={kind: rows[1, 1] for kind, rows in usable.items()},
        workload_class=workload_class,
        max_pods=max(largest),
        measured=usable,
        restart_s=restart_s,
        deadline_s=deadline_s,
        phases=tuple(
            Phase(begin * iterations, f"{workload_class}, phase {number}", own)
            for number, (begin, own) in enumerate(life[1:], 2)
        ),
    )


def _usable(cells: Mapping[str, Cells], most: int) -> dict[str, Cells]:
    return {
        kind: {size: speed for size, speed in rows.items() if size[0] <= most}
        for kind, rows in cells.items()
        if (1, 1) in rows
    }


def elasticflow(
    path: Path,
    folders: Mapping[str, Path],
    per_node: Mapping[str, int],
    most: int = 16,
    adapts: bool = False,
) -> Trace:
    """A trace of ElasticFlow: job, submission, iterations, model, deadline, batch size. All jobs are elastic from one
    accelerator; the accelerators that the trace's rigid schedulers used are left out.

    Args:
        folders: measured speeds, by accelerator type.
        per_node: accelerators of a node, by type.
        most: accelerators that a job may have.
        adapts: jobs of models with Pollux's validations adapt their batch size (`adaptive`).
    """
    jobs: list[TraceJob] = []
    lives: dict[tuple[str, int], list[tuple[float, dict[str, Cells]]]] = {}
    known: dict[tuple[str, int], dict[str, Cells]] = {}
    seen: set[str] = set()
    for line, row in named_rows(path):
        try:
            key = row["model_name"], int(row["batch_size"])
            name, arrival_s = row["job_id"].zfill(5), float(row["submit_time"])
            iterations = float(row["iteration"])
            deadline_s = float(row["ddl"]) if row.get("ddl") else None
        except (KeyError, ValueError) as error:
            raise TraceError(f"{path}:{line}: not a job of ElasticFlow: {fault(error)}") from error
        if name in seen:
            raise TraceError(f"{path}:{line}: not a job of ElasticFlow: job_id {name} is there twice")
        seen.add(name)
        if key not in known:
            known[key] = {kind: measured(folder, *key, per_node[kind]) for kind, folder in folders.items()}
            lives[key] = adaptive(*key, folders, per_node) if adapts else []
        label = f"{key[0]} batch {key[1]}"
        try:
            jobs.append(
                elastic_job(
                    name, arrival_s, iterations, label, known[key], most, None, deadline_s, lives[key]
                )
            )
        except ValueError as error:
            raise TraceError(f"{path}:{line}: {error} in {', '.join(map(str, folders.values()))}") from error
    return Trace(path.stem, tuple(jobs))
