"""`busbar apply`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from busbar.cli import manifests
from busbar.cli.options import FiniteRange
from busbar.cli.output import emit, output_option
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.cli.results import Object


@click.command(
    epilog="""\b
Examples:
  busbar apply -f job.yaml
  busbar apply -f job.yaml --wait                 follow it with a progress bar; exit 6 if it fails
  busbar apply -f job.yaml -f service.yaml -n team-a
  generate-job | busbar apply -f - -o name
"""
)
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    required=True,
    metavar="FILE",
    help="Manifest; - is standard input. May be repeated.",
)
@click.option("--wait", is_flag=True, help="Follow until the job has ended or the service is ready.")
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="With --wait: give up after this long (exit 6).",
)
@output_option
@connected
def apply(session: Session, files: tuple[str, ...], wait: bool, timeout_s: float | None, output: str) -> None:
    """Create jobs and services from files, or change those that exist.

    An existing object is changed only in the fields that the file sets; all other fields stay as they are.
    """
    from busbar.cli.client import kind_of

    documents = manifests.read(files)
    for document in documents:
        kind_of(document)  # refuse a kind that we do not manage before any object is created
    applied = [_apply_one(session, document) for document in documents]
    if output == "table":
        for found, verb in applied:
            click.echo(f"{found.reference} {verb}")
    if wait:
        applied = [(_followed(session, found, timeout_s), verb) for found, verb in applied]
    if output != "table":
        shown = [found.document for found, _ in applied]
        emit(
            output,
            shown[0] if len(shown) == 1 else {"kind": "List", "items": shown},
            str,
            [f.reference for f, _ in applied],
        )


def _followed(session: Session, found: Object, timeout_s: float | None) -> Object:
    from busbar.cli.follow import follow

    return follow(lambda: session.client.get(found.kind, found.namespace, found.name), timeout_s=timeout_s)


def _apply_one(session: Session, document: dict[str, Any]) -> tuple[Object, str]:
    from busbar.cli.client import kind_of
    from busbar.cli.errors import BusbarError, NotFound, UsageProblem

    kind = kind_of(document)
    metadata = document.get("metadata") or {}
    name = metadata.get("name")
    if not name and not metadata.get("generateName"):
        raise UsageProblem(f"A {kind.name} has no metadata.name; add one.")
    namespace = _namespace(session, document)
    document = {**document, "metadata": {**metadata, "namespace": namespace}}
    if not name:
        return session.client.create(document, namespace), "created"
    try:
        before = session.client.get(kind, namespace, name)
    except NotFound:
        try:
            return session.client.create(document, namespace), "created"
        except BusbarError as error:
            if error.code != "Conflict":
                raise
            before = session.client.get(kind, namespace, name)  # another client created it meanwhile
    patch: dict[str, Any] = {"spec": document.get("spec") or {}}
    changed = {key: metadata[key] for key in ("labels", "annotations") if metadata.get(key)}
    if changed:
        patch["metadata"] = changed
    after = session.client.change(kind, namespace, name, patch)
    same = after.metadata.get("resourceVersion") == before.metadata.get("resourceVersion")
    return after, "unchanged" if same else "changed"


def _namespace(session: Session, document: dict[str, Any]) -> str:
    from busbar.cli.errors import UsageProblem

    written = (document.get("metadata") or {}).get("namespace")
    asked = session.given_namespace
    if written and asked and written != asked:
        raise UsageProblem(
            f"The file says namespace {written!r} and --namespace says {asked!r}; leave one out."
        )
    return str(written) if written else session.namespace()
