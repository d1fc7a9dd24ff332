"""`busbar simulate-serving`: what would callers wait for at another load, or with other limits?"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from busbar.scheduler.simulate.options import FiniteRange

if TYPE_CHECKING:
    from busbar.workloads.serving.replay import Seen, StepTimes

PERCENTS = (50, 90, 99)
DEFAULT_KV_TOKENS = 65_536
MOST_KV_TOKENS = 100_000_000
MOST_PROMPT_TOKENS = 1_000_000_000
"""Of all requests: the tokens of a prompt are made one by one."""
OF_TRACE, OF_RATE = ("scale",), ("requests", "prompt_tokens", "output_tokens")
"""Options that only one of the two loads reads."""
Rows = list[tuple[float, int, int]]


@click.command(
    name="simulate-serving",
    epilog="""\b
Examples:
  busbar simulate-serving --engine http://127.0.0.1:8000 --rate 4 --prompt-tokens 512 --output-tokens 128
  busbar simulate-serving --engine status.json --trace requests.csv --tpot 0.05
  busbar simulate-serving --times 0.012,0.0004,0.0002,0.00008 --kv-tokens 200000 --trace AzureLLMInferenceTrace_conv.csv

\b
--engine is a running `busbar serve`, or a file with what its /status answers: its step model and its KV cache. The step
model is fitted while it runs; let it see requests like yours first (`busbar bench`). The load is answered by the
engine's own scheduler in simulated time, so a day takes minutes and needs no accelerator.
""",
)
@click.option("--engine", metavar="URL|FILE", help="Where the step model comes from.")
@click.option(
    "--times",
    metavar="STEP,SEQ,KCTX,TOKEN",
    help="Or: seconds per step, per decoding sequence, per 1,000 tokens of context, per prompt token.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="CSV of requests: arrival_s, prompt_tokens, output_tokens; or Azure's columns.",
)
@click.option(
    "--scale",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="So many times the trace's requests.",
)
@click.option(
    "--rate", type=FiniteRange(min=0, min_open=True), help="Or: requests per second at random times."
)
@click.option(
    "--requests", type=click.IntRange(1), default=1000, show_default=True, help="With --rate: so many."
)
@click.option("--prompt-tokens", type=click.IntRange(1), default=256, show_default=True, help="With --rate.")
@click.option("--output-tokens", type=click.IntRange(1), default=64, show_default=True, help="With --rate.")
@click.option(
    "--shared-prefix",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Tokens that all prompts begin with.",
)
@click.option("--tpot", type=FiniteRange(min=0, min_open=True), help="Promised seconds per token (spec.slo).")
@click.option(
    "--kv-tokens", type=click.IntRange(64, MOST_KV_TOKENS), help="Of the KV cache [default: the engine's]."
)
@click.option(
    "--max-running", type=click.IntRange(1), default=64, show_default=True, help="As the engine's flag."
)
@click.option(
    "--max-batched-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="As the engine's flag.",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="As the engine's flag: who finds so many waiting is refused.",
)
@click.option(
    "--prefix-cache/--no-prefix-cache", default=True, show_default=True, help="As the engine's flag."
)
@click.option("--seed", default=0, show_default=True, help="Of random arrivals.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def simulate_serving(
    engine: str | None, times: str | None, trace: Path | None, rate: float | None, output: str, **asked: Any
) -> None:
    """Replay requests through the serving engine's scheduler, without a model."""
    from busbar.workloads.serving.replay import replay, requests_of, simulated
    from busbar.workloads.serving.scheduler import StepLimits

    if (engine is None) == (times is None):
        raise click.UsageError("Which engine? Say one of --engine and --times.")
    if (trace is None) == (rate is None):
        raise click.UsageError("Which load? Say one of --trace and --rate.")
    _refuse_unread(*(OF_RATE, "--trace") if rate is None else (OF_TRACE, "--rate"))
    step_times, kv_tokens, block = (
        _measured(engine) if engine is not None else (_stated(times or ""), None, 64)
    )
    rows = _random(rate, asked) if rate is not None else _from(trace or Path(), asked)
    blocks = (asked["kv_tokens"] or kv_tokens or DEFAULT_KV_TOKENS) // block
    _refuse_large(rows, blocks * block)
    limits = StepLimits(
        block, asked["max_batched_tokens"], asked["max_running"], prefix_cache=asked["prefix_cache"]
    )
    made = simulated(step_times, blocks, limits, asked["tpot"])
    with _bar(len(rows)) as told:
        try:
            seen = replay(requests_of(rows, asked["shared_prefix"]), made, told, asked["max_waiting"])
        except ValueError as error:
            raise click.ClickException(f"a request could never run: {error}") from error
    document = _document(seen, made.scheduler.preemption_count) | {"kvTokens": blocks * block}
    click.echo(json.dumps(document, indent=2) if output == "json" else _table(document))


