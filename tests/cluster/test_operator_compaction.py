"""etcd forgets what the operator has not yet seen: its watches end with 410, and it lists every kind again.

The API server runs without its watch cache, which would hide a compaction for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster
from tests.cluster.kubelet import Script
from tests.cluster.replicas import Replica, home, nothing_doubled
from tests.cluster.test_operator_overload import one_pod, reach

from busbar.kube.client import Object
from busbar.kube.resources import TRAINING_JOBS

pytestmark = pytest.mark.apiserver
LEASE_S = 60.0
"""Nobody else is there; a busy machine must not cost the lease."""


@pytest.fixture
def forgetful() -> Iterator[ApiServer]:
    with ApiServer.start("--watch-cache=false") as server:
        server.install_crds()
        yield server


def runs(pod: Object) -> Script:
    return Script()


async def test_what_etcd_has_forgotten_is_listed_again(forgetful: ApiServer, tmp_path: Path) -> None:
    async with Cluster(forgetful, script=runs, cpu="3") as cluster:
        forgetful.make_namespace(home(cluster))
        async with Replica(cluster, tmp_path, LEASE_S) as operator:
            for name in ("a", "b", "c", "d"):
                await cluster.create(one_pod(name))
            await reach(cluster, Running=3, Queued=1)
            pods = await cluster.pods()
            first, *_ = running = sorted(name.partition("-")[0] for name in pods)
            [waiting] = {"a", "b", "c", "d"}.difference(running)
            operator.freeze()
            # What it misses: an end, a deletion, a new object with the name of that one, new work.
            await cluster.kubelet.end(pods[f"{first}-1-0"], 0, "")
            await cluster.client.delete(TRAINING_JOBS, waiting, cluster.namespace)
            await cluster.create(one_pod(waiting))
            await cluster.create(one_pod("new"))
            forgetful.compact()
            operator.proxy.cut_watches()
            operator.thaw()
            await reach(cluster, Succeeded=1, Running=3, Queued=1)
            assert operator.proxy.expired_watches > 0
            nothing_doubled(cluster, operator)
            assert len(operator.proxy.writes) <= 60
            assert operator.process.poll() is None
