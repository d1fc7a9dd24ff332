"""Tenants, pools and other controllers' pods on the real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.cluster.apiserver import ApiServer
from tests.cluster.harness import Cluster, gang_job
from tests.cluster.kubelet import Script, add_node
from tests.cluster.tenancy import becomes, bindings, employ, opted_in

from busbar.kube.client import Object
from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    EVENTS,
    JOBS,
    NAMESPACES,
    NETWORK_POLICIES,
    PODS,
    TENANTS,
    TRAINING_JOBS,
)


async def test_a_namespace_is_labelled_and_members_get_their_rights(apiserver: ApiServer) -> None:
    async with Cluster(apiserver) as cluster:
        await cluster.start()
        tenant = await employ(cluster, "ann")
        await becomes(lambda: bindings(cluster), lambda names: names == [f"busbar-{tenant}-member"])
        labels = (await cluster.client.get(NAMESPACES, cluster.namespace))["metadata"]["labels"]
        assert labels["busbar.dev/tenant"] == tenant
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
        await cluster.client.patch(TENANTS, tenant, {"spec": {"members": None}})
        await becomes(lambda: bindings(cluster), lambda names: names == [])
        await cluster.client.patch(TENANTS, tenant, {"spec": {"namespaces": []}})

        async def labelled() -> Any:
            return (await cluster.client.get(NAMESPACES, cluster.namespace))["metadata"].get("labels", {})

        await becomes(labelled, lambda labels: "busbar.dev/tenant" not in labels)
        await becomes(lambda: bindings(cluster), lambda names: names == [])
        assert (await labelled()).items() >= {
            ("busbar.dev/released", tenant),
            ("pod-security.kubernetes.io/enforce", "restricted"),
        }


async def test_a_tenants_namespace_keeps_its_network_policy(apiserver: ApiServer) -> None:
    """The policy is created, restored after every edit, follows the namespace's owner, and is deleted when disabled."""
    async with Cluster(apiserver) as cluster:
        await cluster.start()
        name, mine, home = "busbar-tenant", f"tenant-{cluster.namespace}", cluster.namespace

        async def policies() -> dict[str, Object]:
            items, _ = await cluster.client.list(NETWORK_POLICIES, home)
            return {p["metadata"]["name"]: p for p in items}

        def lets_in(owner: str) -> Callable[[dict[str, Object]], bool]:
            labels = ({"busbar.dev/tenant": owner}, {"kubernetes.io/metadata.name": "default"})
            ingress = [{"from": [{"namespaceSelector": {"matchLabels": each}} for each in labels]}]

            def holds(found: dict[str, Object]) -> bool:
                kept = (found.get(name, {}).get("metadata", {}).get("labels") or {}).keys()
                return "app.kubernetes.io/managed-by" in kept and found[name]["spec"]["ingress"] == ingress

            return holds

        first = (await becomes(policies, lets_in(mine)))[name]
        wrongs: tuple[Object, ...] = ({"spec": {"ingress": [{}]}}, {"metadata": {"labels": None}})
        for wrong in wrongs:
            await cluster.client.patch(NETWORK_POLICIES, name, wrong, home)
            await becomes(policies, lets_in(mine))
        await cluster.client.delete(NETWORK_POLICIES, name, home)
        healed = (await becomes(policies, lets_in(mine)))[name]
        assert healed["metadata"]["uid"] != first["metadata"]["uid"]
        assert healed["spec"] == first["spec"]

        people = {**first, "metadata": {"name": "people-own-it"}}
        await cluster.client.create(NETWORK_POLICIES, people, home)
        other = {"kind": "Tenant", "metadata": {"name": f"next-{home}"}, "spec": {"namespaces": [home]}}
        await cluster.create(other)
        await cluster.client.patch(TENANTS, mine, {"spec": {"namespaces": []}})
        await becomes(policies, lets_in(f"next-{home}"))
        await cluster.client.delete(TENANTS, f"next-{home}")
        await becomes(policies, lambda found: set(found) == {"people-own-it"})

        await cluster.client.patch(TENANTS, mine, {"spec": {"namespaces": [home]}})
        await becomes(policies, lets_in(mine))
        await cluster.stop()
        await cluster.start(network_policies=False)
        await becomes(policies, lambda found: set(found) == {"people-own-it"})


async def test_an_opted_in_pod_waits_for_room_and_is_let_go_pinned(apiserver: ApiServer) -> None:
    async with Cluster(apiserver, cpu="2", script=lambda pod: Script()) as cluster:
        await cluster.start()
        await cluster.create(gang_job("first", 2, preemptible=False))
        await cluster.until(TRAINING_JOBS, "first", lambda s: s.get("phase") == "Running")
        await cluster.client.create(PODS, opted_in("theirs"), cluster.namespace)

        async def told() -> list[str]:
            return [e["reason"] for e in await cluster.events() if e["involvedObject"]["name"] == "theirs"]

        await becomes(told, lambda reasons: bool(reasons))
        assert (await cluster.pods())["theirs"]["spec"]["schedulingGates"]
        await cluster.client.delete(TRAINING_JOBS, "first", cluster.namespace)
        for rank in (0, 1):
            await cluster.client.delete(PODS, f"first-1-{rank}", cluster.namespace)

        async def theirs() -> Object:
            return (await cluster.pods())["theirs"]

        pod = await becomes(theirs, lambda p: p.get("status", {}).get("phase") == "Running")
        assert "schedulingGates" not in pod["spec"]
        assert pod["spec"]["nodeName"] == f"{cluster.namespace}-node-0"
        assert pod["metadata"]["labels"]["busbar.dev/admission-id"]