def _refuse_unread(names: tuple[str, ...], load: str) -> None:
    """Raises click.UsageError for an option that was given and that this load does not read."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            other = "--rate" if load == "--trace" else "--trace"
            raise click.UsageError(f"--{name.replace('_', '-')} belongs to {other}; leave it out with {load}")


def _refuse_large(rows: Rows, kv_tokens: int) -> None:
    """Raises click.ClickException for a KV cache or a load that no engine could have."""
    if kv_tokens > MOST_KV_TOKENS:
        raise click.ClickException(
            f"the engine says that its KV cache holds {kv_tokens} tokens, which are more than {MOST_KV_TOKENS}; say --kv-tokens"
        )
    at_s, prompt, output = max(rows, key=lambda row: row[1] + row[2])
    if prompt + output > kv_tokens:
        raise click.ClickException(
            f"the request at {at_s:g} s could never run: its {prompt} + {output} tokens do not fit the KV cache of {kv_tokens}; say"
            " --kv-tokens, or take it out"
        )
    if sum(row[1] for row in rows) > MOST_PROMPT_TOKENS:
        raise click.ClickException(
            f"the {len(rows)} prompts have more than {MOST_PROMPT_TOKENS} tokens together; replay fewer requests"
        )


def _stated(text: str) -> StepTimes:
    from busbar.workloads.serving.replay import StepTimes

    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != 4 or not all(0 <= each < 1e6 for each in found) or not sum(found):
        raise click.UsageError(
            f"--times {text}: write four numbers of seconds with commas between them: per step, per decoding sequence, "
            "per 1,000 tokens of context, per prompt token"
        )
    return StepTimes(*found)


def _measured(engine: str) -> tuple[StepTimes, int | None, int]:
    """Of an engine's status: its step model, what its KV cache holds, and the tokens of a block."""
    from pydantic import ValidationError

    from busbar.kube.contracts.report import ServingReport
    from busbar.workloads.serving.replay import StepTimes

    status = _status(engine)
    try:
        report = ServingReport.model_validate(
            (status.get("report") if isinstance(status, dict) else None) or {}
        )
    except ValidationError as error:
        raise click.ClickException(f"{engine} is no status of a serving engine: {error}") from error
    model = report.step_model
    if model is None:
        raise click.ClickException(
            f"{engine} has no step model yet: it is fitted while requests run; send some (busbar bench) and try again"
        )
    found = StepTimes(
        model.seconds_per_step,
        model.seconds_per_sequence,
        model.seconds_per_thousand_context_tokens,
        model.seconds_per_prompt_token,
    )
    tokens = report.kv_bytes // report.kv_bytes_per_token if report.kv_bytes_per_token else report.kv_tokens
    return found, tokens, report.kv_block_tokens or 64


def _status(engine: str) -> Any:
    """What /status answers, or the file holds."""
    import urllib.request

    try:
        if "://" not in engine:
            return json.loads(Path(engine).read_text())
        url = engine.rstrip("/").removesuffix("/v1")
        with urllib.request.urlopen(
            url if url.endswith("/status") else f"{url}/status", timeout=10
        ) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{engine} cannot be read as an engine's status: {error}") from error


def _random(rate: float, asked: dict[str, Any]) -> Rows:
    rng, at_s, rows = random.Random(asked["seed"]), 0.0, []
    for _ in range(asked["requests"]):
        rows.append((at_s, asked["prompt_tokens"], asked["output_tokens"]))
        at_s += rng.expovariate(rate)
    return rows


def _from(trace: Path, asked: dict[str, Any]) -> Rows:
    from busbar.scheduler.errors import SchedulerError
    from busbar.scheduler.simulate.serving_trace import requests_csv

    try:
        found = requests_csv(trace, asked["scale"], asked["seed"])
    except SchedulerError as error:
        raise click.ClickException(str(error)) from error
    return list(zip(found.arrivals_s, found.prompts, found.outputs, strict=True))


def _document(seen: Sequence[Seen], preemptions: int) -> dict[str, Any]:
    """What callers saw, in seconds and tokens."""
    asked, seen = len(seen), [one for one in seen if one.times_s]
    first_s = [one.ttft_s for one in seen]
    each_s = [one.tpot_s for one in seen if one.tpot_s is not None]
    seconds = max((one.times_s[-1] for one in seen), default=0.0)
    tokens = sum(len(one.times_s) for one in seen)
    return {
        "requests": asked,
        "refused": asked - len(seen),
        "seconds": seconds,
        "outputTokensPerSecond": tokens / seconds if seconds else 0.0,
        "cachedTokens": sum(one.cached_tokens for one in seen),
        "promptTokens": sum(len(one.request.prompt) for one in seen),
        "preemptions": preemptions,
        "ttftSeconds": _percentiles(first_s),
        "tpotSeconds": _percentiles(each_s),
    }


def _percentiles(values: list[float]) -> dict[str, float | None]:
    from busbar.scheduler.simulate.metrics import percentile

    return {f"p{percent}": percentile(values, percent) if values else None for percent in PERCENTS}


def _table(document: dict[str, Any]) -> str:
    lines = [
        f"{document['requests'] - document['refused']} requests answered in {document['seconds']:.4g} s, "
        f"{document['outputTokensPerSecond']:.4g} tokens/s, {document['preemptions']} preemptions, "
        f"{document['cachedTokens']:,} of {document['promptTokens']:,} prompt tokens from the cache"
    ]
    if document["refused"]:
        lines.append(f"{document['refused']} of {document['requests']} refused, because too many waited")
    for name, what in (("ttftSeconds", "to the first token"), ("tpotSeconds", "per further token")):
        told = ", ".join(f"{part} {_ms(value)}" for part, value in document[name].items())
        lines.append(f"{what:<20} {told}")
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.3g} s"


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console) as bar:
        task = bar.add_task("answered", total=total)
        yield lambda: bar.advance(task)
