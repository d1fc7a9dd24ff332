"""The discrete-event simulator: the scheduler's own `plan`, on a simulated cluster.

The simulator holds the truth (lengths and speeds); the policy sees a `Snapshot` and nothing else. Events are
arrivals, completions, failures, new phases of a job's life (`TraceJob.phases`) and planning rounds; there is no fixed time
step. The same trace, cluster,
policy and seed give the same bytes.

What a start costs: every start after a job's first holds its accelerators for `charge_s` without progress, or for
as long as the job's class needs (`TraceJob.restart_s`); with `charge_first` the first one does, too. A job that
is stopped by the plan saves first and loses nothing else; one whose node fails loses its progress since its
last checkpoint, which it makes every `checkpoint_s` of a run. Nodes fail as listed in `failures`, or at random:
then the times between a node's failures are exponential with mean `node_mtbf_s`, drawn from the seed and the
node's name.
"""

from __future__ import annotations

import heapq
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from ..check import check_plan
from ..model.apply import applied
from ..model.copies import copier
from ..model.events import Event
from ..model.plans import Action, Plan, Policy
from ..model.snapshot import Job, JobId, Node, Pool, Resources, Run, Snapshot, Tenant
from ..planner import plan, react
from ..search.state import Memo
from .metrics import JobResult, Result, Shares, percentile, summarise
from .past import Past
from .speeds import Learner, true_table
from .trace import Trace, TraceCluster, TraceJob

Decide = Callable[[Snapshot, Policy, float], tuple[Plan, object]]
"""The decision, as `planner.plan` makes it; what comes with the plan is not used."""


SETTLE_S = 10.0
"""The operator's default."""
LONGEST_S = 10 * 365 * 86_400.0
"""Of a job alone: with a plan in every `Settings.round_s`, one of this length takes half a million plans."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to simulate."""

    charge_s: float = 30.0
    """Seconds without progress at every start after the first, of jobs that do not say (`TraceJob.restart_s`)."""
    charge_first: bool = False
    """Whether the first start costs as much."""
    steps_known: bool = True
    """Whether the policy is told the remaining work."""
    round_s: float = 600.0
    """A plan is also made after this time without events while jobs wait or could move."""
    checkpoint_s: float = 600.0
    """Jobs save this often by themselves, counted from each start; matters only for failures."""
    failures: tuple[tuple[float, str, float], ...] = ()
    """(time, node, seconds until it is back)."""
    node_mtbf_s: float | None = None
    """Mean time between the failures of one node, counted from its return; None: none but those above."""
    repair_s: float = 3600.0
    """How long such a node is away."""
    seed: int = 0
    check: bool = True
    """Let the independent checker examine every plan."""
    grid_s: float = 0.0
    """Plans are made at multiples of this only (0: at every event); several events share one plan."""
    settle_s: float | None = None
    """As the operator decides: an event is answered by `react`, and the full plan follows after so many seconds
    (`SETTLE_S`) while jobs wait. None: every event has a full plan."""


@dataclass(slots=True)
class LiveJob:
    """A job in the system, as it really is."""

    job: TraceJob
    left: float
    seen: Job
    speed: float = 0.0
    progress_from_s: float = 0.0
    """Progress counts from here (a start's charge has passed)."""
    updated_s: float = 0.0
    restarts: int = 0
    lost_s: float = 0.0
    first_start_s: float | None = None
    held_s: float = 0.0
    attained_s: float = 0.0
    """As in the snapshot: accelerator-seconds in exchange-rate units."""
    cost: float = 0.0
    end_key: int = 0


def simulate(
    trace: Trace,
    cluster: TraceCluster,
    policy: Policy,
    settings: Settings | None = None,
    name: str = "",
    learner: Learner | None = None,
    progress: Callable[[int, int, float], None] | None = None,
    decide: Decide = plan,
) -> Result:
    """Replay a trace.

    Args:
        decide: makes the plans; another than our own to compare with it.
        progress: called with (jobs done, jobs in all, simulated time) after every plan.

    Raises:
        AssertionError: the checker refused a plan (a defect of the planner).
        ValueError: a job can never start or lasts for years, or jobs have phases and speeds are to be learned.
    """
    _refuse_too_large(trace, cluster)
    _refuse_too_long(trace)
    engine = ClusterEngine(trace, cluster, policy, settings or Settings(), learner, progress, decide)
    return engine.run(name or policy.objective.value)


