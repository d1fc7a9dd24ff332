"""The simulated nodes, pools and tenants, as plain objects.

KWOK simulates the nodes' kubelets; the *stages* below define the phases of a simulated node and pod.  A pod on such a
node runs at once and ends after the seconds in the annotation ``simulation/seconds``; no program connects to it. The
nodes' taint, which only the simulated pools tolerate, keeps real pods away, so the platform needs no special case. The
machine's own node is the demo's pool of cores and has a taint too, `POOL_TAINT`: what Busbar places there, the platform
and the helpers of volumes tolerate it; a plain pod does not, so it takes no cores past the queue.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from busbar.local.instance import Instance
from busbar.local.kubectl import Object

DURATION = "simulation/seconds"
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
POOL_TAINT = {"key": "busbar.dev/pool", "value": "cpu", "effect": "NoSchedule"}
POWER = "sim.busbar.dev/power"
RACK = "topology.kubernetes.io/rack"
FEED_NODES = ("sim-feed-0", "sim-feed-1")
"""Made by the demo (examples/power-feed.yaml)."""
DEMO_USER = "demo-user"


@dataclass(frozen=True)
class Model:
    """One type of simulated node."""

    accelerator: str
    nodes: int
    per_node: int
    product: str  # the label of NVIDIA's feature discovery
    memory_gib: int
    cpu: int
    host_memory_gib: int
    price_per_hour: float
    tenants: tuple[str, ...]


MODELS = (
    Model("H100", 4, 8, "NVIDIA-H100-80GB-HBM3", 80, 192, 2048, 3.9, ("research", "language")),
    Model(
        "A100",
        8,
        8,
        "NVIDIA-A100-SXM4-80GB",
        80,
        128,
        1024,
        2.1,
        ("research", "language", "vision"),
    ),
    Model("L4", 8, 4, "NVIDIA-L4", 24, 48, 192, 0.7, ("vision", "speech", "language")),
    Model("V100", 4, 4, "Tesla-V100-SXM2-32GB", 32, 64, 384, 0.9, ("speech", "vision")),
)
# Simulated tenants: weight, and their guarantee of each accelerator.
TENANTS: dict[str, tuple[float, dict[str, int]]] = {
    "research": (2.0, {"H100": 16, "A100": 24}),
    "language": (2.0, {"H100": 16, "A100": 16, "L4": 8}),
    "vision": (1.0, {"A100": 24, "L4": 12, "V100": 4}),
    "speech": (1.0, {"L4": 12, "V100": 12}),
}


def stages() -> str:
    """KWOK's configuration: the stages of simulated nodes and pods (a stream of JSON documents, which is YAML)."""
    return "\n---\n".join(json.dumps(stage, indent=2) for stage in (*_node_stages(), *_pod_stages())) + "\n"


