"""A cluster whose nodes hang on one feed, with an operator that leases power to real agents on simulated boards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import QUICK, Cluster
from tests.cluster.kubelet import Script, add_node
from tests.cluster.test_operator_budgets import script as unending
from tests.cluster.test_operator_leases import Rack
from tests.cluster.test_operator_power import KEY
from tests.cluster.test_operator_watts import POOL
from tests.operator.agent.lease_keys import KEY as SIGNING

from busbar.kube.client import Object
from busbar.kube.contracts.power import SIMULATED_LABEL


@asynccontextmanager
async def racked(
    apiserver: ApiServer,
    rack: Rack,
    home: str,
    feed: Object,
    script: Callable[[Object], Script] = unending,
) -> AsyncIterator[Cluster]:
    """The rack's nodes of A100 with the label `rack: red`, guard and agents on them, the pool and the feed; no operator yet.

    Args:
        home: the platform's namespace.
        script: what pods do.
    """
    settings = replace(
        QUICK, namespace=home, power_key=KEY, power_lease_key=SIGNING, power_status_s=0.5, power_lease_s=4.0
    )
    await asyncio.to_thread(apiserver.make_namespace, home)
    async with (
        Cluster(apiserver, nodes=0, settings=settings, script=script) as cluster,
        rack.process("guard"),
        rack.process(),
    ):
        for name in rack.names:
            labels = {"rack": "red", "pool": "watts", SIMULATED_LABEL: ""}
            await asyncio.to_thread(add_node, apiserver, name, labels=labels, gpus=rack.boards)
        await asyncio.to_thread(lambda: apiserver.admin.create(POOL).expect())
        await cluster.create(feed)
        yield cluster


def is_running(status: dict[str, Any]) -> bool:
    return bool(status.get("phase") == "Running")
