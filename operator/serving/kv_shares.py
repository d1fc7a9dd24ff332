"""Shares of the KV cache: replicas are asked for those of the spec, and say whether they can keep them.

A replica starts with the shares of that moment. It tells which ones it was asked for last, so whoever operates it next
knows whether it has to be asked again: after a change of the spec, and after its container began anew with the old ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from busbar.kube.contracts.workload import KV_SHARES_PATH, KvShare, KvShares
from busbar.kube.types import ModelService
from busbar.kube.types.model_service import ServiceEngine
from busbar.operator.serving.view import ServiceView
from busbar.operator.write.actions import Action, PostToPod


def wanted_shares(service: ModelService) -> list[KvShare]:
    """In the spec's order."""
    access = service.spec.access
    return [
        KvShare(
            tenant=tenant.name,
            guaranteed=tenant.guaranteed_kv or 0.0,
            most=1.0 if tenant.max_kv is None else tenant.max_kv,
        )
        for tenant in (access.tenants if access is not None else ())
        if tenant.has_kv_quota
    ]


def ask_for_shares(view: ServiceView) -> Iterator[Action]:
    """Of the replicas that are awake and were asked for others."""
    if view.service.spec.engine is not ServiceEngine.BUILTIN:
        return
    shares = wanted_shares(view.service)
    for pod in view.pods:
        reading = view.readings.get(pod.uid)
        if reading is None or not reading.ready or pod.leaving or reading.kv_shares in (None, shares):
            continue
        body = KvShares(tenants=shares).model_dump(mode="json", by_alias=True)
        limit_s = view.settings.poll_timeout_s
        yield PostToPod(pod.key, pod.uid, KV_SHARES_PATH, limit_s, repeats=True, body=body)


def refused_shares(view: ServiceView) -> str:
    """What a replica says that cannot keep the shares of the spec; empty: none says so."""
    shares = wanted_shares(view.service)
    for pod in view.pods:
        reading = view.readings.get(pod.uid)
        if reading is not None and reading.kv_shares_refused and reading.kv_shares == shares:
            return f"Replica {pod.key.name} keeps the former shares of its KV cache: {reading.kv_shares_refused}."
    return ""
