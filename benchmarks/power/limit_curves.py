"""What it brings to know what limits cost each job: training jobs with measured curves on one feed, under our leases.

    python benchmarks/power/limit_curves.py --data DATA/zeus_power [--boards v100] [--budgets 0.8,0.7,0.6]
        [--minutes 120] [--seeds 0,1,2] [--output FILE]

`DATA/zeus_power` holds the power sweeps that Zeus published (NSDI 2023): the time and the watts of training jobs under
limits. Forty servers of eight such boards train jobs drawn from them, a network first and then one of its batch sizes,
two servers each, half an hour to an hour long. The feed carries a part of what the servers draw at most. The same row runs

    equal      equal leases (`policy: Static`)
    published  the controller with one curve for all jobs
    learned    the same, with curves learned while the jobs run (`operator.profiles.paces.py`), beginning with none
    untried    the same, without trials of unmeasured jobs
    true       the controller with the curves that the simulation uses: the limit of what can be learned

Jobs, their order and the noise of their speeds are the same in all. Work is what the boards would have done without
limits in the same time; it is counted from the first second, so what learning costs is in it, and once more for the second
half alone.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.progress import show
from benchmarks.result import circumstances, publish

from busbar.operator.agent.split import BoardWant, wanted
from busbar.operator.profiles.paces import LimitCurves, LimitedRun, Told, Work
from busbar.scheduler.power import (
    PRIOR_CURVES,
    CapCurve,
    ControlSettings,
    Domain,
    HeldLease,
    Lease,
    NodePower,
    NodeTelemetry,
    Phase,
    PhaseLoad,
    PowerPolicy,
    accepted,
    allowed_w,
    begin,
    control,
    domain_tree,
)
from busbar.scheduler.power.curves import slowdown, trial_weight

SERVERS, PER_JOB, BOARDS = 40, 2, 8
HOST_W, FACTOR = 1000.0, 1.25
LAWS = ("equal", "published", "learned", "untried", "true")
POLL_S = 6
NOISE = 0.02
"""Of the speed of a step."""
FORGET_S = 60.0


@dataclass(frozen=True)
class Kind:
    """One row of the sweeps: a network with a batch size."""

    name: str
    curve: CapCurve
    watts: tuple[tuple[float, float], ...]
    """Of a board, by the limit as a part of the highest."""


def kinds(path: Path) -> tuple[dict[str, list[Kind]], float, float]:
    """By network; and the lowest and the highest limit of a board."""
    sweeps: dict[tuple[str, str], dict[float, tuple[float, float]]] = defaultdict(dict)
    with path.open() as lines:
        for row in csv.DictReader(lines):
            at = sweeps[row["network"], row["batch_size"]]
            at[float(row["power_limit"])] = float(row["time_per_epoch"]), float(row["average_power"])
    every = sorted({limit for sweep in sweeps.values() for limit in sweep})
    found: dict[str, list[Kind]] = defaultdict(list)
    for (network, batch), sweep in sorted(sweeps.items()):
        if len(sweep) < len(every):
            continue
        slow, points, watts = 1.0, [], []
        for limit in reversed(every):  # a lower limit never makes it faster; what says so is noise
            slow = max(slow, sweep[limit][0] / sweep[every[-1]][0])
            points.append((limit / every[-1], slow))
            watts.append((limit / every[-1], min(sweep[limit][1], limit)))
        found[network].append(Kind(f"{network} {batch}", CapCurve(tuple(points[::-1])), tuple(watts[::-1])))
    return dict(found), every[0], every[-1]


@dataclass
class Job:
    """One run on its servers."""

    name: str
    kind: Kind
    ends_s: float
    step_s: float
    random: Random
    tokens: int = 0
    seconds: float = 0.0
    left_s: float = field(init=False)
    told: Told = field(init=False)

    def __post_init__(self) -> None:
        self.left_s = self._next()
        self.told, self._spent = Told(0, 0.0), 0.0

    def _next(self) -> float:
        return self.step_s * math.exp(self.random.gauss(0.0, NOISE))

    def runs(self, passed_s: float, slow: float) -> float:
        """Seconds of work at full speed that it does meanwhile."""
        work = passed_s / slow
        self._spent += passed_s
        self.left_s -= work
        while self.left_s <= 0:
            self.tokens, self.seconds = self.tokens + 1000, self.seconds + self._spent
            self._spent = 0.0
            self.left_s += self._next()
        return work


class Feed:
    """The servers with their jobs, and what leases them watts."""

    def __init__(self, law: str, budget: float, sweeps: Any, lasts_s: int, seed: int) -> None:
        self.networks, self.least_w, self.most_w = sweeps
        self.law, self.random = law, Random(seed)
        self.names = [f"s{row:02}" for row in range(SERVERS)]
        self.nodes = {name: self._node(name, 1.0) for name in self.names}
        self.budget_w = budget * sum(node.nameplate_w for node in self.nodes.values())
        policy = PowerPolicy.STATIC if law == "equal" else PowerPolicy.LEASE
        self.tree = domain_tree((Domain("feed", self.budget_w, policy=policy, nodes=tuple(self.names)),))
        self.settings = ControlSettings()
        self.held = {name: HeldLease(1, node.floor_w) for name, node in self.nodes.items()}
        self.memory = begin(0.0, 1)
        self.sent: list[Lease] = []
        self.wants: dict[str, BoardWant] = {}
        self.curves = LimitCurves()
        self.jobs = [self._job(number, 0.0) for number in range(SERVERS // PER_JOB)]
        self.started = len(self.jobs)
        self.full_s = self.done_s = 0.0
        self.half_s = (0.0, 0.0)
        self.over_s, self.lasts_s = 0, lasts_s

    def _node(self, name: str, weight: float) -> NodePower:
        return NodePower(name, HOST_W, BOARDS, self.least_w, self.most_w, FACTOR, weight)

    def _job(self, number: int, now_s: float) -> Job:
        network = self.random.choice(sorted(self.networks))
        kind = self.random.choice(self.networks[network])
        length_s = self.random.uniform(1800, 3600)
        return Job(
            f"job{number}",
            kind,
            now_s + length_s,
            self.random.uniform(0.5, 5.0),
            Random(self.random.random()),
        )

    def second(self, now_s: float) -> None:
        """One second passes, then a round."""
        for lease in self.sent:
            self.held[lease.node] = accepted(self.held[lease.node], lease, now_s)
        drawn_w = 0.0
        boards_w: dict[str, tuple[float, float]] = {}
        for place, job in enumerate(self.jobs):
            names = self._names(place)
            limits = [
                self.nodes[name].board_limit_w(allowed_w(self.held[name], now_s)) / self.most_w
                for name in names
            ]
            work = job.runs(1.0, slowdown(job.kind.curve, min(limits)))
            self.done_s += work
            self.full_s += 1.0
            xs, ys = zip(*job.kind.watts, strict=True)
            for name, part in zip(names, limits, strict=True):
                watts = float(np.interp(part, xs, ys))
                boards_w[name] = watts, part * self.most_w
                drawn_w += HOST_W + BOARDS * FACTOR * watts
            if now_s >= job.ends_s:
                self.jobs[place] = self._job(self.started, now_s)
                self.started += 1
        self.over_s += drawn_w > self.budget_w
        if now_s == self.lasts_s // 2:
            self.half_s = self.done_s, self.full_s
        self._round(now_s, boards_w)

    def _names(self, place: int) -> list[str]:
        return self.names[place * PER_JOB : (place + 1) * PER_JOB]

    def _round(self, now_s: float, boards_w: Mapping[str, tuple[float, float]]) -> None:
        learns = self.law in ("learned", "untried")
        if learns:
            self._learn(now_s, boards_w)
        telemetry, nodes = {}, dict(self.nodes)
        for place, job in enumerate(self.jobs):
            curve, weight = None, 1.0
            if self.law == "true":
                curve = job.kind.curve
            elif learns:
                curve = self.curves.curve(self._work(job))
                if curve is None and self.law == "learned":
                    weight = trial_weight(job.name, now_s)
            for name in self._names(place):
                watts, limit_w = boards_w[name]
                want = wanted(self.wants.get(name), watts, limit_w, self.most_w, now_s, FORGET_S)
                self.wants[name] = want
                nodes[name] = self._node(name, weight)
                held = self.held[name]
                telemetry[name] = NodeTelemetry(
                    name,
                    now_s,
                    held.epoch,
                    now_s,
                    held.sequence,
                    allowed_w(held, now_s),
                    HOST_W + BOARDS * FACTOR * watts,
                    phases=(PhaseLoad(Phase.TRAINING, 1.0, max(want.watts, self.least_w), curve=curve),),
                )
        decision = control(self.tree, nodes, telemetry, PRIOR_CURVES, now_s, self.memory, self.settings)
        self.memory, self.sent = decision.memory, list(decision.leases)

    def _learn(self, now_s: float, boards_w: Mapping[str, tuple[float, float]]) -> None:
        runs = []
        for place, job in enumerate(self.jobs):
            if int(now_s) % POLL_S == place % POLL_S:
                job.told = Told(job.tokens, job.seconds)
            limits = [boards_w[name][1] / self.most_w for name in self._names(place)]
            apart = max(limits) - min(limits)
            runs.append(
                LimitedRun(job.name, self._work(job), min(limits) if apart <= 0.05 else None, job.told)
            )
        self.curves.look(runs, now_s)

    @staticmethod
    def _work(job: Job) -> Work:
        return Work(job.kind.name, "board", "resident")


def measured(law: str, budget: float, sweeps: Any, minutes: int, seed: int) -> dict[str, Any]:
    """One run."""
    feed = Feed(law, budget, sweeps, 60 * minutes, seed)
    for second in range(60 * minutes):
        feed.second(float(second))
        if second % 600 == 0:
            show(f"{law} at {budget:.0%}, seed {seed}", second, 60 * minutes)
    known = sum(feed.curves.is_measured(work) for work in feed.curves.evidence)
    return {
        "work": round(feed.done_s / feed.full_s, 4),
        "laterWork": round((feed.done_s - feed.half_s[0]) / (feed.full_s - feed.half_s[1]), 4),
        "overSeconds": int(feed.over_s),
        "runs": feed.started,
        "kindsMeasured": known,
    }


def _numbers(text: str) -> list[float]:
    return [float(one) if "." in one else int(one) for one in text.split(",")]


def main() -> None:
    """The row for every budget, law and seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--boards", choices=("v100", "a40"), default="v100")
    parser.add_argument(
        "--budgets", type=_numbers, default=[0.8, 0.7, 0.6], help="of what the servers draw at most"
    )
    parser.add_argument("--minutes", type=int, default=120)
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    sweeps = kinds(asked.data / f"summary_power_{asked.boards}.csv")
    rows = []
    for budget in asked.budgets:
        runs = {
            law: [measured(law, budget, sweeps, asked.minutes, seed) for seed in asked.seeds] for law in LAWS
        }
        work, later = (
            {law: sum(run[figure] for run in of) / len(of) for law, of in runs.items()}
            for figure in ("work", "laterWork")
        )
        rows.append(
            {
                "budget": budget,
                "work": {law: round(of, 4) for law, of in work.items()},
                "overPublished": {law: round(of / work["published"], 4) for law, of in work.items()},
                "laterOverPublished": {law: round(of / later["published"], 4) for law, of in later.items()},
                "runs": runs,
            }
        )
        print(f"\n{budget:.0%}: {rows[-1]['overPublished']}", file=sys.stderr)
    kept = sum(len(of) for of in sweeps[0].values())
    publish(circumstances() | {"boards": asked.boards, "kinds": kept, "rows": rows}, asked.output)


if __name__ == "__main__":
    main()
