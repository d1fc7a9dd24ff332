"""What a scheduling decision depends on: the snapshot.

    Snapshot
     ├─ pools     Pool      what one kind of accelerator costs and who may use it
     ├─ nodes     Node      what one machine can still give *us* (see `Node.capacity`)
     ├─ domains   PowerDomain: how many watts each feed may carry; nodes name the one that they hang on
     ├─ tenants   Tenant    weight, quota, decayed usage, users
     ├─ jobs      Job       everything that runs or waits: one per TrainingJob, one per replica of a
     │                      ModelService (kind "serving"), one per opted-in gated pod (kind "opaque")
     └─ table     PerformanceTable (`table.py`): speed, memory and watts per candidate

Everything is frozen and round-trips through JSON (`to_json`, `from_json`): a restarted operator that
rebuilds the same snapshot plans the same. Order of the tuples never matters to a decision.

Units, everywhere in this package
    accelerators_m   thousandths of an accelerator: one GPU is 1000. In a CPU pool (`resource_name` is
                     "cpu") an accelerator is `Pool.unit_m` millicores.
    cpu_m            thousandths of a CPU (Kubernetes "500m" is 500)
    *_mib            MiB (2**20 bytes)
    *_s              seconds; points in time are seconds since the Unix epoch
    *_w, watts       watts
    speed            work units per second, in the unit of the workload class (tokens/s, steps/s)
    work             for one job: speed x seconds. For shares and usage: accelerators x exchange rate x
                     seconds (`PerformanceTable.rates`), so that twenty T4s are not twenty A100s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NewType

from .codec import Json, decode, encode
from .table import PerformanceTable, accelerator_key, named_nodes

JobId = NewType("JobId", str)
"""Unique and stable for the life of an object: its uid (of a replica: `<service uid>/<index>`)."""


class JobKind(StrEnum):
    """What a job is to the scheduler."""

    TRAINING = "training"
    SERVING = "serving"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Resources:
    """A resource vector. For a pod: what it asks. For a node: what it can give."""

    accelerators_m: int = 0
    cpu_m: int = 0
    memory_mib: int = 0
    ephemeral_mib: int = 0

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            self.accelerators_m + other.accelerators_m,
            self.cpu_m + other.cpu_m,
            self.memory_mib + other.memory_mib,
            self.ephemeral_mib + other.ephemeral_mib,
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            self.accelerators_m - other.accelerators_m,
            self.cpu_m - other.cpu_m,
            self.memory_mib - other.memory_mib,
            self.ephemeral_mib - other.ephemeral_mib,
        )

    def fits(self, free: Resources) -> bool:
        """Whether this request fits what is free."""
        return (
            self.accelerators_m <= free.accelerators_m
            and self.cpu_m <= free.cpu_m
            and self.memory_mib <= free.memory_mib
            and self.ephemeral_mib <= free.ephemeral_mib
        )


@dataclass(frozen=True, slots=True)
class Taint:
    """A node taint; only the effects NoSchedule and NoExecute keep pods away."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True)
class Toleration:
    """As in Kubernetes: an empty key with operator Exists tolerates all, an empty effect any effect."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a pool.

    `capacity` is what the node can give to the jobs of this snapshot, running ones included: allocatable
    minus the requests of every pod that is *not* one of the snapshot's jobs (platform pods, daemon sets,
    pods of other schedulers). Do not subtract the snapshot's own jobs, the planner does. In a CPU pool
    `capacity.accelerators_m` is ignored: the accelerator is the CPU, `capacity.cpu_m` counts.
    A node belongs to one pool; leave nodes of no pool out.
    """

    name: str
    pool: str
    capacity: Resources
    labels: tuple[tuple[str, str], ...] = ()
    """Only needed for jobs with a node selector."""
    taints: tuple[Taint, ...] = ()
    topology: tuple[str, ...] = ()
    """Where the node stands, outermost first, for example ("zone-a", "rack-3"). Gangs keep together."""
    ready: bool = True
    """False: not Ready, cordoned or being deleted. Nothing new is placed; what runs there is left alone."""
    cordoned: bool = False
    """An administrator closed it (`kubectl cordon`); `ready` is False too. Only explanations read this."""
    domain: str = ""
    """The power domain that it hangs on, and so on all above that one; "": none."""
    limits_boards: bool = False
    """Its boards can be held to a limit below their highest: jobs may be placed there under a power cap."""
    tells_boards: bool = False
    """It is known which pods hold which of its boards, so each can be limited by itself: jobs under a power cap may share it."""


