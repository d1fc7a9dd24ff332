"""What a shared service's status says of its tenants: their requests, from the gateway, and their KV blocks, from the
replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types import ModelService
from busbar.kube.types.service_status import MOST_TENANTS, TenantRequests
from busbar.operator.watch.projections import Pod


def tenant_rows(
    service: ModelService,
    demand: ServiceDemand | None,
    serving: Iterable[Pod],
    readings: Mapping[str, ServingStatus],
    old: list[TenantRequests] | None,
) -> list[TenantRequests] | None:
    """One row for each tenant that asks, or has a part of the KV cache; None where the service is not shared.

    Where the gateway tells nothing, requests stay as they were said before. KV blocks are summed over the replicas that
    take requests and answer.
    """
    access = service.spec.access
    if access is None:
        return None
    if demand is not None:
        rows = {
            r.tenant: TenantRequests(name=r.tenant, waiting=r.waiting, running=r.in_flight)
            for r in demand.tenants
        }
    else:
        rows = {r.name: TenantRequests(name=r.name, waiting=r.waiting, running=r.running) for r in old or ()}
    held, guaranteed, most = Counter[str](), Counter[str](), Counter[str]()
    for pod in serving:
        reading = readings.get(pod.uid)
        for row in reading.kv_tenants if reading is not None else ():
            held[row.tenant] += row.held
            guaranteed[row.tenant] += row.guaranteed
            most[row.tenant] += row.most
    for tenant in access.tenants:
        if tenant.has_kv_quota and tenant.name in most:
            blocks = {
                "kv_blocks": held[tenant.name],
                "kv_blocks_guaranteed": guaranteed[tenant.name],
                "kv_blocks_most": most[tenant.name],
            }
            rows[tenant.name] = rows.get(tenant.name, TenantRequests(name=tenant.name)).model_copy(
                update=blocks
            )
    return list(rows.values())[:MOST_TENANTS] or None


def kv_parts(rows: Iterable[TenantRequests] | None) -> dict[str, tuple[int | None, int | None]]:
    """Guaranteed and most KV blocks of each tenant that has a part; what it holds changes all the time."""
    return {
        row.name: (row.kv_blocks_guaranteed, row.kv_blocks_most)
        for row in rows or ()
        if row.kv_blocks_most is not None
    }
