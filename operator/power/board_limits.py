"""Which limits are in force on the boards of pods, and whether they hold what runs there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from busbar.kube.informer import Key
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.readings import Metered, Reading
from busbar.operator.profiles.paces import STEADY
from busbar.operator.watch.projections import Pod

AT_LIMIT = 0.9
"""Boards that draw less than this part of their limits are not held by them."""
HELD_S = 120.0
"""For so long after a limit has held its boards a replica's speeds are not those without limits."""


def in_force(reading: Reading | None, from_s: float) -> Reading | None:
    """The reading if its limits are real and of this moment."""
    if reading is None or reading.at_s < from_s or reading.is_simulated or reading.refuses:
        return None
    return reading if reading.boards else None


@dataclass(frozen=True, slots=True)
class OwnBoards:
    """The boards that pods hold on one node."""

    boards: tuple[Metered, ...]
    """Empty: of one of the pods it is not known yet."""
    known: bool = True
    """False: nobody says which boards of the node they hold, and these are all of them."""

    @property
    def part(self) -> float | None:
        """Their limit, of what they draw at most: the lowest, as what runs on several goes at the pace of the slowest. None: it is
        not known, as nobody says whose they are and they have different ones."""
        return min(self._parts, default=None) if self.known else self.common

    @property
    def common(self) -> float | None:
        """The same where all have it; None: they have different ones."""
        parts = self._parts
        return min(parts) if parts and max(parts) - min(parts) <= STEADY else None

    @property
    def _parts(self) -> list[float]:
        return [_part(board) for board in self.boards if board.nameplate_w > 0]

    @property
    def at_limit(self) -> int:
        """How many draw as much as their limits let them."""
        return sum(map(is_at_limit, self.boards))


def own_boards(reading: Reading, pods: Iterable[Pod], holders: Boards | None) -> OwnBoards:
    """The boards of these pods of the node.

    Args:
        holders: who holds which; None: nobody says.
    """
    boards = reading.boards
    if holders is None:
        return OwnBoards(tuple(boards.values()), known=False)
    found: dict[str, Metered] = {}
    for pod in pods:
        own = {uuid: boards[uuid] for uuid in _held_by(pod.key, holders) if uuid in boards}
        if not own:
            return OwnBoards(())
        found |= own
    return OwnBoards(tuple(found.values()))


def _held_by(pod: Key, holders: Boards) -> set[str]:
    return {uuid for uuid, keys in holders.items() if pod in keys}


def _part(board: Metered) -> float:
    return 1.0 if board.limit_w is None else min(board.limit_w / board.nameplate_w, 1.0)


class HeldPods:
    """Pods whose boards limits have held lately. What a serving engine measures there is slower than without limits, and its step
    model forgets what it has seen after some thousand steps."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def look(
        self,
        readings: Mapping[str, Reading],
        pods: Iterable[Pod],
        boards: Mapping[str, Boards],
        fresh_from_s: float,
        now_s: float,
    ) -> None:
        """To be called once a second; readings of before `fresh_from_s` count for nothing.

        Args:
            boards: who holds them, by node of which it is known; elsewhere, and for pods of which it is not known yet, any board
                of the node may be theirs.
        """
        self._until_s = {uid: until for uid, until in self._until_s.items() if until > now_s}
        held = {
            node: {uuid for uuid, board in reading.boards.items() if board.is_capped and is_at_limit(board)}
            for node, reading in readings.items()
            if in_force(reading, fresh_from_s) is not None
        }
        held = {node: uuids for node, uuids in held.items() if uuids}
        for pod in pods if held else ():
            if pod.node not in held or pod.ended:
                continue
            own = _held_by(pod.key, boards.get(pod.node, {}))
            if not own or not own.isdisjoint(held[pod.node]):
                self._until_s[pod.uid] = now_s + HELD_S

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(self._until_s)


def is_at_limit(board: Metered) -> bool:
    return board.limit_w is not None and board.watts >= AT_LIMIT * board.limit_w