@dataclass(frozen=True, slots=True)
class PowerDomain:
    """One feed of a tree. What a plan adds must leave every domain that `limits` within what it may carry.

    Counted on a domain, besides `reserved_w` of itself and of all below it: each accelerator that a job of the snapshot
    holds, with the watts that the table has for the job's class there (or else the nameplate, `Rate.watts`), and each
    free one with `Rate.idle_watts`. Under a power cap those of the cell with that cap count, and never more than this part
    of the nameplate. A pod's watts are counted whole, rounded up. The processors of CPU pools count
    nothing here: they belong to the host.
    """

    name: str
    usable_w: float
    """The budget less its margin."""
    parent: str = ""
    """The domain that feeds it; "": none."""
    reserved_w: float = 0.0
    """For what the snapshot does not know on the nodes of this domain itself: hosts, and accelerators of others."""
    limits: bool = True
    """False: it is only observed, and holds nothing back."""
    closed: bool = False
    """Nothing is added to what its jobs draw, even if more would fit: its boards cannot be limited any further."""


@dataclass(frozen=True, slots=True)
class Pool:
    """An AcceleratorPool."""

    name: str
    accelerator: str
    """The accelerator type, for example "H100" or "cpu": what jobs, quotas and prices name."""
    resource_name: str = "nvidia.com/gpu"
    tenants: tuple[str, ...] | None = None
    """Tenants that may use it; None: all. An empty tuple: nobody."""
    tolerations: tuple[Toleration, ...] = ()
    """Given to every pod placed here, so the nodes' matching taints do not keep it away."""
    memory_mib: int = 0
    """Memory of one accelerator; 0: not known, so memory never excludes it. Ignored for CPUs."""
    price_per_hour: float = 0.0
    """Per accelerator."""
    reserved: Resources = field(default_factory=Resources)
    """Kept free on each node."""
    shareable: bool = False
    """Whether fractions of one accelerator may be placed. CPU pools always are."""

    unit_m: int = 1000
    """CPU pools: the millicores that count as one accelerator."""
    cpu_m: int = 0
    """Other pools: the millicores per accelerator of a pod that names none."""
    link: str = ""
    """Link class of the accelerators: with the type, the key of their cells in the performance table."""
    runtime: str = ""
    """What runs the pods there; a gang is in pools with one runtime."""
    fabric: str = ""
    """How the pods of a gang reach each other there; a gang is in pools with one fabric."""

    @property
    def key(self) -> str:
        """The accelerator key of the performance table."""
        return accelerator_key(self.accelerator, self.link)

    @property
    def is_cpu(self) -> bool:
        """Whether the accelerator of this pool is the CPU."""
        return self.resource_name == "cpu"

    def cpu_accelerators_m(self, cpu_m: int) -> int:
        """Millicores as accelerators of this CPU pool."""
        return cpu_m * 1000 // self.unit_m


@dataclass(frozen=True, slots=True)
class Quota:
    """One row of a tenant's quota, in thousandths of an accelerator of the type named ("*": any type).

    On a "*" row the amounts are in exchange-rate units: an accelerator of type t counts `rate(t)`.
    """

    accelerator: str = "*"
    guaranteed_m: int = 0
    """The tenant can always reclaim this: what others borrowed of it is taken back."""
    borrowable_m: int | None = None
    """How much above the guarantee may be used while others leave it idle; None: no limit."""
    ceiling_m: int | None = None
    """Never more than this, idle or not; None: no limit."""


@dataclass(frozen=True, slots=True)
class DecayedUsage:
    """Work used, halved every half-life (`Policy.usage_half_life_s`); the value held at `as_of_s`."""

    work: float = 0.0
    as_of_s: float = 0.0

    def at(self, now: float, half_life_s: float) -> float:
        """The decayed value at `now`."""
        if self.work == 0.0 or now <= self.as_of_s:
            return self.work
        return float(self.work * 0.5 ** ((now - self.as_of_s) / half_life_s))

    def mean_held(self, now: float, half_life_s: float) -> float:
        """The same as a rate: constantly holding this many units gives this usage."""
        return self.at(now, half_life_s) * math.log(2) / half_life_s

    def add(self, work: float, now: float, half_life_s: float) -> DecayedUsage:
        """The usage after `work` more, used just before `now`."""
        return DecayedUsage(self.at(now, half_life_s) + work, max(now, self.as_of_s))


