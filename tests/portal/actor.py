"""A scripted operator for the portal's tests: jobs go through their phases, services become ready, routes are
served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from tests.api.memory_kube import MemoryKube

from busbar.kube.resources import EVENTS, MODEL_SERVICES, PODS, TRAINING_JOBS

STEPS = 40


def now(later_s: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=later_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Actor:
    """A scripted operator: it writes the phases of objects and the routes of services for the gateway."""

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
        has_begun = (namespace, f"{name}-1-0") in self._kube.logs and "admission" in status
        if age >= 6 and not has_begun:  # the ticks between were missed on a busy machine
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
                    "adapters": [
                        {key: row[key] for key in ("name", "tenants") if key in row}
                        for row in obj["spec"].get("adapters") or ()
                    ],
                    "endpoints": [
                        {"pod": f"{name}-{i}", "url": self._engine, "ready": True, "draining": False}
                        for i in range(ready)
                    ],
                }
            )
        return {"revision": revision, "services": found}
