"""`busbar usage`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from busbar.cli.output import columns, duration, emit, output_option
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.cli.results import Usage

BY = ("tenant", "namespace", "service", "model", "key", "day")


class Moment(click.ParamType[datetime]):
    """A time or an age: 2026-01-31, 2026-01-31T12:00:00Z, 7d, 12h."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        text = str(value)
        units = {"d": "days", "h": "hours", "m": "minutes"}
        if text[:-1].isdigit() and text[-1] in units:
            return datetime.now(UTC) - timedelta(**{units[text[-1]]: int(text[:-1])})
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.fail(
                f"{text!r} is not a time; write 2026-01-31, 2026-01-31T12:00:00Z, 7d or 12h", param, ctx
            )
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@click.command(
    epilog="""\b
Examples:
  busbar usage                          the last 30 days by tenant
  busbar usage --by model --since 7d
  busbar usage --by day --since 2026-01-01 --until 2026-02-01 -o json
"""
)
@click.option("--by", type=click.Choice(BY), default="tenant", show_default=True, help="What to sum by.")
@click.option("--since", type=Moment(), help="Begin: a time or an age [default: 30d].")
@click.option("--until", type=Moment(), help="End: a time or an age [default: now].")
@output_option
@connected
def usage(session: Session, by: str, since: datetime | None, until: datetime | None, output: str) -> None:
    """Show requests, tokens, accelerator time and cost."""
    found = session.client.usage(by, since, until)
    groups = sorted({row.group for row in found.inference} | {row.group for row in found.compute})
    emit(output, found.to_wire(), lambda: _table(found), groups)


def _table(found: Usage) -> str:
    parts = [f"{found.since:%Y-%m-%d %H:%M} to {found.until:%Y-%m-%d %H:%M} UTC, by {found.by}"]
    if found.inference:
        rows = [(r.group, r.requests, r.prompt_tokens, r.completion_tokens) for r in found.inference]
        parts.append(columns([found.by, "requests", "prompt tokens", "completion tokens"], rows))
    if found.compute:
        lines = [
            (r.group, r.jobs, duration(r.accelerator_seconds), duration(r.lost_seconds), f"{r.cost:.2f}")
            for r in found.compute
        ]
        parts.append(columns([found.by, "jobs", "accelerator time", "lost", "cost"], lines))
    if not found.inference and not found.compute:
        parts.append("Nothing was used.")
    return "\n\n".join(parts)
