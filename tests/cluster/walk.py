"""Every request that a caller could make for another tenant's namespace; each must be refused.

`rights` asks the server's authorizer about every verb on every resource, verbs that kubectl never sends included.
`requests` makes the requests: the refusal for an object that exists must be, word for word, the one for an object
that does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from tests.cluster.apiserver import Answer, Client
from tests.cluster.manifests import JSON
from tests.cluster.served import VERBS, Served

ABSENT = "novus"
"""The name of a tenant, a namespace and objects that do not exist."""

OPEN = frozenset(
    {
        # "May I?" and "Who am I?": the answers are about the caller alone. Kubernetes gives them to everybody
        # (system:basic-user), and kubectl needs them.
        ("create", "authorization.k8s.io", "selfsubjectaccessreviews"),
        ("create", "authorization.k8s.io", "selfsubjectrulesreviews"),
        ("create", "authentication.k8s.io", "selfsubjectreviews"),
    }
)
"""(verb, group, resource) that every caller may use, on purpose. No object of Busbar is among them."""

OPEN_URLS = frozenset(
    {
        # Discovery and OpenAPI (system:discovery): which kinds exist, never an object.
        "/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*",
        # Whether the server lives, and its version (system:public-info-viewer).
        "/healthz", "/livez", "/readyz", "/version", "/version/",
    }
)  # fmt: skip
"""Non-resource URLs that every caller may read, on purpose."""

ISSUER_URLS = frozenset(
    # Public keys of service accounts' tokens (system:service-account-issuer-discovery).
    f"{path}{slash}"
    for path in ("/.well-known/openid-configuration", "/openid/v1/jwks")
    for slash in ("", "/")
)
"""Non-resource URLs that service accounts may read too, on purpose."""

UNSERVED = (
    *(("impersonate", "", name) for name in ("users", "groups", "serviceaccounts")),
    *(("impersonate", "authentication.k8s.io", name) for name in ("uids", "userextras/scopes")),
    *(
        (f"impersonate:{mode}", "authentication.k8s.io", "users")
        for mode in ("user-info", "serviceaccount", "arbitrary-node", "associated-node")
    ),
    *(
        (verb, "rbac.authorization.k8s.io", name)
        for verb in ("bind", "escalate")
        for name in ("roles", "clusterroles")
    ),
    *((verb, "certificates.k8s.io", "signers") for verb in ("approve", "sign", "attest")),
    *(
        ("get", "", f"nodes/{name}")
        for name in ("log", "metrics", "stats", "spec", "configz", "healthz", "pods", "checkpoint")
    ),
    ("request-serviceaccounts-token-audience", "", "serviceaccounts"),
    ("use", "policy", "podsecuritypolicies"),
    ("*", "*", "*"),
)
"""Verbs and resources that the authorizer knows and discovery does not list."""


def rights(caller: Client, resources: Iterable[Served], namespace: str) -> list[str]:
    """What the caller may do in this namespace, or in the whole cluster, beyond what is open to everybody."""
    asked = [(verb, r.group, r.name, r.namespaced) for r in resources for verb in VERBS]
    asked += [(*entry, spaced) for entry in UNSERVED for spaced in (True, False)]
    found = []
    for verb, group, name, spaced in dict.fromkeys(asked):
        if (verb, group, name) in OPEN:
            continue
        plural, _, subresource = name.partition("/")
        attributes = {
            "verb": verb,
            "group": group,
            "resource": plural,
            "subresource": subresource,
            "namespace": namespace if spaced else "",
        }
        if review(caller, attributes)["allowed"]:
            found.append(f"may {verb} {name} of {group or 'core'} {'there' if spaced else 'in the cluster'}")
    return found


def review(caller: Client, attributes: JSON) -> JSON:
    """The authorizer's answer about the caller itself."""
    kind, api = "SelfSubjectAccessReview", "authorization.k8s.io/v1"
    body = {"apiVersion": api, "kind": kind, "spec": {"resourceAttributes": attributes}}
    status: JSON = (
        caller.request("POST", f"/apis/{api}/selfsubjectaccessreviews", body).expect().get("status", {})
    )
    return status


