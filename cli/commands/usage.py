"""`busbar usage`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from busbar.cli.output import FORMATS, columns, duration, emit, output_of
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.cli.results import Usage, UsageLines

EXPORTED = ("tenant", "namespace", "user", "job", "service")
BY = (*EXPORTED, "model", "key", "day")
FILES = ("csv", "focus")
JOULES_PER_KWH = 3.6e6


class Moment(click.ParamType[datetime]):
    """A time or an age: 2026-01-31, 2026-01-31T12:00:00Z, 7d, 12h."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        text = str(value)
        units = {"d": "days", "h": "hours", "m": "minutes"}
        try:
            if text[:-1].isdigit() and text[-1] in units:
                return datetime.now(UTC) - timedelta(**{units[text[-1]]: int(text[:-1])})
            moment = datetime.fromisoformat(text)
        except (OverflowError, ValueError):
            self.fail(
                f"{text!r} is not a time; write 2026-01-31, 2026-01-31T12:00:00Z, 7d or 12h", param, ctx
            )
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@click.command(
    epilog="""\b
Examples:
  busbar usage                          the last 30 days by tenant
  busbar usage --by job --since 7d
  busbar usage --by day --since 2026-01-01 --until 2026-02-01 -o json
  busbar usage --by service -o csv
  busbar usage -o focus --currency EUR --since 2026-01-01 --until 2026-02-01
"""
)
@click.option("--by", type=click.Choice(BY), default="tenant", show_default=True, help="What to sum by.")
@click.option("--since", type=Moment(), help="Begin: a time or an age [default: 30d].")
@click.option("--until", type=Moment(), help="End: a time or an age [default: now].")
@click.option("--currency", help="Of the pools' prices, for focus: EUR, USD.")
@output_of((*FORMATS, *FILES))
@connected
def usage(
    session: Session,
    by: str,
    since: datetime | None,
    until: datetime | None,
    currency: str | None,
    output: str,
) -> None:
    """Show requests, tokens, accelerator time, energy and cost.

    csv has the sums by tenant, namespace, user, job or service; focus has a row for each object and day, in the columns
    of FOCUS 1.2 (FinOps Open Cost and Usage Specification).
    """
    client = session.client
    if output in FILES:
        if output == "focus" and currency is None:
            raise click.UsageError("focus needs the currency of the pools' prices: --currency EUR")
        if output == "csv" and by not in EXPORTED:
            raise click.UsageError(f"csv is by {', '.join(EXPORTED)}; for {by} there are json and yaml")
        text = client.usage_file(output, by if by in EXPORTED else "tenant", since, until, currency)
        click.echo(text, nl=False)
        return
    if by in ("user", "job"):
        lines = client.usage_lines(by, since, until)
        names = [line.user or f"{line.namespace}/{line.name}" for line in lines.items]
        emit(output, lines.to_wire(), lambda: _lines(lines), names)
        return
    found = client.usage(by, since, until)
    groups = sorted({row.group for row in found.inference} | {row.group for row in found.compute})
    emit(output, found.to_wire(), lambda: _table(found), groups)


def _lines(found: UsageLines) -> str:
    head = _head(found.since, found.until, found.by)
    if not found.items:
        return f"{head}\n\nNothing was used."
    texts = ["tenant", "user"] if found.by == "user" else ["tenant", "namespace", "name"]
    numbers = ["objects", "accelerator hours", "kWh", "cost", "lost hours", "caused hours"]
    rows = [
        [
            *(getattr(line, name) for name in texts),
            line.objects,
            f"{line.accelerator_hours:.2f}",
            None if line.kilowatt_hours is None else f"{line.kilowatt_hours:.3f}",
            f"{line.cost:.2f}",
            f"{line.lost_hours:.2f}",
            f"{line.caused_hours:.2f}",
        ]
        for line in found.items
    ]
    return f"{head}\n\n{columns([*texts, *numbers], rows)}"


def _head(since: datetime, until: datetime, by: str) -> str:
    return f"{since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC, by {by}"


def _table(found: Usage) -> str:
    parts = [_head(found.since, found.until, found.by)]
    if found.inference:
        rows = [
            (r.group, r.requests, r.prompt_tokens, r.cached_tokens, r.completion_tokens, f"{r.cost:.4f}")
            for r in found.inference
        ]
        heads = [found.by, "requests", "prompt tokens", "of them cached", "completion tokens", "cost"]
        parts.append(columns(heads, rows))
    if found.compute:
        lines = [
            (
                r.group,
                r.jobs,
                duration(r.accelerator_seconds),
                duration(r.lost_seconds),
                duration(r.caused_seconds),
                f"{r.energy_joules / JOULES_PER_KWH:.3f}" if r.energy_joules else None,
                f"{r.cost:.2f}",
            )
            for r in found.compute
        ]
        parts.append(columns([found.by, "jobs", "accelerator time", "lost", "caused", "kWh", "cost"], lines))
    if not found.inference and not found.compute:
        parts.append("Nothing was used.")
    return "\n\n".join(parts)
