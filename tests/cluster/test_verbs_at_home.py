"""Tenant A learns nothing of tenant B through its own namespace: lists, watches, writes, refusals, other names.

A has many rights here, so these tests ask other questions than `test_verbs.py`: whether a selector, the continue token
of another list, a path or a name in a body leads out of the namespace, and whether a refusal reveals B's data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.cluster.admission_rows import pod
from tests.cluster.apiserver import Answer, Client, collection
from tests.cluster.attempts import refused
from tests.cluster.manifests import JSON
from tests.cluster.neighbours import Neighbour, example, own_device, own_taint
from tests.cluster.rights import role_binding, wait_for_right
from tests.cluster.rule_row import edited
from tests.cluster.served import Served
from tests.cluster.walk import ABSENT, OPEN_URLS, told

BRAVOS = re.compile("bravo", re.IGNORECASE)


@pytest.fixture
def ada(alpha: Neighbour, bravo: Neighbour) -> Client:
    """A's own administrator, the role with the most rights."""
    return alpha.person("admin")


@pytest.fixture
def mia(alpha: Neighbour, bravo: Neighbour) -> Client:
    """A member of A."""
    return alpha.person("member")


def readable(caller: Client, resources: tuple[Served, ...], verb: str) -> list[Served]:
    """What the caller may list in A's namespace, where the server also knows this verb."""
    return [
        r
        for r in resources
        if r.namespaced and r.stored and verb in r.verbs and caller.get(r.collection("alpha")).ok
    ]


def text_of(answer: Answer) -> str:
    return told(answer, ABSENT)


# -- reading ---------------------------------------------------------------------------------------------


def test_no_list_shows_b_whatever_selects_it(ada: Client, resources: tuple[Served, ...]) -> None:
    kinds = readable(ada, resources, "list")
    assert {"pods", "secrets", "events", "trainingjobs", "modelservices", "rolebindings"} <= {
        r.plural for r in kinds
    }
    for resource in kinds:
        here = resource.collection("alpha")
        assert "alpha" in text_of(ada.get(here)), f"A sees no {resource.name} of its own"
        for query in ({}, {"resourceVersion": "0"}, {"labelSelector": "of!=alpha"}):
            assert not BRAVOS.search(text_of(ada.get(here, **query))), f"{here} {query}"
        for key, value in (
            ("fieldSelector", "metadata.namespace={}"),
            ("fieldSelector", "metadata.name={}"),
            ("labelSelector", "of={}"),
        ):
            theirs, absent = (ada.get(here, **{key: value.format(n)}) for n in ("bravo", ABSENT))
            assert told(theirs, "bravo") == told(absent, "bravo"), f"{here} {key}={value}"
            assert not theirs.body.get("items"), f"{here} {key}={value}"


def test_a_token_of_another_list_does_not_lead_out(
    ada: Client, bravo: Neighbour, resources: tuple[Served, ...]
) -> None:
    """A continue token holds a name and a version; one of a cluster-wide list still gives only A's objects."""
    tried = 0
    for resource in readable(ada, resources, "list"):
        everybodys = bravo.server.admin.get(resource.collection(None), limit="1").expect()
        token = everybodys["metadata"].get("continue")
        if token:
            answer = ada.get(resource.collection("alpha"), limit="500", **{"continue": token})
            assert not BRAVOS.search(text_of(answer)), resource.name
            tried += 1
    assert tried > 10


def test_no_watch_shows_b(
    ada: Client, alpha: Neighbour, bravo: Neighbour, resources: tuple[Served, ...]
) -> None:
    """Both tenants' objects change after the version at which the watch begins; A sees its own change alone."""
    kinds = readable(ada, resources, "watch")
    begins = {r: ada.get(r.collection("alpha")).expect()["metadata"]["resourceVersion"] for r in kinds}
    mark = {"metadata": {"annotations": {"example.com/touched": "yes"}}}
    for resource in kinds:
        for tenant in (bravo, alpha):
            item = resource.item(tenant.name, tenant.name)
            type_ = "application/merge-patch+json"
            tenant.server.admin.request("PATCH", item, mark, content_type=type_).expect()

    def watch(resource: Served) -> str:
        query = {"watch": "true", "resourceVersion": begins[resource], "timeoutSeconds": "1"}
        return text_of(ada.get(resource.collection("alpha"), **query))

    with ThreadPoolExecutor(len(kinds)) as threads:
        for resource, seen in zip(kinds, threads.map(watch, kinds), strict=True):
            assert "alpha" in seen, f"the watch of {resource.name} showed nothing"
            assert not BRAVOS.search(seen), f"{resource.name}: {seen}"


PATHS = (
    "/api/v1/namespaces/alpha/../{}/secrets/{}",
    "/api/v1/namespaces/alpha%2F..%2F{}/secrets/{}",
    "/api/v1/namespaces/alpha/%2e%2e/{}/secrets/{}",
    "/api/v1/namespaces/alpha/secrets/../../{}/secrets/{}",
    "/api/v1/namespaces/alpha/secrets/..%2F..%2F{}%2Fsecrets%2F{}",
    "/api/v1/namespaces/alpha/pods/alpha/../../../{}/pods/{}/log",
    "//api/v1/namespaces/{}/secrets/{}",
    "/api/v1//namespaces/{}/secrets/{}",
    "/api/v1/watch/namespaces/{}/secrets/{}",
    "/api/v1/proxy/namespaces/{}/pods/{}",
    "/apis/busbar.dev/v1alpha1/namespaces/alpha/trainingjobs/../../{}/trainingjobs/{}",
)


