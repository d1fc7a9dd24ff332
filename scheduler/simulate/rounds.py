"""Gavel's rules: rounds of 360 s, accelerators freed at the round's end, no charge for moving.

A mode of the simulator that exists to check it against published numbers, and to run peers that speak in
time fractions. After Narayanan et al., OSDI'20, section 5 ("round-based scheduling mechanism"):

    priority of job m on type j = X[m, j] / f[m, j]

with X the fraction of time the policy wants and f the share of the type's time that m has received since the
last reset. Types in order, jobs by (priority, deficit, X), greedily; what does not fit is skipped. Each job is
credited half a round on every type at a reset, so that nothing divides by zero. A job has ended when its
round has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from .metrics import JobResult, Result, summarise
from .trace import Trace, TraceCluster, TraceJob

ROUND_S = 360.0
RESET_S = 1920.0
"""Fractions are recomputed on arrival and completion, at most this often."""


@dataclass
class Active:
    """A job in the system, as a fraction policy sees it."""

    job: TraceJob
    left: float
    """Steps still to do."""
    restarts: int = 0
    received_s: dict[str, float] = field(default_factory=dict)
    deficit_s: dict[str, float] = field(default_factory=dict)
    on: str = ""
    """Type of the last round; "" if it did not run."""
    started: bool = False
    held_s: float = 0.0
    """Accelerator-seconds held in all."""


Fractions = Mapping[str, Mapping[str, float]]
"""Job id -> accelerator -> fraction of time."""
FractionPolicy = Callable[[list[Active], TraceCluster, float], Fractions]
"""Active jobs in order of arrival, the cluster, the time."""


def simulate_rounds(
    trace: Trace,
    cluster: TraceCluster,
    policy: FractionPolicy,
    order: tuple[str, ...],
    charge_s: float = 0.0,
    name: str = "",
    shuffle: int | None = None,
) -> Result:
    """Replay a trace under Gavel's rules.

    Args:
        order: accelerator types, the first served first.
        charge_s: time without progress at the begin of every start after a job's first; 0 in Gavel's rules.
        shuffle: seed; the order of types is drawn anew in every round (Gavel does so for policies that do
            not know the types' speeds).
    """
    return _Rounds(trace, cluster, policy, order, charge_s, shuffle).run(name)


class _Rounds:
    def __init__(
        self,
        trace: Trace,
        cluster: TraceCluster,
        policy: FractionPolicy,
        order: tuple[str, ...],
        charge_s: float,
        shuffle: int | None,
    ) -> None:
        self.trace = trace
        self.cluster = cluster
        self.policy = policy
        self.order = order
        self.charge_s = charge_s
        self.random = None if shuffle is None else Random(shuffle)
        self.active: dict[str, Active] = {}
        self.done: dict[str, JobResult] = {}
        self.type_s: dict[str, float] = dict.fromkeys(order, 0.0)
        self.fractions: Fractions = {}
        self.dirty = False
        self.reset_at: float | None = None
        self.busy_s = 0.0

    def run(self, name: str) -> Result:
        queue = sorted(self.trace.jobs, key=lambda job: (job.arrival_s, job.id))
        now, position = 0.0, 0
        while position < len(queue) or self.active:
            if not self.active:
                now = max(now, queue[position].arrival_s)
            while position < len(queue) and queue[position].arrival_s <= now:
                job = queue[position]
                entry = Active(job, job.work)
                for kind in self.order:
                    self._credit(entry, kind)
                self.active[job.id] = entry
                self.dirty = True
                position += 1
            self._allocate(now)
            now = self._round(now)
        return summarise(name, self.trace, self.cluster, self.done, self.busy_s)

    def _credit(self, entry: Active, kind: str) -> None:
        entry.received_s[kind] = ROUND_S / 2
        self.type_s[kind] += ROUND_S / 2

    def _allocate(self, now: float) -> None:
        due = self.reset_at is None or now - self.reset_at >= RESET_S
        if not (self.dirty and due):
            return
        elapsed = 0.0 if self.reset_at is None else now - self.reset_at
        self.type_s = dict.fromkeys(self.order, 0.0)
        for key, entry in self.active.items():
            for kind in self.order:
                wanted = self.fractions.get(key, {}).get(kind, 0.0) * elapsed
                entry.deficit_s[kind] = entry.deficit_s.get(kind, 0.0) + wanted - entry.received_s[kind]
                self._credit(entry, kind)
        self.fractions = self.policy(list(self.active.values()), self.cluster, now)
        self.dirty, self.reset_at = False, now

    def _priority(self, key: str, kind: str) -> float:
        wanted = self.fractions.get(key, {}).get(kind, 0.0)
        share = self.active[key].received_s[kind] / max(self.type_s[kind], 1e-9)
        return 0.0 if wanted <= 0 else wanted / share if share > 0 else wanted * 1e9

    def _choose(self) -> dict[str, str]:
        chosen: dict[str, str] = {}
        order = list(self.order)
        if self.random is not None:
            self.random.shuffle(order)
        for kind in order:
            free = self.cluster.capacity()[kind]
            ranked = sorted(
                (
                    (
                        -self._priority(key, kind),
                        -entry.deficit_s.get(kind, 0.0),
                        -self.fractions.get(key, {}).get(kind, 0.0),
                        number,
                        key,
                    )
                    for number, (key, entry) in enumerate(self.active.items())
                )
            )
            for *_, key in ranked:
                size = round(self.active[key].job.accelerators)
                possible = self.active[key].job.speeds.get(kind, 0.0) > 0
                if key not in chosen and possible and size <= free:
                    chosen[key] = kind
                    free -= size
        return chosen

    def _round(self, now: float) -> float:
        chosen = self._choose()
        end = now
        finished: list[str] = []
        for key, entry in self.active.items():
            if key not in chosen:
                entry.on = ""
        for key, kind in chosen.items():
            entry = self.active[key]
            charge = self.charge_s if entry.started and entry.on != kind else 0.0
            if entry.started and entry.on != kind:
                entry.restarts += 1
            entry.started, entry.on = True, kind
            speed = entry.job.speeds[kind]
            ran = min(ROUND_S, charge + entry.left / speed)
            entry.left -= speed * max(0.0, ran - charge)
            entry.received_s[kind] += ran
            self.type_s[kind] += ran
            entry.held_s += ran * entry.job.accelerators
            self.busy_s += ran * entry.job.accelerators
            end = max(end, now + ran)
            if entry.left <= 1e-6 * entry.job.work:
                finished.append(key)
        for key in finished:
            entry = self.active.pop(key)
            self.done[key] = JobResult(
                key,
                entry.job.arrival_s,
                end,
                entry.restarts,
                entry.restarts * self.charge_s,
                held_s=entry.held_s,
            )
            self.dirty = True
        return end
