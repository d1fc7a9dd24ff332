"""A cluster over a few hours, planned as in production: a full plan every round, `react` for every event in between.

Unlike the simulator (`busbar.scheduler.simulate`), which replays traces to their last job, this starts from complete
snapshots: quotas, priorities, elastic jobs, running jobs. It stops after a given time, so that a job
that never starts is a result and not an endless run.

A job that the plan stops saves first; every start after its first costs `Job.restart_s` without progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from busbar.scheduler import (
    Action,
    Estimate,
    Event,
    Job,
    JobId,
    Memo,
    Placement,
    Plan,
    Policy,
    Reservation,
    Snapshot,
    TableView,
    WaitingRecord,
    applied,
    check_plan,
    plan,
    react,
)
from busbar.scheduler.simulate.past import Past

ROUND_S = 60.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job, and its run time with its fewest pods on its best accelerator. It arrives at `job.submitted_at_s`, or
    exists from the start if that is not positive; the replay begins at 0."""

    job: Job
    hours: float


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of a replay."""

    cluster: Snapshot
    """The cluster without its jobs."""
    arrivals: tuple[Arrival, ...]
    hours: float
    """Length of the replay."""
    lengths_known: bool = True
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a replay, by name of the job."""

    situation: Situation
    first_start_s: Mapping[str, float]
    end_s: Mapping[str, float]
    moves: Mapping[str, int]
    """Starts after the first, resizes included."""
    placements: Mapping[str, Placement | None]
    """Work left at the end of the replay, of the jobs that have not ended."""
    pieces: tuple[tuple[str, float, float, float], ...]
    """(tenant, from, to, work done)."""
    records: Mapping[str, WaitingRecord]
    """Records of waiting jobs, at the end of the replay."""
    used_s: float = 0.0
    """Accelerator-seconds held by jobs."""

    def wait_s(self, name: str) -> float:
        """Seconds until the first start; for a job that never started, until the end of the replay."""
        job = next(a.job for a in self.situation.arrivals if a.job.name == name)
        started = self.first_start_s.get(name, self.situation.hours * 3600)
        return started - max(0.0, job.submitted_at_s)

    def pods(self, name: str) -> int:
        """Pods at the end of the replay; 0: it waits."""
        place = self.placements.get(name)
        return 0 if place is None else place.pods

    def accelerator(self, name: str) -> str:
        """The accelerator type at the end of the replay; "": it waits."""
        place = self.placements.get(name)
        return "" if place is None else place.accelerator

    def work(self, tenant: str, from_h: float, to_h: float) -> float:
        """Work done per second by a tenant's jobs in an interval."""
        done = sum(
            work
            for owner, begin, end, work in self.pieces
            if owner == tenant and begin >= from_h * 3600 - 1e-6 and end <= to_h * 3600 + 1e-6
        )
        return done / ((to_h - from_h) * 3600)


@dataclass(slots=True)
class _Live:
    """A job's true state in the cluster."""

    job: Job
    left: float
    speed: float = 0.0
    works_from_s: float = 0.0
    """The restart's cost has passed."""
    updated_s: float = 0.0


def replay(situation: Situation) -> Outcome:
    """Watch the cluster.

    Raises:
        AssertionError: the checker refused a plan (a defect of the planner).
    """
    return _Replay(situation).run()


