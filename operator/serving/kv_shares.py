"""Shares of the KV cache: replicas are asked for those of the spec, and say whether they can keep them."""

from __future__ import annotations

from collections.abc import Iterator

from busbar.kube.contracts.workload import KV_SHARES_PATH, KvShare, KvShares
from busbar.kube.types import ModelService
from busbar.operator.serving.asking import ask
from busbar.operator.serving.view import ServiceView
from busbar.operator.write.actions import Action


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
    shares = wanted_shares(view.service)
    return ask(
        view, KV_SHARES_PATH, KvShares(tenants=shares), lambda told: told.kv_shares not in (None, shares)
    )


def refused_shares(view: ServiceView) -> str:
    """What a replica says that cannot keep the shares of the spec; empty: none says so."""
    shares = wanted_shares(view.service)
    for pod in view.pods:
        reading = view.readings.get(pod.uid)
        if reading is not None and reading.kv_shares_refused and reading.kv_shares == shares:
            return f"Replica {pod.key.name} keeps the former shares of its KV cache: {reading.kv_shares_refused}."
    return ""
