"""The agent's port: `GET /telemetry` and `POST /lease`, each with its bearer, `/healthz` for the kubelet, and nothing else."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from aiohttp import web
from pydantic import ValidationError

from busbar.kube.contracts.power import (
    LEASE_PATH,
    PATH,
    SIGNATURE,
    SIMULATOR,
    AgentAnswer,
    AgentReport,
    LeaseAnswer,
    LeaseMessage,
    LeaseOrder,
    LeaseRefusal,
    LeaseState,
    lease_bearer,
    telemetry_bearer,
)

from . import heartbeat
from .leases import LeaseRefused
from .limits import Limiter
from .meters import HOST, NO_PODS, BackendAbsent, Node, report, sampled
from .probing import asked, limited
from .settings import Settings
from .signing import Verifier

log = logging.getLogger(__name__)

LAPSE_PART = 0.9
"""An agent that stood still for this part of its guard's patience gives up its leases."""
BURST_S = 0.1
"""Between two looks while a bucket lets the boards run above their lease."""
MOST_BYTES = 1024 * 1024


class Agent:
    """Reads the meters, serves what they say, and sets limits where it may."""

    def __init__(
        self, settings: Settings, nodes: list[Node], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._clock = settings, clock
        self._nodes = {node.name: node for node in nodes}
        lapse_s = LAPSE_PART * settings.guard_after_s
        self._limiters = {
            node.name: Limiter(node.epoch, boards, clock, lapse_s)
            for node in nodes
            if (boards := limited(settings, node)) is not None
        }
        self._board_pods = asked(settings, nodes, self._uuids, clock)
        self._told: dict[str, AgentReport] = {}
        self._tell(self._nodes)
        self._failing: dict[str, str] = {}
        self._beat_s = -math.inf
        self._lock = threading.Lock()  # of the meters and limits: two threads use them
        name = SIMULATOR if settings.backend == "simulated" else settings.node
        self._telemetry_bearer = f"Bearer {telemetry_bearer(settings.key, name)}".encode()
        self._lease_bearer = f"Bearer {lease_bearer(settings.key, name)}".encode()
        self._verifier = Verifier(settings.lease_cert) if settings.lease_cert else None
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Reads the meters once, with limits takes the standing cap, and opens the port."""
        await asyncio.to_thread(self.sample)
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_get(PATH, self._telemetry)
        app.router.add_post(LEASE_PATH, self._lease)
        app.router.add_get("/healthz", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._settings.host, self._settings.port).start()
        self.port = self._runner.addresses[0][1]

    async def run(self) -> None:
        """Reads the meters, and asks the kubelet, until cancelled."""
        asking = asyncio.create_task(self._board_pods.run()) if self._board_pods is not None else None
        try:
            await self._read()
        finally:
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _read(self) -> None:
        while True:
            bursts = any(limiter.bursts for limiter in self._limiters.values())
            await asyncio.sleep(min(self._settings.period_s, BURST_S) if bursts else self._settings.period_s)
            await asyncio.to_thread(self.sample)

    async def stop(self) -> None:
        """Closes the port; boards that were limited are left at their standing cap."""
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.to_thread(self._stand)

    def sample(self) -> None:
        """One look at all meters and limits. A node whose meters fail keeps its last report, whose clock stands still."""
        with self._lock:
            failed = [self._sample(node) for node in tuple(self._nodes.values())]
            self._tell(self._nodes)
            if self._limiters and not any(failed):
                self._beat_s = self._clock()
                try:
                    self._beat()
                except OSError as error:  # then the guard lowers the boards
                    log.warning("heartbeat not written", extra={"error": str(error)})

    def _sample(self, node: Node) -> bool:
        """Whether its limits failed: then there is no heartbeat, and the guard tries."""
        limits_failed = node.name in self._limiters
        try:
            try:
                self._nodes[node.name] = node = sampled(node, self._clock())
            finally:  # a lease ends although the meters fail
                if limiter := self._limiters.get(node.name):
                    drawn = {u: c.watts for u, c in node.counters.items() if u != HOST}
                    limiter.look(drawn)
                    limits_failed = False
            self._failing.pop(node.name, None)
        except (OSError, ValueError, BackendAbsent) as error:
            if self._failing.get(node.name) != str(error):
                self._failing[node.name] = str(error)
                log.warning("meters or limits failed", extra={"node": node.name, "error": str(error)})
        return limits_failed

    def _tell(self, names: Iterable[str]) -> None:
        """Makes reports of one moment: the other thread serves them while this one goes on."""
        pods = self._board_pods.now() if self._board_pods is not None else NO_PODS
        told = {name: report(self._nodes[name], self._limiters.get(name), pods) for name in names}
        self._told = self._told | told

    def _uuids(self) -> list[str]:
        return [uuid for node in self._nodes.values() for uuid in node.counters if uuid != HOST]

    def _beat(self, leased: Iterable[str] = ()) -> None:
        """Tells the guard when limits were last as they should be, and which nodes are released but for these."""
        if self._limiters and self._settings.heartbeat_file:
            released = {n for n, limiter in self._limiters.items() if _is_released(limiter)} - set(leased)
            heartbeat.write(Path(self._settings.heartbeat_file), self._beat_s, released)

    def _stand(self) -> None:
        with self._lock:
            for name, limiter in self._limiters.items():
                try:
                    limiter.stand()
                except (OSError, BackendAbsent) as error:
                    log.warning("limits failed", extra={"node": name, "error": str(error)})

    async def _telemetry(self, request: web.Request) -> web.Response:
        if not _has(request, self._telemetry_bearer):
            return _refused(401, "Unauthorized", "no")
        return web.json_response(
            text=AgentAnswer(reports=tuple(self._told.values())).model_dump_json(by_alias=True)
        )

    async def _lease(self, request: web.Request) -> web.Response:
        if not _has(request, self._lease_bearer):
            return _refused(401, "Unauthorized", "no")
        if not self._settings.set_limits:
            return _refused(403, "Forbidden", "this agent may not set limits (power.agent.setLimits)")
        body = await request.read()
        if self._verifier is None or not self._verifier.is_signed(body, request.headers.get(SIGNATURE, "")):
            return _refused(401, "Unauthorized", "the signature is not that of this platform's operator")
        try:
            order = LeaseOrder.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            return _refused(422, "Invalid", f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        refused = await asyncio.to_thread(self._take, order.leases)
        answer = LeaseAnswer(refused=refused)
        return web.json_response(text=answer.model_dump_json(by_alias=True), status=409 if refused else 200)

    def _take(self, messages: Sequence[LeaseMessage]) -> tuple[LeaseRefusal, ...]:
        refused = []
        with self._lock:
            # Before a limit is raised the guard knows that it is to be guarded.
            self._beat(message.node for message in messages if not message.releases)
            for message in messages:
                limiter = self._limiters.get(message.node)
                try:
                    if limiter is None:
                        raise LeaseRefused("no board of this node takes limits from this agent")
                    limiter.take(message)
                except (LeaseRefused, OSError, BackendAbsent) as error:
                    refused.append(LeaseRefusal(node=message.node, why=str(error)))
            self._beat()
            self._tell(message.node for message in messages if message.node in self._nodes)
        return tuple(refused)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"failing": self._failing})


def _is_released(limiter: Limiter) -> bool:
    return limiter.held.state is LeaseState.RELEASED


def _has(request: web.Request, bearer: bytes) -> bool:
    return hmac.compare_digest(request.headers.get("Authorization", "").encode(), bearer)


def _refused(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message}}, status=status)
