"""A team lead's daily overview: what runs, what waits and why, who holds what, and what it costs per hour.

It covers the objects that the caller may see. Members see their own tenants by name; what all other tenants
hold in the pools they may use is one amount per accelerator type. Only admins see whose it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from busbar.api.access.authorization import Authorizer
from busbar.api.access.identity import Caller
from busbar.api.access.tenancy import Tenancy
from busbar.api.clock import Clock, utc_now
from busbar.api.kubernetes.store import Store
from busbar.api.objects.cluster import usable
from busbar.api.objects.objects import Objects
from busbar.kube.types import AcceleratorPool, ModelService, Tenant, TrainingJob
from busbar.kube.types.training_status import Progress, TrainingPhase

ENDED_WITHIN = timedelta(hours=24)
NEGLIGIBLE = 0.05
"""Accelerators; less is not shown. Pool totals are rounded, and they are written a moment before or after the
jobs' statuses."""


@dataclass(frozen=True)
class Place:
    """Accelerators of one pool that an object holds."""

    pool: str
    accelerator: str
    accelerators: float
    cost_per_hour: float


@dataclass(frozen=True)
class Running:
    """An object that holds accelerators."""

    kind: str
    namespace: str
    name: str
    tenant: str
    phase: str
    places: tuple[Place, ...]
    since: datetime | None
    """Of a job: when this attempt was admitted."""
    percent: float | None
    """Of a job: share of its steps done."""
    ends_at: datetime | None
    """Of a job: when it ends at this speed, without interruption."""

    @property
    def cost_per_hour(self) -> float:
        return sum(place.cost_per_hour for place in self.places)


@dataclass(frozen=True)
class Waiting:
    """An object that asks for accelerators and does not have all of them."""

    kind: str
    namespace: str
    name: str
    tenant: str
    since: datetime | None
    reason: str
    message: str
    start_p50: datetime | None
    start_p90: datetime | None


@dataclass(frozen=True)
class Failed:
    """A job that failed in the last 24 hours."""

    namespace: str
    name: str
    tenant: str
    at: datetime
    reason: str
    message: str


@dataclass(frozen=True)
class Held:
    """What one tenant holds of one accelerator type."""

    accelerator: str
    held: float
    guaranteed: float | None
    """None where the tenant has no guarantee for this type, and for other tenants together."""


@dataclass(frozen=True)
class Holder:
    """A tenant that the caller may see, or all other tenants together (empty name)."""

    tenant: str
    title: str
    held: tuple[Held, ...]
    running: int | None
    waiting: int | None
    cost_per_hour: float | None


@dataclass(frozen=True)
class Overview:
    """The overview."""

    as_of: datetime
    running: tuple[Running, ...]
    waiting: tuple[Waiting, ...]
    failed: tuple[Failed, ...]
    succeeded: int
    """Jobs that succeeded in the last 24 hours."""
    holders: tuple[Holder, ...]
    capacity: float
    """Accelerators of the pools that the caller may use."""
    allocated: float
    cost_per_hour: float


