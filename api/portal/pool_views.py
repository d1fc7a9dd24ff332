"""From pools, the load of their nodes and measured speeds to what the pools page shows. Pure."""

from dataclasses import dataclass, field

from busbar.api.cluster import NodeLoad
from busbar.api.kubernetes import Object
from busbar.api.portal.words import money, number


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
    nodes: list[NodeView] = field(default_factory=list)


def pool_view(pool: Object, loads: list[NodeLoad]) -> PoolView:
    """A pool and the load of its nodes."""
    spec, status = pool["spec"], pool.get("status") or {}
    mine = [load for load in loads if load.pool == pool["metadata"]["name"]]
    capacity = float(status.get("capacity") or sum(n.capacity for n in mine))
    held = status.get("allocated")
    allocated = float(held) if held is not None else sum(n.allocated for n in mine)
    ready: Object = next((c for c in status.get("conditions") or [] if c.get("type") == "Ready"), {})
    return PoolView(
        name=pool["metadata"]["name"],
        accelerator=spec["accelerator"],
        price=f"{money(spec.get('pricePerHour'))} per hour" if spec.get("pricePerHour") else "no price",
        capacity=number(capacity, 1),
        allocated=number(allocated, 1),
        free=number(max(0.0, capacity - allocated), 1),
        percent=min(100.0, 100.0 * allocated / capacity) if capacity else 0.0,
        memory=f"{number(spec.get('memoryGib'), 0)} GiB" if spec.get("memoryGib") else "",
        ready=ready.get("status", "True") == "True",
        message=str(ready.get("message") or ""),
        nodes=[node_view(load) for load in mine],
    )


def node_view(load: NodeLoad) -> NodeView:
    """One cell: its heat is 0 to 10, in words for those who see no colours."""
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


SOURCES = {"Stated": "stated", "Measured": "measured", "Ratio": "from other types", "Prior": "by formula"}


def profile_view(profile: Object) -> ProfileView:
    """A class's cells, fastest first."""
    cells = (profile.get("status") or {}).get("cells") or []
    cells = sorted(cells, key=lambda cell: -float(cell.get("tokensPerSecond") or 0))
    return ProfileView(str(profile["spec"].get("workloadClass")), [_speed(cell) for cell in cells])


def _speed(cell: Object) -> dict[str, str]:
    low, high = cell.get("low"), cell.get("high")
    reports, doubted = cell.get("reports") or 0, cell.get("quarantined") or 0
    source = SOURCES.get(str(cell.get("source")), str(cell.get("source")))
    return {
        "place": f"{cell.get('accelerators')} × {cell.get('accelerator')}",
        "mode": str(cell.get("mode") or ""),
        "speed": number(cell.get("tokensPerSecond"), 0),
        "interval": f"{number(low, 0)} to {number(high, 0)}" if low is not None and high is not None else "",
        "source": f"{source}, {reports} reports" if reports else source,
        "doubted": f"{doubted} not believed" if doubted else "",
    }
