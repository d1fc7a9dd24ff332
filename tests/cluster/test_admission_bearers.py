"""Secrets with workload bearers: only the operator writes them, and it writes and reads no others."""

from __future__ import annotations

import base64

import pytest
from tests.cluster.admission_rows import OPEN_NAMESPACE, TENANT_NAMESPACE
from tests.cluster.apiserver import Client, address
from tests.cluster.attempts import eventually_accepted, refused
from tests.cluster.manifests import JSON
from tests.cluster.rule_row import edited

from busbar.kube.contracts import bearers


def secret(name: str = "busbar-bearers-u-1", kind: str = bearers.SECRET_TYPE) -> JSON:
    """A Secret as the operator applies it, or one with another name or type."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": TENANT_NAMESPACE},
        "type": kind,
        "data": {"read": base64.b64encode(b"value").decode()},
    }


OTHERS = "names that begin with busbar-bearers-, are the operator's"
OWN = "the operator writes no Secrets but the bearers of workloads"


@pytest.mark.parametrize(
    "made",
    [secret("mine"), secret(kind="Opaque"), secret()],
    ids=["our type", "our name", "both"],
)
def test_nobody_but_the_operator_makes_a_secret_that_passes_for_bearers(
    alice: Client, admin: Client, made: JSON
) -> None:
    for client in (alice, admin):
        refused(lambda c=client, **p: c.create(made, **p), OTHERS)
    neighbour = secret("my-busbar-bearers-u-1", "Opaque")
    eventually_accepted(lambda **p: alice.create(neighbour, **p))
    admin.delete(neighbour).expect()


def test_the_operator_writes_bearers_and_neither_writes_nor_reads_any_other_secret(
    operator: Client, admin: Client, alice: Client
) -> None:
    theirs = secret("theirs", "Opaque")
    eventually_accepted(lambda **p: alice.create(theirs, **p))
    eventually_accepted(lambda **p: operator.create(secret(), **p))
    operator.merge(secret(), {"metadata": {"labels": {"a": "b"}}}).expect()
    refused(lambda **p: operator.create(secret("other", "Opaque"), **p), OWN)
    refused(lambda **p: operator.create(secret("other"), **p), OWN)
    # A patch that changes nothing would answer with the whole Secret.
    refused(lambda **p: operator.merge(theirs, {}, **p), OWN)
    refused(lambda **p: operator.merge(theirs, {"data": {"read": "eA=="}}, **p), OWN)
    for verb in ("GET", "PUT", "DELETE"):
        assert operator.request(verb, address(theirs), theirs if verb == "PUT" else None).status == 403
    assert operator.get(f"/api/v1/namespaces/{TENANT_NAMESPACE}/secrets").status == 403
    outside = edited(secret(), {"metadata/namespace": OPEN_NAMESPACE})
    refused(lambda **p: operator.create(outside, **p), "only in namespaces of tenants")
    for client in (alice, admin):
        refused(
            lambda c=client, **p: c.merge(
                secret(), {"metadata": {"ownerReferences": None, "labels": {"x": "y"}}}, **p
            ),
            OTHERS,
        )
        refused(lambda c=client, **p: c.merge(secret(), {"data": {"read": "eA=="}}, **p), OTHERS)
    for document in (theirs, secret()):
        admin.delete(document).expect()
