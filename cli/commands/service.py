"""`busbar service plan`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from busbar.cli.completions import objects
from busbar.cli.options import FiniteRange
from busbar.cli.output import columns, emit, facts, output_option
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.kube.contracts.service_plan import PlannedPool, ServicePlanAnswer


class Amount(click.ParamType[float]):
    """A number above zero."""

    name = "number"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            found = float(str(value))
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and found > 0):
            self.fail(f"{value!r} is not a number above zero", param, ctx)
        return found


@click.group(
    epilog="""\b
Examples:
  busbar service plan my-model --rate 40
"""
)
def service() -> None:
    """Ask about model services."""


@service.command(
    epilog="""\b
Examples:
  busbar service plan my-model --rate 40
  busbar service plan my-model --rate 40 --slo-ttft 1 --slo-tpot 0.05
  busbar service plan my-model --rate 40 -o json | jq .costPerHour

\b
Exit code 1: nothing carries the load, or too little is known to say so; the output says which.
For a service that does not run yet, and for traces of requests: busbar plan-capacity.
"""
)
@click.argument("name", shell_complete=objects)
@click.option(
    "--rate", type=Amount(), required=True, metavar="NUMBER", help="Requests per second to be carried."
)
@click.option(
    "--slo-ttft", type=Amount(), metavar="SECONDS", help="Time to the first token [default: spec.slo]."
)
@click.option(
    "--slo-tpot", type=Amount(), metavar="SECONDS", help="Time per later token [default: spec.slo]."
)
@click.option(
    "--percentile",
    type=FiniteRange(50, 99.99),
    metavar="PERCENT",
    help="Share of requests that must meet both [default: spec.slo, else 99].",
)
@output_option
@connected
def plan(
    session: Session,
    name: str,
    rate: float,
    slo_ttft: float | None,
    slo_tpot: float | None,
    percentile: float | None,
    output: str,
) -> int:
    """Show the cheapest mix of pools that carries a load, and what is not known.

    It is computed from this service's own measurements: the speeds that its replicas report by GPU type, the sizes of
    its requests now, and the pools' prices and capacity. Nothing is changed.
    """
    from busbar.cli.results import MODEL_SERVICE

    found = session.find(name, only=MODEL_SERVICE)
    answer = session.client.service_plan(
        found.namespace, found.name, rate, ttft_s=slo_ttft, tpot_s=slo_tpot, percentile=percentile
    )
    used = [row.pool for row in answer.pools if row.replicas]
    emit(output, answer.to_wire(), lambda: _page(found.name, answer), used)
    return 0 if answer.possible else 1


def _page(name: str, answer: ServicePlanAnswer) -> str:
    target = sizes = None
    if answer.ttft_milliseconds is not None and answer.tpot_milliseconds is not None:
        target = (
            f"{answer.ttft_milliseconds:g} ms to the first token, {answer.tpot_milliseconds:g} ms per later one,"
            f" for {answer.percentile:g} % of requests"
        )
    if answer.prompt_tokens is not None and answer.output_tokens is not None:
        sizes = (
            f"{answer.prompt_tokens:g} tokens of prompt and {answer.output_tokens:g} of output, on average"
        )
    text = facts(
        [
            ("Service", name),
            ("Load", f"{answer.rate:g} requests/s"),
            ("Target", target),
            ("Requests", sizes),
            ("Carried", answer.possible),
            ("Why", answer.reason),
            ("Cost", _money(answer.cost_per_hour, "per hour")),
        ]
    )
    if answer.pools:
        heads = ["pool", "type", "replicas", "requests/s each", "per hour each", "per hour", "alone"]
        text += "\n\nCheapest mix\n" + columns(heads, [_row(row) for row in answer.pools])
    if answer.notes:
        text += "\n\nNot known, or not looked at\n" + "\n".join(answer.notes)
    return text


def _row(row: PlannedPool) -> tuple[object, ...]:
    each, alone = row.cost_per_hour, "does not carry it"
    if row.alone is not None:
        price = f", {_money(row.alone * each, 'per hour')}" if each is not None else ""
        alone = f"{row.alone}{price}"
    return (
        row.pool,
        row.accelerator,
        row.replicas,
        f"{row.requests_per_second:g}",
        _money(each),
        _money(row.replicas * each if each is not None else None),
        alone,
    )


def _money(amount: float | None, per: str = "") -> str | None:
    return f"{amount:.2f} {per}".rstrip() if amount is not None else None
