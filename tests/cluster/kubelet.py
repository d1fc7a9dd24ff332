"""A simulated kube-scheduler and kubelet for tests of the operator: they bind, run and end pods.

Only the node's side is simulated; every object lives in the real API server. A pod without gates is bound to the
node that its affinity names, becomes Running after ``start_s``, and ends as its script prescribes. Deleted pods
disappear, as with a kubelet. A pod's port is a real HTTP server on a loopback address of its own, inside the node's
pod range, so that the operator connects to it as it would on a cluster.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from tests.cluster.apiserver import ApiServer

from busbar.kube.client import KubeClient, Object, Preconditions
from busbar.kube.contracts import bearers
from busbar.kube.errors import ApiError, Conflict, ConnectionFailed, NotFound
from busbar.kube.informer import Informer, Key
from busbar.kube.resources import PODS, SECRETS
from busbar.operator.watch.projections import project_pod

POD_RANGE = "127.77.0.0/16"
_addresses = itertools.count(1 + 250 * (os.getpid() % 200))
"""Two processes with tests at the same time do not have the same ones, for their ports are the same."""


@dataclass
class Script:
    """A pod's script. ``run_s`` None: it runs until it is deleted."""

    run_s: float | None = None
    exit_code: int = 0
    message: str = ""
    status: Callable[[float], dict[str, Any]] | None = None  # seconds since start → GET /status
    saved: list[str] = field(default_factory=list)  # pods that were asked to save
    drained: list[str] = field(default_factory=list)
    slept: list[str] = field(default_factory=list)
    woken: list[str] = field(default_factory=list)  # pods that were asked to wake up
    wakes: bool = True  # False: it answers, and sleeps on
    guards: bool = False  # True: it asks for the bearers of the Secret that the pod mounts, as our engines do


@dataclass
class _Running:
    script: Script
    started: float
    ip: str
    runner: web.AppRunner | None
    draining: bool = False
    sleep_level: int = 0


class Kubelet:
    """All nodes of one test. Run ``run()`` as a task."""

    def __init__(
        self, client: KubeClient, script: Callable[[Object], Script], *, start_s: float = 0.0
    ) -> None:
        self._client, self._script, self._start_s = client, script, start_s
        self._informer: Informer[Object] = Informer(client, PODS, lambda obj: obj, self._changed)
        self._wake = asyncio.Event()
        self._running: dict[str, _Running] = {}
        self.skips: Callable[[Object], bool] = lambda pod: False
        """Pods that somebody else runs."""
        self.created: dict[str, str] = {}  # every pod since the start: uid → namespace/name
        self.owners: dict[str, str] = {}  # of these: uid → the owner's uid, "" for none

    @property
    def pods(self) -> dict[Key, Object]:
        return self._informer.items

    def _changed(self, key: Key, old: Object | None, new: Object | None) -> None:
        if new is not None:
            meta = new["metadata"]
            self.created[meta["uid"]] = str(key)
            self.owners[meta["uid"]] = next((o["uid"] for o in meta.get("ownerReferences") or ()), "")
        self._wake.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._informer.run())
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self._wake.wait()
                self._wake.clear()
                pods = list(self._informer.items.values())
                await asyncio.gather(*(self._guarded(p) for p in pods))
                alive = {p["metadata"]["uid"] for p in self._informer.items.values()}
                for uid in [u for u in self._running if u not in alive]:
                    await self._stop(uid)

    async def close(self) -> None:
        for uid in list(self._running):
            await self._stop(uid)

    async def _guarded(self, pod: Object) -> None:
        if self.skips(pod):
            return
        with contextlib.suppress(NotFound, Conflict, ConnectionFailed):
            await self._step(pod)

    async def _step(self, pod: Object) -> None:
        meta, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
        uid, phase = meta["uid"], status.get("phase") or "Pending"
        if meta.get("deletionTimestamp"):
            await self._client.delete(
                PODS, meta["name"], meta["namespace"], grace_s=0, preconditions=Preconditions(uid=uid)
            )
            return
        if phase in ("Succeeded", "Failed") or spec.get("schedulingGates"):
            return
        if not spec.get("nodeName"):
            node = node_of(spec)
            if node:
                await self._bind(meta, node)
            return
        if phase == "Pending":
            await self._start(pod)
            return
        running = self._running.get(uid)
        if running is None or running.script.run_s is None:
            return
        if asyncio.get_running_loop().time() - running.started >= running.script.run_s:
            await self.end(pod, running.script.exit_code, running.script.message)

    async def _bind(self, meta: Object, node: str) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        with contextlib.suppress(ApiError):
            await self._client.create(PODS, body, meta["namespace"], subresource="binding")

    async def _start(self, pod: Object) -> None:
        meta = pod["metadata"]
        number = next(_addresses)
        ip = f"127.77.{number // 250}.{number % 250 + 1}"
        script = self._script(pod)
        running = _Running(script, asyncio.get_running_loop().time(), ip, None)
        self._running[meta["uid"]] = running
        if script.status is not None:
            await self._serve(pod, running)
        now = _now()
        patch = {
            "status": {
                "phase": "Running",
                "podIP": ip,
                "podIPs": [{"ip": ip}],
                "startTime": now,
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
                "containerStatuses": [
                    _container(pod, ready=True, state={"running": {"startedAt": now}}),
                ],
            }
        }
        await self._write_status(meta, patch)

    async def restart(self, pod: Object) -> None:
        """Its process ends and another one serves at once."""
        running = self._running[pod["metadata"]["uid"]]
        running.draining, running.sleep_level = False, 0
        state = {"running": {"startedAt": _now()}}
        again = {**_container(pod, ready=True, state=state), "restartCount": 1}
        await self._write_status(pod["metadata"], {"status": {"containerStatuses": [again]}})

    async def end(self, pod: Object, code: int, message: str = "", *, reason: str = "") -> None:
        """Ends a pod as its kubelet would."""
        meta = pod["metadata"]
        done = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "message": message,
        }
        done |= {"startedAt": _now(), "finishedAt": _now()}
        patch = {
            "status": {
                "phase": "Succeeded" if code == 0 else "Failed",
                "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": _now()}],
                "containerStatuses": [_container(pod, ready=False, state={"terminated": done})],
            }
        }
        await self._write_status(meta, patch)
        await self._stop(meta["uid"])

    async def _write_status(self, meta: Object, patch: Object) -> None:
        """The answer is applied at once: a pod that the watch still reports as Pending must not be started again."""
        name, namespace = meta["name"], meta["namespace"]
        self._informer.observe(await self._client.patch(PODS, name, patch, namespace, subresource="status"))

    async def _serve(self, pod: Object, running: _Running) -> None:
        name = pod["metadata"]["name"]
        script = running.script

        async def status(request: web.Request) -> web.Response:
            assert script.status is not None
            said = script.status(asyncio.get_running_loop().time() - running.started)
            if said.get("kind") == "serving":
                said = {**said, "draining": running.draining or said.get("draining", False)}
                if running.sleep_level:
                    said |= {"sleepLevel": running.sleep_level, "ready": False}
            return web.json_response(said)

        async def checkpoint(request: web.Request) -> web.Response:
            script.saved.append(name)
            return web.json_response({"step": 1, "durable": True})

        async def drain(request: web.Request) -> web.Response:
            script.drained.append(name)
            running.draining = True
            return web.json_response({"draining": True})

        async def sleep(request: web.Request) -> web.Response:
            said = script.status(0.0) if script.status is not None else {}
            if said.get("running") or running.draining:
                return web.json_response({"error": "busy"}, status=409)
            script.slept.append(name)
            running.sleep_level = 1
            return web.json_response({"is_sleeping": True, "level": 1})

        async def wake_up(request: web.Request) -> web.Response:
            script.woken.append(name)
            if not script.wakes:
                return web.json_response({"error": "still asleep"}, status=503)
            running.sleep_level = 0
            return web.json_response({"is_sleeping": False})

        app = web.Application(middlewares=[_guard(await self._bearers(pod))] if script.guards else [])
        app.router.add_get("/status", status)
        app.router.add_post("/checkpoint", checkpoint)
        app.router.add_post("/drain", drain)
        app.router.add_post("/sleep", sleep)
        app.router.add_post("/wake_up", wake_up)
        # Recorded before it listens, so that a pod that ends in between closes it too.
        running.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await running.runner.setup()
        await web.TCPSite(running.runner, running.ip, 9400).start()

    async def _bearers(self, pod: Object) -> dict[bearers.Role, str]:
        """Those in the Secret that the pod mounts."""
        name = project_pod(pod).bearers
        found = await self._client.get(SECRETS, name, pod["metadata"]["namespace"])
        return {bearers.Role(role): base64.b64decode(text).decode() for role, text in found["data"].items()}

    async def _stop(self, uid: str) -> None:
        running = self._running.pop(uid, None)
        if running is not None and running.runner is not None:
            await running.runner.cleanup()


