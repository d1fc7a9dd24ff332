"""Replicas are asked for the shares of the KV cache that the spec has now, and a refusal is told."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests.operator.builders import RENDERING, SETTINGS, replica, service

from busbar.kube.contracts.workload import KvShare, ServingStatus
from busbar.kube.types import ModelService
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.view import ModelPlace, ServiceUpdate, ServiceView
from busbar.operator.write.actions import PostToPod

SHARED = {
    "tenants": [{"name": "guest", "guaranteedKv": 0.5}, {"name": "sales", "maxKv": 0.25}, {"name": "lab"}]
}
SHARES = [KvShare(tenant="guest", guaranteed=0.5), KvShare(tenant="sales", most=0.25)]


def update(of: ModelService, **reading: Any) -> ServiceUpdate:
    pod = replica(0, ip="10.0.0.1", port=9400)
    found = ServingStatus.model_validate({"ready": True, **reading}, by_name=True)
    at = ServiceView(
        of, (pod,), datetime(2026, 1, 1, tzinfo=UTC), SETTINGS, RENDERING, ModelPlace(uri="pvc://claim/model"),
        readings={pod.uid: found},
    )  # fmt: skip
    return reconcile(at)


def posts(of: ModelService, **reading: Any) -> list[PostToPod]:
    return [action for action in update(of, **reading).actions if isinstance(action, PostToPod)]


def shared(**changes: Any) -> ModelService:
    return service(**{"replicas": 1, "minReplicas": 0, "access": SHARED, **changes})


def test_a_replica_that_was_asked_for_others_is_asked_for_those_of_the_spec() -> None:
    (post,) = posts(shared(), kv_shares=[])
    assert (post.path, post.repeats) == ("/kv_shares", True)
    assert post.body == {
        "tenants": [
            {"tenant": "guest", "guaranteed": 0.5, "most": 1.0},
            {"tenant": "sales", "guaranteed": 0.0, "most": 0.25},
        ]
    }
    assert posts(shared(), kv_shares=SHARES) == []
    (post,) = posts(shared(access=None), kv_shares=SHARES)
    assert post.body == {"tenants": []}


def test_a_replica_that_cannot_be_asked_is_not() -> None:
    assert posts(shared()) == []  # an engine of an older release does not tell
    assert posts(shared(), kv_shares=[], ready=False) == []
    assert posts(shared(engine="vllm", image="vllm:1", access=None), kv_shares=SHARES) == []


def test_a_refusal_is_a_condition_and_an_event_until_it_is_over() -> None:
    why = "the KV quota of 'sales' allows less than one block"
    found = update(shared(), kv_shares=SHARES, kv_shares_refused=why)
    assert found.status is not None
    (condition,) = [c for c in found.status.conditions or () if c.type == "KvSharesKept"]
    sentence = f"Replica web-0 keeps the former shares of its KV cache: {why}."
    assert (condition.status, condition.reason, condition.message) == ("False", "KvSharesRefused", sentence)
    assert ("KvSharesRefused", sentence) in found.notices
    assert not [a for a in found.actions if isinstance(a, PostToPod)]  # it has said so
    of = shared()
    of = of.model_copy(update={"status": found.status})
    later = update(of, kv_shares=SHARES)
    assert later.status is not None
    assert not [c for c in later.status.conditions or () if c.type == "KvSharesKept"]
    refused_before = update(replace_shares(of), kv_shares=SHARES, kv_shares_refused=why)
    assert [a.path for a in refused_before.actions if isinstance(a, PostToPod)] == ["/kv_shares"]


def replace_shares(of: ModelService) -> ModelService:
    return service(
        replicas=1, minReplicas=0, access={"tenants": [{"name": "sales", "maxKv": 0.5}]}
    ).model_copy(update={"status": of.status})


def test_the_status_tells_new_parts_without_waiting_for_the_next_minute() -> None:
    def told(of: ModelService, most: int) -> ServiceUpdate:
        blocks = [{"tenant": "sales", "held": 3, "guaranteed": 0, "most": most}]
        return update(of, kv_shares=SHARES, kv_tenants=blocks)

    first = told(shared(), 10).status
    assert first is not None
    of = shared().model_copy(update={"status": first})
    same = told(of, 10).status
    assert same is None or same.tenants == first.tenants
    changed = told(of, 20).status
    assert changed is not None
    assert [(t.name, t.kv_blocks_most) for t in changed.tenants or ()] == [("sales", 20)]
