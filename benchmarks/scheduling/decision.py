"""Decision time: 1,000 nodes x 8, 2,000 running and 2,000 waiting jobs, 10 tenants; and ten times that.

For every seed: the full plan; then, with that plan carried out, a chain of events answered by `react`, each on
the snapshot and the plan of the one before (so the first also follows the hundreds of changes that carrying the
plan out made), and one more arrival on a snapshot of which no object is shared with the one before; then, on the
first snapshot again, the reclaim: a gang of a quarter of the cluster arrives whose tenant is guaranteed that quarter,
and every job on it is preempted; then the full plan with the mixed-integer step, and two arrivals while the jobs that it
stops are still being stopped. CPU seconds of one thread; the collector runs before every measurement. Every plan is checked.

At its end a full plan takes the memo's state to the snapshot with the plan carried out. That stands in the time of the
plan, so the first event of the chain (`react_first_cpu_s`) compares the plan's changes and follows none of them. Where
releases take time (`react_stopping_cpu_s`), the first arrival follows them to where the jobs are, and counts the places as
taken that jobs wait for; the second finds them so. `Event.between` is measured apart (`event_cpu_s`).
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from benchmarks.scheduling.generator import NOW, PER_NODE, TYPES, generate

from busbar.scheduler import (
    ActionKind,
    Event,
    Job,
    JobId,
    Memo,
    Plan,
    Policy,
    Quota,
    Resources,
    Snapshot,
    applied,
    check_plan,
    highs,
    plan,
    react,
    updated,
)
from busbar.scheduler.model.snapshot import Delta
from busbar.scheduler.simulate.metrics import percentile

RUNS = 20
LARGE_RUNS = 2
BEFORE_SOLVER = Policy(solver=False)
"""The committed policy without the mixed-integer step, whose time is measured separately."""
EVENTS = 12
"""Events per seed: each of the kinds below, in turn."""

Row = dict[str, Any]


def rows() -> list[Row]:
    """1,000 nodes, and 10,000 nodes on few seeds."""
    judged = measure(1000, RUNS)
    bars = {
        "plan_p99_s": _bar(judged["plan_cpu_s"]["p99"], 1.0),
        "reclaim_p99_s": _bar(judged["reclaim_plan_cpu_s"]["p99"], 1.0),
        "react_p99_s": _bar(judged["react_cpu_s"]["p99"], 0.05),
        "reclaim_react_p99_s": _bar(judged["reclaim_react_cpu_s"]["p99"], 0.05),
        "peak_memory_gib": _bar(judged["peak_memory_gib"], 1.0),
        "reclaims_refused": _bar(judged["reclaims_refused"], 0),
    }
    large = measure(10_000, LARGE_RUNS)
    large_bars = {
        "plan_p99_s": _bar(large["plan_cpu_s"]["p99"], 3.0),
        "react_p99_s": _bar(large["react_cpu_s"]["p99"], 0.1),
        "react_stopping_p99_s": _bar(large["react_stopping_cpu_s"]["p99"], 0.1),
        "peak_memory_gib": _bar(large["peak_memory_gib"], 4.0),
    }
    return [judged | {"bars": bars}, large | {"bars": large_bars}]


def _bar(value: float, most: float) -> Row:
    return {"at_most": most, "met": value <= most}


def measure(nodes: int, runs: int) -> Row:
    """CPU seconds over so many seeds."""
    run = _Measured()
    for seed in range(runs):
        snapshot = run.timed("build", partial(generate, nodes, 2 * nodes, 2 * nodes, seed=seed))
        run.one(snapshot, seed)
    times = run.times
    return {
        "nodes": nodes,
        "runs": runs,
        "plan_cpu_s": _summary(times["plan"]),
        "react_cpu_s": _summary(times["react"]) | {"events": len(times["react"])},
        "react_p99_by_event_cpu_s": {
            kind.removeprefix("react: "): round(percentile(found, 99), 4)
            for kind, found in sorted(times.items())
            if kind.startswith("react: ")
        },
        "react_first_cpu_s": _summary(times["react first"]),
        "react_stopping_cpu_s": _summary(times["react stopping"]),
        "react_rebuilt_cpu_s": _summary(times["react rebuilt"]),
        "event_cpu_s": _summary(times["event"]),
        "reclaim_plan_cpu_s": _summary(times["reclaim plan"]),
        "reclaim_react_cpu_s": _summary(times["reclaim react"]),
        "reclaims_refused": run.refused,
        "snapshot_build_cpu_s": _summary(times["build"]),
        "with_solver": {
            "solver_runs": len(times["solver"]),
            "solver_cpu_s": _summary(times["solver"]) if times["solver"] else None,
            "plan_without_solver_cpu_s": _summary(times["plan around solver"]),
            "value_gained": [round(gain, 4) for gain in run.gains],
        },
        "certified_gap": {"min": round(min(run.gaps), 4), "max": round(max(run.gaps), 4)},
        "violations": run.violations,
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
    }


class _Measured:
    """The measurements so far."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {"solver": []}
        self.gains: list[float] = []
        """Part of the plan's value that the solver added, by seed."""
        self.gaps: list[float] = []
        self.violations = 0
        self.refused = 0

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        gc.collect()  # garbage of earlier steps is not this step's cost
        begin = time.process_time()
        result = call()
        self.times.setdefault(name, []).append(time.process_time() - begin)
        return result

    def one(self, snapshot: Snapshot, seed: int) -> None:
        """One seed: the full plan, a chain of events, the reclaim, and the full plan with the solver."""
        made, memo = self.timed("plan", lambda: plan(snapshot, BEFORE_SOLVER, NOW))
        self.gaps.append(made.gap)
        self.violations += len(check_plan(snapshot, made))
        self._events(snapshot, made, memo, Random(seed))
        self._reclaim(snapshot)
        self._stopping(snapshot, *self._solver(snapshot, made.value), Random(seed))

    def _events(self, snapshot: Snapshot, made: Plan, memo: Memo, random: Random) -> None:
        now, before, after = NOW, snapshot, applied(snapshot, made, NOW)
        for kind, changed in _happenings(random):
            now += 5.0
            after = changed(after, now)
            made, memo = self._answered("react: " + kind, before, after, made, memo, now)
            self.times.setdefault("react", []).append(self.times["react: " + kind][-1])
            if before is snapshot:
                self.times.setdefault("react first", []).append(self.times["react"][-1])
            before, after = after, applied(after, made, now)
        fresh = updated(_rebuilt(after), Delta(jobs=(_fresh(after, random, now + 5.0),)))
        self._answered("react rebuilt", before, fresh, made, memo, now + 5.0)

    def _answered(
        self, name: str, before: Snapshot, after: Snapshot, made: Plan, memo: Memo, now: float
    ) -> tuple[Plan, Memo]:
        event = self.timed("event", lambda: Event.between(before, after, now))
        told, memo = self.timed(name, lambda: react(after, made, event, memo))
        self.violations += len(check_plan(after, told))
        return told, memo

    def _reclaim(self, snapshot: Snapshot) -> None:
        """The gang arrives: answered by a full plan, and by `react` on a cluster with a stable plan."""
        lent, gang = reclaimed(snapshot)
        wanted = updated(lent, Delta(jobs=(gang,)))
        found, _ = self.timed("reclaim plan", lambda: plan(wanted, BEFORE_SOLVER, NOW))
        self.violations += len(check_plan(wanted, found))
        self._started(found, gang)
        now, before = NOW, lent
        made, memo = plan(lent, BEFORE_SOLVER, NOW)
        while made.actions:
            now += 600.0
            settled = applied(before, made, now)
            made, memo = react(settled, made, Event.between(before, settled, now), memo)
            before = settled
        wanted = updated(before, Delta(jobs=(gang,)))
        found, _ = self._answered("reclaim react", before, wanted, made, memo, now + 600)
        self._started(found, gang)

    def _started(self, found: Plan, gang: Job) -> None:
        self.refused += not any(a.job == gang.id and a.kind is ActionKind.START for a in found.actions)

    def _stopping(self, snapshot: Snapshot, made: Plan, memo: Memo, random: Random) -> None:
        """Two jobs arrive while the jobs that the plan stops still hold what they had."""
        now, before, after = NOW, snapshot, _begun(snapshot, made)
        for _ in range(2):
            now += 5.0
            after = updated(after, Delta(jobs=(_fresh(after, random, now),)))
            made, memo = self._answered("react stopping", before, after, made, memo, now)
            before = after

    def _solver(self, snapshot: Snapshot, value: float) -> tuple[Plan, Memo]:
        """The full plan once more with the mixed-integer step, whose time is measured separately."""
        plain, spent = highs.solve, []

        def solve(*args: Any, **more: Any) -> Any:
            begin = time.process_time()
            found = plain(*args, **more)
            spent.append(time.process_time() - begin)
            return found

        highs.solve = solve
        try:
            made, memo = self.timed("plan around solver", lambda: plan(snapshot, Policy(), NOW))
        finally:
            highs.solve = plain
        self.times["solver"] += spent
        self.times["plan around solver"][-1] -= sum(spent)
        self.violations += len(check_plan(snapshot, made))
        self.gains.append(made.solver_gain / value)
        return made, memo


