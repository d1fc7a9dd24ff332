"""The real one-machine cluster: it starts and stops and leaves nothing behind; data stays until it is purged.

Each test uses instance names of its own, so an instance that is in use is not disturbed.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.local.inventory import processes, take

from busbar.local import cluster, config, packages, preflight, simulated, teardown
from busbar.local.images import builder, recipe
from busbar.local.instance import Instance, load_or_create, port_is_free, running, start_ticks
from busbar.local.kubectl import Kubectl, Object, wait_for

pytestmark = pytest.mark.node
FIRST, SHARED = "inventory-one", "inventory-two"
QUICK_S = 60
PATIENCE_S = (
    120  # the limit for waits that may be long on a busy machine; they end as soon as the condition is met
)


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    preflight.check(FIRST)
    packages.ensure()
    builder.build_images()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    teardown.down(FIRST, purge=True)


@pytest.fixture(scope="module")
def shared(prepared: None) -> Iterator[tuple[Instance, Kubectl]]:
    """One instance for the tests that only read."""
    yield start(SHARED)
    teardown.down(SHARED, purge=True)


def start(name: str, *, simulate: bool = False) -> tuple[Instance, Kubectl]:
    instance = load_or_create(name)
    return instance, cluster.start(instance, simulate=simulate, with_traffic=False)


def volume_and_pod(script: str) -> list[Object]:
    """A restricted pod with a claim of the default StorageClass, as the platform makes them."""
    container = {
        "name": "main",
        "image": f"{config.REGISTRY}/busbar-base:{recipe.base_tag()}",
        "command": ["/usr/bin/tini", "--", "sh", "-c", script],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "token", "mountPath": "/token"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"limits": {"memory": "64Mi"}, "requests": {"cpu": "5m"}},
    }
    token = {
        "serviceAccountToken": {"audience": "busbar-operator", "path": "token", "expirationSeconds": 600}
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": recipe.USER,
            "runAsGroup": recipe.USER,
            "fsGroup": recipe.USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [simulated.tolerating(simulated.POOL_TAINT)],
        "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "token", "projected": {"sources": [token]}},
        ],
    }
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Mi"}}}
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "t", "labels": restricted}},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": "t"},
            "spec": claim,
        },
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "t"}, "spec": spec},
    ]


def phase(kubectl: Kubectl) -> str:
    return str(kubectl.get("-n", "t", "pod", "p").get("status", {}).get("phase"))


def run_pod(kubectl: Kubectl, script: str, until: str) -> None:
    namespace, claim, pod = volume_and_pod(script)
    kubectl.apply([namespace, claim])

    def has_account() -> bool:
        return bool(kubectl.get("-n", "t", "serviceaccount", "default", "--ignore-not-found"))

    wait_for("the namespace's service account", has_account, PATIENCE_S, "kube-controller-manager.log")
    kubectl.run("-n", "t", "delete", "pod", "p", "--ignore-not-found")
    kubectl.apply([pod])
    wait_for(f"the pod's phase {until}", lambda: phase(kubectl) == until, PATIENCE_S, "kubelet.log")


def alive(found: dict[int, str]) -> dict[int, str]:
    return {pid: command for pid, command in found.items() if start_ticks(pid) is not None}


def api_server(instance: Instance) -> dict[str, Any]:
    """The supervisor's last state of the API server."""
    return cluster.state(instance)["kube-apiserver"]


def supervisor(instance: Instance) -> int:
    found = running(instance.name)
    assert found is not None
    return found.pid


def test_down_leaves_nothing_but_the_data_and_purge_deletes_that_too() -> None:
    before = take(FIRST)
    instance, kubectl = start(FIRST, simulate=True)
    kubectl.apply(simulated.nodes({"A100": 0, "L4": 0, "V100": 0}))
    run_pod(kubectl, "echo kept > /data/file; sleep 1000", "Running")
    ours = processes(supervisor(instance))
    assert len(ours) > 10
    assert take(FIRST).left_behind(before), "the inventory sees nothing of a running instance"

    teardown.down(FIRST, purge=False)
    assert alive(ours) == {}
    assert take(FIRST).left_behind(before) == {}

    began = time.monotonic()
    instance, kubectl = start(FIRST)
    assert time.monotonic() - began < QUICK_S
    run_pod(kubectl, "cat /data/file", "Succeeded")
    assert kubectl.run("-n", "t", "logs", "p") == "kept\n"
    teardown.down(FIRST, purge=True)
    assert not instance.folder.exists()
    assert take(FIRST).left_behind(before) == {}


