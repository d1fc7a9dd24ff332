"""`busbar simulate`: what would this cluster have done with that load?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import SchedulerError
from ..model.plans import Objective, Policy
from .options import FiniteRange, bar_of, make_folder, print_table

if TYPE_CHECKING:
    from .engine import Settings
    from .metrics import Result
    from .trace import Trace, TraceCluster

_EPILOG = """\b
Examples:
  busbar simulate jobs.trace --format gavel --throughputs simulation_throughputs.json \\
      --cluster v100=8,p100=16,k80=24
  busbar simulate philly_jobs.csv --format philly --cluster gpu=80x8 --limit 5000 --unknown-lengths
  busbar simulate philly_october.csv --format philly --cluster gpu=80x8 --every 60
  busbar simulate openb_pod_list_default.csv --format openb --cluster g2=20x8,t4=30x2 --limit 500
  busbar simulate elasticVpollux_e.csv --format elasticflow --cluster t4=10x4,a100=3x8 \\
      --scaling t4=pollux_t4 --scaling a100=throughputs_A100
  busbar simulate jobs.trace --cluster v100=36,p100=36,k80=36 --policy makespan --output out/ --plots
  busbar simulate jobs.trace --cluster v100=36,p100=36,k80=36 --node-mtbf 720 --repair 4 --checkpoint 30
  busbar simulate --power --servers 40..60 --budget-servers 40
  busbar simulate --serving servegen/m-small --day 2 --peak 120 --pools A100=9@3.67 \\
      --jobs philly_jobs.csv --begin 640 --cluster A100=3x4
