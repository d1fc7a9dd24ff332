"""The independent checker: is this plan allowed on this snapshot?

It shares no code with the planner except the model: it counts again, in its own way. Used in tests, in the
simulator after every round, and by the operator before anything is carried out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import fields, replace

from .model.diff import differing
from .model.plans import ActionKind, Plan
from .model.snapshot import Job, Node, Placement, Pool, Resources, Snapshot, Tenant
from .model.table import TableView


def check_plan(snapshot: Snapshot, plan: Plan) -> list[str]:
    """Everything that is wrong with the plan, one sentence each; empty: it may be carried out."""
    return Checker().check(snapshot, plan)


class Checker:
    """Checks plans on snapshots of which each follows the one before: it keeps who holds what, and looks again at the
    jobs that differ. A new one counts everything."""

    def __init__(self) -> None:
        self._seen: tuple[Job, ...] = ()
        self._jobs: dict[str, Job] = {}
        self._before: dict[str, Placement] = {}
        self._leaving: set[str] = set()
        self._idle: set[str] = set()
        """Jobs that hold nothing, and those that are being stopped."""
        self._at: dict[str, set[str]] = {}
        """By node, who holds something there."""
        self._of: dict[str, set[str]] = {}
        """By tenant, its jobs that hold something."""

    def check(self, snapshot: Snapshot, plan: Plan) -> list[str]:
        """See `check_plan`."""
        self._follow(snapshot.jobs)
        jobs, before = self._jobs, self._before
        wrong: list[str] = []
        changed: dict[str, Placement | None] = {}
        for action in plan.actions:
            key = action.job
            if key not in jobs:
                wrong.append(f"{action.id}: no such job {key}")
                continue
            if key in changed:
                wrong.append(f"{action.id}: a second action on {key}")
            wrong += _action(jobs[key], action.kind, action.assumed, action.to, before.get(key))
            changed[key] = action.to
        new = {key: placement for key, placement in changed.items() if placement is not None}
        near = {key: before[key] for key in self._near(plan)}
        last = {key: place for key, place in near.items() if key not in changed} | new
        wrong += _placements(snapshot, jobs, new)
        wrong += _room(snapshot, {k: p for k, p in last.items() if k not in self._leaving}, new.keys())
        if any(domain.limits for domain in snapshot.domains):
            after = {key: place for key, place in before.items() if key not in changed} | new
            wrong += _power(snapshot, jobs, plan, after, self._leaving)
        wrong += _order(snapshot, plan, near, before)
        wrong += self._quota(snapshot, changed, new)
        wrong += self._accounted(plan, changed, new)
        return wrong

    def _follow(self, jobs: tuple[Job, ...]) -> None:
        gone, come = differing(self._seen, jobs)
        self._seen = jobs
        for job in gone:
            del self._jobs[job.id]
            self._leaving.discard(job.id)
            self._idle.discard(job.id)
            placement = self._before.pop(job.id, None)
            if placement is not None:
                self._of[job.tenant].discard(job.id)
                for name in placement.nodes:
                    self._at[name].discard(job.id)
        for job in come:
            self._jobs[job.id] = job
            if job.run is None or job.run.releasing:
                self._idle.add(job.id)
            if job.run is None:
                continue
            if job.run.releasing:
                self._leaving.add(job.id)
            self._before[job.id] = job.run.placement
            self._of.setdefault(job.tenant, set()).add(job.id)
            for name in job.run.placement.nodes:
                self._at.setdefault(name, set()).add(job.id)

    def _near(self, plan: Plan) -> set[str]:
        """The jobs on nodes of which the plan gives something: what they hold decides whether there is room."""
        given = {name for action in plan.actions if action.to is not None for name in action.to.nodes}
        return {key for name in given for key in self._at.get(name, ())}

    def _quota(
        self, snapshot: Snapshot, changed: Mapping[str, Placement | None], new: Mapping[str, Placement]
    ) -> list[str]:
        rates = {rate.accelerator: rate.rate for rate in snapshot.table.rates}
        known: dict[str, Tenant] = {tenant.name: tenant for tenant in snapshot.tenants}
        wrong: list[str] = []
        for name in sorted({self._jobs[key].tenant for key in new}):
            if name not in known:
                wrong.append(f"tenant {name!r} is not in the snapshot")
            if name not in known or not known[name].quotas:
                continue
            had = {key: self._before[key] for key in sorted(self._of.get(name, ()))}
            gets = {key: placement for key, placement in new.items() if self._jobs[key].tenant == name}
            holds = {key: placement for key, placement in had.items() if key not in changed} | gets
            for quota in known[name].quotas:
                row = quota.accelerator
                total = sum(_counted(placement, row, rates) for placement in holds.values())
                if total <= sum(_counted(placement, row, rates) for placement in had.values()):
                    continue
                limits = [quota.ceiling_m] if quota.ceiling_m is not None else []
                if quota.borrowable_m is not None:
                    limits.append(quota.guaranteed_m + quota.borrowable_m)
                if limits and total > min(limits) + 1e-3:
                    wrong.append(f"tenant {name}: {total:g} of {row} above its limit {min(limits)}")
        return wrong

    def _accounted(
        self, plan: Plan, changed: Mapping[str, Placement | None], new: Mapping[str, Placement]
    ) -> list[str]:
        """Every job runs, or has exactly one record that says why not."""
        records = [record.job for record in plan.waiting]
        told: set[str] = set(records)
        delayed = {action.job for action in plan.actions if action.after}
        counts = Counter[str](records if len(told) < len(records) else ())
        several = sorted((key, count) for key, count in counts.items() if count > 1)
        wrong = [f"{key}: {count} waiting records" for key, count in several]
        waits = (self._idle - (new.keys() - self._leaving)) | (changed.keys() - new.keys())
        for key in sorted(waits - told):
            wrong.append(f"{self._jobs[key].key}: it waits and nobody says why")
        for key in sorted((told - waits - delayed) & self._jobs.keys()):
            wrong.append(f"{self._jobs[key].key}: it runs and has a waiting record")
        return wrong


def _action(
    job: Job, kind: ActionKind, assumed: Placement | None, to: Placement | None, now: Placement | None
) -> list[str]:
    name, wrong = job.key, []
    if assumed != now:
        wrong.append(f"{name}: the action assumes another placement than the job has")
    if job.run is not None and job.run.releasing:
        wrong.append(f"{name}: it is being stopped already")
    if kind is ActionKind.START and (now is not None or to is None):
        wrong.append(f"{name}: a start of a running job, or to nowhere")
    if kind is ActionKind.PREEMPT and (now is None or to is not None):
        wrong.append(f"{name}: a preemption of a waiting job, or to somewhere")
    if kind not in (ActionKind.START, ActionKind.PREEMPT) and (now is None or to is None):
        wrong.append(f"{name}: {kind} of a waiting job, or to nowhere")
    if kind is ActionKind.LIFT:
        if now is not None and to is not None and replace(now, power_cap=to.power_cap) != to:
            wrong.append(f"{name}: a lift to another place")
        elif now is not None and to is not None and to.power_cap <= now.power_cap:
            wrong.append(f"{name}: a lift to a lower cap")
        return wrong
    if (
        kind is not ActionKind.START
        and not job.preemptible
        and not (job.yields and kind is ActionKind.PREEMPT)
    ):
        wrong.append(f"{name}: it must not be disturbed")
    if kind is not ActionKind.START and job.kind == "opaque" and to is not None:
        wrong.append(f"{name}: pods that are not ours cannot be moved")
    return wrong


def _placements(snapshot: Snapshot, jobs: Mapping[str, Job], new: Mapping[str, Placement]) -> list[str]:
    pools = {pool.name: pool for pool in snapshot.pools}
    nodes = {node.name: node for node in snapshot.nodes}
    wrong: list[str] = []
    for key, placement in new.items():
        job = jobs[key]
        pool = pools.get(placement.pool)
        if pool is None:
            wrong.append(f"{job.key}: no pool {placement.pool!r}")
            continue
        if placement.accelerator != pool.accelerator:
            wrong.append(f"{job.key}: pool {pool.name} has no {placement.accelerator}")
        if pool.tenants is not None and job.tenant not in pool.tenants:
            wrong.append(f"{job.key}: pool {pool.name} is not open to {job.tenant}")
        if job.accelerators and pool.accelerator not in job.accelerators:
            wrong.append(f"{job.key}: it does not allow {pool.accelerator}")
        if job.pools and pool.name not in job.pools:
            wrong.append(f"{job.key}: it does not allow pool {pool.name}")
        if not job.uses_all(pool):
            wrong.append(f"{job.key}: it does not use all accelerators of a pod in pool {pool.name}")
        if placement.mode not in job.modes:
            wrong.append(f"{job.key}: it does not allow mode {placement.mode}")
        if not job.min_pods <= len(placement.nodes) <= job.max_pods:
            wrong.append(f"{job.key}: {len(placement.nodes)} pods, wanted {job.min_pods}..{job.max_pods}")
        wrong += _enough(job, pool, placement)
        if placement.power_cap < 1:
            wrong += _capped(job, placement, nodes)
        if pool.shareable and placement.per_pod.accelerators_m < 1000 and pool.resource_name != "cpu":
            if len(placement.devices) != len(placement.nodes):
                wrong.append(f"{job.key}: its shares do not say on which devices they stand")
        elif placement.devices:
            wrong.append(f"{job.key}: it names devices without asking for a share of one")
        for name in sorted(set(placement.nodes)):
            if name not in nodes or not _same_pool(pool, pools.get(nodes[name].pool), job):
                wrong.append(f"{job.key}: node {name} is not in pool {pool.name}, nor in one like it")
                continue
            wrong += _node(job, pool, nodes[name])
        if job.required_domain is not None and len(placement.nodes) > 1:
            depth = job.required_domain
            inside = {nodes[name].topology[:depth] for name in placement.nodes if name in nodes}
            alone = len(set(placement.nodes)) == 1
            if len(inside) > 1:
                wrong.append(f"{job.key}: spread over {len(inside)} domains of level {depth}")
            elif not alone and any(len(domain) < depth or not domain[depth - 1] for domain in inside):
                wrong.append(f"{job.key}: its nodes stand in no domain of level {depth}")
    return wrong


def _same_pool(pool: Pool, other: Pool | None, job: Job) -> bool:
    """Whether a job with a place in the first pool may have nodes of the other one."""
    if other is None or (job.pools and other.name not in job.pools):
        return False
    return replace(other, name=pool.name) == pool


def _enough(job: Job, pool: Pool, placement: Placement) -> list[str]:
    """Every pod gets at least what the job asks for."""
    ask, given = job.per_pod, placement.per_pod
    if pool.resource_name == "cpu":
        cpu_m = ask.cpu_m if ask.cpu_m else ask.accelerators_m * pool.unit_m / 1000
        enough = given.cpu_m >= cpu_m and given.accelerators_m == given.cpu_m * 1000 // pool.unit_m
    else:
        enough = given.accelerators_m >= ask.accelerators_m and given.cpu_m >= ask.cpu_m
        if not pool.shareable and given.accelerators_m % 1000:
            return [f"{job.key}: a fraction of an accelerator in pool {pool.name}, which does not share"]
    if not enough or given.memory_mib < ask.memory_mib or given.ephemeral_mib < ask.ephemeral_mib:
        return [f"{job.key}: its pods get less than they ask for"]
    return []


def _capped(job: Job, placement: Placement, nodes: Mapping[str, Node]) -> list[str]:
    """Boards are held to a limit where an agent does that, and all those of a node together unless it is known who holds
    which. Where the job has been all along, nothing is asked again."""
    has = () if job.run is None else job.run.placement.nodes
    fresh = [nodes[name] for name in sorted(set(placement.nodes).difference(has)) if name in nodes]
    wrong = [
        f"{job.key}: the boards of node {one.name} take no limits" for one in fresh if not one.limits_boards
    ]
    pods, each_m = Counter(placement.nodes), placement.per_pod.accelerators_m
    shares = [one for one in fresh if pods[one.name] * each_m != one.capacity.accelerators_m]
    if any(not one.tells_boards for one in shares):
        wrong.append(f"{job.key}: under a power cap beside others on a node")
    if shares and each_m % 1000:
        wrong.append(f"{job.key}: under a power cap on a part of a board")
    chosen = job.kind == "training" or (job.kind == "serving" and placement.power_cap == job.power_cap)
    if placement.power_cap <= 0 or not chosen:
        wrong.append(f"{job.key}: it must not run under a power cap of {placement.power_cap:g}")
    return wrong


def _node(job: Job, pool: Pool, node: Node) -> list[str]:
    wrong = []
    if not node.ready:
        wrong.append(f"{job.key}: node {node.name} is not ready")
    for key, value in job.node_selector:
        if (key, value) not in node.labels:
            wrong.append(f"{job.key}: node {node.name} lacks the label {key}={value}")
    for taint in node.taints:
        if taint.effect == "PreferNoSchedule":
            continue
        if not any(
            (t.operator == "Exists" and t.key in ("", taint.key))
            or (t.operator == "Equal" and t.key == taint.key and t.value == taint.value)
            for t in pool.tolerations
            if t.effect in ("", taint.effect)
        ):
            wrong.append(f"{job.key}: the taint {taint.key} keeps it off node {node.name}")
    return wrong


def _room(snapshot: Snapshot, held: Mapping[str, Placement], moved: Set[str]) -> list[str]:
    """Nodes that got something new must not be over their capacity."""
    pools = {pool.name: pool for pool in snapshot.pools}
    used: dict[str, Counter[str]] = {}
    shares: dict[str, Counter[int]] = {}
    fresh = {name for key in moved & held.keys() for name in held[key].nodes}
    for placement in held.values():
        if fresh.isdisjoint(placement.nodes):
            continue
        for rank, name in enumerate(placement.nodes):
            count = used.setdefault(name, Counter())
            pool = pools.get(placement.pool)
            if pool is None or pool.resource_name != "cpu":
                count["accelerators"] += placement.per_pod.accelerators_m
            if pool is not None and pool.shareable and pool.resource_name != "cpu":
                if 0 < placement.per_pod.accelerators_m < 1000 and rank < len(placement.devices):
                    there = shares.setdefault(name, Counter())
                    there[placement.devices[rank]] += placement.per_pod.accelerators_m
                else:
                    count["whole devices"] += -(-placement.per_pod.accelerators_m // 1000)
            count["cpu"] += placement.per_pod.cpu_m
            count["memory"] += placement.per_pod.memory_mib
            count["ephemeral-storage"] += placement.per_pod.ephemeral_mib
    wrong = []
    for node in snapshot.nodes:
        if node.name not in fresh:
            continue
        reserved = pools[node.pool].reserved
        limits = {
            "accelerators": node.capacity.accelerators_m - reserved.accelerators_m,
            "cpu": node.capacity.cpu_m - reserved.cpu_m,
            "memory": node.capacity.memory_mib - reserved.memory_mib,
            "ephemeral-storage": node.capacity.ephemeral_mib - reserved.ephemeral_mib,
        }
        for what, limit in limits.items():
            if used[node.name][what] > limit and used[node.name][what] > 0:
                wrong.append(f"node {node.name}: {used[node.name][what]} {what} on {limit}")
        wrong += _devices(
            node.name,
            limits["accelerators"] // 1000,
            used[node.name]["whole devices"],
            shares.get(node.name, {}),
        )
    return wrong


def _devices(node: str, devices: int, whole: int, shares: Mapping[int, int]) -> list[str]:
    """Shares on one device fit it, and whole accelerators are had besides the devices that shares stand on."""
    wrong = []
    for device, amount in sorted(shares.items()):
        if not 0 <= device < devices:
            wrong.append(f"node {node}: there is no device {device}")
        elif amount > 1000:
            wrong.append(f"node {node}: {amount} thousandths of device {device}")
    if shares and whole + len(shares) > devices:
        wrong.append(f"node {node}: {whole} whole devices and shares on {len(shares)}, of {devices}")
    return wrong


def _power(
    snapshot: Snapshot, jobs: Mapping[str, Job], plan: Plan, after: Mapping[str, Placement], leaving: set[str]
) -> list[str]:
    """No power domain that limits carries more than it may because of this plan: what was there before is not its fault.
    On a closed one nothing is added at all.

    At first there are all that run, and besides them the starts that wait for nobody; a job that moves has what it has
    or what it will have, whichever is more. At last there are those that the plan leaves, without those that are being
    stopped.
    """
    limiting = [domain for domain in snapshot.domains if domain.limits]
    if not limiting:
        return []
    watts = _Watts(snapshot)
    runs = {key: None if job.run is None else job.run.placement for key, job in jobs.items()}
    early = {
        str(action.job): action.to for action in plan.actions if action.to is not None and not action.after
    }
    wrong = []
    for domain in limiting:
        most = math.floor(domain.usable_w - math.fsum(watts.reserved[domain.name])) - watts.idle[domain.name]
        before = {key: watts.drawn(jobs[key], runs[key], domain.name) for key in jobs}
        first = sum(max(before[key], watts.drawn(jobs[key], early.get(key), domain.name)) for key in jobs)
        last = sum(watts.drawn(jobs[key], after.get(key), domain.name) for key in jobs if key not in leaving)
        stays = sum(amount for key, amount in before.items() if key not in leaving)
        if (domain.closed or first > most) and first > sum(before.values()):
            wrong.append(f"power domain {domain.name}: {first} W before anybody has left, on {most}")
        if (domain.closed or last > most) and last > stays:
            wrong.append(f"power domain {domain.name}: {last} W on {most}")
    return wrong


class _Watts:
    """What is counted on the power domains of a snapshot, each with those below it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.table = TableView(snapshot.table)
        self.pools = {pool.name: pool for pool in snapshot.pools}
        self.inside: dict[str, set[str]] = {domain.name: set() for domain in snapshot.domains}
        """Names of the nodes."""
        self.reserved: dict[str, list[float]] = {domain.name: [] for domain in snapshot.domains}
        """For what is not ours."""
        self.idle = dict.fromkeys(self.inside, 0)
        """Of all accelerators, were they idle."""
        parents = {domain.name: domain.parent for domain in snapshot.domains}
        for domain in snapshot.domains:
            at = domain.name
            while at:
                self.reserved[at].append(domain.reserved_w)
                at = parents[at]
        for node in snapshot.nodes:
            pool, at = self.pools[node.pool], node.domain
            idle = 0.0 if pool.resource_name == "cpu" else self.table.idle_watts(pool.accelerator)
            while at:
                self.inside[at].add(node.name)
                self.idle[at] += math.ceil(idle * node.capacity.accelerators_m / 1000)
                at = parents[at]

    def drawn(self, job: Job, placement: Placement | None, domain: str) -> int:
        """What a job adds to a domain with this placement."""
        if placement is None:
            return 0
        pods = sum(name in self.inside[domain] for name in placement.nodes)
        pool = self.pools.get(placement.pool)
        kind = placement.key if pool is None else pool.key
        if not pods or (pool is not None and pool.resource_name == "cpu"):
            return 0
        size_m = placement.per_pod.accelerators_m * len(placement.nodes)
        cap, most = placement.power_cap, self.table.nameplate_watts(kind)
        found = self.table.estimate(job.workload_class, kind, placement.mode, size_m, job.tenant, cap)
        each = most if found is None else found.watts
        if cap < 1 and most:
            each = min(each, cap * most)
        more = max(0.0, each - self.table.idle_watts(kind))
        return pods * math.ceil(placement.per_pod.accelerators_m * more / 1000)


