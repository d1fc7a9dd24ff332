"""`busbar simulate --power`: would this feed carry more servers, and at what cost?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import SchedulerError
from ..power.domains import PowerPolicy
from .options import FiniteRange, bar_of, print_table

if TYPE_CHECKING:
    from .power_load import Requests
    from .power_run import Figures

MAX_SERVERS = 500
SERVER_W = 6500.0
"""What the feed provides for each of `--budget-servers`."""

_EPILOG = """\b
Examples:
  busbar simulate --power --servers 40..60 --budget-servers 40 --minutes 20
  busbar simulate --power --servers 56 --mix 0.5 --policy Static --policy Lease --delay outofband
  busbar simulate --power --servers 52,56,60 --load azure --data data/ --minutes 120 --output json
  busbar simulate --power --servers 60 --load servegen:2 --data data/ --minutes 720
"""


def _servers(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        first, dots, last = text.partition("..")
        found = tuple(range(int(first), int(last) + 1, 4)) if dots else tuple(int(n) for n in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a number, a list (52,56) or a range (40..60)") from error
    if not found:
        raise click.BadParameter(f"{text!r} is an empty range; write the smaller number first (40..60)")
    if min(found) < 4 or max(found) > MAX_SERVERS:
        raise click.BadParameter(f"{text!r}: a row has 4 to {MAX_SERVERS} servers")
    return found


@click.command("simulate --power", epilog=_EPILOG)
@click.option(
    "--servers",
    default="40..60",
    show_default=True,
    callback=_servers,
    help="How many servers hang on the feed: a number, a list, or a range in steps of four.",
)
@click.option(
    "--budget-servers",
    type=click.IntRange(1, MAX_SERVERS),
    default=40,
    show_default=True,
    help="For how many servers of 6.5 kW the feed was built.",
)
@click.option(
    "--mix",
    type=FiniteRange(0, 1),
    default=0.0,
    show_default=True,
    help="Part of the servers that train; the others serve, half of them with high priority.",
)
@click.option(
    "--load",
    "load",
    default="synthetic",
    show_default=True,
    help="azure, servegen:DAY (1 to 14) or synthetic.",
)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with azure_llm_2023/ and servegen/, for --load azure and servegen.",
)
@click.option(
    "--delay",
    type=click.Choice(["inband", "outofband"]),
    default="inband",
    show_default=True,
    help="inband: 1 s; outofband: telemetry 2 s old, and limits act after 40 s.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice([policy.value for policy in PowerPolicy]),
    help="Repeat to compare. Default: LeaseWithBurst in band, Lease out of band.",
)
@click.option(
    "--minutes",
    type=click.IntRange(1, 1440),
    default=20,
    show_default=True,
    help="Simulated time.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Same seed, same result.")
@click.option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def power(
    servers: tuple[int, ...],
    budget_servers: int,
    mix: float,
    load: str,
    data: Path | None,
    delay: str,
    policies: tuple[str, ...],
    minutes: int,
    seed: int,
    output: str,
) -> None:
    """Simulate a row of servers on one electrical feed under the power controller.

    The leases are decided by the code of busbar.scheduler.power. Servers, requests and training jobs are simulated
    in steps of 0.1 s, with constants of a server of eight A100. Latency and training speed are ratios to the same row
    and requests without any limit.
    """
    from .power_load import load_maker

    chosen = policies or (("LeaseWithBurst" if delay == "inband" else "Lease"),)
    if delay == "outofband" and "LeaseWithBurst" in chosen:
        raise click.UsageError(
            "--policy LeaseWithBurst needs --delay inband: the node itself must limit its boards within 0.1 s"
        )
    seconds = 60 * minutes
    try:
        make = load_maker(load, data)
        runs = len(servers) * (len(chosen) + 1)
        with _Bar(runs * seconds) as bar:
            rows = [
                row
                for count in servers
                for row in _compare(count, budget_servers, mix, make, delay, chosen, seconds, seed, bar.add)
            ]
    except SchedulerError as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        settings = {
            "budgetServers": budget_servers,
            "mix": mix,
            "load": load,
            "delay": delay,
            "minutes": minutes,
            "seed": seed,
        }
        click.echo(json.dumps({"settings": settings, "rows": rows}, indent=1))
    else:
        _print(rows)


def _compare(
    servers: int,
    budget_servers: int,
    mix: float,
    make: Callable[[int, float, int], Requests],
    delay: str,
    policies: tuple[str, ...],
    seconds: int,
    seed: int,
    tick: Callable[[int], None],
) -> list[dict[str, Any]]:
    from .power_row import ServerModel, layout
    from .power_run import DELAYS, LeaseLaw, Unlimited, figures, run

    model, places, budget_w = ServerModel(), layout(servers, mix), budget_servers * SERVER_W
    requests = make(places.serving, seconds, seed)
    twin = run(places, model, requests, Unlimited(places, model), seconds, seed, tick)
    floor_percent = LeaseLaw(places, model, budget_w, PowerPolicy.STATIC, DELAYS[delay]).floor_percent
    rows = []
    for policy in policies:
        if policy == PowerPolicy.OBSERVE.value:
            ours = twin
            tick(seconds)
        else:
            law = LeaseLaw(places, model, budget_w, PowerPolicy(policy), DELAYS[delay])
            ours = run(places, model, requests, law, seconds, seed, tick)
        found = figures(ours, twin, requests, budget_w, seconds)
        told = {"floorPercent": round(floor_percent, 1), **_json(found)}
        rows.append({"servers": servers, "policy": policy, **told})
    return rows


def _json(found: Figures) -> dict[str, Any]:
    """In the names of our JSON, with six significant digits."""

    def name(text: str) -> str:
        first, *others = text.split("_")
        return first + "".join(word.capitalize() for word in others)

    return {
        name(key): float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in asdict(found).items()
    }


class _Bar:
    """Progress on stderr, counted in simulated seconds."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._progress = bar_of(*columns)
        self._task = self._progress.add_task("row", total=total)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add(self, second: int) -> None:
        """A run has reached this second."""
        if second % 60 == 0:
            self._progress.advance(self._task, 60)


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None)
    columns: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("servers", "servers", str),
        ("policy", "policy", str),
        ("over s", "overS", str),
        ("peak %", "peakPercent", "{:.1f}".format),
        ("high p50", "highP50", "{:.3f}".format),
        ("high p99", "highP99", "{:.3f}".format),
        ("first p99", "highFirstP99", "{:.3f}".format),
        ("low p50", "lowP50", "{:.3f}".format),
        ("low p99", "lowP99", "{:.3f}".format),
        ("training", "trainingSpeed", "{:.3f}".format),
        ("J/token", "joulesPerToken", "{:.3f}".format),
    )
    for title, key, _ in columns:
        table.add_column(title, justify="left" if key == "policy" else "right")
    for row in rows:
        table.add_row(*("-" if row[key] is None else form(row[key]) for _, key, form in columns))
    print_table(table)
    click.echo(
        "over s: seconds above the budget; peak %: of the budget; latency, training speed and joules per token are"
        "\nratios to the same row without limits."
    )
    above = {row["servers"]: row["floorPercent"] for row in rows if row["floorPercent"] > 100}
    for servers, percent in above.items():
        click.echo(
            f"{servers} servers may draw {percent:.0f} % of what the budget allows while all boards are at their lowest limits,"
            " so no policy keeps it: take fewer servers, or a larger budget."
        )
