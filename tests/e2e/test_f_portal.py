"""The portal's own browser test, pointed at the real cluster: log in, submit, watch it run, complete a prompt."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.e2e.instance import ROOT, Cluster

pytestmark = pytest.mark.node


def test_a_person_goes_from_login_to_a_completed_prompt_on_the_real_cluster(cluster: Cluster) -> None:
    cluster.make_claim()
    token = cluster.kube(
        "-n", "busbar-system", "exec", "deploy/busbar-api", "--", "busbar-api", "token", "create",
        "--subject", "demo-user", "--role", "user", "--scopes", "rest,inference", "--tenant", "demo",
    ).strip()  # fmt: skip
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "tests/portal",
            "-k",
            "log_in_submit",
            "-q",
            "--color=no",
            "-m",
            "browser",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "BUSBAR_PORTAL_URL": cluster.portal_url,
            "BUSBAR_PORTAL_TOKEN": token,
            "BUSBAR_PORTAL_NAMESPACE": "demo",
        },
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout
    cluster.kube("-n", "demo", "delete", "modelservices,trainingjobs", "--all", "--wait=false")
