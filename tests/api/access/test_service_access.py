"""Only an admin of the tenant lets other tenants use a service, by REST as by kubectl."""

from __future__ import annotations

from tests.api.conftest import BASE, World

ACCESS = {"tenants": [{"name": "bob-corp"}]}
SPEC = {"model": {"uri": "pvc://models/tiny"}}
SERVICES = f"{BASE}/namespaces/ada-lab/modelservices"


async def test_members_make_services_and_only_admins_share_them(world: World) -> None:
    alice, adam = await world.as_("alice"), await world.as_("adam")
    shared = {"metadata": {"name": "shared"}, "spec": {**SPEC, "access": ACCESS}}
    refused = await alice.post(SERVICES, json=shared)
    assert refused.status_code == 403
    assert "ask an admin of the tenant" in refused.text
    assert (await adam.post(SERVICES, json=shared)).status_code == 201
    own = {"metadata": {"name": "own"}, "spec": SPEC}
    assert (await alice.post(SERVICES, json=own)).status_code == 201
    for patch in ({"spec": {"access": ACCESS}}, {"spec": {"access": None}}):
        assert (await alice.patch(f"{SERVICES}/own", json=patch)).status_code == 403
        assert (await adam.patch(f"{SERVICES}/own", json=patch)).status_code == 200
    assert (await alice.patch(f"{SERVICES}/shared", json={"spec": {"minReplicas": 0}})).status_code == 200
