"""Which pods hold which board: the kubelet's devices (`pod_resources.py`) found among the boards that the meters know.

NVIDIA's device plugin names a board by its uuid. A board that is shared in time has several devices, `UUID::N`, and a slice
(MIG) a uuid of its own, of which the driver knows the board. If one device of a kind that boards have is not found, nothing is
said of the whole node: whoever holds that device would be missing on some board. This also holds for boards that pods claim
(DRA), and for plugins that name boards in other ways, such as by the device file.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from busbar.kube.contracts.power import MOST_HOLDERS

from .pod_resources import Device, KubeletSilent

log = logging.getLogger(__name__)

PERIOD_S = 1.0
KEPT_S = 10.0
"""An answer counts for so long: while the kubelet restarts, nobody is given other boards."""
SETTLED_S = 5.0
"""A kubelet must have answered for so long: one that has just started leaves out pods that it does not know yet."""
RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
"""With these names begin the resources under which device plugins offer boards and their slices."""
IDS = ("GPU-", "MIG-")
"""With these begin uuids of boards and slices, whatever their resource is called."""
SLICE = "MIG-"
SILENT = "the kubelet does not say it: "
CLAIM_DRIVERS = ("gpu.nvidia.com",)
"""Drivers whose claims (DRA) are boards."""

BoardOf = Callable[[str], str | None]
"""The board that a slice is on, both by uuid; None: no such slice is known."""


class BoardsUnknown(Exception):
    """It cannot be said which pods hold the boards; the text says why."""


class Kubelet(Protocol):
    """Raises KubeletSilent; `devices` may take a second."""

    def devices(self) -> list[Device]: ...

    def close(self) -> None: ...


def board_pods(
    boards: Iterable[str], devices: Iterable[Device], board_of: BoardOf
) -> dict[str, tuple[str, ...]]:
    """The pods on each of the boards, by uuid. Raises BoardsUnknown."""
    found: dict[str, set[str]] = {uuid: set() for uuid in boards}
    for device in devices:
        uuid: str | None = device.id.partition("::")[0]
        if device.id.startswith(SLICE) and uuid not in found:
            uuid = board_of(device.id.partition("::")[0])
        if uuid in found:
            found[uuid].add(device.pod)
        elif device.resource in CLAIM_DRIVERS and not device.id:
            raise BoardsUnknown(f"{device.pod} holds boards by a claim of {device.resource}")
        elif device.resource.startswith(RESOURCES) or device.id.startswith(IDS):
            raise BoardsUnknown(
                f"{device.pod} holds {device.id} of {device.resource}, which is none of the boards"
            )
    for uuid, pods in found.items():
        if len(pods) > MOST_HOLDERS:
            raise BoardsUnknown(f"{len(pods)} pods hold {uuid}, and only {MOST_HOLDERS} can be told")
    return {uuid: tuple(sorted(pods)) for uuid, pods in found.items()}


class BoardPods:
    """Asks the kubelet once a second, apart from the meters. `now` may be called from another thread."""

    def __init__(
        self,
        kubelet: Kubelet,
        boards: Callable[[], Iterable[str]],
        board_of: BoardOf,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            boards: the uuids of the node's boards; without boards the kubelet is not asked.
        """
        self._kubelet, self._boards, self._board_of, self._clock = kubelet, boards, board_of, clock
        self._found: tuple[float, Mapping[str, tuple[str, ...]]] = -math.inf, {}
        self._why: str | None = None
        self._silent_s = clock()

    def now(self) -> Mapping[str, tuple[str, ...]]:
        """By board; empty: it is not known."""
        asked_s, found = self._found
        return found if self._clock() - asked_s <= KEPT_S else {}

    def ask(self) -> None:
        """Asks once."""
        asked_s, boards = self._clock(), tuple(self._boards())
        if not boards:
            return
        try:
            devices = self._kubelet.devices()
            if asked_s - self._silent_s < SETTLED_S:
                return
            self._found = asked_s, board_pods(boards, devices, self._board_of)
        except KubeletSilent as error:
            self._silent_s = asked_s
            self._tell(SILENT, str(error))
        except BoardsUnknown as error:
            self._found = -math.inf, {}
            self._tell(str(error))
        else:
            self._tell("")

    async def run(self) -> None:
        """Asks until cancelled."""
        try:
            while True:
                await asyncio.to_thread(self.ask)
                await asyncio.sleep(PERIOD_S)
        finally:
            self._kubelet.close()

    def _tell(self, why: str, details: str = "") -> None:
        """Logs what has changed; details alone, which differ from call to call, are no change."""
        if why == self._why:
            return
        self._why = why
        if why:
            log.warning("it is not known which pods hold which boards", extra={"why": why + details})
        else:
            log.info("it is known which pods hold which boards")
