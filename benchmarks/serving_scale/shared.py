"""Rows of training and serving on one cluster, by the code of `busbar simulate --serving`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.progress import show

from busbar.scheduler.autoscale.step_model import Slo
from busbar.scheduler.simulate.readers import philly
from busbar.scheduler.simulate.serving_failures import Failures
from busbar.scheduler.simulate.serving_pools import LLAMA_8B, parse_pools
from busbar.scheduler.simulate.serving_result import late_for_each
from busbar.scheduler.simulate.serving_trace import servegen
from busbar.scheduler.simulate.shared_cluster import elastic, window
from busbar.scheduler.simulate.shared_run import SharedQuestion, reference_speeds, share
from busbar.scheduler.simulate.trace import TraceCluster

Row = dict[str, Any]
POOL = "A100=9@3.67"
"""What the service is guaranteed, and may have at most."""


FAILURES = Failures(
    node_mtbf_s=24 * 3600.0, replica_mtbf_s=24 * 3600.0, hang_mtbf_s=24 * 3600.0, repair_s=3600.0
)
"""So frequent that a day has some of each."""


def case(
    nodes: int, each: int, may_shrink: bool, failures: Failures | None = None
) -> Callable[[Path], list[Row]]:
    """A ServeGen day at 120 requests/s and Philly jobs on one cluster of A100s, beside a fixed split of it."""

    def run(data: Path) -> list[Row]:
        cluster = TraceCluster({"A100": nodes}, {"A100": each}, prices={"A100": 3.67})
        trace = servegen(data / "servegen/m-small", 2, 120)
        begin_s, backlog_s = 640 * 3600.0, 6 * 3600.0
        source = philly(data / "philly/philly_jobs.csv", per_node=each)
        jobs = window(source, begin_s, trace.duration_s, backlog_s, nodes * each, reference_speeds(cluster))
        jobs = elastic(jobs) if may_shrink else jobs
        question = SharedQuestion(
            parse_pools(POOL), cluster, Slo(), LLAMA_8B, failures=failures or Failures()
        )

        def progress(name: str, done: float, total: float) -> None:
            show(name, done, total)

        found = share(trace, jobs, question, progress)
        ours, split = found.results
        measured: dict[str, Any] = {
            "attainment": round(ours.serving.attainment, 5),
            "attainment_of_the_split": round(split.serving.attainment, 5),
            "training_over_split": round(ours.training.work_h / split.training.work_h, 4),
            "bound_over_split": round(found.bound_ratio or 0.0, 4),
            "lost_share": round(ours.training.lost_h / ours.training.held_h, 5),
            "lost_share_of_the_split": round(split.training.lost_h / split.training.held_h, 5),
            "used_of_what_serving_left": round(
                ours.training.held_h / (24 * found.capacity - sum(ours.serving.replica_hours.values())),
                4,
            ),
        }
        for fleet, calm in zip(found.results, found.undisturbed, strict=True) if found.undisturbed else ():
            told = fleet.serving.told
            measured |= {
                f"{fleet.policy}_without_failures": round(calm.serving.attainment, 5),
                f"{fleet.policy}_node_failures": told.node_failures,
                f"{fleet.policy}_replicas_lost": told.stopped,
                f"{fleet.policy}_lost_by_gateway": told.by_gateway,
                f"{fleet.policy}_lost_by_node": told.by_node,
                f"{fleet.policy}_late_for_each": late_for_each(fleet.serving, calm.serving),
                f"{fleet.policy}_training_over_calm": round(fleet.training.work_h / calm.training.work_h, 4),
            }
        bars = {"attainment": 0.99, "training_over_split": 1.25, "lost_share": 0.01}
        missed = [
            key
            for key, bar in bars.items()
            if (measured[key] > bar if key == "lost_share" else measured[key] < bar)
        ]
        kind = "elastic to half their size" if may_shrink else "rigid"
        return [
            {
                "row": f"train and serve: ServeGen day 2, peak 120 req/s, and {len(jobs.jobs)} Philly jobs ({kind}) on"
                f" {nodes} x {each} A100, fixed split: {found.static_replicas} serve"
                + ("" if failures is None else ", with failures"),
                "measured": measured,
                "bars": bars,
                "missed": missed,
                "detail": found.to_json(),
            }
        ]

    return run
