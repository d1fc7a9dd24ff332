"""The chart grants exactly the rights that the platform needs.

The operator runs here as its own service account, with a real token, under the chart's rights and policies: what
it does in the other tests as an administrator must also work here, without one refusal.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster import manifests
from tests.cluster.admission_rows import pod
from tests.cluster.apiserver import JSON, ApiServer, address, collection, render_chart
from tests.cluster.attempts import eventually_accepted
from tests.cluster.harness import Cluster, engine_job, gang_job, with_the_charts_rights
from tests.cluster.kubelet import Script
from tests.cluster.rights import SYSTEM, wait_for_right
from tests.cluster.rule_row import edited
from tests.cluster.tenancy import becomes

from busbar.kube.contracts.auth import AUDIENCE_GATEWAY, AUDIENCE_OPERATOR, Access, Caller, Reviewer
from busbar.kube.resources import MODEL_SERVICES, TENANTS, TRAINING_JOBS
from busbar.kube.types import TrainingJob
from busbar.operator.pods.manifests import Rendering
from busbar.operator.pods.training_pods import training_pod
from busbar.scheduler import Placement, Resources


@pytest.fixture
async def cluster(platform: ApiServer) -> AsyncIterator[Cluster]:
    """A cluster whose operator has the chart's rights and no others."""
    async with with_the_charts_rights(platform, nodes=2, script=lambda _: Script(run_s=0.5)) as made:
        await made.start()
        yield made


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log lines about a missing right; a port number that contains 403 does not count."""
    return [line for line in caplog.messages if re.search(r"\b403\b|forbidden", line, re.IGNORECASE)]


async def test_a_job_and_a_gang_run_to_their_end_with_the_charts_rights(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await cluster.create(engine_job("one", ttlSecondsAfterFinished=1))
        await cluster.create(gang_job("gang", 2))
        await cluster.until(TRAINING_JOBS, "gang", lambda status: status.get("phase") == "Succeeded")
        await _until_gone(cluster, "TrainingJob", "one")
    assert refusals(caplog) == []


async def test_a_tenants_namespace_is_closed_and_its_members_get_their_roles(
    cluster: Cluster, platform: ApiServer
) -> None:
    tenant = f"tenant-{cluster.namespace}"
    members = [
        {"subject": {"kind": "User", "name": f"{role}-of-{tenant}"}, "role": role}
        for role in ("admin", "member", "viewer")
    ]
    document: JSON = {"kind": "Tenant", "metadata": {"name": tenant}}
    platform.admin.merge(document, {"spec": {"members": members}}).expect()
    await cluster.until(TENANTS, tenant, lambda status: bool(status.get("conditions")))
    for role in ("admin", "member", "viewer"):
        person = platform.client(f"{role}-of-{tenant}")
        await asyncio.to_thread(wait_for_right, person, collection("TrainingJob", cluster.namespace))
        job = edited(manifests.engine_job(), {"metadata/namespace": cluster.namespace})
        assert person.create(job, dryRun="All").ok == (role != "viewer")
    namespace = platform.admin.get(f"/api/v1/namespaces/{cluster.namespace}").expect()
    labels = namespace["metadata"]["labels"]
    assert labels["busbar.dev/tenant"] == tenant
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


async def test_a_service_and_an_opted_in_pod_run_with_the_charts_rights(
    cluster: Cluster, platform: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.until(TENANTS, f"tenant-{cluster.namespace}", lambda status: bool(status.get("conditions")))
    with caplog.at_level(logging.INFO):
        own = edited(
            pod(cluster.namespace, "own"),
            {
                "metadata/labels": {"busbar.dev/queue": "true"},
                "spec/schedulingGates": [{"name": "busbar.dev/admission"}],
            },
        )
        platform.admin.create(own).expect()

        async def gates() -> Any:
            return platform.admin.get(address(own)).expect()["spec"].get("schedulingGates")

        await becomes(gates, lambda found: not found)
        await cluster.create(
            {
                "apiVersion": "busbar.dev/v1alpha1",
                "kind": "ModelService",
                "metadata": {"name": "served"},
                "spec": {
                    "model": {"uri": "pvc://claim/model"},
                    "shape": {"memory": "64Mi"},
                    "accelerators": ["cpu"],
                },
            }
        )
        await cluster.until(MODEL_SERVICES, "served", lambda status: status.get("replicas", 0) >= 1)
    assert refusals(caplog) == []


async def test_the_most_generous_template_becomes_a_restricted_pod(platform: ApiServer) -> None:
    """What the operator makes from every field of a template passes Pod Security and all policies."""
    labels = {"busbar.dev/tenant": "generous", "pod-security.kubernetes.io/enforce": "restricted"}
    platform.make_namespace("generous", labels)
    stored = edited(manifests.template_job(), {"metadata/namespace": "generous", "metadata/uid": "u" * 36})
    placement = Placement(
        pool="p",
        accelerator="cpu",
        mode="resident",
        nodes=("n",),
        per_pod=Resources(accelerators_m=1000, cpu_m=500, memory_mib=64),
    )
    made = training_pod(
        TrainingJob.model_validate(stored),
        attempt=1,
        rank=0,
        admission_id="a",
        placement=placement,
        pool=None,
        rendering=Rendering("image", "IfNotPresent", b"k" * 32),
    )
    operator = platform.service_account(SYSTEM, "busbar-operator")
    spec = eventually_accepted(lambda **p: operator.create(made, **p | {"dryRun": "All"}))["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert not any(
        source in volume for volume in spec["volumes"] for source in ("hostPath", "projected", "csi")
    )
    assert {key: spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC", "nodeName")} == {
        "hostNetwork": None,
        "hostPID": None,
        "hostIPC": None,
        "nodeName": None,
    }
    assert spec["serviceAccountName"] == "default"


async def _until_gone(cluster: Cluster, kind: str, name: str) -> None:
    path = f"{collection(kind, cluster.namespace)}/{name}"

    async def status() -> int:
        return cluster.server.admin.get(path).status

    await becomes(status, lambda code: code == 404)


def roles() -> list[JSON]:
    return [d for d in render_chart("busbar") if d["kind"] in ("ClusterRole", "Role")]


@pytest.mark.apiserver
def test_no_role_has_a_wildcard_or_a_way_to_more_rights() -> None:
    for role in roles():
        for rule in role["rules"]:
            name = role["metadata"]["name"]
            used = set(rule["apiGroups"]) | set(rule["resources"]) | set(rule["verbs"])
            assert "*" not in used, name
            assert not {"escalate", "impersonate"} & used, name
            if name in ("busbar-operator", "busbar-api", "busbar-gateway"):
                if "secrets" in rule["resources"]:  # to write workload bearers, and to read nothing
                    assert (name, set(rule["verbs"])) == ("busbar-operator", {"create", "patch"})
                assert "deletecollection" not in rule["verbs"], name
            if "bind" in rule["verbs"]:
                assert rule["resourceNames"] == [
                    "busbar-tenant-admin",
                    "busbar-tenant-member",
                    "busbar-tenant-viewer",
                ]


class DirectPoster:
    """Posts reviews as one of the platform's service accounts."""

    def __init__(self, server: ApiServer, account: str) -> None:
        self._client = server.service_account(SYSTEM, account)

    async def __call__(self, path: str, body: Any) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: self._client.request("POST", path, dict(body)).expect())


