"""The rights of each role inside its own namespace. `test_verbs.py` covers everything else."""

from __future__ import annotations

from tests.cluster.admission_rows import OPEN_NAMESPACE, TENANT_NAMESPACE, job, kinds, pod
from tests.cluster.apiserver import ApiServer, Client
from tests.cluster.manifests import JSON
from tests.cluster.rights import SYSTEM, role_binding, user


def test_members_see_no_tenants_pools_or_other_namespaces(tenancy: ApiServer) -> None:
    for person in ("alice", "victor", "adele"):
        client = tenancy.client(person)
        for path in (
            "/apis/busbar.dev/v1alpha1/tenants",
            "/apis/busbar.dev/v1alpha1/acceleratorpools",
            "/apis/busbar.dev/v1alpha1/performanceprofiles",
            "/apis/busbar.dev/v1alpha1/powerdomains",
            "/apis/busbar.dev/v1alpha1/trainingjobs",
            f"/apis/busbar.dev/v1alpha1/namespaces/{OPEN_NAMESPACE}/trainingjobs",
            f"/api/v1/namespaces/{OPEN_NAMESPACE}/pods",
            f"/api/v1/namespaces/{SYSTEM}/secrets",
            "/api/v1/nodes",
        ):
            assert client.get(path).status == 403, f"{person} may read {path}"
        assert client.get(f"/apis/busbar.dev/v1alpha1/namespaces/{TENANT_NAMESPACE}/trainingjobs").ok


def test_a_viewer_changes_nothing(tenancy: ApiServer) -> None:
    viewer = tenancy.client("victor")
    for document in (pod(), job(), *kinds()[:2]):
        assert viewer.create(document, dryRun="All").status == 403
    assert viewer.get(f"/api/v1/namespaces/{TENANT_NAMESPACE}/secrets").status == 403


def test_members_cannot_give_themselves_rights_or_pools(alice: Client) -> None:
    binding = role_binding(TENANT_NAMESPACE, "grab", "admin", user("alice"))
    claim: JSON = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "gpu", "namespace": TENANT_NAMESPACE},
        "spec": {},
    }
    for document in (binding, claim, *kinds()[2:]):
        assert alice.create(document, dryRun="All").status == 403, document["kind"]
