"""Reads the ports named ``busbar`` of our workload pods, and asks them to save or to drain.

What a pod says is a tenant's word and what it is dialled at is a tenant's container, so: only pods of our kinds
that declare the port, run without host network, and whose address lies in their node's pod range; no redirects;
at most 64 KiB and two seconds; a bearer that is good for this one object. Everything else raises ProbeRefused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
from pydantic import ValidationError

from busbar.kube.contracts.workload import STATUS_PATH, ServingStatus, bearer_for
from busbar.operator.actions import Ask
from busbar.operator.errors import ProbeRefused
from busbar.operator.metrics import Metrics
from busbar.operator.pods import Node, Pod
from busbar.operator.podspec import KIND_SERVICE, KIND_TRAINING
from busbar.operator.progress import Reading, parse_reading
from busbar.operator.settings import Settings

log = logging.getLogger(__name__)
PARALLEL = 16
TELL_AGAIN_S = 60.0  # a pod chooses its answers, but not how many events are written about them


def address_of(pod: Pod, node: Node | None, more_ranges: Iterable[str] = ()) -> str:
    """``http://ip:port`` of a pod that may be dialled; ProbeRefused says which rule it breaks."""
    where = f"pod {pod.key}"
    if not pod.port:
        raise ProbeRefused(f"{where} declares no port named busbar")
    if pod.host_network:
        raise ProbeRefused(f"{where} uses the host network")
    if not pod.ip:
        raise ProbeRefused(f"{where} has no address yet")
    ranges = [*(node.cidrs if node is not None else ()), *more_ranges]
    address = ipaddress.ip_address(pod.ip)
    networks = [ipaddress.ip_network(r, strict=False) for r in ranges]
    if not any(address in n for n in networks if n.version == address.version):
        raise ProbeRefused(
            f"{where}: {pod.ip} is not in the pod range of node {pod.node} ({', '.join(ranges) or 'none'})"
        )
    host = f"[{pod.ip}]" if address.version == 6 else pod.ip
    return f"http://{host}:{pod.port}"


