"""A pod of one tenant calls every port of the platform and of another tenant's workload: it learns nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.e2e.instance import Cluster, small_job

pytestmark = pytest.mark.node

RIVAL = "umbra"
SYSTEM = "busbar-system"

PROBE = """
import json, os, urllib.request, urllib.error
folder = os.environ.get("BUSBAR_BEARERS_DIR", "/nowhere")
own = open(folder + "/command").read().strip() if os.path.isdir(folder) else ""
for target in json.loads(os.environ["TARGETS"]):
    for who, headers in (("nobody", {}), ("own", {"Authorization": "Bearer " + own}), ("forged", {"Authorization": "Bearer bb_" + "A" * 43})):
        method, url = target
        request = urllib.request.Request(url, method=method, headers=headers, data=b"{}" if method == "POST" else None)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                status, body = answer.status, answer.read(65536).decode(errors="replace")
        except urllib.error.HTTPError as error:
            status, body = error.code, error.read(65536).decode(errors="replace")
        except Exception as error:
            status, body = 0, type(error).__name__
        print("ANSWER " + json.dumps([method, url, who, status, body]), flush=True)
"""


def make_rival(cluster: Cluster) -> dict[str, Any]:
    """A second tenant with a long job on the real node; returns its running pod."""
    pool = next(p for p in cluster.get("acceleratorpools")["items"] if p["spec"]["accelerator"] == "cpu")
    allowed = sorted({*pool["spec"].get("tenants", []), RIVAL})
    cluster.kube(
        "patch", "acceleratorpool", pool["metadata"]["name"], "--type=merge",
        "-p", json.dumps({"spec": {"tenants": allowed}}),
    )  # fmt: skip
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "stdlib", "namespace": RIVAL},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    job = small_job("umbras-secret-plan", steps=100_000)
    job["metadata"]["namespace"] = RIVAL
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": RIVAL}},
        {
            "apiVersion": "busbar.dev/v1alpha1",
            "kind": "Tenant",
            "metadata": {"name": RIVAL},
            "spec": {
                "namespaces": [RIVAL],
                "quota": [{"accelerator": "cpu", "guaranteed": 1}],
                "onDelete": "stop",  # its job still runs at the end
            },
        },
        claim,
        job,
    ]
    for item in objects:
        cluster.kube("apply", "-f", "-", stdin=json.dumps(item))

    def running() -> Any:
        pods = cluster.get("-n", RIVAL, "pods", "-l", "busbar.dev/job=umbras-secret-plan")["items"]
        return next((p for p in pods if p["status"].get("phase") == "Running"), None)

    found: dict[str, Any] = cluster.wait("the rival's pod", running, 120)
    return found


def targets(cluster: Cluster, pod: dict[str, Any]) -> list[tuple[str, str]]:
    """Every port that a pod could call, with every path whose answer contains somebody's data."""
    victim = f"http://{pod['status']['podIP']}:9400"
    found = [(m, victim + p) for m, p in (("GET", "/status"), ("GET", "/metrics"), ("POST", "/checkpoint"))]
    api = f"http://busbar-api.{SYSTEM}:8080"
    found += [
        ("GET", api + "/api/v1alpha1" + path)
        for path in (
            "/trainingjobs",
            f"/namespaces/{RIVAL}/trainingjobs",
            "/tenants",
            "/pools",
            "/usage",
            "/audit",
            "/tokens",
        )
    ]
    found += [("GET", api + path) for path in ("/", "/jobs", "/pools", "/metrics")]
    for service in cluster.get("-n", SYSTEM, "services")["items"]:
        name = service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            base = f"http://{name}.{SYSTEM}:{port['port']}"
            paths = (
                "/snapshot",
                "/routes",
                "/demand",
                "/metrics",
                "/v1/models",
                "/internal/keys/lookup",
                "/internal/usage",
            )
            found += [("GET", base + path) for path in paths]
            found += [
                ("POST", base + path)
                for path in ("/snapshot", "/internal/keys/lookup", "/internal/usage", "/v1/completions")
            ]
    operator = cluster.get("-n", SYSTEM, "pods", "-l", "app.kubernetes.io/component=operator")["items"][0]
    found += [
        ("GET", f"http://{operator['status']['podIP']}:{port}{path}")
        for port in (8090, 8093)
        for path in ("/metrics", "/snapshot")
    ]
    found += [("GET", f"https://kubernetes.default/apis/busbar.dev/v1alpha1/namespaces/{RIVAL}/trainingjobs")]
    return found


def test_a_pod_learns_nothing_of_another_tenant_from_any_port(cluster: Cluster) -> None:
    pod = make_rival(cluster)
    deployment = cluster.get("-n", SYSTEM, "deployment", "busbar-operator")
    variables = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    image = next(v["value"] for v in variables if v["name"] == "BUSBAR_WORKLOADS_IMAGE")
    probe = {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "curious", "namespace": "demo"},
        "spec": {
            "template": {
                "image": image,
                "port": True,  # so that it has bearers of its own to try
                "command": ["python", "-c", PROBE],
                "env": [{"name": "TARGETS", "value": json.dumps(targets(cluster, pod))}],
            },
            "accelerators": ["cpu"],
            "shape": {"acceleratorsPerPod": 1, "memory": "256Mi"},
            "retryLimit": 0,
        },
    }
    cluster.kube("apply", "-f", "-", stdin=json.dumps(probe))
    cluster.wait(
        "the probe's end", lambda: cluster.phase("trainingjob", "curious") in ("Succeeded", "Failed"), 240
    )
    log = cluster.kube("-n", "demo", "logs", "-l", "busbar.dev/job=curious", "--tail=-1")
    answers = [json.loads(line[7:]) for line in log.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) >= 60, log[-800:]
    told = [a for a in answers if RIVAL in a[4]]
    assert not told, told[:3]
    victim = [a for a in answers if pod["status"]["podIP"] in a[1]]
    assert {a[3] for a in victim} <= {0, 401, 403}, victim
    assert len(victim) == 9
    for method, url, who, status, body in answers:
        if any(p in url for p in ("/snapshot", "/routes", "/demand", "/internal/", "/api/v1alpha1")):
            assert status in (0, 401, 403, 404, 405), (method, url, who, status, body[:200])
    cluster.kube("-n", "demo", "delete", "trainingjob", "curious")
    cluster.kube("delete", "tenant", RIVAL)
    cluster.kube("delete", "namespace", RIVAL, "--wait=false")
