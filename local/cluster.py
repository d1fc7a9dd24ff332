"""Bring one instance's Kubernetes up: configuration, supervisor, node."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from busbar.local import base, config, parts, supervisor, teardown
from busbar.local.errors import StartError
from busbar.local.images import recipe
from busbar.local.instance import Instance, running
from busbar.local.kubectl import Kubectl, wait_for
from busbar.local.progress import step
from busbar.local.simulated import POOL_TAINT

API_TIMEOUT_S = 60
NODE_TIMEOUT_S = 90
CAP_SYS_RESOURCE = 24


def start(instance: Instance, *, simulate: bool, with_traffic: bool, internet: bool = False) -> Kubectl:
    """Start the cluster, or update a running one to the current configuration; returns a kubectl for it.

    Raises:
        StartError: a part did not become ready.
    """
    kubectl = Kubectl(instance.kubeconfig)
    with step(f"cluster {instance.name}: control plane"), naming_the_unready(instance):
        write_configuration(instance, internet=internet)
        supervise(instance, simulate=simulate, with_traffic=with_traffic, internet=internet)

        def answers() -> bool:
            if running(instance.name) is None:
                raise StartError("the supervisor ended")
            return kubectl.answers()

        wait_for("the API server's start", answers, API_TIMEOUT_S, logs(instance))
        kubectl.apply(base.objects(instance))
    with step(f"cluster {instance.name}: node"), naming_the_unready(instance):
        wait_for("the node's registration", lambda: ready(instance, kubectl), NODE_TIMEOUT_S, logs(instance))
        label = "busbar.dev/accelerator=cpu"
        kubectl.run("label", "node", instance.node_name, label, "--overwrite")
        taint = "{key}={value}:{effect}".format(**POOL_TAINT)
        kubectl.run("taint", "node", instance.node_name, taint, "--overwrite")
        # The range of its pods' addresses: the platform connects to no pod outside its node's range.
        pods = instance.addresses.pods
        patch = json.dumps({"spec": {"podCIDR": pods, "podCIDRs": [pods]}})
        kubectl.run("patch", "node", instance.node_name, "-p", patch)
    return kubectl


def supervise(instance: Instance, *, simulate: bool, with_traffic: bool, internet: bool) -> None:
    """Write which parts must run; start the supervisor, or make the running one read it."""
    chosen = parts.spec(instance, simulate=simulate, with_traffic=with_traffic, internet=internet)
    wanted = with_digests(chosen, instance)
    file = instance.folder / "supervisor.json"
    before = file.read_text() if file.exists() else ""
    wanted.write(file)
    found = running(instance.name)
    if found is None:
        (instance.folder / "parts.json").unlink(missing_ok=True)
        teardown.clear(instance)
        supervisor.launch(instance.folder)
    elif file.read_text() != before:
        os.kill(found.pid, signal.SIGHUP)


@contextmanager
def naming_the_unready(instance: Instance) -> Iterator[None]:
    """Add to a failure which parts are not ready, and the end of the first one's log."""
    try:
        yield
    except StartError as error:
        unready = [name for name, told in state(instance).items() if not told["ready"]]
        if running(instance.name) is None:
            unready = ["supervisor"]
        if not unready:
            raise
        log = instance.folder / "logs" / f"{unready[0]}.log"
        tail = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
        raise StartError(
            "\n".join([f"{error}; not ready: {', '.join(unready)}; {log} ends:", *tail])
        ) from error


def logs(instance: Instance) -> str:
    """The folder of the parts' logs."""
    return str(instance.folder / "logs")


def ready(instance: Instance, kubectl: Kubectl) -> bool:
    """Whether the real node is Ready, by a heartbeat after this start."""
    found = kubectl.get("nodes", instance.node_name, "--ignore-not-found") if kubectl.answers() else {}
    conditions = found.get("status", {}).get("conditions", [])
    now = running(instance.name)
    return now is not None and any(
        c["type"] == "Ready" and c["status"] == "True" and c["lastHeartbeatTime"] >= now.started_at
        for c in conditions
    )


def machine(*, internet: bool) -> config.Machine:
    """The facts of this machine that the configuration depends on."""
    effective = next(
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff")
    )
    return config.Machine(
        pause_image=f"{config.REGISTRY}/busbar-pause:{recipe.pause_tag()}",
        base_image=f"{config.REGISTRY}/busbar-base:{recipe.base_tag()}",
        internet=internet,
        may_lower_oom_score=bool(int(effective, 16) >> CAP_SYS_RESOURCE & 1),
    )


def with_digests(spec: supervisor.Spec, instance: Instance) -> supervisor.Spec:
    """The specification with each part's configuration files digested, so that a change restarts the part."""
    marked = []
    for part in spec.parts:
        digest = hashlib.sha256()
        for file in sorted(set(re.findall(rf"{config.RUN}/((?:config|pki)/[\w./-]+)", " ".join(part.argv)))):
            digest.update((instance.folder / file).read_bytes())
        marked.append(dataclasses.replace(part, digest=digest.hexdigest()[:12]))
    return dataclasses.replace(spec, parts=marked)


def write_configuration(instance: Instance, *, internet: bool) -> None:
    """Credentials and every part's configuration."""
    parts.write_credentials(instance)
    folder = instance.folder / "config"
    for name, text in config.render(instance, machine(internet=internet)).items():
        file = folder / name
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


def state(instance: Instance) -> dict[str, dict[str, object]]:
    """The supervisor's last state of its parts."""
    try:
        found: dict[str, dict[str, object]] = json.loads((instance.folder / "parts.json").read_text())
    except (OSError, ValueError):
        return {}
    return found
