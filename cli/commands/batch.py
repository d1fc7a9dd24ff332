"""`busbar batch`: files of requests over the gateway's /v1/files and /v1/batches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from busbar.cli.errors import JobFailed, NotFound, Unreachable, UsageProblem
from busbar.cli.output import age, columns, emit, facts, output_option
from busbar.cli.session import Session, connected
from busbar.cli.whole_file import WholeFile

if TYPE_CHECKING:
    from busbar.cli.batches import Batch, BatchClient

F = TypeVar("F", bound=Callable[..., Any])
PAUSE_S = 2.0
"""Between two looks at a batch that is waited for."""
AWAY_S = 300.0
"""A gateway that is waited at may be away for so long: it is restarted, or its node is."""
_ID = click.argument("batch_id", metavar="BATCH")


def at_gateway(command: F) -> F:
    """The option that names another gateway."""
    return click.option(
        "--gateway",
        metavar="URL",
        envvar="BUSBAR_OPENAI_URL",
        help="Base URL of the OpenAI API, ending with /v1 [default: BUSBAR_OPENAI_URL, what the server says].",
    )(command)


@click.group(
    epilog="""\b
Examples:
  busbar batch create requests.jsonl --wait
  busbar batch list
  busbar batch show batch-0f3a
  busbar batch results batch-0f3a -f answers.jsonl
  busbar batch cancel batch-0f3a

\b
The token needs the scope inference. Files and batches are yours alone, and are deleted after 30 days.
"""
)
def batch() -> None:
    """Run a file of requests as a batch, and get the answers."""


@batch.command(
    epilog="""\b
Examples:
  busbar batch create requests.jsonl
  busbar batch create requests.jsonl --wait && busbar batch list
  busbar batch create requests.jsonl --metadata run=7 -o name

\b
A line of the file:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"model": "my-model", "messages": [{"role": "user", "content": "Hello"}]}}
"""
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--endpoint", metavar="PATH", help="The requests' path [default: the first line's url].")
@click.option("--metadata", multiple=True, metavar="NAME=VALUE", help="Kept with the batch; may be repeated.")
@click.option("--wait", is_flag=True, help="Wait until the batch has ended, with a progress bar.")
@at_gateway
@output_option
@connected
def create(
    session: Session,
    file: Path,
    endpoint: str | None,
    metadata: tuple[str, ...],
    wait: bool,
    gateway: str | None,
    output: str,
) -> None:
    """Upload a file of requests and make a batch of it."""
    from busbar.cli.batches import endpoint_in

    pairs = [each.partition("=") for each in metadata]
    if wrong := next((name for name, equals, _ in pairs if not name or not equals), None):
        raise UsageProblem(f"--metadata {wrong}: write NAME=VALUE")
    endpoint = endpoint or endpoint_in(file)
    with session.gateway(gateway) as client:
        with bar("uploading", file.stat().st_size) as told:
            file_id = client.upload(file, told)
        made = client.create(file_id, endpoint, {name: value for name, _, value in pairs})
        if wait:
            click.echo(f"{made.id} created", err=True)
            made = until_ended(client, made)
        _show(output, made)
        _fail(made)


@batch.command(
    name="list",
    epilog="""\b
Examples:
  busbar batch list
  busbar batch list --limit 5 -o json
""",
)
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="The newest so many.")
@at_gateway
@output_option
@connected
def list_(session: Session, limit: int, gateway: str | None, output: str) -> None:
    """List your batches, newest first."""
    from itertools import islice

    with session.gateway(gateway) as client:
        found = list(islice(client.batches(), limit))
    emit(
        output,
        [each.model_dump(mode="json") for each in found],
        lambda: _table(found) if found else "You have no batches. Make one with `busbar batch create FILE`.",
        [each.id for each in found],
    )


@batch.command(
    epilog="""\b
Examples:
  busbar batch show batch-0f3a
  busbar batch show batch-0f3a --wait
"""
)
@_ID
@click.option("--wait", is_flag=True, help="Wait until it has ended, with a progress bar.")
@at_gateway
@output_option
@connected
def show(session: Session, batch_id: str, wait: bool, gateway: str | None, output: str) -> None:
    """Show one batch: its state, progress and files."""
    with session.gateway(gateway) as client:
        found = client.batch(batch_id)
        if wait:
            found = until_ended(client, found)
    _show(output, found)
    if wait:
        _fail(found)


@batch.command(
    epilog="""\b
Examples:
  busbar batch cancel batch-0f3a