def _summary(seconds: list[float]) -> Row:
    return {f"p{p}": round(percentile(seconds, p), 4) for p in (50, 99)} | {"max": round(max(seconds), 4)}


_Change = Callable[[Snapshot, float], Snapshot]


def _happenings(random: Random) -> Iterator[tuple[str, _Change]]:
    """Events, all kinds in turn."""
    kinds: tuple[tuple[str, _Change], ...] = (
        ("job ended", lambda s, now: updated(s, Delta(gone_jobs=(_running(s, random).id,)))),
        ("job arrived", lambda s, now: updated(s, Delta(jobs=(_fresh(s, random, now),)))),
        ("node lost", lambda s, now: updated(s, _node(s, random, ready=False))),
        ("job changed", lambda s, now: updated(s, Delta(jobs=(_raised(s, random),)))),
        ("speed reported", lambda s, now: updated(s, _faster(s, random))),
        ("node added", lambda s, now: updated(s, _node(s, random, ready=True))),
    )
    for number in range(EVENTS):
        yield kinds[number % len(kinds)]


def _rebuilt(snapshot: Snapshot) -> Snapshot:
    """An equal snapshot of new objects, as from an operator that builds each snapshot from the cluster."""
    jobs = []
    for job in snapshot.jobs:
        run = job.run
        if run is not None:
            run = replace(run, placement=replace(run.placement, per_pod=replace(run.placement.per_pod)))
        jobs.append(replace(job, per_pod=replace(job.per_pod), run=run))
    return replace(
        snapshot,
        pools=tuple(replace(pool) for pool in snapshot.pools),
        nodes=tuple(replace(node, capacity=replace(node.capacity)) for node in snapshot.nodes),
        tenants=tuple(replace(tenant) for tenant in snapshot.tenants),
        jobs=tuple(jobs),
        table=replace(snapshot.table, cells=tuple(replace(cell) for cell in snapshot.table.cells)),
    )


