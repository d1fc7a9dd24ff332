"""No escape from a tenant's namespace, and no way past the queue, on a real API server with the chart installed.

Attempts are made with the rights of a tenant's member, and where a right would already stop the attempt, with an
administrator's, so that the policy itself is seen to refuse. Members are bound to the chart's own role.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import admission_rows as rows
from tests.cluster.admission_rows import (
    ESCAPES,
    GATE,
    JUMPS,
    OPEN_NAMESPACE,
    TENANT_NAMESPACE,
    PodRow,
    job,
    pod,
)
from tests.cluster.apiserver import Answer, ApiServer, Client, address, collection, render_chart
from tests.cluster.manifests import JSON, model_service, pool, template_job
from tests.cluster.rule_rows import edited

SYSTEM = "busbar-system"
SETTLE_S = 15.0
Attempt = Callable[..., Answer]


@pytest.fixture(scope="module")
def tenancy(platform: ApiServer) -> ApiServer:
    """A tenant's namespace as the operator makes it, one without a tenant, pools and priority classes."""
    labels = {
        "busbar.dev/tenant": "team-a",
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/enforce-version": "latest",
    }
    platform.make_namespace(TENANT_NAMESPACE, labels)
    platform.make_namespace(OPEN_NAMESPACE)
    for document in rows.pools():
        platform.admin.create(document).expect()
    for name, policy in (("urgent", "PreemptLowerPriority"), ("patient", "Never")):
        platform.admin.create(
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": f"busbar-test-{name}"},
                "value": 1000,
                "preemptionPolicy": policy,
            }
        ).expect()
    for person, role in (("alice", "member"), ("victor", "viewer"), ("adele", "admin")):
        platform.admin.create(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": {"name": f"busbar-team-a-{role}", "namespace": TENANT_NAMESPACE},
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": f"busbar-tenant-{role}",
                },
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": person}],
            }
        ).expect()
        jobs = f"/apis/busbar.dev/v1alpha1/namespaces/{TENANT_NAMESPACE}/trainingjobs"
        wait_for_right(platform.client(person), jobs)
    return platform


def wait_for_right(client: Client, path: str) -> None:
    """A binding counts for the server's authorizer only some milliseconds after it was written."""
    end = time.monotonic() + 10
    while client.get(path).status == 403:
        assert time.monotonic() < end, f"{path} is still forbidden"
        time.sleep(0.02)


@pytest.fixture
def alice(tenancy: ApiServer) -> Client:
    """A member of the tenant."""
    return tenancy.client("alice")


@pytest.fixture
def admin(tenancy: ApiServer) -> Client:
    """The cluster's administrator, whom no right stops."""
    return tenancy.admin


@pytest.fixture
def operator(tenancy: ApiServer) -> Client:
    """The operator's service account, with the chart's rights."""
    return tenancy.service_account(SYSTEM, "busbar-operator")


@pytest.fixture
def kept(admin: Client) -> Iterator[Callable[[JSON], JSON]]:
    """Creates an object as the administrator and deletes it after the test."""
    made: list[JSON] = []

    def create(document: JSON) -> JSON:
        made.append(document)
        return eventually_accepted(lambda **p: admin.create(document, **p))

    yield create
    for document in reversed(made):
        admin.delete(document, gracePeriodSeconds="0")


def refused(attempt: Attempt, says: str) -> None:
    """The attempt is refused with these words; the first moments after the policies were written do not count."""
    end = time.monotonic() + SETTLE_S
    answer = attempt(dryRun="All")
    while answer.ok and time.monotonic() < end:
        time.sleep(0.05)
        answer = attempt(dryRun="All")
    assert not answer.ok, "it was accepted"
    assert says in answer.message
    assert not attempt().ok


def eventually_accepted(attempt: Attempt) -> JSON:
    """The attempt is accepted, at the latest when the policies have settled."""
    end = time.monotonic() + SETTLE_S
    answer = attempt(dryRun="All")
    while not answer.ok and time.monotonic() < end:
        time.sleep(0.05)
        answer = attempt(dryRun="All")
    return attempt().expect()