class _Replay:
    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self.policy = replace(situation.policy, solver_seconds=None)  # no time limit: reproducible results
        self.table = TableView(situation.cluster.table)
        self.live: dict[JobId, _Live] = {}
        self.past = Past(self.policy.usage_half_life_s)
        self.first_start_s: dict[str, float] = {}
        self.end_s: dict[str, float] = {}
        self.moves: dict[str, int] = {}
        self.pieces: list[tuple[str, float, float, float]] = []
        self.used_s = 0.0
        self.reservations: tuple[Reservation, ...] = ()

    def run(self) -> Outcome:
        coming = sorted(self.situation.arrivals, key=lambda a: (a.job.submitted_at_s, a.job.id))
        until, round_at = self.situation.hours * 3600, 0.0
        now = 0.0
        last: Plan | None = None
        memo: Memo | None = None
        before = self.situation.cluster
        while now <= until and (last is None or self.live or coming):
            for live in self.live.values():
                self._advance(live, now)
            self._finish(now)
            while coming and coming[0].job.submitted_at_s <= now:
                self._arrive(coming.pop(0))
            snapshot = self._snapshot(now)
            if last is None or now >= round_at:
                last, memo = plan(snapshot, self.policy, now, memo)
                round_at = now + ROUND_S
            else:
                last, memo = react(snapshot, last, Event.between(before, snapshot, now), memo)
            wrong = check_plan(snapshot, last)
            assert not wrong, wrong
            before = applied(snapshot, last, now)
            self.reservations = last.reservations
            for job in before.jobs:
                self.live[job.id].job = job
            for action in last.actions:
                self._carried_out(action, now)
            now = min([round_at, *self._ends(), *(a.job.submitted_at_s for a in coming[:1])])
        assert last is not None
        return Outcome(
            self.situation,
            self.first_start_s,
            self.end_s,
            self.moves,
            {e.job.name: None if e.job.run is None else e.job.run.placement for e in self.live.values()},
            tuple(self.pieces),
            {self.live[record.job].job.name: record for record in last.waiting},
            self.used_s,
        )

    def _arrive(self, arrival: Arrival) -> None:
        job = arrival.job
        speeds = [
            found.speed
            for pool in self.situation.cluster.pools
            for mode in job.modes
            if (found := self._estimate(job, pool.accelerator, mode, job.min_pods)) is not None
        ]
        live = _Live(job, arrival.hours * 3600 * max(speeds, default=1.0))
        self.live[job.id] = live
        if job.run is not None:
            self.first_start_s[job.name] = 0.0
            live.speed = self._speed(job, job.run.placement)

    def _estimate(self, job: Job, accelerator: str, mode: str, pods: int) -> Estimate | None:
        size = pods * job.per_pod.accelerators_m
        return self.table.estimate(job.workload_class, accelerator, mode, size, job.tenant)

    def _speed(self, job: Job, place: Placement) -> float:
        found = self._estimate(job, place.accelerator, place.mode, place.pods)
        assert found is not None, f"{job.name} runs where the table says that it cannot"
        return found.speed

    def _advance(self, live: _Live, now: float) -> None:
        run = live.job.run
        begin, live.updated_s = live.updated_s, now
        if run is None or now <= begin:
            return
        work = live.speed * max(0.0, now - max(begin, live.works_from_s))
        live.left = max(0.0, live.left - work)
        self.pieces.append((live.job.tenant, begin, now, work))
        self.used_s += (now - begin) * run.placement.accelerators_m / 1000
        rate = self.table.rate(run.placement.accelerator)
        used = (now - begin) * rate * run.placement.accelerators_m / 1000
        live.job = replace(live.job, attained_s=live.job.attained_s + used)
        self.past.add(live.job.tenant, live.job.user, used, now)

    def _finish(self, now: float) -> None:
        for live in [e for e in self.live.values() if e.left <= 1e-6 * max(e.speed, 1.0)]:
            self.end_s[live.job.name] = now
            del self.live[live.job.id]

    def _ends(self) -> list[float]:
        return [
            max(live.works_from_s, live.updated_s) + live.left / live.speed
            for live in self.live.values()
            if live.job.run is not None
        ]

    def _snapshot(self, now: float) -> Snapshot:
        jobs = []
        for live in self.live.values():
            job = live.job
            left = live.left if self.situation.lengths_known else None
            run = None if job.run is None else replace(job.run, saved_at_s=now)
            jobs.append(replace(job, run=run, remaining_work=left))
        cluster = self.situation.cluster
        tenants = self.past.known(cluster.tenants)
        return replace(cluster, jobs=tuple(jobs), tenants=tenants, reservations=self.reservations)

    def _carried_out(self, action: Action, now: float) -> None:
        live = self.live[action.job]
        run, name = live.job.run, live.job.name
        live.updated_s = now
        if run is None:
            return
        first = name not in self.first_start_s
        if first:
            self.first_start_s[name] = now
        else:
            self.moves[name] = self.moves.get(name, 0) + 1
        live.speed = self._speed(live.job, run.placement)
        live.works_from_s = now + (0.0 if first else live.job.restart_s)
