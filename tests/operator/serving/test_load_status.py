"""What a service's status says of its load: tokens per second, the KV cache, saturated replicas."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests.operator.builders import RENDERING, SETTINGS, replica, service

from busbar.kube.contracts.demand import ServiceDemand, SizeCount, WindowDemand
from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types import ModelService
from busbar.kube.types.service_words import level_facts
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.view import ModelPlace, ServiceUpdate, ServiceView

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def window(seconds: int, *tokens: int) -> WindowDemand:
    sizes = [SizeCount(prompt=0, output=0, count=1, prompt_tokens=9, output_tokens=each) for each in tokens]
    return WindowDemand(seconds=seconds, sizes=sizes)


def update(
    *readings: ServingStatus, demand: ServiceDemand | None = None, of: ModelService | None = None
) -> ServiceUpdate:
    pods = tuple(replica(index) for index in range(len(readings)))
    return reconcile(
        ServiceView(
            of or service(replicas=len(readings), minReplicas=0),
            pods,
            NOW,
            SETTINGS,
            RENDERING,
            ModelPlace(uri="pvc://claim/model"),
            demand=demand,
            readings={pod.uid: reading for pod, reading in zip(pods, readings, strict=True)},
        )
    )


def reading(total: int, free: int, **fields: Any) -> ServingStatus:
    return ServingStatus(ready=True, kv_blocks_total=total, kv_blocks_free=free, **fields)


def test_tokens_of_the_last_minute_and_blocks_of_all_replicas_are_in_the_status() -> None:
    demand = ServiceDemand(
        namespace="team", name="web", windows=[window(10, 5), window(60, 3000, 4000), window(180, 9)]
    )
    status = update(reading(40, 10), reading(60, 60), ServingStatus(ready=True), demand=demand).status
    assert status is not None
    assert status.tokens_per_second == 117.0
    assert status.kv_cache is not None
    assert (status.kv_cache.blocks, status.kv_cache.held, status.saturated_replicas) == (100, 30, None)
    assert level_facts(status)[:2] == [
        ("Speed", "117 tokens/s, of a minute"),
        ("KV cache", "30 of 100 blocks held"),
    ]


def test_nothing_is_said_where_nobody_tells() -> None:
    quiet = ServiceDemand(namespace="team", name="web", windows=[window(60)])
    for demand in (None, quiet):
        status = update(ServingStatus(ready=True), demand=demand).status
        assert status is not None
        assert (status.tokens_per_second, status.kv_cache, status.saturated_replicas) == (None, None, None)


def test_saturated_replicas_are_counted_and_told_of_once() -> None:
    found = update(reading(4, 0, saturated=True), reading(4, 4), reading(4, 4, saturated=True))
    assert found.status is not None
    assert found.status.saturated_replicas == 2
    (told,) = [words for reason, words in found.notices if reason == "ReplicasSaturated"]
    assert told.startswith("2 replicas do not keep spec.slo.tpotMilliseconds")
    assert ("Saturated", "2 of 3 replicas: too slow for the time per token") in level_facts(found.status)
    wire = found.status.model_dump(mode="json", by_alias=True)
    wire["lastUsageTime"] = None  # the next writing is due
    again = update(
        reading(4, 0, saturated=True), reading(4, 4), reading(4, 4),
        of=service(replicas=3, minReplicas=0, status=wire),
    )  # fmt: skip
    assert again.status is not None
    assert again.status.saturated_replicas == 1
    assert not [words for reason, words in again.notices if reason == "ReplicasSaturated"]