# -- a tenant's own pods ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*ESCAPES, *JUMPS], ids=lambda row: row.name)
def test_member_cannot(alice: Client, admin: Client, row: PodRow) -> None:
    bad, good = row.bad(), row.good()
    refused(lambda **p: alice.create(bad, **p), row.says)
    assert admin.get(address(bad)).status == 404
    eventually_accepted(lambda **p: alice.create(good, **p))
    admin.delete(good, gracePeriodSeconds="0").expect()


@pytest.mark.parametrize("row", JUMPS, ids=lambda row: row.name)
def test_nobody_jumps_the_queue_not_even_an_administrator_or_the_operator(
    admin: Client, operator: Client, row: PodRow
) -> None:
    device_policies = ("asks for", "tolerates")
    refused(lambda **p: admin.create(row.bad(), **p), row.says)
    if any(word in row.says for word in device_policies) and "class" not in row.says:
        refused(lambda **p: operator.create(row.bad(), **p), row.says)


@pytest.mark.parametrize("row", [*ESCAPES, *JUMPS], ids=lambda row: row.name)
def test_a_controller_cannot_do_it_for_a_member(tenancy: ApiServer, row: PodRow) -> None:
    """A Job or Deployment may say anything in its template; its pods are refused when the controller makes them."""
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


def test_an_opted_in_pod_is_born_with_the_gate(alice: Client, admin: Client) -> None:
    wanted = edited(pod(name="opted-in"), {"metadata/labels": {"busbar.dev/queue": "true"}})
    end = time.monotonic() + SETTLE_S
    while True:
        made = alice.create(wanted, dryRun="All").expect()
        gates = made["spec"].get("schedulingGates", [])
        if gates or time.monotonic() > end:
            break
    assert gates == [{"name": GATE}]


def test_an_opted_in_job_passes_the_label_on_to_its_pods(alice: Client) -> None:
    wanted = job("opted-in", labels={"busbar.dev/queue": "true"})
    made = alice.create(wanted, dryRun="All").expect()
    assert made["spec"]["template"]["metadata"]["labels"]["busbar.dev/queue"] == "true"
    plain = alice.create(job("plain"), dryRun="All").expect()
    assert "busbar.dev/queue" not in plain["spec"]["template"]["metadata"].get("labels", {})


# -- what only the operator does -------------------------------------------------------------------------


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
    mark = {"metadata": {key: {"busbar.dev/job": "other"}}}
    says = f"{key} under busbar.dev/ are written by Busbar's operator"
    refused(lambda **p: alice.merge(target, mark, **p), says)
    alice.merge(target, {"metadata": {key: {"example.com/job": "other"}}}).expect()
    operator.merge(target, mark).expect()
    refused(lambda **p: alice.merge(target, {"metadata": {key: {"busbar.dev/job": "else"}}}, **p), says)
    refused(lambda **p: alice.merge(target, {"metadata": {key: {"busbar.dev/job": None}}}, **p), says)


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


def kinds() -> list[JSON]:
    trained, served = template_job(), model_service()
    for document in (trained, served):
        document["metadata"]["namespace"] = TENANT_NAMESPACE
    tenant: JSON = {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": "of-status"},
        "spec": {},
    }
    return [trained, served, pool(), tenant]


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
    forged = edited(document, {"metadata/annotations": {"busbar.dev/requester": "bob"}})
    refused(lambda **p: alice.create(forged, **p), "only Busbar writes them")
    eventually_accepted(lambda **p: alice.create(document, **p))
    mark = {"metadata": {"annotations": {"busbar.dev/requester": "bob"}}}
    refused(lambda **p: alice.merge(document, mark, **p), "only Busbar writes them")
    assert alice.merge(document, {"status": {"phase": "Ready"}}, subresource="/status").status == 403
    tenancy.service_account(SYSTEM, "busbar-api").merge(document, mark).expect()
    admin.delete(document).expect()


