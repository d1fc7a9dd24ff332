"""Candidates: every way a job could run, as (value, resource vector, watts).

One candidate per pool, engine mode and number of pods, and per power cap where watts are limited (`capped.py`). Elastic
goodput, serving replicas and deadlines only add candidates or change a value; nothing else in the planner needs to know
(a power cap can be lifted while a job runs: `search/watts.py`). Where the table knows that a
gang is faster on fewer nodes, there is one candidate per number of nodes that makes a difference (`Candidate.nodes`):
each is worth the speed of the cell that it names, and is placed on no more nodes.

Jobs with the same request share what does not depend on their age: where they may run and how fast
(`SharedCandidates`). What remains per job is one factor, its weight.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..errors import SolverError
from ..model.plans import DeadlineShare, Objective, Policy
from ..model.snapshot import Job, JobId, JobKind, Placement, Pool, Snapshot
from ..model.table import TableView, named_nodes
from . import makespan
from .candidate import Candidate, Form, Options, SharedCandidates, on_nodes
from .capped import PowerCaps
from .draw import Draws
from .value import makespan_value, urgent_value, weight
from .ways import Way, per_pod_on, ways_of

NEARLY_FREE = 0.01
"""Objective cost: a pool without a price counts as this part of the dearest, so that free pools still differ
by speed."""


@dataclass(frozen=True, slots=True)
class Listed:
    """The list of jobs that the program of the makespan knows."""

    ends_s: float
    """Seconds until all of them are done."""
    last_s: float
    """When the last of them was submitted."""


class CandidateBuilder:
    """Builds the candidates of jobs at one moment (`at_s`, from which their ages count)."""

    def __init__(self, snapshot: Snapshot, table: TableView, policy: Policy, at_s: float) -> None:
        self._pools = sorted(snapshot.pools, key=lambda pool: pool.name)
        self._by_name = {pool.name: pool for pool in self._pools}
        self._table = table
        self._policy = policy
        self._at_s = at_s
        self.draws = Draws(snapshot, table)
        self._shared: dict[tuple[object, ...], SharedCandidates] = {}
        """By request; the workload class comes first in the key."""
        self._sized: dict[tuple[object, ...], tuple[Candidate, ...]] = {}
        """Sizes that are no candidates, per unit of weight: by request, pool, mode and pods."""
        self._differ_in_nodes = False
        """Whether some candidates differ in nodes only."""
        self._largest_m = _largest_m(snapshot)
        self._caps = PowerCaps(snapshot, self.draws, self._largest_m)
        self._by_tenant = self._differs_by_tenant()
        self._least_price = NEARLY_FREE * max((pool.price_per_hour for pool in self._pools), default=0.0)
        self._makespan = makespan.Solution({}, 0.0)
        self._time_shares: dict[JobId, tuple[float, dict[Form, float]]] = {}
        """Makespan: the best speed of each job that the program knows, and the part of its time on each candidate."""
        self._listed = Listed(0.0, 0.0)
        self.urgent: dict[JobId, DeadlineShare] = {}
        """Jobs whose deadlines need their shares now."""
        self.solver_error = ""
        """Why jobs are not valued by the makespan, although the policy asks for it."""

    def spread(self, jobs: Iterable[Job], capacity_m: Mapping[str, int]) -> None:
        """With the objective makespan, value jobs by the program of `makespan.py` from now on. Where that fails
        (`solver_error`), all jobs have their usual values."""
        if self._policy.objective is not Objective.MAKESPAN:
            return
        known = [j for j in jobs if j.remaining_work is not None and j.kind is JobKind.TRAINING]
        capacity = {kind: amount / 1000 for kind, amount in capacity_m.items() if amount > 0}
        try:
            self._makespan = makespan.solve(map(self._asked, known), capacity)
        except SolverError as error:
            self.solver_error = str(error)
        self._listed = Listed(self._makespan.ends_s, max((job.submitted_at_s for job in known), default=0.0))
        for job in known:
            part, shared = self._makespan.parts.get(job.id), self.shared(job)
            if part is not None:
                forms = (one.form for one in shared.candidates)
                own = dict(zip(forms, part.shares, strict=True))
                self._time_shares[job.id] = shared.best_speed, own

    def listed_with(self, job: Job) -> Listed | None:
        """The list of jobs that the objective makespan wants to have done, if this one is of it."""
        return self._listed if job.id in self._time_shares else None

    def _asked(self, job: Job) -> makespan.Asked:
        found = self.shared(job).candidates
        place = None if job.run is None else job.run.placement
        present = [
            i
            for i, c in enumerate(found)
            if place is not None
            and (c.pool, c.mode, c.pods, c.power_cap) == (place.pool, place.mode, place.pods, place.power_cap)
            and (not c.nodes or c.nodes >= len(set(place.nodes)))
        ]
        return makespan.Asked(
            job.id,
            job.remaining_work or 0.0,
            [c.accelerator for c in found],
            [c.accelerators_m / 1000 for c in found],
            [c.speed for c in found],
            min(present, key=lambda i: found[i].nodes or sys.maxsize) if present else None,
        )

    def _differs_by_tenant(self) -> bool:
        return self._table.differs_by_tenant or any(pool.tenants is not None for pool in self._pools)

    def follow(self, table: TableView) -> None:
        """Use another table from now on, which was built from the present one."""
        self._table = table
        self._by_tenant = self._differs_by_tenant()
        if table.changed:
            self._shared = {key: known for key, known in self._shared.items() if key[0] not in table.changed}
            self._sized = {key: known for key, known in self._sized.items() if key[0] not in table.changed}

    def follow_nodes(self, snapshot: Snapshot) -> bool:
        """Use the nodes of another snapshot from now on; False: gangs have other candidates there, as the largest node of
        a pool has another size, or jobs may run under a power cap in other pools, and a new builder is needed."""
        largest_m = _largest_m(snapshot)
        if self._differ_in_nodes and largest_m != self._largest_m:
            return False
        if not self._caps.alike(PowerCaps(snapshot, self.draws, largest_m)):
            return False
        self._largest_m = largest_m
        return True

    def of(self, job: Job) -> Options:
        """All candidates of the job."""
        shared = self.shared(job)
        scale = weight(job, shared.best_speed, self._policy, self._at_s)
        if job.id in self._time_shares:
            candidates = tuple(
                self._for_makespan(c, scale, job.id, shared.best_speed) for c in shared.candidates
            )
        else:
            candidates = tuple(_scaled(c, scale) for c in shared.candidates)
        if job.id in self.urgent:
            candidates = tuple(self._by_deadline(c, job) for c in candidates)
        return Options(job, candidates, scale, shared.best_speed, shared)

    def _for_makespan(self, c: Candidate, scale: float, job: JobId, best_speed: float) -> Candidate:
        """A candidate of a job that the program knows, if need be in another form: its work is worth the same in each.

        Args:
            best_speed: of this form.
        """
        known_speed, shares = self._time_shares[job]
        part = self._makespan.parts[job]
        if best_speed != known_speed:
            faster = best_speed / known_speed
            part = replace(part, value=part.value * faster, time=part.time / faster)
        share = shares.get(c.form, 0.0)
        value = makespan_value(c.value, scale, share, part, self._makespan.load)
        return replace(c, value=value)

    def _by_deadline(self, c: Candidate, job: Job) -> Candidate:
        return replace(c, value=c.value + urgent_value(c.speed, self.urgent[job.id]))

    def instance(self, option: Options, placement: Placement) -> Candidate | None:
        """The candidate that a placement is an instance of, of any size; None if the job could not be started
        like this today."""
        found = option.listed(placement)
        if found is None and option.job.min_pods < placement.pods < option.job.max_pods:
            nodes = len(set(placement.nodes))
            found = self.sized(
                option, placement.pool, placement.mode, placement.pods, nodes, placement.power_cap
            )
            if found is not None and found.per_pod != placement.per_pod:
                return None
        return found

    def for_nodes(self, option: Options, candidate: Candidate, nodes: tuple[str, ...]) -> Candidate:
        """A candidate on these nodes: worth what the job is worth on so many."""
        if not self._differ_in_nodes or candidate.pods == 1:
            return candidate
        found = self.sized(
            option, candidate.pool, candidate.mode, candidate.pods, len(set(nodes)), candidate.power_cap
        )
        return candidate if found is None or found.per_pod != candidate.per_pod else found

    def sized(
        self, option: Options, pool: str, mode: str, pods: int, nodes: int = 0, power_cap: float = 1.0
    ) -> Candidate | None:
        """The job with this many pods, be they a candidate or not; None: it could not run so.

        Args:
            nodes: different nodes that the pods stand on; 0: as few as make a difference.
        """
        wanted = (pool, mode, pods, power_cap)
        listed = [c for c in option.candidates if (c.pool, c.mode, c.pods, c.power_cap) == wanted]
        if listed:
            return on_nodes(listed, nodes)
        job = option.job
        key = (*self._key(job), pool, mode, pods)
        if key not in self._sized:
            self._sized[key] = self._size(job, option, pool, mode, pods)
        found = on_nodes((one for one in self._sized[key] if one.power_cap == power_cap), nodes)
        if found is None:
            return None
        if job.id in self._time_shares:
            scaled = self._for_makespan(found, option.weight, job.id, option.best_speed)
        else:
            scaled = _scaled(found, option.weight)
        return self._by_deadline(scaled, job) if job.id in self.urgent else scaled

    def _size(self, job: Job, option: Options, pool: str, mode: str, pods: int) -> tuple[Candidate, ...]:
        if mode not in job.modes:
            return ()
        own = [one for one in self._pools if one.name == pool]
        sized = replace(job, min_pods=pods, max_pods=pods, modes=(mode,))
        found, _ = ways_of(sized, own, self._table, self._largest_m, self._caps)
        return tuple(self._candidate(one, option.best_speed) for one in found)

    def _candidate(self, found: Way, best: float) -> Candidate:
        pool, mode, pods, per_pod, nodes, cap, estimate = found
        speed, watts = estimate.speed, estimate.watts
        value = self._value(pool, pods * per_pod.accelerators_m, speed / best)
        draw_w = self.draws.per_pod(pool.name, pool.key, per_pod.accelerators_m, watts)
        return Candidate(
            pool.name,
            pool.accelerator,
            mode,
            pods,
            per_pod,
            speed,
            value,
            watts,
            draw_w,
            nodes,
            pool.link,
            cap,
        )

    def least_speed(self, job: Job, candidate: Candidate) -> float:
        """The lower bound of the candidate's speed: what may be promised."""
        pool = self._by_name[candidate.pool]
        size = candidate.pods * per_pod_on(job, pool, None).accelerators_m
        nodes = named_nodes(size, candidate.nodes or candidate.pods)
        found = self._table.estimate(
            job.workload_class, pool.key, candidate.mode, size, job.tenant, candidate.power_cap, nodes
        )
        return candidate.speed if found is None else found.low

    def shared(self, job: Job) -> SharedCandidates:
        """What the job has in common with others that make the same request."""
        key = self._key(job)
        known = self._shared.get(key)
        if known is None:
            known = self._shared[key] = self._build(job)
        return known

    def _key(self, job: Job) -> tuple[object, ...]:
        """What candidates depend on besides the job's weight."""
        return (
            job.workload_class,
            job.min_pods,
            job.max_pods,
            job.per_pod,
            job.more_host_memory_mib,
            job.most_devices,
            job.accelerators,
            job.pools,
            job.modes,
            job.tenant if self._by_tenant else "",
            self._caps.allow(job),
            job.power_cap,
        )

    def _build(self, job: Job) -> SharedCandidates:
        found, excluded = ways_of(job, self._pools, self._table, self._largest_m, self._caps)
        best = max((estimate.speed for *_, estimate in found), default=0.0)
        candidates = [self._candidate(one, best) for one in found]
        self._differ_in_nodes = self._differ_in_nodes or any(c.nodes for c in candidates)
        candidates.sort(
            key=lambda c: (
                -c.value,
                c.accelerators_m,
                c.pool,
                job.modes.index(c.mode),
                c.nodes,
                -c.power_cap,
            )
        )
        sizes = tuple(dict.fromkeys((c.accelerator, c.accelerators_m) for c in candidates))
        return SharedCandidates(tuple(candidates), best, excluded, sizes)

    def _value(self, pool: Pool, accelerators_m: int, relative: float) -> float:
        """Speed relative to the job's best; with the objective cost, divided by the money per hour."""
        price = max(pool.price_per_hour, self._least_price)
        if self._policy.objective is Objective.COST and price > 0:
            return relative / max(price * accelerators_m / 1000, 1e-9)
        return relative


def _scaled(c: Candidate, weight: float) -> Candidate:
    value = weight * c.value
    return Candidate(
        c.pool,
        c.accelerator,
        c.mode,
        c.pods,
        c.per_pod,
        c.speed,
        value,
        c.watts,
        c.draw_w,
        c.nodes,
        c.link,
        c.power_cap,
    )


def _largest_m(snapshot: Snapshot) -> dict[str, int]:
    """Accelerators of each pool's largest node."""
    cpu = {pool.name: pool for pool in snapshot.pools if pool.is_cpu}
    found: dict[str, int] = {}
    for node in snapshot.nodes:
        own = node.capacity
        size_m = cpu[node.pool].cpu_accelerators_m(own.cpu_m) if node.pool in cpu else own.accelerators_m
        found[node.pool] = max(found.get(node.pool, 0), size_m)
    return found
