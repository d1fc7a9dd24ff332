"""The operator is killed ten times while real pods run: the job ends as it would without the kills.

A kill tests something only while the operator is working. So each kill waits until the Lease names the successor of
the last killed operator as its holder, and then a little longer each time. Kills alternate between SIGKILL of the
process, after which the kubelet starts the container again in the same pod, and removal of the pod, after which
another pod takes over.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import pytest
from tests.e2e.instance import Cluster, small_job

pytestmark = pytest.mark.node

SYSTEM = "busbar-system"
KILLS = 10


def operator_leads(cluster: Cluster, since: float) -> bool:
    """Whether an operator has renewed the lease after ``since``, in seconds since the epoch."""
    spec = cluster.get("-n", SYSTEM, "lease", "busbar-operator")["spec"]
    renewed = datetime.fromisoformat(spec["renewTime"].replace("Z", "+00:00")).timestamp()
    return bool(spec["holderIdentity"]) and renewed > since


def ancestors(pid: int) -> Iterator[int]:
    """The ancestors of a process."""
    with suppress(OSError):  # it may end while we read
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            yield pid


def operator_process(cluster: Cluster) -> int | None:
    """The operator's process on this machine, a descendant of the supervisor; None while there is not one."""
    found = subprocess.run(["pgrep", "-f", "/bin/busbar-operator$"], capture_output=True, text=True).stdout
    supervisor = cluster.supervisor()
    running = [pid for pid in map(int, found.split()) if supervisor in ancestors(pid)]
    return running[0] if len(running) == 1 else None


def kill_process(cluster: Cluster, pid: int) -> None:
    """SIGKILL the process."""
    os.kill(pid, signal.SIGKILL)


def remove_pod(cluster: Cluster, pid: int) -> None:
    """Delete the operator's pod; the process has one second before SIGKILL."""
    cluster.kube(
        "-n", SYSTEM, "delete", "pod", "-l", "app.kubernetes.io/component=operator",
        "--grace-period=1", "--wait=false",
    )  # fmt: skip


def replaced(cluster: Cluster, kill: Callable[[Cluster, int], None]) -> None:
    """Kill the operator, wait until it is dead, and then until its successor holds the lease.

    A pod that is being deleted may renew its lease once more before it ends, so its death comes first.
    """
    victim: int = cluster.wait("one operator", lambda: operator_process(cluster))
    kill(cluster, victim)
    cluster.wait("the operator's end", lambda: not Path(f"/proc/{victim}").exists())
    ended = time.time()
    cluster.wait("a leading operator", lambda: operator_leads(cluster, since=ended))


@contextmanager
def pods_seen(cluster: Cluster, job: str, folder: Path) -> Iterator[Path]:
    """A file with the uid of every pod that ever belonged to the job, one line for each change to a pod."""
    seen = folder / "pods"
    with seen.open("w") as out:
        watch = subprocess.Popen(
            [cluster.kubectl, "-n", "demo", "get", "pods", "-l", f"busbar.dev/job={job}", "--watch",
             "-o", r"jsonpath={.metadata.uid}{'\n'}"],
            stdout=out,
            env={**os.environ, "KUBECONFIG": cluster.kubeconfig},
        )  # fmt: skip
        try:
            yield seen
            assert watch.poll() is None, "the watch ended before the job did"
        finally:
            watch.terminate()
            watch.wait()


def test_ten_kills_of_the_operator_change_nothing(cluster: Cluster, tmp_path: Path) -> None:
    name = "survives-kills"
    steps = 3000
    with pods_seen(cluster, name, tmp_path) as seen:
        cluster.submit(small_job(name, steps=steps))
        for number in range(KILLS):
            replaced(cluster, kill_process if number % 2 == 0 else remove_pod)
            time.sleep(0.4 * number)
        cluster.wait("the job's success", lambda: cluster.phase("trainingjob", name) == "Succeeded", 240)
        uids = set(seen.read_text().split())
    status = cluster.status("trainingjob", name)
    assert len(uids) == 1, f"{len(uids)} pods were made for one attempt"
    assert status["attempt"] == 1
    assert status.get("restarts", 0) == 0
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == steps


def steps_done(cluster: Cluster, job: str) -> int:
    """The last step that the job has reported."""
    return int((cluster.status("trainingjob", job).get("progress") or {}).get("step", 0))


def test_a_suspended_job_saves_and_frees_its_place_and_goes_on(cluster: Cluster) -> None:
    name = "pauses"
    # Far more steps than fit into the test: however fast the machine is, the job still runs at the pause.
    cluster.submit(small_job(name, steps=1_000_000))
    cluster.wait("some progress", lambda: steps_done(cluster, name) > 20, 150)
    patch = json.dumps({"spec": {"suspend": True}})
    cluster.kube("-n", "demo", "patch", "trainingjob", name, "--type=merge", "-p", patch)
    cluster.wait("the pause", lambda: cluster.phase("trainingjob", name) == "Suspended")
    pods = cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={name}")["items"]
    assert not [p for p in pods if p["status"]["phase"] in ("Pending", "Running")], "its place is still held"
    saved = cluster.status("trainingjob", name)["checkpoint"]["step"]
    assert saved > 0
    patch = json.dumps({"spec": {"suspend": False}})
    cluster.kube("-n", "demo", "patch", "trainingjob", name, "--type=merge", "-p", patch)
    cluster.wait("progress after the pause", lambda: steps_done(cluster, name) > saved + 20, 150)
    status = cluster.status("trainingjob", name)
    assert status["attempt"] == 2
    assert status["lostWork"]["steps"] == 0, "a pause that was announced lost work"
    cluster.kube("-n", "demo", "delete", "trainingjob", name, "--wait=true")


def test_deleting_a_running_job_leaves_nothing(cluster: Cluster) -> None:
    name = "short-lived"
    cluster.submit(small_job(name, steps=1_000_000))
    cluster.wait("a pod", lambda: cluster.get("-n", "demo", "pods", "-l", f"busbar.dev/job={name}")["items"])
    cluster.kube("-n", "demo", "delete", "trainingjob", name, "--wait=true")
    left = ("get", "-n", "demo", "pods,services,configmaps", "-l", f"busbar.dev/job={name}", "-o", "name")
    cluster.wait("nothing left", lambda: not cluster.kube(*left).strip())
