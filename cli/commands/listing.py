"""`busbar list`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from busbar.cli.output import age, columns, emit, output_option, wire
from busbar.cli.session import Session, connected

if TYPE_CHECKING:
    from busbar.cli.results import Object

WHAT = ("all", "jobs", "services", "pools", "profiles", "nodes", "models", "tenants")


@click.command(
    "list",
    epilog="""\b
Examples:
  busbar list                     jobs and services of your namespace
  busbar list jobs -A             of every namespace you may see
  busbar list pools
  busbar list profiles            how fast your kind of job runs where
  busbar list services -o name
""",
)
@click.argument("what", type=click.Choice(WHAT), default="all")
@click.option("-A", "--all-namespaces", is_flag=True, help="Every namespace you may see.")
@output_option
@connected
def listing(session: Session, what: str, all_namespaces: bool, output: str) -> None:
    """List jobs and services, or pools, profiles, nodes, models, tenants."""
    if what in ("all", "jobs", "services"):
        _objects(session, what, all_namespaces, output)
    elif what == "nodes":
        nodes = session.client.nodes()
        rows = [(n.name, n.pool, n.accelerator, n.ready, n.capacity, n.allocated) for n in nodes]
        heads = ["name", "pool", "accelerator", "ready", "capacity", "allocated"]
        emit(output, {"items": wire(nodes)}, lambda: columns(heads, rows), [n.name for n in nodes])
    elif what == "models":
        models = session.client.models()
        lines = [(m.id, m.namespace, m.service, m.ready, m.phase, m.replicas) for m in models]
        heads = ["id", "namespace", "service", "ready", "phase", "replicas"]
        emit(output, {"items": wire(models)}, lambda: columns(heads, lines), [m.id for m in models])
    else:
        client = session.client
        ask, table = {
            "pools": (client.pools, _pools),
            "profiles": (client.profiles, _profiles),
            "tenants": (client.tenants, _tenants),
        }[what]
        found = ask()
        names = [item["metadata"]["name"] for item in found]
        emit(output, {"items": found}, lambda: table(found), names)


def _objects(session: Session, what: str, all_namespaces: bool, output: str) -> None:
    from busbar.cli.results import MODEL_SERVICE, TRAINING_JOB

    namespace = None if all_namespaces else session.namespace()
    jobs = session.client.listing(TRAINING_JOB, namespace) if what != "services" else []
    services = session.client.listing(MODEL_SERVICE, namespace) if what != "jobs" else []
    tables = []
    if what != "services":
        tables.append(_jobs(jobs, all_namespaces))
    if what != "jobs":
        tables.append(_services(services, all_namespaces))
    both = [*jobs, *services]
    emit(
        output,
        {"items": [found.document for found in both]},
        lambda: "\n\n".join(tables),
        [found.reference for found in both],
    )


def _jobs(jobs: list[Object], namespaces: bool) -> str:
    rows = []
    for job in jobs:
        progress = job.progress
        steps = f"{progress.step}/{progress.total_steps}" if progress.total_steps else None
        pool = (job.status.get("admission") or {}).get("pool")
        row = [job.name, job.phase, job.reason, pool, steps, progress.loss, age(job.created_at)]
        rows.append([job.namespace, *row] if namespaces else row)
    heads = ["job", "phase", "reason", "pool", "steps", "loss", "age"]
    return columns(["namespace", *heads] if namespaces else heads, rows)


def _services(services: list[Object], namespaces: bool) -> str:
    rows = []
    for service in services:
        status = service.status
        ready = f"{status.get('readyReplicas') or 0}/{status.get('desiredReplicas') or 0}"
        model = status.get("modelId") or service.spec.get("modelId") or service.name
        row = [service.name, service.phase, service.reason, ready, model, age(service.created_at)]
        rows.append([service.namespace, *row] if namespaces else row)
    heads = ["service", "phase", "reason", "ready", "model", "age"]
    return columns(["namespace", *heads] if namespaces else heads, rows)


def _pools(pools: list[dict[str, Any]]) -> str:
    rows = []
    for pool in pools:
        spec, status = pool.get("spec") or {}, pool.get("status") or {}
        numbers = [status.get(name) for name in ("nodes", "capacity", "allocated", "free")]
        rows.append([pool["metadata"]["name"], spec.get("accelerator"), *numbers, spec.get("pricePerHour")])
    return columns(["name", "accelerator", "nodes", "capacity", "allocated", "free", "price/h"], rows)


def _profiles(profiles: list[dict[str, Any]]) -> str:
    """One line per cell."""
    rows = []
    for profile in profiles:
        for cell in (profile.get("status") or {}).get("cells") or []:
            ends = [cell.get("low"), cell.get("high")]
            interval = f"{ends[0]:.0f}-{ends[1]:.0f}" if None not in ends else None
            kind = "/".join(filter(None, (cell.get("accelerator"), cell.get("linkClass"))))
            place = [kind, cell.get("accelerators"), cell.get("nodes") or None, cell.get("mode")]
            cap = cell.get("powerCapPercent")
            place.append(f"{cap} %" if cap not in (None, 100) else None)
            speed = f"{cell.get('tokensPerSecond') or 0:.0f}"
            predicted = f"{cell['predicted']:.0f}" if cell.get("predicted") is not None else None
            memory = [
                f"{cell[name]:.1f}" if cell.get(name) is not None else None
                for name in ("memoryGib", "measuredMemoryGib")
            ]
            head = profile["spec"].get("workloadClass")
            counts = [cell.get("source"), cell.get("reports")]
            row = [head, *place, speed, interval, predicted, *memory, _watts(cell), *counts]
            rows.append([*row, cell.get("note")])
    heads = [
        "class",
        "accelerator",
        "count",
        "nodes",
        "mode",
        "power cap",
        "tokens/s",
        "90 % interval",
        "by formula",
    ]
    heads += ["GiB planned", "GiB measured", "watts", "source", "reports", "note"]
    return columns(heads, rows)


def _watts(cell: dict[str, Any]) -> str | None:
    """Of one accelerator; of a replica also by phase."""
    phases = [
        f"{name} {watts:.0f}"
        for name, watts in (cell.get("phaseWatts") or {}).items()
        if name in ("prefill", "decode", "idle")
    ]
    whole = cell.get("watts")
    told = None if whole is None else f"{whole:.0f}"
    return f"{told} ({', '.join(phases)})" if told and phases else told


def _tenants(tenants: list[dict[str, Any]]) -> str:
    rows = []
    for tenant in tenants:
        spec = tenant.get("spec") or {}
        rows.append(
            [
                tenant["metadata"]["name"],
                spec.get("displayName"),
                ", ".join(spec.get("namespaces") or []),
                spec.get("weight"),
            ]
        )
    return columns(["name", "title", "namespaces", "weight"], rows)