def _stage(name: str, kind: str, when: list[Object], after: Object, delay: Object | None = None) -> Object:
    spec: Object = {
        "resourceRef": {"apiGroup": "v1", "kind": kind},
        "selector": {"matchExpressions": when},
        "next": after,
    }
    if delay:
        spec["delay"] = delay
    return {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": name}, "spec": spec}


_READY = '.status.conditions.[] | select( .type == "Ready" ) | .status'
_CONDITIONS = """
conditions:
{{ range NodeConditions }}
- {type: {{ .type | Quote }}, status: {{ .status | Quote }}, reason: {{ .reason | Quote }}, message: {{ .message | Quote }}, lastHeartbeatTime: {{ Now | Quote }}, lastTransitionTime: {{ $.metadata.creationTimestamp | Quote }}}
{{ end }}
"""
_SIZE = """
  cpu: {{ index .metadata.annotations "sim.busbar.dev/cpu" | Quote }}
  memory: {{ index .metadata.annotations "sim.busbar.dev/memory" | Quote }}
  ephemeral-storage: 1Ti
  pods: "110"
  nvidia.com/gpu: {{ index .metadata.labels "nvidia.com/gpu.count" | Quote }}
"""
_NODE = f"""{_CONDITIONS}
addresses:
- {{type: InternalIP, address: {{{{ NodeIP | Quote }}}}}}
- {{type: Hostname, address: {{{{ NodeName | Quote }}}}}}
allocatable:{_SIZE}
capacity:{_SIZE}
nodeInfo:
  architecture: amd64
  operatingSystem: linux
  kubeletVersion: {{{{ printf "kwok-%s" Version }}}}
  kubeProxyVersion: {{{{ printf "kwok-%s" Version }}}}
  containerRuntimeVersion: {{{{ printf "kwok-%s" Version }}}}
  osImage: simulated
  kernelVersion: simulated
  bootID: ""
  machineID: ""
  systemUUID: ""
phase: Running
"""
_CONTAINERS = """
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  restartCount: 0
  ready: %s
  state: %s
{{ end }}
"""
_RUNNING = (
    """
phase: Running
startTime: {{ Now | Quote }}
hostIP: {{ NodeIP | Quote }}
podIP: {{ PodIPWith .spec.nodeName false (or .metadata.uid "") (or .metadata.name "") (or .metadata.namespace "") | Quote }}
conditions:
- {type: Initialized, status: "True", lastTransitionTime: {{ Now | Quote }}}
- {type: ContainersReady, status: "True", lastTransitionTime: {{ Now | Quote }}}
- {type: Ready, status: "True", lastTransitionTime: {{ Now | Quote }}}
containerStatuses:"""
    + _CONTAINERS % ("true", "{running: {startedAt: {{ Now | Quote }}}}")
)
_ENDED = (
    """
phase: Succeeded
conditions:
- {type: ContainersReady, status: "False", reason: PodCompleted, lastTransitionTime: {{ Now | Quote }}}
- {type: Ready, status: "False", reason: PodCompleted, lastTransitionTime: {{ Now | Quote }}}
containerStatuses:"""
    + _CONTAINERS
    % (
        "false",
        "{terminated: {exitCode: 0, reason: Completed, startedAt: {{ $.status.startTime | Quote }}, "
        "finishedAt: {{ Now | Quote }}}}",
    )
)


def _node_stages() -> list[Object]:
    is_new: list[Object] = [{"key": _READY, "operator": "NotIn", "values": ["True"]}]
    is_ready: list[Object] = [{"key": _READY, "operator": "In", "values": ["True"]}]
    beat = {"durationMilliseconds": 240_000, "jitterDurationMilliseconds": 300_000}
    return [
        _stage("node-appears", "Node", is_new, {"statusTemplate": _NODE}),
        _stage("node-lives", "Node", is_ready, {"statusTemplate": _CONDITIONS}, beat),
    ]


def _pod_stages() -> list[Object]:
    lives: Object = {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}
    pending: list[Object] = [lives, {"key": ".status.phase", "operator": "In", "values": ["Pending"]}]
    ending: list[Object] = [
        lives,
        {"key": ".status.phase", "operator": "In", "values": ["Running"]},
        {"key": f'.metadata.annotations["{DURATION}"]', "operator": "Exists"},
    ]
    delay = {
        "durationMilliseconds": 0,
        "durationFrom": {"expressionFrom": f'.metadata.annotations["{DURATION}"] + "s"'},
    }
    gone = [{"key": ".metadata.deletionTimestamp", "operator": "Exists"}]
    starting = {"durationMilliseconds": 1500, "jitterDurationMilliseconds": 3000}
    return [
        _stage("pod-starts", "Pod", pending, {"statusTemplate": _RUNNING}, starting),
        _stage("pod-ends", "Pod", ending, {"statusTemplate": _ENDED}, delay),
        _stage("pod-goes", "Pod", gone, {"finalizers": {"empty": True}, "delete": True}),
    ]


def nodes(counts: dict[str, int]) -> list[Object]:
    """The simulated nodes; ``counts`` overrides how many there are of an accelerator type."""
    made = []
    for model in MODELS:
        for index in range(counts.get(model.accelerator, model.nodes)):
            name = f"sim-{model.accelerator.lower()}-{index}"
            labels = {
                "type": "kwok",
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "node.kubernetes.io/instance-type": f"simulated-{model.per_node}x{model.accelerator}",
                RACK: f"rack-{index // 4}",
                "nvidia.com/gpu.product": model.product,
                "nvidia.com/gpu.count": str(model.per_node),
                "nvidia.com/gpu.memory": str(model.memory_gib * 1024),
                "busbar.dev/accelerator": model.accelerator,
            }
            if model.accelerator == "A100":
                labels[POWER] = "true"
            annotations = {
                "kwok.x-k8s.io/node": "fake",
                "sim.busbar.dev/cpu": str(model.cpu),
                "sim.busbar.dev/memory": f"{model.host_memory_gib}Gi",
            }
            metadata = {"name": name, "labels": labels, "annotations": annotations}
            made.append(
                {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [TAINT]}}
            )
    return made