def test_only_operator_and_administrators_make_a_namespace_a_tenants(
    tenancy: ApiServer, operator: Client
) -> None:
    # A person who may edit namespaces, but is no administrator of the cluster.
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "edits-namespaces"},
        "rules": [{"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get", "create", "patch"]}],
    }
    tenancy.admin.create(role).expect()
    tenancy.admin.create(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "edits-namespaces"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "edits-namespaces",
            },
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "nora"}],
        }
    ).expect()
    nora = tenancy.client("nora")
    wait_for_right(nora, f"/api/v1/namespaces/{OPEN_NAMESPACE}")
    mine: JSON = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPEN_NAMESPACE}}
    theirs: JSON = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TENANT_NAMESPACE}}
    new: JSON = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "new", "labels": {"busbar.dev/tenant": "a"}},
    }
    tenant_says = "the label busbar.dev/tenant is written by Busbar's operator"

    def labelled(value: str | None, key: str = "busbar.dev/tenant") -> JSON:
        return {"metadata": {"labels": {key: value}}}

    refused(lambda **p: nora.create(new, **p), tenant_says)
    refused(lambda **p: nora.merge(mine, labelled("team-a"), **p), tenant_says)
    refused(lambda **p: nora.merge(theirs, labelled("team-b"), **p), tenant_says)
    refused(lambda **p: nora.merge(theirs, labelled(None), **p), tenant_says)
    level = "pod-security.kubernetes.io/enforce"
    for value in ("privileged", None):
        refused(
            lambda v=value, **p: nora.merge(theirs, labelled(v, level), **p), "Pod Security of a tenant's"
        )
    nora.merge(mine, labelled("baseline", level)).expect()
    nora.merge(theirs, labelled("x", "example.com/other")).expect()
    operator.merge(mine, labelled("team-b")).expect()
    tenancy.admin.merge(mine, labelled(None)).expect()


def test_the_operator_makes_things_only_in_namespaces_of_tenants(operator: Client, admin: Client) -> None:
    says = "the operator makes things only in namespaces of tenants"
    refused(lambda **p: operator.create(pod(OPEN_NAMESPACE), **p), says)
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "grab", "namespace": "kube-system"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "busbar-tenant-admin",
        },
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "eve"}],
    }
    refused(lambda **p: operator.create(binding, **p), says)
    own = edited(binding, {"metadata/namespace": TENANT_NAMESPACE})
    operator.create(own, dryRun="All").expect()
    stronger = edited(own, {"roleRef/name": "cluster-admin"})
    assert operator.create(stronger, dryRun="All").status == 403


def tenant(name: str, *namespaces: str) -> JSON:
    return {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name},
        "spec": {"namespaces": list(namespaces)},
    }


def test_a_namespace_belongs_to_one_tenant_and_the_platforms_to_none(
    admin: Client, kept: Callable[[JSON], JSON]
) -> None:
    kept(tenant("first", "shared-a", "shared-b"))
    second = tenant("second", "own", "shared-b")
    refused(lambda **p: admin.create(second, **p), "namespace shared-b belongs to another Tenant, first")
    stored = kept(tenant("second", "own"))
    taken = {"spec": {"namespaces": ["own", "shared-a"]}}
    refused(
        lambda **p: admin.merge(stored, taken, **p), "namespace shared-a belongs to another Tenant, first"
    )
    admin.merge(stored, {"spec": {"namespaces": ["own", "more"]}}).expect()
    says = "the namespace of the platform itself cannot belong to a tenant"
    refused(lambda **p: admin.merge(stored, {"spec": {"namespaces": [SYSTEM]}}, **p), says)


@pytest.mark.apiserver
def test_every_sentence_of_every_policy_is_seen_in_a_test() -> None:
    """Each test asserts the words of one validation, so with that validation taken out it fails."""
    seen = "\n".join(
        Path(str(module.__file__)).read_text(encoding="utf-8") for module in (rows, sys.modules[__name__])
    )
    unseen = []
    for policy in (d for d in render_chart("busbar") if d["kind"] == "ValidatingAdmissionPolicy"):
        for validation in policy["spec"]["validations"]:
            said = validation.get("message") or validation["messageExpression"]
            words = re.findall(r"[A-Za-z./-]+", said)
            runs = (" ".join(words[i : i + 4]) for i in range(len(words) - 3))
            if not any(run in seen for run in runs):
                unseen.append(f"{policy['metadata']['name']}: {said}")
    assert unseen == []


