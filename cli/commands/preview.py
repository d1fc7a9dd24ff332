"""`busbar preview`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from busbar.cli import manifests
from busbar.cli.output import columns, duration, emit, facts, output_option
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.cli.results import Preview


@click.command(
    epilog="""\b
Examples:
  busbar preview -f job.yaml
  busbar preview -f job.yaml -o json | jq .startsNow

\b
Exit code 1: the job can never run as it is, or the service never have all replicas that it asks for; the output says
which change would help.
"""
)
@click.option(
    "-f",
    "--file",
    required=True,
    metavar="FILE",
    help="Manifest with one job or service; - is standard input.",
)
@output_option
@connected
def preview(session: Session, file: str, output: str) -> int:
    """Show where a job would run, when, in which mode, at what cost, or exactly why not.

    No object is created. The answer is the decision that the next scheduling round would make. For a job that
    would wait it contains a forecast of the start, learned from earlier jobs on this cluster.
    """
    document = _draft(file)
    namespace = (
        session.given_namespace or (document.get("metadata") or {}).get("namespace") or session.namespace()
    )
    metadata = {**(document.get("metadata") or {}), "namespace": namespace}
    found = session.client.preview({**document, "metadata": metadata}, namespace)
    emit(output, found.to_wire(), lambda: _table(found), [found.pool] if found.pool else [])
    return 0 if found.possible else 1


def _draft(file: str) -> dict[str, Any]:
    """The one job or service of the file; other objects in it, such as a claim, are ignored."""
    from busbar.cli.errors import UsageProblem
    from busbar.cli.results import KINDS

    names = [kind.name for kind in KINDS]
    ours = [document for document in manifests.read([file]) if document["kind"] in names]
    if len(ours) != 1:
        raise UsageProblem(f"{file} holds {len(ours)} jobs and services; preview takes one at a time.")
    return ours[0]


def _table(found: Preview) -> str:
    finish = None
    if found.finishes_in_seconds is not None:
        finish = f"in {duration(found.finishes_in_seconds)}"
        if found.finishes_in_low_seconds is not None and found.finishes_in_high_seconds is not None:
            finish += (
                f" ({duration(found.finishes_in_low_seconds)} to {duration(found.finishes_in_high_seconds)})"
            )
    text = facts(
        [
            ("Starts now", found.starts_now),
            ("When", found.when),
            ("Ends", _range(found.end_p50_seconds, found.end_p90_seconds)),
            ("Past forecasts", _record(found)),
            ("Why", found.reason),
            ("Deadline", found.deadline),
            ("Code", found.code),
            ("Replicas", _replicas(found)),
            ("Pool", found.pool),
            ("Accelerator", f"{found.accelerators:g} × {found.accelerator}" if found.accelerator else None),
            ("Mode", found.mode),
            ("Pods", found.pods or None),
            ("Finishes", finish),
            ("Cost", f"{found.cost_per_hour:.2f} per hour" if found.cost_per_hour is not None else None),
            ("Cost in all", f"{found.estimated_cost:.2f}" if found.estimated_cost is not None else None),
            (
                "Accelerator hours",
                f"{found.accelerator_hours:.2f}" if found.accelerator_hours is not None else None,
            ),
            ("Power", f"{found.watts:,.0f} W, without the hosts" if found.watts is not None else None),
            ("Energy", _energy(found)),
            ("Power cap", _cap(found)),
        ]
    )
    if found.changes:
        rows = [(change.kind, change.current, change.needed) for change in found.changes]
        text += "\n\nIt would start now with one of these changes:\n" + columns(
            ["change", "now", "needed"], rows
        )
    return text


def _replicas(found: Preview) -> str | None:
    return f"{found.replicas_starting} of {found.replicas} start" if found.replicas > 1 else None


def _range(p50: float | None, p90: float | None) -> str | None:
    if p50 is None or p90 is None:
        return None
    return f"likely in {duration(p50)}, nine times in ten within {duration(p90)}"


def _energy(found: Preview) -> str | None:
    if found.kilowatt_hours is None:
        return None
    low, high = found.kilowatt_hours_low, found.kilowatt_hours_high
    between = f" ({low:.3g} to {high:.3g})" if low is not None and high is not None else ""
    return f"{found.kilowatt_hours:.3g} kWh{between}"


def _cap(found: Preview) -> str | None:
    if found.power_cap_percent is None:
        return None
    slower = f", speed {found.power_cap_speed:.0%} of uncapped" if found.power_cap_speed is not None else ""
    return f"{found.power_cap_percent} % of each board's limit{slower}, until its feed has watts left"


def _record(found: Preview) -> str | None:
    """The accuracy of earlier forecasts."""
    if found.start_p50_seconds is None or found.past_before_p50 is None or found.past_before_p90 is None:
        return None
    return (
        f"of {found.past_forecasts}, {found.past_before_p50:.0%} started before the likely time "
        f"and {found.past_before_p90:.0%} before the nine-in-ten time"
    )
