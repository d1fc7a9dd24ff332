"""From a snapshot to the queue that futures are simulated from: free nodes, shares, requests and jobs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from random import Random

import numpy as np
from numpy.typing import NDArray

from ..model.plans import Policy
from ..model.snapshot import Job, JobId, JobKind, Pool, Resources, Snapshot, Tenant
from ..model.table import TableView
from ..placement.open_nodes import why_closed
from ..placement.pool import request
from .history import History, Lengths
from .queue_model import QueueModel
from .queue_types import Arrival, QueuedJob, QueueRequest, QueueStart, Rules, RunOption, Share
from .watts import carried

Floats = NDArray[np.float64]

SHORTEST_S, LONGEST_S = 0.5 * 86400.0, 14 * 86400.0
"""Bounds on the stretch of the past that stands for future submissions."""
LEAST_S = 6 * 3600.0
"""A shorter record of submissions is not used."""


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A live job, and what is not random about it."""

    job: Job
    tenant: int
    request: QueueRequest
    size_m: int
    ran_s: float
    option: RunOption | None
    nodes: tuple[int, ...]


class Queue:
    """The queue of a snapshot, ready to be simulated many times."""

    def __init__(self, snapshot: Snapshot, policy: Policy, now: float, history: History) -> None:
        self.now = now
        self.history = history
        self.pools = sorted(snapshot.pools, key=lambda pool: pool.name)
        self._pool = {pool.name: i for i, pool in enumerate(self.pools)}
        self._table = TableView(snapshot.table)
        snapshot = carried(snapshot, self._table)
        self._rate = [self._table.rate(pool.accelerator) / 1000 for pool in self.pools]
        self._tenants = {tenant.name: i for i, tenant in enumerate(_tenants(snapshot))}
        self._requests: dict[tuple[object, ...], QueueRequest] = {}
        self._shapes: dict[tuple[int, int, int, float], RunOption] = {}
        """Equal options as one object: what is computed for one then holds for all."""
        nodes = self._free(snapshot)
        self.live: list[LiveJob] = []
        for job in sorted(snapshot.jobs, key=lambda job: job.id):
            found = self._live_job(job, now, nodes)
            if found is not None:
                self.live.append(found)
        self.lengths = Lengths(
            history, ((k.job.tenant, k.size_m, k.ran_s) for k in self.live if k.option is not None), now
        )
        self.start = QueueStart(
            now,
            tuple(tuple(row) for row in self._rows),
            sum(self._capacity),
            tuple(self._share(tenant) for tenant in _tenants(snapshot)),
            Rules(
                policy.unknown_lateness_s,
                policy.min_run_s,
                policy.max_preemptions,
                policy.churn,
                policy.least_disruptions,
                max((job.restart_s for job in snapshot.jobs), default=0.0),
            ),
        )
        self._live_submissions = self._submissions()

    def _free(self, snapshot: Snapshot) -> dict[str, tuple[int, int]]:
        """Free accelerators per node without what runs; returns the index of each node."""
        index: dict[str, tuple[int, int]] = {}
        self._rows: list[list[int]] = [[] for _ in self.pools]
        self._capacity = [0.0] * len(self.pools)
        for node in sorted(snapshot.nodes, key=lambda node: node.name):
            p = self._pool[node.pool]
            pool = self.pools[p]
            able = not why_closed(node, pool.tolerations)
            free = node.capacity - pool.reserved
            amount = free.cpu_m if pool.is_cpu else free.accelerators_m
            index[node.name] = (p, len(self._rows[p]))
            self._rows[p].append(max(0, amount) if able else -1)
            if able:
                devices_m = pool.cpu_accelerators_m(amount) if pool.is_cpu else amount
                self._capacity[p] += max(0, devices_m) * self._rate[p]
        return index

    def _live_job(self, job: Job, now: float, nodes: dict[str, tuple[int, int]]) -> LiveJob | None:
        tenant = self._tenants.get(job.tenant)
        if tenant is None:
            return None
        asked = self.request(job)
        size_m = max(1, job.min_pods * job.per_pod.accelerators_m)
        ran_s = job.attained_s / (size_m / 1000)
        run = job.run
        if run is None or run.releasing:
            return (
                None
                if asked is None or run is not None
                else LiveJob(job, tenant, asked, size_m, ran_s, None, ())
            )
        ran_s = max(ran_s, now - run.started_at_s)
        p = self._pool.get(run.placement.pool)
        if p is None:
            return None
        per_pod_m = self._per_pod(run.placement.per_pod.accelerators_m, run.placement.per_pod.cpu_m, p)
        option = RunOption(p, per_pod_m, run.placement.pods, run.placement.accelerators_m * self._rate[p])
        held = [
            nodes[name][1] if name in nodes and nodes[name][0] == p else -1 for name in run.placement.nodes
        ]
        for node in held:
            if node >= 0 and self._rows[p][node] >= 0:
                # Running jobs count in full, even where they exceed the node's capacity.
                self._rows[p][node] = max(0, self._rows[p][node] - per_pod_m)
        return LiveJob(
            job, tenant, asked or QueueRequest((option,), size_m), size_m, ran_s, option, tuple(held)
        )

    def _per_pod(self, accelerators_m: int, cpu_m: int, p: int) -> int:
        pool = self.pools[p]
        if pool.is_cpu:
            return cpu_m or -(-accelerators_m * pool.unit_m // 1000)
        return (
            accelerators_m if pool.shareable and accelerators_m < 1000 else -(-accelerators_m // 1000) * 1000
        )

    def request(self, job: Job) -> QueueRequest | None:
        """Where a job may run, fastest first; None: nowhere."""
        key = (
            job.tenant, job.kind, job.workload_class, job.min_pods, job.per_pod, job.most_devices,
            job.accelerators, job.pools, job.modes, job.priority,
        )  # fmt: skip
        if key not in self._requests:
            options = tuple(option for _, option in sorted(self._places(job), key=lambda item: item[0]))
            size_m = max(1, job.min_pods * job.per_pod.accelerators_m)
            serving = job.kind is JobKind.SERVING
            self._requests[key] = QueueRequest(options, size_m, job.priority, serving)
        found = self._requests[key]
        return found if found.options else None

    def _places(self, job: Job) -> Iterator[tuple[tuple[float, int], RunOption]]:
        for p, pool in enumerate(self.pools):
            if not _allowed(job, pool):
                continue
            per_pod_m = self._per_pod(job.per_pod.accelerators_m, request(job.per_pod, True)[1], p)
            size_m = job.min_pods * per_pod_m
            units_m = pool.cpu_accelerators_m(size_m) if pool.is_cpu else size_m
            estimates = [
                self._table.estimate(job.workload_class, pool.key, mode, units_m, job.tenant)
                for mode in job.modes
            ]
            speed = max((e.speed for e in estimates if e is not None), default=0.0)
            if speed > 0 and any(amount >= 0 for amount in self._rows[p]):
                shape = p, per_pod_m, job.min_pods, units_m * self._rate[p]
                if shape not in self._shapes:
                    self._shapes[shape] = RunOption(*shape)
                yield (-speed, p), self._shapes[shape]

    def _share(self, tenant: Tenant) -> Share:
        limit, floor = math.inf, 0.0
        for quota in tenant.quotas:
            if quota.accelerator == "*":
                rate = 1 / 1000
            else:
                rates = [
                    self._rate[i] for i, p in enumerate(self.pools) if p.accelerator == quota.accelerator
                ]
                rate = rates[0] if rates else 0.0
            most = math.inf if quota.ceiling_m is None else quota.ceiling_m
            if quota.borrowable_m is not None:
                most = min(most, quota.guaranteed_m + quota.borrowable_m)
            floor += quota.guaranteed_m * rate
            if quota.accelerator == "*" or len(self.pools) == 1:
                limit = min(limit, most * rate)
        return Share(max(tenant.weight, 1e-9), floor, limit)

    # Draws

    def _submissions(self) -> list[tuple[float, int, LiveJob]]:
        """Live jobs as part of the record of submissions."""
        return sorted(
            (k.job.submitted_at_s, i, k) for i, k in enumerate(self.live) if k.job.submitted_at_s <= self.now
        )

    def simulate(self, job: JobId, futures: int, seed: int, horizon_s: float) -> list[float]:
        """Seconds until the job starts, for each future."""
        draws = self._draws(np.random.default_rng([seed & 0xFFFFFFFF, futures]), futures)
        left = np.stack(
            [self.lengths.left_s(k.job.tenant, k.size_m, k.ran_s, draws[i]) for i, k in enumerate(self.live)]
        )
        columns = left.T.tolist()
        return [
            self._future(job, columns[number], Random(f"{seed}/{number}"), horizon_s)
            for number in range(futures)
        ]

    def _draws(self, random: np.random.Generator, futures: int) -> Floats:
        """Uniform draws by job and future, correlated within a tenant and size as much as lengths are."""
        own = random.standard_normal((len(self.live), futures))
        common: dict[tuple[str, int], tuple[float, Floats]] = {}
        for i, k in enumerate(self.live):
            group = (k.job.tenant, k.size_m)
            if group not in common:
                common[group] = self.history.length_correlation(*group), random.standard_normal(futures)
            alike, shared = common[group]
            own[i] = math.sqrt(alike) * shared + math.sqrt(1 - alike) * own[i]
        uniform = 0.5 * (1 - np.array([math.erf(x / math.sqrt(2)) for x in own.ravel().tolist()]))
        return np.clip(uniform, 1e-9, 1.0).reshape(own.shape)

    def _future(self, job: JobId, left: list[float], random: Random, horizon_s: float) -> float:
        items: list[QueuedJob] = []
        target: QueuedJob | None = None
        for k, seconds in zip(self.live, left, strict=True):
            started = 0.0 if k.job.run is None else k.job.run.started_at_s
            item = QueuedJob(
                k.tenant, k.request, k.job.submitted_at_s, seconds, k.option, k.nodes, started,
                k.job.preemptions, k.job.preemptible,
            )  # fmt: skip
            items.append(item)
            if k.job.id == job:
                target = item
        assert target is not None
        return QueueModel(self.start, items, target).wait_s(self._arrivals(job, left, random), horizon_s)

    def _arrivals(self, job: JobId, left: Sequence[float], random: Random) -> Iterator[Arrival]:
        """A stretch of the past, repeated from now on."""
        past = self.history.submissions
        oldest = min(
            past[0][0] if past else self.now,
            self._live_submissions[0][0] if self._live_submissions else self.now,
        )
        span = math.exp(random.uniform(math.log(SHORTEST_S), math.log(LONGEST_S)))
        span = min(span, self.now - oldest)
        if span < LEAST_S:
            return
        offset, quiet = span, True
        while True:
            for at, tenant, asked, seconds in merge(
                self._past(self.now - span),
                self._present(self.now - span, job, left),
                key=lambda item: item[0],
            ):
                quiet = False
                yield at + offset, tenant, asked, seconds
            if quiet:
                return  # nothing was submitted in that stretch
            offset += span

    def _past(self, since: float) -> Iterator[Arrival]:
        for at, tenant, size_m, pods, seconds in self.history.since(since):
            if at >= self.now:
                return
            option = self._like(tenant, size_m, pods)
            if option is not None:
                yield at, option[0], option[1], seconds

    def _present(self, since: float, but: JobId, left: Sequence[float]) -> Iterator[Arrival]:
        for at, i, k in self._live_submissions:
            if at >= since and k.job.id != but:
                yield at, k.tenant, k.request, k.ran_s + left[i]

    def _like(self, name: str, size_m: int, pods: int) -> tuple[int, QueueRequest] | None:
        tenant = self._tenants.get(name)
        if tenant is None:
            return None
        key = (name, size_m, pods)
        if key not in self._requests:
            job = Job(
                JobId(""),
                "",
                "",
                name,
                min_pods=pods,
                max_pods=pods,
                per_pod=Resources(size_m // max(pods, 1)),
            )
            self._requests[key] = QueueRequest(
                tuple(option for _, option in sorted(self._places(job), key=lambda item: item[0])), size_m
            )
        found = self._requests[key]
        return (tenant, found) if found.options else None


def _tenants(snapshot: Snapshot) -> list[Tenant]:
    return sorted(snapshot.tenants, key=lambda tenant: tenant.name)


def _allowed(job: Job, pool: Pool) -> bool:
    if (job.pools and pool.name not in job.pools) or (
        job.accelerators and pool.accelerator not in job.accelerators
    ):
        return False
    if (pool.tenants is not None and job.tenant not in pool.tenants) or not job.uses_all(pool):
        return False
    return job.per_pod.accelerators_m > 0 or pool.is_cpu