def _begun(snapshot: Snapshot, made: Plan) -> Snapshot:
    """The snapshot when all is started that can be, and the jobs that the plan stops are being stopped."""
    after = {job.id: job for job in applied(snapshot, made, NOW).jobs}
    waits = {action.job for action in made.actions if action.after}
    jobs = []
    for job in snapshot.jobs:
        if job.run is not None and after[job.id].run != job.run:
            jobs.append(replace(after[job.id], run=replace(job.run, releasing=True)))
        else:
            jobs.append(job if job.id in waits else after[job.id])
    return replace(snapshot, jobs=tuple(jobs), reservations=made.reservations)


def _running(snapshot: Snapshot, random: Random) -> Job:
    return random.choice([job for job in snapshot.jobs if job.run is not None])


def _fresh(snapshot: Snapshot, random: Random, now: float) -> Job:
    name = f"new-{now:.0f}"
    like = random.choice(snapshot.jobs)
    return replace(like, id=JobId(name), name=name, run=None, attained_s=0.0, submitted_at_s=now)


def _raised(snapshot: Snapshot, random: Random) -> Job:
    waiting = random.choice([job for job in snapshot.jobs if job.run is None])
    return replace(waiting, priority=waiting.priority + 100)


def _node(snapshot: Snapshot, random: Random, ready: bool) -> Delta:
    """A node is lost with its jobs, or the lost node returns."""
    node = next((n for n in snapshot.nodes if not n.ready), None) if ready else random.choice(snapshot.nodes)
    if node is None:
        return Delta()
    there = [job for job in snapshot.jobs if job.run is not None and node.name in job.run.placement.nodes]
    stopped = () if ready else tuple(replace(job, run=None) for job in there)
    return Delta(nodes=(replace(node, ready=ready),), jobs=stopped)


def _faster(snapshot: Snapshot, random: Random) -> Delta:
    cells = list(snapshot.table.cells)
    at = random.randrange(len(cells))
    cells[at] = replace(cells[at], speed=cells[at].speed * random.uniform(0.9, 1.1))
    return Delta(table=replace(snapshot.table, cells=tuple(cells)))


def reclaimed(snapshot: Snapshot) -> tuple[Snapshot, Job]:
    """The snapshot with one tenant guaranteed all of the first type, a quarter of the cluster, of which nobody else
    has a guarantee and which others have borrowed completely for longer than `min_run_s`; and the gang that reclaims
    it, that tenant's only job."""
    kind = next(iter(TYPES))
    owner = snapshot.tenants[0].name
    nodes = [node for node in snapshot.nodes if node.pool == kind]
    tenants = tuple(
        replace(
            tenant,
            quotas=(
                *(q for q in tenant.quotas if q.accelerator != kind),
                *([Quota(kind, 1000 * PER_NODE * len(nodes))] if tenant.name == owner else []),
            ),
        )
        for tenant in snapshot.tenants
    )
    lent = snapshot.tenants[1].name
    jobs = tuple(
        replace(
            job,
            tenant=lent if job.tenant == owner else job.tenant,
            run=None if job.run is None else replace(job.run, started_at_s=NOW - 3600.0),
        )
        for job in snapshot.jobs
    )
    gang = Job(
        JobId("reclaim"),
        "reclaim",
        "ns",
        owner,
        min_pods=len(nodes),
        max_pods=len(nodes),
        per_pod=Resources(1000 * PER_NODE),
        accelerators=(kind,),
        priority=1000,
        submitted_at_s=NOW,
    )
    return replace(snapshot, tenants=tenants, jobs=jobs), gang
