"""What can be attained on steps that nobody foresees, by the start time and by the fleet that is there before each.

    python -m benchmarks.serving_scale.reaction --seeds 0 1 2 3 --data DIR

Beside ours and the HPA stands our fleet with one difference: in the first second of each rise it knows the new rate, and starts
`REACH` times what that needs. It has what ours has before, and the same start time, so no scaler that holds no more and is told
of a step when it comes attains more. Written to `benchmarks/results/serving_scale/steps_seeds.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.serving_scale.kit import RESULTS, commit
from benchmarks.serving_scale.parts import EACH_S, EFFORT, START_S, STEPS, Problem, simulate, stepped
from benchmarks.serving_scale.step_model import SLO

from busbar.scheduler.autoscale.fleet import Cause, Decision, FleetSettings, Observation
from busbar.scheduler.autoscale.mix import cheapest
from busbar.scheduler.simulate.serving_engine import Policy
from busbar.scheduler.simulate.serving_policies import (
    HPA_MOST,
    Hpa,
    Ours,
    best_single,
    rated_in_flight,
    static_replicas,
)
from busbar.scheduler.simulate.serving_result import ServingResult

REACH = 3.0
"""Times the new rate: enough to work off at once what waits when they are ready."""


@dataclass(slots=True)
class Told(Ours):
    """It is told of each rise when it comes."""

    rises: Mapping[float, float] = field(default_factory=dict)
    """Second -> requests per second from then on."""
    _rest_until_s: float = 0.0

    def decide(self, seen: Observation) -> Decision | None:
        decision, rate = Ours.decide(self, seen), self.rises.get(seen.now_s)
        if rate is None:
            return decision if seen.now_s >= self._rest_until_s else None
        self._rest_until_s = seen.now_s + 2 * START_S  # until what waits is worked off
        fleet = self.fleet
        load = fleet.load(REACH * rate)
        mix = cheapest(fleet.columns, load, fleet.limits, effort=EFFORT, least=seen.live)
        return Decision(mix.replicas, Cause.PANIC, REACH * rate)


def row(data: Path, seed: int) -> dict[str, object]:
    """One draw of the steps."""
    problem = Problem.of(stepped(data, seed))
    settings = FleetSettings(start_s=START_S)
    ours = Ours.of(problem.columns, problem.limits, SLO, settings)
    told = Told.of(problem.columns, problem.limits, SLO, settings)
    told.rises = {EACH_S * n: after for n, (before, after) in enumerate(pairwise(STEPS), 1) if after > before}
    fleets: dict[str, Policy] = {"ours": ours, "told": told, "hpa": _hpa(problem)}
    return {"seed": seed, **{name: _numbers(simulate(problem, fleet)) for name, fleet in fleets.items()}}


def _hpa(problem: Problem) -> Hpa:
    minutes = problem.loads(60.0)
    single = best_single(problem.columns, minutes[5:])
    rated = rated_in_flight(problem.models[single.key], single, problem.buckets.means, minutes)
    return Hpa(single, rated, math.ceil(HPA_MOST * static_replicas(single, minutes)))


def _numbers(result: ServingResult) -> dict[str, float]:
    return {
        "attainment": round(result.attainment, 5),
        "late": result.late,
        "cost_per_h": round(result.cost_per_h, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    found = {
        "command": "python -m benchmarks.serving_scale.reaction --seeds "
        + " ".join(map(str, arguments.seeds))
        + " --data DIR",
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": [row(arguments.data, seed) for seed in arguments.seeds],
    }
    text = json.dumps(found, indent=1)
    (RESULTS / "steps_seeds.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