def _guard(known: bearers.Bearers) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not bearers.is_allowed(request.path, request.headers.get("Authorization"), known):
            return web.json_response({"error": "no valid bearer"}, status=401)
        return await handler(request)

    return guard


def node_of(spec: Object) -> str:
    """The node that a pod is pinned to."""
    host = (spec.get("nodeSelector") or {}).get("kubernetes.io/hostname")
    if host:
        return str(host)
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    for term in (affinity or {}).get("nodeSelectorTerms") or ():
        for field_ in term.get("matchFields") or ():
            if field_["key"] == "metadata.name":
                return str(field_["values"][0])
    return ""


def add_node(
    server: ApiServer, name: str, *, labels: dict[str, str] | None = None, cpu: str = "8", gpus: int = 0
) -> None:
    """A ready node."""
    labels = {"kubernetes.io/hostname": name, **(labels or {})}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"podCIDR": POD_RANGE, "podCIDRs": [POD_RANGE]},
    }
    server.admin.create(node).expect()
    resources = {"cpu": cpu, "memory": "32Gi", "pods": "110", "ephemeral-storage": "100Gi"}
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)
    now = _now()
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Test",
        "lastTransitionTime": now,
        "lastHeartbeatTime": now,
    }
    status = {"status": {"capacity": resources, "allocatable": resources, "conditions": [ready]}}
    server.admin.merge(node, status, subresource="/status").expect()
    # The API server taints new nodes until a controller has seen them; there is none here.
    server.admin.merge(node, {"spec": {"taints": None}}).expect()


def _container(pod: Object, *, ready: bool, state: dict[str, Any]) -> dict[str, Any]:
    container = pod["spec"]["containers"][0]
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": image_id(container["image"]),
        "ready": ready,
        "restartCount": 0,
        "state": state,
    }


def image_id(image: str) -> str:
    """A pulled image as a node reports it; the digest is derived from the reference."""
    return f"{image.rpartition(':')[0]}@sha256:{hashlib.sha256(image.encode()).hexdigest()}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def said(**fields: Any) -> str:
    """A termination message."""
    return json.dumps({"kind": "training", "phase": "Done", **fields})
