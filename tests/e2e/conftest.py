"""One cluster for the whole tier: started by ``busbar up`` as a person would, removed by ``busbar down``.

``BUSBAR_E2E_INSTANCE`` names the instance (default ``e2e``); with ``BUSBAR_E2E_KEEP=1`` it is left running,
which makes the second run of one test quick while it is being written.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator, Iterator

import pytest
from tests.e2e.instance import BUSBAR, Cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test says what the cluster looked like: afterwards it is gone."""
    report = yield
    cluster = item.funcargs.get("cluster") if isinstance(item, pytest.Function) else None
    if report.failed and isinstance(cluster, Cluster):
        report.sections.append(("the cluster", cluster.evidence()))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    name = os.environ.get("BUSBAR_E2E_INSTANCE", "e2e")
    try:
        subprocess.run([*BUSBAR, "up", "--name", name], check=True)
        status = subprocess.run(
            [*BUSBAR, "status", "--name", name, "-o", "json"], check=True, capture_output=True, text=True
        )
        facts = json.loads(status.stdout)
        yield Cluster(
            name=name,
            kubectl=facts["kubectl"],
            helm=facts["helm"],
            kubeconfig=facts["kubeconfig"],
            portal_url=facts["portalUrl"],
            gateway_url=facts["gatewayUrl"],
        )
    finally:
        if not os.environ.get("BUSBAR_E2E_KEEP"):
            subprocess.run([*BUSBAR, "down", "--name", name, "--purge"], check=True)
