"""Why a job waits, and the smallest changes that would start it.

A record is made from the state at the end of the round, so it is never stale: it carries the round's id
(`records.py`). `sentences.py` renders it for people.
"""

from __future__ import annotations

from dataclasses import replace

from .books import Ranked, Seat
from .columns import Candidate
from .ledger import Right
from .plans import Change, Holder, WaitCode, WaitingRecord
from .pool_nodes import request
from .remedies import Remedies
from .round import Round
from .types import Job

_Key = tuple[object, ...]


def _smallest(row: Ranked) -> tuple[int, float, str, str]:
    column = row.column
    return column.accelerators_m, -row.profit, column.pool, column.mode


def _smaller(one: Candidate, other: Candidate) -> bool:
    """Whether it asks for fewer accelerators; of as many: is in the pool with the later name."""
    return (-one.accelerators_m, one.pool) > (-other.accelerators_m, other.pool)


class Book:
    """Records of one round; equal requests of one tenant share one."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.remedies = Remedies(round_)
        self._cache: dict[_Key, WaitingRecord] = {}
        self._holders: dict[str, tuple[Holder, ...]] = {}
        self._free: dict[str, int] = {}
        self._empty: dict[int, int] = {}
        """Pods that would fit if nothing of ours ran, by shape."""
        self._refusals: dict[tuple[str, str, int], bool] = {}
        self._highest: dict[str, dict[str, int]] = {}
        """The highest priority of the jobs that run, by tenant and accelerator."""

    def simple(self, seat: Seat, code: WaitCode) -> WaitingRecord:
        """A job that has no place yet because of what is being stopped: itself, or others."""
        column, tenant = seat.column, seat.job.tenant
        accelerator = column.accelerator if column is not None else "*"
        if column is None and seat.job.run is not None:
            accelerator = seat.job.run.placement.accelerator
        requested = 0 if column is None else column.accelerators_m
        key = (code, tenant, accelerator, requested)
        if key not in self._cache:
            self._cache[key] = WaitingRecord(
                job=seat.job.id,
                code=code,
                resource=accelerator,
                tenant=tenant,
                requested=requested,
                allocated=self.round.ledger.held(tenant, accelerator),
                holders=self.holders(accelerator),
            )
        return self._cache[key]

    def record(self, seat: Seat) -> WaitingRecord:
        job = seat.job
        key = (
            job.tenant,
            self.round.priority(job),
            job.kind,
            id(seat.option.row),  # stands for all that columns depend on
            job.node_selector,
            job.required_domain,
        )
        if key not in self._cache:
            self._cache[key] = self._make(seat)
        return self._cache[key]

    def offer(self, seat: Seat, accelerator: str) -> float:
        """The most that the job offers for an accelerator-hour."""
        most = 0.0
        for column in seat.option.columns:
            if column.accelerator == accelerator:
                most = max(most, column.value * 1000 / max(column.accelerators_m, 1))
        return most

    def _make(self, seat: Seat) -> WaitingRecord:
        if not seat.option.columns:
            return self._impossible(seat)
        job, rows = seat.job, self.round.ranked(seat)
        column = self._without_others(job, rows)
        if column is not None:
            return self._contended(seat, column)
        open_ = [row for row in rows if not self._refused(job.tenant, row.column)]
        return self._too_small(seat, min(open_, key=_smallest).column) if open_ else self._quota(seat)

    def _without_others(self, job: Job, rows: list[Ranked]) -> Candidate | None:
        """The smallest column in the pool where the job gains most, if nothing of ours ran; None: it fits nowhere.

        Args:
            rows: most profit first.
        """
        best: Ranked | None = None
        for row in rows:
            if best is not None and row.profit < best.profit:
                break
            if self._possible(job, row) and (best is None or _smaller(row.column, best.column)):
                best = row
        if best is None:
            return None
        pool = best.column.pool
        same = [row for row in rows if row.column.pool == pool and (row is best or self._possible(job, row))]
        return best.column if len(same) == 1 else min(same, key=_smallest).column

    def _possible(self, job: Job, row: Ranked) -> bool:
        """Whether quota allows the column and it would fit if nothing of ours ran."""
        return not self._refused(job.tenant, row.column) and self._pods_if_empty(job, row) >= row.column.pods

    def _refused(self, tenant: str, column: Candidate) -> bool:
        """Whether quota forbids this much more."""
        key = (tenant, column.accelerator, column.accelerators_m)
        known = self._refusals.get(key)
        if known is None:
            known = self._refusals[key] = self.round.ledger.refusal(*key) is not None
        return known

    def _impossible(self, seat: Seat) -> WaitingRecord:
        job = seat.job
        reason = seat.option.excluded[0] if seat.option.excluded else "accelerator"
        code = {
            "accelerator": WaitCode.NO_ACCELERATOR,
            "tenant": WaitCode.NO_POOL,
            "memory": WaitCode.DOES_NOT_FIT,
        }[reason]
        changes: tuple[Change, ...] = ()
        if code is WaitCode.NO_ACCELERATOR:
            changes = tuple(self.remedies.elsewhere(seat))
        elif code is WaitCode.DOES_NOT_FIT:
            changes = self._other_place(seat)
        resource = ",".join(job.accelerators) or "*"
        requested = job.min_pods * job.per_pod.accelerators_m
        if job.tenant not in self.round.ledger.tenants:
            code, changes = WaitCode.UNKNOWN_TENANT, ()
        return WaitingRecord(job.id, code, resource, job.tenant, requested=requested, changes=changes)

    def _quota(self, seat: Seat) -> WaitingRecord:
        """Every column is refused by quota: said of the one that the least raise would start, or the smallest."""
        ledger, job, remedies = self.round.ledger, seat.job, self.remedies
        column, more = remedies.quota(seat) or (min(self.round.ranked(seat), key=_smallest).column, [])
        refusal = ledger.refusal(job.tenant, column.accelerator, column.accelerators_m)
        assert refusal is not None
        code, row, limit = refusal
        base = self._base(seat, column, code)
        if code is WaitCode.UNKNOWN_TENANT:
            return base
        if row == "*":
            held = round(1000 * ledger.units(job.tenant))
            need = round(1000 * ledger.units_of(column.accelerator, column.accelerators_m))
        else:
            held, need = ledger.held(job.tenant, row), column.accelerators_m
        changes = (*remedies.fewer(seat), *remedies.elsewhere(seat), *more)
        return replace(base, resource=row, requested=need, allocated=held, limit=limit, changes=changes)

    def _too_small(self, seat: Seat, column: Candidate) -> WaitingRecord:
        """No node, even empty, holds one pod; or all together not the gang. Says of which resource."""
        nodes = self.round.cluster.pools[column.pool]
        ask = request(column.per_pod, nodes.pool.is_cpu)
        names = ("cpu" if nodes.pool.is_cpu else column.accelerator, "cpu", "memory", "ephemeral-storage")
        sizes = [tuple(total) for i, total in enumerate(nodes.total) if nodes.usable[i]] or [(0, 0, 0, 0)]
        largest = [max(size[k] for size in sizes) for k in range(4)]
        base = self._base(seat, column, WaitCode.NODE_TOO_SMALL)
        for k in range(4):
            if ask[k] > largest[k]:
                change = {1: "cpu", 2: "memory"}.get(k)
                less = self.remedies.smaller_pods(seat, change, ask[k], largest[k]) if change else []
                changes = (*less, *self._other_place(seat))
                return replace(base, resource=names[k], requested=ask[k], limit=largest[k], changes=changes)
        places = nodes.places_if_empty(ask, seat.job.node_selector, seat.job.required_domain)
        limit = places * column.per_pod.accelerators_m
        changes = (*self.remedies.fewer(seat), *self._other_place(seat))
        return replace(base, limit=limit, changes=changes)

    def _other_place(self, seat: Seat) -> tuple[Change, ...]:
        return (*self.remedies.elsewhere(seat), *self.remedies.other_mode(seat))

    def _contended(self, seat: Seat, column: Candidate) -> WaitingRecord:
        """It could run, if others did not."""
        ledger, job = self.round.ledger, seat.job
        free = self._free_m(column.pool)
        right = ledger.right(job.tenant, column.accelerator, column.accelerators_m)
        if free >= column.accelerators_m:
            code = WaitCode.FRAGMENTED
        elif right is Right.BORROWING and any(
            h.tenant != job.tenant for h in self.holders(column.accelerator)
        ):
            code = WaitCode.FAIR_SHARE
        else:
            code = WaitCode.CAPACITY
        if code is not WaitCode.FRAGMENTED and self._outranked(job, column.accelerator):
            code = WaitCode.PRIORITY
        remedies = self.remedies
        changes = (*remedies.fewer(seat), *self._other_place(seat), *remedies.higher(seat))
        return self._base(seat, column, code, changes)

    def _outranked(self, job: Job, accelerator: str) -> bool:
        """Whether jobs of higher priority of its own tenant hold the resource."""
        known = self._running(job.tenant).get(accelerator)
        return known is not None and known > self.round.priority(job)

    def _running(self, tenant: str) -> dict[str, int]:
        rows = self._highest.get(tenant)
        if rows is None:
            rows = self._highest[tenant] = {}
            for (pool, owner), seats in self.round.held.items():
                nodes = self.round.cluster.pools.get(pool)
                if seats and owner == tenant and nodes is not None:
                    kind = nodes.pool.accelerator
                    most = max(self.round.priority(seat.job) for seat in seats.values())
                    rows[kind] = max(most, rows.get(kind, most))
        return rows

    def _base(
        self, seat: Seat, column: Candidate, code: WaitCode, changes: tuple[Change, ...] = ()
    ) -> WaitingRecord:
        ledger, job = self.round.ledger, seat.job
        rate = max(ledger.rate.get(column.accelerator, 0.001), 1e-12)
        return WaitingRecord(
            job=job.id,
            code=code,
            resource=column.accelerator,
            tenant=job.tenant,
            requested=column.accelerators_m,
            entitled=round(ledger.entitled.get(job.tenant, 0.0) / rate),
            allocated=ledger.held(job.tenant, column.accelerator),
            limit=ledger.capacity_m.get(column.accelerator, 0),
            free=self._free_m(column.pool),
            holders=self.holders(column.accelerator),
            price=self.round.market.price(column.accelerator),
            changes=changes,
        )

    def _free_m(self, pool: str) -> int:
        if pool not in self._free:
            self._free[pool] = self.round.cluster.pools[pool].free_m()
        return self._free[pool]

    def holders(self, accelerator: str) -> tuple[Holder, ...]:
        """Tenants holding the accelerator in the plan, most first."""
        if accelerator not in self._holders:
            ledger = self.round.ledger
            jobs: dict[str, int] = {}
            for (pool, tenant), seats in self.round.held.items():
                nodes = self.round.cluster.pools.get(pool)
                if seats and nodes is not None and nodes.pool.accelerator == accelerator:
                    jobs[tenant] = jobs.get(tenant, 0) + len(seats)
            rows = [
                Holder(tenant, ledger.held(tenant, accelerator), ledger.covered(tenant, accelerator), count)
                for tenant, count in jobs.items()
            ]
            self._holders[accelerator] = tuple(sorted(rows, key=lambda h: (-h.amount_m, h.tenant)))
        return self._holders[accelerator]

    def _pods_if_empty(self, job: Job, row: Ranked) -> int:
        known = self._empty.get(row.shape)
        if known is None:
            nodes = self.round.cluster.pools[row.column.pool]
            ask = request(row.column.per_pod, nodes.pool.is_cpu)
            known = self._empty[row.shape] = nodes.places_if_empty(
                ask, job.node_selector, job.required_domain
            )
        return known