async def test_processes_know_each_other_by_tokens_for_one_audience(platform: ApiServer) -> None:
    reviewer = Reviewer(DirectPoster(platform, "busbar-gateway"))
    token = platform.service_account_token(SYSTEM, "busbar-operator", AUDIENCE_GATEWAY)
    caller = await reviewer.authenticate(token, AUDIENCE_GATEWAY)
    assert caller is not None
    assert caller.is_service_account(SYSTEM, "busbar-operator")
    assert await reviewer.authenticate(token, AUDIENCE_OPERATOR) is None
    assert await reviewer.authenticate(token) is None
    assert await reviewer.authenticate("nonsense", AUDIENCE_GATEWAY) is None
    for_the_api = platform.service_account_token(SYSTEM, "busbar-operator")
    assert await reviewer.authenticate(for_the_api, AUDIENCE_GATEWAY) is None


async def test_access_is_the_clusters_own_answer(platform: ApiServer) -> None:
    reviewer = Reviewer(DirectPoster(platform, "busbar-api"))
    admin = Caller("anyone", groups=("busbar:admins",))
    nobody = Caller("anyone")
    access = Access("create", "busbar.dev", "trainingjobs", namespace="default")
    assert await reviewer.is_allowed(admin, access)
    assert not await reviewer.is_allowed(nobody, access)
