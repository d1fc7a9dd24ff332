"""The objects that every cluster gets before any chart: DNS, storage, and the RBAC of our own parts."""

from __future__ import annotations

from busbar.local.instance import Instance
from busbar.local.kubectl import Object
from busbar.local.parts import CLIENTS, PROVISIONER

READ = ["get", "list", "watch"]
WRITE = [*READ, "create", "patch", "update", "delete"]


def objects(instance: Instance) -> list[Object]:
    """The objects, in an order in which they can be applied."""
    return [*_rights(), *_dns(instance), *_storage()]


def _rights() -> list[Object]:
    kwok = [
        _rule([""], ["nodes", "pods"], [*READ, "create", "delete", "patch", "update"]),
        _rule([""], ["nodes/status", "pods/status"], ["patch", "update"]),
        _rule([""], ["events"], ["create", "patch", "update"]),
        _rule(["coordination.k8s.io"], ["leases"], WRITE),
        _rule(["kwok.x-k8s.io"], ["*"], READ),
    ]
    coredns = [
        _rule([""], ["endpoints", "services", "pods", "namespaces"], ["list", "watch"]),
        _rule(["discovery.k8s.io"], ["endpointslices"], ["list", "watch"]),
    ]
    local_path = [
        _rule([""], ["nodes", "persistentvolumeclaims", "configmaps", "pods/log"], READ),
        _rule([""], ["persistentvolumes", "pods", "endpoints"], WRITE),
        _rule(["storage.k8s.io"], ["storageclasses"], READ),
        _rule(["coordination.k8s.io"], ["leases"], WRITE),
        _rule([""], ["events"], ["create", "patch", "update"]),
    ]
    traffic = [
        _rule(["busbar.dev"], ["trainingjobs"], WRITE),
        _rule(["busbar.dev"], ["acceleratorpools", "tenants"], READ),
    ]
    made: list[Object] = []
    for name, rules in (
        ("kwok", kwok),
        ("coredns", coredns),
        ("local-path", local_path),
        ("traffic", traffic),
    ):
        made.append(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRole",
                "metadata": {"name": f"busbar-local-{name}"},
                "rules": rules,
            }
        )
        made.append(_binding(f"busbar-local-{name}", f"busbar-local-{name}", CLIENTS[name][0]))
    made.append(_binding("busbar-local-kube-proxy", "system:node-proxier", CLIENTS["kube-proxy"][0]))
    return made


def _rule(groups: list[str], resources: list[str], verbs: list[str]) -> Object:
    return {"apiGroups": groups, "resources": resources, "verbs": verbs}


def _binding(name: str, role: str, user: str) -> Object:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }


def _dns(instance: Instance) -> list[Object]:
    """CoreDNS is a process of the node, not a pod, so a service without selector points to it."""
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    at = instance.addresses
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": "kube-dns",
                "namespace": "kube-system",
                "labels": {"k8s-app": "kube-dns", "kubernetes.io/name": "CoreDNS"},
            },
            "spec": {"clusterIP": at.dns, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns-node",
                "namespace": "kube-system",
                "labels": {"kubernetes.io/service-name": "kube-dns"},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [at.node], "conditions": {"ready": True}}],
            "ports": ports,
        },
    ]


def _storage() -> list[Object]:
    """The default StorageClass: folders on this machine, group-writable by the pod's fsGroup."""
    scripts = {
        "setup": '#!/bin/sh\nset -eu\nmkdir -m 0777 -p "$VOL_DIR"\n',
        "teardown": '#!/bin/sh\nset -eu\nrm -rf "$VOL_DIR"\n',
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "local-path", "namespace": "kube-system"},
            "data": scripts,
        },
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": "local-path",
                "annotations": {
                    "storageclass.kubernetes.io/is-default-class": "true",
                    "defaultVolumeType": "local",  # unlike hostPath, `local` applies the pod's fsGroup
                },
            },
            "provisioner": PROVISIONER,
            "volumeBindingMode": "WaitForFirstConsumer",
            "reclaimPolicy": "Delete",
        },
    ]
