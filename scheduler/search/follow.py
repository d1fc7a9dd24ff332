"""How a planning state follows a snapshot that differs in a few objects, at the cost of the difference.

The state afterwards is that which would be built from the snapshot; where that cannot be had without building most of
it again, a new one is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from ..model.diff import differing
from ..model.plans import Objective
from ..model.snapshot import Job, JobId, Node, Snapshot
from ..model.table import TableView
from ..model.validate import validate
from .promised_places import drop, drop_all
from .state import Assignment, PlanningState

_ASKED = attrgetter(
    "workload_class",
    "tenant",
    "user",
    "kind",
    "min_pods",
    "max_pods",
    "per_pod",
    "accelerators",
    "pools",
    "modes",
    "submitted_at_s",
    "remaining_work",
    "attained_s",
    "yields",
    "needed_now",
    "node_selector",
    "required_domain",
    "more_host_memory_mib",
    "most_devices",
    "power_cap",
)
"""The fields of a job that its candidates, their values and their order depend on."""

_SIZE = attrgetter("name", "pool", "capacity", "domain", "limits_boards", "tells_boards")
"""The fields of a node that candidates depend on."""


def follow(state: PlanningState, snapshot: Snapshot) -> bool:
    """Change this state into that of another snapshot; False: build a new one (nothing was changed).

    Raises:
        SnapshotError: the snapshot contradicts itself.
    """
    old = state.snapshot
    if snapshot is old:
        return state.consistent
    if not state.consistent or state.policy.objective is Objective.MAKESPAN or _differ(old, snapshot):
        return False
    if state.candidates.draws.counts and snapshot.table is not old.table and snapshot.table != old.table:
        return False  # jobs that run may draw something else now
    gone, come = differing(old.jobs, snapshot.jobs)
    names = {job.id for job in come}
    if len(names) < len(come) or any(name in state.assignments for name in names - {job.id for job in gone}):
        validate(snapshot)
    validate(snapshot, old, come)
    if snapshot.nodes is not old.nodes and not _follows_nodes(state, snapshot):
        return False
    table = None
    if snapshot.table is not old.table and snapshot.table != old.table:
        table = TableView(snapshot.table, state.table)
        if any(table.rate(pool.accelerator) != state.table.rate(pool.accelerator) for pool in old.pools):
            return False
    state.consistent = False
    for job in {one.id for one in (*gone, *come)} & state.carried.keys():
        drop(state, job)
    if table is not None:
        drop_all(state)
        state.table = table
        state.candidates.follow(table)
    _follow_nodes(state, snapshot)
    if snapshot.tenants is not old.tenants and set(snapshot.tenants) != set(old.tenants):
        drop_all(state)
        state.holdings.set_tenants(snapshot.tenants)
        for assignment in state.assignments.values():
            assignment.order = None
        state.queues.sort_again(state.waiting.values())
    _follow_jobs(state, gone, come, frozenset() if table is None else table.changed)
    state.holdings.update_entitlements()
    state.update_demand()
    state.snapshot = snapshot
    state.consistent = True
    return True


def _follows_nodes(state: PlanningState, snapshot: Snapshot) -> bool:
    """Whether these nodes leave the candidates and, where watts have prices, what each node's watts cost."""
    if _alike(*differing(state.snapshot.nodes, snapshot.nodes)):
        return True
    if not state.candidates.follow_nodes(snapshot):
        return False
    if not state.market.domains:
        return True
    old, new = ({(n.pool, n.domain) for n in s.nodes} for s in (state.snapshot, snapshot))
    return old == new


def _follow_nodes(state: PlanningState, snapshot: Snapshot) -> None:
    gone, come = differing(state.snapshot.nodes, snapshot.nodes)
    if gone or come:
        drop_all(state)
    known = {node.name: node for node in gone}
    stale: set[str] = set()
    changed = False
    for node in come:
        was = known.pop(node.name, None)
        if was is None or was.pool != node.pool:
            stale |= {node.pool} if was is None else {node.pool, was.pool}
        elif was != node:
            changed = True
            stale |= set() if state.cluster.pools[node.pool].reopen(node) else {node.pool}
    stale |= {node.pool for node in known.values()}
    for name in sorted(stale):
        _rebuild_pool(state, name, (node for node in snapshot.nodes if node.pool == name))
    if stale or changed:
        state.hang_on_feeds(snapshot)
        state.holdings.set_capacity(state.cluster.capacity_m())


def _rebuild_pool(state: PlanningState, pool: str, nodes: Iterable[Node]) -> None:
    """Count the room of a pool again, because its nodes changed."""
    fresh = state.cluster.open_pool(state.cluster.pools[pool].pool, nodes)
    for (name, _), assignments in state.held.items():
        if name == pool:
            for assignment in assignments.values():
                assert assignment.placement is not None
                fresh.take(assignment.placement)
    for assignment in state.releasing.values():
        run = assignment.job.run
        if run is not None and run.placement.pool == pool:
            fresh.take_releasing(run.placement)


def _follow_jobs(
    state: PlanningState, gone: Iterable[Job], come: Iterable[Job], classes: frozenset[str]
) -> None:
    """Jobs that were removed or added (both: they changed), and workload classes with new speeds."""
    assignments = state.assignments
    changed = {job.id: job for job in come if _is_new(job, assignments.get(job.id))}
    there = {job.id for job in come}
    for job in gone:
        if job.id not in there:
            assignment = assignments[job.id]
            state.holdings.count_demand(assignment.option, sign=-1)
            state.drop(assignment)
    if classes:
        _follow_speeds(state, changed, classes)
    other: list[tuple[Job, Assignment | None]] = []
    for job in changed.values():
        was = assignments.get(job.id)
        if was is not None and job.workload_class not in classes and _ASKED(job) == _ASKED(was.job):
            state.change(was, job)
        else:
            other.append((job, was))
    for job, was in other:
        option = state.candidates.of(job)
        if was is not None:
            state.drop(was)
            state.holdings.count_demand(was.option, sign=-1)
        state.holdings.count_demand(option)
        state.add(job, option)


def _is_new(job: Job, known: Assignment | None) -> bool:
    """Whether the job was not there or is different. Most that are different run elsewhere, which is seen at once."""
    return known is None or job.run != known.job.run or job != known.job


def _follow_speeds(state: PlanningState, changed: dict[JobId, Job], classes: frozenset[str]) -> None:
    """Add the jobs of these classes whose places or speeds are different now."""
    differ: dict[tuple[int, str], bool] = {}
    for assignment in state.assignments.values():
        job = assignment.job
        if job.workload_class in classes and job.id not in changed:
            key = (id(assignment.option.shared), job.tenant)
            if key not in differ:
                differ[key] = state.candidates.shared(job) != assignment.option.shared
            # A place of a size between the candidates may have another speed although they have none.
            if differ[key] or job.min_pods < job.max_pods:
                changed[job.id] = job


def _alike(gone: Iterable[Node], come: Iterable[Node]) -> bool:
    """Whether the same nodes as before are of the same size, so that every job has the same candidates."""
    return sorted(map(_SIZE, gone), key=repr) == sorted(map(_SIZE, come), key=repr)


def _differ(old: Snapshot, new: Snapshot) -> bool:
    """Whether pools, power domains or exchange rates changed; then nothing of the state can be kept."""
    if new.pools is not old.pools and set(new.pools) != set(old.pools):
        return True
    if new.domains is not old.domains and set(new.domains) != set(old.domains):
        return True
    return new.table is not old.table and set(new.table.rates) != set(old.table.rates)
