"""Does anybody wait without bound? Streams at 0.8 to 1.3 of the capacity for two days, and gangs beside them.

Eight nodes of eight accelerators. The stream's jobs have four accelerators and last one hour. Every five hours a
gang of one hour comes, of an eighth, a quarter, half and all of the nodes. By which right it waits decides how
long it may (`search/reservations.py`), each with two rounds for the plans:

    whose gang         right       bound
    same tenant        priority    all that runs may be stopped after min_run_s: min_run_s
    same tenant        patience    its patience, then the stream's jobs that run end: patience + 1 h + min_run_s
    another tenant     share       up to half of all, as for a priority: min_run_s
    another tenant     patience    more than its share: as for the patience of the same tenant

A gang that has its place keeps it: only one of a higher right may stop it. So it ends an hour after it started, plus
what a gang of priority that arrives meanwhile takes (they come five hours apart, so none does).

The same is decided without reservations (`Policy.reservations` = 0) for the accelerator-hours used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.progress import shown
from benchmarks.scheduling.replay import ROUND_S, Arrival, Outcome, Situation, replay
from benchmarks.scheduling.scenario_parts import MIN_RUN_S, TWO, H, cluster, job, stream

from busbar.scheduler import Policy

NODES = 8
HOURS = 48.0
FIRST_H, EVERY_H = 3.0, 5.0
LOADS = (0.8, 1.0, 1.3)
LEAST_UTILISATION = 0.97
"""Of what is used without reservations."""


@dataclass(frozen=True, slots=True)
class Gang:
    """A gang, and how long it may wait."""

    arrival: Arrival
    right: str
    bound_s: float


def gangs(same_tenant: bool) -> tuple[Gang, ...]:
    """The gangs of one replay, in order of arrival."""
    prompt_s = MIN_RUN_S + 2 * ROUND_S
    patient_s = Policy().patience * H + H + prompt_s
    found: list[Gang] = []
    for right in ("patience", "priority") if same_tenant else ("share", "share"):
        for pods in (1, 2, 4, 8):
            own = "patience" if not same_tenant and 2 * pods > NODES else right
            found.append(
                Gang(
                    job(
                        f"gang{len(found)}-{pods}",
                        1.0,
                        gpus=8,
                        pods=pods,
                        at=(FIRST_H + EVERY_H * len(found)) * H,
                        tenant="a" if same_tenant else "b",
                        priority=500 if own == "priority" else 100,
                    ),
                    own,
                    patient_s if own == "patience" else prompt_s,
                )
            )
    return tuple(found)


def situation(load: float, same_tenant: bool, hours: float = HOURS) -> Situation:
    """One replay."""
    beside = stream(load, 8 * NODES, hours)
    tenants = TWO[:1] if same_tenant else TWO
    coming = tuple(g.arrival for g in gangs(same_tenant) if g.arrival.job.submitted_at_s < (hours - 5) * H)
    return Situation(cluster({"H100": NODES}, *tenants), (*beside, *coming), hours)


def rows() -> list[dict[str, Any]]:
    """One row per load and tenancy."""
    return list(shown("waiting", _measured()))


def _measured() -> Iterator[tuple[float, dict[str, Any]]]:
    cases = [(load, same) for load in LOADS for same in (True, False)]
    for number, (load, same) in enumerate(cases, 1):
        here = situation(load, same)
        found = replay(here)
        without = replay(replace(here, policy=replace(here.policy, reservations=0)))
        yield number / len(cases), _row(load, same, found, without)


def _row(load: float, same: bool, found: Outcome, without: Outcome) -> dict[str, Any]:
    waits = [
        {
            "gang": gang.arrival.job.name,
            "right": gang.right,
            "waited_s": round(found.wait_s(gang.arrival.job.name), 1),
            "bound_s": gang.bound_s,
            "without_s": round(without.wait_s(gang.arrival.job.name), 1),
            "stopped": found.moves.get(gang.arrival.job.name, 0),
            "stopped_without": without.moves.get(gang.arrival.job.name, 0),
        }
        for gang in gangs(same)
    ]
    late = [w["gang"] for w in waits if float(str(w["waited_s"])) > float(str(w["bound_s"]))]
    stopped = [w["gang"] for w in waits if w["stopped"]]
    capacity_s = 8 * NODES * found.situation.hours * H
    used, before = found.used_s / capacity_s, without.used_s / capacity_s
    return {
        "load": load,
        "tenants": 1 if same else 2,
        "waits": waits,
        "late": late,
        "stopped": stopped,
        "moves": sum(found.moves.values()),
        "moves_without": sum(without.moves.values()),
        "utilisation": round(used, 4),
        "utilisation_without": round(before, 4),
        "bounds_met": not late and not stopped,
        "utilisation_met": used >= LEAST_UTILISATION * before,
        "met": not late and not stopped and used >= LEAST_UTILISATION * before,
    }
