"""`busbar bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from busbar.cli.ending import INTERRUPTED
from busbar.cli.errors import BusbarError, Invalid, UsageProblem
from busbar.cli.options import FiniteRange
from busbar.cli.output import columns, emit, output_of
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.cli.load import Lengths, Load
    from busbar.cli.load_report import Target
    from busbar.cli.load_run import Answered, Endpoint

REQUESTS = 100
LEAST_S = 0.001


class LengthsType(click.ParamType["Lengths"]):
    """Tokens."""

    name = "N|N-M"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        from busbar.cli.load import MOST_TOKENS, Lengths

        try:
            return Lengths.parse(value)
        except ValueError:
            self.fail(
                f"{value!r} is neither a number of tokens nor a range such as 128-1024, up to {MOST_TOKENS}",
                param,
                ctx,
            )


class TargetType(click.ParamType["Target"]):
    """A promise."""

    name = "ttft=S,tpot=S"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Target:
        from busbar.cli.load_report import Target

        try:
            return Target.parse(value)
        except ValueError:
            self.fail(f"{value!r}: write seconds such as ttft=2,tpot=0.1, or one of both", param, ctx)


class Several(click.ParamType[tuple[float, ...]]):
    """Numbers above 0 with commas between them."""

    name = "X[,X...]"

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        try:
            found = tuple((int if self._whole else float)(part) for part in value.split(","))
        except ValueError:
            found = ()
        if not found or not all(LEAST_S <= each < 1e6 for each in found):
            self.fail(f"{value!r}: write one number above 0, or several such as 1,2,4", param, ctx)
        return found


@click.command(
    epilog="""\b
Examples:
  busbar bench http://127.0.0.1:8000/v1 --concurrency 1,8,32
  busbar bench --model team/my-model --rate 2,4,8 --target ttft=2,tpot=0.1
  busbar bench URL --rate 5 --prompt-tokens 512-2048 --output-tokens 128 --shared-prefix 256
  busbar bench URL --file requests.csv --speed 2 -o json > result.json

\b
--rate sends requests at random times whatever the endpoint does (open): raise it until the times grow without end, and
the rate before that is what the endpoint carries. --concurrency waits for an answer before the next request (closed).
The key is that of OPENAI_API_KEY, or of `busbar login` where no URL is given. Requests cost what other requests cost.
"""
)
@click.argument("url", required=False)
@click.option("--model", help="The model [default: the only one that the endpoint serves].")
@click.option("--rate", "rates", type=Several(), help="Requests per second; of several one after another.")
@click.option(
    "--concurrency", "at_once", type=Several(whole=True), help="Requests under way at any time; likewise."
)
@click.option(
    "--file",
    "trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="CSV of requests: arrival_s, prompt_tokens, output_tokens.",
)
@click.option(
    "--speed",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    help="So many times as fast as the file says.",
)
@click.option(
    "--requests", type=click.IntRange(1), help=f"Of each load [default: {REQUESTS}, or all of the file]."
)
@click.option(
    "--duration",
    type=FiniteRange(min=0, min_open=True),
    help="Send nothing later than so many seconds after a load's begin.",
)
@click.option(
    "--prompt-tokens", type=LengthsType(), default="256", show_default=True, help="Of each request."
)
@click.option("--output-tokens", type=LengthsType(), default="64", show_default=True, help="Of each answer.")
@click.option(
    "--shared-prefix",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Tokens of the prompt that all requests share.",
)
@click.option("--completions", is_flag=True, help="Ask /completions in place of /chat/completions.")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask for answers of full length; servers that do not know the field refuse it.",
)
@click.option(
    "--field", "fields", multiple=True, metavar="NAME=JSON", help="A further field of each request."
)
@click.option("--target", type=TargetType(), help="Seconds promised: how many requests saw them is reported.")
@click.option("--seed", default=0, show_default=True, help="The same seed, the same requests.")
@click.option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds without any byte after which a request has failed.",
)
@output_of(("table", "json"))
@connected
def bench(session: Session, /, url: str | None, output: str, **asked: Any) -> None:
    """Measure an OpenAI endpoint under load: tokens per second, and what callers wait for."""
    loads = _loads(asked)
    endpoint = _endpoint(session, url, asked)
    rows = list(_measured(endpoint, loads, asked))
    _show(output, endpoint, rows, asked)


def _loads(asked: dict[str, Any]) -> list[Load]:
    from busbar.cli.load import closed_load, load_of_file, open_load

    given = [name for name in ("rates", "at_once", "trace") if asked[name] is not None]
    if len(given) != 1:
        raise UsageProblem(
            "Which load? Say one of --rate, --concurrency and --file, e.g. --concurrency 1,8,32."
        )
    if asked["trace"] is not None:
        return [load_of_file(asked["trace"], asked["requests"], asked["speed"])]
    count, lengths = asked["requests"] or REQUESTS, (asked["prompt_tokens"], asked["output_tokens"])
    if asked["rates"] is not None:
        return [open_load(rate, count, *lengths, asked["seed"]) for rate in asked["rates"]]
    return [closed_load(int(each), count, *lengths, asked["seed"]) for each in asked["at_once"]]


def _endpoint(session: Session, url: str | None, asked: dict[str, Any]) -> Endpoint:
    import asyncio
    import os

    from busbar.cli.load_run import Endpoint, models_at

    if url is None:
        with session.gateway(os.environ.get("BUSBAR_OPENAI_URL")) as client:
            found = Endpoint(client.gateway, client.token, "", ca_file=client.ca_file)
    else:
        found = Endpoint(url.rstrip("/"), os.environ.get("OPENAI_API_KEY"), "")
    found.chat, found.timeout_s, found.extra = not asked["completions"], asked["timeout"], _extra(asked)
    found.model = asked["model"] or _only(asyncio.run(models_at(found)), found.url)
    return found


def _only(models: list[str], url: str) -> str:
    if len(models) != 1:
        there = f"there are {', '.join(models)}" if models else "it names none"
        raise UsageProblem(f"Which model of {url}? Say --model NAME; {there}.")
    return models[0]


def _extra(asked: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"ignore_eos": True} if asked["ignore_eos"] else {}
    for field in asked["fields"]:
        name, equals, value = field.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            equals = ""
        if not name or not equals:
            raise UsageProblem(f"--field {field}: write NAME=JSON, e.g. temperature=0 or stop='[\"x\"]'")
    return found


def _measured(endpoint: Endpoint, loads: list[Load], asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The row of each load; of one that is interrupted that of what was answered, and none after it."""
    import asyncio

    from busbar.cli.load_report import report
    from busbar.cli.load_run import run

    try:
        texts = asyncio.run(endpoint.texts(asked["shared_prefix"], asked["seed"]))
    except Invalid as error:
        hint = ". Try --no-ignore-eos." if "ignore_eos" in str(error) else ""
        raise Invalid(f"{error}{hint}") from error
    for load in loads:
        answered: list[Answered] = []
        with _bar(load) as heard:

            def told(one: Answered, answered: list[Answered] = answered, heard: Any = heard) -> None:
                answered.append(one)
                heard(one)

            try:
                seconds = asyncio.run(run(load, endpoint, texts, told, until_s=asked["duration"]))
            except KeyboardInterrupt:
                seconds = max((one.ended_s for one in answered), default=0.0)
                yield report(load, answered, seconds, asked["target"]) | {"interrupted": True}
                return
        yield report(load, answered, seconds, asked["target"])


