"""Workload bearers on the real API server: viewers cannot read them, and a Secret that is not ours is not mounted."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import yaml
from tests.cluster.apiserver import ROOT, ApiServer
from tests.cluster.harness import Cluster, engine_job, gang_job, with_the_charts_rights
from tests.cluster.kubelet import Script
from tests.cluster.rights import SYSTEM, give_role
from tests.cluster.tenancy import becomes

from busbar.kube.client import Object
from busbar.kube.contracts import bearers
from busbar.kube.contracts.bearers import Role
from busbar.kube.resources import MODEL_SERVICES, SECRETS, TENANTS, TRAINING_JOBS
from busbar.local.build import binary
from busbar.operator.watch.projections import ANNOTATION_DRAINING, project_pod

KEY = b"0123456789abcdef0123456789abcdef"  # of the harness
NEW = b"another key of more than sixteen bytes"
PAGE = (ROOT / "docs" / "admin.md").read_text().partition("## Change the workload key\n")[2]
COMMANDS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
"""The key is rotated, what was made under which is listed, and the former key is taken away."""


@pytest.fixture
async def cluster(platform: ApiServer) -> AsyncIterator[Cluster]:
    def script(pod: Object) -> Script:
        if pod["metadata"]["labels"]["busbar.dev/kind"] == "modelservice":
            return Script(status=lambda s: {"kind": "serving", "ready": True})
        return Script(status=lambda s: {"kind": "training", "phase": "Training", "step": 1})

    async with with_the_charts_rights(platform, nodes=1, script=script) as made:
        await made.start()
        yield made


READABLE = (
    "/api/v1/namespaces/{}/pods",
    "/api/v1/namespaces/{}/events",
    "/api/v1/namespaces/{}/services",
    "/api/v1/namespaces/{}/configmaps",
    "/api/v1/namespaces/{}/persistentvolumeclaims",
    "/apis/batch/v1/namespaces/{}/jobs",
    "/apis/apps/v1/namespaces/{}/deployments",
    "/apis/busbar.dev/v1alpha1/namespaces/{}/trainingjobs",
    "/apis/busbar.dev/v1alpha1/namespaces/{}/modelservices",
)


async def test_a_viewer_reads_no_bearer_anywhere(cluster: Cluster, platform: ApiServer) -> None:
    await cluster.until(TENANTS, f"tenant-{cluster.namespace}", lambda status: bool(status.get("conditions")))
    await cluster.create(engine_job("one"))
    await cluster.create(gang_job("own", 2))
    others = ("vllm", "sglang")
    for name, engine in (
        ("built", {}),
        *((n, {"engine": n, "image": f"registry.test/{n}:1"}) for n in others),
    ):
        spec = {"model": {"uri": "pvc://claim/model"}, "shape": {"memory": "64Mi"}, **engine}
        await cluster.create({"kind": "ModelService", "metadata": {"name": name}, "spec": spec})
        await cluster.until(MODEL_SERVICES, name, lambda status: status.get("readyReplicas") == 1)
    for name in ("one", "own"):
        await cluster.until(TRAINING_JOBS, name, lambda status: status.get("phase") == "Running")

    made = [
        await cluster.get(TRAINING_JOBS, "one"),
        *[await cluster.get(MODEL_SERVICES, n) for n in ("built", *others)],
    ]
    uids = [item["metadata"]["uid"] for item in made]
    stored, _ = await cluster.client.list(SECRETS, cluster.namespace)
    assert {s["metadata"]["name"] for s in stored} == {bearers.secret_name(KEY, uid) for uid in uids}
    values = {base64.b64decode(value).decode() for s in stored for value in s["data"].values()}
    known = {bearers.bearer_for(KEY, uid, role) for uid in uids for role in Role}
    assert known & values  # the bearers to search for

    await asyncio.to_thread(give_role, platform, "t", cluster.namespace, "viewer", "vera")
    viewer = platform.client("vera")
    seen = "".join(json.dumps(viewer.get(path.format(cluster.namespace)).expect()) for path in READABLE)
    assert all(bearer not in seen for bearer in known | {bearers.former_bearer_for(KEY, u) for u in uids})
    assert bearers.secret_name(KEY, uids[0]) in seen  # its name is no secret
    for path in ("", *(f"/{s['metadata']['name']}" for s in stored)):
        assert viewer.get(f"/api/v1/namespaces/{cluster.namespace}/secrets{path}").status == 403


async def test_a_foreign_secret_under_the_name_is_not_mounted_and_the_status_says_so(
    apiserver: ApiServer,
) -> None:
    """Without the policy that reserves the name."""
    async with Cluster(apiserver, script=lambda pod: Script(run_s=0.0)) as cluster:
        made = await cluster.create(engine_job("squatted"))
        name = bearers.secret_name(KEY, made["metadata"]["uid"])
        foreign = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": cluster.namespace},
            "type": "Opaque",
            "data": {"read": base64.b64encode(b"theirs").decode()},
        }
        cluster.server.admin.create(foreign).expect()
        await cluster.start()
        status = await cluster.until(TRAINING_JOBS, "squatted", lambda s: s.get("reason") == "PodsRefused")
        assert name in status["message"]
        assert await cluster.pods() == {}
        cluster.server.admin.delete(foreign).expect()
        await cluster.until(TRAINING_JOBS, "squatted", lambda s: s.get("phase") == "Succeeded")

        async def kind() -> str:
            return str((await cluster.client.get(SECRETS, name, cluster.namespace))["type"])

        await becomes(kind, lambda found: found == bearers.SECRET_TYPE)


async def test_while_the_key_is_rotated_jobs_are_read_on_and_replicas_replaced_one_by_one(
    apiserver: ApiServer,
) -> None:
    said = {
        "modelservice": lambda s: {"kind": "serving", "ready": True, "running": 0, "waiting": 0},
        "trainingjob": lambda s: {
            "kind": "training",
            "phase": "Training",
            "step": int(100 * s),
            "totalSteps": 10_000,
        },
    }

    def script(pod: Object) -> Script:
        return Script(status=said[pod["metadata"]["labels"]["busbar.dev/kind"]], guards=True)

    async with Cluster(apiserver, script=script) as cluster:
        await cluster.start()
        await cluster.create(engine_job("trains"))
        for name, count in (("single", 1), ("double", 2)):
            spec = {
                "model": {"uri": "pvc://claim/model"},
                "shape": {"memory": "64Mi"},
                "replicas": count,
                "drainSeconds": 1,
            }
            await cluster.create({"kind": "ModelService", "metadata": {"name": name}, "spec": spec})
            await cluster.until(MODEL_SERVICES, name, ready(count))
        told = await cluster.until(TRAINING_JOBS, "trains", lambda s: step(s) > 0)
        before = await cluster.pods()
        await cluster.stop()
        at = len(cluster.proxy.writes)

        await cluster.start(workload_key=NEW, former_workload_key=KEY)
        await becomes(cluster.pods, lambda pods: keys(pods, "double-") == [NEW, NEW])
        await cluster.until(MODEL_SERVICES, "double", ready(2))
        found = turns(cluster, at)
        assert [what for what, _ in found] == ["drains", "makes"] * 2
        assert [name for what, name in found if what == "drains"] == ["double-0", "double-1"]
        await cluster.until(TRAINING_JOBS, "trains", lambda s: step(s) > step(told))
        now = await cluster.pods()
        for name in ("trains-1-0", "single-0"):
            assert now[name]["metadata"]["uid"] == before[name]["metadata"]["uid"]
        listed = await asyncio.to_thread(run, apiserver, "bash", "-c", COMMANDS[1])
        lines = [line.split() for line in listed.splitlines()]
        told_of = {name: secret[-8:] for where, name, secret in lines if where == cluster.namespace}
        print_of = {key: bearers.secret_name(key, "")[-8:] for key in (KEY, NEW)}
        assert told_of == {
            name: print_of[NEW if name.startswith("double") else KEY] for name in await cluster.pods()
        }
        await cluster.stop()

        await cluster.start(workload_key=NEW)
        await becomes(cluster.pods, lambda pods: keys(pods, "single-") == [NEW])
        status = await cluster.until(
            TRAINING_JOBS, "trains", lambda s: "workload key" in s.get("message", "")
        )
        assert status["phase"] == "Running"


def test_the_commands_of_the_admins_page_rotate_the_key_and_an_upgrade_keeps_both(
    platform: ApiServer,
) -> None:
    begin, _, end, *_ = COMMANDS

    def data() -> dict[str, str]:
        path = f"/api/v1/namespaces/{SYSTEM}/secrets/busbar-workload-key"
        return dict(platform.admin.get(path).expect()["data"])

    before = data()
    run(platform, "bash", "-euo", "pipefail", "-c", begin)
    both = data()
    assert both["former"] == before["key"] != both["key"]
    assert len(base64.b64decode(both["key"]).strip()) == 64
    rendered = run(
        platform, str(binary("helm")), "template", "busbar", str(ROOT / "charts" / "busbar"), "-n", SYSTEM,
        "--dry-run=server", "--is-upgrade", "-s", "templates/secrets.yaml",
    )  # fmt: skip
    secrets = {one["metadata"]["name"]: one["data"] for one in yaml.safe_load_all(rendered) if one}
    assert secrets["busbar-workload-key"] == both
    assert list(secrets["busbar-api-session"]) == ["secret"]
    time.sleep(1.1)  # kubectl refuses a second restart of a deployment within a second
    run(platform, "bash", "-euo", "pipefail", "-c", end)
    assert data() == {"key": both["key"]}


def run(server: ApiServer, *command: str) -> str:
    environment = {
        **os.environ,
        "KUBECONFIG": str(server.kubeconfig()),
        "PATH": f"{binary('kubectl').parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ready(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: status.get("readyReplicas") == count


def step(status: dict[str, Any]) -> int:
    return int((status.get("progress") or {}).get("step", 0))


def keys(pods: dict[str, Object], begin: str) -> list[bytes | None]:
    """The workload keys under which these pods were made."""
    found = (project_pod(pod) for name, pod in pods.items() if name.startswith(begin))
    return [bearers.key_of(pod.bearers, pod.owner_uid, (KEY, NEW)) for pod in found]


def turns(cluster: Cluster, since: int) -> list[tuple[str, str]]:
    """The replicas that were told to drain, and those that were made, in their order."""
    found = []
    for write in cluster.proxy.writes[since:]:
        meta = (write.body.get("metadata") or {}) if isinstance(write.body, dict) else {}
        if write.method == "POST" and write.path.endswith("/pods"):
            found.append(("makes", meta["name"]))
        elif ANNOTATION_DRAINING in (meta.get("annotations") or {}):
            found.append(("drains", write.path.rpartition("/")[2]))
    return found
