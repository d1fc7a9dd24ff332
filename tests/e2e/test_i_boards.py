"""Which pods hold which boards, by a real kubelet: a device plugin offers boards that do not exist."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.device_plugin import DevicePlugin
from tests.e2e.instance import ROOT, Cluster

from busbar.operator.agent.board_pods import BoardPods
from busbar.operator.agent.pod_resources import PodResources

pytestmark = pytest.mark.node

RESOURCE, KUBELET, SYSTEM = "example.com/board", "/run/busbar/kubelet", "busbar-system"
BOARDS = tuple(f"GPU-{i}0000000-e2e0-0000-0000-000000000000" for i in range(4))
ASK = """
import json, os, pathlib
from busbar.operator.agent.pod_resources import PodResources
asked = PodResources(pathlib.Path(os.environ["BUSBAR_AGENT_POD_RESOURCES_SOCKET"]))
print(json.dumps({device.id: device.pod for device in asked.devices()}))
"""


def node_of(cluster: Cluster) -> str:
    """The one node that is real."""
    nodes = cluster.get("nodes")["items"]
    names = [n["metadata"]["name"] for n in nodes if "kwok" not in n["status"]["nodeInfo"]["kubeletVersion"]]
    assert len(names) == 1, names
    return str(names[0])


def allocatable(cluster: Cluster, node: str) -> str:
    found = cluster.get("node", node)["status"]["allocatable"]
    return str(found.get(RESOURCE, "0"))


def image_of(cluster: Cluster) -> str:
    """The platform's."""
    operator = cluster.get("-n", SYSTEM, "deployment", "busbar-operator")
    return str(operator["spec"]["template"]["spec"]["containers"][0]["image"])


@contextmanager
def pod(cluster: Cluster, namespace: str, name: str, spec: Mapping[str, Any]) -> Iterator[None]:
    """A pod on the real node; then it is gone."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            **spec,
            "nodeName": node_of(cluster),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
        },
    }
    cluster.kube("apply", "-f", "-", stdin=json.dumps(manifest))
    try:
        yield
    finally:
        cluster.kube("-n", namespace, "delete", "pod", name, "--wait=true", "--ignore-not-found")


def sleeper(cluster: Cluster, boards: int) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": image_of(cluster),
        "command": ["sleep", "600"],
        "resources": {"limits": {RESOURCE: str(boards)}},
    }
    return {"containers": [container]}


def asking(cluster: Cluster) -> dict[str, Any]:
    """The agent's pod as the chart makes it, that says once what the kubelet says."""
    values = ("power.agent.enabled=true", f"power.agent.kubeletDir={KUBELET}")
    sets = [part for value in values for part in ("--set", value)]
    chart = str(ROOT / "charts" / "busbar")
    rendered = cluster.run(
        cluster.helm, "template", "busbar", chart, "-n", SYSTEM, "--show-only", "templates/agent.yaml", *sets
    )
    daemons = next(d for d in yaml.safe_load_all(rendered) if d and d["kind"] == "DaemonSet")
    spec: dict[str, Any] = daemons["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    for name in ("livenessProbe", "readinessProbe"):
        del container[name]
    container |= {"image": image_of(cluster), "command": ["python", "-c", ASK]}
    return {**spec, "serviceAccountName": "default"}


def counts(found: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Boards by pod; each board has one pod at most."""
    assert all(len(pods) <= 1 for pods in found.values()), found
    held = [pods[0] for pods in found.values() if pods]
    return {pod: held.count(pod) for pod in held}


def test_the_kubelet_says_which_pods_hold_which_boards(cluster: Cluster) -> None:
    root, node = Path(f"/proc/{cluster.supervisor()}/root"), node_of(cluster)
    kubelet = PodResources(root / KUBELET.lstrip("/") / "pod-resources" / "kubelet.sock")
    boards = BoardPods(kubelet, lambda: BOARDS, lambda _: None, time.monotonic)

    def told(expected: Mapping[str, int]) -> bool:
        boards.ask()
        return len(boards.now()) == len(BOARDS) and counts(boards.now()) == expected

    with DevicePlugin(RESOURCE, BOARDS).on(root):
        cluster.wait("boards of the node", lambda: allocatable(cluster, node) == "4", 60)
        cluster.wait("boards that nobody holds", lambda: told({}), 60)
        with pod(cluster, "default", "one", sleeper(cluster, 1)):
            with pod(cluster, "default", "two", sleeper(cluster, 2)):
                cluster.wait("their boards", lambda: told({"default/one": 1, "default/two": 2}), 60)
                held = {uuid: pods[0] for uuid, pods in boards.now().items() if pods}
                with pod(cluster, SYSTEM, "asks", asking(cluster)):
                    said = cluster.wait(
                        "what the agent's pod says",
                        lambda: cluster.kube("-n", SYSTEM, "logs", "asks").strip(),
                        60,
                    )
                    assert json.loads(said) == held
            cluster.wait("the boards that are free", lambda: told({"default/one": 1}), 60)
    kubelet.close()
    cluster.wait("no more boards", lambda: allocatable(cluster, node) == "0", 60)
