"""Limits of a tenant at admission: who may write the quota of the limits, and how many jobs may wait."""

from __future__ import annotations

from collections.abc import Callable

from tests.cluster.admission_rows import TENANT_NAMESPACE
from tests.cluster.apiserver import ApiServer, Client
from tests.cluster.attempts import eventually_accepted, refused
from tests.cluster.harness import engine_job
from tests.cluster.manifests import JSON
from tests.cluster.rights import cluster_role_binding, user, wait_for_right


def quota(name: str = "busbar-tenant-limits", namespace: str = TENANT_NAMESPACE, pods: str = "8") -> JSON:
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"hard": {"pods": pods}},
    }


def test_only_operator_and_administrators_write_the_quota_of_the_limits(
    tenancy: ApiServer, operator: Client, kept: Callable[..., JSON]
) -> None:
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "edits-quotas"},
        "rules": [{"apiGroups": [""], "resources": ["resourcequotas"], "verbs": ["*"]}],
    }
    tenancy.admin.create(role).expect()
    tenancy.admin.create(cluster_role_binding("edits-quotas", "edits-quotas", user("quentin"))).expect()
    quentin = tenancy.client("quentin")
    collection = f"/api/v1/namespaces/{TENANT_NAMESPACE}/resourcequotas"
    wait_for_right(quentin, collection)
    says = "the ResourceQuota busbar-tenant-limits is made by Busbar's operator from Tenant.spec.limits"
    refused(lambda **p: quentin.create(quota(), **p), says)
    stored = kept(quota(), operator)
    refused(lambda **p: quentin.merge(stored, {"spec": {"hard": {"pods": "80"}}}, **p), says)
    refused(lambda **p: quentin.delete(stored, **p), says)
    refused(lambda **p: quentin.request("DELETE", collection, **p), says)
    quentin.create(quota("own"), dryRun="All").expect()
    tenancy.admin.merge(stored, {"spec": {"hard": {"pods": "9"}}}, dryRun="All").expect()
    operator.merge(stored, {"spec": {"hard": {"pods": "9"}}}, dryRun="All").expect()
    refused(
        lambda **p: operator.create(quota(namespace="default"), **p),
        "the operator makes things only in namespaces of tenants",
    )


def test_new_jobs_are_refused_while_too_many_of_the_tenant_wait(
    alice: Client, admin: Client, operator: Client, kept: Callable[..., JSON]
) -> None:
    stored = kept(
        {
            "apiVersion": "busbar.dev/v1alpha1",
            "kind": "Tenant",
            "metadata": {"name": "patient"},
            "spec": {"namespaces": [TENANT_NAMESPACE], "limits": {"waitingJobs": 2}},
        }
    )

    def job(name: str, **spec: bool) -> JSON:
        made = engine_job(name, **spec)
        return {
            **made,
            "apiVersion": "busbar.dev/v1alpha1",
            "metadata": {"name": name, "namespace": TENANT_NAMESPACE},
        }

    def waiting(count: int) -> None:
        operator.merge(stored, {"status": {"waitingJobs": count}}, subresource="/status").expect()

    waiting(1)
    early = kept(job("early"), alice)
    parked = kept(job("parked", suspend=True), alice)
    waiting(2)
    says = "2 jobs of tenant patient wait already, and spec.limits.waitingJobs of the Tenant is 2: wait until"
    refused(lambda **p: alice.create(job("late"), **p), says)
    refused(lambda **p: alice.merge(parked, {"spec": {"suspend": False}}, **p), says)
    alice.merge(early, {"metadata": {"labels": {"note": "x"}}}, dryRun="All").expect()
    alice.create(job("later", suspend=True), dryRun="All").expect()
    admin.create(job("urgent"), dryRun="All").expect()
    waiting(1)
    eventually_accepted(lambda **p: alice.create(job("late"), **p))
    admin.delete(job("late"))
