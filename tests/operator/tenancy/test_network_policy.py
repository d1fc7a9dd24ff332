"""The NetworkPolicy of a tenant's namespaces: which callers it admits, and that edits of it are reverted."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.builders import NOW, RENDERING, admitted, job, placement, pool, service, tenant

from busbar.kube.informer import Key
from busbar.kube.types.meta import LABEL_KIND
from busbar.operator.pods import replica_pods, training_pods
from busbar.operator.tenancy.reconcile import TenantView, reconcile, revoke
from busbar.operator.watch.caches import tenant_of_namespace
from busbar.operator.watch.small_projections import NamespaceSeen, PolicySeen, project_policy
from busbar.operator.write.actions import Action, Apply, Delete

LABELS = (("busbar.dev/tenant", "a"), ("pod-security.kubernetes.io/enforce", "restricted"))


def actions_of(
    *policies: PolicySeen, platform: str = "busbar-system", deleting: bool = False
) -> list[Action]:
    of = tenant("a", ["ns"])
    namespaces = {"ns": NamespaceSeen("ns", LABELS, deleting)}
    owners = tenant_of_namespace([of])
    seen = TenantView(of, owners, namespaces, (), NOW, policies=policies, platform=platform)
    return list(reconcile(seen).actions)


def applied() -> dict[str, Any]:
    [action] = actions_of()
    assert isinstance(action, Apply)
    return action.body


def stored(name: str = "busbar-tenant", **spec: Any) -> PolicySeen:
    """The stored policy after an edit of its ``spec``."""
    body = applied()
    meta = {"name": name, "namespace": "ns", "uid": "uid-1"}
    return project_policy({**body, "metadata": meta, "spec": {**body["spec"], **spec}})


def test_only_the_tenants_own_pods_and_the_platforms_get_in() -> None:
    body = applied()
    assert (body["metadata"]["namespace"], body["metadata"]["name"]) == ("ns", "busbar-tenant")
    assert body["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "busbar"
    assert body["spec"]["policyTypes"] == ["Ingress"]
    [rule] = body["spec"]["ingress"]
    assert rule == {
        "from": [
            {"namespaceSelector": {"matchLabels": {"busbar.dev/tenant": "a"}}},
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "busbar-system"}}},
        ]
    }


def test_it_selects_every_pod_that_we_make() -> None:
    [expression] = applied()["spec"]["podSelector"]["matchExpressions"]
    assert expression == {"key": LABEL_KIND, "operator": "Exists"}
    of_job = training_pods.training_pod(
        admitted(job()), attempt=1, rank=0, admission_id="a", placement=placement(), pool=pool(), rendering=RENDERING
    )  # fmt: skip
    replica = replica_pods.service_pod(
        service(), index=0, model_uri="pvc://c/m", placement=placement(), pool=pool(), rendering=RENDERING
    )
    assert all(LABEL_KIND in made["metadata"]["labels"] for made in (of_job, replica))


def test_one_that_stands_as_it_should_is_left_alone() -> None:
    assert actions_of(stored()) == []
    assert actions_of(stored(egress=[{}])) == []  # not a field of ours, and without effect


@pytest.mark.parametrize(
    "spec", [{"ingress": [{}]}, {"ingress": None}, {"podSelector": {}}, {"policyTypes": ["Egress"]}]
)
def test_one_that_was_edited_is_put_back(spec: dict[str, Any]) -> None:
    [action] = actions_of(stored(**spec))
    assert isinstance(action, Apply)
    assert action.body == applied()


def test_nothing_is_made_when_none_are_wanted_or_the_namespace_goes() -> None:
    assert actions_of(platform="") == []
    assert actions_of(deleting=True) == []


def test_it_goes_with_the_tenants_claim_and_when_none_are_wanted() -> None:
    other = stored("people-own-it")
    namespace = NamespaceSeen("ns", LABELS, False)

    def gone(owner_of: dict[str, str], platform: str = "busbar-system") -> list[Key]:
        made = revoke(namespace, owner_of, (), (stored(), other), platform)
        return [a.key for a in made if isinstance(a, Delete)]

    ours = [Key("ns", "busbar-tenant")]
    assert gone({}) == ours
    assert gone({"ns": "a"}, platform="") == ours
    assert gone({"ns": "b"}) == []  # b's reconcile writes it again
