"""`busbar adapters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from busbar.cli.completions import objects
from busbar.cli.errors import BusbarError, NotFound
from busbar.cli.output import columns, emit, output_option
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.cli.results import Object

MOST_TRIES = 5
"""Changes that others make at the same time, of which none may be lost."""
Rows = list[dict[str, Any]]


@click.group(
    epilog="""\b
Examples:
  busbar adapters list my-model
  busbar adapters load my-model sql pvc://models/sql-lora --tenant research
  busbar adapters unload my-model sql
"""
)
def adapters() -> None:
    """List, load and unload LoRA adapters of a model service, while it serves."""


@adapters.command(
    "list",
    epilog="\b\nExamples:\n  busbar adapters list my-model\n  busbar adapters list my-model -o json | jq '.items[].replicas'",
)
@click.argument("service", shell_complete=objects)
@output_option
@connected
def listing(session: Session, service: str, output: str) -> None:
    """Show a service's adapters, who may use them, and how many replicas serve each."""
    found = _service(session, service)
    told = {row["name"]: row for row in found.status.get("adapters") or []}
    rows = [
        {
            "name": row["name"],
            "model": f"{found.namespace}/{found.name}:{row['name']}",
            "uri": row["uri"],
            "tenants": row.get("tenants"),
            "replicas": told.get(row["name"], {}).get("replicas"),
            "message": told.get(row["name"], {}).get("message"),
        }
        for row in _adapters(found)
    ]
    emit(output, {"items": rows}, lambda: _table(found, rows), [row["name"] for row in rows])


@adapters.command(
    epilog="""\b
Examples:
  busbar adapters load my-model support pvc://models/support-lora
  busbar adapters load my-model sql pvc://models/sql-lora --tenant research --tenant sales

\b
Replicas of Busbar's engine read it while they serve, from a claim that their pods mount: that of spec.model.uri, or of
another adapter. For one on another claim, and with another engine than Busbar's: busbar cancel, load, busbar resume.
"""
)
@click.argument("service", shell_complete=objects)
@click.argument("name")
@click.argument("uri", metavar="pvc://CLAIM/FOLDER")
@click.option("--tenant", "tenants", multiple=True, help="Only this tenant may use it. May be repeated.")
@connected
def load(session: Session, service: str, name: str, uri: str, tenants: tuple[str, ...]) -> None:
    """Serve an adapter, or another folder under the name of one; requests ask for SERVICE:NAME."""
    row: dict[str, Any] = {"name": name, "uri": uri} | ({"tenants": list(tenants)} if tenants else {})

    def with_it(rows: Rows) -> Rows:
        former = next((each for each in rows if each["name"] == name), {})
        priced = {"price": former["price"]} if former.get("price") else {}
        return [*(each for each in rows if each["name"] != name), row | priced]

    found = _change(session, service, with_it)
    click.echo(
        f"{found.reference}: adapter {name} is in the spec; busbar adapters list {service} shows who serves it"
    )


@adapters.command(epilog="\b\nExamples:\n  busbar adapters unload my-model sql")
@click.argument("service", shell_complete=objects)
@click.argument("name")
@connected
def unload(session: Session, service: str, name: str) -> None:
    """Serve an adapter no more; its requests that run end with it, and its files stay."""

    def without(rows: Rows) -> Rows:
        left = [each for each in rows if each["name"] != name]
        if len(left) == len(rows):
            raise NotFound(f"{service} has no adapter {name!r}. `busbar adapters list {service}` shows them.")
        return left

    found = _change(session, service, without)
    click.echo(f"{found.reference}: adapter {name} is not in the spec any more")


def _change(session: Session, service: str, change: Callable[[Rows], Rows]) -> Object:
    """The service with other adapters. What somebody else changes between reading and writing is not overwritten."""
    for _ in range(MOST_TRIES - 1):
        try:
            return _try(session, service, change)
        except BusbarError as error:
            if error.code != "Conflict":
                raise
    return _try(session, service, change)


def _try(session: Session, service: str, change: Callable[[Rows], Rows]) -> Object:
    found = _service(session, service)
    version = found.metadata.get("resourceVersion")
    if not version:
        from busbar.cli.answers import unexpected

        raise unexpected(f"{found.reference} has no metadata.resourceVersion")
    patch = {
        "spec": {"adapters": change(_adapters(found)) or None},
        "metadata": {"resourceVersion": version},
    }
    return session.client.change(found.kind, found.namespace, found.name, patch)


def _service(session: Session, reference: str) -> Object:
    from busbar.cli.results import MODEL_SERVICE

    return session.find(reference, only=MODEL_SERVICE)


def _adapters(found: Object) -> Rows:
    return list(found.spec.get("adapters") or [])


def _table(found: Object, rows: Rows) -> str:
    if not rows:
        return f"{found.reference} has no adapters."
    lines = [
        (
            row["name"],
            row["replicas"],
            ", ".join(row["tenants"]) if row["tenants"] is not None else "all",
            row["uri"],
            row["message"],
        )
        for row in rows
    ]
    return columns(["adapter", "replicas", "tenants", "uri", "refused"], lines)
