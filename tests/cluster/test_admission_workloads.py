"""A workload object whose template describes pods that admission would refuse is itself refused when it is written."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from tests.cluster import admission_rows as rows
from tests.cluster.admission_rows import ESCAPES, OPEN_NAMESPACE, PodRow, pod
from tests.cluster.apiserver import ApiServer, Client, collection
from tests.cluster.attempts import eventually_accepted, refused
from tests.cluster.manifests import JSON
from tests.cluster.rule_row import edited
from tests.cluster.template_rows import ROWS, deployment, workloads

POLICY = "busbar-templates"
HOST_PATH = next(row for row in ROWS if row.name == "host path")
BAD_KINDS = tuple(workloads(HOST_PATH.bad()))
LET_GO = "let-go-workloads"


@pytest.fixture(scope="module", autouse=True)
def let_go(tenancy: ApiServer) -> None:
    """A namespace that its Tenant released."""
    if tenancy.admin.get(f"/api/v1/namespaces/{LET_GO}").status == 404:
        tenancy.make_namespace(LET_GO, {"busbar.dev/released": "team-a"})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_template_is_refused_by_the_name_of_its_field(alice: Client, row: PodRow) -> None:
    """A pod with the same spec is accepted, so the policy requires nothing that pods need not have."""
    refused(lambda **p: alice.create(deployment(row.bad()), **p), row.says)
    assert not alice.create(row.bad(), dryRun="All").ok
    alice.create(deployment(row.good()), dryRun="All").expect()
    eventually_accepted(lambda **p: alice.create(row.good(), **p | {"dryRun": "All"}))


JUDGED = tuple(row for row in ESCAPES if row.name != "preempting priority")
"""The effect of a PriorityClass is known only when the pod is made."""


@pytest.mark.parametrize("row", JUDGED, ids=lambda row: row.name)
def test_a_template_whose_pods_would_be_refused_is_refused(alice: Client, row: PodRow) -> None:
    refused(lambda **p: alice.create(deployment(row.bad()), **p), "no pod of this template would be let in")


@pytest.mark.parametrize("document", BAD_KINDS, ids=lambda document: document["kind"])
def test_every_kind_with_a_template_is_judged(admin: Client, document: JSON) -> None:
    """The rule applies to every writer, in a tenant's namespace and in a released one; elsewhere it does not apply."""
    for home in (rows.TENANT_NAMESPACE, LET_GO):
        bad = edited(document, {"metadata/namespace": home})
        refused(lambda b=bad, **p: admin.create(b, **p), HOST_PATH.says)
    good = next(d for d in workloads(pod()) if d["kind"] == document["kind"])
    admin.create(good, dryRun="All").expect()
    admin.create(edited(document, {"metadata/namespace": OPEN_NAMESPACE}), dryRun="All").expect()


def test_no_template_has_an_ephemeral_container(admin: Client) -> None:
    debug = {"name": "debug", "image": "x"}
    answer = admin.create(deployment(edited(pod(), {"spec/ephemeralContainers": [debug]})), dryRun="All")
    assert not answer.ok
    assert "ephemeral" in answer.message


def test_an_update_is_judged_only_where_it_changes_the_template(tenancy: ApiServer) -> None:
    """Controllers may still scale, pause, annotate and write the status of objects older than the policy; a new
    template is checked."""
    admin, home = tenancy.admin, "older-than-the-policy"
    tenancy.make_namespace(home)
    for document in workloads(edited(HOST_PATH.bad(), {"metadata/namespace": home})):
        admin.create(document).expect()
    namespace: JSON = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": home}}
    admin.merge(namespace, {"metadata": {"labels": {"busbar.dev/tenant": "team-a"}}}).expect()
    for document in workloads(edited(HOST_PATH.bad(), {"metadata/namespace": home})):
        fresh = edited(document, {"metadata/name": "another"})
        refused(lambda d=fresh, **p: admin.create(d, **p), HOST_PATH.says)
        admin.merge(document, {"metadata": {"annotations": {"example.com/seen": "yes"}}}).expect()
    old = deployment(edited(HOST_PATH.bad(), {"metadata/namespace": home}))
    admin.merge(old, {"spec": {"replicas": 2}}).expect()
    admin.merge(old, {"spec": {"replicas": 3}}, subresource="/scale").expect()
    admin.merge(old, {"status": {"observedGeneration": 1}}, subresource="/status").expect()
    touched = {"spec": {"template": {"metadata": {"annotations": {"example.com/restarted": "now"}}}}}
    refused(lambda **p: admin.merge(old, touched, **p), HOST_PATH.says)
    cured = {"spec": {"template": {"spec": {"volumes": None}}}}
    admin.merge(old, cured).expect()


def test_a_template_of_many_containers_is_judged_in_time(alice: Client) -> None:
    """The server bounds the cost of an expression: a policy that exceeds the bound would refuse every large
    template."""
    main = pod()["spec"]["containers"][0]
    many = [{**copy.deepcopy(main), "name": f"c{number}"} for number in range(200)]
    alice.create(deployment(edited(pod(), {"spec/containers": many})), dryRun="All").expect()
    last = edited({"spec": {"containers": many}}, {"spec/containers/199/securityContext/runAsNonRoot": False})
    bad = deployment(edited(pod(), {"spec/containers": last["spec"]["containers"]}))
    refused(lambda **p: alice.create(bad, **p), "container c199: securityContext.")


@pytest.fixture(scope="module")
def without(tenancy: ApiServer) -> Callable[[str], str]:
    """A namespace for each rule, where a copy of the policy lacks this rule alone; all are made at once."""
    admin = tenancy.admin
    whole = admin.get(f"{collection('ValidatingAdmissionPolicy')}/{POLICY}").expect()
    rules = whole["spec"]["validations"]
    for number in range(len(rules)):
        name = f"without-{number}"
        tenancy.make_namespace(name, {"example.com/without": name})
        spec = copy.deepcopy(whole["spec"])
        del spec["validations"][number]
        head = {"apiVersion": whole["apiVersion"], "metadata": {"name": name}}
        admin.create({**head, "kind": "ValidatingAdmissionPolicy", "spec": spec}).expect()
        selector = {"namespaceSelector": {"matchLabels": {"example.com/without": name}}}
        bound = {"policyName": name, "validationActions": ["Deny"], "matchResources": selector}
        admin.create({**head, "kind": "ValidatingAdmissionPolicyBinding", "spec": bound}).expect()

    def find(says: str) -> str:
        [number] = [i for i, rule in enumerate(rules) if says in rule["messageExpression"]]
        return f"without-{number}"

    return find


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_without_its_rule_the_template_is_accepted(
    admin: Client, without: Callable[[str], str], row: PodRow
) -> None:
    home = without(row.says)
    other = next(r for r in ROWS if r.says != row.says)
    for seen, accepted in ((other, False), (row, True)):
        document = edited(deployment(seen.bad()), {"metadata/namespace": home})
        if accepted:
            admin.create(document, dryRun="All").expect()
        else:
            refused(lambda d=document, **p: admin.create(d, **p), seen.says)


def test_every_rule_has_a_row(without: Callable[[str], str], admin: Client) -> None:
    rules = admin.get(f"{collection('ValidatingAdmissionPolicy')}/{POLICY}").expect()["spec"]["validations"]
    assert len({without(row.says) for row in ROWS}) == len(rules)
