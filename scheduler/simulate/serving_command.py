"""`busbar plan-capacity`: which GPUs would serve this load within this SLO, and at what cost?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import SchedulerError
from .options import FiniteRange, bar_of, print_table

if TYPE_CHECKING:
    from ..fit.model import ModelShape
    from .serving_failures import Failures
    from .serving_plan import Plan, Question
    from .serving_trace import ServingTrace

_EPILOG = """\b
Examples:
  busbar plan-capacity --trace AzureLLMInferenceTrace_conv.csv --scale 12 \\
      --pools L4=8@0.70,A10G=8@1.01,A100=24@3.67,H100=8@7.516 --slo ttft=2,tpot=0.1
  busbar plan-capacity --trace servegen/m-small --day 2 --peak 60 --pools A100=8@3.67,H100=8@7.516 --start 180
  busbar plan-capacity --trace requests.csv --pools A100:a=2x4@3.67,A100:b=2x4@3.67 --node-mtbf 700 \\
      --min-replicas 2 --min-zones 2
  busbar plan-capacity --trace requests.csv --model config.json --pools L40S=16@1.90 --budget 20 -o json
"""


def load_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of a command that replays the requests of a service."""
    options = (
        click.option(
            "--slo",
            default="ttft=2,tpot=0.1,percentile=99",
            show_default=True,
            help="Seconds to the first token, seconds per token, and the per cent of requests that must see both.",
        ),
        click.option(
            "--model",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="The model's config.json. Default: the dimensions of Llama-3-8B.",
        ),
        click.option(
            "--scale",
            type=FiniteRange(min=0, min_open=True),
            default=1.0,
            show_default=True,
            help="CSV: so many times the trace's requests.",
        ),
        click.option("--day", type=click.IntRange(min=1), help="ServeGen: which day; the first is 1."),
        click.option(
            "--peak",
            type=FiniteRange(min=0, min_open=True),
            help="ServeGen: requests/s of the busiest window.",
        ),
        click.option("--hours", type=FiniteRange(min=0, min_open=True), help="Only the first so many hours."),
        click.option(
            "--seed",
            default=0,
            show_default=True,
            help="Of generated arrivals; the same seed, the same result.",
        ),
        click.option(
            "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def failure_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that let nodes and replicas fail."""
    hours = FiniteRange(min=0, min_open=True)
    options = (
        click.option(
            "--node-mtbf",
            type=hours,
            help="Nodes fail: mean hours between the failures of one node. Default: none fails.",
        ),
        click.option("--repair", type=hours, help="Hours until it is back. Default: 1."),
        click.option(
            "--outages",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Or these nodes fail: CSV with second, pool, node (from 0 on; *: all of the pool), until.",
        ),
        click.option(
            "--replica-mtbf",
            type=hours,
            help="Processes of replicas end by themselves: mean hours between the failures of one. Default: none does.",
        ),
        click.option(
            "--hang-mtbf",
            type=hours,
            help="Replicas hang, running on without an answer: mean hours between the hangs of one. Default: none does.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command("plan-capacity", epilog=_EPILOG)
@click.option(
    "--trace",
    "source",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="Requests as CSV (arrival_s, prompt_tokens, output_tokens; or Azure's columns), or a ServeGen folder.",
)
@click.option(
    "--pools",
    required=True,
    help="GPUs and prices: TYPE=COUNT@PRICE_PER_HOUR, …; types have data sheets. Also TYPE:ZONE, and NODESxPER_NODE for "
    "COUNT; else a node has 8.",
)
@click.option(
    "--start",
    default=60.0,
    show_default=True,
    help="Seconds from a decision to a replica that serves.",
)
@click.option(
    "--sleeping",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Replicas with weights in host memory; their GPUs are lent to others until they wake.",
)
@click.option(
    "--warm",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="At most so many surplus replicas sleep instead of leaving, as scaling.warm; they are paid meanwhile.",
)
@click.option(
    "--wake",
    default=5.0,
    show_default=True,
    help="Seconds until a sleeping replica serves.",
)
@click.option("--budget", type=FiniteRange(min=0, min_open=True), help="Most money per hour.")
@click.option("--watts", type=FiniteRange(min=0, min_open=True), help="Most watts of all replicas.")
@click.option(
    "--caps",
    help="With --watts: per cent of their watts to which boards may be limited, such as 80,60, where more replicas at lower "
    "limits carry more. Default: none.",
)
@click.option("--quota", type=click.IntRange(min=1), help="Most GPUs over all pools.")
@click.option(
    "--min-replicas", type=click.IntRange(min=0), default=1, show_default=True, help="Never fewer replicas."
)
@click.option(
    "--min-zones",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Replicas stand in so many zones of the pools (scaling.minZones), whatever that costs more.",
)
@click.option(
    "--zone-reserve",
    type=FiniteRange(min=0, max=1),
    default=0.0,
    show_default=True,
    help="With --min-zones: without any one zone, the other replicas carry this part of the load (scaling.zoneReserve).",
)
@failure_options
@load_options
def plan_capacity(
    source: Path,
    pools: str,
    slo: str,
    model: Path | None,
    start: float,
    sleeping: int,
    warm: int,
    wake: float,
    budget: float | None,
    watts: float | None,
    caps: str | None,
    quota: int | None,
    min_replicas: int,
    min_zones: int,
    zone_reserve: float,
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
    """Plan which GPUs a model service needs for a load and an SLO.

    Replays the load request by request on three fleets (the cheapest mix of GPU types by forecast, a
    Kubernetes HPA and a static fleet of the best single type) and prints each beside the bound: what a fleet
    that knows the future and starts at once would cost. Speeds come from data sheets and the model's
    dimensions, not from measurements. With failures of nodes or replicas, each fleet is simulated with and
    without them.
    """
    from .serving_failures import nodes_of
    from .serving_plan import Question, answer
    from .serving_pools import parse_caps, parse_pools, parse_slo

    if zone_reserve and not min_zones:
        raise click.UsageError(
            "--zone-reserve is kept for the loss of one of the zones of --min-zones; give both."
        )
    try:
        parsed = parse_pools(pools)
        question = Question(
            pools=parsed,
            slo=parse_slo(slo),
            shape=read_shape(model),
            start_s=start,
            sleeping=sleeping,
            warm=warm,
            wake_s=wake,
            budget_per_h=budget,
            watts=watts,
            caps=() if caps is None else parse_caps(caps),
            quota=quota,
            min_replicas=min_replicas,
            min_zones=min_zones,
            zone_reserve=zone_reserve,
            failures=read_failures(
                node_mtbf, repair, outages, replica_mtbf, hang_mtbf, seed, nodes_of(parsed)
            ),
        )
        trace = read_requests(source, scale, day, peak, seed)
        trace = trace.until(3600 * hours) if hours is not None else trace
        with progress_bars() as progress:
            plan = answer(trace, question, progress)
    except (SchedulerError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        click.echo(json.dumps(plan.to_json(), indent=1))
    else:
        _print(plan, question)


def read_requests(source: Path, scale: float, day: int | None, peak: float | None, seed: int) -> ServingTrace:
    """A CSV file of requests, or a day of a ServeGen folder. Raises ValueError."""
    from .serving_trace import requests_csv, servegen

    if source.is_dir():
        if scale != 1:
            raise ValueError("--scale is for CSV files; a ServeGen folder is scaled with --peak")
        if day is None or peak is None:
            raise ValueError("--trace is a ServeGen folder: name --day and --peak, too")
        return servegen(source, day, peak, seed)
    if day is not None or peak is not None:
        raise ValueError("--day and --peak are for a ServeGen folder; a CSV file is scaled with --scale")
    return requests_csv(source, scale, seed)


def read_failures(
    node_mtbf: float | None,
    repair: float | None,
    outages: Path | None,
    replica_mtbf: float | None,
    hang_mtbf: float | None,
    seed: int,
    nodes: Mapping[str, int],
) -> Failures:
    """What shall fail, from hours; `nodes` by pool. Raises ValueError, ServingModelError, TraceError."""
    from .serving_failures import Failures, outages_csv

    if repair is not None and node_mtbf is None:
        raise ValueError(
            "--repair is how long a node is away that --node-mtbf lets fail; give --node-mtbf, too"
        )
    return Failures(
        node_mtbf_s=None if node_mtbf is None else 3600 * node_mtbf,
        replica_mtbf_s=None if replica_mtbf is None else 3600 * replica_mtbf,
        hang_mtbf_s=None if hang_mtbf is None else 3600 * hang_mtbf,
        repair_s=3600.0 if repair is None else 3600 * repair,
        listed=() if outages is None else outages_csv(outages, nodes),
        seed=seed,
    )


def read_shape(path: Path | None) -> ModelShape:
    """The dimensions of a model by its config.json; Llama-3-8B's without one. Raises ValueError."""
    from ..fit.model import ModelShape
    from .serving_pools import LLAMA_8B

    if path is None:
        return LLAMA_8B
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--model: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--model: {path} is not the config of a model")
    return ModelShape.from_config(config)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, float, float], None]]:
    """A bar per step on standard error."""
    from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with bar_of(*columns) as bar:

        def show(name: str, done: float, total: float) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield show


def _print(plan: Plan, question: Question) -> None:
    from rich.table import Table

    table = Table(box=None)
    columns = ("fleet", "attained", "cost/h", "x bound", "TTFT p99", "most replicas")
    for number, name in enumerate(columns):
        table.add_column(
            name, justify="left" if number in (0, len(columns) - 1) else "right", no_wrap=number == 0
        )
    for result in plan.results:
        row = result.to_json()
        table.add_row(
            result.policy,
            f"{100 * result.attainment:.2f} %",
            f"{result.cost_per_h:.2f}",
            f"{result.cost_per_h / plan.bounds.mix_per_h:.2f}",
            "never" if row["ttft_p99_s"] is None else f"{row['ttft_p99_s']} s",
            _counts(dict(result.peak)),
        )
    table.add_row(
        "bound: mix", "", f"{plan.bounds.mix_per_h:.2f}", "1.00", "", _counts(dict(plan.bounds.peak))
    )
    table.add_row(
        f"bound: {plan.bounds.single.key} only",
        "",
        f"{plan.bounds.single_per_h:.2f}",
        f"{plan.bounds.single_per_h / plan.bounds.mix_per_h:.2f}",
        "",
        "",
    )
    print_table(table)
    for sentence in plan.sentences(question):
        click.echo(sentence)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {key}" for key, count in sorted(counts.items()) if count)
