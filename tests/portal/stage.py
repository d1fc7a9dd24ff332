"""A stage for the portal: the real API, the real gateway process, an in-memory cluster, a scripted operator.

Everything a browser touches is real: HTTP server, application, database, planner, event stream, gateway. What
stands in is Kubernetes (`tests.api.memory_kube`), the operator's writes (`Actor`, which walks a job through its
phases) and the engine (a small OpenAI server that streams words).

    python -m tests.portal.stage        runs it for looking at by hand and prints address and tokens
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.api.conftest import seed
from tests.api.memory_kube import MemoryKube
from tests.api.scripted_operator import ScriptedOperator

from busbar.api import services as wiring
from busbar.api.database.migrate import migrate
from busbar.api.identity import Role
from busbar.api.serve import run
from busbar.api.services import Services
from busbar.api.settings import Settings
from busbar.kube.resources import EVENTS, MODEL_SERVICES, PODS, TRAINING_JOBS

WORDS = [
    "def",
    "main",
    "(",
    "argv",
    ")",
    ":",
    "return",
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "\n",
]
TICK_S = 0.15
STEPS = 40


def now(later_s: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=later_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Stage:
    """A running portal and the tokens of its people."""

    url: str
    gateway_url: str
    tokens: dict[str, str]
    namespace: str
    kube: MemoryKube
    services: Services
    loop: asyncio.AbstractEventLoop
    held: set[str]

    @contextlib.contextmanager
    def holding(self, job: str) -> Iterator[None]:
        """A job of this name does not end in the block, however slow the browser is."""
        self.held.add(job)
        try:
            yield
        finally:
            self.held.discard(job)

    def wait_until_routed(self, service: str) -> None:
        """Until the gateway has heard of the service: its routes come by themselves, and after the page's news."""
        ask = urllib.request.Request(
            f"{self.gateway_url}/v1/models", headers={"Authorization": f"Bearer {self.tokens['alice']}"}
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        until = time.monotonic() + 60
        while True:
            with direct.open(ask, timeout=60) as answer:
                models = {card["id"] for card in json.load(answer)["data"]}
            if service in models:
                return
            assert time.monotonic() < until, f"the gateway knows {sorted(models)}, not {service}"
            time.sleep(0.05)

    def kube_call(self, do: Callable[[MemoryKube], object]) -> None:
        """Script the cluster from the test's thread."""

        async def call() -> None:
            do(self.kube)

        asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)


@contextlib.contextmanager
def stage(*, gateway: bool = True, fast: bool = True) -> Iterator[Stage]:
    """Run the stage in a thread of its own until the block ends."""
    ready: list[Stage] = []
    failed: list[BaseException] = []
    up, down = threading.Event(), threading.Event()

    def body() -> None:
        try:
            asyncio.run(_run(ready, up, down, gateway, TICK_S if fast else 1.0))
        except BaseException as error:
            failed.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=body, name="stage")
    thread.start()
    up.wait()
    if failed:
        thread.join()
        raise failed[0]
    try:
        yield ready[0]
    finally:
        down.set()
        thread.join()
    if failed:
        raise failed[0]


