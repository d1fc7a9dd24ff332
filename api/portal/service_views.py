"""What pages show of services. Pure: an object and a time in, plain values out."""

from dataclasses import dataclass
from datetime import datetime

from busbar.api.objects.cluster import model_id
from busbar.api.portal.formatting import ago, kilowatt_hours, money, number
from busbar.api.portal.object_views import Badge, ConditionRows, badge, conditions
from busbar.kube.types import ModelService
from busbar.kube.types.meta import ANNOTATION_REQUESTER
from busbar.kube.types.service_status import ModelServiceStatus, ServicePhase
from busbar.kube.types.service_words import (
    access_facts,
    adapter_facts,
    change_words,
    crash_words,
    departure_words,
    level_facts,
    loss_facts,
    pool_words,
)
from busbar.kube.types.training_status import (
    Usage,
)


@dataclass(frozen=True)
class ServiceView:
    """A ModelService as lists and its page show it."""

    namespace: str
    name: str
    uid: str
    href: str
    badge: Badge
    reason: str
    message: str
    requester: str
    age: str
    model: str
    source: str
    adapters: tuple[tuple[str, str, str], ...]
    """Name, address, and the tenants that may use it, of each in the spec."""
    ready: int
    desired: int
    sleeping: int
    span: str
    pools: str
    url: str
    suspended: bool
    external: bool
    """A user set the replica count, so the autoscaler does not change it."""
    deleting: bool
    cost: str
    accelerator_hours: str
    energy: str
    """kWh; empty where none was measured."""
    conditions: ConditionRows
    level: list[tuple[str, str]]
    """Adapters, what decides the count, how the latency target is kept, demand and capacity, in words."""
    departures: list[dict[str, str]]
    """Replicas that left while others went on with their streams."""
    crashes: list[dict[str, str]]
    """Of replicas whose servers were started again within their containers."""
    scaling: list[dict[str, str]]
    can_answer: bool
    chats: bool
    """The try-it box begins with a chat: models that were trained here mostly complete texts."""


def service_view(service: ModelService, now: datetime) -> ServiceView:
    """The view of a ModelService."""
    meta, spec, status = service.metadata, service.spec, service.status or ModelServiceStatus()
    phase, usage = status.phase or ServicePhase.PENDING, status.usage or Usage()
    low = spec.min_replicas
    high = spec.max_replicas or max(low, 1)
    return ServiceView(
        namespace=meta.namespace or "",
        name=meta.name,
        uid=meta.uid,
        href=f"/services/{meta.namespace}/{meta.name}",
        badge=badge(service, phase),
        reason=status.reason or "",
        message=status.message or "",
        requester=meta.annotations.get(ANNOTATION_REQUESTER, ""),
        age=ago(meta.creation_timestamp, now),
        model=model_id(service),
        source=f"TrainingJob {spec.model.training_job}" if spec.model.training_job else spec.model.uri or "",
        adapters=tuple(
            (
                each.name,
                each.uri,
                "everybody" if each.tenants is None else ", ".join(each.tenants) or "nobody",
            )
            for each in spec.adapters or ()
        ),
        ready=status.ready_replicas or 0,
        desired=status.desired_replicas or 0,
        sleeping=status.sleeping_replicas or 0,
        span=f"{low} to {high}",
        pools=", ".join(pool_words(row) for row in status.pools or ()),
        url=status.url or "",
        suspended=spec.suspend,
        external=spec.external_replicas is not None,
        deleting=meta.deletion_timestamp is not None,
        cost=money(usage.cost),
        accelerator_hours=number(usage.accelerator_seconds / 3600, 2),
        energy=kilowatt_hours(usage.energy_joules),
        conditions=conditions(status, now),
        level=[
            *access_facts(spec.access, status),
            *adapter_facts(status),
            *level_facts(status),
            *loss_facts(status),
        ],
        departures=[
            {"when": ago(row.time, now), "replica": row.replica, "what": departure_words(row)}
            for row in reversed(status.departures or ())
        ],
        crashes=[
            {"when": ago(row.time, now), "replica": row.replica, "what": crash_words(row)}
            for row in reversed(status.crashes or ())
        ],
        scaling=[
            {
                "when": ago(row.time, now),
                "change": change_words(row),
                "cause": row.cause or "",
                "reason": row.reason,
            }
            for row in reversed(status.scaling_history or ())
        ],
        can_answer=not spec.suspend and phase not in (ServicePhase.FAILED, ServicePhase.SUSPENDED),
        chats=spec.model.training_job is None,
    )