@dataclass(frozen=True, slots=True)
class User:
    """What is known of one user of a tenant; a user that is not listed has weight 1 and no usage."""

    name: str
    """As in `Job.user`; "" stands for all jobs whose user is not known."""
    weight: float = 1.0
    """Relative to the tenant's other users."""
    usage: DecayedUsage = field(default_factory=DecayedUsage)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant: its weight, quota, past use and users."""

    name: str
    organisation: str = ""
    """Tenants of one organisation share its weight (the sum of theirs) among themselves first."""
    weight: float = 1.0
    quotas: tuple[Quota, ...] = ()
    priority_ceiling: int = 1000
    """A job's priority counts at most this much."""
    usage: DecayedUsage = field(default_factory=DecayedUsage)
    """From Tenant.status; the operator adds what its jobs used since the last write."""
    users: tuple[User, ...] = ()
    """Its users share what the tenant is entitled to, and never get more."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job runs: one node name per rank. All pods of one placement have the same size."""

    pool: str
    accelerator: str
    mode: str
    nodes: tuple[str, ...]
    per_pod: Resources
    """What each pod requests. In a CPU pool `accelerators_m` is `cpu_m` counted in the pool's unit."""
    devices: tuple[int, ...] = ()
    """For shares of an accelerator (less than 1000 in a pool that shares): the device that each rank's share
    is taken from, counted from 0. A share without a device counts as a whole accelerator."""
    watts: int = field(default=0, compare=False)
    """What each pod adds to its power domains, as the planner counts it where one limits; no part of the place."""
    link: str = field(default="", compare=False)
    """Link class of the pool when the job was placed; no part of the place."""
    power_cap: float = 1.0
    """What its boards may draw at most, as a part of their highest limit; 1: they are not capped."""

    @property
    def key(self) -> str:
        """The accelerator key of the performance table."""
        return accelerator_key(self.accelerator, self.link)

    @property
    def spread(self) -> int:
        """Different nodes that the pods stand on, as cells of the performance table name them."""
        return named_nodes(self.accelerators_m, len(set(self.nodes)))

    @property
    def pods(self) -> int:
        return len(self.nodes)

    @property
    def accelerators_m(self) -> int:
        """All pods together."""
        return self.per_pod.accelerators_m * len(self.nodes)


