"""Statuses of tenant A's objects say how much others have allocated, never who they are.

Two tenants compete on the real API server, with the chart's rights: A waits for devices of B, borrows from B and
returns them, and requests devices that only B may use. Everything that A's people can then read is searched for B's
names.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from tests.cluster.apiserver import ApiServer, Client, collection
from tests.cluster.harness import Cluster, engine_job, gang_job, with_the_charts_rights
from tests.cluster.kubelet import Script, add_node
from tests.cluster.manifests import JSON
from tests.cluster.neighbours import of_cluster
from tests.cluster.rights import wait_for_right
from tests.cluster.served import Served
from tests.cluster.tenancy import becomes, opted_in

from busbar.kube.client import Object
from busbar.kube.resources import MODEL_SERVICES, PODS, TRAINING_JOBS
from busbar.scheduler import Policy

BRAVOS = re.compile("bravo", re.IGNORECASE)


def compete(cluster: Cluster) -> None:
    """Adds B beside the cluster's own tenant, A: the whole pool is guaranteed to B, and B has a pool of its own."""
    server, admin = cluster.server, cluster.server.admin
    if admin.get("/api/v1/namespaces/bravo").status == 404:
        server.make_namespace("bravo")
    for document in of_cluster("bravo"):
        if document["kind"] == "Tenant":
            document["spec"]["quota"] = [{"accelerator": "cpu", "guaranteed": 2}]
        if document["kind"] in ("Tenant", "AcceleratorPool"):
            admin.apply(document).expect()
    add_node(server, "bravo-node", labels={"pool": "bravo"}, cpu="4")
    people = [{"subject": {"kind": "User", "name": "alpha-admin"}, "role": "admin"}]
    own: JSON = {"kind": "Tenant", "metadata": {"name": f"tenant-{cluster.namespace}"}}
    admin.merge(own, {"spec": {"members": people}}).expect()


def all_that(caller: Client, namespace: str, resources: tuple[Served, ...]) -> dict[str, str]:
    """The text of everything that somebody may list in a namespace, by kind."""
    found = {}
    for resource in resources:
        if resource.namespaced and resource.stored:
            answer = caller.get(resource.collection(namespace))
            if answer.ok and answer.body["items"]:
                found[resource.plural] = json.dumps(answer.body)
    return found


async def test_no_reason_event_or_status_of_a_names_b(
    platform: ApiServer, resources: tuple[Served, ...]
) -> None:
    async with with_the_charts_rights(platform, cpu="2", script=lambda pod: Script()) as cluster:
        await asyncio.to_thread(compete, cluster)
        await cluster.start(policy=Policy(min_run_s=0.0, guarantee_reclaim_s=0.0))
        await cluster.create(gang_job("borrows", 2))
        await cluster.until(TRAINING_JOBS, "borrows", lambda s: s.get("phase") == "Running")
        claim = {"apiVersion": TRAINING_JOBS.api_version, **gang_job("bravo-claims", 2, preemptible=False)}
        await cluster.client.create(TRAINING_JOBS, claim, "bravo")
        await cluster.create(gang_job("wants-what-is-bs", 1, accelerators=["L4"]))
        await cluster.create(engine_job("waits"))
        service = {"model": {"uri": "pvc://claim/model"}, "accelerators": ["cpu"], "minReplicas": 1}
        await cluster.create({"kind": "ModelService", "metadata": {"name": "served"}, "spec": service})
        await cluster.client.create(PODS, opted_in("queued"), cluster.namespace)

        def waits(status: dict[str, Any]) -> bool:
            return status.get("phase") == "Queued" and bool(status.get("waiting", {}).get("holders"))

        preempted = await cluster.until(TRAINING_JOBS, "borrows", waits)
        assert preempted["preemptions"] == 1
        waiting = await cluster.until(TRAINING_JOBS, "waits", waits)
        assert "another tenant" in waiting["message"]
        await cluster.until(TRAINING_JOBS, "wants-what-is-bs", lambda s: s.get("reason") == "NoPoolForTenant")
        await cluster.until(MODEL_SERVICES, "served", lambda s: "another tenant" in s.get("message", ""))
        await becomes(cluster.events, lambda told: {"Preempted", "queued"} <= names_and_reasons(told))

        alpha = platform.client("alpha-admin")
        await asyncio.to_thread(wait_for_right, alpha, collection("RoleBinding", cluster.namespace))
        seen = await asyncio.to_thread(all_that, alpha, cluster.namespace, resources)
        theirs = await asyncio.to_thread(all_that, platform.admin, "bravo", resources)
    assert {"trainingjobs", "modelservices", "pods", "events", "rolebindings", "services"} <= set(seen)
    assert {"trainingjobs", "pods"} <= {kind for kind, text in theirs.items() if BRAVOS.search(text)}
    assert [kind for kind, text in seen.items() if BRAVOS.search(text)] == []


def names_and_reasons(events: list[Object]) -> set[str]:
    return {word for event in events for word in (event["involvedObject"]["name"], event["reason"])}
