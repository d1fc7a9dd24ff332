"""Two tenants side by side, each with one object of every kind that the server can store in a namespace.

Everything of a tenant contains its name: the Tenant, its namespace, its objects, people, pool and node. So a search
for the name finds what one tenant learns of the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.cluster.admission_rows import pod
from tests.cluster.apiserver import ApiServer, Client
from tests.cluster.manifests import JSON, engine_job, model_service_from_weights
from tests.cluster.rights import cluster_role_binding, give_role, role_binding, user
from tests.cluster.served import Served

ROLES = ("viewer", "member", "admin")


@dataclass(frozen=True)
class Neighbour:
    """One tenant; its name is also that of its namespace and of every object of it."""

    server: ApiServer
    name: str

    def person(self, role: str) -> Client:
        """Its member of a role."""
        return self.server.client(self.person_name(role))

    def person_name(self, role: str) -> str:
        return f"{self.name}-{role}"

    @property
    def pod(self) -> Client:
        """A process in one of its pods: the namespace's own service account, with no role."""
        return self.server.service_account(self.name, "default")


def move_in(server: ApiServer, name: str, resources: Iterable[Served]) -> Neighbour:
    """Make the tenant with all its objects, as the operator and its people would. Safe to repeat."""
    admin = server.admin
    labels = {"busbar.dev/tenant": name, "pod-security.kubernetes.io/enforce": "restricted"}
    if admin.get(f"/api/v1/namespaces/{name}").status == 404:
        server.make_namespace(name, labels)
    # An operator that ran since the tenant moved out has released its namespace.
    opened = {"metadata": {"name": name, "labels": {**labels, "busbar.dev/released": None}}}
    admin.merge({"apiVersion": "v1", "kind": "Namespace", **opened}, opened).expect()
    for document in of_cluster(name):
        admin.apply(document).expect()
    for role in ROLES:
        give_role(server, name, name, role, f"{name}-{role}")
    for resource in resources:
        if resource.namespaced and resource.stored and not admin.get(resource.item(name, name)).ok:
            admin.request("POST", resource.collection(name), example(resource, name)).expect()
    return Neighbour(server, name)


def move_out(server: ApiServer, name: str) -> None:
    """Remove the objects outside the namespace, which would affect other tests."""
    for document in of_cluster(name):
        server.admin.delete(document)


def own_taint(name: str) -> str:
    """Key of the taint on the nodes of a tenant's own pool."""
    return f"busbar.dev/{name}-only"


def own_device(name: str) -> str:
    """The extended resource of a tenant's own pool."""
    return f"example.com/{name}-card"


def of_cluster(name: str) -> list[JSON]:
    """A tenant's cluster-scoped objects: the Tenant, a pool, a node and a feed for it alone, a volume, a binding."""
    people = [{"subject": {"kind": "User", "name": f"{name}-{role}"}, "role": role} for role in ROLES]
    own = {"key": own_taint(name), "operator": "Exists", "effect": "NoSchedule"}
    return [
        _busbar("Tenant", name, namespaces=[name], members=people, displayName=name),
        _busbar(
            "AcceleratorPool",
            name,
            accelerator="L4",
            resourceName=own_device(name),
            nodeSelector={"pool": name},
            tenants=[name],
            tolerations=[own],
        ),
        _busbar("PerformanceProfile", name, workloadClass=f"{name}-7B-3f9a0c11"),
        _busbar("PowerDomain", name, budgetWatts=1000, nodeSelector={"pool": name}),
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"pool": name}}},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteOnce"],
                "claimRef": {"namespace": name, "name": name},
                "nfs": {"server": f"{name}.example.com", "path": "/"},
            },
        },
        cluster_role_binding(name, "system:basic-user", user(f"{name}-member")),
    ]


def _busbar(kind: str, name: str, **spec: Any) -> JSON:
    return {"apiVersion": "busbar.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def example(resource: Served, name: str) -> JSON:
    """A small object of this kind. Raises KeyError for a kind that has no row below: add one."""
    head: JSON = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": name, "namespace": name, "labels": {"of": name}},
    }
    return head | _bodies(name)[resource.kind]


def _bodies(name: str) -> dict[str, JSON]:
    """Kind to the content of an object of it."""
    containers = pod()["spec"]
    template = {"metadata": {"labels": {"app": name}}, "spec": containers}
    once = {"spec": containers | {"restartPolicy": "Never"}}
    selector = {"matchLabels": {"app": name}}
    backend = {"service": {"name": name, "port": {"number": 80}}}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    about = {"apiVersion": "v1", "kind": "Pod", "name": name, "namespace": name}
    return {
        "ConfigMap": {"data": {"of": name}},
        "ControllerRevision": {"revision": 1, "data": {"of": name}},
        "CronJob": {"spec": {"schedule": "0 0 * * *", "jobTemplate": {"spec": {"template": once}}}},
        "CSIStorageCapacity": {"storageClassName": name},
        "DaemonSet": {"spec": {"selector": selector, "template": template}},
        "Deployment": {"spec": {"selector": selector, "template": template}},
        "EndpointSlice": {"addressType": "IPv4", "endpoints": []},
        "Endpoints": {"subsets": []},
        "Event": {"involvedObject": about, "reason": "Told", "message": f"of {name}", "type": "Normal"},
        "HorizontalPodAutoscaler": {"spec": {"maxReplicas": 2, "scaleTargetRef": deployment}},
        "Ingress": {"spec": {"defaultBackend": backend}},
        "Job": {"spec": {"suspend": True, "template": once}},
        "Lease": {"spec": {"holderIdentity": name}},
        "LimitRange": {"spec": {"limits": [{"type": "Container", "max": {"cpu": "64"}}]}},
        "ModelService": {"spec": model_service_from_weights()["spec"]},
        "NetworkPolicy": {"spec": {"podSelector": {}}},
        "PersistentVolumeClaim": {
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        },
        "Pod": {"spec": containers},
        "PodDisruptionBudget": {"spec": {"selector": selector, "minAvailable": 1}},
        "PodTemplate": {"template": template},
        "ReplicaSet": {"spec": {"selector": selector, "template": template}},
        "ReplicationController": {"spec": {"selector": {"app": name}, "template": template}},
        "ResourceClaim": {"spec": {}},
        "ResourceClaimTemplate": {"spec": {"spec": {}}},
        "ResourceQuota": {"spec": {"hard": {"services.nodeports": "1"}}},
        "Role": {"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]},
        "RoleBinding": {
            key: role_binding(name, name, "busbar-tenant-viewer", user(f"{name}-viewer"))[key]
            for key in ("roleRef", "subjects")
        },
        "Secret": {"stringData": {"of": name}},
        "Service": {"spec": {"selector": {"app": name}, "ports": [{"port": 80}]}},
        "ServiceAccount": {},
        "StatefulSet": {"spec": {"selector": selector, "template": template, "serviceName": name}},
        "TrainingJob": {"spec": engine_job()["spec"]},
    }