def _refuse_too_large(trace: Trace, cluster: TraceCluster) -> None:
    """Raises ValueError where a job has no room in the empty cluster."""
    large = [job for job in trace.jobs if not cluster.holds(job)]
    if large:
        job, has = large[0], ", ".join(f"{count} {kind}" for kind, count in cluster.capacity().items())
        raise ValueError(
            f"{len(large)} of {len(trace.jobs)} jobs of {trace.name} can never start. The first is {job.id}: it needs"
            f" {job.pods} x {job.per_pod_m / 1000:g} accelerators of {' or '.join(job.speeds)}, the cluster has {has};"
            " simulate a larger cluster, or take such jobs out"
        )


def _refuse_too_long(trace: Trace) -> None:
    """Raises ValueError where the simulation would not come to an end."""
    long = [job for job in trace.jobs if job.best_s() > LONGEST_S]
    if long:
        raise ValueError(
            f"{len(long)} of {len(trace.jobs)} jobs of {trace.name} last longer than {LONGEST_S:g} s. The first is"
            f" {long[0].id}: alone it needs {long[0].best_s():.4g} s; correct its length, or take such jobs out"
        )


def node_name(kind: str, number: int) -> str:
    """Of a type's nodes, which are numbered from 0 on."""
    return f"{kind}-{number:05d}"


_ARRIVE, _END, _FAIL, _BACK, _PLAN, _PHASE = range(6)
_changed = copier(Job)


