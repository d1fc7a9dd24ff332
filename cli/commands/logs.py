"""`busbar logs`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from busbar.cli.completions import objects
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.cli.results import Object

PAUSE_S = 1.0


@click.command(
    epilog="""\b
Examples:
  busbar logs my-job
  busbar logs -f my-job                 until its container ends; waits for it to begin
  busbar logs my-job --rank 1 --tail 100
  busbar logs my-job --attempt 2        of an earlier attempt, while its pods exist
"""
)
@click.argument("name", shell_complete=objects)
@click.option("-f", "--follow", is_flag=True, help="Follow the log as it is written.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Pod of the gang.")
@click.option("--tail", type=click.IntRange(min=1), metavar="LINES", help="Only the last lines.")
@click.option("--attempt", type=click.IntRange(min=0), help="Default: the newest that has pods.")
@connected
def logs(session: Session, name: str, follow: bool, rank: int, tail: int | None, attempt: int | None) -> None:
    """Print the log of a job or service.

    With --follow, the command waits for a job that has no pod yet.
    """
    found = session.find(name)
    log = session.client.logs(found, follow=follow, rank=rank, tail=tail, attempt=attempt)
    if follow and attempt is None:
        log = _patient(session, found, rank, tail)
    for line in log:
        click.echo(line)


def _patient(session: Session, found: Object, rank: int, tail: int | None) -> Iterator[str]:
    """The log as it is written. Before the log begins it prints once that it waits, and why."""
    from busbar.cli.errors import BusbarError, NotFound
    from busbar.cli.follow import headline, is_settled

    told = False
    while True:
        try:
            yield from session.client.logs(found, follow=True, rank=rank, tail=tail)
            return
        except BusbarError as error:
            if not (isinstance(error, NotFound) or error.code == "Conflict"):
                raise
            found = session.client.get(found.kind, found.namespace, found.name)
            if is_settled(found):
                raise
            if not told:
                click.echo(f"{error.message}; waiting ({headline(found)})", err=True)
                told = True
        time.sleep(PAUSE_S)
