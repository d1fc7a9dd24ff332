"""`busbar simulate --serving`: what would one cluster do with a model service and with training jobs?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import SchedulerError
from .options import FiniteRange, print_table
from .serving_command import (
    failure_options,
    load_options,
    progress_bars,
    read_failures,
    read_requests,
    read_shape,
)

if TYPE_CHECKING:
    from .serving_result import ServingResult
    from .shared_run import SharedAnswer, SharedResult
    from .trace import Trace, TraceCluster

_EPILOG = """\b
Examples:
  busbar simulate --serving servegen/m-small --day 2 --peak 120 --pools A100=9@3.67 \\
      --jobs philly_jobs.csv --begin 640 --backlog 6 --elastic --cluster A100=3x4
  busbar simulate --serving AzureLLMInferenceTrace_conv.csv --scale 12 --pools A100=24@3.67,H100=8@7.516 \\
      --jobs philly_jobs.csv --begin 640 --cluster A100=4x8,H100=1x8 --policy busbar --policy hpa -o json
  busbar simulate --serving requests.csv --pools A100=9@3.67 --jobs philly_jobs.csv --elastic \\
      --cluster A100=3x4 --node-mtbf 700 --repair 4 --replica-mtbf 200 --hang-mtbf 500 --seed 1
"""


@click.command("simulate --serving", epilog=_EPILOG)
@click.argument("requests", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--jobs",
    "jobs_file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Training jobs as CSV in the form of Philly's (timestamp, duration, num_gpus, cluster); durations are those on A100s.",
)
@click.option("--cluster", required=True, help="Accelerators by type: TYPE=NODES or TYPE=NODESxPER_NODE, …")
@click.option(
    "--pools",
    required=True,
    help="What the service is guaranteed, and may have at most, and its price: TYPE=COUNT@PRICE_PER_HOUR, …",
)
@click.option(
    "--begin",
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    help="Hours of the jobs' trace to skip.",
)
@click.option(
    "--backlog",
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    help="Jobs of so many hours before that wait from the beginning.",
)
@click.option(
    "--elastic", "is_elastic", is_flag=True, help="Jobs of two GPUs and more can run on half of them."
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(["busbar", "static", "hpa"]),
    help="Of the service's fleet; repeat to compare. static is a fixed split of the cluster. Default: busbar and static.",
)
@click.option(
    "--start",
    default=60.0,
    show_default=True,
    help="Seconds from a place to a replica that serves.",
)
@click.option(
    "--give",
    type=FiniteRange(min=0),
    default=10.0,
    show_default=True,
    help="Seconds until training that gives way has freed its accelerators.",
)
@failure_options
@load_options
def serving(
    requests: Path,
    jobs_file: Path,
    cluster: str,
    pools: str,
    begin: float,
    backlog: float,
    is_elastic: bool,
    policies: tuple[str, ...],
    slo: str,
    model: Path | None,
    start: float,
    give: float,
    node_mtbf: float | None,
    repair: float | None,
    outages: Path | None,
    replica_mtbf: float | None,
    hang_mtbf: float | None,
    scale: float,
    day: int | None,
    peak: float | None,
    hours: float | None,
    seed: int,
    output: str,
) -> None:
    """Replay requests and training jobs on one cluster, with the code that decides in production.

    The service's fleet asks for replicas; the planner places them, and stops or shrinks training inside the
    service's guarantee. The policy static holds the fleet of the busiest minute for good, which is a fixed
    split of the cluster. With failures of nodes or replicas, each fleet is simulated with and without them.
    Without training jobs: busbar plan-capacity.
    """
    from .command import parse_cluster
    from .serving_pools import parse_pools, parse_slo
    from .shared_run import SharedQuestion, share

    try:
        machines = parse_cluster(cluster)
        question = SharedQuestion(
            parse_pools(pools),
            machines,
            parse_slo(slo),
            read_shape(model),
            start,
            give,
            policies or ("busbar", "static"),
            failures=read_failures(node_mtbf, repair, outages, replica_mtbf, hang_mtbf, seed, machines.nodes),
        )
        trace = read_requests(requests, scale, day, peak, seed)
        trace = trace.until(3600 * hours) if hours is not None else trace
        jobs, left_out = _jobs(
            jobs_file, machines, 3600 * begin, trace.duration_s, 3600 * backlog, is_elastic
        )
        with progress_bars() as progress:
            answer = share(trace, jobs, question, progress)
    except (SchedulerError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        click.echo(json.dumps(answer.to_json(), indent=1))
    else:
        _print(answer, len(jobs.jobs), left_out)


def _jobs(
    path: Path, cluster: TraceCluster, begin_s: float, length_s: float, backlog_s: float, is_elastic: bool
) -> tuple[Trace, int]:
    """The jobs of that time, and how many others are larger than what the cluster has of any type."""
    from .readers import philly
    from .shared_cluster import elastic, window
    from .shared_run import reference_speeds

    per_node = min(cluster.per_node(kind) for kind in cluster.nodes)
    largest = max(cluster.capacity().values())
    source, speeds = philly(path, per_node=per_node), reference_speeds(cluster)
    every, made = (window(source, begin_s, length_s, backlog_s, most, speeds) for most in (math.inf, largest))
    if not made.jobs:
        raise ValueError(
            f"--jobs: no job of {path.name} arrives in this time and fits on the cluster; choose another --begin"
        )
    return elastic(made) if is_elastic else made, len(every.jobs) - len(made.jobs)


def _print(answer: SharedAnswer, jobs: int, left_out: int) -> None:
    from rich.table import Table

    table, failed = Table(box=None), bool(answer.undisturbed)
    names = ("fleet", "attained", "cost/h", "training GPU-h", "lost", "resized", "done", "waiting")
    for number, name in enumerate((*names, *(_OF_FAILURES if failed else ()))):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row, calm in zip(answer.results, answer.undisturbed or answer.results, strict=True):
        table.add_row(*_cells(row), *(_of_failures(row.serving, calm.serving) if failed else ()))
    print_table(table)
    text = f"{jobs} jobs on {answer.capacity} accelerators"
    if left_out:
        text += f", without {left_out} that are larger than what there is of any type"
    text += "; the fixed split gives the service"
    text += f" {answer.static_replicas} {answer.static_type}."
    if answer.bound_ratio is not None:
        text += f" A fleet that knows the future would leave training {answer.bound_ratio:.2f} times what the split does."
    for sentence in filter(None, (answer.beyond[1], *(row.serving.unheld() for row in answer.results))):
        text += f"\n{sentence}"
    for row in answer.results if failed else ():
        text += f"\n{row.policy}: {row.serving.told.sentence()}"
    click.echo(text)


_OF_FAILURES = ("without failures", "replicas lost", "late for each")


def _cells(row: SharedResult) -> tuple[str, ...]:
    had = row.training
    lost = had.lost_h / had.held_h if had.held_h else 0.0
    return (
        row.policy,
        f"{100 * row.serving.attainment:.2f} %",
        f"{row.serving.cost_per_h:.2f}",
        f"{had.work_h:.1f}",
        f"{100 * lost:.2f} %",
        str(had.resized),
        str(had.done),
        str(had.waiting),
    )


def _of_failures(serving: ServingResult, calm: ServingResult) -> tuple[str, ...]:
    """What was attained without failures, how many replicas failed, and the requests that are late for each."""
    from .serving_result import late_for_each

    each = late_for_each(serving, calm)
    return (
        f"{100 * calm.attainment:.2f} %",
        str(serving.told.stopped),
        "–" if each is None else f"{each:.1f}",
    )
