"""Shared by tests of tenants: members, their bindings, and waiting until a binding appears."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.cluster.harness import PATIENCE_S, Cluster

from busbar.kube.client import Object
from busbar.kube.resources import ROLE_BINDINGS, TENANTS


async def becomes(
    look: Callable[[], Awaitable[Any]], wanted: Callable[[Any], bool], patience_s: float = PATIENCE_S
) -> Any:
    """Polls until the condition is met."""
    end = asyncio.get_running_loop().time() + patience_s
    while True:
        last = await look()
        if wanted(last):
            return last
        assert asyncio.get_running_loop().time() < end, f"after {patience_s:.0f} s: {last}"
        await asyncio.sleep(0.02)


def opted_in(name: str, cpu: str = "1") -> Object:
    """A pod as the admission policy leaves it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"busbar.dev/queue": "true"}},
        "spec": {
            "schedulingGates": [{"name": "busbar.dev/admission"}],
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "c",
                    "image": "i",
                    "resources": {"requests": {"cpu": cpu}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }


async def employ(cluster: Cluster, user: str) -> str:
    """Make somebody a member of the cluster's tenant; the tenant's name."""
    tenant = f"tenant-{cluster.namespace}"
    members = [{"subject": {"kind": "User", "name": user}, "role": "member"}]
    await cluster.client.patch(TENANTS, tenant, {"spec": {"members": members}})
    return tenant


async def bindings(cluster: Cluster) -> list[str]:
    """The RoleBindings in the tenant's namespace."""
    items, _ = await cluster.client.list(ROLE_BINDINGS, cluster.namespace)
    return [b["metadata"]["name"] for b in items]