def test_after_a_kill_9_of_the_supervisor_everything_dies_and_down_removes_the_rest() -> None:
    before = take(FIRST)
    instance, kubectl = start(FIRST)
    run_pod(kubectl, "sleep 1000", "Running")
    ours = processes(supervisor(instance))
    os.kill(supervisor(instance), signal.SIGKILL)
    wait_for("the end of its processes", lambda: not alive(ours), PATIENCE_S, "/proc")
    assert running(FIRST) is None

    teardown.down(FIRST, purge=False)
    assert take(FIRST).left_behind(before) == {}

    _, kubectl = start(FIRST)
    assert kubectl.get("ns", "t")["metadata"]["name"] == "t"


def test_up_after_a_crash_does_not_wait_for_the_veth_that_open_connections_keep() -> None:
    before = take(FIRST)
    instance = load_or_create(FIRST)
    # The kernel keeps a veth for as long as it likes; this one stays for ever.
    subprocess.run(
        ["ip", "link", "add", instance.addresses.host_device, "type", "veth", "peer", "name", "kept0"],
        check=True,
    )
    _, kubectl = start(FIRST)
    assert kubectl.answers()
    teardown.down(FIRST, purge=True)
    assert take(FIRST).left_behind(before) == {}


def test_a_part_that_dies_is_started_again(shared: tuple[Instance, Kubectl]) -> None:
    instance, kubectl = shared
    before = api_server(instance)
    pid = next(p for p, command in processes(supervisor(instance)).items() if "/kube-apiserver " in command)
    os.kill(pid, signal.SIGKILL)
    wait_for(
        "the part's restart",
        lambda: api_server(instance)["pid"] not in (None, before["pid"]),
        PATIENCE_S,
        "logs",
    )
    assert api_server(instance)["restarts"] > before["restarts"]
    wait_for("the API server's return", kubectl.answers, PATIENCE_S, "logs")


def test_two_instances_do_not_disturb_each_other(shared: tuple[Instance, Kubectl]) -> None:
    one, kubectl_one = start(FIRST)
    two, kubectl_two = shared
    assert not one.addresses.network.overlaps(two.addresses.network)
    assert len({one.portal_port, one.gateway_port, two.portal_port, two.gateway_port}) == 4
    kubectl_one.run("create", "namespace", "only-in-one")
    assert kubectl_two.get("ns", "only-in-one", "--ignore-not-found") == {}

    serving = api_server(two)
    teardown.down(FIRST, purge=True)
    wait_for("the other's answer", kubectl_two.answers, PATIENCE_S, "logs")  # its etcd shares the busy disk
    assert api_server(two) == serving
    assert port_is_free(one.portal_port)
    assert not port_is_free(two.portal_port)


def test_a_pod_gets_its_limits_names_token_and_a_shell(shared: tuple[Instance, Kubectl]) -> None:
    _, kubectl = shared
    run_pod(kubectl, "sleep 1000", "Running")

    def inside(script: str) -> str:
        return kubectl.run("-n", "t", "exec", "p", "--", "sh", "-c", f"{script}; true").strip()

    assert inside("id -u; id -g").split() == [str(recipe.USER), str(recipe.USER)]
    assert "Read-only" in inside("touch /etc/x 2>&1")
    assert inside("touch /data/x && echo written") == "written"
    name = "kubernetes.default.svc.cluster.local"
    wait_for("the name", lambda: inside(f"getent hosts {name}").startswith("10."), PATIENCE_S, "coredns.log")
    assert (
        inside("grep -c . /proc/self/status >/dev/null; awk '/Seccomp:/ {print $2}' /proc/self/status") == "2"
    )
    assert inside("python3 -c 'bytearray(200 << 20)' 2>/dev/null; echo $?").endswith("137")
    token = inside("cat /token/token")
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
    asked = {**review, "spec": {"token": token, "audiences": ["busbar-operator"]}}
    answer = json.loads(kubectl.run("create", "-o", "json", "-f", "-", stdin=json.dumps(asked)))
    assert answer["status"]["authenticated"] is True
    wrong = {**review, "spec": {"token": token, "audiences": ["somebody-else"]}}
    answer = json.loads(kubectl.run("create", "-o", "json", "-f", "-", stdin=json.dumps(wrong)))
    assert not answer["status"].get("authenticated")


def test_nobody_reaches_kubelet_etcd_or_api_server_without_a_certificate(
    shared: tuple[Instance, Kubectl],
) -> None:
    instance, _ = shared
    node = instance.addresses.node

    def status(url: str) -> int | None:
        """The HTTP status of an answer without a client certificate; None where no process listens."""
        anybody = ssl.create_default_context()
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        try:
            with urllib.request.urlopen(url, timeout=30, context=anybody) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code
        except urllib.error.URLError:
            return None

    assert status(f"https://{node}:10250/pods") == 401
    assert status(f"https://{node}:6443/api") == 401
    assert status(f"https://{node}:2379/version") is None, "etcd answers outside loopback"
