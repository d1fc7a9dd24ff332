"""Small scenarios whose correct result was derived by hand; in most of them demand exceeds capacity.

Each has a cluster, its jobs, a length, a reading of the result, the value that it must have, and the reason.
`replay.py` plans them as production does. `neighbour` marks a scenario that lacks the difficulty of another one:
together they show that a row can be met and can be missed.

Unless a row says otherwise, nodes have eight accelerators, tenants equal weights, jobs priority 100, and the
lengths of jobs are known. A stream submits jobs at equal intervals: at a load of 0.95 a stream by itself never
queues, and never leaves a large cluster empty.

The scenarios are grouped by subject in the modules `scenario_*`; the rows have the order of `GROUPS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.progress import shown
from benchmarks.scheduling.replay import Outcome, replay
from benchmarks.scheduling.scenario_order import ageing, bounded_waiting, priorities, rights
from benchmarks.scheduling.scenario_parts import Scenario, Value
from benchmarks.scheduling.scenario_placement import defragmentation, elastic, pools
from benchmarks.scheduling.scenario_reasons import never
from benchmarks.scheduling.scenario_shares import (
    makespan,
    rotation,
    shares_of_one_type,
    shares_of_two_types,
    swaps,
)

GROUPS = (
    bounded_waiting,
    rights,
    ageing,
    shares_of_two_types,
    shares_of_one_type,
    swaps,
    rotation,
    makespan,
    elastic,
    defragmentation,
    pools,
    never,
    priorities,
)


def scenarios() -> tuple[Scenario, ...]:
    """All scenarios."""
    return tuple(scenario for group in GROUPS for scenario in group())


def rows() -> list[dict[str, Any]]:
    """The found and the expected values."""
    return list(shown("scenarios", _measured(scenarios())))


def _measured(wanted: Iterable[Scenario]) -> Iterator[tuple[float, dict[str, Any]]]:
    all_ = tuple(wanted)
    outcomes: dict[int, Outcome] = {}
    for number, scenario in enumerate(all_, 1):
        key = id(scenario.situation)  # several rows may read the same replay
        if key not in outcomes:
            outcomes[key] = replay(scenario.situation)
        found = scenario.read(outcomes[key])
        yield (
            number / len(all_),
            {
                "name": scenario.name,
                "promise": scenario.promise,
                "expected": f"{scenario.bar.kind} {_shown(scenario.bar.value)} {scenario.unit}",
                "why": scenario.why,
                "measured": round(found, 3) if isinstance(found, float) else found,
                "watched_h": scenario.situation.hours,
                "neighbour": scenario.neighbour,
                "met": scenario.bar.met(found),
            },
        )


def _shown(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
