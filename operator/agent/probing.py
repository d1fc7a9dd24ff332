"""Which back ends this process has, for which nodes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from busbar.kube.contracts.power import Backend, Probe

from .board_pods import BoardPods
from .limits import LimitedBoards
from .meters import BackendAbsent, BoardsOrHost, Node
from .nvml import Nvml
from .pod_resources import PodResources
from .rapl import Rapl
from .settings import Settings
from .simulated import FolderLimits, SimulatedBoards, SimulatedHost

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


def limited(settings: Settings, node: Node) -> LimitedBoards | None:
    """The node's boards, if this process may set their limits and they take any."""
    boards = node.boards
    if settings.set_limits and isinstance(boards, Nvml | SimulatedBoards):
        return boards
    return None


def asked(
    settings: Settings,
    nodes: Sequence[Node],
    uuids: Callable[[], Iterable[str]],
    clock: Callable[[], float],
) -> BoardPods | None:
    """Who asks the kubelet which pods hold the boards; None where nobody is to ask it.

    Args:
        uuids: of the boards of this node.
    """
    if not settings.pod_resources_socket:
        return None
    slices = next((node.boards.board_of for node in nodes if isinstance(node.boards, Nvml)), lambda _: None)
    return BoardPods(PodResources(Path(settings.pod_resources_socket)), uuids, slices, clock)


def _boards(settings: Settings, name: str) -> SimulatedBoards:
    folder = settings.simulated_limits_dir
    return SimulatedBoards(
        name,
        settings.simulated_boards,
        settings.simulated_board_watts,
        settings.simulated_board_floor_watts,
        settings.simulated_seed,
        written=FolderLimits(Path(folder)) if folder else {},
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