class Overviews:
    """Makes overviews for callers from the objects in the store."""

    def __init__(
        self,
        store: Store,
        objects: Objects,
        tenancy: Tenancy,
        authorizer: Authorizer,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._objects = objects
        self._tenancy = tenancy
        self._authorizer = authorizer
        self._now = clock

    async def overview(self, caller: Caller) -> Overview:
        """The overview of what the caller may see."""
        tenants, pools = self._store.all(Tenant), self._store.all(AcceleratorPool)
        open_to_them = pools
        if not await self._authorizer.is_admin(caller):
            mine = {m.tenant for m in self._tenancy.memberships(caller)}
            tenants = [tenant for tenant in tenants if tenant.metadata.name in mine]
            open_to_them = [pool for pool in pools if usable(pool, mine)]
        return overview(
            await self._objects.listing(caller, TrainingJob),
            await self._objects.listing(caller, ModelService),
            pools,
            open_to_them,
            tenants,
            self._now(),
        )


def overview(
    jobs: Sequence[TrainingJob],
    services: Sequence[ModelService],
    pools: Sequence[AcceleratorPool],
    open_to_them: Sequence[AcceleratorPool],
    tenants: Sequence[Tenant],
    now: datetime,
) -> Overview:
    """The overview of these objects. Pure.

    Args:
        pools: all of them: a job's price is that of its pool, whoever may use that pool now.
        open_to_them: those that the caller may use; only they count as capacity.
        tenants: those that the caller may name.
    """
    by_name = {pool.metadata.name: pool for pool in pools}
    owner = {space: t.metadata.name for t in tenants for space in t.spec.namespaces or ()}
    running = [_running_job(job, owner, by_name, now) for job in jobs if _holds(job)]
    running += [found for service in services if (found := _running_service(service, owner, by_name)).places]
    waiting = [_waiting_job(job, owner) for job in jobs if _phase(job) in _WAITS]
    waiting += [_waiting_service(service, owner) for service in services if _lacks(service)]
    ended = [job for job in jobs if _ended_since(job, now - ENDED_WITHIN)]
    return Overview(
        as_of=now,
        running=tuple(sorted(running, key=lambda r: (-r.cost_per_hour, r.namespace, r.name))),
        waiting=tuple(sorted(waiting, key=lambda w: (w.since or now, w.namespace, w.name))),
        failed=tuple(
            sorted(
                (_failed(job, owner) for job in ended if _phase(job) is TrainingPhase.FAILED),
                key=lambda f: (f.at, f.namespace, f.name),
                reverse=True,
            )
        ),
        succeeded=sum(_phase(job) is TrainingPhase.SUCCEEDED for job in ended),
        holders=(*_holders(tenants, running, waiting), *_others(running, open_to_them)),
        capacity=sum(_capacity(pool) for pool in open_to_them),
        allocated=sum(_allocated(pool) for pool in open_to_them),
        cost_per_hour=sum(one.cost_per_hour for one in running),
    )


_HOLDS = (
    TrainingPhase.ADMITTED,
    TrainingPhase.STARTING,
    TrainingPhase.RUNNING,
    TrainingPhase.PREEMPTING,
)
_WAITS = (TrainingPhase.PENDING, TrainingPhase.QUEUED)


def _phase(job: TrainingJob) -> TrainingPhase:
    return (job.status.phase if job.status is not None else None) or TrainingPhase.PENDING


def _holds(job: TrainingJob) -> bool:
    return _phase(job) in _HOLDS and job.status is not None and job.status.admission is not None


def _ended_since(job: TrainingJob, moment: datetime) -> bool:
    ended = job.status.completion_time if job.status is not None else None
    return ended is not None and ended >= moment


def _running_job(
    job: TrainingJob, owner: dict[str, str], pools: dict[str, AcceleratorPool], now: datetime
) -> Running:
    assert job.status is not None  # `_holds` asked
    assert job.status.admission is not None
    admission, progress = job.status.admission, job.status.progress
    count = float(admission.pods * admission.accelerators_per_pod)
    done = progress.step / progress.total_steps if progress is not None and progress.total_steps else None
    return Running(
        kind=job.kind,
        namespace=job.metadata.namespace or "",
        name=job.metadata.name,
        tenant=owner.get(job.metadata.namespace or "", ""),
        phase=_phase(job).value,
        places=(_place(admission.pool, count, pools, admission.accelerator),),
        since=admission.admitted_at,
        percent=100.0 * done if done is not None else None,
        ends_at=_ends_at(progress, now),
    )


def _ends_at(progress: Progress | None, now: datetime) -> datetime | None:
    if progress is None or progress.eta_p50 is not None or progress.eta_seconds is None:
        return progress.eta_p50 if progress is not None else None
    return now + timedelta(seconds=progress.eta_seconds)


def _running_service(
    service: ModelService, owner: dict[str, str], pools: dict[str, AcceleratorPool]
) -> Running:
    status, each = service.status, service.spec.shape.accelerators_per_pod
    held = status.pools or () if status is not None else ()
    return Running(
        kind=service.kind,
        namespace=service.metadata.namespace or "",
        name=service.metadata.name,
        tenant=owner.get(service.metadata.namespace or "", ""),
        phase=status.phase.value if status is not None and status.phase is not None else "",
        places=tuple(_place(row.pool, float(row.replicas * each), pools) for row in held if row.replicas),
        since=None,
        percent=None,
        ends_at=None,
    )


def _place(pool: str, count: float, pools: dict[str, AcceleratorPool], accelerator: str = "") -> Place:
    """Accelerators in a pool, at the pool's current price."""
    found = pools.get(pool)
    if found is None:
        return Place(pool, accelerator, count, 0.0)
    return Place(pool, accelerator or found.spec.accelerator, count, count * found.spec.price_per_hour)


def _waiting_job(job: TrainingJob, owner: dict[str, str]) -> Waiting:
    status = job.status
    forecast = status.forecast if status is not None else None
    return Waiting(
        kind=job.kind,
        namespace=job.metadata.namespace or "",
        name=job.metadata.name,
        tenant=owner.get(job.metadata.namespace or "", ""),
        since=job.metadata.creation_timestamp,
        reason=(status.reason if status is not None else None) or "",
        message=(status.message if status is not None else None) or "",
        start_p50=forecast.start_p50 if forecast is not None else None,
        start_p90=forecast.start_p90 if forecast is not None else None,
    )


def _lacks(service: ModelService) -> bool:
    """Whether it wants more replicas than it has a place for."""
    status = service.status
    if service.spec.suspend or status is None:
        return False
    return (status.desired_replicas or 0) > sum(row.replicas for row in status.pools or ())


def _waiting_service(service: ModelService, owner: dict[str, str]) -> Waiting:
    status = service.status
    assert status is not None  # `_lacks` asked
    return Waiting(
        kind=service.kind,
        namespace=service.metadata.namespace or "",
        name=service.metadata.name,
        tenant=owner.get(service.metadata.namespace or "", ""),
        since=status.last_scale_time or service.metadata.creation_timestamp,
        reason=status.reason or "",
        message=status.message or "",
        start_p50=None,
        start_p90=None,
    )


def _failed(job: TrainingJob, owner: dict[str, str]) -> Failed:
    assert job.status is not None  # `_ended_since` asked
    assert job.status.completion_time is not None
    return Failed(
        namespace=job.metadata.namespace or "",
        name=job.metadata.name,
        tenant=owner.get(job.metadata.namespace or "", ""),
        at=job.status.completion_time,
        reason=job.status.reason or "",
        message=job.status.message or "",
    )


def _holders(
    tenants: Iterable[Tenant], running: Sequence[Running], waiting: Sequence[Waiting]
) -> list[Holder]:
    """Each tenant with what its objects hold; the highest cost first."""
    found = []
    for tenant in tenants:
        name = tenant.metadata.name
        own = [one for one in running if one.tenant == name]
        held = _sums(own)
        guaranteed = {quota.accelerator: quota.guaranteed for quota in tenant.spec.quota or ()}
        kinds = sorted({*held, *(kind for kind, share in guaranteed.items() if share)})
        found.append(
            Holder(
                tenant=name,
                title=tenant.spec.display_name or name,
                held=tuple(Held(kind, held.get(kind, 0.0), guaranteed.get(kind)) for kind in kinds),
                running=len(own),
                waiting=sum(one.tenant == name for one in waiting),
                cost_per_hour=sum(one.cost_per_hour for one in own),
            )
        )
    return sorted(found, key=lambda holder: (-(holder.cost_per_hour or 0.0), holder.tenant))


def _others(running: Sequence[Running], open_to_them: Sequence[AcceleratorPool]) -> list[Holder]:
    """What is held in the caller's pools by objects that they may not see: amounts only."""
    names = {pool.metadata.name for pool in open_to_them}
    seen: dict[str, float] = defaultdict(float)
    for one in running:
        for place in one.places:
            if place.pool in names:
                seen[place.accelerator] += place.accelerators
    total: dict[str, float] = defaultdict(float)
    for pool in open_to_them:
        total[pool.spec.accelerator] += _allocated(pool)
    rest = {kind: total[kind] - seen[kind] for kind in sorted(total)}
    held = tuple(Held(kind, amount, None) for kind, amount in rest.items() if amount > NEGLIGIBLE)
    return [Holder("", "", held, None, None, None)] if held else []


def _sums(running: Iterable[Running]) -> dict[str, float]:
    """Accelerators by type."""
    held: dict[str, float] = defaultdict(float)
    for one in running:
        for place in one.places:
            held[place.accelerator] += place.accelerators
    return held


def _capacity(pool: AcceleratorPool) -> float:
    return (pool.status.capacity if pool.status is not None else None) or 0.0


def _allocated(pool: AcceleratorPool) -> float:
    return (pool.status.allocated if pool.status is not None else None) or 0.0
