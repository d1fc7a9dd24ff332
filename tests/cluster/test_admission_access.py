"""Who may let other tenants use a service: an admin of the owner's tenant, not a member."""

from __future__ import annotations

from collections.abc import Callable

from tests.cluster.admission_rows import TENANT_NAMESPACE
from tests.cluster.apiserver import ApiServer, Client
from tests.cluster.attempts import refused
from tests.cluster.manifests import JSON

SAYS = "spec.access lets other tenants use the service"
ACCESS = {"tenants": [{"name": "guest"}]}


def service(name: str, **spec: object) -> JSON:
    return {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "ModelService",
        "metadata": {"name": name, "namespace": TENANT_NAMESPACE},
        "spec": {"model": {"uri": "pvc://models/tiny"}, **spec},
    }


def test_only_an_admin_of_the_tenant_shares_a_service(
    tenancy: ApiServer, alice: Client, admin: Client, kept: Callable[..., JSON]
) -> None:
    adele = tenancy.client("adele")
    refused(lambda **p: alice.create(service("shared", access=ACCESS), **p), SAYS)
    stored = kept(service("own"), alice)
    refused(lambda **p: alice.merge(stored, {"spec": {"access": ACCESS}}, **p), SAYS)
    adele.create(service("by-adele", access=ACCESS), dryRun="All").expect()
    shared = adele.merge(stored, {"spec": {"access": ACCESS}}).expect()
    alice.merge(shared, {"spec": {"minReplicas": 0}}).expect()
    refused(lambda **p: alice.merge(shared, {"spec": {"access": None}}, **p), SAYS)
    wider = {"tenants": [{"name": "guest"}, {"name": "another"}]}
    refused(lambda **p: alice.merge(shared, {"spec": {"access": wider}}, **p), SAYS)
    admin.merge(shared, {"spec": {"access": None}}, dryRun="All").expect()
