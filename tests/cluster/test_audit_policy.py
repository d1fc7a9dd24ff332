"""The example of an audit policy, on a real API server: it records who changed and who was refused, and no secrets."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import yaml
from tests.cluster.apiserver import ROOT, ApiServer

from busbar.kube import resources
from busbar.kube.resources import GROUP, Resource

POLICY = ROOT / "examples" / "audit-policy.yaml"
RULES: list[dict[str, Any]] = yaml.safe_load(POLICY.read_text())["rules"]
PASSWORD = "correct-horse-battery"
OPERATOR = "system:serviceaccount:busbar-system:busbar-operator"
JOB: dict[str, Any] = {
    "apiVersion": "busbar.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "job", "namespace": "audited"},
    "spec": {
        "template": {"image": "i", "env": [{"name": "PASSWORD", "value": PASSWORD}]},
        "output": {"uri": "pvc://claim/out"},
    },
}
TENANT: dict[str, Any] = {
    "apiVersion": "busbar.dev/v1alpha1",
    "kind": "Tenant",
    "metadata": {"name": "team"},
    "spec": {"namespaces": ["audited"]},
}
SECRET: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "mine", "namespace": "audited"},
    "data": {"password": base64.b64encode(PASSWORD.encode()).decode()},
}
Log = list[dict[str, Any]]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """What such a server records of some calls, of which the last three are refused."""
    path = tmp_path_factory.mktemp("audit") / "audit.log"
    with ApiServer.start(f"--audit-policy-file={POLICY}", f"--audit-log-path={path}") as server:
        server.install_crds()
        server.make_namespace("audited")
        admin, mallory = server.admin, server.client("mallory")
        for document in (JOB, TENANT, SECRET):
            admin.create(document).expect()
        admin.get("/api/v1/namespaces/audited/secrets/mine").expect()
        admin.get("/api/v1/namespaces/audited/configmaps").expect()
        for document in (JOB, SECRET):
            assert mallory.delete(document).status == 403
        assert mallory.request("POST", "/api/v1/namespaces/audited/pods/p/exec", command="sh").status == 403
        lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines]


def entries(log: Log, verb: str, resource: str, subresource: str | None = None) -> Log:
    def matches(entry: dict[str, Any]) -> bool:
        at = entry.get("objectRef", {})
        return (entry["verb"], at.get("resource"), at.get("subresource")) == (verb, resource, subresource)

    return [entry for entry in log if matches(entry)]


@pytest.mark.apiserver
def test_no_secret_value_is_recorded(log: Log) -> None:
    text = json.dumps(log)
    assert PASSWORD not in text
    assert SECRET["data"]["password"] not in text


@pytest.mark.apiserver
def test_who_got_a_right_is_recorded_with_what_was_written(log: Log) -> None:
    (made,) = entries(log, "create", "tenants")
    assert made["requestObject"]["spec"]["namespaces"] == ["audited"]


@pytest.mark.apiserver
def test_jobs_and_secrets_are_recorded_without_their_content(log: Log) -> None:
    for verb, resource in (("create", "trainingjobs"), ("create", "secrets"), ("get", "secrets")):
        found = [e for e in entries(log, verb, resource) if e["objectRef"]["namespace"] == "audited"]
        assert len(found) == 1, (verb, resource)
        assert "requestObject" not in found[0]
        assert found[0]["responseStatus"]["code"] < 300


@pytest.mark.apiserver
def test_the_refused_are_recorded_with_their_name(log: Log) -> None:
    for verb, resource, sub in (
        ("delete", "trainingjobs", None),
        ("delete", "secrets", None),
        ("create", "pods", "exec"),
    ):
        refused = [e for e in entries(log, verb, resource, sub) if e["responseStatus"]["code"] == 403]
        assert {e["impersonatedUser"]["username"] for e in refused} == {"mallory"}, resource


@pytest.mark.apiserver
def test_plain_reads_are_not_recorded(log: Log) -> None:
    assert entries(log, "list", "configmaps") == []


def test_the_policy_names_our_resources_and_each_of_them() -> None:
    ours = {r.plural for r in vars(resources).values() if isinstance(r, Resource) and r.group == GROUP}
    by_level: dict[str, set[str]] = {}
    for rule in RULES:
        for named in rule.get("resources", ()):
            if named["group"] == GROUP:
                by_level.setdefault(rule["level"], set()).update(named["resources"])
    assert by_level["None"] == {f"{plural}/status" for plural in ours}, "only statuses are left out"
    assert by_level["Request"] == ours - {"trainingjobs", "modelservices"}, "these may hold secrets"


def test_only_the_operators_own_writes_are_left_out() -> None:
    for rule in RULES:
        writes = not rule.get("verbs") and rule["level"] == "None" and "nonResourceURLs" not in rule
        if writes and rule is not RULES[-1]:
            assert rule.get("users") == [OPERATOR] or rule.get("userGroups") == ["system:nodes"]
