"""Which limits are in force on the boards of a node, and whether they hold what runs there. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from busbar.operator.power.readings import Metered, Reading
from busbar.operator.profiles.paces import STEADY

AT_LIMIT = 0.9
"""Boards that draw less than this part of their limits are not held by them."""
HELD_S = 120.0
"""For so long after a limit has held its boards a replica's speeds are not those without limits."""


def in_force(reading: Reading | None, from_s: float) -> Reading | None:
    """The reading if its limits are real and of this moment."""
    if reading is None or reading.at_s < from_s or reading.is_simulated or reading.refuses:
        return None
    return reading if reading.boards else None


def limit_of(reading: Reading) -> float | None:
    """The limit of the node's boards, of what they draw at most."""
    parts = [
        1.0 if board.limit_w is None else min(board.limit_w / board.nameplate_w, 1.0)
        for board in reading.boards.values()
        if board.nameplate_w > 0
    ]
    return min(parts) if parts and max(parts) - min(parts) <= STEADY else None


class HeldNodes:
    """Nodes whose boards limits have held lately. What a serving engine measures there is slower than without limits, and its step
    model forgets what it has seen after some thousand steps."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def look(self, readings: Mapping[str, Reading], fresh_from_s: float, now_s: float) -> None:
        """To be called once a second; readings of before `fresh_from_s` count for nothing."""
        self._until_s = {node: until for node, until in self._until_s.items() if until > now_s}
        for node, reading in readings.items():
            if in_force(reading, fresh_from_s) is not None and _is_held(reading):
                self._until_s[node] = now_s + HELD_S

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._until_s)


def _is_held(reading: Reading) -> bool:
    return any(board.is_capped and is_at_limit(board) for board in reading.boards.values())


def at_limit(reading: Reading) -> int:
    """How many boards draw as much as their limits let them."""
    return sum(map(is_at_limit, reading.boards.values()))


def is_at_limit(board: Metered) -> bool:
    return board.limit_w is not None and board.watts >= AT_LIMIT * board.limit_w