def overlap(says: str, validation: JSON) -> int:
    """How many words in a row a refusal shares with what this validation says."""
    words = re.findall(r"[A-Za-z./-]+", says)
    said = " ".join(re.findall(r"[A-Za-z./-]+", validation.get("message") or validation["messageExpression"]))
    runs = ((i, j) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return max(j - i for i, j in runs if j - i == 1 or " ".join(words[i:j]) in said)


OWN_RULES = {row.says: row for row in (*JUMPS, *ESCAPES) if row.says != rows.RESTRICTED}


@pytest.mark.parametrize("row", OWN_RULES.values(), ids=lambda row: row.name)
def test_without_its_rule_the_attempt_succeeds(admin: Client, row: PodRow) -> None:
    refused(lambda **p: admin.create(row.bad(), **p), row.says)
    path = collection("ValidatingAdmissionPolicy")
    policies = [admin.get(f"{path}/{name}").expect() for name in ("busbar-queue", "busbar-pods")]
    whole, rule = max(
        ((policy, rule) for policy in policies for rule in policy["spec"]["validations"]),
        key=lambda pair: overlap(row.says, pair[1]),
    )
    kept_rules = [other for other in whole["spec"]["validations"] if other is not rule]
    admin.merge(whole, {"spec": {"validations": kept_rules}}).expect()
    try:
        end = time.monotonic() + SETTLE_S
        while not (answer := admin.create(row.bad(), dryRun="All")).ok and time.monotonic() < end:
            time.sleep(0.05)
        assert answer.ok, f"another rule refuses it too: {answer.message}"
    finally:
        admin.merge(whole, {"spec": {"validations": whole["spec"]["validations"]}}).expect()
        refused(lambda **p: admin.create(row.bad(), **p), row.says)


# -- TrainingJob.template --------------------------------------------------------------------------------

ALLOWED_IN_TEMPLATE = {
    "image", "imagePullPolicy", "imagePullSecrets", "command", "args", "env", "envFrom", "workingDir", "volumes",
    "metadata",
}  # fmt: skip
"""Names that our flat form shares with PodSpec and Container, and what it adds is `port`."""
ALLOWED_VOLUMES = {"name", "configMap", "secret", "emptyDir"}
ALLOWED_SOURCES = {"secretKeyRef", "configMapKeyRef", "fieldRef"}


@pytest.fixture(scope="module")
def core_schemas(platform: ApiServer) -> JSON:
    """The API server's own description of pods, so that a field of a newer Kubernetes is tried too."""
    found: JSON = platform.admin.get("/openapi/v3/api/v1").expect()["components"]["schemas"]
    return found


def properties(schemas: JSON, name: str) -> set[str]:
    return set(schemas[f"io.k8s.api.core.v1.{name}"]["properties"])


def attempt_field(client: Client, place: str, field: str, value: Any = True) -> None:
    """Setting this field is refused by its name, and a lenient client's attempt is dropped."""
    document = template_job()
    document["metadata"]["namespace"] = TENANT_NAMESPACE
    bad = edited(document, {f"{place}/{field}": value})
    answer = client.create(bad, dryRun="All")
    assert answer.status in (400, 422), f"{place}/{field} was accepted"
    dotted = place.replace("/0", "[0]").replace("/1", "[1]").replace("/", ".")
    assert f'unknown field "{dotted}.{field}"' in answer.message
    lenient = client.create(bad, dryRun="All", fieldValidation="Ignore")
    node: Any = lenient.expect()
    for step in place.split("/"):
        node = node[int(step)] if step.isdigit() else node[step]
    assert field not in node


def test_no_field_of_a_pod_or_container_passes_through_the_template(
    alice: Client, core_schemas: JSON
) -> None:
    fields = properties(core_schemas, "PodSpec") | properties(core_schemas, "Container")
    assert {
        "hostNetwork",
        "hostPID",
        "nodeName",
        "serviceAccountName",
        "securityContext",
        "tolerations",
    } <= fields
    assert fields & ALLOWED_IN_TEMPLATE == ALLOWED_IN_TEMPLATE - {"metadata"}
    for name in sorted(fields - ALLOWED_IN_TEMPLATE):
        attempt_field(alice, "spec/template", name)
    assert len(fields - ALLOWED_IN_TEMPLATE) > 50


def test_no_other_kind_of_volume_passes_through_the_template(alice: Client, core_schemas: JSON) -> None:
    fields = properties(core_schemas, "Volume")
    assert {"hostPath", "projected", "csi", "nfs", "image"} <= fields
    for name in sorted(fields - ALLOWED_VOLUMES):
        attempt_field(alice, "spec/template/volumes/0", name, {})


def test_no_other_field_of_a_mount_variable_or_metadata_passes_through(
    alice: Client, core_schemas: JSON
) -> None:
    for name in sorted(properties(core_schemas, "VolumeMount") - {"name", "mountPath", "readOnly"}):
        attempt_field(alice, "spec/template/volumes/0", name)
    for name in sorted(properties(core_schemas, "EnvVarSource") - ALLOWED_SOURCES):
        attempt_field(alice, "spec/template/env/1/valueFrom", name)
    for name in ("namespace", "name", "ownerReferences", "finalizers", "generateName"):
        attempt_field(alice, "spec/template/metadata", name)


def test_no_field_of_a_pod_or_container_passes_through_a_service(alice: Client, core_schemas: JSON) -> None:
    document = model_service()
    document["metadata"]["namespace"] = TENANT_NAMESPACE
    fields = properties(core_schemas, "PodSpec") | properties(core_schemas, "Container")
    for name in sorted(fields - {"image", "args", "priority"}):
        answer = alice.create(edited(document, {f"spec/{name}": True}), dryRun="All")
        assert f'unknown field "spec.{name}"' in answer.message


def test_own_pods_are_the_operators_to_make_from_the_template_alone(alice: Client) -> None:
    """The shape says how much, never where: no selector, affinity or toleration passes through it."""
    for name in ("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "priorityClassName"):
        attempt_field(alice, "spec/shape", name)
        attempt_field(alice, "spec", name)


# -- rights of people ------------------------------------------------------------------------------------


def test_members_see_no_tenants_pools_or_other_namespaces(tenancy: ApiServer) -> None:
    for person in ("alice", "victor", "adele"):
        client = tenancy.client(person)
        for path in (
            "/apis/busbar.dev/v1alpha1/tenants",
            "/apis/busbar.dev/v1alpha1/acceleratorpools",
            "/apis/busbar.dev/v1alpha1/trainingjobs",
            f"/apis/busbar.dev/v1alpha1/namespaces/{OPEN_NAMESPACE}/trainingjobs",
            f"/api/v1/namespaces/{OPEN_NAMESPACE}/pods",
            f"/api/v1/namespaces/{SYSTEM}/secrets",
            "/api/v1/nodes",
        ):
            assert client.get(path).status == 403, f"{person} may read {path}"
        assert client.get(f"/apis/busbar.dev/v1alpha1/namespaces/{TENANT_NAMESPACE}/trainingjobs").ok


def test_a_viewer_changes_nothing(tenancy: ApiServer) -> None:
    viewer = tenancy.client("victor")
    for document in (pod(), job(), *kinds()[:2]):
        assert viewer.create(document, dryRun="All").status == 403
    assert viewer.get(f"/api/v1/namespaces/{TENANT_NAMESPACE}/secrets").status == 403


def test_members_cannot_give_themselves_rights_or_pools(alice: Client) -> None:
    binding: JSON = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "grab", "namespace": TENANT_NAMESPACE},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "alice"}],
    }
    claim: JSON = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "gpu", "namespace": TENANT_NAMESPACE},
        "spec": {},
    }
    for document in (binding, claim, *kinds()[2:]):
        assert alice.create(document, dryRun="All").status == 403, document["kind"]
