"""Install the platform as on any cluster: ``helm upgrade --install`` of the two charts."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busbar.local.build import binary
from busbar.local.errors import StartError
from busbar.local.images.recipe import package_folder
from busbar.local.kubectl import Kubectl, Object, repeated
from busbar.local.parts import CLIENTS
from busbar.local.progress import say, step
from busbar.local.simulated import POOL_TAINT, simulated_power, tolerating

NAMESPACE = "busbar-system"
RELEASE = "busbar"
DEPLOYMENTS = ("busbar-operator", "busbar-api", "busbar-gateway")
ROLLOUT_TIMEOUT_S = 240
KINDS_PATIENCE_S = 60
NOT_FOUND_YET = ("failed to configure policy", "no matches for kind", "could not find the requested resource")


@dataclass(frozen=True)
class Helm:
    """helm against one kubeconfig (none: the caller's own)."""

    kubeconfig: Path | None

    def run(self, *arguments: str) -> str:
        """Run helm.

        Raises:
            StartError: it failed; contains its error output.
        """
        environment = dict(os.environ)
        if self.kubeconfig is not None:
            environment["KUBECONFIG"] = str(self.kubeconfig)
        done = subprocess.run(
            [str(binary("helm")), *arguments], env=environment, text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise StartError(f"helm {' '.join(arguments)[:160]}: {done.stderr.strip()[-2000:]}")
        return done.stdout


def charts() -> tuple[Path, Path] | None:
    """The folders of the two charts, or none where they are not installed."""
    try:
        root = package_folder("charts")
    except FileNotFoundError:
        return None
    crds, platform = root / "busbar-crds", root / "busbar"
    return (crds, platform) if (crds / "Chart.yaml").exists() and (platform / "Chart.yaml").exists() else None


def install(helm: Helm, kubectl: Kubectl, values: dict[str, Any], objects: list[Object]) -> bool:
    """Install or upgrade both charts and wait for the platform; false when there are no charts.

    ``objects`` of our kinds (pools, tenants) are applied as soon as their types exist.

    Raises:
        StartError: helm refused, or the platform did not become ready.
    """
    found = charts()
    if found is None:
        say("no charts in this installation of Busbar: the cluster runs without the platform")
        return False
    crds, platform = found
    with step("helm: resource types"):
        upgrade(helm, kubectl, "busbar-crds", str(crds), "--create-namespace")
    with step("pools and tenants"):
        apply_patiently(kubectl, objects)
    with step("helm: the platform"), tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        upgrade(helm, kubectl, RELEASE, str(platform), "-f", file.name)
    for name in DEPLOYMENTS:
        with step(f"roll out {name}"):
            roll_out(kubectl, name)
    return True


def apply_patiently(kubectl: Kubectl, objects: list[Object], pause_s: float = 1.0) -> None:
    """Apply objects of our kinds; repeat while the API server does not serve those kinds yet.

    It serves a new kind shortly after it has accepted its definition. If the platform was installed before, its
    admission policies use our kinds as parameters, and an API server that has just started refuses the objects that
    they guard until it has found those kinds.

    Raises:
        StartError: refused for another reason, or still not ready after ``KINDS_PATIENCE_S``.
    """
    deadline = time.monotonic() + KINDS_PATIENCE_S
    while True:
        try:
            return kubectl.apply(objects)
        except StartError as error:
            if not any(sign in str(error) for sign in NOT_FOUND_YET) or time.monotonic() > deadline:
                raise
        time.sleep(pause_s)


def upgrade(helm: Helm, kubectl: Kubectl, release: str, *arguments: str) -> None:
    """Install or upgrade a release, again where etcd is late."""

    def once() -> None:
        unlock(kubectl)
        helm.run("upgrade", "--install", release, "--namespace", NAMESPACE, *arguments)

    repeated(once)


def unlock(kubectl: Kubectl) -> None:
    """Delete the records of interrupted installations, because helm would refuse every later one."""
    pending = "owner=helm,status in (pending-install,pending-upgrade,pending-rollback)"
    kubectl.run("-n", NAMESPACE, "delete", "secrets", "-l", pending, "--ignore-not-found")


def roll_out(kubectl: Kubectl, name: str) -> None:
    """Wait for one deployment.

    Raises:
        StartError: with the last lines of its log.
    """
    arguments = (
        "-n",
        NAMESPACE,
        "rollout",
        "status",
        f"deployment/{name}",
        f"--timeout={ROLLOUT_TIMEOUT_S}s",
    )
    try:
        kubectl.run(*arguments, timeout_s=ROLLOUT_TIMEOUT_S + 10)
    except StartError as error:
        raise StartError(f"{name} did not become ready.\n{evidence(kubectl, name)}") from error


def evidence(kubectl: Kubectl, name: str) -> str:
    """The pods and the end of the log, for the error message."""
    looked = []
    for arguments in (
        ("get", "pods", "-o", "wide"),
        ("get", "events", "--field-selector=type=Warning", "--sort-by=.lastTimestamp"),
        ("logs", f"deployment/{name}", "--tail=15"),
    ):
        try:
            looked += kubectl.run("-n", NAMESPACE, *arguments).splitlines()[-15:]
        except StartError as error:
            looked.append(str(error))
    return "\n".join(looked)


def local_values(registry: str, tag: str, portal_url: str, gateway_url: str) -> dict[str, Any]:
    """The charts' values for the one-machine cluster.

    CPU requests become CPU weights when the machine is full, and here trainers fill it: with the chart's small defaults
    the operator would get so little CPU time that its liveness probe fails.
    """

    def requests(cpu: str) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}}

    return {
        "image": {"registry": registry, "tag": tag},
        "service": {"type": "NodePort"},
        "placement": {"tolerations": [tolerating(POOL_TAINT)]},
        "admission": {"podWriters": [CLIENTS["kwok"][0]]},  # it simulates the kubelets of simulated nodes
        "operator": requests("100m"),
        "power": {"simulatedNodes": simulated_power(), "agent": {"setLimits": True}},
        "api": {"publicUrl": portal_url, "publicGatewayUrl": gateway_url, **requests("50m")},
        "gateway": requests("75m"),
    }
