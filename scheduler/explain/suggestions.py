"""The smallest changes that would start a waiting job, each tried before it is suggested.

A change is tried on the round's own state: the changed job gets the candidates that it would then have and
goes through the round's own steps. What is suggested must start it, and the next smaller change of the same
kind must not; if that cannot be decided, nothing is suggested. The round is left as it was.

    kind           suggested when                                                 next smaller change
    pods           the most pods, below the least it requests, with which it      one pod more: must not start it
                   finds free room                                                by rights or value either
    accelerator    another type has free room for it                              none
    mode           it finds free room in a mode that it does not allow            none
    accelerators   per pod: the fewest in which it fits the device memory, if it     fewer fit no memory
                   finds free room with them
    cpu, memory    with what the largest node has, it finds free room             more fits on no node
    watts          so much more in its power domain, it is the first that         one watt less: it finds no free room
                   starts there
    domain         it finds free room on nodes of another power domain, which     none
                   its node selector excludes
    priority       with one more than a job of its tenant has, it preempts        the levels below do not start it
                   by right
    quota          of one row, with exactly what it needs, it is first of its     half of it must not start it
                   tenant's like jobs to find free room, and no other of its jobs would

A job in free room keeps it: every other waiting job did not fit there and has as little right to it as
before. That holds while rights stay as they are, and requests are part of what tenants are entitled to. So
entitlements are computed again for the changed job, and nothing is suggested if another tenant's waiting job
may then have a right to the place (`_may_be_contested`).

Free room is cheap to examine. Tries that preempt are counted: a plan makes at most `TRIES`, for the first
jobs that need them, and suggests to the rest nothing that would need one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter

from ..candidates.candidate import Candidate
from ..fairness.quota import EPS, Right
from ..model.alike import LABEL
from ..model.plans import Change
from ..model.snapshot import Job, Pool, Quota, Tenant
from ..placement.feeds import Lack
from ..search.preemption import reclaim
from ..search.round import Round
from ..search.start import order, start_waiting
from ..search.state import Assignment, RankedCandidate
from ..search.swap import improve_one
from .sentences import amount_text

_PRIORITY = attrgetter("job.priority")
TRIES = 32
FEW = 32
"""A try that preempts by right is made with so many jobs of each pool and tenant first: that they are enough is nearly
always so, and a cluster has thousands."""


class Suggestions:
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
        self._raised: set[int] = set()

    # -- the kinds of change ------------------------------------------------------------------------------

    def fewer_pods(self, assignment: Assignment) -> list[Change]:
        """The most pods, below the least it asks for, that would start now."""
        job = assignment.job
        if job.min_pods == 1:
            return []
        rooms = [self._room(job, row) for row in self.round.ranked(assignment)]
        for pods in range(min(job.min_pods - 1, max(rooms, default=0)), 0, -1):
            trial = self._trial(_with_pods(job, pods))
            if self._open(trial) is None:
                continue
            if not self._starts(assignment, trial):
                return []
            if pods + 1 < job.min_pods and self._by_preemption(
                assignment, self._trial(_with_pods(job, pods + 1))
            ):
                return []
            return [Change("pods", str(job.min_pods), str(pods))]
        return []

    def other_accelerator(self, assignment: Assignment) -> list[Change]:
        """Accelerators it does not allow, on which it would start now."""
        job = assignment.job
        if not job.accelerators:
            return []
        kinds = {pool.accelerator for pool in self._usable(job.tenant)} - set(job.accelerators)
        trials = {kind: self._trial(replace(job, accelerators=(kind,))) for kind in sorted(kinds)}
        now = ",".join(job.accelerators)
        return [
            Change("accelerator", now, kind)
            for kind, trial in trials.items()
            if self._starts(assignment, trial)
        ]

    def other_mode(self, assignment: Assignment) -> list[Change]:
        """The fastest engine mode that it does not allow and in which it would start now."""
        job = assignment.job
        best: tuple[float, str] | None = None
        for mode in self._modes(job):
            if mode in job.modes:
                continue
            trial = self._trial(replace(job, modes=(mode,)))
            if (best is None or trial.option.best_speed > best[0]) and self._starts(assignment, trial):
                best = trial.option.best_speed, mode
        return [] if best is None else [Change("mode", "/".join(job.modes), best[1])]

    def more_accelerators(self, assignment: Assignment) -> tuple[int, list[Change]]:
        """The fewest accelerators per pod (thousandths) in which the job fits the memory of some device on some
        node, 0 if there are none; and the change, if it would start now."""
        job, round_ = assignment.job, self.round
        if job.most_devices:
            return 0, []
        pools = self._usable(job.tenant)
        sizes = [size for pool in pools for size in round_.cluster.pools[pool.name].accelerators_per_node()]
        now = -(-job.per_pod.accelerators_m // 1000)
        for count in range(now + 1, max(sizes, default=0) + 1):
            per_pod = replace(job.per_pod, accelerators_m=1000 * count)
            trial = self._trial(replace(job, per_pod=per_pod))
            if any(
                round_.pods_if_empty(job, row.candidate) >= row.candidate.pods for row in trial.ranked or ()
            ):
                change = Change("accelerators", str(now), str(count))
                return 1000 * count, [change] if self._starts(assignment, trial) else []
        return 0, []

    def smaller_pods(self, assignment: Assignment, kind: str, asked: int, largest: int) -> list[Change]:
        """No more cpu or memory per pod than the largest node has."""
        per_pod = assignment.job.per_pod
        if kind == "cpu":
            per_pod = replace(per_pod, cpu_m=largest)
        else:
            per_pod = replace(per_pod, memory_mib=largest)
        trial = self._trial(replace(assignment.job, per_pod=per_pod))
        return [Change(kind, str(asked), str(largest))] if self._starts(assignment, trial) else []

    def higher_priority(self, assignment: Assignment) -> list[Change]:
        """The lowest priority with which it would start in the place of jobs of its tenant."""
        round_, job = self.round, assignment.job
        own, most = round_.priority(job), round_.holdings.tenants[job.tenant].priority_ceiling
        if self._may_not_disrupt(assignment):
            return []
        levels = [level for level in self._levels_of(job.tenant) if own <= level < most]
        for level in sorted({*levels, *(level + 1 for level in levels)} - {own}):
            trial = self._trial(replace(job, priority=level))
            by = self._by_preemption(assignment, trial)
            if by is None or by == "value":
                return []
            if by:
                return [Change("priority", str(job.priority), str(level))] if by == "right" else []
        return []

    def quota(self, assignment: Assignment) -> tuple[Candidate, list[Change]] | None:
        """The candidate that the least raise of one quota row would start, and the raise if that is certain."""
        holdings, job, row = self.round.holdings, assignment.job, ""
        best: tuple[int, Candidate] | None = None
        for ranked in self.round.ranked(assignment):
            candidate = ranked.candidate
            short = holdings.limits_needed(job.tenant, candidate.accelerator, candidate.accelerators_m)
            if len(short) == 1 and (not row or row in short) and self._fits_now(job, candidate):
                ((row, needed),) = short.items()
                if best is None or needed < best[0]:
                    best = needed, candidate
        if best is None:
            return None
        needed, candidate = best
        refusal = holdings.refusal(job.tenant, candidate.accelerator, candidate.accelerators_m)
        assert refusal is not None
        current = refusal[2]
        if not self._starts_with(assignment, row, needed) or self._starts_with(
            assignment, row, (current + needed) // 2, True
        ):
            return candidate, []
        return candidate, [Change("quota", amount_text(current), amount_text(needed))]

    def more_watts(self, assignment: Assignment, candidate: Candidate, lack: Lack) -> list[Change]:
        """The least that the domain must carry more, so that the job starts in its turn. Tried for one job of each
        domain, the first: what is more for those behind it depends on what that one takes."""
        round_, feeds = self.round, self.round.cluster.feeds
        if feeds is None or lack.number in self._raised or len(self._raised) >= TRIES // 4:
            return []
        self._raised.add(lack.number)

        def fits(more_w: int) -> bool:
            with feeds.with_more(lack.number, more_w):
                return self._fits_now(assignment.job, candidate)

        if not fits(lack.short_w):
            return []
        more_w = 1 + bisect_left(range(1, lack.short_w), True, key=fits)
        with feeds.with_more(lack.number, more_w), round_.trial():
            start_waiting(round_)
            starts = assignment.placement is not None and not assignment.waits_for_release
        round_.sync_holds()
        return [Change("watts", str(max(0, lack.left_w)), str(more_w))] if starts else []

    def other_domain(self, assignment: Assignment, lack: Lack) -> list[Change]:
        """A power domain that the job's node selector excludes, and on which it would start now."""
        job, feeds = assignment.job, self.round.cluster.feeds
        kept = tuple(term for term in job.node_selector if term[0] == LABEL)
        if feeds is None or kept == job.node_selector:
            return []
        trial = self._trial(replace(job, node_selector=kept))
        candidate = self._open(trial)
        found = None if candidate is None else self.round.find(trial.job, candidate)
        if candidate is None or found is None or self._may_be_contested(assignment, trial, candidate):
            return []
        own = {node.name: node.domain for node in self.round.snapshot.nodes if node.name in found[0]}
        names = sorted({name for name in own.values() if name})
        return [Change("domain", feeds.domains[lack.number].name, "/".join(names))] if names else []

    # -- trials -------------------------------------------------------------------------------------------

    def _trial(self, job: Job) -> Assignment:
        """An assignment of the changed job."""
        state = self.round.state
        assignment = Assignment(job, state.candidates.of(job))
        assignment.ranked = state.rank_apart(assignment)
        return assignment

    def _open(self, trial: Assignment) -> Candidate | None:
        """The first candidate that has free room now and that quota allows."""
        job = trial.job
        for row in trial.ranked or ():
            candidate = row.candidate
            if self.round.allows(job, candidate):
                found = self.round.find(job, candidate)
                if found is not None:
                    return None if found[1] else candidate
        return None

    def _room(self, job: Job, row: RankedCandidate) -> int:
        """Pods of this shape that fit anywhere in the pool."""
        if row.shape not in self._rooms:
            self._rooms[row.shape] = self.round.pods_that_fit(job, row.candidate)
        return self._rooms[row.shape]

    def _starts(self, assignment: Assignment, trial: Assignment) -> bool:
        """Whether the changed job starts in free room and keeps it."""
        candidate = self._open(trial)
        return candidate is not None and not self._may_be_contested(assignment, trial, candidate)

    def _fits_now(self, job: Job, candidate: Candidate) -> bool:
        found = self.round.find(job, candidate)
        return found is not None and not found[1]

    def _by_preemption(self, assignment: Assignment, trial: Assignment) -> str | bool | None:
        """Whether the changed job starts in the place of others: by "right", by "value", or "unsure" (it may
        not keep the place). None: no tries are left."""
        if self._open(trial):
            return "unsure"
        round_ = self.round
        if self._may_not_disrupt(trial):
            return False
        if self._left <= 0:
            return None
        self._left -= 1
        with round_.stoppable.few(FEW):
            by = self._preempts(assignment, trial)
        return self._preempts(assignment, trial) if round_.stoppable.cut and by != "right" else by

    def _preempts(self, assignment: Assignment, trial: Assignment) -> str | bool:
        round_ = self.round
        with (
            self._standing_in(trial),
            round_.holdings.assuming_entitlements(self._entitled_if(assignment, trial)),
        ):
            reclaim(round_, [trial])
            by = "right"
            if trial.placement is None:
                improve_one(round_, trial)
                by = "value"
            if trial.placement is None:
                return False
            candidate, sure = trial.candidate, not trial.waits_for_release
        if not sure or candidate is None or self._may_be_contested(assignment, trial, candidate, new=True):
            return "unsure"
        return by

    def _may_not_disrupt(self, assignment: Assignment) -> bool:
        """Whether no more jobs may be stopped for this one in this round."""
        best = self.round.holdings.best_right(assignment.job.tenant, assignment.option.sizes)
        return not self.round.can_disrupt() and best > Right.GUARANTEED

    def _starts_with(self, assignment: Assignment, row: str, limit: int, anyhow: bool = False) -> bool:
        """Whether the job starts in free room, in its turn, if this row of quota allows this much; `anyhow`:
        also by right, and True if that cannot be decided."""
        if self._left <= 0:
            return anyhow
        self._left -= 1
        round_, holdings, name = self.round, self.round.holdings, assignment.job.tenant
        tenant = holdings.tenants[name]
        holdings.tenants[name] = _raised(tenant, row, limit)
        try:
            with round_.trial(), holdings.assuming_entitlements(holdings.entitled_now()):
                own = [other for other in round_.waiting() if other.job.tenant == name]
                rivals = [other for other in own if not _alike(other, assignment)]
                if len(start_waiting(round_, rivals)) < len(rivals):
                    return anyhow  # which job is next also depends on prices and holdings
                start_waiting(round_, own)
                if anyhow and assignment.placement is None:
                    reclaim(round_, [assignment])
                return assignment.placement is not None and (anyhow or not assignment.waits_for_release)
        finally:
            holdings.tenants[name] = tenant

    @contextmanager
    def _standing_in(self, trial: Assignment) -> Iterator[None]:
        """Within this context the changed job stands in for the job."""
        round_, state, job = self.round, self.round.state, trial.job.id
        assignment = state.assignments[job]
        state.assignments[job] = state.waiting[job] = trial
        try:
            with round_.trial():
                yield
        finally:
            state.assignments[job] = state.waiting[job] = assignment

    def _may_be_contested(
        self, assignment: Assignment, trial: Assignment, candidate: Candidate, new: bool = False
    ) -> bool:
        """Whether another tenant's waiting job may get a right to the place that it does not have now; with
        `new` (others were stopped for the place) any right counts, as those may have been protected where
        this job is not."""
        holdings, tenant, kind = self.round.holdings, assignment.job.tenant, candidate.accelerator
        claims = self._claims(kind)
        if not claims.keys() - {tenant} or holdings.inside_guarantee(tenant, kind, candidate.accelerators_m):
            return False
        then, now = self._entitled_if(assignment, trial), holdings.entitled
        lower = then.get(tenant, 0.0) < now.get(tenant, 0.0) - EPS
        for name, amount_m in claims.items():
            share = then.get(name, 0.0)
            if name == tenant or not (new or lower or share > now.get(name, 0.0) + EPS):
                continue
            units = holdings.units(name) + holdings.units_of(kind, amount_m)
            if units <= share + EPS or (new and holdings.inside_guarantee(name, kind, amount_m)):
                return True
        return False

    def _claims(self, accelerator: str) -> dict[str, int]:
        """The smallest request of the type among each tenant's waiting jobs."""
        if not self._least:
            for assignment in self._one_of_each():
                for kind, amount_m in assignment.option.sizes:
                    row = self._least.setdefault(kind, {})
                    row[assignment.job.tenant] = min(amount_m, row.get(assignment.job.tenant, amount_m))
        return self._least.get(accelerator, {})

    def _one_of_each(self) -> Iterator[Assignment]:
        """Waiting jobs: one of each queue, whose jobs make the same request, and all that stand in none."""
        round_ = self.round
        waiting, queues = round_.state.waiting, round_.state.queues
        for kinds in queues.settled(partial(order, round_)).values():
            for queue in kinds.values():
                job = next((key[-1] for key in queue if key[-1] in waiting), None)
                if job is not None:
                    yield waiting[job]
        moved = (one for one in round_.changed if one.job.run is not None)
        yield from (one for one in (*queues.stopped.values(), *moved) if one.job.id in waiting)

    def _entitled_if(self, assignment: Assignment, trial: Assignment) -> dict[str, float]:
        """Entitlements if the job were changed."""
        key = (assignment.job.tenant, assignment.option.sizes, trial.option.sizes)
        if key not in self._entitled:
            self._entitled[key] = self.round.holdings.entitled_if(assignment.option, trial.option)
        return self._entitled[key]

    # -- cached look-ups ------------------------------------------------------------------------------

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
            found, most = set[int](), self.round.holdings.tenants[tenant].priority_ceiling
            for pool in self.round.cluster.pools:
                found.update(map(_PRIORITY, self.round.held.get((pool, tenant), {}).values()))
            self._levels[tenant] = sorted({min(priority, most) for priority in found})
        return self._levels[tenant]


def _with_pods(job: Job, pods: int) -> Job:
    return replace(job, min_pods=pods, max_pods=pods)


def _alike(one: Assignment, other: Assignment) -> bool:
    """Whether the order of two waiting jobs is that of their values, whatever the prices."""
    job, rival = one.job, other.job
    same = one.option.shared is other.option.shared and job.kind == rival.kind
    return same and (job.user, job.priority) == (rival.user, rival.priority)


def _raised(tenant: Tenant, accelerator: str, limit_m: int) -> Tenant:
    """The tenant if its row for this accelerator allowed this much."""

    def row(quota: Quota) -> Quota:
        if quota.accelerator != accelerator:
            return quota
        ceiling = None if quota.ceiling_m is None else max(limit_m, quota.ceiling_m)
        borrow = quota.borrowable_m
        borrow = None if borrow is None else max(limit_m - quota.guaranteed_m, borrow)
        return replace(quota, ceiling_m=ceiling, borrowable_m=borrow)

    return replace(tenant, quotas=tuple(row(quota) for quota in tenant.quotas))
