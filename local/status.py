"""The processes of an instance, their resource use, and its addresses."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from busbar.local import cgroups, cluster
from busbar.local.build import location
from busbar.local.errors import StartError
from busbar.local.install import NAMESPACE
from busbar.local.instance import Instance, running
from busbar.local.kubectl import Kubectl

MIB = 1024 * 1024
CONTROL_SIDE = ("busbar-operator", "busbar-api", "busbar-gateway")


@dataclass(frozen=True)
class Usage:
    """One process or pod: memory in MiB, processor time since its start in seconds."""

    name: str
    ready: bool
    restarts: int
    memory_mib: float
    cpu_seconds: float
    log: str = ""


def collect(instance: Instance) -> dict[str, Any]:
    """All output of ``busbar status``, ready for JSON."""
    found = running(instance.name)
    facts: dict[str, Any] = {
        "name": instance.name,
        "running": found is not None,
        "startedAt": found.started_at if found else None,
        "supervisorPid": found.pid if found else None,
        "portalUrl": portal_url(instance),
        "gatewayUrl": gateway_url(instance),
        "apiServerUrl": instance.addresses.api_url,
        "kubeconfig": str(instance.kubeconfig),
        "kubectl": str(location("kubectl")),
        "helm": str(location("helm")),
        "data": str(instance.folder),
        "logs": cluster.logs(instance),
    }
    if found is None:
        return facts
    facts["parts"] = [asdict(part) for part in parts(instance, found.pid)]
    system, others = pods(instance)
    facts["platform"] = [asdict(pod) for pod in system]
    control = [p for p in system if p.name.startswith(CONTROL_SIDE)]
    facts["controlSideMemoryMib"] = round(sum(pod.memory_mib for pod in control), 1)
    facts["kubernetesMemoryMib"] = round(sum(part["memory_mib"] for part in facts["parts"]), 1)
    facts["otherPods"] = others
    return facts


def portal_url(instance: Instance) -> str:
    """The portal's URL for a browser."""
    return f"http://127.0.0.1:{instance.portal_port}"


def gateway_url(instance: Instance) -> str:
    """The gateway's URL for an OpenAI client, without the suffix /v1."""
    return f"http://127.0.0.1:{instance.gateway_port}"


def parts(instance: Instance, supervisor: int) -> list[Usage]:
    """The supervisor's parts with their resident memory."""
    host_pids = pids_inside(supervisor)
    found = [_process("supervisor", {"pid": 1, "ready": True, "restarts": 0}, host_pids)]
    for name, told in cluster.state(instance).items():
        found.append(_process(name, told, host_pids))
    return found


def _process(name: str, told: dict[str, Any], host_pids: dict[int, int]) -> Usage:
    pid = host_pids.get(told["pid"]) if told["pid"] else None
    memory, cpu = 0, 0.0
    if pid is not None:
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    log = str(told.get("log", ""))
    return Usage(name, bool(told["ready"]), int(told["restarts"]), round(memory / MIB, 1), round(cpu, 1), log)


def pids_inside(supervisor: int) -> dict[int, int]:
    """Process id inside the instance → process id on the machine."""
    inside = os.readlink(f"/proc/{supervisor}/ns/pid")
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            if os.readlink(entry / "ns" / "pid") == inside:
                line = next(
                    li for li in (entry / "status").read_text().splitlines() if li.startswith("NSpid")
                )
                found[int(line.split()[-1])] = int(entry.name)
    return found


def pods(instance: Instance) -> tuple[list[Usage], int]:
    """The platform's pods with their working set, and how many other pods run on the real node."""
    kubectl = Kubectl(instance.kubeconfig)
    try:
        items = kubectl.get("pods", "-A", f"--field-selector=spec.nodeName={instance.node_name}")["items"]
    except StartError:
        return [], 0
    folders = pod_folders(instance)
    found = []
    for item in items:
        if item["metadata"]["namespace"] != NAMESPACE:
            continue
        statuses = item["status"].get("containerStatuses", [])
        folder = folders.get(item["metadata"]["uid"])
        memory = cgroups.working_set(folder) if folder else None
        found.append(
            Usage(
                item["metadata"]["name"],
                bool(statuses) and all(s["ready"] for s in statuses),
                sum(s["restartCount"] for s in statuses),
                round((memory or 0) / MIB, 1),
                round(cgroups.cpu_seconds(folder) if folder else 0.0, 1),
            )
        )
    return found, sum(
        i["metadata"]["namespace"] != NAMESPACE and i["status"]["phase"] == "Running" for i in items
    )


def pod_folders(instance: Instance) -> dict[str, Path]:
    """Pod uid → its cgroup with the memory files."""
    root = cgroups.memory_folder(f"{instance.cgroup}/kubepods")
    return {path.name.removeprefix("pod"): path for path in [*root.glob("pod*"), *root.glob("*/pod*")]}


def render(facts: dict[str, Any]) -> str:
    """The same as text."""
    state = (
        f"running since {facts['startedAt']}" if facts["running"] else "not running (`busbar up` starts it)"
    )
    lines = [f"instance {facts['name']}: {state}"]
    if facts["running"]:
        lines.append("")
        lines.append(f"{'part':<34} {'ready':<6} {'restarts':>8} {'memory':>10} {'cpu time':>10}")
        for usage in [*facts["parts"], *facts["platform"]]:
            ready = "yes" if usage["ready"] else "no"
            lines.append(
                f"{usage['name']:<34} {ready:<6} {usage['restarts']:>8} {usage['memory_mib']:>6.0f} MiB "
                f"{usage['cpu_seconds']:>8.0f} s"
            )
        lines.append("")
        lines.append(f"Kubernetes itself: {facts['kubernetesMemoryMib']:.0f} MiB")
        lines.append(f"control side (operator, API, gateway): {facts['controlSideMemoryMib']:.0f} MiB of 400")
        lines.append(f"other pods on the real node: {facts['otherPods']}")
    lines += [
        "",
        f"portal      {facts['portalUrl']}",
        f"models      {facts['gatewayUrl']}/v1",
        f"kubernetes  export KUBECONFIG={facts['kubeconfig']}",
        f"kubectl     {facts['kubectl']}",
        f"logs        {facts['logs']}",
    ]
    return "\n".join(lines)