@dataclass(frozen=True)
class Ask:
    """One request."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    body: JSON | None = None
    content_type: str = "application/json"

    def of(self, caller: Client) -> Answer:
        return caller.request(self.method, self.path, self.body, content_type=self.content_type, **self.query)


def asks(resource: Served, namespace: str, name: str) -> Iterator[Ask]:
    """The requests of each verb of a resource for one object."""
    item = resource.item(namespace, name)
    document = _document(resource, namespace, name)
    single = {
        "get": [Ask("GET", item)],
        "create": [Ask("POST", item, body=document)] if resource.subresource else [],
        "update": [Ask("PUT", item, body=document)],
        "delete": [Ask("DELETE", item)],
        "patch": [
            Ask("PATCH", item, body=document, content_type="application/merge-patch+json"),
            Ask("PATCH", item, {"fieldManager": "a"}, document, "application/apply-patch+yaml"),
        ],
    }
    if resource.subresource in ("proxy", "exec", "attach", "portforward", "log"):
        below = f"{item}/metrics" if resource.subresource == "proxy" else item
        single["get"].append(Ask("GET", below, {"container": "main", "command": "ls", "stdout": "true"}))
    for verb in resource.verbs:
        yield from single.get(verb, ())


def asks_of_all(resource: Served, namespace: str, name: str) -> Iterator[Ask]:
    """The requests for the resource's collections, in the namespace and cluster-wide, with selectors for this name."""
    if resource.subresource:
        return
    watch = {"watch": "true", "timeoutSeconds": "1"}
    by_name, by_label = {"fieldSelector": f"metadata.name={name}"}, {"labelSelector": f"of={name}"}
    for where in dict.fromkeys((resource.collection(namespace), resource.collection(None))):
        if "list" in resource.verbs:
            yield from (Ask("GET", where), Ask("GET", where, by_name | by_label | {"resourceVersion": "0"}))
        if "watch" in resource.verbs:
            old = where.replace(resource.root, f"{resource.root}/watch", 1)
            yield from (Ask("GET", where, watch | by_name), Ask("GET", old, {"timeoutSeconds": "1"}))
        if "create" in resource.verbs:
            yield Ask("POST", where, body=_document(resource, namespace, name))
        if "deletecollection" in resource.verbs:
            yield Ask("DELETE", where, by_name)


def _document(resource: Served, namespace: str, name: str) -> JSON:
    metadata = {"name": name, **({"namespace": namespace} if resource.namespaced else {})}
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}


def requests(caller: Client, resources: Iterable[Served], name: str) -> list[str]:
    """Requests for the tenant of this name that are not refused, or are refused in other words than those for
    `ABSENT`."""
    found = []
    for resource in resources:
        if any((verb, resource.group, resource.name) in OPEN for verb in resource.verbs):
            continue
        here = (*asks(resource, name, name), *asks_of_all(resource, name, name))
        absent = (*asks(resource, ABSENT, ABSENT), *asks_of_all(resource, ABSENT, ABSENT))
        beside = asks(resource, name, ABSENT)
        for ask, *others in zip_longest(here, absent, beside):
            answer = ask.of(caller)
            if answer.status != 403:
                found.append(f"{ask.method} {ask.path} {ask.query}: {answer.status} {answer.message}")
            elif any(told(other.of(caller), name) != told(answer, name) for other in others if other):
                found.append(f"{ask.method} {ask.path} {ask.query} tells what exists: {answer.message}")
    return found


def told(answer: Answer, name: str) -> str:
    """The whole answer, with the requested name masked."""
    body = dict(answer.body)
    if "items" in body:  # every write to the server changes the version of a list
        body["metadata"] = {
            k: v for k, v in body["metadata"].items() if k not in ("resourceVersion", "continue")
        }
    return f"{answer.status} {json.dumps(body)} {answer.warnings}".replace(ABSENT, name)
