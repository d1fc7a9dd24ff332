"""What the cost of a fleet consists of, and the least that any fleet with the same stock, SLO and start time costs.

    python -m benchmarks.serving_scale.parts azure steps --data DIR

Each line is a mean over the counted time in $ per hour: what the cheapest replicas for some load cost, from the least that knows
everything to what was paid. One file per case goes to `benchmarks/results/serving_scale/parts_CASE.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving_scale.kit import AZURE, POOLS, RESULTS, commit
from benchmarks.serving_scale.step_model import SLO

from busbar.scheduler import highs
from busbar.scheduler.autoscale.fleet import RATE_S, Cause, Decision, FleetSettings, Observation
from busbar.scheduler.autoscale.mix import Column, Effort, Limits, Mix, cheapest
from busbar.scheduler.autoscale.step_model import StepModel, kv_token_bytes
from busbar.scheduler.simulate.serving_cluster import Moves, ServingSettings
from busbar.scheduler.simulate.serving_engine import Policy, run
from busbar.scheduler.simulate.serving_policies import Ours
from busbar.scheduler.simulate.serving_pools import LLAMA_8B, columns_of, parse_pools, step_models
from busbar.scheduler.simulate.serving_result import ServingResult
from busbar.scheduler.simulate.serving_trace import Buckets, ServingTrace, requests_csv, steps

START_S, WARM_UP_S, PLAN_S = 60.0, 300.0, 30.0
SEARCH_S = 120.0
"""For the schedule in whole replicas."""
EFFORT = Effort(nodes=500, seconds=None)
STEPS, EACH_S = (3.0, 12.0, 24.0, 30.0, 6.0, 18.0), 250.0
"""AIBrix's scenario: requests per second, and how long each rate lasts."""
Load = Sequence[float]


