"""`busbar cancel` and `busbar resume`."""

from __future__ import annotations

import click

from busbar.cli.completions import objects
from busbar.cli.session import Session, connected


@click.command(
    epilog="""\b
Examples:
  busbar cancel my-job
  busbar cancel job/a job/b -n team-a
"""
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=objects)
@connected
def cancel(session: Session, names: tuple[str, ...]) -> None:
    """Suspend jobs or services: save their state and release their resources.

    The object and its output stay; `busbar resume` continues from the last checkpoint, `busbar delete` deletes it.
    """
    for found in [session.find(name) for name in names]:
        session.client.cancel(found.kind, found.namespace, found.name)
        click.echo(f"{found.reference} cancelled")


@click.command(
    epilog="""\b
Examples:
  busbar resume my-job
"""
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=objects)
@connected
def resume(session: Session, names: tuple[str, ...]) -> None:
    """Undo a cancel: queue again and continue from the last checkpoint."""
    for found in [session.find(name) for name in names]:
        session.client.resume(found.kind, found.namespace, found.name)
        click.echo(f"{found.reference} resumed")
