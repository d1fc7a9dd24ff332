"""A namespace that its Tenant released stays closed: objects left there gain no rights until an administrator opens
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.cluster import admission_rows as rows
from tests.cluster.admission_rows import ESCAPES, JUMPS, PodRow, pod
from tests.cluster.apiserver import ApiServer, Client
from tests.cluster.attempts import eventually_accepted, refused
from tests.cluster.harness import with_the_charts_rights
from tests.cluster.manifests import JSON
from tests.cluster.rights import cluster_role_binding, give_role, user, wait_for_right
from tests.cluster.rule_row import edited
from tests.cluster.tenancy import becomes

from busbar.kube.resources import EVENTS, NAMESPACES, TENANTS

LEVEL = "pod-security.kubernetes.io/enforce"
LET_GO = "let-go"
LEFT_OPEN_BY_ROLE = (("mia", "member"), ("vera", "viewer"), ("ada", "admin"))
CONTROLLER = "system:serviceaccount:kube-system:replicaset-controller"


def namespace(name: str = LET_GO) -> JSON:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def labelled(**labels: str | None) -> JSON:
    """A patch of our labels and of Pod Security's level."""
    keys = {"tenant": "busbar.dev/tenant", "released": "busbar.dev/released", "level": LEVEL}
    return {"metadata": {"labels": {keys[name]: value for name, value in labels.items()}}}


@pytest.fixture(scope="module", autouse=True)
def let_go(tenancy: ApiServer) -> None:
    """A namespace as the operator leaves it, where members still have the rights that they are about to lose."""
    if tenancy.admin.get(f"/api/v1/namespaces/{LET_GO}").status == 404:
        tenancy.make_namespace(LET_GO, labelled(released="team-a", level="restricted")["metadata"]["labels"])
    for person, role in LEFT_OPEN_BY_ROLE:
        give_role(tenancy, "team-a", LET_GO, role, person)


@pytest.mark.parametrize("row", [*ESCAPES, *JUMPS], ids=lambda row: row.name)
def test_a_released_namespace_refuses_what_a_tenants_namespace_refuses(
    tenancy: ApiServer, row: PodRow
) -> None:
    """Also to an administrator, and to a controller with every right."""
    bad, good = (edited(document, {"metadata/namespace": LET_GO}) for document in (row.bad(), row.good()))
    for client in (tenancy.admin, tenancy.client(CONTROLLER, ["system:masters"])):
        refused(lambda c=client, **p: c.create(bad, **p), row.says)
    eventually_accepted(lambda **p: tenancy.admin.create(good, **p | {"dryRun": "All"}))


def test_the_operator_makes_no_pod_without_the_gate_in_a_released_namespace(operator: Client) -> None:
    owner = {"apiVersion": "busbar.dev/v1alpha1", "kind": "TrainingJob", "name": "one", "uid": "1234"}
    owned = {"metadata/ownerReferences": [owner | {"controller": True}], "metadata/namespace": LET_GO}
    # The queue's policy refuses it, and the operator's, for which the namespace has no tenant: either may answer.
    refused(lambda **p: operator.create(edited(JUMPS[0].bad(), owned), **p), "denied request")


def test_no_gate_is_lifted_in_a_released_namespace(
    admin: Client, operator: Client, kept: Callable[[JSON], JSON]
) -> None:
    queued = edited(pod(LET_GO, "queued"), {"metadata/labels": {"busbar.dev/queue": "true"}, **rows.GATED})
    waiting = kept(queued)
    says = "nothing leaves the queue in a namespace that its Tenant let go"
    lift = {"spec": {"schedulingGates": None}}
    refused(lambda **p: operator.merge(waiting, lift, **p), says)
    assert not admin.merge(
        waiting, lift, dryRun="All"
    ).ok  # of two policies that refuse it, either may answer
    operator.merge(waiting, {"metadata": {"labels": {"example.com/seen": "yes"}}}).expect()


def test_an_opted_in_pod_waits_in_a_released_namespace(admin: Client) -> None:
    """The pod gets the scheduling gate, and keeps it until a Tenant lists the namespace again."""
    opted_in = edited(pod(LET_GO, "opted-in"), {"metadata/labels": {"busbar.dev/queue": "true"}})
    asking = edited(opted_in, {"spec/containers/0/resources": {"limits": {rows.DEVICE: "1"}}})
    made = eventually_accepted(lambda **p: admin.create(asking, **p | {"dryRun": "All"}))
    assert made["spec"]["schedulingGates"] == [{"name": rows.GATE}]


def test_a_pool_of_the_former_tenant_is_not_named(admin: Client, kept: Callable[[JSON], JSON]) -> None:
    own = {"accelerator": "L4", "resourceName": "example.com/own", "tenants": ["team-a"]}
    kept(edited(rows.pools()[0], {"metadata/name": "of-team-a", "spec": own | {"nodeSelector": {"a": "b"}}}))
    asks = {"spec/containers/0/resources": {"limits": {"example.com/own": "1"}}}
    bad = edited(pod(LET_GO), asks)
    refused(lambda **p: admin.create(bad, **p), "asks for example.com/own of a pool of accelerators without")


