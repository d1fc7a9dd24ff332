"""How results are printed: a table for people, JSON, YAML or names for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
FORMATS = ("table", "json", "yaml", "name")


def output_option(command: F) -> F:
    """The option -o."""
    return output_of(FORMATS)(command)


def output_of(formats: Sequence[str]) -> Callable[[F], F]:
    """The option -o with these forms."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(formats),
        default="table",
        show_default=True,
        help="Form of the output.",
    )


def emit(output: str, document: Any, table: Callable[[], str], names: Iterable[str]) -> None:
    """Print in the requested form; only that form is computed."""
    if output == "json":
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    elif output == "yaml":
        import yaml

        click.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip())
    elif output == "name":
        for name in names:
            click.echo(name)
    else:
        click.echo(table())


def columns(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns; nothing is truncated, so that programs may read them too."""
    lines = [[head.upper() for head in heads], *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """One name and value per line; names without a value are omitted."""
    known = [(name, _cell(value)) for name, value in pairs if value not in (None, "", [])]
    width = max((len(name) for name, _ in known), default=0)
    return "\n".join(f"{name + ':':<{width + 1}} {value}" for name, value in known)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def age(moment: datetime | None, now: datetime | None = None) -> str:
    """Time since then, as kubectl writes it."""
    if moment is None:
        return "-"
    return duration(((now or datetime.now(UTC)) - moment).total_seconds())


def duration(seconds: float | None) -> str:
    """`42s`, `5m10s`, `3h12m`, `6d4h`."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def wire(models: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Typed results as JSON objects."""
    return [model.to_wire() for model in models]
