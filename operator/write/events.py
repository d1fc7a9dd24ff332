"""Kubernetes events through their own queue: aggregated, rate-limited, and in the lane that lets admissions pass.

An event is one more write per transition, and at fifty writes a second the events of a busy hour would delay
the admissions that they report. So a notice goes into a bounded queue; equal notices become one with a count;
a transition that still waits is replaced by the next one of its object; a token bucket and the lane slow the sender
down; what does not fit is dropped and counted. Events
are for people: no code reads them back, so a crash may lose some.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from busbar.kube.client import KubeClient
from busbar.kube.errors import AlreadyExists, ApiError, ConnectionFailed
from busbar.kube.resources import EVENTS
from busbar.operator.errors import Fenced
from busbar.operator.metrics import Metrics
from busbar.operator.write.lanes import Lane, Lanes

QUEUE_LIMIT = 2000


@dataclass(frozen=True)
class Notice:
    """One event to write about one object."""

    api_version: str
    kind: str
    namespace: str  # empty for cluster-scoped objects
    name: str
    uid: str
    reason: str
    message: str
    warning: bool = False
    transition: bool = False
    """It tells the object's state, so the next transition says what matters where this one was not sent in time."""


class EventQueue:
    """See the module's head. Run ``run()`` as a task."""

    def __init__(
        self,
        client: KubeClient,
        metrics: Metrics,
        *,
        instance: str,
        per_s: float = 5.0,
        burst: int = 25,
        lanes: Lanes,
    ) -> None:
        self._client, self._metrics, self._instance = client, metrics, instance
        self._per_s, self._burst, self._lanes = per_s, burst, lanes
        self._waiting: OrderedDict[Notice, int] = OrderedDict()
        self._transitions: dict[str, Notice] = {}  # those that wait, by uid; warnings are not among them
        self._wake = asyncio.Event()
        self._tokens, self._filled_at = float(burst), time.monotonic()

    def put(self, notice: Notice) -> None:
        if notice.transition:
            before = self._transitions.get(notice.uid)
            if before is not None and before != notice:
                del self._waiting[before], self._transitions[notice.uid]
                self._metrics.events.labels("superseded").inc()
        if notice not in self._waiting and len(self._waiting) >= QUEUE_LIMIT:
            self._metrics.events.labels("dropped").inc()
            return
        self._waiting[notice] = self._waiting.get(notice, 0) + 1
        if notice.transition and not notice.warning:
            self._transitions[notice.uid] = notice
        self._wake.set()

    async def run(self) -> None:
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            await self._token()
            try:
                async with self._lanes.place(Lane.TELL):
                    notice, count = self._waiting.popitem(last=False)
                    if self._transitions.get(notice.uid) == notice:
                        del self._transitions[notice.uid]
                    await self._send(notice, count)
                self._metrics.events.labels("sent").inc()
            except (ApiError, ConnectionFailed, Fenced):
                self._metrics.events.labels("failed").inc()

    async def _token(self) -> None:
        while True:
            now = time.monotonic()
            self._tokens = min(float(self._burst), self._tokens + (now - self._filled_at) * self._per_s)
            self._filled_at = now
            if self._tokens >= 1:
                self._tokens -= 1
                return
            await asyncio.sleep((1 - self._tokens) / self._per_s)

    async def _send(self, notice: Notice, count: int) -> None:
        body = _body(notice, count, self._instance)
        try:
            await self._client.create(EVENTS, body, body["metadata"]["namespace"])
        except AlreadyExists:
            # The same event exists, perhaps from an earlier process: raise its count. The first patch answers with
            # the count so far; we have no right to read events, and need none.
            name, namespace = body["metadata"]["name"], body["metadata"]["namespace"]
            when = {"lastTimestamp": body["lastTimestamp"]}
            old = await self._client.patch(EVENTS, name, when, namespace)
            await self._client.patch(EVENTS, name, {"count": int(old.get("count") or 1) + count}, namespace)


def _body(notice: Notice, count: int, instance: str) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = "\0".join((notice.uid, notice.reason, notice.message))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # The API server takes events of cluster-scoped objects here; as they name all tenants, no tenant may own it.
    namespace = notice.namespace or "default"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{notice.name[:230]}.{digest}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": notice.api_version,
            "kind": notice.kind,
            "name": notice.name,
            "namespace": notice.namespace,
            "uid": notice.uid,
        },
        "reason": notice.reason[:128],
        "message": notice.message[:1024],
        "type": "Warning" if notice.warning else "Normal",
        "count": count,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": "busbar-operator"},
        "reportingComponent": "busbar.dev/operator",
        "reportingInstance": instance[:128],
    }
