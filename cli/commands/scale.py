"""`busbar scale`."""

from __future__ import annotations

import click

from busbar.cli.completions import objects
from busbar.cli.session import Session, connected


class Replicas(click.ParamType[int | str]):
    """A number, or `auto`."""

    name = "number|auto"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto" or isinstance(value, int):
            return value
        if not isinstance(value, str) or not value.isdigit():
            self.fail(f"{value!r} is neither a number nor auto", param, ctx)
        return int(value)


@click.command(
    epilog="""\b
Examples:
  busbar scale my-model --replicas 2
  busbar scale my-model --replicas 0       with minReplicas: 0 the next request wakes it
  busbar scale my-model --replicas auto    return control to the autoscaler
"""
)
@click.argument("name", shell_complete=objects)
@click.option("--replicas", type=Replicas(), required=True, help="A number, or auto.")
@connected
def scale(session: Session, name: str, replicas: int | str) -> None:
    """Set a service's replicas, or return control to the autoscaler."""
    from busbar.cli.results import MODEL_SERVICE

    found = session.find(name, only=MODEL_SERVICE)
    session.client.scale(found.namespace, found.name, replicas if isinstance(replicas, int) else None)
    click.echo(f"{found.reference} scaled to {replicas}")
