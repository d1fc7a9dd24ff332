"""A tenant's own pods can neither escape from its namespace nor bypass the queue.

Attempts are made with the rights of a tenant's member, and where a right would already stop the attempt, with an
administrator's, so that the policy itself must refuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.cluster import admission_rows as rows
from tests.cluster.admission_rows import ESCAPES, GATE, JUMPS, OPEN_NAMESPACE, PodRow, job, pod
from tests.cluster.apiserver import ApiServer, Client, address
from tests.cluster.attempts import SETTLE_S, eventually_accepted, refused
from tests.cluster.manifests import JSON
from tests.cluster.rule_row import edited


@pytest.mark.parametrize("row", [*ESCAPES, *JUMPS], ids=lambda row: row.name)
def test_a_member_cannot_create_a_pod_that_bypasses_the_queue_or_its_limits(
    alice: Client, admin: Client, row: PodRow
) -> None:
    bad, good = row.bad(), row.good()
    refused(lambda **p: alice.create(bad, **p), row.says)
    assert admin.get(address(bad)).status == 404
    eventually_accepted(lambda **p: alice.create(good, **p))
    admin.delete(good, gracePeriodSeconds="0").expect()


@pytest.mark.parametrize("row", JUMPS, ids=lambda row: row.name)
def test_no_caller_creates_an_ungated_pod_not_even_an_administrator_or_the_operator(
    admin: Client, operator: Client, row: PodRow
) -> None:
    device_policies = ("asks for", "tolerates")
    refused(lambda **p: admin.create(row.bad(), **p), row.says)
    if any(word in row.says for word in device_policies) and "class" not in row.says:
        refused(lambda **p: operator.create(row.bad(), **p), row.says)


def owner(**fields: object) -> list[dict[str, object]]:
    """The owner references of a TrainingJob's pod."""
    job = {"apiVersion": "busbar.dev/v1alpha1", "kind": "TrainingJob", "name": "one", "uid": "1234"}
    return [job | {"controller": True, "blockOwnerDeletion": False} | fields]


@pytest.mark.parametrize("row", JUMPS[:2] + JUMPS[6:7], ids=lambda row: row.name)
def test_only_the_operator_makes_the_pod_of_a_training_job_without_the_gate(
    alice: Client, admin: Client, operator: Client, row: PodRow
) -> None:
    """Such a job has one pod, which exists because it was admitted."""
    owned = edited(row.bad(), {"metadata/ownerReferences": owner()})
    operator.create(owned, dryRun="All").expect()
    for client in (alice, admin):
        assert not client.create(owned, dryRun="All").ok
    for other in (
        {"kind": "ModelService"},
        {"apiVersion": "example.com/v1"},
        {"controller": False},
    ):
        refused(
            lambda o=other, **p: operator.create(
                edited(owned, {"metadata/ownerReferences": owner(**o)}), **p
            ),
            row.says,
        )


@pytest.mark.parametrize("row", [*ESCAPES, *JUMPS], ids=lambda row: row.name)
def test_a_controller_cannot_create_a_refused_pod_for_a_member(tenancy: ApiServer, row: PodRow) -> None:
    """A template older than the policies may contain anything; its pods are refused when the controller makes them."""
    controller = tenancy.client("system:serviceaccount:kube-system:job-controller", ["system:masters"])
    refused(lambda **p: controller.create(row.bad(), **p), row.says)


@pytest.mark.parametrize("row", JUMPS, ids=lambda row: row.name)
def test_namespaces_without_a_tenant_are_left_alone(admin: Client, row: PodRow) -> None:
    elsewhere = row.bad()
    elsewhere["metadata"]["namespace"] = OPEN_NAMESPACE
    admin.create(elsewhere, dryRun="All").expect()


def test_an_ephemeral_container_cannot_ask_for_a_device(admin: Client, kept: Callable[[JSON], JSON]) -> None:
    target = kept(pod(name="debugged"))
    container = {"name": "debug", "image": "x", "resources": {"limits": {rows.DEVICE: "1"}}}
    target["spec"]["ephemeralContainers"] = [container]
    answer = admin.replace(target, subresource="/ephemeralcontainers")
    assert not answer.ok
    assert "resources" in answer.message


def eventually(client: Client, wanted: JSON, changed: Callable[[JSON], bool]) -> JSON:
    """The object as the server would store it, once the mutating policies take effect, or after a minute."""
    end = time.monotonic() + SETTLE_S
    made = client.create(wanted, dryRun="All").expect()
    while not changed(made) and time.monotonic() < end:
        time.sleep(0.05)
        made = client.create(wanted, dryRun="All").expect()
    return made


def test_an_opted_in_pod_is_born_with_the_gate(alice: Client, admin: Client) -> None:
    wanted = edited(pod(name="opted-in"), {"metadata/labels": {"busbar.dev/queue": "true"}})
    made = eventually(alice, wanted, lambda pod: bool(pod["spec"].get("schedulingGates")))
    assert made["spec"]["schedulingGates"] == [{"name": GATE}]


def test_an_opted_in_job_passes_the_label_on_to_its_pods(alice: Client) -> None:
    wanted = job("opted-in", labels={"busbar.dev/queue": "true"})

    def labels(made: JSON) -> JSON:
        found: JSON = made["spec"]["template"]["metadata"].get("labels", {})
        return found

    made = eventually(alice, wanted, lambda made: "busbar.dev/queue" in labels(made))
    assert labels(made)["busbar.dev/queue"] == "true"
    plain = alice.create(job("plain"), dryRun="All").expect()
    assert "busbar.dev/queue" not in labels(plain)
