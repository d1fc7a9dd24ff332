"""One cluster for training jobs and the replicas of a service: the planner decides on both, as in production.

The serving simulation (`serving_engine`) asks for replicas and gives them back; each is a job of kind serving in the snapshot
of the job simulation (`engine`), which the planner places, for which it stops or shrinks training, and which it never stops.
The service's tenant has a guarantee and a ceiling by type. A replica that takes the place of training starts `give_s` later:
for so long the job finishes its step and frees its accelerators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..model.plans import Action, ActionKind, Policy
from ..model.snapshot import Job, JobId, JobKind, Quota, Resources, Run, Snapshot, Tenant
from ..model.table import SCALING_EXPONENT
from ..planner import plan
from .engine import ClusterEngine, LiveJob, Settings
from .speeds import Learner, true_table
from .trace import Trace, TraceCluster, TraceJob

SERVICE = "serving/service"
TENANT = "serving"
DRAIN_S = 30.0
"""The default of `ModelService.spec.drainSeconds`, which is how soon lent capacity must be back."""


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """What the training jobs had of the cluster in some time."""

    work_h: float
    """Accelerator-hours of progress, at full size and speed 1."""
    held_h: float
    """Accelerator-hours held."""
    lost_h: float
    """Accelerator-hours of these without progress: restarts and resizes."""
    resized: int
    done: int
    waiting: int
    """At the end."""

    def to_json(self) -> dict[str, float]:
        """Numbers for people and programs."""
        return {
            "work_accelerator_h": round(self.work_h, 3),
            "held_accelerator_h": round(self.held_h, 3),
            "lost_share": round(self.lost_h / self.held_h, 5) if self.held_h else 0.0,
            "restarts_and_resizes": self.resized,
            "jobs_done": self.done,
            "jobs_waiting": self.waiting,
        }


class SharedCluster(ClusterEngine):
    """The cluster, from time 0 on; `serving_cluster.Places` of the service."""

    def __init__(
        self,
        trace: Trace,
        cluster: TraceCluster,
        policy: Policy,
        settings: Settings,
        guarantee: Mapping[str, int],
        give_s: float = 10.0,
    ) -> None:
        self.guarantee, self.give_s = guarantee, give_s
        self.replicas: dict[JobId, Job] = {}
        self._granted: list[tuple[str, float]] = []
        self._asked = 0
        self._lost_s = 0.0
        """Accelerator-seconds."""
        super().__init__(trace, cluster, policy, settings, Learner(true_table(trace, cluster)), None, plan)
        self.begin()

    def _empty(self) -> Snapshot:
        made = super()._empty()
        quotas = tuple(
            Quota(kind, 1000 * count, ceiling_m=1000 * count)
            for kind, count in sorted(self.guarantee.items())
        )
        return replace(made, tenants=(*made.tenants, Tenant(TENANT, quotas=quotas)))

    # -- what the service asks for -------------------------------------------------------------------

    def ask(self, pool: str, now_s: float) -> str:
        """One more replica is wanted."""
        self._asked += 1
        name = JobId(f"replica-{self._asked:06d}")
        self.replicas[name] = Job(
            name,
            name,
            TENANT,
            TENANT,
            kind=JobKind.SERVING,
            per_pod=Resources(1000),
            accelerators=(pool,),
            priority=500,
            preemptible=False,
            submitted_at_s=now_s,
            reclaim_deadline_s=DRAIN_S,
            service=SERVICE,
        )
        self._plan_later(now_s)
        return name

    def give_back(self, name: str, now_s: float) -> None:
        """A replica has left, or is not wanted any more."""
        del self.replicas[JobId(name)]
        self._granted = [row for row in self._granted if row[0] != name]
        self._plan_later(now_s)

    def advance(self, now_s: float) -> list[tuple[str, float]]:
        """Everything up to now; the replicas that were placed, and from when their places are free."""
        while self.events and self.events[0][0] <= now_s:
            self.step()
        granted, self._granted = self._granted, []
        return granted

    def failed(self, now_s: float) -> set[str]:
        """Replicas whose nodes are away."""
        away = {node.name for node in self.snapshot.nodes if not node.ready}
        if not away:
            return set()
        return {
            str(job.id)
            for job in self.replicas.values()
            if job.run is not None and not away.isdisjoint(job.run.placement.nodes)
        }

    def stock(self) -> dict[str, int]:
        """Accelerators by type: what the service is guaranteed, or what the nodes that are there have, if that is less."""
        there: Counter[str] = Counter()
        pools = {pool.name: pool.accelerator for pool in self.snapshot.pools}
        for node in self.snapshot.nodes:
            there[pools[node.pool]] += node.capacity.accelerators_m // 1000 * node.ready
        return {kind: min(count, there[kind]) for kind, count in self.guarantee.items()}

    def others_answer(self) -> bool:
        """Whether the operator hears from training."""
        away = {node.name for node in self.snapshot.nodes if not node.ready}
        runs = (entry.seen.run for entry in self.live.values())
        return any(run is not None and away.isdisjoint(run.placement.nodes) for run in runs)

    # -- what the planner sees and does --------------------------------------------------------------

    def _snapshot(self, now: float) -> Snapshot:
        made = super()._snapshot(now)
        return replace(made, jobs=(*made.jobs, *self.replicas.values()))

    def _others_wait(self) -> int:
        return sum(job.run is None for job in self.replicas.values())

    def _something_comes(self) -> bool:
        return True  # the service may give its places back

    def _other(self, action: Action, job: Job, now: float) -> None:
        self.replicas[job.id] = job
        if action.kind is ActionKind.START:
            self._granted.append((job.id, now + self.give_s if action.after else now))

    def _started(self, entry: LiveJob, run: Run, now: float) -> None:
        before_s = entry.lost_s
        super()._started(entry, run, now)
        self._lost_s += (entry.lost_s - before_s) * run.placement.accelerators_m / 1000

    # -- figures -------------------------------------------------------------------------------------

    def figures(self, now_s: float) -> TrainingFigures:
        """What training had until now."""
        self._account(now_s)
        sizes = {job.id: full_size(job) for job in self.trace.jobs}
        work_s = sum(self.jobs[name].work * sizes[name] for name in self.done)
        resized = sum(row.restarts for row in self.done.values())
        for entry in self.live.values():
            self._advance(entry, now_s)
            work_s += (entry.job.work - entry.left) * sizes[entry.job.id]
            resized += entry.restarts
        waiting = sum(entry.seen.run is None for entry in self.live.values())
        return TrainingFigures(
            work_s / 3600, self.busy_s / 3600, self._lost_s / 3600, resized, len(self.done), waiting
        )


def full_size(job: TraceJob) -> float:
    """Accelerators of a job at its largest size, at which its work takes `work` seconds at speed 1."""
    return (job.max_pods or job.pods) * job.per_pod_m / 1000


def elastic(trace: Trace) -> Trace:
    """The same jobs, each with two accelerators or more able to run on half of them (speed falls by the exponent that the
    performance table assumes)."""
    return replace(trace, jobs=tuple(_elastic(job) for job in trace.jobs))


def _elastic(job: TraceJob) -> TraceJob:
    count = int(full_size(job))
    if count < 2 or job.measured:
        return job
    least = -(-count // 2)
    slower = (least / count) ** SCALING_EXPONENT
    speeds = {kind: speed * slower for kind, speed in job.speeds.items()}
    return replace(job, pods=least, per_pod_m=1000, max_pods=count, speeds=speeds)


def window(
    trace: Trace,
    begin_s: float,
    length_s: float,
    backlog_s: float,
    largest: float,
    speeds: Mapping[str, float],
) -> Trace:
    """A part of a trace from time 0 on, with its speeds by type.

    Args:
        begin_s: where it begins, after the trace's first job.
        backlog_s: the jobs of so long before wait from the beginning.
        largest: larger jobs, by accelerators, are left out.
    """
    first = min((job.arrival_s for job in trace.jobs), default=0.0) + begin_s
    return replace(
        trace,
        jobs=tuple(
            replace(job, arrival_s=max(job.arrival_s - first, 0.0), speeds=speeds)
            for job in trace.jobs
            if -backlog_s <= job.arrival_s - first < length_s and full_size(job) <= largest
        ),
    )
