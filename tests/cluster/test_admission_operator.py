"""What only the operator may do: lift gates, pin and label waiting pods, start Jobs and write status."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.cluster import admission_rows as rows
from tests.cluster.admission_rows import TENANT_NAMESPACE, job, kinds, pod
from tests.cluster.apiserver import ApiServer, Client, address
from tests.cluster.attempts import eventually_accepted, refused
from tests.cluster.manifests import JSON
from tests.cluster.rights import SYSTEM
from tests.cluster.rule_row import edited


def gated(name: str) -> JSON:
    return edited(pod(name=name), {"metadata/labels": {"busbar.dev/queue": "true"}, **rows.GATED})


def test_only_the_operator_lifts_the_gate(
    alice: Client, admin: Client, operator: Client, kept: Callable[[JSON], JSON]
) -> None:
    waiting = kept(gated("lifted"))
    lift = {"spec": {"schedulingGates": None}}
    for client in (alice, admin):
        refused(
            lambda c=client, **p: c.merge(waiting, lift, **p),
            "only Busbar's operator lifts the scheduling gate",
        )
    operator.merge(waiting, lift).expect()


STEERING: tuple[tuple[str, JSON, str], ...] = (
    (
        "tolerations",
        {"spec": {"tolerations": [{"key": "x", "operator": "Exists"}]}},
        "sets tolerations on a pod",
    ),
    ("node selector", {"spec": {"nodeSelector": {"gpu": "best"}}}, "chooses nodes for a pod"),
    (
        "affinity",
        {
            "spec": {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["best"]}]}
                            ]
                        }
                    }
                }
            }
        },
        "chooses nodes for a pod",
    ),
)


@pytest.mark.parametrize(("what", "change", "says"), STEERING, ids=[row[0] for row in STEERING])
def test_only_the_operator_steers_a_pod_that_waits(
    alice: Client, operator: Client, kept: Callable[[JSON], JSON], what: str, change: JSON, says: str
) -> None:
    waiting = kept(gated("steered"))
    if what == "tolerations":  # the API server replaces the whole list, which already holds its own two
        change = {"spec": {"tolerations": [*waiting["spec"]["tolerations"], *change["spec"]["tolerations"]]}}
    refused(lambda **p: alice.merge(waiting, change, **p), says)
    operator.merge(waiting, change).expect()


def test_a_toleration_of_a_pool_cannot_be_added_later(alice: Client, kept: Callable[[JSON], JSON]) -> None:
    running = kept(pod(name="tolerant"))
    own = running["spec"]["tolerations"]

    def adding(key: str) -> JSON:
        return {"spec": {"tolerations": [*own, {"key": key, "operator": "Exists"}]}}

    refused(lambda **p: alice.merge(running, adding(rows.TAINT), **p), "tolerates a taint of AcceleratorPool")
    alice.merge(running, adding("example.com/taint")).expect()


@pytest.mark.parametrize("key", ["labels", "annotations"])
def test_only_the_operator_writes_our_marks_on_a_pod(
    alice: Client, operator: Client, kept: Callable[[JSON], JSON], key: str
) -> None:
    target = kept(pod(name=f"marked-{key}"))
    mark = {"metadata": {key: {"busbar.dev/mark": "other"}}}
    says = f"{key} under busbar.dev/ are written by Busbar's operator"
    refused(lambda **p: alice.merge(target, mark, **p), says)
    alice.merge(target, {"metadata": {key: {"example.com/job": "other"}}}).expect()
    operator.merge(target, mark).expect()
    refused(lambda **p: alice.merge(target, {"metadata": {key: {"busbar.dev/mark": "else"}}}, **p), says)
    refused(lambda **p: alice.merge(target, {"metadata": {key: {"busbar.dev/mark": None}}}, **p), says)


def test_a_queued_pod_cannot_leave_the_queue_by_its_label(
    alice: Client, kept: Callable[[JSON], JSON]
) -> None:
    waiting = kept(gated("leaving"))
    leave = {"metadata": {"labels": {"busbar.dev/queue": None}}}
    refused(lambda **p: alice.merge(waiting, leave, **p), "cannot be removed")


@pytest.mark.parametrize("legacy", [False, True], ids=["pods/binding", "bindings"])
def test_only_the_scheduler_binds(
    tenancy: ApiServer, admin: Client, kept: Callable[[JSON], JSON], legacy: bool
) -> None:
    target = kept(pod(name="bound"))
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "bound", "namespace": TENANT_NAMESPACE},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "gpu-1"},
    }
    path = f"/api/v1/namespaces/{TENANT_NAMESPACE}/bindings" if legacy else f"{address(target)}/binding"
    assert tenancy.client("alice").request("POST", path, binding).status == 403
    refused(
        lambda **p: admin.request("POST", path, binding, **p),
        "only the cluster's scheduler binds pods to nodes",
    )
    scheduler = tenancy.client("system:kube-scheduler", ["system:masters"])
    assert scheduler.request("POST", path, binding).ok


def test_only_the_operator_starts_an_opted_in_job(
    alice: Client, admin: Client, operator: Client, kept: Callable[[JSON], JSON]
) -> None:
    # Two labels: the API server gives a Job without any the labels of its pods.
    labels = {"busbar.dev/queue": "true", "example.com/team": "a"}
    waiting = kept(job("suspended", suspend=True, labels=labels))
    start = {"spec": {"suspend": False}}
    for client in (alice, admin):
        refused(
            lambda c=client, **p: c.merge(waiting, start, **p), "only its operator sets spec.suspend to false"
        )
    leave = {"metadata": {"labels": {"busbar.dev/queue": None}}}
    refused(lambda **p: alice.merge(waiting, leave, **p), "a Job that entered Busbar's queue stays in it")
    operator.merge(waiting, start).expect()
    plain = kept(job("own", suspend=True))
    alice.merge(plain, start).expect()


@pytest.mark.parametrize("document", kinds(), ids=lambda document: document["kind"])
def test_only_the_operator_writes_status(
    admin: Client, operator: Client, kept: Callable[[JSON], JSON], document: JSON
) -> None:
    stored = kept(document)
    change = {"status": {"observedGeneration": 1}}
    refused(
        lambda **p: admin.merge(stored, change, subresource="/status", **p),
        "only Busbar's operator writes status",
    )
    operator.merge(stored, change, subresource="/status").expect()


@pytest.mark.parametrize("document", kinds()[:2], ids=lambda document: document["kind"])
def test_members_cannot_write_status_or_say_who_asked(
    tenancy: ApiServer, alice: Client, admin: Client, document: JSON
) -> None:
    if "access" in document["spec"]:  # only admins of the tenant set it (test_admission_access.py)
        document = edited(document, {"spec/access": ...})
    forged = edited(document, {"metadata/annotations": {"busbar.dev/requester": "bob"}})
    refused(lambda **p: alice.create(forged, **p), "only Busbar writes them")
    eventually_accepted(lambda **p: alice.create(document, **p))
    mark = {"metadata": {"annotations": {"busbar.dev/requester": "bob"}}}
    refused(lambda **p: alice.merge(document, mark, **p), "only Busbar writes them")
    assert alice.merge(document, {"status": {"phase": "Ready"}}, subresource="/status").status == 403
    tenancy.service_account(SYSTEM, "busbar-api").merge(document, mark).expect()
    admin.delete(document).expect()