"""


MOST_NODES = 100_000
LEAST_MTBF_H = 1 / 60
"""As of replicas (`serving_failures.LEAST_MTBF_S`)."""
_NODES = re.compile(r"(?P<type>[^=]+)=(?P<nodes>0*[1-9][0-9]{0,8})(x(?P<size>0*[1-9][0-9]{0,5}))?")


class _Simulate(click.Command):
    """With `--power` or `--serving` another command with options of its own takes the line."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        other = next((word for word in ("--power", "--serving") if word in args), None)
        if other is None:
            return super().make_context(info_name, args, parent, **extra)
        from .power_command import power
        from .shared_command import serving

        command = power if other == "--power" else serving
        others = [word for word in args if word != other]
        return command.make_context(f"{info_name} {other}", others, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.command(cls=_Simulate, epilog=_EPILOG)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--cluster", required=True, help="Accelerators by type: TYPE=NODES or TYPE=NODESxPER_NODE, …")
@click.option(
    "--policy",
    "objectives",
    multiple=True,
    type=click.Choice([o.value for o in Objective]),
    help="Objective; repeat to compare. Default: fairness.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["gavel", "philly", "openb", "elasticflow"]),
    default="gavel",
    show_default=True,
)
@click.option(
    "--throughputs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Gavel traces: the measured steps per second (default: beside the trace or one folder up).",
)
@click.option(
    "--scaling",
    "scalings",
    multiple=True,
    metavar="TYPE=FOLDER",
    help="ElasticFlow traces: the speeds measured on one accelerator type, by model (Pollux's or ElasticFlow's files).",
)
@click.option(
    "--goodput",
    is_flag=True,
    help="ElasticFlow traces: jobs adapt their batch size to their accelerators and to the noise of their gradients, which "
    "changes during their life (models with Pollux's validation files in a folder of --scaling).",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="TYPE=MONEY",
    help="Price of one accelerator-hour, for the objective cost and the cost reported.",
)
@click.option("--unknown-lengths", is_flag=True, help="Do not tell the policy how long jobs are.")
@click.option(
    "--charge",
    type=FiniteRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds lost at every start after the first.",
)
@click.option(
    "--node-mtbf",
    type=FiniteRange(min=LEAST_MTBF_H),
    help="Nodes fail: mean hours between the failures of one node. Default: none fails.",
)
@click.option(
    "--repair",
    type=FiniteRange(min=0, min_open=True),
    help="With --node-mtbf: hours until a failed node is back. Default: 1.",
)
@click.option(
    "--checkpoint",
    type=FiniteRange(min=0, min_open=True),
    help="With --node-mtbf: minutes between a running job's own checkpoints, which is what a failure may cost. Default: 10.",
)
@click.option(
    "--as-operated",
    is_flag=True,
    help="Decide as the operator does: a quick answer to every event, and a full plan 10 s later while jobs wait. "
    "Default: a full plan at every event.",
)
@click.option(
    "--every",
    type=FiniteRange(min=0),
    default=0.0,
    show_default=True,
    help="Make plans at multiples of so many seconds only: what happens in between shares one. 0: at every event.",
)
@click.option("--seed", default=0, show_default=True, help="Of the failures; the same seed, the same result.")
@click.option("--limit", type=click.IntRange(min=1), help="Replay only the first so many jobs.")
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder for result.json and plots."
)
@click.option("--plots", is_flag=True, help="Also draw completion times, utilisation and queue.")
@click.option(
    "--power",
    is_flag=True,
    expose_value=False,
    help="Simulate servers on one electrical feed instead; see: busbar simulate --power --help",
)
@click.option(
    "--serving",
    is_flag=True,
    expose_value=False,
    help="Simulate a model service and training jobs on one cluster instead; see: busbar simulate --serving --help",
)
def simulate(
    trace: Path,
    cluster: str,
    objectives: tuple[str, ...],
    kind: str,
    throughputs: Path | None,
    scalings: tuple[str, ...],
    goodput: bool,
    prices: tuple[str, ...],
    unknown_lengths: bool,
    charge: float,
    node_mtbf: float | None,
    repair: float | None,
    checkpoint: float | None,
    as_operated: bool,
    every: float,
    seed: int,
    limit: int | None,
    output: Path | None,
    plots: bool,
) -> None:
    """Replay a trace through the scheduler, on a cluster that need not exist.

    The simulator makes its decisions with the code that runs in production; only time and jobs are
    simulated. Prints a table; with --output writes all numbers as JSON.
    """
    if plots and output is None:
        raise click.UsageError("--plots needs --output: the pictures are files")
    if as_operated and every:
        raise click.UsageError(
            "--every and --as-operated exclude each other: the operator answers every event"
        )
    for option, value in (("--repair", repair), ("--checkpoint", checkpoint)):
        if value is not None and node_mtbf is None:
            raise click.UsageError(f"{option} is read where nodes fail; give --node-mtbf, too")
    saved_min = 10.0 if checkpoint is None else checkpoint
    if node_mtbf is not None and 60 * node_mtbf < saved_min:
        raise click.UsageError(
            f"--node-mtbf {node_mtbf:g} h is shorter than the {saved_min:g} minutes between checkpoints, so that jobs would"
            " hardly get on; make --node-mtbf longer or --checkpoint shorter"
        )
    if throughputs is not None and kind != "gavel":
        raise click.UsageError(f"--throughputs belongs to --format gavel, not {kind}")
    from dataclasses import replace

    from .engine import SETTLE_S, Settings

    settings = Settings(
        charge_s=charge,
        steps_known=not unknown_lengths,
        checkpoint_s=60 * saved_min,
        node_mtbf_s=None if node_mtbf is None else 3600 * node_mtbf,
        repair_s=3600 * (1.0 if repair is None else repair),
        seed=seed,
        settle_s=SETTLE_S if as_operated else None,
        grid_s=every,
    )
    try:
        machines = replace(parse_cluster(cluster), prices=parse_prices(prices, cluster))
        if goodput and kind != "elasticflow":
            raise ValueError("--goodput belongs to --format elasticflow")
        folders = parse_scalings(scalings, kind, machines)
        jobs = _read(trace, kind, throughputs, folders, machines, limit, goodput)
        if output is not None:
            make_folder(output, "--output")
        results = [
            _run(jobs, machines, Policy(objective=Objective(name)), settings)
            for name in objectives or (Objective.FAIRNESS.value,)
        ]
    except (SchedulerError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    _print(results)
    if output is not None:
        _write(results, machines, output, plots, trace, cluster)


def parse_cluster(text: str) -> TraceCluster:
    """`v100=8,gpu=80x8`: eight nodes of one V100, eighty of eight GPUs."""
    from .trace import TraceCluster

    nodes: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for item in text.split(","):
        match = _NODES.fullmatch(item.strip())
        if match is None:
            raise ValueError(
                f"--cluster: {item.strip()!r} is not TYPE=NODES or TYPE=NODESxPER_NODE, with numbers of 1 or more"
            )
        name = match["type"]
        if name in nodes:
            raise ValueError(f"--cluster: {name} is named twice")
        nodes[name], sizes[name] = int(match["nodes"]), int(match["size"] or 1)
    if sum(nodes.values()) > MOST_NODES:
        raise ValueError(
            f"--cluster: {sum(nodes.values())} nodes are more than the {MOST_NODES} of a simulation"
        )
    return TraceCluster(nodes, sizes)


def parse_prices(texts: tuple[str, ...], cluster: str) -> dict[str, float]:
    """`v100=2.48`: by type."""
    known = parse_cluster(cluster).nodes
    prices: dict[str, float] = {}
    for text in texts:
        name, _, money = text.partition("=")
        if name in prices:
            raise ValueError(f"--price: {name} has two prices; give one")
        try:
            prices[name] = float(money)
        except ValueError:
            prices[name] = -1.0
        if name not in known or not 0 <= prices[name] < float("inf"):
            raise ValueError(
                f"--price: {text!r} is not TYPE=MONEY with a type of --cluster and a number, 0 or more"
            )
    return prices


def parse_scalings(texts: tuple[str, ...], kind: str, cluster: TraceCluster) -> dict[str, Path]:
    """`t4=pollux_t4`: the folder of each accelerator type."""
    if bool(texts) != (kind == "elasticflow"):
        raise ValueError("--scaling TYPE=FOLDER belongs to --format elasticflow, once for each type measured")
    folders: dict[str, Path] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if name in folders:
            raise ValueError(f"--scaling: {name} has two folders; give one")
        if name not in cluster.nodes or not Path(folder).is_dir():
            raise ValueError(
                f"--scaling: {text!r} is not TYPE=FOLDER with a type of --cluster and an existing folder"
            )
        folders[name] = Path(folder)
    return folders


def _read(
    path: Path,
    kind: str,
    throughputs: Path | None,
    scalings: dict[str, Path],
    cluster: TraceCluster,
    limit: int | None,
    goodput: bool = False,
) -> Trace:
    from dataclasses import replace

    from .readers import gavel, gavel_throughputs, openb, philly
    from .scaling import elasticflow

    if kind == "philly":
        if len(cluster.nodes) != 1:
            raise ValueError("--cluster: Philly's trace knows one accelerator type; name exactly one")
        (accelerator,) = cluster.nodes
        found = philly(path, accelerator, cluster.per_node(accelerator))
    elif kind == "openb":
        found = openb(path, cluster.nodes)
    elif kind == "elasticflow":
        sizes = {name: cluster.per_node(name) for name in scalings}
        found = elasticflow(path, scalings, sizes, adapts=goodput)
        if goodput and not any(job.phases for job in found.jobs):
            raise ValueError(
                "--goodput: no folder of --scaling has Pollux's validation of a job's model and batch size"
            )
    else:
        name = "simulation_throughputs.json"
        table = throughputs or next(
            (folder / name for folder in (path.parent, path.parent.parent) if (folder / name).exists()), None
        )
        if table is None:
            raise ValueError(f"--throughputs: no {name} beside {path}; name the file")
        found = gavel(path, gavel_throughputs(table))
    if not found.jobs:
        raise ValueError(f"{path}: there is no job in it that ran on accelerators")
    return replace(found, jobs=found.jobs[:limit]) if limit else found


def _run(trace: Trace, cluster: TraceCluster, policy: Policy, settings: Settings) -> Result:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from .engine import simulate as replay

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bar_of(*columns) as bar:
        task = bar.add_task(policy.objective.value, total=len(trace.jobs))

        def progress(done: int, total: int, now: float) -> None:
            bar.update(task, completed=done)

        return replay(trace, cluster, policy, settings, progress=progress)


def _print(results: list[Result]) -> None:
    from rich.table import Table

    table = Table(box=None)
    names = (
        "mean_h",
        "median_h",
        "p99_h",
        "makespan_h",
        "worst_ftf",
        "moves_per_job",
        "lost_h_per_job",
        "utilisation",
        "work_utilisation",
        "accelerator_h_per_job",
        "cost_per_job",
        "largest_wait_h",
        "jain",
        "peak_memory_mib",
        *results[0].deadlines(),
    )
    table.add_column("objective")
    numbers = [result.to_json() for result in results]
    for result in results:
        table.add_column(result.name, justify="right")
    for name in names:
        values = ("-" if row[name] is None else f"{row[name]:.2f}" for row in numbers)
        table.add_row(name.replace("_h", " h").replace("_", " "), *values)
    print_table(table)


def _write(
    results: list[Result], cluster: TraceCluster, folder: Path, plots: bool, trace: Path, spec: str
) -> None:
    rows: list[Any] = [result.to_json() for result in results]
    path = folder / "result.json"
    path.write_text(json.dumps({"trace": trace.name, "cluster": spec, "results": rows}, indent=1) + "\n")
    click.echo(f"wrote {path}", err=True)
    if plots:
        from .plots import draw

        for picture in draw(results, cluster, folder):
            click.echo(f"wrote {picture}", err=True)
