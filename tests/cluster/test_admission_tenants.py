"""The namespace decides the tenant: who may assign a namespace to a tenant, and the limits of the operator's rights."""

from __future__ import annotations

from collections.abc import Callable

from tests.cluster.admission_rows import OPEN_NAMESPACE, TENANT_NAMESPACE, pod
from tests.cluster.apiserver import ApiServer, Client, address
from tests.cluster.attempts import refused
from tests.cluster.manifests import JSON
from tests.cluster.rights import SYSTEM, cluster_role_binding, role_binding, user, wait_for_right
from tests.cluster.rule_row import edited


def test_only_operator_and_administrators_make_a_namespace_a_tenants(
    tenancy: ApiServer, operator: Client
) -> None:
    # A person who may edit namespaces, but is not a cluster administrator.
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "edits-namespaces"},
        "rules": [{"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get", "create", "patch"]}],
    }
    tenancy.admin.create(role).expect()
    tenancy.admin.create(cluster_role_binding("edits-namespaces", "edits-namespaces", user("nora"))).expect()
    nora = tenancy.client("nora")
    wait_for_right(nora, f"/api/v1/namespaces/{OPEN_NAMESPACE}")
    mine: JSON = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPEN_NAMESPACE}}
    theirs: JSON = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TENANT_NAMESPACE}}
    new: JSON = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "new", "labels": {"busbar.dev/tenant": "a"}},
    }
    tenant_says = "the label busbar.dev/tenant is written by Busbar's operator"

    def labelled(value: str | None, key: str = "busbar.dev/tenant") -> JSON:
        return {"metadata": {"labels": {key: value}}}

    refused(lambda **p: nora.create(new, **p), tenant_says)
    refused(lambda **p: nora.merge(mine, labelled("team-a"), **p), tenant_says)
    refused(lambda **p: nora.merge(theirs, labelled("team-b"), **p), tenant_says)
    refused(lambda **p: nora.merge(theirs, labelled(None), **p), tenant_says)
    level = "pod-security.kubernetes.io/enforce"
    for value in ("privileged", None):
        refused(
            lambda v=value, **p: nora.merge(theirs, labelled(v, level), **p), "Pod Security of a tenant's"
        )
    nora.merge(mine, labelled("baseline", level)).expect()
    nora.merge(theirs, labelled("x", "example.com/other")).expect()
    operator.merge(mine, labelled("team-b")).expect()
    tenancy.admin.merge(mine, labelled(None)).expect()


def test_the_operator_makes_things_only_in_namespaces_of_tenants(operator: Client, admin: Client) -> None:
    says = "the operator makes things only in namespaces of tenants"
    refused(lambda **p: operator.create(pod(OPEN_NAMESPACE), **p), says)
    binding = role_binding("kube-system", "grab", "busbar-tenant-admin", user("eve"))
    refused(lambda **p: operator.create(binding, **p), says)
    policy: JSON = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "busbar-tenant", "namespace": OPEN_NAMESPACE},
        "spec": {"podSelector": {}},
    }
    refused(lambda **p: operator.create(policy, **p), says)
    operator.create(edited(policy, {"metadata/namespace": TENANT_NAMESPACE}), dryRun="All").expect()
    own = edited(binding, {"metadata/namespace": TENANT_NAMESPACE})
    operator.create(own, dryRun="All").expect()
    stronger = edited(own, {"roleRef/name": "cluster-admin"})
    assert operator.create(stronger, dryRun="All").status == 403


def tenant(name: str, *namespaces: str) -> JSON:
    return {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name},
        "spec": {"namespaces": list(namespaces)},
    }


def test_a_tenant_with_running_work_is_deleted_only_where_it_says_that_the_work_stops(
    admin: Client, operator: Client, kept: Callable[[JSON], JSON]
) -> None:
    stored = kept(tenant("busy", "busy-a", "busy-b"))
    path = address(stored)
    status = {"status": {"runningIn": ["busy-a"], "running": 1}}
    operator.merge(stored, status, subresource="/status").expect()
    says = "work of this tenant runs in busy-a: end it first, or set spec.onDelete to stop"
    left_out = {"spec": {"namespaces": ["busy-b"]}}
    refused(lambda **p: admin.request("DELETE", path, **p), says)
    refused(lambda **p: admin.merge(stored, left_out, **p), says)
    admin.merge(stored, {"spec": {"namespaces": ["busy-a"]}}, dryRun="All").expect()
    admin.merge(stored, {"spec": {"namespaces": ["busy-b"], "onDelete": "stop"}}, dryRun="All").expect()
    admin.merge(stored, {"spec": {"onDelete": "stop"}}).expect()
    assert admin.request("DELETE", path, dryRun="All").ok
    admin.merge(stored, {"spec": {"onDelete": "refuse"}}).expect()
    refused(lambda **p: admin.request("DELETE", path, **p), says)
    operator.merge(stored, {"status": {"runningIn": None}}, subresource="/status").expect()
    assert admin.request("DELETE", path).ok


def test_a_namespace_belongs_to_one_tenant_and_the_platforms_to_none(
    admin: Client, kept: Callable[[JSON], JSON]
) -> None:
    kept(tenant("first", "shared-a", "shared-b"))
    second = tenant("second", "own", "shared-b")
    refused(lambda **p: admin.create(second, **p), "namespace shared-b belongs to another Tenant, first")
    stored = kept(tenant("second", "own"))
    taken = {"spec": {"namespaces": ["own", "shared-a"]}}
    refused(
        lambda **p: admin.merge(stored, taken, **p), "namespace shared-a belongs to another Tenant, first"
    )
    admin.merge(stored, {"spec": {"namespaces": ["own", "more"]}}).expect()
    says = "the namespace of the platform itself cannot belong to a tenant"
    refused(lambda **p: admin.merge(stored, {"spec": {"namespaces": [SYSTEM]}}, **p), says)
