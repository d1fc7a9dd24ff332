"""`busbar delete`."""

from __future__ import annotations

import click

from busbar.cli import manifests
from busbar.cli.completions import objects
from busbar.cli.session import Session, connected


@click.command(
    epilog="""\b
Examples:
  busbar delete my-job
  busbar delete service/my-model
  busbar delete -f job.yaml
  busbar delete my-job --ignore-not-found
"""
)
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=objects)
@click.option(
    "-f", "--file", "files", multiple=True, metavar="FILE", help="Delete the objects of a manifest."
)
@click.option("--ignore-not-found", is_flag=True, help="Do not fail for objects that do not exist.")
@connected
def delete(session: Session, names: tuple[str, ...], files: tuple[str, ...], ignore_not_found: bool) -> None:
    """Delete jobs and services.

    Their pods are deleted too. A job's output stays.
    """
    from busbar.cli.client import kind_of
    from busbar.cli.errors import NotFound, UsageProblem

    targets = []
    for document in manifests.read(files) if files else []:
        metadata = document.get("metadata") or {}
        if not metadata.get("name"):
            raise UsageProblem("An object of the file has no metadata.name.")
        namespace = session.given_namespace or metadata.get("namespace") or session.namespace()
        targets.append((kind_of(document), str(namespace), str(metadata["name"])))
    for name in names:
        try:
            found = session.find(name)
        except NotFound:
            if not ignore_not_found:
                raise
            continue
        targets.append((found.kind, found.namespace, found.name))
    if not targets and not ignore_not_found:
        raise UsageProblem("Say what to delete: NAME, job/NAME, service/NAME or -f FILE.")
    for kind, namespace, name in targets:
        try:
            session.client.delete(kind, namespace, name)
        except NotFound:
            if not ignore_not_found:
                raise
            continue
        click.echo(f"{kind.name.lower()}/{name} deleted")