async def test_an_opted_in_suspended_job_of_a_tenant_is_let_go(apiserver: ApiServer) -> None:
    async with Cluster(apiserver) as cluster:
        await cluster.start()
        template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}
        for name, labels in (("queued", {"busbar.dev/queue": "true"}), ("other", {})):
            body = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": name, "labels": labels},
                "spec": {"suspend": True, "template": template},
            }
            await cluster.client.create(JOBS, body, cluster.namespace)

        async def suspended() -> bool:
            return bool((await cluster.client.get(JOBS, "queued", cluster.namespace))["spec"].get("suspend"))

        await becomes(suspended, lambda s: s is False)
        assert (await cluster.client.get(JOBS, "other", cluster.namespace))["spec"]["suspend"] is True


async def test_devices_that_no_pool_describes_are_discovered(apiserver: ApiServer) -> None:
    async with Cluster(apiserver) as cluster:
        labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
        await asyncio.to_thread(add_node, apiserver, f"{cluster.namespace}-gpu", labels=labels, gpus=8)
        await cluster.start()
        name = "nvidia-h100-80gb-hbm3"
        status = await cluster.until(ACCELERATOR_POOLS, name, lambda s: s.get("capacity") == 8)
        assert status["nodes"] == 1
        spec = (await cluster.get(ACCELERATOR_POOLS, name))["spec"]
        assert (spec["accelerator"], spec["memoryGib"]) == ("H100", 79.6)
        job = gang_job(
            "gpu", 1, accelerators=["H100"], shape={"minPods": 1, "maxPods": 1, "acceleratorsPerPod": 4}
        )
        await cluster.create(job)
        admitted = await cluster.until(TRAINING_JOBS, "gpu", lambda s: bool(s.get("admission")))
        assert admitted["admission"]["pool"] == name
        await cluster.until(ACCELERATOR_POOLS, name, lambda s: s.get("allocated") in (0, 4) and "free" in s)


async def test_a_job_in_a_namespace_of_no_tenant_says_so(apiserver: ApiServer, namespace: str) -> None:
    async with Cluster(apiserver) as cluster:
        await cluster.start()
        manifest = {"apiVersion": "busbar.dev/v1alpha1", **gang_job("lost", 1)}
        await cluster.client.create(TRAINING_JOBS, manifest, namespace)

        async def status() -> dict[str, Any]:
            return (await cluster.client.get(TRAINING_JOBS, "lost", namespace)).get("status") or {}

        said = await becomes(status, lambda s: bool(s.get("reason")))
        assert (said["phase"], said["reason"]) == ("Queued", "NoTenant")
        assert "tenant" in said["message"]


async def test_a_pool_says_how_much_foreign_pods_hold_and_only_an_event_says_whose(
    apiserver: ApiServer,
) -> None:
    async with Cluster(apiserver, script=lambda pod: Script()) as cluster:
        await cluster.start()
        pool, home = cluster.namespace, f"{cluster.namespace}-others"
        await asyncio.to_thread(apiserver.make_namespace, home)
        await cluster.until(ACCELERATOR_POOLS, pool, lambda s: s.get("capacity") == 8)
        container = {"name": "c", "image": "i", "resources": {"requests": {"cpu": "3"}}}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"foreign-{pool}"},
            "spec": {"nodeName": f"{pool}-node-0", "containers": [container]},
        }
        await cluster.client.create(PODS, body, home)
        status = await cluster.until(
            ACCELERATOR_POOLS, pool, lambda s: "heldElsewhere" in s and s["capacity"] < 8
        )
        assert (status["capacity"], status["heldElsewhere"]) == (5, {"accelerators": 3, "pods": 1})
        assert home not in str(status)

        async def events() -> list[Object]:
            found, _ = await cluster.client.list(EVENTS, "default")
            return [e for e in found if (e["reason"], e["involvedObject"]["name"]) == ("ForeignPods", pool)]

        [told] = await becomes(events, lambda found: found != [])
        assert told["type"] == "Warning"
        assert told["message"].endswith(f"Their namespaces: {home}.")
        await cluster.client.delete(PODS, f"foreign-{pool}", home, grace_s=0)
        free = await cluster.until(ACCELERATOR_POOLS, pool, lambda s: "heldElsewhere" not in s)
        assert {c["type"]: c["status"] for c in free["conditions"]} == {
            "Ready": "True",
            "CapacityHeldElsewhere": "False",
        }