@dataclass(frozen=True, slots=True)
class Run:
    """The running attempt of a job (from the moment its admission is written until its pods are gone)."""

    placement: Placement
    started_at_s: float
    saved_at_s: float | None = None
    """Time of the last durable checkpoint of this attempt; None: none yet, all since the start is at risk."""
    releasing: bool = False
    """It was told to stop and still holds its resources (Preempting, or being deleted)."""


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to place. Leave out jobs that are finished, suspended or being deleted with no pods left."""

    id: JobId
    name: str
    namespace: str
    tenant: str
    kind: JobKind = JobKind.TRAINING
    user: str = ""
    """Who of the tenant asked for it."""
    workload_class: str = ""
    """Key into the performance table; "" (opaque): the accelerator's exchange rate stands for its speed."""
    min_pods: int = 1
    max_pods: int = 1
    per_pod: Resources = field(default_factory=lambda: Resources(accelerators_m=1000))
    """`accelerators_m`: acceleratorsPerPod x 1000. `cpu_m`: 0 when the shape names none; in a CPU pool an
    explicit `cpu_m` is what the pod gets and what is charged, otherwise accelerators x the pool's unit."""
    accelerators: tuple[str, ...] = ()
    """Accelerator keys allowed; empty: any that fits."""
    pools: tuple[str, ...] = ()
    """Pools allowed; empty: any."""
    modes: tuple[str, ...] = ("resident",)
    """Engine modes allowed, in the user's order. Memory per mode comes from the table's cells."""
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    """Opaque pods bring their own; ours get the pool's."""
    required_domain: int | None = None
    """The gang must stay inside one topology domain of this depth (1: outermost); None: preferred only."""
    priority: int = 100
    preemptible: bool = True
    submitted_at_s: float = 0.0
    remaining_work: float | None = None
    """In the class's unit; None: not known."""
    attained_s: float = 0.0
    """Accelerator-seconds, in exchange-rate units, that all attempts received so far."""
    restart_s: float = 30.0
    """What a preemption, move or resize costs besides the work since the last checkpoint."""
    preemptions: int = 0
    """How often it was stopped or shrunk for other jobs."""
    last_move_at_s: float | None = None
    """Time of the last move, resize or preemption."""
    reclaim_deadline_s: float = 0.0
    """Serving: lent capacity must be back within this time; 0 means the policy's."""
    service: str = ""
    """Serving: namespace/name of the ModelService the replica belongs to."""
    needed_now: bool = False
    """Serving: requests that are there wait or are late without it; False: it is for load that is foreseen."""
    deadline_s: float | None = None
    """When it should be done. Without a known length nothing follows from it."""
    promised: bool = False
    """A plan promised to keep it (`Plan.deadlines`)."""
    yields: bool = False
    """It serves nobody now (a replica that sleeps): any job that waits may take its place at once."""
    run: Run | None = None
    """None: it waits."""
    more_host_memory_mib: int = 0
    """Of each pod, beside what the table's cell says: copies of its state in memory."""
    most_devices: int = 0
    """So many accelerators one of its pods can use, where they are no cores; 0: any number."""
    power_cap: float = 1.0
    """Serving: the cap that its service has chosen for it, as in `Placement`; 1: none. Training jobs have those of the table."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def waits_since_s(self) -> float:
        """Since when it waits if it does not run: its submission or its last stop."""
        moved_at_s = self.last_move_at_s
        return self.submitted_at_s if moved_at_s is None else max(self.submitted_at_s, moved_at_s)

    def uses_all(self, pool: Pool) -> bool:
        """Whether its pods can use all the accelerators that they would get there."""
        return not self.most_devices or pool.is_cpu or self.per_pod.accelerators_m <= 1000 * self.most_devices


@dataclass(frozen=True, slots=True)
class Reservation:
    """The place that is collected for a waiting job which is first in line (`search/reservations.py`)."""

    job: JobId
    placement: Placement
    """Where it will start."""
    since_s: tuple[float, ...]
    """Since when each node of the placement is collected, in the same order."""
    start_s: float
    """When the room is expected to be there: when the last of those who leave has ended or may be stopped."""
    collected: int = 0
    """Nodes, of `nodes`, whose room is there or can be taken at once."""
    backfilled: tuple[JobId, ...] | None = None
    """Jobs that were started in the collected room on condition that they leave it; None: not known (it was read from a
    status), so whatever started on these nodes since they are collected."""
    turn_s: float = 0.0
    """When its tenant's turn is, if the job is larger than its tenant's share (`search/turns.py`)."""

    @property
    def nodes(self) -> int:
        """How many different nodes are needed."""
        return len(set(self.placement.nodes))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a decision depends on, at one moment."""

    pools: tuple[Pool, ...] = ()
    nodes: tuple[Node, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    jobs: tuple[Job, ...] = ()
    table: PerformanceTable = field(default_factory=PerformanceTable)
    reservations: tuple[Reservation, ...] = ()
    """Those of the plan before (`Plan.reservations`), so that a full plan keeps them."""
    domains: tuple[PowerDomain, ...] = ()

    def to_json(self) -> Json:
        """A JSON value (dicts, lists, strings, numbers, None)."""
        return encode(self)

    @classmethod
    def from_json(cls, data: Json) -> Snapshot:
        """The inverse of `to_json`.

        Raises:
            DecodeError: a field is missing, unknown or of the wrong type; says which.
        """
        return decode(cls, data)


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed: new or changed objects by name, and the names of those gone."""

    pools: tuple[Pool, ...] = ()
    nodes: tuple[Node, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    jobs: tuple[Job, ...] = ()
    table: PerformanceTable | None = None
    gone_pools: tuple[str, ...] = ()
    gone_nodes: tuple[str, ...] = ()
    gone_tenants: tuple[str, ...] = ()
    gone_jobs: tuple[JobId, ...] = ()
    domains: tuple[PowerDomain, ...] | None = None
    """All of them, if any changed."""


def updated(snapshot: Snapshot, delta: Delta) -> Snapshot:
    """The snapshot after the delta. Tuples come out sorted by name."""
    pools = {p.name: p for p in snapshot.pools} | {p.name: p for p in delta.pools}
    nodes = {n.name: n for n in snapshot.nodes} | {n.name: n for n in delta.nodes}
    tenants = {t.name: t for t in snapshot.tenants} | {t.name: t for t in delta.tenants}
    jobs = {j.id: j for j in snapshot.jobs} | {j.id: j for j in delta.jobs}
    return replace(
        snapshot,
        pools=tuple(pools[k] for k in sorted(pools.keys() - set(delta.gone_pools))),
        nodes=tuple(nodes[k] for k in sorted(nodes.keys() - set(delta.gone_nodes))),
        tenants=tuple(tenants[k] for k in sorted(tenants.keys() - set(delta.gone_tenants))),
        jobs=tuple(jobs[k] for k in sorted(jobs.keys() - set(delta.gone_jobs))),
        table=snapshot.table if delta.table is None else delta.table,
        domains=snapshot.domains if delta.domains is None else delta.domains,
    )
