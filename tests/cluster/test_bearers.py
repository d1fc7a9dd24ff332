"""Workload bearers on the real API server: viewers cannot read them, and a Secret that is not ours is not mounted."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import pytest
from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, engine_job, gang_job, with_the_charts_rights
from tests.cluster.kubelet import Script
from tests.cluster.rights import give_role
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.contracts import bearers
from busbar.kube.contracts.bearers import Role
from busbar.kube.resources import MODEL_SERVICES, SECRETS, TENANTS, TRAINING_JOBS

KEY = b"0123456789abcdef0123456789abcdef"  # of the harness


@pytest.fixture
async def cluster(platform: ApiServer) -> AsyncIterator[Cluster]:
    def script(pod: Object) -> Script:
        if pod["metadata"]["labels"]["busbar.dev/kind"] == "modelservice":
            return Script(status=lambda s: {"kind": "serving", "ready": True})
        return Script(status=lambda s: {"kind": "training", "phase": "Training", "step": 1})

    async with with_the_charts_rights(platform, nodes=1, script=script) as made:
        await made.start()
        yield made


READABLE = (
    "/api/v1/namespaces/{}/pods",
    "/api/v1/namespaces/{}/events",
    "/api/v1/namespaces/{}/services",
    "/api/v1/namespaces/{}/configmaps",
    "/api/v1/namespaces/{}/persistentvolumeclaims",
    "/apis/batch/v1/namespaces/{}/jobs",
    "/apis/apps/v1/namespaces/{}/deployments",
    "/apis/busbar.dev/v1alpha1/namespaces/{}/trainingjobs",
    "/apis/busbar.dev/v1alpha1/namespaces/{}/modelservices",
)


async def test_a_viewer_reads_no_bearer_anywhere(cluster: Cluster, platform: ApiServer) -> None:
    await cluster.until(TENANTS, f"tenant-{cluster.namespace}", lambda status: bool(status.get("conditions")))
    await cluster.create(engine_job("one"))
    await cluster.create(gang_job("own", 2))
    for name, engine in (("built", {}), ("vllm", {"engine": "vllm", "image": "registry.test/vllm:1"})):
        spec = {"model": {"uri": "pvc://claim/model"}, "shape": {"memory": "64Mi"}, **engine}
        await cluster.create({"kind": "ModelService", "metadata": {"name": name}, "spec": spec})
        await cluster.until(MODEL_SERVICES, name, lambda status: status.get("readyReplicas") == 1)
    for name in ("one", "own"):
        await cluster.until(TRAINING_JOBS, name, lambda status: status.get("phase") == "Running")

    made = [
        await cluster.get(TRAINING_JOBS, "one"),
        *[await cluster.get(MODEL_SERVICES, n) for n in ("built", "vllm")],
    ]
    uids = [item["metadata"]["uid"] for item in made]
    stored, _ = await cluster.client.list(SECRETS, cluster.namespace)
    assert {s["metadata"]["name"] for s in stored} == {bearers.secret_name(KEY, uid) for uid in uids}
    values = {base64.b64decode(value).decode() for s in stored for value in s["data"].values()}
    known = {bearers.bearer_for(KEY, uid, role) for uid in uids for role in Role}
    assert known & values  # the bearers to search for

    await asyncio.to_thread(give_role, platform, "t", cluster.namespace, "viewer", "vera")
    viewer = platform.client("vera")
    seen = "".join(json.dumps(viewer.get(path.format(cluster.namespace)).expect()) for path in READABLE)
    assert all(bearer not in seen for bearer in known | {bearers.former_bearer_for(KEY, u) for u in uids})
    assert bearers.secret_name(KEY, uids[0]) in seen  # its name is no secret
    for path in ("", *(f"/{s['metadata']['name']}" for s in stored)):
        assert viewer.get(f"/api/v1/namespaces/{cluster.namespace}/secrets{path}").status == 403


async def test_a_foreign_secret_under_the_name_is_not_mounted_and_the_status_says_so(
    apiserver: ApiServer,
) -> None:
    """Without the policy that reserves the name."""
    async with Cluster(apiserver, script=lambda pod: Script(run_s=0.0)) as cluster:
        made = await cluster.create(engine_job("squatted"))
        name = bearers.secret_name(KEY, made["metadata"]["uid"])
        foreign = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": cluster.namespace},
            "type": "Opaque",
            "data": {"read": base64.b64encode(b"theirs").decode()},
        }
        cluster.server.admin.create(foreign).expect()
        await cluster.start()
        status = await cluster.until(TRAINING_JOBS, "squatted", lambda s: s.get("reason") == "PodsRefused")
        assert name in status["message"]
        assert await cluster.pods() == {}
        cluster.server.admin.delete(foreign).expect()
        await cluster.until(TRAINING_JOBS, "squatted", lambda s: s.get("phase") == "Succeeded")

        async def kind() -> str:
            return str((await cluster.client.get(SECRETS, name, cluster.namespace))["type"])

        await becomes(kind, lambda found: found == bearers.SECRET_TYPE)
