"""Nodes of which the scheduler may count on each board being limited by itself. Pure but for what it remembers."""

from __future__ import annotations

from collections.abc import Iterable

KEPT_S = 60.0
"""A node stays one for so long after nobody says any more who holds its boards: a kubelet or an agent that starts anew is
back by then, and plans do not change to and fro."""


class TellingNodes:
    """Remembers when it was last known of each node which pods hold which board."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def look(self, known: Iterable[str], now_s: float) -> frozenset[str]:
        """Of this moment.

        Args:
            known: names of the nodes of which it is known now.
        """
        self._until_s = {name: until for name, until in self._until_s.items() if until > now_s}
        self._until_s |= dict.fromkeys(known, now_s + KEPT_S)
        return frozenset(self._until_s)