def test_only_cluster_administrators_open_a_released_namespace(tenancy: ApiServer, operator: Client) -> None:
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "opens-namespaces"},
        "rules": [{"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get", "create", "patch"]}],
    }
    tenancy.admin.create(role).expect()
    tenancy.admin.create(cluster_role_binding("opens-namespaces", "opens-namespaces", user("olga"))).expect()
    olga = tenancy.client("olga")
    wait_for_right(olga, f"/api/v1/namespaces/{LET_GO}")
    says = "the label busbar.dev/released keeps closed what a Tenant let go"
    for value in (None, "team-b"):
        refused(lambda v=value, **p: olga.merge(namespace(), labelled(released=v), **p), says)
    mine = labelled(released="team-a")
    refused(lambda **p: olga.merge(namespace(rows.OPEN_NAMESPACE), mine, **p), says)
    for level in (None, "privileged"):
        change = labelled(level=level)
        refused(lambda c=change, **p: olga.merge(namespace(), c, **p), "Pod Security of a tenant's namespace")
    olga.merge(namespace(), {"metadata": {"labels": {"example.com/seen": "yes"}}}).expect()

    opens = "the operator opens no namespace"
    for change in (labelled(released=None), labelled(level="baseline"), labelled(level=None)):
        refused(lambda c=change, **p: operator.merge(namespace(), c, **p), opens)
    theirs = namespace(rows.TENANT_NAMESPACE)
    refused(lambda **p: operator.merge(theirs, labelled(tenant=None), **p), opens)
    for names, change in (
        (theirs, labelled(tenant=None, released="team-a")),
        (namespace(), labelled(tenant="team-b", released=None)),
    ):
        operator.merge(names, change, dryRun="All").expect()
    opened = labelled(released=None, level=None)
    tenancy.admin.merge(namespace(), opened, dryRun="All").expect()


@pytest.mark.parametrize(("person", "role"), LEFT_OPEN_BY_ROLE, ids=[row[1] for row in LEFT_OPEN_BY_ROLE])
def test_no_member_writes_a_namespaces_labels(tenancy: ApiServer, person: str, role: str) -> None:
    for change in (
        labelled(released=None),
        labelled(level="privileged"),
        {"metadata": {"labels": {"a": "b"}}},
    ):
        assert tenancy.client(person).merge(namespace(), change, dryRun="All").status == 403


def rooted(name: str) -> JSON:
    """The pod of the planted Deployment: root, with the node's file system."""
    root = {
        "spec/volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        "spec/securityContext": {"runAsUser": 0},
    }
    return edited(pod(name, "planted"), root)


def planted(name: str) -> JSON:
    """A Deployment that waits for its namespace to be opened."""
    template = {"metadata": {"labels": {"app": "planted"}}, "spec": rooted(name)["spec"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "planted", "namespace": name},
        "spec": {"selector": {"matchLabels": {"app": "planted"}}, "template": template},
    }


@pytest.mark.parametrize("how", ["deleted", "left out"])
async def test_a_planted_deployment_gets_no_pod_when_the_tenant_goes(platform: ApiServer, how: str) -> None:
    async with with_the_charts_rights(platform) as cluster:
        home = cluster.namespace
        platform.admin.create(planted(home)).expect()  # before any policy looked at the namespace
        await cluster.start()
        controller = platform.client(CONTROLLER, ["system:masters"])

        async def labels() -> dict[str, str]:
            return dict((await cluster.client.get(NAMESPACES, home))["metadata"]["labels"])

        def is_of(tenant: str) -> Callable[[dict[str, str]], bool]:
            return lambda found: (
                found.get("busbar.dev/tenant") == tenant and "busbar.dev/released" not in found
            )

        def is_let_go_by(tenant: str) -> Callable[[dict[str, str]], bool]:
            return lambda found: (
                found.get("busbar.dev/released") == tenant and "busbar.dev/tenant" not in found
            )

        def gets_no_pod() -> None:
            refused(lambda **p: controller.create(rooted(home), **p), rows.RESTRICTED)

        first, second = f"tenant-{home}", f"next-{home}"
        await becomes(labels, is_of(first))
        gets_no_pod()
        if how == "deleted":
            await cluster.client.delete(TENANTS, first)
        else:
            await cluster.client.patch(TENANTS, first, {"spec": {"namespaces": []}})
        assert (await becomes(labels, is_let_go_by(first)))[LEVEL] == "restricted"
        gets_no_pod()

        async def told() -> list[Any]:
            items, _ = await cluster.client.list(EVENTS, "default")
            about = ("Namespace", home)
            return [e for e in items if (e["involvedObject"]["kind"], e["involvedObject"]["name"]) == about]

        [event] = await becomes(told, bool)
        assert event["reason"] == "NamespaceReleased"
        assert first in event["message"]

        await cluster.create({"kind": "Tenant", "metadata": {"name": second}, "spec": {"namespaces": [home]}})
        assert (await becomes(labels, is_of(second)))[LEVEL] == "restricted"
        gets_no_pod()

        await cluster.client.delete(TENANTS, second)
        await becomes(labels, is_let_go_by(second))
        platform.admin.merge(namespace(home), labelled(released=None, level=None)).expect()
        eventually_accepted(lambda **p: controller.create(rooted(home), **p | {"dryRun": "All"}))
        # When the operator has reconciled this one, it has reconciled everything again.
        await cluster.create({"kind": "Tenant", "metadata": {"name": f"last-{home}"}, "spec": {}})
        await cluster.until(TENANTS, f"last-{home}", lambda status: bool(status.get("conditions")))
        assert not {"busbar.dev/tenant", "busbar.dev/released", LEVEL} & set(await labels())