class ClusterEngine:
    """One run."""

    def __init__(
        self,
        trace: Trace,
        cluster: TraceCluster,
        policy: Policy,
        settings: Settings,
        learner: Learner | None,
        progress: Callable[[int, int, float], None] | None,
        decide: Decide,
    ) -> None:
        self.trace, self.cluster, self.policy, self.settings = trace, cluster, policy, settings
        self.deciding = replace(policy, solver_seconds=None)  # no clock: the same seed gives the same bytes
        if learner is not None and any(job.phases for job in trace.jobs):
            raise ValueError(
                f"{trace.name}: a learner does not know the phases of jobs; leave it or them out"
            )
        self.learner = learner or Learner(true_table(trace, cluster))
        self.progress = progress
        self.decide = decide
        self.past = Past(policy.usage_half_life_s)
        self.shares = Shares(cluster)
        self.jobs = {job.id: job for job in trace.jobs}
        self.live: dict[JobId, LiveJob] = {}
        self.done: dict[str, JobResult] = {}
        self.events: list[tuple[float, int, int, str]] = []
        self.counter = 0
        self.busy_m = 0
        self.busy_s = 0.0
        self.busy_since = 0.0
        self.decisions: list[float] = []
        self.series: list[tuple[float, int, float]] = []
        self.snapshot = self._empty()
        self.plan_at: float | None = None
        self.full_at = -math.inf
        self.planned: tuple[Snapshot, Plan, Memo] | None = None
        """The last plan carried out, and the snapshot after it."""
        self.chance: dict[str, Random] = {}
        self.node_failures = 0

    def _empty(self) -> Snapshot:
        shares = any(job.per_pod_m < 1000 for job in self.trace.jobs)
        pools = tuple(
            Pool(kind, kind, price_per_hour=self.cluster.prices.get(kind, 0.0), shareable=shares)
            for kind in sorted(self.cluster.nodes)
        )
        nodes = tuple(
            Node(node_name(kind, i), kind, Resources(1000 * self.cluster.per_node(kind)))
            for kind in sorted(self.cluster.nodes)
            for i in range(self.cluster.nodes[kind])
        )
        names = sorted({job.tenant for job in self.trace.jobs})
        tenants = tuple(Tenant(name, weight=self.cluster.weights.get(name, 1.0)) for name in names)
        return Snapshot(pools, nodes, tenants, (), self.learner.current(()))

    def _push(self, at: float, kind: int, what: str) -> int:
        self.counter += 1
        heapq.heappush(self.events, (at, kind, self.counter, what))
        return self.counter

    def begin(self) -> None:
        """Put the arrivals and failures in line."""
        for job in sorted(self.trace.jobs, key=lambda job: (job.arrival_s, job.id)):
            self._push(job.arrival_s, _ARRIVE, job.id)
        for at, node, back in self.settings.failures:
            self._push(at, _FAIL, node)
            self._push(at + back, _BACK, node)
        self.busy_since = min((job.arrival_s for job in self.trace.jobs), default=0.0)
        if self.settings.node_mtbf_s is not None:
            for one in self.snapshot.nodes:
                self.chance[one.name] = Random(f"{self.settings.seed}/{one.name}")
                self._fail_later(one.name, self.busy_since)

    def step(self) -> float:
        """The events of the next moment, and the plan for them; returns that moment."""
        now = self.events[0][0]
        wanted = False
        while self.events and self.events[0][0] <= now:
            _, kind, number, what = heapq.heappop(self.events)
            wanted = self._event(now, kind, number, what) or wanted
        if wanted:
            at = self._grid(now)
            if at > now:
                self._plan_later(at)
            else:
                self._plan(now)
        return now

    def run(self, name: str) -> Result:
        """All jobs to their ends."""
        self.begin()
        now = self.busy_since
        while self.events:
            if len(self.done) == len(self.jobs):
                now = self.events[0][0]
                break
            now = self.step()
        notes = {
            "policy": self.policy.hash,
            "decision_ms_p50": percentile(self.decisions, 50) * 1000,
            "decision_ms_p99": percentile(self.decisions, 99) * 1000,
            "plans": len(self.decisions),
            "node_failures": self.node_failures,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
        self._account(now)
        series, jain = tuple(self.series), self.shares.jain()
        return summarise(name, self.trace, self.cluster, self.done, self.busy_s, notes, series, jain)

    def _grid(self, now: float) -> float:
        grid = self.settings.grid_s
        return now if grid <= 0 else -(-now // grid) * grid

    def _plan_later(self, at: float) -> None:
        if self.plan_at is None or self.plan_at > at:
            self.plan_at = at
            self._push(at, _PLAN, "")

    def _event(self, now: float, kind: int, number: int, what: str) -> bool:
        """Handle one event; returns whether it calls for a plan."""
        if kind == _ARRIVE:
            self.live[JobId(what)] = self._arrived(self.jobs[what])
            return True
        if kind == _END:
            entry = self.live.get(JobId(what))
            if entry is None or entry.end_key != number:
                return False
            self._finish(entry, now)
            return True
        if kind == _PHASE:
            entry = self.live.get(JobId(what))
            if entry is None or entry.end_key != number:
                return False
            self._change_phase(entry, now)
            return True
        if kind == _PLAN:
            due = self.plan_at is not None and self.plan_at <= now
            self.plan_at = None if due else self.plan_at
            return due
        self._node(what, now, back=kind == _BACK)
        return True

    def _arrived(self, job: TraceJob) -> LiveJob:
        seen = Job(
            JobId(job.id),
            job.id,
            job.tenant,
            job.tenant,
            user=job.user,
            workload_class=job.workload_class,
            min_pods=job.pods,
            max_pods=job.max_pods or job.pods,
            per_pod=Resources(job.per_pod_m),
            priority=job.priority,
            submitted_at_s=job.arrival_s,
            remaining_work=job.work if self.settings.steps_known else None,
            restart_s=self._restart_s(job),
            deadline_s=job.deadline_s,
        )
        return LiveJob(job, job.work, seen)

    def _restart_s(self, job: TraceJob) -> float:
        return self.settings.charge_s if job.restart_s is None else job.restart_s

    def _finish(self, entry: LiveJob, now: float) -> None:
        self._advance(entry, now)
        self._account(now)
        run = entry.seen.run
        assert run is not None
        self.busy_m -= run.placement.accelerators_m
        self.done[entry.job.id] = JobResult(
            entry.job.id,
            entry.job.arrival_s,
            now,
            entry.restarts,
            entry.lost_s,
            entry.first_start_s,
            entry.held_s,
            entry.cost if self.cluster.prices else None,
            entry.job.deadline_s,
            entry.seen.promised,
        )
        self.learner.ended(entry.job)
        del self.live[entry.seen.id]

    def _advance(self, entry: LiveJob, now: float) -> None:
        """Bring a running job up to date."""
        run = entry.seen.run
        if run is None:
            return
        begin = max(entry.updated_s, entry.progress_from_s)
        if now > begin:
            left = max(0.0, entry.left - entry.speed * (now - begin))
            self.shares.add(entry.job, entry.left - left)
            entry.left = left
        held = now - entry.updated_s
        if held > 0:
            place = run.placement
            rate = self.cluster.rates.get(place.accelerator, 1.0)
            used = held * rate * place.accelerators_m / 1000
            entry.held_s += held * place.accelerators_m / 1000
            price = self.cluster.prices.get(place.accelerator, 0.0)
            entry.cost += price * held * place.accelerators_m / 3.6e6
            entry.attained_s += used
            self.past.add(entry.job.tenant, entry.job.user, used, now)
            self.learner.observe(entry.job, place, held, max(0.0, now - begin), entry.speed)
        entry.updated_s = now

    def _account(self, now: float) -> None:
        self.busy_s += self.busy_m / 1000 * (now - self.busy_since)
        self.busy_since = now

    def _node(self, name: str, now: float, back: bool) -> None:
        """A node fails or returns; its jobs lose their progress since their last checkpoint."""
        nodes = tuple(replace(n, ready=back) if n.name == name else n for n in self.snapshot.nodes)
        self.snapshot = replace(self.snapshot, nodes=nodes)
        if back:
            if name in self.chance:
                self._fail_later(name, now)
            return
        self.node_failures += 1
        if name in self.chance:
            self._push(now + self.settings.repair_s, _BACK, name)
        self._account(now)
        for entry in self.live.values():
            run = entry.seen.run
            if run is not None and name in run.placement.nodes:
                self._advance(entry, now)
                again_s = self._unsaved_s(entry, run, now)
                entry.lost_s += again_s
                self.learner.repeats(entry.job, again_s * entry.speed)
                entry.left += again_s * entry.speed
                entry.end_key = 0
                self.busy_m -= run.placement.accelerators_m
                entry.seen = replace(entry.seen, run=None)

    def _fail_later(self, name: str, now: float) -> None:
        mean_s = self.settings.node_mtbf_s
        assert mean_s is not None
        self._push(now + self.chance[name].expovariate(1 / mean_s), _FAIL, name)

    def _unsaved_s(self, entry: LiveJob, run: Run, now: float) -> float:
        """Seconds of progress since the last checkpoint that the run made by itself."""
        saves = (now - run.started_at_s) // self.settings.checkpoint_s
        saved_at = run.started_at_s + saves * self.settings.checkpoint_s
        return max(0.0, now - max(saved_at, entry.progress_from_s))

    def _snapshot(self, now: float) -> Snapshot:
        for entry in self.live.values():
            self._advance(entry, now)
            entry.seen = self._seen(entry, now)
        jobs = [entry.seen for entry in self.live.values()]
        table = self.learner.current(entry.job for entry in self.live.values())
        tenants = self.past.known(self.snapshot.tenants)
        return replace(self.snapshot, tenants=tenants, jobs=tuple(jobs), table=table)

    def _seen(self, entry: LiveJob, now: float) -> Job:
        """The job as the policy sees it now; the same object if that has not changed."""
        seen, run = entry.seen, entry.seen.run
        left = self.learner.remaining(entry.job, entry.left) if self.settings.steps_known else None
        if run is not None:
            run = Run(run.placement, run.started_at_s, now, run.releasing)
        elif (seen.remaining_work, seen.attained_s) == (left, entry.attained_s):
            return seen
        return _changed(seen, run=run, remaining_work=left, attained_s=entry.attained_s)

    def _plan(self, now: float) -> None:
        self.snapshot = self._snapshot(now)
        begin = time.perf_counter()
        result, memo = self._decided(now)
        self.decisions.append(time.perf_counter() - begin)
        if self.settings.check:
            wrong = check_plan(self.snapshot, result)
            assert not wrong, wrong
        self._carry_out(result, now, memo)
        idle = [entry.job.tenant for entry in self.live.values() if entry.seen.run is None]
        waiting = len(idle) + self._others_wait()
        self.shares.planned(now, set(idle))
        self.series.append((now, waiting, self.busy_m / 1000))
        if self.settings.settle_s is not None and waiting and result.priced_at_s < now:
            self.full_at = min(self.full_at, now + self.settings.settle_s)
        if self.live:
            self._plan_later(min(self.full_at, now + self.settings.round_s))
        if self.progress is not None:
            self.progress(len(self.done), len(self.trace.jobs), now)
        if len(idle) == len(self.live) and idle and not self._something_comes():
            raise ValueError(f"nothing runs and {waiting} jobs of {self.trace.name} can never start")

    def _decided(self, now: float) -> tuple[Plan, object]:
        if self.settings.settle_s is not None and self.planned is not None and now < self.full_at:
            before, last, memo = self.planned
            return react(self.snapshot, last, Event.between(before, self.snapshot, now), memo)
        self.full_at = now + self.settings.round_s
        return self.decide(self.snapshot, self.deciding, now)

    def _something_comes(self) -> bool:
        return any(kind in (_ARRIVE, _BACK) for _, kind, _, _ in self.events)

    def _carry_out(self, result: Plan, now: float, memo: object) -> None:
        self.snapshot = replace(self.snapshot, reservations=result.reservations)
        left = applied(self.snapshot, result, now)
        after = {job.id: job for job in left.jobs}
        self.planned = (left, result, memo) if isinstance(memo, Memo) else None
        self._account(now)
        for name, entry in self.live.items():
            if after[name].promised and not entry.seen.promised:
                entry.seen = replace(entry.seen, promised=True)
        for action in result.actions:
            if action.job not in self.live:
                self._other(action, after[action.job], now)
                continue
            entry = self.live[action.job]
            before = entry.seen.run
            entry.seen = after[action.job]
            if before is not None:
                self.busy_m -= before.placement.accelerators_m
            entry.end_key = 0
            if entry.seen.run is not None:
                self._started(entry, entry.seen.run, now)

    def _others_wait(self) -> int:
        """How many jobs wait that are not of the trace."""
        return 0

    def _other(self, action: Action, job: Job, now: float) -> None:
        """Carry out an action on a job that is not of the trace."""
        raise KeyError(action.job)

    def _started(self, entry: LiveJob, run: Run, now: float) -> None:
        first = entry.first_start_s is None
        charge = 0.0 if first and not self.settings.charge_first else self._restart_s(entry.job)
        entry.lost_s += charge
        if first:
            entry.first_start_s = now
        else:
            entry.restarts += 1
        self.busy_m += run.placement.accelerators_m
        entry.progress_from_s = now + charge
        entry.updated_s = now
        self._progress(entry, run, entry.progress_from_s)

    def _change_phase(self, entry: LiveJob, now: float) -> None:
        """The job's next phase begins: it makes progress at another speed from now on."""
        self._advance(entry, now)
        run, job = entry.seen.run, entry.job
        assert run is not None
        begun = job.next_change(job.work - entry.left)
        entry.left = min(entry.left, job.work if begun is None else job.work - begun)
        self._progress(entry, run, now)

    def _progress(self, entry: LiveJob, run: Run, since: float) -> None:
        """Set the speed of a running job, and when it ends or its next phase begins."""
        job, place, done = entry.job, run.placement, entry.job.work - entry.left
        entry.speed = job.speed(place.accelerator, place.accelerators_m, len(set(place.nodes)), done)
        name = job.class_after(done)
        if name != entry.seen.workload_class:
            entry.seen = replace(entry.seen, workload_class=name)
        change = job.next_change(done)
        if change is None:
            entry.end_key = self._push(since + entry.left / entry.speed, _END, job.id)
        else:
            entry.end_key = self._push(since + (change - done) / entry.speed, _PHASE, job.id)