def simulated_power() -> list[str]:
    """The nodes whose power is played: those of eight A100, whose boards are the ones that the player knows."""
    found = [node["metadata"]["name"] for node in nodes({}) if POWER in node["metadata"]["labels"]]
    return [*found, *FEED_NODES]


def feeds() -> list[Object]:
    """The feeds of the simulated A100: a hall, and its racks below. They observe, so jobs are placed as without them."""
    racks = sorted(
        {node["metadata"]["labels"][RACK] for node in nodes({}) if POWER in node["metadata"]["labels"]}
    )
    return [
        _busbar("PowerDomain", "sim-hall", {"budgetWatts": 36000}),
        *(
            _busbar(
                "PowerDomain",
                f"sim-{rack}",
                {"parent": "sim-hall", "budgetWatts": 18000, "nodeSelector": {RACK: rack, POWER: "true"}},
            )
            for rack in racks
        ),
    ]


def tolerating(taint: dict[str, str]) -> Object:
    """A toleration of exactly this taint."""
    return {**taint, "operator": "Equal"}


def _busbar(kind: str, name: str, spec: Object) -> Object:
    return {"apiVersion": "busbar.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def pools() -> list[Object]:
    """The simulated pools."""
    return [
        _busbar(
            "AcceleratorPool",
            model.accelerator.lower(),
            {
                "accelerator": model.accelerator,
                "resourceName": "nvidia.com/gpu",
                "nodeSelector": {"busbar.dev/accelerator": model.accelerator},
                "tolerations": [tolerating(TAINT)],
                "tenants": list(model.tenants),
                "pricePerHour": model.price_per_hour,
                "memoryGib": model.memory_gib,
            },
        )
        for model in MODELS
    ]


def tenants() -> list[Object]:
    """The simulated tenants with their namespaces."""
    made: list[Object] = []
    for name, (weight, guaranteed) in TENANTS.items():
        quota = [
            {"accelerator": accelerator, "guaranteed": amount, "borrowable": 2 * amount}
            for accelerator, amount in guaranteed.items()
        ]
        made.append({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace(name)}})
        spec = {
            "displayName": f"{name.capitalize()} (simulated)",
            "organisation": "simulated",
            "namespaces": [namespace(name)],
            "weight": weight,
            "quota": quota,
        }
        made.append(_busbar("Tenant", name, spec))
    return made


def namespace(tenant: str) -> str:
    """The one namespace of a simulated tenant."""
    return f"sim-{tenant}"


def demo(instance: Instance | None) -> list[Object]:
    """The demo's tenant, and the pool of real CPUs that it owns.

    Half a CPU is the pool's unit: two training jobs and two replicas fit beside the platform on two cores.
    """
    pool = {
        "accelerator": "cpu",
        "resourceName": "cpu",
        "unit": "500m",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tenants": ["demo"],
        "pricePerHour": 0.02,
    }
    if instance is not None:  # nodes of somebody else's cluster keep the taints that they have
        pool |= {"nodeSelector": {"busbar.dev/accelerator": "cpu"}, "tolerations": [tolerating(POOL_TAINT)]}
    tenant = {
        "displayName": "Demo",
        "namespaces": ["demo"],
        "members": [{"subject": {"kind": "User", "name": DEMO_USER}, "role": "admin"}],
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "demo"}},
        _busbar("AcceleratorPool", "cpu", pool),
        _busbar("Tenant", "demo", tenant),
    ]
