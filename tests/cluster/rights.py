"""Who may do what: RoleBindings as the operator renders them, and waiting until one takes effect.

The server's authorizer sees a binding only some milliseconds after it was written, so a test that writes one waits
before the first request that needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from tests.cluster.apiserver import ApiServer, Client, collection
from tests.cluster.manifests import JSON

SYSTEM = "busbar-system"
RBAC = "rbac.authorization.k8s.io"
RIGHT_S = 60.0


def user(name: str) -> JSON:
    """A person as the subject of a binding."""
    return {"apiGroup": RBAC, "kind": "User", "name": name}


def role_binding(namespace: str, name: str, cluster_role: str, *subjects: JSON) -> JSON:
    """A cluster role given in one namespace."""
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name, "namespace": namespace},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": cluster_role},
        "subjects": list(subjects),
    }


def cluster_role_binding(name: str, cluster_role: str, *subjects: JSON) -> JSON:
    """A cluster role given everywhere."""
    made = role_binding("", name, cluster_role, *subjects)
    return made | {"kind": "ClusterRoleBinding", "metadata": {"name": name}}


def tenant_binding(tenant: str, namespace: str, role: str, *people: str) -> JSON:
    """What the operator renders from a Tenant's members of one role."""
    return role_binding(
        namespace, f"busbar-{tenant}-{role}", f"busbar-tenant-{role}", *(user(name) for name in people)
    )


def give_role(server: ApiServer, tenant: str, namespace: str, role: str, *people: str) -> None:
    """Bind people to a tenant's role in its namespace, and wait until each may use it."""
    server.admin.apply(tenant_binding(tenant, namespace, role, *people)).expect()
    for person in people:
        wait_for_right(server.client(person), collection("TrainingJob", namespace))


def wait_for_bindings(server: ApiServer, documents: Sequence[JSON]) -> None:
    """Waits until every binding among these documents takes effect: the last rule of its role, for each subject."""
    roles = {(d["kind"], d["metadata"]["name"]): d for d in documents if d["kind"] in ("ClusterRole", "Role")}
    for binding in (d for d in documents if d["kind"] in ("ClusterRoleBinding", "RoleBinding")):
        rule = roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]["rules"][-1]
        plural, _, subresource = rule["resources"][-1].partition("/")
        attributes = {
            "verb": rule["verbs"][-1],
            "group": rule["apiGroups"][-1],
            "resource": plural,
            "subresource": subresource,
            "name": rule.get("resourceNames", [""])[-1],
            "namespace": binding["metadata"].get("namespace", ""),
        }
        for subject in binding["subjects"]:
            wait_until(partial(is_allowed, server, subject, attributes), f"{subject} has its role")


def is_allowed(server: ApiServer, subject: JSON, attributes: JSON) -> bool:
    """The authorizer's answer about the subject of a binding."""
    kind, api = "SubjectAccessReview", "authorization.k8s.io/v1"
    who: JSON
    if subject["kind"] == "ServiceAccount":
        who = {"user": f"system:serviceaccount:{subject['namespace']}:{subject['name']}"}
    else:
        who = {"user": subject["name"]} if subject["kind"] == "User" else {"groups": [subject["name"]]}
    body = {"apiVersion": api, "kind": kind, "spec": {**who, "resourceAttributes": attributes}}
    answer = server.admin.request("POST", f"/apis/{api}/subjectaccessreviews", body).expect()
    return bool(answer["status"]["allowed"])


def wait_for_right(client: Client, path: str) -> None:
    """Waits until the client may read this path."""
    wait_until(lambda: client.get(path).status != 403, f"{path} may be read")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Waits until a right that was just given takes effect. Raises AssertionError after a minute."""
    end = time.monotonic() + RIGHT_S
    while not holds():
        assert time.monotonic() < end, f"waited {RIGHT_S:.0f} s until {what}"
        time.sleep(0.02)