@pytest.mark.parametrize("path", PATHS)
def test_no_way_of_writing_a_path_leads_out(ada: Client, path: str) -> None:
    theirs, absent = (ada.get(path.format(name, name)) for name in ("bravo", ABSENT))
    assert theirs.status in (400, 403, 404)
    assert told(theirs, "bravo") == told(absent, "bravo")


def test_urls_that_are_no_resources_are_refused_or_hold_nothing_of_b(ada: Client, bravo: Neighbour) -> None:
    """Every path of the server's own index, and the well-known ones that it does not list."""
    paths = set(bravo.server.admin.get("/").expect()["paths"])
    paths |= {"/", "/logs", "/logs/kube-apiserver.log", "/configz", "/flagz", "/statusz", "/debug/pprof/heap"}
    paths |= {"/metrics", "/metrics/cadvisor", "/metrics/resources", "/stats", "/exec", "/proxy", "/pods"}
    opened = 0
    for path in sorted(paths):
        answer = ada.get(path)
        if any(path == url or (url.endswith("*") and path.startswith(url[:-1])) for url in OPEN_URLS):
            assert not BRAVOS.search(text_of(answer)), path
            opened += answer.ok
        else:
            assert answer.status == 403, path
    assert opened > 50


# -- writing ---------------------------------------------------------------------------------------------


def test_no_write_at_home_reaches_b_by_a_name_in_its_body(mia: Client, resources: tuple[Served, ...]) -> None:
    tried = 0
    for resource in resources:
        if not (resource.namespaced and resource.stored and "create" in resource.verbs):
            continue
        answers = []
        for name in ("bravo", ABSENT):
            theirs = edited(example(resource, "alpha"), {"metadata/namespace": name, "metadata/name": name})
            answers += [mia.request("POST", resource.collection("alpha"), theirs)]
            answers += [mia.request("PUT", resource.item("alpha", name), theirs)]
        assert all(answer.status in (400, 403) for answer in answers), resource.name
        said = [told(answer, "bravo") for answer in answers]
        assert said[:2] == said[2:], resource.name
        tried += answers[0].status == 400
    assert tried > 5, "a member may create some kinds"


def asks_for_the_device(home: str, owner: str) -> JSON:
    return edited(pod(home, "keen"), {"spec/containers/0/resources": {"limits": {own_device(owner): "1"}}})


def tolerates_the_taint(home: str, owner: str) -> JSON:
    return edited(pod(home, "keen"), {"spec/tolerations": [{"key": own_taint(owner), "operator": "Exists"}]})


def tolerates_everything(home: str, owner: str) -> JSON:
    return edited(pod(home, "keen"), {"spec/tolerations": [{"operator": "Exists"}]})


@pytest.mark.parametrize("goes_for", [asks_for_the_device, tolerates_the_taint, tolerates_everything])
def test_a_refused_pod_does_not_name_a_pool_that_is_b_s_own(
    mia: Client, bravo: Neighbour, goes_for: Callable[[str, str], JSON]
) -> None:
    greedy = goes_for("alpha", "bravo")
    refused(lambda **p: mia.create(greedy, **p), "without waiting in the queue")
    said = mia.create(greedy).message.replace(own_device("bravo"), "the device it asked for")
    assert not BRAVOS.search(said), said
    if (
        goes_for is not tolerates_everything
    ):  # it matches every pool, and the policy of any of them may refuse first
        assert "a pool of accelerators" in said
        own = bravo.person("member").create(goes_for("bravo", "bravo"))
        assert "AcceleratorPool bravo" in own.message


# -- impersonation ---------------------------------------------------------------------------------

AS: dict[str, tuple[tuple[str, str], ...]] = {
    "a member of B": (("Impersonate-User", "{}-member"),),
    "B's service account": (("Impersonate-User", "system:serviceaccount:{}:default"),),
    "a group": (("Impersonate-User", "alpha-member"), ("Impersonate-Group", "{}")),
    "an administrator": (("Impersonate-User", "{}"), ("Impersonate-Group", "system:masters")),
    "a uid": (("Impersonate-User", "{}"), ("Impersonate-Uid", "{}")),
    "an extra": (("Impersonate-User", "{}"), ("Impersonate-Extra-Scopes", "{}")),
    "a node": (("Impersonate-User", "system:node:{}"), ("Impersonate-Group", "system:nodes")),
}


@pytest.mark.parametrize("headers", AS.values(), ids=AS)
def test_nobody_acts_as_somebody_else(
    alpha: Neighbour, bravo: Neighbour, headers: tuple[tuple[str, str], ...]
) -> None:
    """With a real token: of a service account of A that is a member of A."""
    server, own = alpha.server, collection("TrainingJob", "alpha")
    robot = {"kind": "ServiceAccount", "name": "alpha", "namespace": "alpha"}
    server.admin.apply(role_binding("alpha", "robot", "busbar-tenant-member", robot)).expect()
    token = server.service_account_token("alpha", "alpha")
    wait_for_right(server.bearer(token), own)
    theirs, absent = (
        server.bearer(token, [(key, value.format(name)) for key, value in headers]).get(own)
        for name in ("bravo", ABSENT)
    )
    assert theirs.status == 403
    assert "cannot impersonate" in theirs.message
    assert told(theirs, "bravo") == told(absent, "bravo")


def test_no_token_can_be_made_for_an_account_of_b(ada: Client, alpha: Neighbour) -> None:
    """A may not create tokens for its own service accounts either: pods get theirs from the kubelet."""
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    for namespace in ("bravo", ABSENT, "alpha"):
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default/token"
        assert ada.request("POST", path, request).status == 403
