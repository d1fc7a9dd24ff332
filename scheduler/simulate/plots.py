"""Pictures of a simulation: completion times, utilisation, and the queue. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from ..errors import SchedulerError
from .metrics import Result
from .trace import TraceCluster


def draw(results: list[Result], cluster: TraceCluster, folder: Path) -> list[Path]:
    """Write jct.png, utilisation.png and queue.png; returns their paths.

    Raises:
        SchedulerError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SchedulerError("plots need matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    total = sum(cluster.capacity().values())
    written: list[Path] = []
    for file, title, unit in (
        ("jct", "Job completion time", "share of jobs"),
        ("utilisation", "Accelerators busy", "share"),
        ("queue", "Jobs waiting", "jobs"),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for result in results:
            x, y = _curve(file, result, total)
            axes.step(x, y, where="post", label=result.name)
        axes.set(title=title, xlabel="hours", ylabel=unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        path = folder / f"{file}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written


def _curve(file: str, result: Result, total: int) -> tuple[list[float], list[float]]:
    if file == "jct":
        hours = sorted(job.jct_s / 3600 for job in result.jobs)
        return hours, [(number + 1) / len(hours) for number in range(len(hours))]
    first = result.series[0][0] if result.series else 0.0
    times = [(at - first) / 3600 for at, _, _ in result.series]
    if file == "queue":
        return times, [float(waiting) for _, waiting, _ in result.series]
    return times, [busy / max(total, 1) for _, _, busy in result.series]
