"""Tenant A learns nothing of tenant B by any verb: every served resource is tried as A's people and A's pods.

On a real API server with the chart's rights and policies. `alpha` and `bravo` are tenants with one object of every
kind each, and everything of B contains the word bravo. `walk.py` has the walks and the short list of what is open.
`test_verbs_at_home.py` tries from A's own namespace, `test_verbs_kubectl.py` walks kubectl's own commands, and
`test_status_tenancy.py` reads what the operator writes on A's objects.
"""

from __future__ import annotations

import pytest
from tests.cluster.apiserver import Client, collection
from tests.cluster.manifests import JSON
from tests.cluster.neighbours import Neighbour, move_in
from tests.cluster.rights import RBAC, role_binding, user, wait_until
from tests.cluster.served import Served
from tests.cluster.walk import ABSENT, ISSUER_URLS, OPEN, OPEN_URLS, requests, review, rights


@pytest.fixture(params=["viewer", "member", "admin", "pod"])
def caller(request: pytest.FixtureRequest, alpha: Neighbour, bravo: Neighbour) -> Client:
    """One of A's roles, or the service account of A's pods."""
    return alpha.pod if request.param == "pod" else alpha.person(request.param)


def test_b_has_one_of_everything(bravo: Neighbour, resources: tuple[Served, ...]) -> None:
    """Proves that every walk below has something to find."""
    admin = bravo.server.admin
    stored = [r for r in resources if r.namespaced and r.stored]
    assert len(stored) > 30
    for resource in stored:
        assert admin.get(resource.item("bravo", "bravo")).ok, resource.name
    for kind in ("Namespace", "Tenant", "AcceleratorPool", "PerformanceProfile", "PowerDomain", "Node"):
        assert admin.get(f"{collection(kind)}/bravo").ok, kind


def test_the_servers_own_list_of_rights_at_b_holds_only_what_is_open(
    caller: Client, request: pytest.FixtureRequest
) -> None:
    """The authorizer's enumeration covers every served kind."""
    api = "authorization.k8s.io/v1"
    body = {"apiVersion": api, "kind": "SelfSubjectRulesReview", "spec": {"namespace": "bravo"}}
    said = caller.request("POST", f"/apis/{api}/selfsubjectrulesreviews", body).expect()["status"]
    assert said["incomplete"] is False
    found = {
        (verb, group, name)
        for rule in said["resourceRules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for name in rule["resources"]
    }
    assert found == OPEN
    urls = {url for rule in said["nonResourceRules"] for url in rule["nonResourceURLs"]}
    pods = "[pod]" in request.node.name
    assert urls == OPEN_URLS | (ISSUER_URLS if pods else set())
    assert {verb for rule in said["nonResourceRules"] for verb in rule["verbs"]} == {"get"}


def test_no_verb_on_any_resource_of_b_or_of_the_cluster_is_allowed(
    caller: Client, resources: tuple[Served, ...]
) -> None:
    assert len(resources) > 100
    assert rights(caller, resources, "bravo") == []


def test_every_request_to_b_is_refused_as_if_b_did_not_exist(
    caller: Client, bravo: Neighbour, resources: tuple[Served, ...]
) -> None:
    before = versions(bravo, resources)
    assert requests(caller, resources, "bravo") == []
    assert versions(bravo, resources) == before, "something of B was changed"


def versions(tenant: Neighbour, resources: tuple[Served, ...]) -> dict[str, str]:
    """The stored version of each object of the tenant."""
    items = [r.item(tenant.name, tenant.name) for r in resources if r.namespaced and r.stored]
    return {item: tenant.server.admin.get(item).expect()["metadata"]["resourceVersion"] for item in items}


def test_whether_a_right_is_missing_at_b_or_b_itself_is_not_told(caller: Client) -> None:
    for verb, plural in (("get", "pods"), ("create", "secrets"), ("list", "tenants")):
        answers = [
            review(caller, {"verb": verb, "resource": plural, "namespace": name, "name": name})
            for name in ("bravo", ABSENT)
        ]
        assert answers[0] == answers[1]


# -- the walks themselves --------------------------------------------------------------------------------

HOLES: tuple[tuple[str, JSON, str], ...] = (
    (
        "one-secret",
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["bravo"], "verbs": ["get"]},
        "GET /api/v1/namespaces/bravo/secrets/bravo",
    ),
    (
        "all-events",
        {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
        "GET /api/v1/namespaces/bravo/events",
    ),
    (
        "exec",
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create"]},
        "POST /api/v1/namespaces/bravo/pods/bravo/exec",
    ),
    (
        "deletion",
        {"apiGroups": ["busbar.dev"], "resources": ["trainingjobs"], "verbs": ["deletecollection"]},
        "DELETE /apis/busbar.dev/v1alpha1/namespaces/bravo/trainingjobs",
    ),
)


@pytest.mark.parametrize(("name", "rule", "seen"), HOLES, ids=[hole[0] for hole in HOLES])
def test_the_walk_of_requests_finds_a_hole(
    bravo: Neighbour, resources: tuple[Served, ...], name: str, rule: JSON, seen: str
) -> None:
    """Gives Mallory one right too many; B's objects are restored afterwards."""
    mallory = grant(bravo, f"mallory-{name}", rule)
    plural = rule["resources"][0].partition("/")[0]
    few = [r for r in resources if r.plural == plural and r.group == rule["apiGroups"][0]]
    try:
        found = requests(mallory, few, "bravo")
    finally:
        move_in(bravo.server, "bravo", resources)
    assert any(seen in line for line in found), found


def test_the_walk_of_rights_finds_a_hole(bravo: Neighbour, resources: tuple[Served, ...]) -> None:
    rule = {"apiGroups": ["", RBAC], "resources": ["pods/log", "roles"], "verbs": ["get", "bind"]}
    found = rights(grant(bravo, "mallory", rule), resources, "bravo")
    assert sorted(found) == [
        "may bind roles of rbac.authorization.k8s.io there",
        "may get pods/log of core there",
        "may get roles of rbac.authorization.k8s.io there",
    ]


def grant(tenant: Neighbour, person: str, rule: JSON) -> Client:
    """Give a user a right in the tenant's namespace; returns the client once the right takes effect."""
    server = tenant.server
    here = {"name": person, "namespace": tenant.name}
    role = {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": here, "rules": [rule]}
    server.admin.apply(role).expect()
    binding = role_binding(tenant.name, person, person, user(person))
    binding["roleRef"]["kind"] = "Role"
    server.admin.apply(binding).expect()
    client = server.client(person)
    plural, _, subresource = rule["resources"][0].partition("/")
    wanted = {
        "verb": rule["verbs"][0],
        "group": rule["apiGroups"][0],
        "resource": plural,
        "subresource": subresource,
        "name": tenant.name,
        "namespace": tenant.name,
    }
    wait_until(lambda: review(client, wanted)["allowed"], f"{person}'s right counts")
    return client
