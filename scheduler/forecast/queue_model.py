"""One possible future of a queue, simulated by counts: when would a job start?

A light model of the planner, thousands of times faster and close to it: nodes are numbers of free
accelerators, jobs are sizes. It keeps the planner's order, because the order decides who overtakes whom:

    next tenant     the one whose next job lies inside its fair share (or guarantee) before those that borrow,
                    then the one that holds least for its weight
    next job        highest priority, serving first, then most value per accelerator (small and old)
    where           one pod: the fullest node that has room; a gang: all pods at once or not at all
    backfill        what does not fit is passed over
    preemption      a job inside its tenant's fair share stops the smallest jobs of tenants above theirs

Fair shares are computed again whenever demand changes, so jobs that are submitted later and overtake are in
the model. Left out: CPU and memory, topology, moves to better types, and preemption inside a tenant.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from .queue_types import EPS, Arrival, QueuedJob, QueueRequest, QueueStart, RunOption, cheapest, fair_shares

PATIENCE_S = 60.0
"""A large request for which no victims were found is tried again after this time (it seldom finds any)."""
LARGE_M = 4000


class QueueModel:
    """One simulated future."""

    def __init__(self, start: QueueStart, jobs: Sequence[QueuedJob], target: QueuedJob) -> None:
        self.start = start
        self.rules = start.rules
        self.target = target
        self.free = [list(row) for row in start.free]
        self.buckets: list[dict[int, dict[int, None]]] = []
        for row in self.free:
            buckets: dict[int, dict[int, None]] = {}
            for node, amount in enumerate(row):
                if amount >= 0:
                    buckets.setdefault(amount, {})[node] = None
            self.buckets.append(buckets)
        count = len(start.shares)
        self.units = [0.0] * count
        self.demand = [0.0] * count
        self.entitled = [0.0] * count
        self.stale = True
        self.queues: list[dict[QueueRequest, deque[QueuedJob]]] = [{} for _ in range(count)]
        self.running: list[list[tuple[float, float, int, QueuedJob]]] = [[] for _ in range(count)]
        """(units, submitted, number, job) by tenant, in the order in which they would be stopped."""
        self.fits: dict[RunOption, bool] = {}
        """Whether an option fits, cached until nodes change."""
        self.ends: list[tuple[float, int, QueuedJob]] = []
        self.counter = 0
        self.jobs = 0
        self.disturbed: deque[float] = deque()
        """When jobs were stopped lately."""
        self.retry_at_s: dict[tuple[int, QueueRequest], float] = {}
        """When to look for victims again."""
        for job in jobs:
            self._add(job)
        for queues in self.queues:
            for request, queue in queues.items():
                queues[request] = deque(sorted(queue, key=lambda item: item.submitted_at_s))
        heapify(self.ends)

    def _add(self, job: QueuedJob) -> None:
        self.jobs += 1
        self.demand[job.tenant] += job.request.options[0].units
        if job.option is None:
            self.queues[job.tenant].setdefault(job.request, deque()).append(job)
        else:
            job.ends_at_s = self.start.now + job.left_s
            self._enter(job, job.option)
            self.ends.append((job.ends_at_s, self.counter, job))

    def _enter(self, job: QueuedJob, option: RunOption) -> None:
        self.counter += 1
        job.number = self.counter
        self.units[job.tenant] += option.units
        insort(self.running[job.tenant], (option.units, job.submitted_at_s, job.number, job))

    def wait_s(self, arrivals: Iterator[Arrival], horizon_s: float) -> float:
        """Seconds until the target starts; at most the horizon."""
        begin = now = self.start.now
        limit = begin + horizon_s
        coming = next(arrivals, None)
        self._start_waiting(now)
        while self.target.option is None:
            at = self.ends[0][0] if self.ends else limit
            if coming is not None and coming[0] < at:
                now = coming[0]
                if now >= limit:
                    return horizon_s
                self._submit(coming)
                coming = next(arrivals, None)
            else:
                now = at
                if now >= limit:
                    return horizon_s
                self._end(heappop(self.ends))
            self._start_waiting(now)
        return now - begin

    def _submit(self, arrival: Arrival) -> QueuedJob:
        at, tenant, request, seconds = arrival
        item = QueuedJob(tenant, request, at, seconds)
        self.jobs += 1
        self._demand(tenant, request.options[0].units)
        self.queues[tenant].setdefault(request, deque()).append(item)
        return item

    def _end(self, event: tuple[float, int, QueuedJob]) -> None:
        at, _, job = event
        if job.option is not None and job.ends_at_s == at:
            self._ended(job, at)

    def _ended(self, job: QueuedJob, now: float) -> None:
        self._leave(job)
        self.jobs -= 1
        self._demand(job.tenant, -job.request.options[0].units)

    def _demand(self, tenant: int, more: float) -> None:
        before = self.demand[tenant]
        self.demand[tenant] = before + more
        # A tenant that wants more than its share before and after changes no share.
        if min(before, before + more) <= self.entitled[tenant] + EPS:
            self.stale = True

    def _leave(self, job: QueuedJob) -> None:
        option = job.option
        assert option is not None
        for node in job.nodes:
            if node >= 0 and self.free[option.pool][node] >= 0:
                self._file(option.pool, node, option.per_pod_m)
        self.units[job.tenant] -= option.units
        row = self.running[job.tenant]
        del row[bisect_left(row, (option.units, job.submitted_at_s, job.number))]
        job.option = None

    def _file(self, pool: int, node: int, change: int) -> None:
        self.fits.clear()
        row, buckets = self.free[pool], self.buckets[pool]
        old = row[node]
        bucket = buckets[old]
        del bucket[node]
        if not bucket:
            del buckets[old]
        row[node] = old + change
        buckets.setdefault(old + change, {})[node] = None

    def _run(self, job: QueuedJob, option: RunOption, nodes: tuple[int, ...], now: float) -> None:
        for node in nodes:
            self._file(option.pool, node, -option.per_pod_m)
        job.option, job.nodes, job.started_at_s = option, nodes, now
        job.ends_at_s = now + job.left_s
        self._enter(job, option)
        heappush(self.ends, (job.ends_at_s, self.counter, job))

    # Where

    def _nodes(self, option: RunOption) -> tuple[int, ...]:
        """Nodes for all pods of an option that fits."""
        buckets = self.buckets[option.pool]
        ask = option.per_pod_m
        if option.pods == 1:
            return (next(iter(buckets[min(size for size in buckets if size >= ask)])),)
        found: list[int] = []
        for size in sorted(buckets, reverse=True):
            if size < ask:
                break
            for node in buckets[size]:
                found.extend([node] * min(size // ask, option.pods - len(found)))
                if len(found) == option.pods:
                    return tuple(found)
        raise AssertionError("a place that does not fit")

    # Who is next

    def _start_waiting(self, now: float) -> None:
        if self.stale:
            self.stale = False
            self.entitled = fair_shares(self.demand, self.start.shares, self.start.capacity)
        while self.target.option is None:
            fitting = self._fitting()
            best: tuple[bool, float, int] | None = None
            chosen: QueueRequest | None = None
            if fitting:
                for tenant, queues in enumerate(self.queues):
                    turn = self._turn(tenant, queues, fitting, now) if queues else None
                    if turn is not None:
                        key = (turn[0], self.units[tenant] / self.start.shares[tenant].weight, tenant)
                        if best is None or key < best:
                            best, chosen = key, turn[1]
            if best is not None and chosen is not None:
                self._start_next(best[2], chosen, now)
            elif not self._reclaim(now):
                return

    def _fitting(self) -> set[QueueRequest]:
        """Requests that wait and for which there is room."""
        found = set()
        for queues in self.queues:
            for request in queues:
                for option in request.options:
                    if self._fits(option):
                        found.add(request)
                        break
        return found

    def _turn(
        self,
        tenant: int,
        queues: dict[QueueRequest, deque[QueuedJob]],
        fitting: set[QueueRequest],
        now: float,
    ) -> tuple[bool, QueueRequest] | None:
        """The tenant's next job that fits, and whether it borrows."""
        best: tuple[bool, int, bool, float] | None = None
        result: tuple[bool, QueueRequest] | None = None
        for request, queue in queues.items():
            if request not in fitting or self._best_option(tenant, request) is None:
                continue
            borrows = self.units[tenant] + request.options[0].units > self.entitled[tenant] + EPS
            age = 1.0 + (now - queue[0].submitted_at_s) / self.rules.lateness_s
            key = (borrows, -request.priority, not request.serving, -age / request.accelerators_m)
            if best is None or key < best:
                best, result = key, (borrows, request)
        return result

    def _fits(self, option: RunOption) -> bool:
        known = self.fits.get(option)
        if known is None:
            known = self.fits[option] = self._room(option)
        return known

    def _room(self, option: RunOption) -> bool:
        ask, pods, room = option.per_pod_m, option.pods, 0
        for size, nodes in self.buckets[option.pool].items():
            if size >= ask:
                room += size // ask * len(nodes)
                if room >= pods:
                    return True
        return False

    def _best_option(self, tenant: int, request: QueueRequest) -> RunOption | None:
        """The best option that fits and that the tenant's ceiling allows."""
        left = self.start.shares[tenant].limit + EPS - self.units[tenant]
        return next((p for p in request.options if p.units <= left and self._fits(p)), None)

    def _start_next(self, tenant: int, request: QueueRequest, now: float) -> None:
        option = self._best_option(tenant, request)
        assert option is not None
        self._run(self._take(tenant, request), option, self._nodes(option), now)

    def _take(self, tenant: int, request: QueueRequest) -> QueuedJob:
        queue = self.queues[tenant][request]
        job = queue.popleft()
        if not queue:
            del self.queues[tenant][request]
        return job

    # Preemption

    def _reclaim(self, now: float) -> bool:
        """Start one job inside its tenant's fair share in the place of others' borrowed ones."""
        wanted = self._entitled_requests(now)
        if not wanted or not self._can_disrupt(now):
            return False
        victims: dict[int, dict[int, list[QueuedJob]]] = {}
        hopeless: set[RunOption] = set()
        for tenant, request in wanted:
            option = request.options[0]
            if option in hopeless:
                continue
            if option.pool not in victims:
                victims[option.pool] = self._victims(option.pool, now)
            chosen = self._cheapest(victims[option.pool], option)
            if chosen is None:
                hopeless.add(option)
                if option.per_pod_m * option.pods >= LARGE_M:
                    self.retry_at_s[tenant, request] = now + PATIENCE_S
                continue
            for job in chosen:
                self._stop(job, now)
            if self._fits(option):
                self._run(self._take(tenant, request), option, self._nodes(option), now)
            return True
        return False

    def _entitled_requests(self, now: float) -> list[tuple[int, QueueRequest]]:
        """What waits inside its tenant's fair share."""
        for units, entitled, jobs in zip(self.units, self.entitled, self.running, strict=True):
            if jobs and jobs[0][0] <= units - entitled + EPS:
                break
        else:
            return []
        found = []
        for tenant, queues in enumerate(self.queues):
            room = self.entitled[tenant] + EPS - self.units[tenant]
            for request in queues:
                option = request.options[0]
                if option.units <= room and self.retry_at_s.get((tenant, request), 0.0) <= now:
                    found.append((tenant, request))
        return found

    def _can_disrupt(self, now: float) -> bool:
        while self.disturbed and self.disturbed[0] <= now - self.rules.min_run_s:
            self.disturbed.popleft()
        return len(self.disturbed) < max(self.rules.min_disruption_budget, self.rules.churn * self.jobs)

    def _victims(self, pool: int, now: float) -> dict[int, list[QueuedJob]]:
        """Jobs that may be stopped, by node: of tenants above their share, down to it, smallest first."""
        found: dict[int, list[QueuedJob]] = {}
        settled, most = now - self.rules.min_run_s, self.rules.max_preemptions
        for other, jobs in enumerate(self.running):
            spare = self.units[other] - self.entitled[other] + EPS
            if spare <= EPS:
                continue
            for units, _, _, job in jobs:
                if units > spare:
                    break
                if job.started_at_s > settled or not job.preemptible or job.preemptions >= most:
                    continue
                if job.option is None or job.option.pool != pool:
                    continue
                spare -= units
                for node in set(job.nodes):
                    if node >= 0:
                        found.setdefault(node, []).append(job)
        return found

    def _cheapest(self, victims: dict[int, list[QueuedJob]], option: RunOption) -> list[QueuedJob] | None:
        """Whom to stop for this option; None: all together would not be enough."""
        row, ask, most = self.free[option.pool], option.per_pod_m, 0
        for node, jobs in victims.items():
            amount = row[node]
            for job in jobs:
                assert job.option is not None
                amount += job.option.per_pod_m * (1 if len(job.nodes) == 1 else job.nodes.count(node))
            most += amount // ask
            if most >= option.pods:
                return cheapest(row, victims, option)
        most += sum(amount // ask for node, amount in enumerate(row) if amount >= ask and node not in victims)
        return cheapest(row, victims, option) if most >= option.pods else None

    def _stop(self, job: QueuedJob, now: float) -> None:
        job.left_s = job.ends_at_s - now + self.rules.restart_s
        job.preemptions += 1
        self._leave(job)
        self.disturbed.append(now)
        self._requeue(job)

    def _requeue(self, job: QueuedJob) -> None:
        queue = self.queues[job.tenant].setdefault(job.request, deque())
        at = 0
        while at < len(queue) and queue[at].submitted_at_s <= job.submitted_at_s:
            at += 1
        queue.insert(at, job)