async def _run(
    ready: list[Stage], up: threading.Event, down: threading.Event, with_gateway: bool, tick_s: float
) -> None:
    with tempfile.TemporaryDirectory(prefix="busbar-stage-") as folder:
        port, internal, operator_port, gateway_port, gateway_internal, engine_port = _free_ports(6)
        url = f"sqlite+aiosqlite:///{folder}/api.db"
        await migrate(url)
        settings = Settings(
            session_secret=secrets.token_hex(32),
            database_url=url,
            host="127.0.0.1",
            port=port,
            internal_port=internal,
            gateway_url=f"http://127.0.0.1:{gateway_port}",
            log_level="warning",
        )
        kube = MemoryKube(now)
        seed(kube)
        built = wiring.build(settings, kube, ScriptedOperator(kube), backoff_s=(0.05, 1.0))
        gateway_token = secrets.token_hex(16)
        kube.users[gateway_token] = {"username": settings.gateway_subject, "groups": []}
        actor = Actor(kube, f"http://127.0.0.1:{engine_port}", tick_s)
        stopping = asyncio.Event()
        serving = asyncio.create_task(run(built, stopping))
        acting = asyncio.create_task(actor.run())
        engine = await _listen(_engine(), engine_port)
        operator = await _listen(actor.routes_app(), operator_port)
        child = None
        try:
            tokens = {}
            for name, role in (
                ("alice", Role.USER),
                ("bob", Role.USER),
                ("vera", Role.USER),
                ("root", Role.ADMIN),
            ):
                tokens[name], _ = await built.tokens.create(name, created_by="stage", role=role)
            if with_gateway:
                child = _gateway(
                    Path(folder), gateway_port, gateway_internal, operator_port, internal, gateway_token
                )
                await _answers(gateway_port)
            await _answers(port)
            ready.append(
                Stage(
                    f"http://127.0.0.1:{port}",
                    settings.gateway_url,
                    tokens,
                    "ada-lab",
                    kube,
                    built,
                    asyncio.get_running_loop(),
                    actor.held,
                )
            )
            up.set()
            await asyncio.to_thread(down.wait)
        finally:
            if child is not None:
                child.terminate()
                await asyncio.to_thread(child.wait, 60)  # it may have something to tell the API at the end
            acting.cancel()
            stopping.set()
            for ended in await asyncio.gather(serving, acting, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended
            await engine.cleanup()
            await operator.cleanup()


class Actor:
    """Plays the operator: walks objects through their phases and tells the gateway where services are."""

    def __init__(self, kube: MemoryKube, engine_url: str, tick_s: float) -> None:
        self._kube = kube
        self._engine = engine_url
        self._tick_s = tick_s
        self._began: dict[str, float] = {}
        self.held: set[str] = set()
        """Names of jobs that stay short of their last step."""

    async def run(self) -> None:
        while True:
            for (plural, namespace, name), obj in list(self._kube.objects.items()):
                if plural == TRAINING_JOBS.plural:
                    self._train(namespace, name, obj)
                elif plural == MODEL_SERVICES.plural:
                    self._serve(namespace, name, obj)
            await asyncio.sleep(self._tick_s)

    def _train(self, namespace: str, name: str, obj: dict[str, Any]) -> None:
        status = obj.get("status") or {}
        uid, phase = obj["metadata"]["uid"], status.get("phase")
        if phase in ("Succeeded", "Failed"):
            return
        if obj["spec"].get("suspend"):
            self._began.pop(uid, None)
            if phase != "Suspended":
                self._write(
                    namespace,
                    name,
                    phase="Suspended",
                    reason="Suspended",
                    message="Its state is saved; it holds nothing.",
                )
            return
        if (
            "h100" in str(obj["spec"].get("accelerators", "")).lower()
            and obj["spec"].get("shape", {}).get("acceleratorsPerPod", 1) > 8
        ):
            self._wait(namespace, name, phase)
            return
        began = self._began.setdefault(uid, time.monotonic())
        age = (time.monotonic() - began) / self._tick_s
        if (namespace, f"{name}-1-0") not in self._kube.logs and age >= 6:
            self._start(namespace, name)
        total = int((obj["spec"].get("engine") or {}).get("steps", STEPS))
        if age < 3:
            if phase != "Queued":
                self._write(
                    namespace, name, phase="Queued", reason="Waiting", message="It is the next to start."
                )
            return
        if age < 6:
            if phase != "Starting":
                self._start(namespace, name)
            return
        last = total - 1 if name in self.held else total
        step = min(last, int((age - 6) * max(1, total / STEPS)))
        progress = {
            "step": step,
            "totalSteps": total,
            "loss": round(2.2 + 5.5 * math.exp(-step / (total / 4)) + 0.05 * math.sin(step), 4),
            "tokensPerSecond": 2400 + 80 * math.sin(step / 3),
            "etaSeconds": (total - step) * 0.5,
        }
        done = step >= total
        line = f"step {step}/{total} loss {progress['loss']:.4f} {progress['tokensPerSecond']:.0f} tok/s\n"
        self._kube.logs[namespace, f"{name}-1-0"].append(line.encode())
        more: dict[str, Any] = (
            {
                "completionTime": now(),
                "evaluation": {"bitsPerByte": 1.92, "bigramBitsPerByte": 3.5, "ngramBitsPerByte": 2.61},
            }
            if done
            else {}
        )
        self._write(
            namespace,
            name,
            phase="Succeeded" if done else "Running",
            reason="Done" if done else "Training",
            message="All steps are done; the weights are saved." if done else "It trains in pool cpu.",
            progress=progress,
            checkpoint={"step": step - step % 10, "savedAt": now(), "uri": "pvc://stdlib/model/checkpoints"},
            usage={"acceleratorSeconds": age * 2, "workUnits": age * 2, "cost": round(age * 0.002, 4)},
            **more,
        )
        if done and (ended := self._kube.open_logs.get((namespace, f"{name}-1-0"))):
            ended.set()

    def _start(self, namespace: str, name: str) -> None:
        pod = f"{name}-1-0"
        labels = {
            "busbar.dev/job": name,
            "busbar.dev/kind": "trainingjob",
            "busbar.dev/attempt": "1",
            "busbar.dev/rank": "0",
        }
        self._kube.put(
            PODS,
            {
                "metadata": {"name": pod, "namespace": namespace, "labels": labels},
                "spec": {"nodeName": "cpu-node-0"},
                "status": {"phase": "Running"},
            },
        )
        self._kube.logs[namespace, pod] = [b"tokenizer: 4096 entries\n"]
        self._kube.open_logs[namespace, pod] = asyncio.Event()
        for reason, message in (
            ("Queued", "It is the next to start."),
            ("Admitted", "It starts in pool cpu on 1 node."),
        ):
            self._kube.put(
                EVENTS,
                {
                    "metadata": {"name": f"{name}.{secrets.token_hex(6)}", "namespace": namespace},
                    "type": "Normal",
                    "reason": reason,
                    "message": message,
                    "count": 1,
                    "lastTimestamp": now(),
                    "involvedObject": {"kind": "TrainingJob", "name": name},
                },
            )
        self._write(
            namespace,
            name,
            phase="Starting",
            reason="Admitted",
            message="It starts in pool cpu on 1 node.",
            attempt=1,
            startTime=now(),
            admission={
                "id": "a1",
                "pool": "cpu",
                "accelerator": "cpu",
                "mode": "resident",
                "pods": 1,
                "acceleratorsPerPod": 1,
                "nodes": ["cpu-node-0"],
                "reason": "cpu is free now and the only type it allows.",
            },
            conditions=[
                {
                    "type": "Admitted",
                    "status": "True",
                    "reason": "QuotaReserved",
                    "message": "It holds its quota.",
                    "lastTransitionTime": now(),
                },
                {
                    "type": "Ready",
                    "status": "False",
                    "reason": "Starting",
                    "message": "Pods are starting.",
                    "lastTransitionTime": now(),
                },
            ],
        )

    def _wait(self, namespace: str, name: str, phase: str | None) -> None:
        if phase == "Queued":
            return
        self._write(
            namespace,
            name,
            phase="Queued",
            reason="InsufficientCapacity",
            message="Needs 16 H100, 5 of 16 are free; another tenant's guaranteed share holds 8.",
            waiting={
                "code": "InsufficientCapacity",
                "resource": "H100",
                "requested": 16000,
                "entitled": 8000,
                "allocated": 3000,
                "limit": 16000,
                "free": 5000,
                "position": 1,
                "changes": [
                    {"kind": "pods", "current": "16", "needed": "5"},
                    {"kind": "accelerator", "current": "H100", "needed": "cpu"},
                ],
            },
            preview={"startsNow": False, "reason": "Five would fit now."},
            forecast={"madeAt": now(), "startP50": now(1230), "startP90": now(4230)},
            conditions=[
                {
                    "type": "Admitted",
                    "status": "False",
                    "reason": "InsufficientCapacity",
                    "message": "5 of 16 are free.",
                    "lastTransitionTime": now(),
                }
            ],
        )

    def _serve(self, namespace: str, name: str, obj: dict[str, Any]) -> None:
        spec, status = obj["spec"], obj.get("status") or {}
        wanted = 0 if spec.get("suspend") else spec.get("replicas", max(1, spec.get("minReplicas", 1)))
        phase = "Suspended" if spec.get("suspend") else ("Ready" if wanted else "Idle")
        if status.get("desiredReplicas") == wanted and status.get("phase") == phase:
            return
        before = status.get("desiredReplicas", 0)
        history = [
            *(status.get("scalingHistory") or []),
            {
                "time": now(),
                "previous": before,
                "desired": wanted,
                "reason": "set by a person" if "replicas" in spec else "requests arrived",
            },
        ]
        self._kube.status(
            MODEL_SERVICES,
            namespace,
            name,
            phase=phase,
            reason=phase,
            message={
                "Ready": f"{wanted} replica answers." if wanted == 1 else f"{wanted} replicas answer.",
                "Idle": "It sleeps; a request wakes it.",
                "Suspended": "It is switched off.",
            }[phase],
            replicas=wanted,
            readyReplicas=wanted,
            desiredReplicas=wanted,
            modelId=name,
            pools=[{"pool": "cpu", "replicas": wanted}] if wanted else [],
            scalingHistory=history[-5:],
            conditions=[
                {
                    "type": "Ready",
                    "status": str(bool(wanted)),
                    "reason": phase,
                    "message": "",
                    "lastTransitionTime": now(),
                }
            ],
        )

    def _write(self, namespace: str, name: str, **status: Any) -> None:
        self._kube.status(TRAINING_JOBS, namespace, name, **status)

    def routes_app(self) -> web.Application:
        """The operator's `/routes`, as the gateway reads it."""

        async def routes(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            revision = 0
            with contextlib.suppress(ConnectionError):
                while True:
                    revision += 1
                    await response.write(json.dumps(self._document(revision)).encode() + b"\n")
                    await asyncio.sleep(0.3)
            return response

        app = web.Application()
        app.router.add_get("/routes", routes)
        return app

    def _document(self, revision: int) -> dict[str, Any]:
        found = []
        for (plural, namespace, name), obj in self._kube.objects.items():
            if plural != MODEL_SERVICES.plural:
                continue
            ready = int((obj.get("status") or {}).get("readyReplicas") or 0)
            found.append(
                {
                    "tenant": "ada" if namespace == "ada-lab" else "bob-corp",
                    "namespace": namespace,
                    "name": name,
                    "uid": obj["metadata"]["uid"],
                    "modelId": name,
                    "desiredReplicas": ready,
                    "readyReplicas": ready,
                    "suspended": bool(obj["spec"].get("suspend")),
                    "minReplicas": obj["spec"].get("minReplicas", 1),
                    "maxReplicas": obj["spec"].get("maxReplicas", 1),
                    "bearer": "engine-bearer",
                    "endpoints": [
                        {"pod": f"{name}-{i}", "url": self._engine, "ready": True, "draining": False}
                        for i in range(ready)
                    ],
                }
            )
        return {"revision": revision, "services": found}


def _engine() -> web.Application:
    """An OpenAI server that streams words, a little apart."""

    async def complete(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        count = int(asked.get("max_tokens", 16))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(body: object) -> None:
            await response.write(f"data: {json.dumps(body)}\n\n".encode())

        base = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": asked["model"]}
        for index in range(count):
            usage = {"prompt_tokens": 2, "completion_tokens": index + 1, "total_tokens": index + 3}
            word = WORDS[index % len(WORDS)] + " "
            last = "length" if index == count - 1 else None
            await send(
                {**base, "choices": [{"index": 0, "text": word, "finish_reason": last}], "usage": usage}
            )
            await asyncio.sleep(0.01)
        await send(
            {
                **base,
                "choices": [],
                "usage": {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": count + 2},
            }
        )
        await response.write(b"data: [DONE]\n\n")
        return response

    async def ok(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/ready", ok)
    return app


async def _listen(app: web.Application, port: int) -> web.AppRunner:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


def _gateway(
    folder: Path, port: int, internal: int, operator_port: int, api_port: int, token: str
) -> subprocess.Popen[bytes]:
    token_file = folder / "token"
    token_file.write_text(token)
    state = folder / "gateway"
    state.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith("BUSBAR_")} | {
        "BUSBAR_GATEWAY_PUBLIC_ADDRESS": f"127.0.0.1:{port}",
        "BUSBAR_GATEWAY_INTERNAL_ADDRESS": f"127.0.0.1:{internal}",
        "BUSBAR_GATEWAY_STATE_DIR": str(state),
        "BUSBAR_GATEWAY_OPERATOR_URL": f"http://127.0.0.1:{operator_port}",
        "BUSBAR_GATEWAY_OPERATOR_TOKEN_FILE": str(token_file),
        "BUSBAR_GATEWAY_API_URL": f"http://127.0.0.1:{api_port}",
        "BUSBAR_GATEWAY_API_TOKEN_FILE": str(token_file),
    }
    with (folder / "gateway.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "busbar.gateway.main"], env=env, stdout=log, stderr=log
        )


async def _answers(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


if __name__ == "__main__":
    with stage(gateway="--no-gateway" not in sys.argv, fast="--slow" not in sys.argv) as running:
        print(running.url)
        for name_, token_ in running.tokens.items():
            print(f"  {name_}: {token_}")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
