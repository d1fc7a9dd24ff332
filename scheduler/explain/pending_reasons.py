"""Why a job waits, and the smallest changes that would start it.

A record is made from the state at the end of the round and carries the round's id (`records.py`), so it is
never out of date. `sentences.py` renders it for people.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from ..candidates.candidate import Candidate
from ..candidates.ways import nearest_memory
from ..fairness.quota import Right
from ..model.plans import Change, Closed, Extent, Holder, WaitCode, WaitingRecord
from ..model.snapshot import Job
from ..placement.feeds import EMPTY, Lack
from ..placement.pool import request
from ..search.round import Round
from ..search.state import Assignment, RankedCandidate
from .suggestions import Suggestions

_Key = tuple[object, ...]


def _smallest(row: RankedCandidate) -> tuple[int, float, str, str]:
    candidate = row.candidate
    return candidate.accelerators_m, -row.profit, candidate.pool, candidate.mode


def _smaller(one: Candidate, other: Candidate) -> bool:
    """Whether it requests fewer accelerators; if as many: is in the pool with the later name."""
    return (-one.accelerators_m, one.pool) > (-other.accelerators_m, other.pool)


def _least_drawn(rows: list[RankedCandidate], candidate: Candidate) -> Candidate:
    """The same place under the lowest power cap that is known for it."""
    where = (candidate.pool, candidate.mode, candidate.pods, candidate.per_pod)
    same = [
        row.candidate
        for row in rows
        if (row.candidate.pool, row.candidate.mode, row.candidate.pods, row.candidate.per_pod) == where
    ]
    return min(same, key=lambda one: one.power_cap) if any(one.power_cap < 1 for one in same) else candidate


class PendingReasons:
    """Makes the records of one round; equal requests of one tenant share one."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.suggestions = Suggestions(round_)
        self._cache: dict[_Key, WaitingRecord] = {}
        self._holders: dict[str, tuple[Holder, ...]] = {}
        self._free: dict[str, int] = {}
        self._empty: dict[int, int] = {}
        """Pods that would fit if none of our jobs ran, by shape."""
        self._refusals: dict[tuple[str, str, int], bool] = {}
        self._highest: dict[str, dict[str, int]] = {}
        """The highest priority of the running jobs, by tenant and accelerator."""

    def simple(self, assignment: Assignment, code: WaitCode) -> WaitingRecord:
        """The record of a job whose place waits for jobs that are being stopped: itself, or others."""
        candidate, tenant = assignment.candidate, assignment.job.tenant
        accelerator = candidate.accelerator if candidate is not None else "*"
        if candidate is None and assignment.job.run is not None:
            accelerator = assignment.job.run.placement.accelerator
        requested = 0 if candidate is None else candidate.accelerators_m
        key = (code, tenant, accelerator, requested)
        if key not in self._cache:
            self._cache[key] = WaitingRecord(
                job=assignment.job.id,
                code=code,
                resource=accelerator,
                tenant=tenant,
                requested=requested,
                allocated=self.round.holdings.held(tenant, accelerator),
                holders=self.holders(accelerator),
            )
        return self._cache[key]

    def record(self, assignment: Assignment) -> WaitingRecord:
        job = assignment.job
        key = (
            job.tenant,
            self.round.priority(job),
            job.kind,
            id(assignment.option.shared),  # stands for all that candidates depend on
            job.node_selector,
            job.required_domain,
        )
        if key not in self._cache:
            self._cache[key] = self._make(assignment)
        return self._cache[key]

    def offer(self, assignment: Assignment, resource: str) -> float:
        """The most that the job offers for an accelerator-hour of this type, or for a watt-hour ("watts")."""
        most = 0.0
        for candidate in assignment.option.candidates:
            if resource == "watts" and candidate.draw_w:
                most = max(most, candidate.value / (candidate.pods * candidate.draw_w))
            elif candidate.accelerator == resource:
                most = max(most, candidate.value * 1000 / max(candidate.accelerators_m, 1))
        return most

    def _make(self, assignment: Assignment) -> WaitingRecord:
        if not assignment.option.candidates:
            return self._impossible(assignment)
        job, rows = assignment.job, self.round.ranked(assignment)
        candidate = self._without_others(job, rows)
        if candidate is not None:
            return self._contended(assignment, candidate)
        if job.tenant in self.round.holdings.tenants and not any(
            self._unpowered(job, row.candidate, closed=True) >= row.candidate.pods for row in rows
        ):
            return self._too_small(assignment, self._nearest(job, rows))
        within = [row for row in rows if self._is_within_limits(job.tenant, row.candidate)]
        if any(self._pods_if_empty(job, row) >= row.candidate.pods for row in within):
            return self._quota(assignment)  # once its tenant holds less
        uncarried = self._uncarried(job, within)
        if uncarried is not None:
            return self._never_carried(assignment, uncarried)
        return self._closed(assignment, within) if within else self._quota(assignment)

    def _without_others(self, job: Job, rows: list[RankedCandidate]) -> Candidate | None:
        """The smallest candidate in the pool where the job gains most, if none of our jobs ran; None: it fits
        nowhere.

        Args:
            rows: most profit first.
        """
        best: RankedCandidate | None = None
        for row in rows:
            if best is not None and row.profit < best.profit:
                break
            if self._possible(job, row) and (best is None or _smaller(row.candidate, best.candidate)):
                best = row
        if best is None:
            return None
        pool = best.candidate.pool
        same = [
            row for row in rows if row.candidate.pool == pool and (row is best or self._possible(job, row))
        ]
        return best.candidate if len(same) == 1 else min(same, key=_smallest).candidate

    def _possible(self, job: Job, row: RankedCandidate) -> bool:
        """Whether quota allows the candidate and it would fit if none of our jobs ran."""
        return (
            not self._refused(job.tenant, row.candidate)
            and self._pods_if_empty(job, row) >= row.candidate.pods
        )

    def _refused(self, tenant: str, candidate: Candidate) -> bool:
        """Whether quota forbids this much more."""
        key = (tenant, candidate.accelerator, candidate.accelerators_m)
        known = self._refusals.get(key)
        if known is None:
            known = self._refusals[key] = self.round.holdings.refusal(*key) is not None
        return known

    def _is_within_limits(self, tenant: str, candidate: Candidate) -> bool:
        """Whether quota allows it while the tenant holds nothing."""
        return self.round.holdings.within_limits(tenant, candidate.accelerator, candidate.accelerators_m)

    def _impossible(self, assignment: Assignment) -> WaitingRecord:
        job = assignment.job
        reason = assignment.option.excluded[0] if assignment.option.excluded else "accelerator"
        code = {
            "accelerator": WaitCode.NO_ACCELERATOR,
            "tenant": WaitCode.NO_POOL,
            "memory": WaitCode.DOES_NOT_FIT,
            "devices": WaitCode.DEVICES_UNUSED,
        }[reason]
        changes: tuple[Change, ...] = ()
        resource = ",".join(job.accelerators) or "*"
        requested = job.min_pods * job.per_pod.accelerators_m
        if job.tenant not in self.round.holdings.tenants:
            code = WaitCode.UNKNOWN_TENANT
        elif code is WaitCode.NO_ACCELERATOR:
            changes = tuple(self.suggestions.other_accelerator(assignment))
        base = WaitingRecord(job.id, code, resource, job.tenant, requested=requested, changes=changes)
        if code is WaitCode.DEVICES_UNUSED:
            return replace(base, requested=job.per_pod.accelerators_m, limit=1000 * job.most_devices)
        return self._memory(assignment, base) if code is WaitCode.DOES_NOT_FIT else base

    def _memory(self, assignment: Assignment, base: WaitingRecord) -> WaitingRecord:
        """No mode fits: how much memory is short, and with how many accelerators it would fit."""
        fits_m, more = self.suggestions.more_accelerators(assignment)
        changes = (*more, *self._other_place(assignment))
        base = replace(base, fits_m=fits_m, changes=changes)
        need = nearest_memory(assignment.job, self.round.snapshot.pools, self.round.table)
        if need is None:
            return base
        return replace(
            base,
            resource="device-memory",
            requested=need.needed_mib,
            limit=need.has_mib,
            mode=need.mode,
        )

    def _quota(self, assignment: Assignment) -> WaitingRecord:
        """Quota refuses every candidate that would fit: report the one that the least raise would start, or the
        smallest."""
        holdings, job, suggestions = self.round.holdings, assignment.job, self.suggestions
        refused = [row for row in self.round.ranked(assignment) if self._refused(job.tenant, row.candidate)]
        fitting = [row for row in refused if self._would_fit(job, row)]
        later = [
            row
            for row in fitting
            if self._pods_if_empty(job, row) >= row.candidate.pods
            and self._is_within_limits(job.tenant, row.candidate)
        ]
        candidate, more = suggestions.quota(assignment) or (
            min(later or fitting or refused, key=_smallest).candidate,
            [],
        )
        refusal = holdings.refusal(job.tenant, candidate.accelerator, candidate.accelerators_m)
        assert refusal is not None
        code, row, limit = refusal
        base = self._base(assignment, candidate, code)
        if code is WaitCode.UNKNOWN_TENANT:
            return base
        if row == "*":
            held = round(1000 * holdings.units(job.tenant))
            need = round(1000 * holdings.units_of(candidate.accelerator, candidate.accelerators_m))
        else:
            held, need = holdings.held(job.tenant, row), candidate.accelerators_m
        changes = (*suggestions.fewer_pods(assignment), *suggestions.other_accelerator(assignment), *more)
        above = not any(
            self._is_within_limits(job.tenant, ranked.candidate) and self._would_fit(job, ranked)
            for ranked in self.round.ranked(assignment)
        )
        return replace(
            base,
            resource=row,
            requested=need,
            allocated=held,
            limit=limit,
            changes=changes,
            above_limit=above,
        )

    def _would_fit(self, job: Job, row: RankedCandidate) -> bool:
        """If none of our jobs ran and all nodes were open."""
        return self.round.pods_if_empty(job, row.candidate, closed=True) >= row.candidate.pods

    def _closed(self, assignment: Assignment, rows: list[RankedCandidate]) -> WaitingRecord:
        """Limits allow the rows, but they fit only on nodes that are closed: cordoned, not ready or tainted."""
        job = assignment.job
        fitting = [row for row in rows if self._would_fit(job, row)]
        if not fitting:  # only what is above a limit would fit at all
            return self._quota(assignment)
        row = min(fitting, key=_smallest)
        nodes = self.round.cluster.pools[row.candidate.pool]
        ask = request(row.candidate.per_pod, nodes.pool.is_cpu)
        found = nodes.closed_nodes(ask, job.node_selector)
        limit = self._pods_if_empty(job, row) * row.candidate.per_pod.accelerators_m
        changes = (*self.suggestions.fewer_pods(assignment), *self._other_place(assignment))
        base = self._base(assignment, row.candidate, WaitCode.NODES_CLOSED, changes)
        return replace(
            base, limit=limit, closed=tuple(Closed(why, count) for why, count in sorted(found.items()))
        )

    def _nearest(self, job: Job, rows: list[RankedCandidate]) -> Candidate:
        """Of the smallest candidates the one that comes nearest to fitting."""

        def key(row: RankedCandidate) -> tuple[int, int, int, float, str, str]:
            nodes = self.round.cluster.pools[row.candidate.pool]
            places = self.round.pods_if_empty(job, row.candidate, closed=True)
            largest = max((total[nodes.key] for total in nodes.total), default=0)
            size_m, profit, pool, mode = _smallest(row)
            return size_m, -places, -largest, profit, pool, mode

        return min(rows, key=key).candidate

    def _too_small(self, assignment: Assignment, candidate: Candidate) -> WaitingRecord:
        """No node, even empty, holds one pod, or all together not the gang. Reports the resource that is
        short."""
        nodes = self.round.cluster.pools[candidate.pool]
        ask = request(candidate.per_pod, nodes.pool.is_cpu)
        names = ("cpu" if nodes.pool.is_cpu else candidate.accelerator, "cpu", "memory", "ephemeral-storage")
        sizes, own_mib = nodes.total or [(0, 0, 0, 0)], assignment.job.per_pod.memory_mib
        largest = [max(size[k] for size in sizes) for k in range(4)]
        base = self._base(assignment, candidate, WaitCode.NODE_TOO_SMALL)
        for k in range(4):
            if ask[k] > largest[k]:
                change = {1: "cpu", 2: "memory"}.get(k)
                less = self.suggestions.smaller_pods(assignment, change, ask[k], largest[k]) if change else []
                changes = (*less, *self._other_place(assignment))
                return replace(
                    base,
                    resource=names[k],
                    requested=ask[k],
                    limit=largest[k],
                    changes=changes,
                    extent=Extent.NODE,
                    mode=candidate.mode if change == "memory" and ask[k] > own_mib else "",
                )
        places = self.round.pods_if_empty(assignment.job, candidate, closed=True)
        limit = places * candidate.per_pod.accelerators_m
        changes = (*self.suggestions.fewer_pods(assignment), *self._other_place(assignment))
        pools = {c.pool for c in assignment.option.candidates if c.accelerator == candidate.accelerator}
        extent = Extent.POOL if len(pools) > 1 else Extent.CLUSTER
        if assignment.job.required_domain is not None:
            extent = Extent.DOMAIN
        return replace(base, limit=limit, changes=changes, extent=extent)

    def _other_place(self, assignment: Assignment) -> tuple[Change, ...]:
        return (*self.suggestions.other_accelerator(assignment), *self.suggestions.other_mode(assignment))

    def _unpowered(self, job: Job, candidate: Candidate, closed: bool) -> int:
        """Pods that would fit if none of our jobs ran and watts did not count."""
        return self.round.pods_if_empty(job, replace(candidate, draw_w=0), closed)

    def _uncarried(self, job: Job, rows: list[RankedCandidate]) -> Candidate | None:
        """The first candidate that would fit if none of our jobs ran, all nodes were open and watts did not count; None:
        there is none, or one would fit although they count."""
        if self.round.cluster.feeds is None or any(self._would_fit(job, row) for row in rows):
            return None
        fitting = (
            row.candidate
            for row in rows
            if self._unpowered(job, row.candidate, closed=True) >= row.candidate.pods
        )
        found = next(fitting, None)
        return None if found is None else _least_drawn(rows, found)

    def _never_carried(self, assignment: Assignment, candidate: Candidate) -> WaitingRecord:
        """Its power domains do not carry it even if none of our jobs runs: reports one that comes nearest to it."""
        feeds, nodes = self.round.cluster.feeds, self.round.cluster.pools[candidate.pool]
        assert feeds is not None
        whole_w = candidate.pods * candidate.draw_w
        groups = nodes.by_headroom(nodes.selected_nodes(assignment.job), EMPTY)
        places = (candidate.placed((nodes.nodes[min(own)].name,)) for own in groups)
        lacks = (feeds.lack(place, candidate.draw_w, EMPTY) for place in places)
        found = [replace(lack, asked_w=whole_w) for lack in lacks if lack is not None]
        lack = min(found, key=lambda lack: (lack.short_w <= 0, lack.short_w, lack.number))
        changes = (*self.suggestions.fewer_pods(assignment), *self._other_place(assignment))
        return replace(self._power(assignment, candidate, lack, changes), above_limit=True)

    def _power(
        self, assignment: Assignment, candidate: Candidate, lack: Lack, changes: tuple[Change, ...]
    ) -> WaitingRecord:
        feeds = self.round.cluster.feeds
        assert feeds is not None
        return replace(
            self._base(assignment, candidate, WaitCode.POWER, changes),
            resource="watts",
            requested=lack.asked_w,
            free=max(0, lack.left_w),
            limit=max(0, feeds.left[EMPTY][lack.number]),
            holders=(),
            price=self.round.market.domains.get(feeds.domains[lack.number].name, 0.0),
            domain=feeds.domains[lack.number].name,
            power_cap=candidate.power_cap,
        )

    def _contended(self, assignment: Assignment, candidate: Candidate) -> WaitingRecord:
        """It could run if other jobs did not."""
        holdings, job = self.round.holdings, assignment.job
        lack = None
        if self.round.cluster.feeds is not None:
            least = _least_drawn(self.round.ranked(assignment), candidate)
            lack = self.round.cluster.lack(job, least)
        if lack is not None:
            candidate = least
            changes = (
                *self.suggestions.fewer_pods(assignment),
                *self._other_place(assignment),
                *self.suggestions.other_domain(assignment, lack),
                *self.suggestions.more_watts(assignment, candidate, lack),
            )
            return self._power(assignment, candidate, lack, changes)
        free = self._free_m(candidate.pool)
        right = holdings.right(job.tenant, candidate.accelerator, candidate.accelerators_m)
        if free >= candidate.accelerators_m:
            code = WaitCode.FRAGMENTED
        elif right is Right.BORROWING and any(
            h.tenant != job.tenant for h in self.holders(candidate.accelerator)
        ):
            code = WaitCode.FAIR_SHARE
        else:
            code = WaitCode.CAPACITY
        if code is not WaitCode.FRAGMENTED and self._outranked(job, candidate.accelerator):
            code = WaitCode.PRIORITY
        suggestions = self.suggestions
        changes = (
            *suggestions.fewer_pods(assignment),
            *self._other_place(assignment),
            *suggestions.higher_priority(assignment),
        )
        return self._base(assignment, candidate, code, changes)

    def _outranked(self, job: Job, accelerator: str) -> bool:
        """Whether jobs of higher priority of its own tenant hold the resource."""
        known = self._running(job.tenant).get(accelerator)
        return known is not None and known > self.round.priority(job)

    def _running(self, tenant: str) -> dict[str, int]:
        rows = self._highest.get(tenant)
        if rows is None:
            rows = self._highest[tenant] = {}
            for (pool, owner), assignments in self.round.held.items():
                nodes = self.round.cluster.pools.get(pool)
                if assignments and owner == tenant and nodes is not None:
                    kind = nodes.pool.accelerator
                    first = max(assignments.values(), key=attrgetter("job.priority"))
                    most = self.round.priority(first.job)
                    rows[kind] = max(most, rows.get(kind, most))
        return rows

    def _base(
        self, assignment: Assignment, candidate: Candidate, code: WaitCode, changes: tuple[Change, ...] = ()
    ) -> WaitingRecord:
        holdings, job = self.round.holdings, assignment.job
        rate = max(holdings.rate.get(candidate.accelerator, 0.001), 1e-12)
        return WaitingRecord(
            job=job.id,
            code=code,
            resource=candidate.accelerator,
            tenant=job.tenant,
            requested=candidate.accelerators_m,
            entitled=round(holdings.entitled.get(job.tenant, 0.0) / rate),
            allocated=holdings.held(job.tenant, candidate.accelerator),
            limit=holdings.capacity_m.get(candidate.accelerator, 0),
            free=self._free_of(candidate.accelerator),
            holders=self.holders(candidate.accelerator),
            price=self.round.market.price(candidate.accelerator),
            changes=changes,
        )

    def _free_of(self, accelerator: str) -> int:
        """In all pools of the type, as its capacity and its holders are counted."""
        pools = self.round.cluster.pools
        return sum(self._free_m(name) for name, own in pools.items() if own.pool.accelerator == accelerator)

    def _free_m(self, pool: str) -> int:
        if pool not in self._free:
            self._free[pool] = self.round.cluster.pools[pool].free_m()
        return self._free[pool]

    def holders(self, accelerator: str) -> tuple[Holder, ...]:
        """Tenants that hold the accelerator in the plan, most first."""
        if accelerator not in self._holders:
            holdings = self.round.holdings
            jobs: dict[str, int] = {}
            for (pool, tenant), assignments in self.round.held.items():
                nodes = self.round.cluster.pools.get(pool)
                if assignments and nodes is not None and nodes.pool.accelerator == accelerator:
                    jobs[tenant] = jobs.get(tenant, 0) + len(assignments)
            rows = [
                Holder(
                    tenant,
                    holdings.held(tenant, accelerator),
                    holdings.inside_guarantee(tenant, accelerator),
                    count,
                )
                for tenant, count in jobs.items()
            ]
            self._holders[accelerator] = tuple(sorted(rows, key=lambda h: (-h.amount_m, h.tenant)))
        return self._holders[accelerator]

    def _pods_if_empty(self, job: Job, row: RankedCandidate) -> int:
        known = self._empty.get(row.shape)
        if known is None:
            known = self._empty[row.shape] = self.round.pods_if_empty(job, row.candidate)
        return known
