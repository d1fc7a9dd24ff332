"""Reads the ports named ``busbar`` of our workload pods, and posts to them to save or to drain.

The pod is a tenant's container and its answer cannot be trusted, so: only pods of our kinds that declare the
port, run without host network, and whose address lies in their node's pod range; no redirects; at most 64 KiB and
two seconds; a bearer that is valid for this one object, and either for reading or for commands. A pod made by
a release that had no roles is called with its one bearer. Everything else raises ProbeRefused. An engine that is not ours has no status:
its metrics are read in place of it (`model_server.py`), at most 1 MiB.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from pydantic import ValidationError

from busbar.kube.contracts.bearers import Role, bearer_for, former_bearer_for, key_of, role_of
from busbar.kube.contracts.workload import METRICS_PATH, STATUS_PATH, ServingStatus, TrainingStatus
from busbar.kube.types.engines import ForeignEngine
from busbar.operator.errors import ProbeRefused
from busbar.operator.metrics import Metrics
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING
from busbar.operator.pods.model_server import EXPOSITION_LIMIT_BYTES, ModelServer
from busbar.operator.pods.readings import parse_reading
from busbar.operator.settings import Settings
from busbar.operator.watch.projections import Node, Pod
from busbar.operator.write.actions import PostToPod
from busbar.scheduler.autoscale.reach import PortSeen

log = logging.getLogger(__name__)
PARALLEL = 16
REFUSED_AGAIN_S = 1.0  # a pod that refuses what it may be asked again is left alone so long
REPORT_AGAIN_S = 60.0  # limits how many events a pod can cause by its answers


def address_of(pod: Pod, node: Node | None, more_ranges: Iterable[str] = ()) -> str:
    """``http://ip:port`` of a pod that may be called; raises ProbeRefused with the rule that it breaks."""
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
    """Keeps the last reading of each pod, by uid. ``run`` polls; ``post`` sends in the background."""

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
        self.training: dict[str, TrainingStatus] = {}
        self.serving: dict[str, ServingStatus] = {}
        self._servers: dict[str, ModelServer] = {}  # by pod uid: those that are read by their metrics
        self.asked: dict[str, dict[str, bool]] = {}  # path → pod uid → answered
        self.ports: dict[str, PortSeen] = {}  # by pod uid: of those that were asked, and did not refuse
        self._asking: set[str] = set()  # pods that `ask` is reading
        self.refusals: dict[str, str] = {}  # by pod uid: why its port is not read
        self._reported: dict[
            str, tuple[float, str]
        ] = {}  # by pod uid: when the last refusal was reported, and its text
        self._settings, self._metrics, self.clock = settings, metrics, clock
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
        """Reads every pod that answers, and drops what is kept of pods that are gone."""
        known = {p.uid: p for p in self._pods() if p.kind}
        stores: list[dict[str, Any]] = [
            self.training,
            self.serving,
            self._servers,
            self.ports,
            self.refusals,
            self._reported,
            *self.asked.values(),
        ]
        for store in stores:
            for uid in [u for u in store if u not in known]:
                del store[uid]
        gate = asyncio.Semaphore(PARALLEL)

        async def one(pod: Pod) -> None:
            async with gate:
                await self._poll(pod)

        wanted = [p for p in known.values() if _has_port(p)]
        await asyncio.gather(*(one(p) for p in wanted))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def ask(self, pod: Pod) -> None:
        """Reads a pod now, in the background, unless this is being done."""
        if pod.uid in self._asking or not _has_port(pod):
            return
        self._asking.add(pod.uid)
        task = asyncio.get_running_loop().create_task(self._poll(pod))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._asking.discard(pod.uid))

    def url_of(self, pod: Pod) -> str:
        """Its address; empty where it may not be called."""
        with suppress(ProbeRefused):
            return address_of(pod, self._node(pod.node), self._ranges)
        return ""

    def post(self, post: PostToPod, pod: Pod | None, peers: Sequence[Pod] = ()) -> None:
        """Posts, with the addresses of `peers` if there are any, until it is answered or its time is up; then the pod is read, if it may be asked again, and the owner is
        reconciled."""
        answers = self.asked.setdefault(post.path, {})
        if (
            (post.uid in answers and not (post.repeats and answers[post.uid]))
            or pod is None
            or pod.uid != post.uid
        ):
            return
        answers[post.uid] = False
        task = asyncio.get_running_loop().create_task(self._posting(post, pod, self._told(post, peers)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _told(self, post: PostToPod, peers: Sequence[Pod]) -> dict[str, Any] | None:
        """The body, which also tells a pod of others; those that may not be called are left out."""
        found = []
        for peer in peers:
            with suppress(ProbeRefused):
                found.append(address_of(peer, self._node(peer.node), self._ranges))
        return {**(post.body or {}), **({"peers": found} if found else {})} or None

    async def _posting(self, post: PostToPod, pod: Pod, body: dict[str, Any] | None) -> None:
        end = asyncio.get_running_loop().time() + post.timeout_s
        told = {"pod": str(pod.key), "path": post.path}
        answered = False
        while True:
            left = end - asyncio.get_running_loop().time()
            try:
                answer = await self._call("POST", pod, post.path, timeout_s=left, body=body)
                log.info("pod asked", extra={**told, "answer": str(answer)[:200]})
                answered = True
                break
            except ProbeRefused as error:
                log.info("pod not asked", extra={**told, "error": str(error)})
                break  # it does not offer this: no answer will come
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if left <= 1.0:
                    log.warning("pod did not answer", extra={**told, "error": repr(error)})
                    break
                await asyncio.sleep(min(1.0, left))
        if post.repeats:
            await self._poll(pod)
            if not answered:
                await asyncio.sleep(REFUSED_AGAIN_S)
        self.asked.setdefault(post.path, {})[post.uid] = True
        self._changed(pod)

    async def _poll(self, pod: Pod) -> None:
        limit_s, began_s = self._settings.poll_timeout_s, self.clock()
        try:
            if pod.engine is not None:
                self.take_metrics(
                    pod, pod.engine, await self._fetch("GET", pod, METRICS_PATH, timeout_s=limit_s)
                )
            else:
                self.take(pod, await self._call("GET", pod, STATUS_PATH, timeout_s=limit_s))
        except ProbeRefused as error:
            self._metrics.polls.labels("refused").inc()
            self.ports.pop(pod.uid, None)
            self._unheard(pod)
            self._refuse(pod, str(error))
            return
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._metrics.polls.labels("failed").inc()
            self._port_seen(pod, False, began_s)
            self._unheard(pod)
            return
        self._metrics.polls.labels("ok").inc()
        self._port_seen(pod, True, began_s)
        if self.refusals.pop(pod.uid, None) is not None and pod.uid in self._reported:
            self._reported[pod.uid] = (self._reported[pod.uid][0], "")

    def _port_seen(self, pod: Pod, answers: bool, at_s: float) -> None:
        seen = self.ports.get(pod.uid)
        if seen is None or seen.answers != answers:
            self.ports[pod.uid] = PortSeen(answers, at_s)
            if seen is not None and pod.kind == KIND_SERVICE:
                self._changed(pod)

    def _unheard(self, pod: Pod) -> None:
        """An engine that is not ours never says that it takes no more requests, so while nothing is heard of it, it counts as
        busy."""
        known = self.serving.get(pod.uid)
        if pod.engine is not None and known is not None and not known.running:
            self.serving[pod.uid] = known.model_copy(update={"running": 1})

    def _refuse(self, pod: Pod, why: str) -> None:
        """Keeps why a port is not read, and reports it once; another reason at most every ``REPORT_AGAIN_S``."""
        if self.refusals.get(pod.uid) != why:
            self.refusals[pod.uid] = why
            self._changed(pod)
        at, reported = self._reported.get(pod.uid, (float("-inf"), ""))
        if why != reported and self.clock() - at >= REPORT_AGAIN_S:
            self._reported[pod.uid] = (self.clock(), why)
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
                status = ServingStatus.model_validate(raw)
            except ValidationError:
                return
            self._keep(pod, status)

    def take_metrics(self, pod: Pod, engine: ForeignEngine, answer: bytes) -> None:
        """Keeps what the metrics of an engine say; raises ProbeRefused if they are not its."""
        server = self._servers.setdefault(pod.uid, ModelServer(engine, pod.owner_uid, pod.served))
        self._keep(pod, server.take(answer, self.clock()))

    def _keep(self, pod: Pod, status: ServingStatus) -> None:
        old = self.serving.get(pod.uid)
        self.serving[pod.uid] = status
        if old is None or _of_routes(old) != _of_routes(status) or pod.draining_since:
            self._changed(pod)

    async def _call(self, method: str, pod: Pod, path: str, *, timeout_s: float, body: object = None) -> Any:
        answer = await self._fetch(method, pod, path, timeout_s=timeout_s, body=body)
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise ProbeRefused(f"pod {pod.key}: {path} is not JSON: {error}") from error

    async def _fetch(
        self, method: str, pod: Pod, path: str, *, timeout_s: float, body: object = None
    ) -> bytes:
        url = address_of(pod, self._node(pod.node), self._ranges) + path
        bearer = _bearer(self._settings.workload_keys, pod, path)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=2 * PARALLEL, force_close=True), trust_env=False
            )
        async with self._session.request(
            method,
            url,
            json=body,
            headers={"Authorization": f"Bearer {bearer}", "Accept": "application/json, text/plain;q=0.9"},
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=max(0.1, timeout_s)),
        ) as response:
            if response.status != 200:
                raise ProbeRefused(f"pod {pod.key}: {method} {path} was answered {response.status}")
            limit = EXPOSITION_LIMIT_BYTES if path == METRICS_PATH else self._settings.poll_limit_bytes
            answer = bytearray()
            async for chunk in response.content.iter_chunked(8192):
                answer += chunk
                if len(answer) > limit:
                    raise ProbeRefused(f"pod {pod.key}: {path} is longer than {limit} bytes")
        return bytes(answer)


def _bearer(keys: tuple[bytes, ...], pod: Pod, path: str) -> str:
    if not pod.bearers:
        return former_bearer_for(keys[0], pod.owner_uid)
    key = key_of(pod.bearers, pod.owner_uid, keys)
    if key is None:
        raise ProbeRefused(f"pod {pod.key} was made under another workload key")
    return bearer_for(key, pod.owner_uid, role_of(path) or Role.READ)


def _of_routes(status: ServingStatus) -> tuple[object, ...]:
    """What routes and the service's reconcile must follow at once."""
    length = 0 if status.report is None else status.report.max_model_len
    adapters = [(each.name, each.message) for each in status.adapters]
    return status.ready, status.draining, status.sleep_level, length, adapters, status.restarted


def _has_port(pod: Pod) -> bool:
    if pod.phase != "Running" or not pod.port or not pod.ip:
        return False
    return pod.kind == KIND_SERVICE or (pod.kind == KIND_TRAINING and pod.rank == 0)
