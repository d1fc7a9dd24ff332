"""Two published integer programs for elastic jobs, re-implemented from the papers' formulations.

Both choose in every round at most one configuration (type, accelerators) for each job, so that no type has more
accelerators in use than it has, and both minimise

    sum over chosen (i, c) of  (r_i(c) x g_i(c)) ** p  +  sum over jobs without one of  penalty_i

where g is the job's speed in c in its own unit, and r < 1 discounts every configuration but the present one for the
restart it would cost: r_i = (T_i - N_i S_i) / (T_i + S_i), with the age T, the restarts N so far and a restart's cost S.

| peer   | source                             | configurations                  | unit of g                   | p    |
|--------|------------------------------------|---------------------------------|-----------------------------|------|
| sia    | Sia, SOSP'23                       | powers of two in one node, then | its slowest configuration   | -0.5 |
|        |                                    | whole nodes; twice as many at   |                             |      |
|        |                                    | most in one round; starts small |                             |      |
| pollux | Pollux, OSDI'21 (its search        | every number, in few nodes      | an equal share of all types | -1   |
|        | over allocations solved exactly)   |                                 |                             |      |

Sia's penalty for a job without accelerators is its lambda, 1.1. Pollux has none: its mean is over jobs that run. Here
it is 1.1 times the job's worst configuration, so that as in Sia any is better than none. Pollux is for one type; here
it knows the speeds on each. Batch sizes are fixed, so
speed is goodput. Neither asks for a job's length. A job that is still restarting is left alone.

Jobs stay on their nodes if they keep their configuration and the others find room; else the smallest move. Gaps of the
programs: Sia's 1e-4; 1e-3 for Pollux, whose own search is a genetic one and proves none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from busbar.scheduler import Action, ActionKind, Job, JobId, Placement, Plan, Policy, Snapshot
from busbar.scheduler.highs import Program, solve
from busbar.scheduler.simulate.trace import Trace, TraceCluster, TraceJob

ROUND_S = 60.0
LAMBDA = 1.1

Config = tuple[str, int]
"""Accelerator type and accelerators."""


@dataclass
class Peer:
    """A decider for the simulator (`simulate(..., decide=...)`)."""

    trace: Trace
    cluster: TraceCluster
    configs: Callable[[TraceJob, TraceCluster], list[Config]]
    power: float
    by_share: bool
    """Whether the unit of speed is an equal share of the cluster; else the job's slowest configuration."""
    slow_growth: bool
    """Whether a job starts with its fewest accelerators and at most doubles."""
    gap: float
    """Relative gap at which the program counts as solved."""
    restarts: dict[JobId, int] = field(default_factory=Counter)
    _truth: dict[str, TraceJob] = field(default_factory=dict)
    _configs: dict[str, list[Config]] = field(default_factory=dict)
    """By class."""

    def __call__(self, snapshot: Snapshot, policy: Policy, now: float) -> tuple[Plan, None]:
        chosen = self._choose(snapshot.jobs, now) if snapshot.jobs else {}
        held = {job.id: job.run.placement for job in snapshot.jobs if job.run is not None}
        wanted = place(snapshot, chosen, held)
        for name, placement in held.items():
            if name in wanted and wanted[name].nodes != placement.nodes:
                self.restarts[name] += 1
        return Plan(id=f"{now}", at_s=now, actions=actions(held, wanted)), None

    def _job(self, name: str) -> TraceJob:
        if not self._truth:
            self._truth = {job.id: job for job in self.trace.jobs}
        return self._truth[name]

    def _choose(self, jobs: Iterable[Job], now: float) -> dict[JobId, Config]:
        """The configuration of each job that gets one."""
        program, columns = Program(), list[tuple[int, JobId, Config]]()
        rows: dict[str, list[tuple[int, float]]] = {kind: [] for kind in self.cluster.nodes}
        jobs = sorted(jobs, key=lambda job: job.id)
        for job in jobs:
            options, penalty = self._options(job, now, len(jobs))
            own = []
            for (kind, count), cost in options.items():
                # One choice at most: the penalty for none is saved by any.
                variable = program.variable(cost - penalty, integer=True)
                columns.append((variable, job.id, (kind, count)))
                own.append((variable, 1.0))
                rows[kind].append((variable, float(count)))
            program.row(own, low=1.0 if len(options) == 1 and self._restarting(job, now) else 0.0, high=1.0)
        for kind, total in self.cluster.capacity().items():
            program.row(rows[kind], high=float(total))
        solution = solve(program, gap=self.gap)
        assert solution is not None, "no choice at all is always possible"
        return {name: config for variable, name, config in columns if solution.x[variable] > 0.5}

    def _restarting(self, job: Job, now: float) -> bool:
        return (
            job.run is not None and self.restarts[job.id] > 0 and now < job.run.started_at_s + job.restart_s
        )

    def _options(self, job: Job, now: float, jobs: int) -> tuple[dict[Config, float], float]:
        """Cost of each configuration, and of none."""
        truth = self._job(job.id)
        if truth.workload_class not in self._configs:
            self._configs[truth.workload_class] = self.configs(truth, self.cluster)
        configs = self._configs[truth.workload_class]
        speeds = {config: self._speed(truth, config) for config in configs}
        speeds = {config: speed for config, speed in speeds.items() if speed > 0}
        unit = self._equal_share(truth, jobs) if self.by_share else min(speeds.values())
        place = None if job.run is None else job.run.placement
        present = None if place is None else (place.accelerator, place.pods)
        if present is not None and self._restarting(job, now):
            return {present: 0.0}, LAMBDA
        age, restart = now - job.submitted_at_s, job.restart_s
        discount = (age - self.restarts[job.id] * restart) / (age + restart) if age > restart else 1.0
        discount = max(discount, 0.01)
        costs = {
            config: (speed / unit * (1.0 if config == present or present is None else discount)) ** self.power
            for config, speed in speeds.items()
        }
        penalty = LAMBDA * max(1.0, *costs.values())
        if self.slow_growth:
            most = truth.pods if present is None else 2 * present[1]
            least = min(count for _, count in costs)
            costs = {config: cost for config, cost in costs.items() if config[1] <= max(most, least)}
        return costs, penalty

    def _speed(self, truth: TraceJob, config: Config) -> float:
        kind, count = config
        return truth.speed(kind, 1000 * count, -(-count // self.cluster.per_node(kind)))

    def _equal_share(self, truth: TraceJob, jobs: int) -> float:
        """Speed with an equal share of the accelerators, averaged over the types."""
        capacity = self.cluster.capacity()
        total = sum(capacity.values())
        count = max(truth.pods, min(total // jobs, truth.max_pods or truth.pods))
        return sum(self._speed(truth, (kind, count)) * own for kind, own in capacity.items()) / total


def sia(trace: Trace, cluster: TraceCluster) -> Peer:
    """Sia's program."""
    return Peer(trace, cluster, _sia_configs, -0.5, by_share=False, slow_growth=True, gap=1e-4)


def pollux(trace: Trace, cluster: TraceCluster) -> Peer:
    """Pollux's objective, solved exactly."""
    return Peer(trace, cluster, _all_configs, -1.0, by_share=True, slow_growth=False, gap=1e-3)


def _sia_configs(job: TraceJob, cluster: TraceCluster) -> list[Config]:
    most = job.max_pods or job.pods
    found: list[Config] = []
    for kind, nodes in cluster.nodes.items():
        size = cluster.per_node(kind)
        counts = [2**i for i in range(size.bit_length()) if 2**i <= size]
        counts += [size * n for n in range(2, nodes + 1)]
        found += [(kind, count) for count in counts if job.pods <= count <= most]
    return found


def _all_configs(job: TraceJob, cluster: TraceCluster) -> list[Config]:
    most = job.max_pods or job.pods
    return [
        (kind, count)
        for kind, total in cluster.capacity().items()
        for count in range(job.pods, min(most, total) + 1)
    ]


def place(
    snapshot: Snapshot, chosen: dict[JobId, Config], held: dict[JobId, Placement]
) -> dict[JobId, Placement]:
    """Nodes for the chosen configurations."""
    found: dict[JobId, Placement] = {}
    for kind in sorted({kind for kind, _ in chosen.values()}):
        rooms = {
            node.name: node.capacity.accelerators_m // 1000 for node in snapshot.nodes if node.pool == kind
        }
        own = {name: count for name, (on, count) in chosen.items() if on == kind}
        stay = {
            name: held[name].nodes
            for name, count in own.items()
            if name in held and held[name].accelerator == kind and held[name].pods == count
        }
        while (nodes := _packed(rooms, own, stay)) is None:
            del stay[min(stay, key=lambda name: (own[name], name))]
        pod = next(job.per_pod for job in snapshot.jobs)
        found |= {name: Placement(kind, kind, "resident", where, pod) for name, where in nodes.items()}
    return found


def _packed(
    rooms: dict[str, int], counts: dict[JobId, int], stay: dict[JobId, tuple[str, ...]]
) -> dict[JobId, tuple[str, ...]] | None:
    """Nodes of each job, those that stay on theirs; None: a job that would fit one node has to be split."""
    free = Counter(rooms)
    found = dict(stay)
    for nodes in stay.values():
        free.subtract(nodes)
    largest = max(rooms.values())
    for name in sorted(counts.keys() - stay.keys(), key=lambda name: (-counts[name], name)):
        left, where = counts[name], list[str]()
        whole = [node for node in sorted(rooms) if free[node] >= left]
        if whole:
            where = [min(whole, key=lambda node: (free[node], node))] * left
        elif left <= largest and stay:
            return None
        else:
            for node in sorted(rooms, key=lambda node: (-free[node], node)):
                where += [node] * min(left - len(where), free[node])
        free.subtract(where)
        found[name] = tuple(sorted(where))
    return found


def actions(held: dict[JobId, Placement], wanted: dict[JobId, Placement]) -> tuple[Action, ...]:
    """What leads from one to the other, releases first."""
    found: list[tuple[int, Action]] = []
    for name in sorted(held.keys() | wanted.keys()):
        old, new = held.get(name), wanted.get(name)
        if old is not None and new is not None and old.nodes == new.nodes:
            continue
        if new is None:
            kind = ActionKind.PREEMPT
        elif old is None:
            kind = ActionKind.START
        else:
            kind = ActionKind.MOVE
        order = (ActionKind.PREEMPT, ActionKind.MOVE, ActionKind.START).index(kind)
        found.append((order, Action(f"{name}/{kind}", kind, name, new, old)))
    return tuple(action for _, action in sorted(found, key=lambda item: item[0]))