def _order(
    snapshot: Snapshot, plan: Plan, near: Mapping[str, Placement], before: Mapping[str, Placement]
) -> list[str]:
    """An action without `after` must find its room free when the plan begins."""
    early: dict[str, Placement] = {
        action.job: action.to for action in plan.actions if action.to is not None and not action.after
    }
    moving = {key for key in early if key in before}
    held = dict(near)
    for key, placement in early.items():
        if key not in moving:
            held[key] = placement
            continue
        for number, more in enumerate(_beyond(before[key], placement)):
            held[f"{key} (new, {number})"] = more
    starts = {key for key in early if key not in moving}
    return [f"too early: {text}" for text in _room(snapshot, held, starts)]


def _beyond(old: Placement, new: Placement) -> list[Placement]:
    """What a job that moves takes on each node beyond what it has there: it stops before it starts again."""
    if old.devices or new.devices:
        return [new]
    has, wants = Counter(old.nodes), Counter(new.nodes)
    found = []
    for name, pods in sorted(wants.items()):
        amounts = {
            field.name: max(
                0, pods * getattr(new.per_pod, field.name) - has[name] * getattr(old.per_pod, field.name)
            )
            for field in fields(Resources)
        }
        found.append(replace(new, nodes=(name,), per_pod=Resources(**amounts)))
    return found


def _counted(placement: Placement | None, row: str, rates: Mapping[str, float]) -> float:
    if placement is None or row not in ("*", placement.accelerator):
        return 0.0
    amount = placement.per_pod.accelerators_m * len(placement.nodes)
    return amount * rates.get(placement.accelerator, 1.0) if row == "*" else float(amount)