class Prober:
    """Keeps the last reading of each pod, by uid. ``run`` polls; ``ask`` posts in the background."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        pods: Callable[[], Iterable[Pod]],
        node: Callable[[str], Node | None],
        changed: Callable[[Pod], None],
        refused: Callable[[Pod, str], None] = lambda pod, why: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.training: dict[str, Reading] = {}
        self.serving: dict[str, ServingStatus] = {}
        self.asked: dict[str, dict[str, bool]] = {}  # path → pod uid → answered
        self.refusals: dict[str, str] = {}  # by pod uid: why its port is not read
        self._told: dict[str, tuple[float, str]] = {}  # by pod uid: what was told of it, and when
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._pods, self._node, self._changed, self._refused = pods, node, changed, refused
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ranges = tuple(r for r in settings.pod_cidrs.split(",") if r)

    async def run(self) -> None:
        """Polls for ever."""
        while True:
            await self.poll_once()
            await asyncio.sleep(self._settings.poll_period_s)

    async def poll_once(self) -> None:
        """Reads every pod that has something to say, and forgets those that are gone."""
        known = {p.uid: p for p in self._pods() if p.kind}
        stores: list[dict[str, Any]] = [
            self.training,
            self.serving,
            self.refusals,
            self._told,
            *self.asked.values(),
        ]
        for store in stores:
            for uid in [u for u in store if u not in known]:
                del store[uid]
        gate = asyncio.Semaphore(PARALLEL)

        async def one(pod: Pod) -> None:
            async with gate:
                await self._poll(pod)

        wanted = [p for p in known.values() if _speaks(p)]
        await asyncio.gather(*(one(p) for p in wanted))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def ask(self, ask: Ask, pod: Pod | None) -> None:
        """Posts until it is answered or its time is up; the owner is looked at again then."""
        answers = self.asked.setdefault(ask.path, {})
        if ask.uid in answers or pod is None or pod.uid != ask.uid:
            return
        answers[ask.uid] = False
        task = asyncio.get_running_loop().create_task(self._asking(ask, pod))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _asking(self, ask: Ask, pod: Pod) -> None:
        end = asyncio.get_running_loop().time() + ask.timeout_s
        while True:
            left = end - asyncio.get_running_loop().time()
            try:
                answer = await self._call("POST", pod, ask.path, timeout_s=left)
                log.info("asked pod=%s path=%s answer=%s", pod.key, ask.path, str(answer)[:200])
                break
            except ProbeRefused as error:
                log.info("asked pod=%s path=%s refused=%s", pod.key, ask.path, error)
                break  # it does not offer this: nobody to wait for
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if left <= 1.0:
                    log.warning("asked pod=%s path=%s gave up: %r", pod.key, ask.path, error)
                    break
                await asyncio.sleep(min(1.0, left))
        self.asked.setdefault(ask.path, {})[ask.uid] = True
        self._changed(pod)

    async def _poll(self, pod: Pod) -> None:
        try:
            raw = await self._call("GET", pod, STATUS_PATH, timeout_s=self._settings.poll_timeout_s)
        except ProbeRefused as error:
            self._metrics.polls.labels("refused").inc()
            self._refuse(pod, str(error))
            return
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._metrics.polls.labels("failed").inc()
            return
        self._metrics.polls.labels("ok").inc()
        if self.refusals.pop(pod.uid, None) is not None and pod.uid in self._told:
            self._told[pod.uid] = (self._told[pod.uid][0], "")
        self.take(pod, raw)

    def _refuse(self, pod: Pod, why: str) -> None:
        """Keeps why a port is not read; tells it once, and another reason at most once in a while."""
        if self.refusals.get(pod.uid) != why:
            self.refusals[pod.uid] = why
            self._changed(pod)
        at, told = self._told.get(pod.uid, (float("-inf"), ""))
        if why != told and self._clock() - at >= TELL_AGAIN_S:
            self._told[pod.uid] = (self._clock(), why)
            log.warning("poll refused: %s", why)
            self._refused(pod, why)

    def take(self, pod: Pod, raw: Any) -> None:
        """Keeps a pod's answer where it is valid and new."""
        if pod.kind == KIND_TRAINING:
            reading = parse_reading(raw)
            if reading is not None and reading != self.training.get(pod.uid):
                self.training[pod.uid] = reading
                self._changed(pod)
        elif pod.kind == KIND_SERVICE:
            try:
                said = ServingStatus.model_validate(raw)
            except ValidationError:
                return
            old = self.serving.get(pod.uid)
            self.serving[pod.uid] = said
            if old is None or (old.ready, old.draining) != (said.ready, said.draining) or pod.draining_since:
                self._changed(pod)

    async def _call(self, method: str, pod: Pod, path: str, *, timeout_s: float) -> Any:
        url = address_of(pod, self._node(pod.node), self._ranges) + path
        bearer = bearer_for(self._settings.workload_key, pod.owner_uid)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=2 * PARALLEL, force_close=True), trust_env=False
            )
        async with self._session.request(
            method,
            url,
            headers={"Authorization": f"Bearer {bearer}", "Accept": "application/json"},
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=max(0.1, timeout_s)),
        ) as response:
            if response.status != 200:
                raise ProbeRefused(f"pod {pod.key}: {method} {path} was answered {response.status}")
            limit = self._settings.poll_limit_bytes
            body = bytearray()
            async for chunk in response.content.iter_chunked(8192):
                body += chunk
                if len(body) > limit:
                    raise ProbeRefused(f"pod {pod.key}: {path} is longer than {limit} bytes")
        try:
            return json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise ProbeRefused(f"pod {pod.key}: {path} is not JSON: {error}") from error


def _speaks(pod: Pod) -> bool:
    if pod.phase != "Running" or not pod.port or not pod.ip:
        return False
    return pod.kind == KIND_SERVICE or (pod.kind == KIND_TRAINING and pod.rank == 0)
