"""What the pools page shows of pools, node loads, tenants and measured speeds. Pure."""

from dataclasses import dataclass, field

from busbar.api.portal.formatting import money, number
from busbar.kube.contracts.preview import NodeLoad
from busbar.kube.types import AcceleratorPool, PerformanceProfile, Tenant
from busbar.kube.types.accelerator_pool import AcceleratorPoolStatus
from busbar.kube.types.limits import limit_rows
from busbar.kube.types.meta import ConditionStatus
from busbar.kube.types.performance_profile import CellSource, ProfileCell
from busbar.kube.types.tenant import TenantStatus


@dataclass(frozen=True)
class NodeView:
    """One cell of the heat map."""

    name: str
    heat: int
    label: str
    amount: str
    ready: bool


@dataclass(frozen=True)
class PoolView:
    """A pool with its nodes."""

    name: str
    accelerator: str
    price: str
    capacity: str
    allocated: str
    free: str
    percent: float
    memory: str
    ready: bool
    message: str
    elsewhere: str
    """What pods of no job hold of it; empty: nothing."""
    nodes: list[NodeView] = field(default_factory=list)


def pool_view(pool: AcceleratorPool, loads: list[NodeLoad]) -> PoolView:
    """A pool and the load of its nodes."""
    spec, status = pool.spec, pool.status or AcceleratorPoolStatus()
    mine = [load for load in loads if load.pool == pool.metadata.name]
    capacity = status.capacity or sum(n.capacity for n in mine)
    allocated = status.allocated if status.allocated is not None else sum(n.allocated for n in mine)
    conditions = {c.type: c for c in status.conditions or ()}
    ready, elsewhere = conditions.get("Ready"), conditions.get("CapacityHeldElsewhere")
    return PoolView(
        name=pool.metadata.name,
        accelerator=spec.accelerator,
        price=f"{money(spec.price_per_hour)} per hour" if spec.price_per_hour else "no price",
        capacity=number(capacity, 1),
        allocated=number(allocated, 1),
        free=number(max(0.0, capacity - allocated), 1),
        percent=min(100.0, 100.0 * allocated / capacity) if capacity else 0.0,
        memory=f"{number(spec.memory_gib, 0)} GiB" if spec.memory_gib else "",
        ready=ready is None or ready.status is ConditionStatus.TRUE,
        message=ready.message if ready is not None else "",
        elsewhere=elsewhere.message
        if elsewhere is not None and elsewhere.status is ConditionStatus.TRUE
        else "",
        nodes=[node_view(load) for load in mine],
    )


def node_view(load: NodeLoad) -> NodeView:
    """One cell: its colour step from 0 to 10, and the same as text for screen readers."""
    amount = f"{number(load.allocated, 1)}/{number(load.capacity, 1)}"
    state = "" if load.ready else ", not ready"
    return NodeView(
        name=load.name,
        heat=round(10 * load.share),
        label=f"{load.name}: {number(load.allocated, 1)} of {number(load.capacity, 1)} {load.accelerator} held{state}",
        amount=amount,
        ready=load.ready,
    )


@dataclass(frozen=True)
class ProfileView:
    """A workload class with how fast it runs where."""

    name: str
    rows: list[dict[str, str]]


SOURCES = {
    CellSource.STATED: "stated",
    CellSource.MEASURED: "measured",
    CellSource.RATIO: "from other types",
    CellSource.PRIOR: "by formula",
}


WHILE = {"prefill": "reading prompts", "decode": "decoding", "idle": "idle"}


def profile_view(profile: PerformanceProfile) -> ProfileView:
    """A class's cells, fastest first."""
    cells = (profile.status.cells if profile.status is not None else None) or ()
    rows = sorted(cells, key=lambda cell: -cell.tokens_per_second)
    return ProfileView(profile.spec.workload_class, [_speed(cell) for cell in rows])


def _gib(amount: float | None) -> str:
    return "" if amount is None else f"{number(amount, 1)} GiB"


def _place(cell: ProfileCell) -> str:
    link = f" ({cell.link_class})" if cell.link_class else ""
    nodes = f" on {cell.nodes} {'node' if cell.nodes == 1 else 'nodes'}" if cell.nodes else ""
    return f"{cell.accelerators} × {cell.accelerator}{link}{nodes}"


def _watts(cell: ProfileCell) -> str:
    """Of one accelerator, and of a replica by what it does."""
    if cell.watts is None:
        return ""
    phases = cell.phase_watts.model_dump(exclude_none=True) if cell.phase_watts is not None else {}
    told = ", ".join(f"{number(watts, 0)} W {WHILE[name]}" for name, watts in phases.items())
    return f"{number(cell.watts, 0)} W each" + (f": {told}" if told else "")


def _speed(cell: ProfileCell) -> dict[str, str]:
    source = SOURCES[cell.source]
    known = cell.low is not None and cell.high is not None
    return {
        "place": _place(cell),
        "mode": cell.mode
        if cell.power_cap_percent == 100
        else f"{cell.mode}, at {cell.power_cap_percent} % of watts",
        "watts": _watts(cell),
        "speed": number(cell.tokens_per_second, 0),
        "predicted": number(cell.predicted, 0) if cell.predicted is not None else "",
        "memory": _gib(cell.memory_gib),
        "measured_memory": _gib(cell.measured_memory_gib),
        "note": cell.note or "",
        "interval": f"{number(cell.low, 0)} to {number(cell.high, 0)}" if known else "",
        "source": f"{source}, {cell.reports} reports" if cell.reports else source,
        "doubted": f"{cell.quarantined} not believed" if cell.quarantined else "",
    }


@dataclass(frozen=True)
class TenantView:
    """A tenant with what it holds and may hold."""

    title: str
    weight: str
    running: int | None
    waiting: int | None
    rows: list[dict[str, str]]
    limits: list[dict[str, str]]
    """How many objects it has and may have."""


def tenant_view(tenant: Tenant) -> TenantView:
    """A tenant's accelerators: held, guaranteed and the most it may hold; its objects and their limits."""
    spec, status = tenant.spec, tenant.status or TenantStatus()
    held = {row.accelerator: row.count for row in status.allocated or ()}
    quotas = {quota.accelerator: quota for quota in spec.quota or ()}
    return TenantView(
        title=spec.display_name or tenant.metadata.name,
        weight=number(spec.weight, 2),
        running=status.running,
        waiting=status.waiting,
        rows=[
            {
                "accelerator": "any" if kind == "*" else kind,
                "held": number(held.get(kind, 0), 1),
                "guaranteed": number(quotas[kind].guaranteed if kind in quotas else 0, 1),
                "ceiling": number(quotas[kind].ceiling if kind in quotas else None, 1) or "none",
            }
            for kind in sorted({*held, *quotas})
        ],
        limits=[
            {
                "namespace": row.namespace or "all",
                "what": row.what,
                "used": number(row.used, 1) if row.used is not None else "not counted yet",
                "limit": number(row.most, 0),
                "full": "yes" if row.used is not None and row.used >= row.most else "",
            }
            for row in limit_rows(
                spec.limits, spec.namespaces or (), status.limit_use or (), status.waiting_jobs
            )
        ],
    )