@dataclass(frozen=True, slots=True)
class Problem:
    """One load and what fleets are made of."""

    trace: ServingTrace
    buckets: Buckets
    columns: tuple[Column, ...]
    models: Mapping[str, StepModel]
    limits: Limits

    @classmethod
    def of(cls, trace: ServingTrace) -> Problem:
        pools = parse_pools(POOLS)
        buckets = Buckets.of(trace)
        models, _ = step_models(pools, LLAMA_8B)
        limits = Limits(stock={pool.name: pool.stock for pool in pools}, min_replicas=1)
        return cls(trace, buckets, columns_of(pools, models, buckets, SLO), models, limits)

    def mix(self, load: Load) -> Mix:
        return cheapest(self.columns, load, self.limits, effort=EFFORT)

    def loads(self, bin_s: float) -> list[list[float]]:
        """Requests per second by bucket in each whole bin."""
        bins = [[0.0] * len(self.buckets.means) for _ in range(int(self.trace.duration_s // bin_s))]
        for at, prompt in zip(self.trace.arrivals_s, self.trace.prompts, strict=True):
            if at < bin_s * len(bins):
                bins[int(at // bin_s)][self.buckets.index(prompt)] += 1 / bin_s
        return bins


@dataclass(slots=True)
class Recorded(Ours):
    """Our fleet, which writes down what it knew at each plan and what it had at each second."""

    expected: list[Load] = field(default_factory=list)
    upper: list[Load] = field(default_factory=list)
    window: list[Load] = field(default_factory=list)
    ready: Counter[str] = field(default_factory=Counter)
    starting: Counter[str] = field(default_factory=Counter)

    def decide(self, seen: Observation) -> Decision | None:
        decision = Ours.decide(self, seen)
        if seen.now_s > WARM_UP_S:
            self.ready.update(seen.ready)
            self.starting.update(seen.starting)
            if seen.now_s % PLAN_S == 0:
                fleet, ahead = self.fleet, self.fleet.forecast.forecast(seen.now_s)
                self.expected.append(fleet.load(ahead.expected))
                self.upper.append(fleet.load(ahead.upper))
                self.window.append(fleet.load(fleet.needed_rps))
        return decision


@dataclass(slots=True)
class Following(Ours):
    """What needs no forecast: every 30 s the cheapest mix for the minute before and a margin; the rest leaves at once."""

    margin: float = 1.0
    _seconds: deque[Load] = field(default_factory=lambda: deque(maxlen=60))

    def decide(self, seen: Observation) -> Decision | None:
        self._seconds.append(seen.rates)
        if seen.now_s % PLAN_S:
            return None
        tens = list(self._seconds)[::-RATE_S]
        load = [self.margin * sum(rates) / len(tens) for rates in zip(*tens, strict=True)]
        target = cheapest(self.fleet.columns, load, self.fleet.limits, effort=EFFORT).replicas
        return None if target == seen.live else Decision(target, Cause.FORECAST, sum(load))


def schedule(problem: Problem, minutes: Sequence[Load], whole: bool) -> tuple[float, bool]:
    """The cheapest replicas for all minutes together, with each start paid for `START_S`; $ per hour, and whether that is the
    least to 1 %.

    Args:
        whole: replicas are whole; else this is a lower bound.
    """
    program = highs.Program()
    before: dict[str, int] = {}
    for load in minutes:
        counts = {
            c.key: program.variable(c.cost_per_h, 0.0, problem.limits.stock[c.pool], integer=whole)
            for c in problem.columns
        }
        work: dict[str, list[tuple[int, float]]] = {key: [(count, -1.0)] for key, count in counts.items()}
        for bucket, rate in enumerate(load):
            able = [c for c in problem.columns if rate > 0 and c.rates[bucket] > 0]
            shares = {c.key: program.variable() for c in able}
            if able:
                program.row([(share, 1.0) for share in shares.values()], 1.0, 1.0)
            for column in able:
                work[column.key].append((shares[column.key], rate / column.rates[bucket]))
        for column in problem.columns:
            program.row(work[column.key], high=0.0)
            if before:
                started = program.variable(column.cost_per_h * START_S / 60, 0.0, math.inf)
                program.row([(started, 1.0), (counts[column.key], -1.0), (before[column.key], 1.0)], 0.0)
        before = counts
    if not whole:
        solution = highs.Linear(program).solve()
    else:
        solution = highs.solve(program, SEARCH_S, None, 0.01)
    assert solution is not None
    return solution.objective / len(minutes), solution.optimal


def simulate(problem: Problem, policy: Policy) -> ServingResult:
    """One fleet on the load."""
    moves = Moves(kv_token_bytes(LLAMA_8B)) if isinstance(policy, Ours) else None
    settings = ServingSettings(START_S, warm_up_s=WARM_UP_S, moves=moves)
    return run(problem.trace, problem.buckets, problem.columns, problem.models, SLO, policy, settings)


def lines(problem: Problem) -> dict[str, object]:
    """All parts of one load."""
    minutes = problem.loads(60.0)[math.ceil(WARM_UP_S / 60) :]
    halves = problem.loads(PLAN_S)
    first = math.ceil(WARM_UP_S / PLAN_S)
    known = [
        max(halves[at : at + 3], key=lambda load: problem.mix(load).cost_per_h)
        for at in range(first, len(halves))
    ]
    ours = Recorded.of(problem.columns, problem.limits, SLO, FleetSettings(start_s=START_S))
    result = simulate(problem, ours)
    seconds = 3600 * result.hours
    prices = {c.key: c.cost_per_h for c in problem.columns}

    def paid(counted: Counter[str]) -> float:
        return sum(prices[key] * count for key, count in counted.items()) / seconds

    def mean(loads: Sequence[Load]) -> tuple[float, dict[str, float]]:
        mixes = [problem.mix(load) for load in loads]
        by_type = {
            key: round(sum(price * mix.replicas[key] for mix in mixes) / len(mixes), 2)
            for key, price in prices.items()
        }
        return round(sum(mix.cost_per_h for mix in mixes) / len(mixes), 2), by_type

    fractions, _ = schedule(problem, minutes, whole=False)
    integers, is_least = schedule(problem, minutes, whole=True)
    by_load = {
        "the minute's own load": mean(minutes),
        "the largest half minute of the next 90 s": mean(known),
        "what the forecast expects": mean(ours.expected),
        "the 90 % quantile of the forecast's errors": mean(ours.upper),
        "the most of that in the last 300 s": mean(ours.window),
    }
    ready, starting = paid(ours.ready), paid(ours.starting)
    return {
        "all known, each start paid, fractions of replicas": round(fractions, 2),
        "all known, each start paid, whole replicas": round(integers, 2),
        "that is the least to 1 %": is_least,
        **{name: cost for name, (cost, _) in by_load.items()},
        "replicas that are ready": round(ready, 2),
        "replicas that start": round(starting, 2),
        "replicas that drain": round(result.cost_per_h - ready - starting, 2),
        "paid": round(result.cost_per_h, 2),
        "attainment": round(result.attainment, 5),
        "by type": {name: by_type for name, (_, by_type) in by_load.items()}
        | {"paid": {k: round(prices[k] * h / result.hours, 2) for k, h in result.replica_hours.items()}},
    }


def following(problem: Problem, margins: Sequence[float]) -> list[dict[str, float]]:
    """What a fleet that follows the last minute attains and costs, by its margin."""
    found = []
    for margin in margins:
        policy = Following.of(problem.columns, problem.limits, SLO, FleetSettings(start_s=START_S))
        policy.margin = margin
        result = simulate(problem, policy)
        found.append(
            {
                "margin": margin,
                "attainment": round(result.attainment, 5),
                "cost_per_h": round(result.cost_per_h, 2),
            }
        )
    return found


def azure(data: Path) -> ServingTrace:
    return requests_csv(data / AZURE, 12)


def stepped(data: Path, seed: int = 0) -> ServingTrace:
    once = requests_csv(data / AZURE)
    lengths = list(zip(once.prompts, once.outputs, strict=True))
    return steps(STEPS, EACH_S, lengths, seed)


CASES: dict[str, Callable[[Path], ServingTrace]] = {"azure": azure, "steps": stepped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=sorted(CASES))
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    for case in arguments.cases:
        problem = Problem.of(CASES[case](arguments.data))
        found = {
            "command": f"python -m benchmarks.serving_scale.parts {case} --data DIR",
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
            "parts": lines(problem),
            "following the last minute": following(problem, (1.0, 1.1, 1.2, 1.3)),
        }
        text = json.dumps(found, indent=1)
        (RESULTS / f"parts_{case}.json").write_text(text + "\n")
        print(text)


if __name__ == "__main__":
    main()
