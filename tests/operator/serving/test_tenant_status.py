"""What a shared service's status says of its tenants' KV blocks."""

from __future__ import annotations

from typing import Any

from tests.operator.builders import replica, service

from busbar.kube.contracts.demand import ServiceDemand, TenantDemand
from busbar.kube.contracts.workload import ServingStatus, TenantBlocks
from busbar.kube.types.service_status import TenantRequests
from busbar.operator.serving.tenant_status import tenant_rows

SHARED: dict[str, Any] = {"tenants": [{"name": "guest", "guaranteedKv": 0.5}, {"name": "sales"}]}
DEMAND = ServiceDemand(
    namespace="team",
    name="web",
    tenants=[TenantDemand(tenant="sales", waiting=2, in_flight=1), TenantDemand(tenant="guest", in_flight=4)],
)


def blocks(held: int, tenant: str = "guest") -> ServingStatus:
    return ServingStatus(kv_tenants=[TenantBlocks(tenant=tenant, held=held, guaranteed=10, most=20)])


def rows(
    *readings: ServingStatus, demand: ServiceDemand | None = DEMAND, old: list[TenantRequests] | None = None
) -> list[tuple[str, int, int, int | None, int | None, int | None]] | None:
    pods = [replica(index) for index in range(3)]
    answers = {pod.uid: reading for pod, reading in zip(pods, readings, strict=False)}
    found = tenant_rows(service(access=SHARED), demand, pods, answers, old)
    if found is None:
        return None
    return [
        (r.name, r.waiting, r.running, r.kv_blocks, r.kv_blocks_guaranteed, r.kv_blocks_most) for r in found
    ]


def test_blocks_are_summed_over_the_replicas_that_answer() -> None:
    assert rows(blocks(3), blocks(12)) == [("sales", 2, 1, None, None, None), ("guest", 0, 4, 15, 20, 40)]


def test_a_tenant_without_requests_has_a_row_where_it_has_a_part_of_the_cache() -> None:
    quiet = ServiceDemand(namespace="team", name="web")
    assert rows(blocks(0), demand=quiet) == [("guest", 0, 0, 0, 10, 20)]
    assert rows(demand=quiet) is None


def test_requests_stay_as_they_were_while_the_gateway_is_silent_and_blocks_do_not() -> None:
    old = [TenantRequests(name="guest", running=3, kv_blocks=9, kv_blocks_guaranteed=10, kv_blocks_most=20)]
    assert rows(demand=None, old=old) == [("guest", 0, 3, None, None, None)]
    assert rows(blocks(1), demand=None, old=old) == [("guest", 0, 3, 1, 10, 20)]


def test_what_a_replica_says_of_other_tenants_is_left_out() -> None:
    assert rows(blocks(3, "stranger"), demand=ServiceDemand(namespace="team", name="web")) is None
    assert tenant_rows(service(), DEMAND, [], {}, None) is None
