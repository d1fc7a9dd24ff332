"""Only the operator may change its pods: each field that the API server lets change, tried by every possible writer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.cluster import pod_writes as writes
from tests.cluster.admission_rows import QUEUED, pod
from tests.cluster.apiserver import ApiServer, Client, render_chart
from tests.cluster.attempts import refused
from tests.cluster.manifests import JSON
from tests.cluster.pod_writes import STRANGERS, WRITERS, WRITES, PodWrite
from tests.cluster.rights import SYSTEM
from tests.cluster.rule_row import edited
from tests.cluster.served import Served

ROOT = ["system:masters"]
Made = Callable[..., JSON]


@pytest.fixture
def maker(tenancy: ApiServer) -> Client:
    """The operator with every RBAC right, so that only the policies limit it."""
    return tenancy.client(f"system:serviceaccount:{SYSTEM}:busbar-operator", ROOT)


@pytest.fixture
def made(maker: Client, kept: Made) -> Made:
    """Creates an object as the operator, and deletes it after the test; as it is stored."""

    def create(document: JSON) -> JSON:
        return kept(document, maker)

    return create


@pytest.mark.parametrize("row", WRITES, ids=lambda row: row.name)
def test_nobody_but_the_operator_changes_a_pod_of_ours(
    admin: Client, maker: Client, made: Made, row: PodWrite
) -> None:
    stored = made(row.target("written"))
    change, part = row.patch(stored), row.subresource
    if row.alone:
        refused(lambda **p: admin.merge(stored, change, subresource=part, **p), row.says)
    else:
        assert not admin.merge(stored, change, subresource=part).ok
    maker.merge(stored, change, subresource=part, dryRun="All").expect()


@pytest.mark.parametrize("row", [r for r in WRITES if r.spares_others], ids=lambda row: row.name)
def test_the_same_change_of_another_pod_is_its_owners(admin: Client, kept: Made, row: PodWrite) -> None:
    stored = kept(row.other("spared"))
    admin.merge(stored, row.patch(stored), subresource=row.subresource, dryRun="All").expect()


def test_a_member_cannot_take_a_pod_of_ours_away_from_its_job(alice: Client, made: Made) -> None:
    """A client with the rights of a member, who may write pods."""
    stored = made(edited(pod(name="stripped"), writes.OURS))
    refused(lambda **p: alice.merge(stored, {"metadata": {"ownerReferences": None}}, **p), writes.POD)
    alice.delete(stored, gracePeriodSeconds="0").expect()


@pytest.mark.parametrize("name", STRANGERS, ids=lambda name: name.rpartition(":")[2])
def test_controllers_of_other_owners_leave_our_pods_and_keep_their_own(
    tenancy: ApiServer, made: Made, name: str
) -> None:
    """Other controllers do not adopt an orphaned pod of ours; their own pod that waits in the queue is still theirs."""
    controller = tenancy.client(name, ROOT)
    marks = {path: value for path, value in writes.OURS.items() if path != "metadata/ownerReferences"}
    orphan = made(edited(pod(name="adopted"), marks))
    adopt = {"metadata": {"ownerReferences": writes.OURS["metadata/ownerReferences"]}}
    refused(lambda **p: controller.merge(orphan, adopt, **p), writes.POD)
    queued = made(edited(pod(name="theirs"), QUEUED))
    for change in (adopt, {"metadata": {"finalizers": ["example.com/tracking"]}}):
        controller.merge(queued, change, dryRun="All").expect()


@pytest.mark.parametrize(
    ("who", "part", "patch"), WRITERS, ids=[f"{w[0].rpartition(':')[2]} {p or 'pod'}" for w, p, _ in WRITERS]
)
def test_those_who_run_pods_and_collect_garbage_go_on(
    tenancy: ApiServer, made: Made, who: tuple[str, ...], part: str, patch: Callable[[JSON], JSON]
) -> None:
    stored = made(edited(pod(name="run"), writes.OURS))
    client = tenancy.client(who[0], [*ROOT, *who[1:]])
    if (
        who == writes.KUBELET
    ):  # a kubelet writes pods on its node only; NodeRestriction enforces that, not our policies
        client = tenancy.client("elsewhere", [*ROOT, *who[1:]])
    answer = client.merge(stored, patch(stored), subresource=f"/{part}" if part else "", dryRun="All")
    answer.expect()


@pytest.mark.parametrize("who", [writes.KUBELET, ("system:kube-scheduler",)], ids=lambda who: who[0])
def test_those_who_write_status_do_not_write_the_pod(
    tenancy: ApiServer, made: Made, who: tuple[str, ...]
) -> None:
    stored = made(edited(pod(name="status-only"), writes.OURS))
    client = tenancy.client("elsewhere", [*ROOT, *who[1:]]) if who[1:] else tenancy.client(who[0], ROOT)
    refused(lambda **p: client.merge(stored, {"metadata": {"ownerReferences": None}}, **p), writes.POD)


@pytest.mark.apiserver
def test_every_part_of_a_pod_that_can_be_updated_is_guarded(resources: tuple[Served, ...]) -> None:
    """Fails for a new subresource in a later Kubernetes until somebody has checked whether it changes pods."""
    policy = next(
        d
        for d in render_chart("busbar")
        if d["kind"] == "ValidatingAdmissionPolicy" and d["metadata"]["name"] == "busbar-pod-writes"
    )
    guarded = set(policy["spec"]["matchConstraints"]["resourceRules"][0]["resources"])
    parts = {r.name for r in resources if r.group == "" and r.plural == "pods" and "patch" in r.verbs}
    assert parts - {"pods/proxy"} == guarded  # a proxied request changes what runs in the pod, not the pod


@pytest.mark.parametrize("kind", ["Service", "Secret"])
def test_what_else_is_made_for_a_job_stays_bound_to_it(
    admin: Client, maker: Client, made: Made, kept: Made, kind: str
) -> None:
    stored = made(writes.child(kind, "made"))
    # A Secret of the operator's is guarded by busbar-bearers as well, and either policy may answer first.
    says = writes.CHILD if kind == "Service" else "operator"
    for change in ({"ownerReferences": None}, {"finalizers": ["example.com/hold"]}, {"labels": None}):
        refused(lambda c=change, **p: admin.merge(stored, {"metadata": c}, **p), says)
        maker.merge(stored, {"metadata": change}, dryRun="All").expect()
    refused(lambda **p: admin.create(writes.child(kind, "forged"), **p), says)
    own = kept(writes.child(kind, "own", labels={}))
    admin.merge(own, {"metadata": {"ownerReferences": None}}, dryRun="All").expect()
    refused(
        lambda **p: admin.merge(own, {"metadata": {"labels": {"busbar.dev/job": "x"}}}, **p), writes.CHILD
    )
