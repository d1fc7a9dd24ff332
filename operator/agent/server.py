"""The agent's port: `GET /telemetry` with the bearer of this node, `/healthz` for the kubelet, and nothing else."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Callable

from aiohttp import web

from busbar.kube.contracts.power import PATH, SIMULATOR, AgentAnswer, Backend, Probe, telemetry_bearer

from .meters import BackendAbsent, BoardsOrHost, Node, report, sampled
from .nvml import Nvml
from .rapl import Rapl
from .settings import Settings
from .simulated import SimulatedBoards, SimulatedHost

log = logging.getLogger(__name__)


def probed(settings: Settings) -> list[Node]:
    """The nodes for which this process answers, each with its back ends; what was tried is logged and reported."""
    epoch = uuid.uuid4().hex
    if settings.backend == "simulated":
        invented = (Probe(backend=Backend.SIMULATED, used=True, why="these watts are invented"),)
        return [
            Node(
                name,
                epoch,
                _boards(settings, name),
                SimulatedHost(settings.simulated_host_watts),
                invented,
                {},
                0,
            )
            for name in settings.simulated_nodes
        ]
    probes: list[Probe] = []
    boards = _tried(probes, Backend.NVML, Nvml)
    host = _tried(probes, Backend.RAPL, Rapl)
    return [Node(settings.node, epoch, boards, host, tuple(probes), {}, 0)]


def _boards(settings: Settings, name: str) -> SimulatedBoards:
    return SimulatedBoards(
        name,
        settings.simulated_boards,
        settings.simulated_board_watts,
        settings.simulated_board_floor_watts,
        settings.simulated_seed,
    )


def _tried(probes: list[Probe], backend: Backend, make: Callable[[], BoardsOrHost]) -> BoardsOrHost | None:
    try:
        made = make()
    except BackendAbsent as error:
        probes.append(Probe(backend=backend, used=False, why=str(error)[:253]))
        log.info("back end not used", extra={"backend": backend.value, "why": str(error)})
        return None
    probes.append(Probe(backend=backend, used=True))
    log.info("back end used", extra={"backend": backend.value})
    return made


class Agent:
    """Reads the meters and serves what they say."""

    def __init__(
        self, settings: Settings, nodes: list[Node], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._clock = settings, clock
        self._nodes = {node.name: node for node in nodes}
        self._failing: dict[str, str] = {}
        name = SIMULATOR if settings.backend == "simulated" else settings.node
        self._expected = f"Bearer {telemetry_bearer(settings.key, name)}".encode()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Reads the meters once and opens the port."""
        await asyncio.to_thread(self.sample)
        app = web.Application()
        app.router.add_get(PATH, self._telemetry)
        app.router.add_get("/healthz", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._settings.host, self._settings.port).start()
        self.port = self._runner.addresses[0][1]

    async def run(self) -> None:
        """Reads the meters until cancelled."""
        while True:
            await asyncio.sleep(self._settings.period_s)
            await asyncio.to_thread(self.sample)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def sample(self) -> None:
        """One look at all meters. A node whose meters fail keeps its last report, whose clock then stands still."""
        for name, node in self._nodes.items():
            try:
                self._nodes[name] = sampled(node, self._clock())
                self._failing.pop(name, None)
            except (OSError, ValueError, BackendAbsent) as error:
                if self._failing.get(name) != str(error):
                    self._failing[name] = str(error)
                    log.warning("meters not read", extra={"node": name, "error": str(error)})

    async def _telemetry(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self._expected):
            return web.json_response({"error": {"code": "Unauthorized", "message": "no"}}, status=401)
        answer = AgentAnswer(reports=tuple(report(node) for node in self._nodes.values()))
        return web.json_response(text=answer.model_dump_json(by_alias=True))

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"failing": self._failing})
