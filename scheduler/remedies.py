"""The smallest changes that would start a waiting job, each tried out before it is told.

A change is tried on the round's own books: the job as it would then be gets the columns that it would then have,
and takes the round's own steps. What is told must start it, and the next smaller change of the same kind must
not; where that cannot be known, nothing is told. The round is left as it was.

    kind           told when                                                      next smaller change
    pods           the most pods, below the least it asks for, with which it      one pod more: must not start it
                   finds free room                                                by rights or value either
    accelerator    another type has free room for it                              none
    mode           it finds free room in a mode that it does not allow            none
    cpu, memory    with what the largest node has, it finds free room             more fits on no node
    priority       with one more than a job of its tenant has, it takes places    the levels below do not start it
                   by right
    quota          of one row, with exactly what it needs, it is first of its     half of it must not start it
                   tenant's like jobs to find free room, and no other of its jobs would

A job in free room keeps it: whoever else waits did not fit there and has as little right to it as before. That
holds while rights stay as they are, and what jobs ask for is part of what tenants are entitled to. So
entitlements are worked out again for the changed job, and nothing is told if another tenant's waiting job
may then have a right to the place (`_contested`).

Free room is cheap to look at. Tries that stop others are counted: a plan makes at most `TRIES`, for the first
jobs that need them, and tells the rest nothing that would need one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from .books import Ranked, Seat
from .columns import Candidate
from .displace import reclaim
from .exchange import improve_one
from .fill import fill
from .ledger import EPS, Right
from .plans import Change
from .round import Round
from .sentences import amount_text
from .types import Job, Pool, Quota, Tenant

TRIES = 32


class Remedies:
    """Finds changes for the waiting jobs of one round."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self._left = TRIES
        self._pools: dict[str, list[Pool]] = {}
        self._levels: dict[str, list[int]] = {}
        self._known_modes: dict[tuple[str, str], tuple[str, ...]] = {}
        self._entitled: dict[tuple[object, ...], dict[str, float]] = {}
        self._least: dict[str, dict[str, int]] = {}
        self._rooms: dict[int, int] = {}

    # -- the kinds of change ------------------------------------------------------------------------------

    def fewer(self, seat: Seat) -> list[Change]:
        """The most pods, below the least it asks for, that would start now."""
        job = seat.job
        if job.min_pods == 1:
            return []
        rooms = [self._room(job, row) for row in self.round.ranked(seat)]
        for pods in range(min(job.min_pods - 1, max(rooms, default=0)), 0, -1):
            trial = self._trial(_with_pods(job, pods))
            if self._open(trial) is None:
                continue
            if not self._starts(seat, trial):
                return []
            if pods + 1 < job.min_pods and self._by_force(seat, self._trial(_with_pods(job, pods + 1))):
                return []
            return [Change("pods", str(job.min_pods), str(pods))]
        return []

    def elsewhere(self, seat: Seat) -> list[Change]:
        """Accelerators it does not allow, on which it would start now."""
        job = seat.job
        if not job.accelerators:
            return []
        kinds = {pool.accelerator for pool in self._usable(job.tenant)} - set(job.accelerators)
        trials = {kind: self._trial(replace(job, accelerators=(kind,))) for kind in sorted(kinds)}
        now = ",".join(job.accelerators)
        return [
            Change("accelerator", now, kind) for kind, trial in trials.items() if self._starts(seat, trial)
        ]

    def other_mode(self, seat: Seat) -> list[Change]:
        """The fastest engine mode that it does not allow and in which it would start now."""
        job = seat.job
        best: tuple[float, str] | None = None
        for mode in self._modes(job):
            if mode in job.modes:
                continue
            trial = self._trial(replace(job, modes=(mode,)))
            if (best is None or trial.option.best_speed > best[0]) and self._starts(seat, trial):
                best = trial.option.best_speed, mode
        return [] if best is None else [Change("mode", "/".join(job.modes), best[1])]

    def smaller_pods(self, seat: Seat, kind: str, asked: int, largest: int) -> list[Change]:
        """No more cpu or memory per pod than the largest node has."""
        per_pod = seat.job.per_pod
        if kind == "cpu":
            per_pod = replace(per_pod, cpu_m=largest)
        else:
            per_pod = replace(per_pod, memory_mib=largest)
        trial = self._trial(replace(seat.job, per_pod=per_pod))
        return [Change(kind, str(asked), str(largest))] if self._starts(seat, trial) else []

    def higher(self, seat: Seat) -> list[Change]:
        """The least priority with which it would start in the place of jobs of its tenant."""
        round_, job = self.round, seat.job
        own, most = round_.priority(job), round_.ledger.tenants[job.tenant].priority_ceiling
        if self._quiet(seat):
            return []
        levels = [level for level in self._levels_of(job.tenant) if own <= level < most]
        for level in sorted({*levels, *(level + 1 for level in levels)} - {own}):
            trial = self._trial(replace(job, priority=level))
            by = self._by_force(seat, trial)
            if by is None or by == "value":
                return []
            if by:
                return [Change("priority", str(job.priority), str(level))] if by == "right" else []
        return []

    def quota(self, seat: Seat) -> tuple[Candidate, list[Change]] | None:
        """The column that the least raise of one quota row would start, and the raise if that is sure."""
        ledger, job, row = self.round.ledger, seat.job, ""
        best: tuple[int, Candidate] | None = None
        for ranked in self.round.ranked(seat):
            column = ranked.column
            short = ledger.shortages(job.tenant, column.accelerator, column.accelerators_m)
            if len(short) == 1 and (not row or row in short) and self._fits_now(job, column):
                ((row, needed),) = short.items()
                if best is None or needed < best[0]:
                    best = needed, column
        if best is None:
            return None
        needed, column = best
        refusal = ledger.refusal(job.tenant, column.accelerator, column.accelerators_m)
        assert refusal is not None
        current = refusal[2]
        if not self._starts_with(seat, row, needed) or self._starts_with(
            seat, row, (current + needed) // 2, True
        ):
            return column, []
        return column, [Change("quota", amount_text(current), amount_text(needed))]

    # -- trying -------------------------------------------------------------------------------------------

    def _trial(self, job: Job) -> Seat:
        """A seat of the job as it would be."""
        books = self.round.books
        seat = Seat(job, books.columns.of(job))
        seat.ranked = books.rank_apart(seat)
        return seat

    def _open(self, trial: Seat) -> Candidate | None:
        """The first column that has free room now and that quota allows."""
        ledger, job = self.round.ledger, trial.job
        for row in trial.ranked or ():
            column = row.column
            if ledger.refusal(job.tenant, column.accelerator, column.accelerators_m) is None:
                found = self.round.find(job, column)
                if found is not None:
                    return None if found[1] else column
        return None

    def _room(self, job: Job, row: Ranked) -> int:
        """Pods of this shape that there is room for, wherever they stand."""
        if row.shape not in self._rooms:
            self._rooms[row.shape] = self.round.places(job, row.column)
        return self._rooms[row.shape]

    def _starts(self, seat: Seat, trial: Seat) -> bool:
        """Whether the job as it would be starts in free room and keeps it."""
        column = self._open(trial)
        return column is not None and not self._contested(seat, trial, column)

    def _fits_now(self, job: Job, column: Candidate) -> bool:
        found = self.round.find(job, column)
        return found is not None and not found[1]

    def _by_force(self, seat: Seat, trial: Seat) -> str | bool | None:
        """Whether the job as it would be starts where others are: by "right", by "value", or else ("unsure": it
        may not keep the place). None: there are no tries left."""
        if self._open(trial):
            return "unsure"
        round_ = self.round
        if self._quiet(trial):
            return False
        if self._left <= 0:
            return None
        self._left -= 1
        with self._seated(trial), round_.ledger.supposing(self._entitled_if(seat, trial)):
            reclaim(round_, [trial])
            by = "right"
            if trial.placement is None:
                improve_one(round_, trial)
                by = "value"
            if trial.placement is None:
                return False
            column, sure = trial.column, not trial.waits_for_release
        if not sure or column is None or self._contested(seat, trial, column, new=True):
            return "unsure"
        return by

    def _quiet(self, seat: Seat) -> bool:
        """Whether no more jobs may be stopped for this one in this round."""
        best = self.round.ledger.best_right(seat.job.tenant, seat.option.sizes)
        return not self.round.calm() and best > Right.GUARANTEED

    def _starts_with(self, seat: Seat, row: str, limit: int, anyhow: bool = False) -> bool:
        """Whether the job starts in free room, in its turn, if this row of quota allows so much; `anyhow`: or by
        right, or nobody knows."""
        if self._left <= 0:
            return anyhow
        self._left -= 1
        round_, ledger, name = self.round, self.round.ledger, seat.job.tenant
        tenant = ledger.tenants[name]
        before = round_.mark()
        ledger.tenants[name] = _raised(tenant, row, limit)
        try:
            with ledger.supposing(ledger.entitled_now()):
                own = [other for other in round_.waiting() if other.job.tenant == name]
                rivals = [other for other in own if not _alike(other, seat)]
                if len(fill(round_, rivals)) < len(rivals):
                    return anyhow  # whose turn it is also depends on prices and on what others hold
                fill(round_, own)
                if anyhow and seat.placement is None:
                    reclaim(round_, [seat])
            return seat.placement is not None and (anyhow or not seat.waits_for_release)
        finally:
            ledger.tenants[name] = tenant
            round_.undo_to(before)

    @contextmanager
    def _seated(self, trial: Seat) -> Iterator[None]:
        """While this lasts the job is as it would be."""
        round_, books, job = self.round, self.round.books, trial.job.id
        before = round_.mark()
        seat = books.seats[job]
        books.seats[job] = books.waiting[job] = trial
        try:
            yield
        finally:
            round_.undo_to(before)
            books.seats[job] = books.waiting[job] = seat

    def _contested(self, seat: Seat, trial: Seat, column: Candidate, new: bool = False) -> bool:
        """Whether another tenant's waiting job may have a right to the place that it has not now; or any right, to a
        place that others were stopped for (`new`): they may have been protected as this job is not."""
        ledger, tenant, kind = self.round.ledger, seat.job.tenant, column.accelerator
        claims = self._claims(kind)
        if not claims.keys() - {tenant} or ledger.covered(tenant, kind, column.accelerators_m):
            return False
        then, now = self._entitled_if(seat, trial), ledger.entitled
        lower = then.get(tenant, 0.0) < now.get(tenant, 0.0) - EPS
        for name, amount_m in claims.items():
            share = then.get(name, 0.0)
            if name == tenant or not (new or lower or share > now.get(name, 0.0) + EPS):
                continue
            units = ledger.units(name) + ledger.units_of(kind, amount_m)
            if units <= share + EPS or (new and ledger.covered(name, kind, amount_m)):
                return True
        return False

    def _claims(self, accelerator: str) -> dict[str, int]:
        """The least that any waiting job of each tenant asks for of the type."""
        if not self._least:
            for seat in self.round.books.waiting.values():
                for kind, amount_m in seat.option.sizes:
                    row = self._least.setdefault(kind, {})
                    row[seat.job.tenant] = min(amount_m, row.get(seat.job.tenant, amount_m))
        return self._least.get(accelerator, {})

    def _entitled_if(self, seat: Seat, trial: Seat) -> dict[str, float]:
        """Entitlements if the job were as it would be."""
        key = (seat.job.tenant, seat.option.sizes, trial.option.sizes)
        if key not in self._entitled:
            self._entitled[key] = self.round.ledger.entitled_if(seat.option, trial.option)
        return self._entitled[key]

    # -- what is asked often ------------------------------------------------------------------------------

    def _usable(self, tenant: str) -> list[Pool]:
        if tenant not in self._pools:
            pools = self.round.snapshot.pools
            self._pools[tenant] = [p for p in pools if p.tenants is None or tenant in p.tenants]
        return self._pools[tenant]

    def _modes(self, job: Job) -> tuple[str, ...]:
        key = job.workload_class, job.tenant
        if key not in self._known_modes:
            self._known_modes[key] = self.round.table.modes(*key)
        return self._known_modes[key]

    def _levels_of(self, tenant: str) -> list[int]:
        """Priorities of the tenant's running jobs, lowest first."""
        if tenant not in self._levels:
            levels = {
                self.round.priority(seat.job)
                for pool in self.round.cluster.pools
                for seat in self.round.held.get((pool, tenant), {}).values()
            }
            self._levels[tenant] = sorted(levels)
        return self._levels[tenant]


def _with_pods(job: Job, pods: int) -> Job:
    return replace(job, min_pods=pods, max_pods=pods)


def _alike(one: Seat, other: Seat) -> bool:
    """Whether the order of two waiting jobs is that of their values, whatever the prices."""
    job, rival = one.job, other.job
    same = one.option.row is other.option.row and job.kind == rival.kind
    return same and (job.user, job.priority) == (rival.user, rival.priority)


def _raised(tenant: Tenant, accelerator: str, limit_m: int) -> Tenant:
    """The tenant if its row for this accelerator let it hold so much."""

    def row(quota: Quota) -> Quota:
        if quota.accelerator != accelerator:
            return quota
        ceiling = None if quota.ceiling_m is None else max(limit_m, quota.ceiling_m)
        borrow = quota.borrowable_m
        borrow = None if borrow is None else max(limit_m - quota.guaranteed_m, borrow)
        return replace(quota, ceiling_m=ceiling, borrowable_m=borrow)

    return replace(tenant, quotas=tuple(row(quota) for quota in tenant.quotas))
