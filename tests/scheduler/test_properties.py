"""Properties of the planner for every snapshot.

    property                                            test (here, where no file is named)
    capacity and quota are never exceeded, no gang      test_every_plan_is_allowed;
      is half placed                                    test_slow_releases_do_not_stop_a_job_twice_within_its_minimum_runtime
    no power domain carries more by a plan              test_power.py, test_react.py: test_the_same_where_watts_are_short
    input order changes nothing                         test_the_order_of_the_snapshots_items_changes_nothing
    process and hash seed change nothing                test_the_hash_seed_changes_nothing
    planning again gives no actions                     test_planning_again_gives_no_actions;
                                                        test_react.py: test_a_full_plan_after_react_converges;
                                                        search/test_milp.py: test_the_solver_only_improves_and_settles
    more quota or weight never lowers an entitlement    test_more_weight_or_guarantee_never_lowers_an_entitlement;
                                                        test_a_higher_ceiling_never_lowers_an_entitlement
    with arrivals stopped every feasible job starts     test_with_arrivals_stopped_every_feasible_job_starts
    a tenant under its guarantee starts within          test_a_tenant_under_its_guarantee_starts_within_the_deadline;
      the reclaim deadline                              search/test_reclaim_deadline.py, where borrowers refill every hole
    an admitted job is not evicted for one that it      test_nobody_is_stopped_for_a_job_that_was_stopped_for_it
      would evict
    1 % noise in speeds moves nothing                   test_noise_in_the_speeds_moves_no_running_job
    explanations are true and minimal                   test_a_proposed_change_starts_the_job_and_a_smaller_one_does_not;
                                                        explain/test_suggestions.py
    a memo changes nothing                              test_react.py: test_a_memo_changes_nothing_and_every_answer_is_allowed

Examples in which one of these once failed: test_settles.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from random import Random
from typing import TypeVar

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from busbar.scheduler import (
    ActionKind,
    Cell,
    Change,
    Event,
    Job,
    JobId,
    PerformanceTable,
    Plan,
    Policy,
    Quota,
    Resources,
    Run,
    Snapshot,
    TableView,
    Tenant,
    WaitCode,
    WaitingRecord,
    applied,
    check_plan,
    plan,
    react,
)
from busbar.scheduler.fairness.fair_share import Claim, entitlements
from busbar.scheduler.model.plans import NEVER

from .build import NOW
from .strategies import KINDS, peopled, powered, snapshots

POLICY = Policy(solver_seconds=None)
T = TypeVar("T")
quiet = settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def made(snapshot: Snapshot, now: float = NOW) -> Plan:
    return plan(snapshot, POLICY, now)[0]


@quiet
@given(snapshots())
def test_every_plan_is_allowed(snapshot: Snapshot) -> None:
    assert check_plan(snapshot, made(snapshot)) == []


@quiet
@given(snapshots())
def test_every_plan_without_a_minimum_runtime_is_allowed(snapshot: Snapshot) -> None:
    found, _ = plan(snapshot, replace(POLICY, min_run_s=0.0), NOW)
    assert check_plan(snapshot, found) == []


@quiet
@given(snapshots())
def test_planning_again_gives_no_actions(snapshot: Snapshot) -> None:
    after = applied(snapshot, made(snapshot), NOW)
    assert made(after).actions == ()


@quiet
@given(snapshots(), st.randoms(use_true_random=False))
def test_the_order_of_the_snapshots_items_changes_nothing(snapshot: Snapshot, random: Random) -> None:
    def mixed(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(random.sample(items, len(items)))

    other = replace(
        snapshot,
        jobs=mixed(snapshot.jobs),
        nodes=mixed(snapshot.nodes),
        pools=mixed(snapshot.pools),
        tenants=mixed(snapshot.tenants),
        table=replace(snapshot.table, cells=mixed(snapshot.table.cells)),
    )
    assert made(other) == made(snapshot)


@quiet
@given(snapshots())
def test_snapshots_and_plans_survive_json(snapshot: Snapshot) -> None:
    text = json.dumps(snapshot.to_json())
    assert Snapshot.from_json(json.loads(text)) == snapshot
    result = made(snapshot)
    assert Plan.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_the_hash_seed_changes_nothing() -> None:
    program = (
        "import json; from benchmarks.scheduling.generator import NOW, generate; "
        "from busbar.scheduler import Policy, plan; policy = Policy(solver_seconds=None); "
        "print(json.dumps(plan(generate(40, 80, 80, 4), policy, NOW)[0].to_json(), sort_keys=True))"
    )
    out = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert out[0] == out[1]
    assert len(out[0]) > 1000


@quiet
@given(snapshots())
def test_with_arrivals_stopped_every_feasible_job_starts(snapshot: Snapshot) -> None:
    now = NOW
    for _ in range(2 * len(snapshot.jobs) + 2):
        result = made(snapshot, now)
        snapshot = applied(snapshot, result, now)
        now += 1000.0
        # The job that has run longest ends, and so do all jobs that were being stopped or are pinned for ever.
        running = sorted((j.run.started_at_s, j.id) for j in snapshot.jobs if j.run is not None)
        gone = {running[0][1]} if running else set()
        jobs = tuple(
            replace(j, run=None) if j.run is not None and j.run.releasing else j
            for j in snapshot.jobs
            if j.id not in gone
        )
        snapshot = replace(snapshot, jobs=jobs)
    result = made(snapshot, now)
    impossible = NEVER | {WaitCode.CEILING, WaitCode.BORROW_LIMIT, WaitCode.NODES_CLOSED}
    left = [record for record in result.waiting if record.code not in impossible]
    assert left == []


def _settled(snapshot: Snapshot) -> tuple[Snapshot, float]:
    """The snapshot after enough rounds that no action is left."""
    now = NOW
    for _ in range(8):
        result = made(snapshot, now)
        if not result.actions:
            break
        snapshot = applied(snapshot, result, now)
        now += 400.0
    assume(not made(snapshot, now).actions)
    return snapshot, now


@quiet
@given(snapshots(), st.lists(st.floats(-0.01, 0.01), min_size=8, max_size=8))
def test_noise_in_the_speeds_moves_no_running_job(snapshot: Snapshot, noise: list[float]) -> None:
    snapshot, now = _settled(snapshot)
    cells = tuple(
        replace(cell, speed=cell.speed * (1 + error))
        for cell, error in zip(snapshot.table.cells, noise, strict=True)
    )
    noisy = made(replace(snapshot, table=replace(snapshot.table, cells=cells)), now)
    assert [action for action in noisy.actions if action.kind is not ActionKind.START] == []


@quiet
@given(snapshots() | powered())
def test_a_proposed_change_starts_the_job_and_a_smaller_one_does_not(snapshot: Snapshot) -> None:
    """Every kind of suggested change. The smaller change is half of it, or one pod or watt less."""
    snapshot, now = _settled(snapshot)
    for record in made(snapshot, now).waiting:
        for change in record.changes:
            assert _starts(snapshot, now, record, change.kind, change.needed), (record, change)
            less = _less(change)
            assert less is None or not _starts(snapshot, now, record, change.kind, less), (
                record,
                change,
                less,
            )


def _less(change: Change) -> str | None:
    """Half of the change, or the next smaller number of pods. None: no smaller change exists."""
    if change.kind == "pods":
        more = int(change.needed) + 1
        return str(more) if more < int(change.current) else None
    if change.kind == "accelerators":
        less = int(change.needed) - 1
        return str(less) if less > int(change.current) else None
    if change.kind == "priority":
        less = (int(change.current) + int(change.needed)) // 2
        return str(less) if less > int(change.current) else None
    if change.kind == "quota":
        return str((float(change.current) + float(change.needed)) / 2)
    if change.kind == "watts":
        return str(int(change.needed) - 1)
    if change.kind in ("cpu", "memory"):
        return str((int(change.current) + int(change.needed)) // 2)
    return None


def _starts(snapshot: Snapshot, now: float, record: WaitingRecord, kind: str, needed: str) -> bool:
    """Whether the job starts after this change (the solver may still find a better use for its placement)."""
    job = next(job for job in snapshot.jobs if job.id == record.job)
    if kind == "accelerator":
        job = replace(job, accelerators=(needed,))
    elif kind == "pods":
        job = replace(job, min_pods=int(needed), max_pods=int(needed))
    elif kind == "accelerators":
        job = replace(job, per_pod=replace(job.per_pod, accelerators_m=1000 * int(needed)))
    elif kind in ("cpu", "memory"):
        less = {"cpu": "cpu_m", "memory": "memory_mib"}[kind]
        job = replace(job, per_pod=replace(job.per_pod, **{less: int(needed)}))
    elif kind == "mode":
        job = replace(job, modes=(needed,))
    elif kind == "priority":
        job = replace(job, priority=int(needed))
    changed = replace(snapshot, jobs=tuple(job if j.id == job.id else j for j in snapshot.jobs))
    if kind == "quota":
        changed = replace(changed, tenants=_raised(changed, record.tenant, record.resource, needed))
    if kind == "watts":
        domains = tuple(
            replace(each, usable_w=each.usable_w + int(needed) * (each.name == record.domain))
            for each in changed.domains
        )
        changed = replace(changed, domains=domains)
    return any(
        action.job == job.id and action.kind is ActionKind.START for action in made(changed, now).actions
    )


def _raised(snapshot: Snapshot, tenant: str, row: str, needed: str) -> tuple[Tenant, ...]:
    limit = round(float(needed) * 1000)

    def raised(quota: Quota) -> Quota:
        if quota.accelerator != row:
            return quota
        ceiling = None if quota.ceiling_m is None else max(limit, quota.ceiling_m)
        borrow = None if quota.borrowable_m is None else max(limit - quota.guaranteed_m, quota.borrowable_m)
        return replace(quota, ceiling_m=ceiling, borrowable_m=borrow)

    return tuple(
        replace(t, quotas=tuple(raised(q) for q in t.quotas)) if t.name == tenant else t
        for t in snapshot.tenants
    )


claims = st.lists(
    st.builds(
        lambda org, weight, guaranteed, demand: (org, weight, guaranteed, demand),
        st.sampled_from(("", "o", "p")),
        st.sampled_from((0.5, 1.0, 3.0)),
        st.integers(0, 6),
        st.dictionaries(
            st.frozensets(st.sampled_from(KINDS), min_size=1), st.integers(1, 20), min_size=1, max_size=3
        ),
    ),
    min_size=1,
    max_size=4,
)


def _claims(rows: list[tuple[str, float, int, dict[frozenset[str], int]]]) -> list[Claim]:
    return [
        Claim(f"t{i}", org, weight, guaranteed, float("inf"), tuple((k, float(v)) for k, v in demand.items()))
        for i, (org, weight, guaranteed, demand) in enumerate(rows)
    ]


@quiet
@given(claims, st.sampled_from((2.0, 4.0)))
def test_more_weight_or_guarantee_never_lowers_an_entitlement(
    rows: list[tuple[str, float, int, dict[frozenset[str], int]]], factor: float
) -> None:
    # Guarantees within the cluster's capacity, for which its administrator is responsible.
    assume(sum(row[2] for row in rows) <= 4)
    capacity = {"H100": 8.0, "L4": 6.0, "V100": 4.0}
    base = entitlements(_claims(rows), capacity)
    org, weight, guaranteed, demand = rows[0]
    heavier = entitlements(_claims([(org, weight * factor, guaranteed, demand), *rows[1:]]), capacity)
    assert heavier["t0"] >= base["t0"] - 1e-6
    promised = entitlements(_claims([(org, weight, guaranteed + 1, demand), *rows[1:]]), capacity)
    assert promised["t0"] >= base["t0"] - 1e-6


@quiet
@given(claims, st.integers(1, 12), st.sampled_from(KINDS), st.booleans())
def test_a_higher_ceiling_never_lowers_an_entitlement(
    rows: list[tuple[str, float, int, dict[frozenset[str], int]]], limit: int, kind: str, typed: bool
) -> None:
    assume(sum(row[2] for row in rows) <= 4)
    capacity = {"H100": 8.0, "L4": 6.0, "V100": 4.0}
    first, *others = _claims(rows)
    found = []
    for most in (float(limit), limit + 2.0):
        capped = replace(first, type_limit={kind: most}) if typed else replace(first, limit=most)
        found.append(entitlements([capped, *others], capacity)[first.name])
    assert found[1] >= found[0] - 1e-6


@quiet
@given(claims)
def test_entitlements_fit_the_cluster_and_leave_nothing_wanted_idle(
    rows: list[tuple[str, float, int, dict[frozenset[str], int]]],
) -> None:
    capacity = {"H100": 8.0, "L4": 6.0, "V100": 4.0}
    assume(sum(row[2] for row in rows) <= 4)
    found = entitlements(_claims(rows), capacity)
    wanted = {f"t{i}": float(sum(row[3].values())) for i, row in enumerate(rows)}
    assert sum(found.values()) <= sum(capacity.values()) + 1e-6
    assert all(found[name] <= wanted[name] + 1e-6 for name in found)
    anywhere = [(org, w, g, {frozenset(KINDS): sum(demand.values())}) for org, w, g, demand in rows]
    free = entitlements(_claims(anywhere), capacity)
    assert abs(sum(free.values()) - min(sum(capacity.values()), sum(wanted.values()))) < 1e-4


@quiet
@given(claims, st.sampled_from((3.0, 18.0, 60.0)))
def test_where_all_may_use_the_same_types_the_flow_gives_the_same(
    rows: list[tuple[str, float, int, dict[frozenset[str], int]]], size: float
) -> None:
    capacity = {"H100": size / 2, "L4": size / 3, "V100": size / 6}
    alike = _claims([(org, w, g, {frozenset(KINDS): sum(demand.values())}) for org, w, g, demand in rows])
    # A tenant that may use one type only and has no demand changes no share, but makes the planner use max flow.
    picky = Claim("picky", "", 1.0, 0.0, float("inf"), ((frozenset({"L4"}), 0.0),))
    by_flow = entitlements([*alike, picky], capacity)
    found = entitlements(alike, capacity)
    assert all(abs(found[name] - by_flow[name]) < 1e-5 for name in found)


def test_a_cell_of_speed_zero_is_believed() -> None:
    cell = Cell("x", "H100", 1000, speed=0.0)
    assert TableView(PerformanceTable((cell,))).estimate("x", "H100", "resident", 1000) is None


def _carried_out(snapshot: Snapshot, result: Plan, now: float) -> tuple[Snapshot, set[str]]:
    """Carries out a plan as an operator does: stops take until the next round; starts without free devices are
    skipped."""
    jobs = []
    actions = {action.job: action for action in result.actions}
    disturbed: set[str] = set()
    for job in snapshot.jobs:
        action = actions.get(job.id)
        if job.run is not None and job.run.releasing:
            job = replace(job, run=None, last_move_at_s=now, preemptions=job.preemptions + 1)
        elif action is not None and action.kind is ActionKind.START and not action.after:
            assert action.to is not None
            job = replace(job, run=Run(action.to, now))
        elif action is not None and job.run is not None:
            job = replace(job, run=replace(job.run, releasing=True))
            disturbed.add(str(job.id))
        jobs.append(job)
    return replace(snapshot, jobs=tuple(jobs)), disturbed


@quiet
@given(snapshots())
def test_slow_releases_do_not_stop_a_job_twice_within_its_minimum_runtime(snapshot: Snapshot) -> None:
    """Events every five seconds and a full plan at every second one: no job is stopped twice within `min_run_s`."""
    now = NOW
    stopped_at: dict[str, float] = {}
    result, memo = plan(snapshot, POLICY, now)
    before = snapshot
    for step in range(80):
        if step % 2:
            result, memo = plan(snapshot, POLICY, now, memo)
        else:
            result, memo = react(snapshot, result, Event.between(before, snapshot, now), memo)
        assert check_plan(snapshot, result) == []
        before = snapshot
        snapshot, disturbed = _carried_out(snapshot, result, now)
        for name in disturbed:
            assert now - stopped_at.get(name, 0.0) >= POLICY.min_run_s
            stopped_at[name] = now
        now += 5.0


def _lendable(snapshot: Snapshot, kind: str, promised_m: int) -> Snapshot:
    """The snapshot with this guarantee for the first tenant and the rest for the others. Its jobs are preemptible and
    request little beside accelerators."""
    left = dict.fromkeys(KINDS, 0)
    for node in snapshot.nodes:
        left[node.pool] += node.capacity.accelerators_m
    first, *others = snapshot.tenants
    left[kind] -= promised_m
    tenants = [replace(first, quotas=(Quota(kind, promised_m),))]
    for tenant in others:
        rows = []
        for quota in tenant.quotas:
            if quota.accelerator in left:
                rows.append(Quota(quota.accelerator, min(quota.guaranteed_m, left[quota.accelerator])))
                left[quota.accelerator] -= rows[-1].guaranteed_m
        tenants.append(replace(tenant, quotas=tuple(rows)))
    jobs = []
    for job in snapshot.jobs:
        light = replace(job.per_pod, cpu_m=100, memory_mib=100)
        run = (
            None if job.run is None else replace(job.run, placement=replace(job.run.placement, per_pod=light))
        )
        jobs.append(replace(job, preemptible=True, per_pod=light, run=run))
    return replace(snapshot, tenants=tuple(tenants), jobs=tuple(jobs))


@quiet
@given(snapshots(), st.integers(1, 4))
def test_a_tenant_under_its_guarantee_starts_within_the_deadline(snapshot: Snapshot, count: int) -> None:
    """Also when other jobs have only just started, and with releases that take until the next round."""
    kind = snapshot.pools[0].accelerator
    total = sum(node.capacity.accelerators_m for node in snapshot.nodes if node.pool == kind)
    promised = min(1000 * count, total)
    snapshot = _lendable(snapshot, kind, promised)
    asked = Job(
        JobId("asked"),
        "asked",
        "ns",
        snapshot.tenants[0].name,
        per_pod=Resources(1000, 100, 100),
        accelerators=(kind,),
        priority=200,
        submitted_at_s=NOW,
    )
    snapshot = replace(snapshot, jobs=(*snapshot.jobs, asked))
    result, memo = plan(snapshot, POLICY, NOW)
    now, before = NOW, snapshot
    while now <= NOW + POLICY.guarantee_reclaim_s:
        snapshot, _ = _carried_out(snapshot, result, now)
        now += 10.0
        if now % 50:
            result, memo = react(snapshot, result, Event.between(before, snapshot, now), memo)
        else:
            result, memo = plan(snapshot, POLICY, now, memo)
        before = snapshot
    mine = [j for j in snapshot.jobs if j.tenant == asked.tenant and j.run is not None]
    held = sum(j.run.placement.accelerators_m for j in mine if j.run and j.run.placement.pool == kind)
    assert any(j.id == asked.id for j in mine) or held + 1000 > promised


def _stopped_for(result: Plan) -> set[tuple[JobId, JobId]]:
    """(jobs that start, jobs that are stopped for them)."""
    stopped = {action.job for action in result.actions if action.kind is ActionKind.PREEMPT}
    starts = [action for action in result.actions if action.kind is ActionKind.START]
    return {(action.job, victim) for action in starts for victim in stopped.intersection(action.after)}


@quiet
@given(st.one_of(snapshots(), peopled()))
def test_nobody_is_stopped_for_a_job_that_was_stopped_for_it(snapshot: Snapshot) -> None:
    """Stopped jobs wait again, and every job has run long enough to be preemptible at the next plan."""
    now = NOW
    seen: set[tuple[JobId, JobId]] = set()
    for _ in range(6):
        result = made(snapshot, now)
        pairs = _stopped_for(result)
        assert not {(victim, other) for other, victim in pairs} & seen
        seen |= pairs
        snapshot = applied(snapshot, result, now)
        now += POLICY.min_run_s + 100.0


def test_a_mode_known_on_one_type_only_is_estimated_on_the_others() -> None:
    resident = tuple(Cell("x", kind, 1000, speed=2.0) for kind in KINDS)
    table = PerformanceTable((*resident, Cell("x", "H100", 1000, "offload", speed=1.0)))
    found = [TableView(table).estimate("x", kind, "offload", 1000) for kind in KINDS]
    assert [estimate is not None and estimate.speed > 0 for estimate in found] == [True, True, True]
    assert TableView(table).estimate("x", "L4", "streaming", 1000) is None
