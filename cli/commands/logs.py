"""`busbar logs`."""

from __future__ import annotations

import click

from busbar.cli.completions import objects
from busbar.cli.session import Session, connected


@click.command(
    epilog="""\b
Examples:
  busbar logs my-job
  busbar logs -f my-job                 until its container ends
  busbar logs my-job --rank 1 --tail 100
  busbar logs my-job --attempt 2        of an earlier attempt, while its pods exist
"""
)
@click.argument("name", shell_complete=objects)
@click.option("-f", "--follow", is_flag=True, help="Go on as it is written.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Pod of the gang.")
@click.option("--tail", type=click.IntRange(min=1), metavar="LINES", help="Only the last lines.")
@click.option("--attempt", type=click.IntRange(min=0), help="Default: the newest that has pods.")
@connected
def logs(session: Session, name: str, follow: bool, rank: int, tail: int | None, attempt: int | None) -> None:
    """Print the log of a job or service."""
    found = session.find(name)
    for line in session.client.logs(found, follow=follow, rank=rank, tail=tail, attempt=attempt):
        click.echo(line)
