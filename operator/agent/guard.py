"""``busbar-agent guard``: lowers the boards to the standing cap when the agent's heartbeat is old.

A process of its own, in a container of its own, that listens to nobody. It knows the boards, and the heartbeat file.
While the agent lives it reads one small file; when the agent is dead or stands still, it lowers every board that was not
released, and goes on doing so until the heartbeat is back. It never raises a limit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from . import heartbeat
from .limits import NEAR_W, LimitedBoards, LimitFailed
from .meters import BackendAbsent
from .settings import Settings

log = logging.getLogger(__name__)

PERIOD_S = 0.2


class Guard:
    """Watches one heartbeat for the boards of some nodes."""

    def __init__(
        self, settings: Settings, boards: Mapping[str, LimitedBoards], clock: Callable[[], float]
    ) -> None:
        """
        Args:
            boards: by node.
            clock: the node's monotonic clock, which the agent has too.
        """
        self._file, self._after_s = Path(settings.heartbeat_file), settings.guard_after_s
        self._boards, self._clock = boards, clock
        self._began_s = clock()
        self.lowers = False

    def look(self) -> None:
        """Lowers what must be lowered now."""
        found = heartbeat.read(self._file)
        late = self._clock() - max(found.at_s, self._began_s) > self._after_s
        if late != self.lowers:
            self.lowers = late
            log.warning("the agent's heartbeat is old; boards are lowered" if late else "the agent is back")
        if late:
            self._lower(found)

    def end(self) -> None:
        """The pod ends: what is not released is left at the standing cap."""
        self._lower(heartbeat.read(self._file))

    def run(self, stopped: threading.Event) -> None:
        """Looks until stopped."""
        while not stopped.wait(PERIOD_S):
            self.look()
        self.end()

    def _lower(self, found: heartbeat.Heartbeat) -> None:
        for node, boards in self._boards.items():
            if node in found.released:
                continue
            try:
                for board in boards.limits():
                    if board.set_w > board.floor_w + NEAR_W:
                        self._set(boards, board.uuid, board.floor_w)
            except (OSError, BackendAbsent) as error:
                log.warning("limits not read", extra={"node": node, "error": str(error)})

    def _set(self, boards: LimitedBoards, uuid: str, watts: float) -> None:
        try:
            boards.set_limit(uuid, watts)
        except LimitFailed as error:
            log.warning("limit not set", extra={"board": uuid, "error": str(error)})
