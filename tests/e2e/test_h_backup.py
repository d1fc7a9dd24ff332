"""The drill of docs/admin.md: a backup, a cluster without anything of Busbar, a restore, and the same usage and tokens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.instance import Cluster, busbar, small_job

pytestmark = pytest.mark.node

SYSTEM, JOB = "busbar-system", "before-the-purge"


def token_of(cluster: Cluster, subject: str, role: str) -> str:
    return cluster.kube(
        "-n", SYSTEM, "exec", "deploy/busbar-api", "--", "busbar-api", "token", "create",
        "--subject", subject, "--role", role, "--scopes", "rest",
    ).strip()  # fmt: skip


def as_admin(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Variables of a person with an administrator's token and kubeconfig."""
    return {
        **os.environ,
        "BUSBAR_SERVER": cluster.portal_url,
        "BUSBAR_TOKEN": token_of(cluster, "drill", "admin"),
        "KUBECONFIG": cluster.kubeconfig,
        "XDG_CONFIG_HOME": str(folder),
    }


def accounts(env: Mapping[str, str]) -> dict[str, Any]:
    """The tenant's usage, and who has which tokens: what a bill and a login depend on.

    Jobs of other tenants come and go on the simulated nodes all the time. A database adds up in the order of its rows,
    so sums differ in their last digits.
    """

    def rounded(line: dict[str, Any]) -> dict[str, Any]:
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in line.items()}

    said = json.loads(busbar(env, "usage", "-o", "json"))
    usage = {
        kind: [rounded(one) for one in said[kind] if one["group"] == "demo"]
        for kind in ("compute", "inference")
    }
    tokens = json.loads(busbar(env, "token", "list", "-o", "json"))["items"]
    known = ("subject", "prefix", "role", "createdAt", "expiresAt", "revokedAt")
    listed = [{key: one.get(key) for key in known} for one in tokens if one["subject"] != "drill"]
    return {"usage": usage, "tokens": sorted(listed, key=str)}


def purge(cluster: Cluster) -> None:
    """Nothing of Busbar is left in the cluster: no type and so no object, no key, no database, no claim."""
    for release in ("busbar", "busbar-crds"):
        cluster.run(cluster.helm, "uninstall", release, "-n", SYSTEM, "--wait")
    types = cluster.kube("get", "crd", "-o", "name").split()
    cluster.kube("delete", *(name for name in types if name.endswith(".busbar.dev")))
    cluster.kube("delete", "namespace", SYSTEM, "demo")


def test_a_purged_cluster_is_restored_with_its_usage_and_its_tokens(cluster: Cluster, tmp_path: Path) -> None:
    cluster.kube("-n", "demo", "delete", "modelservices,trainingjobs", "--all", "--wait=false")
    cluster.wait("an empty queue", lambda: not cluster.get("-n", "demo", "pods")["items"], 240)
    alice = token_of(cluster, "alice", "user")
    cluster.submit(small_job(JOB))
    cluster.wait("the job's end", lambda: cluster.phase("trainingjob", JOB) == "Succeeded", 240)
    job = cluster.get("-n", "demo", "trainingjob", JOB)
    env, file, phrase = as_admin(cluster, tmp_path), tmp_path / "backup.zip", tmp_path / "phrase"
    phrase.write_text("correct horse battery staple\n")

    def settled() -> Any:
        found = accounts(env)
        time.sleep(2)
        return found if found["usage"]["compute"] and accounts(env) == found else None

    before = cluster.wait("usage that is told", settled)
    busbar(env, "backup", str(file), "--passphrase-file", str(phrase))

    purge(cluster)
    cluster.up()
    assert not cluster.get("-n", "demo", "trainingjobs")["items"]
    env = as_admin(cluster, tmp_path)
    cluster.kube("-n", SYSTEM, "scale", "deploy/busbar-gateway", "--replicas", "0")
    busbar(env, "restore", str(file), "--passphrase-file", str(phrase))
    cluster.kube("-n", SYSTEM, "rollout", "restart", "deploy/busbar-operator")
    cluster.kube("-n", SYSTEM, "scale", "deploy/busbar-gateway", "--replicas", "1")

    cluster.wait("the same usage and tokens", lambda: accounts(env) == before)
    restored = cluster.get("-n", "demo", "trainingjob", JOB)
    assert restored["metadata"]["uid"] != job["metadata"]["uid"]
    assert restored["spec"] == job["spec"]
    assert restored["status"] == job["status"]
    own = json.loads(busbar({**env, "BUSBAR_TOKEN": alice}, "token", "list", "-o", "json"))["items"]
    assert {one["subject"] for one in own} == {"alice"}