"""
)
@_ID
@at_gateway
@connected
def cancel(session: Session, batch_id: str, gateway: str | None) -> None:
    """Begin no more requests of a batch; what is answered stays."""
    with session.gateway(gateway) as client:
        found = client.cancel(batch_id)
    click.echo(f"{found.id} {found.status}")


@batch.command(
    epilog="""\b
Examples:
  busbar batch results batch-0f3a
  busbar batch results batch-0f3a -f answers.jsonl
  busbar batch results batch-0f3a --errors | jq .response.body.error.message
"""
)
@_ID
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Write there [default: standard output].")
@click.option("--errors", is_flag=True, help="The requests that failed, in place of the answers.")
@at_gateway
@connected
def results(session: Session, batch_id: str, file: Path | None, errors: bool, gateway: str | None) -> None:
    """Get the answers of a batch: one line of JSON for each request, by its custom_id."""
    with session.gateway(gateway) as client:
        found = client.batch(batch_id)
        file_id = found.error_file_id if errors else found.output_file_id
        if file_id is None:
            what = "failed requests" if errors else "answers"
            raise NotFound(
                f"{batch_id} is {found.status} and has no {what}{'' if found.ended else ' yet'}"
                f"{': ' + found.problem if found.problem else ''}."
            )
        if file is None:
            for piece in client.content(file_id):
                sys.stdout.buffer.write(piece)
            return
        lines = found.request_counts.failed if errors else found.request_counts.completed
        with WholeFile(file) as out, bar("downloading", lines) as told:
            for piece in client.content(file_id):
                out.file.write(piece)
                told(piece.count(b"\n"))
            out.keep()
    click.echo(f"{lines} lines in {file}", err=True)


def until_ended(
    client: BatchClient,
    found: Batch,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Batch:
    """Follow a batch to its end: a bar on a terminal, a line for each change of state elsewhere. Raises Unreachable."""
    with counting() as shown:
        heard_at = clock()
        while True:
            shown(found)
            if found.ended:
                return found
            sleep(PAUSE_S)
            try:
                found, heard_at = client.batch(found.id), clock()
            except Unreachable:
                if clock() - heard_at > AWAY_S:
                    raise


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Hears of progress. A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with Progress(console=console) as shown:
        task = shown.add_task(what, total=total)
        yield lambda more: shown.advance(task, more)


@contextmanager
def counting() -> Iterator[Callable[[Batch], None]]:
    """Hears of each look at a batch."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console, last = Console(stderr=True), ""

    def line(found: Batch) -> None:
        nonlocal last
        if found.status != last:
            last = found.status
            click.echo(f"{found.id}: {found.status}", err=True)

    if not console.is_terminal:
        yield line
        return
    text = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}")
    with Progress(*text, TimeElapsedColumn(), console=console) as shown:
        task = shown.add_task("", total=None, numbers="")

        def update(found: Batch) -> None:
            counts = found.request_counts
            shown.update(
                task,
                description=found.status,
                total=counts.total or None,
                completed=counts.completed + counts.failed,
                numbers=progress_of(found),
            )

        yield update


def progress_of(found: Batch) -> str:
    """`40/100, 3 failed`."""
    counts = found.request_counts
    ended = counts.completed + counts.failed
    return f"{ended}/{counts.total}" + (f", {counts.failed} failed" if counts.failed else "")


def _show(output: str, found: Batch) -> None:
    emit(output, found.model_dump(mode="json"), lambda: _facts(found), [found.id])


def _facts(found: Batch) -> str:
    def at(seconds: int) -> str:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"

    metadata = ", ".join(f"{name}={value}" for name, value in (found.metadata or {}).items())
    return facts(
        [
            ("batch", found.id),
            ("status", found.status),
            ("problem", found.problem),
            ("requests", progress_of(found)),
            ("endpoint", found.endpoint),
            ("created", at(found.created_at)),
            ("ends by", None if found.ended else at(found.expires_at)),
            ("answers", found.output_file_id),
            ("errors", found.error_file_id),
            ("metadata", metadata),
        ]
    )


def _table(found: list[Batch]) -> str:
    rows = [
        (
            each.id,
            each.status,
            progress_of(each),
            each.endpoint,
            age(datetime.fromtimestamp(each.created_at, UTC)),
        )
        for each in found
    ]
    return columns(["batch", "status", "requests", "endpoint", "age"], rows)


def _fail(found: Batch) -> None:
    """Exit with the code of a failure. Raises JobFailed."""
    if found.status in ("failed", "expired"):
        why = found.problem or "not every request was answered in time"
        raise JobFailed(f"{found.id} {found.status}: {why}")
