"""``busbar up``: preflight check, packages, compile and build, start, install the charts, simulated tenants."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from busbar.local import build, cluster, packages, preflight, simulated, status
from busbar.local.config import REGISTRY
from busbar.local.errors import InstanceError, PreflightError, StartError
from busbar.local.images import builder
from busbar.local.images.recipe import IMAGES
from busbar.local.install import Helm, install, local_values
from busbar.local.instance import Instance, alone, load_or_create, running
from busbar.local.kubectl import Kubectl
from busbar.local.progress import say, step


@dataclass(frozen=True)
class Wishes:
    """The options of the command."""

    name: str
    build_only: bool = False
    simulate: bool = True
    internet: bool = False
    nodes: dict[str, int] = field(default_factory=dict)


def up(wishes: Wishes) -> Instance | None:
    """Run all steps; safe to repeat.  Returns None with ``build_only``.

    Raises:
        LocalError: a step failed; the message says what to do.
    """
    preflight.check(wishes.name)
    packages.ensure(("slirp4netns",) if wishes.internet else ())
    tag = prepare()
    if wishes.build_only:
        return None
    with alone(wishes.name):
        instance = load_or_create(wishes.name)
        bring_up(instance, wishes, tag)
    return instance


def prepare() -> str:
    """Compile (CPU-bound) while building images (disk-bound); returns the images' tag."""
    with ThreadPoolExecutor(2) as pool:
        compiling = pool.submit(build.build_all)
        building = pool.submit(builder.build_images)
        compiling.result()
        return building.result()


def bring_up(instance: Instance, wishes: Wishes, tag: str) -> None:
    """Start or update the instance and everything in it."""
    was_busy = running(instance.name) is not None
    goes_on = wishes.simulate and was_busy and "traffic" in cluster.state(instance)
    kubectl = cluster.start(
        instance, simulate=wishes.simulate, with_traffic=goes_on, internet=wishes.internet
    )
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, instance, f"{REGISTRY}/{IMAGES[1].name}:{tag}")
        if wishes.simulate:
            make_nodes(kubectl, wishes.nodes, fresh=not was_busy)
        else:
            kubectl.run("delete", "nodes", "-l", "type=kwok", "--ignore-not-found", "--wait=false")
        portal, models = status.portal_url(instance), status.gateway_url(instance)
        values = local_values(REGISTRY, tag, portal, models)
        objects = simulated.demo(instance)
        if wishes.simulate:
            objects += [*simulated.pools(), *simulated.tenants(), *simulated.feeds()]
        if install(Helm(instance.kubeconfig), kubectl, values, objects) and wishes.simulate:
            cluster.supervise(instance, simulate=True, with_traffic=True, internet=wishes.internet)
        fetching.result()
    say(f"{instance.name} is {'up to date' if was_busy else 'up'}")


def make_nodes(kubectl: Kubectl, counts: dict[str, int], *, fresh: bool) -> None:
    """Make exactly the requested simulated nodes; after a ``fresh`` start KWOK takes them over at once."""
    wanted = simulated.nodes(counts)
    with step(f"{len(wanted)} simulated nodes"):
        names = {node["metadata"]["name"] for node in wanted}
        present = {item["metadata"]["name"] for item in kubectl.get("nodes", "-l", "type=kwok")["items"]}
        kubectl.apply(wanted)
        if fresh and present:  # otherwise KWOK would wait until the leases of its predecessor expire
            kubectl.run("-n", "kube-node-lease", "delete", "leases", "--ignore-not-found", *sorted(present))
        if present - names:
            kubectl.run("delete", "nodes", "--wait=false", *sorted(present - names))


def fetch(instance: Instance, image: str) -> None:
    """Pull the engines' image into the node's store now, so that the first job need not wait for it.

    Raises:
        StartError: the pull failed.
    """
    found = running(instance.name)
    if found is None:
        raise InstanceError(
            f"{instance.name} stopped while it was being set up; see {cluster.logs(instance)}"
        )
    inside = ["nsenter", "-t", str(found.pid), "-m", "-n", str(build.location("ctr"))]
    address = ["--address", "/run/containerd/containerd.sock", "-n", "k8s.io", "images"]
    listed = subprocess.run([*inside, *address, "ls", "-q"], text=True, capture_output=True, check=False)
    if image in listed.stdout.split():
        return
    with step("engines' image into the node's store"):
        done = subprocess.run(
            [*inside, *address, "pull", "--plain-http", image], text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise StartError(f"the node could not pull {image}: {done.stderr.strip()[-800:]}")


def install_on_current(registry: str, say_next: Callable[[str], None]) -> None:
    """Push the images to ``registry`` and install the charts on the cluster that KUBECONFIG names.

    Raises:
        LocalError: no cluster, or a step failed.
    """
    if os.geteuid() != 0:
        raise PreflightError("building images needs root: run it with sudo -E")
    config = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    kubectl = Kubectl(Path(config))
    if not kubectl.answers():
        raise StartError(f"no cluster answers by {config}; set KUBECONFIG to one of yours")
    packages.ensure()
    tag = (
        builder.build_images()
    )  # of Kubernetes itself only kubectl and helm are needed, built when first used
    digests = builder.push_elsewhere(registry, tag)
    values = {"image": {"registry": registry, "tag": tag, "digests": digests}}
    install(Helm(Path(config)), kubectl, values, simulated.demo(None))
    say_next("the platform is installed in the namespace busbar-system")