@dataclass
class _Heard:
    """Counts what has ended, for the bar."""

    bar: Any
    task: Any
    failed: int = 0

    def __call__(self, one: Answered) -> None:
        self.failed += bool(one.problem)
        self.bar.update(self.task, advance=1, failed=f"{self.failed} failed" if self.failed else "")


@contextmanager
def _bar(load: Load) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield _Heard(bar, bar.add_task(load.name, total=len(load.requests), failed=""))


def _show(output: str, endpoint: Endpoint, rows: list[dict[str, Any]], asked: dict[str, Any]) -> None:
    from busbar.cli.load_report import remarks

    document = {
        "url": endpoint.url,
        "model": endpoint.model,
        "api": "chat/completions" if endpoint.chat else "completions",
        "seed": asked["seed"],
        "rows": rows,
    }
    emit(output, document, lambda: _table(rows), ())
    for row in rows:
        for remark in remarks(row):
            click.echo(remark, err=True)
        if row.get("interrupted"):
            click.echo(f"{row['load']}: interrupted, so this is of what was answered until then", err=True)
    if rows[-1].get("interrupted"):
        sys.exit(INTERRUPTED)
    if all(row["failed"] == row["requests"] for row in rows):
        raise BusbarError(f"No request to {endpoint.url} was answered.")


def _table(rows: list[dict[str, Any]]) -> str:
    heads = [
        "load",
        "answered",
        "failed",
        "req/s",
        "tokens/s",
        "ttft p50",
        "p90",
        "p99",
        "tpot p50",
        "p90",
        "p99",
    ]
    heads += ["gap p99", "whole p50"]
    kept = any("target_kept" in row for row in rows)
    lines = [_line(row) + ([f"{row.get('target_kept', 0):.1%}"] if kept else []) for row in rows]
    return columns([*heads, *(["in target"] if kept else [])], lines)


def _line(row: dict[str, Any]) -> list[str]:
    times = [
        *row["ttft_s"].values(),
        *row["tpot_s"].values(),
        row["gap_s"]["p99"],
        row["whole_s"]["p50"],
    ]
    return [
        row["load"],
        str(row["requests"] - row["failed"]),
        str(row["failed"]),
        f"{row['requests_per_s']:.3g}",
        f"{row['output_tokens_per_s']:.4g}",
        *map(_time, times),
    ]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}ms" if seconds < 1 else f"{seconds:.3g}s"
