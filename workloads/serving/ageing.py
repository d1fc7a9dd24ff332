"""Which waiting request of an owner begins in its turn: the one with the smallest `priority`, of equal ones the first that
came. Pure choice: `scheduler.py` carries it out.

A steady stream of small numbers would keep the others waiting for ever. So of an owner's turns, after `MOST_OVERTAKEN` in a
row in which somebody overtook its oldest waiting request, one goes to that request. A request that found p of its owner's
waiting begins within (MOST_OVERTAKEN + 1) (p + 1) of the owner's turns, whatever comes later and however the numbers differ,
and at least MOST_OVERTAKEN / (MOST_OVERTAKEN + 1) of the turns are those of the smallest numbers. Numbers that grow with
the time waited would not give that: when many large numbers have waited for long, all of them would go before a small one.
"""

from __future__ import annotations

from collections.abc import Collection

from busbar.workloads.serving.fairness import REMEMBERED, Owner
from busbar.workloads.serving.sequence import Sequence

MOST_OVERTAKEN = 7
"""Turns in a row. A request with a small number waits for one eighth of the turns more than without the rule, at most."""
_Name = tuple[tuple[str, str], bool]


class Ageing:
    """Counts by owner how often its oldest waiting request was overtaken in a row."""

    def __init__(self) -> None:
        self._overtaken: dict[_Name, int] = {}

    def choose(self, own: Collection[Sequence]) -> Sequence:
        """The request that begins next; `own` are those of one owner that may, at least one."""
        oldest = min(own, key=lambda s: s.came)
        if self._overtaken.get(_name(oldest.owner), 0) >= MOST_OVERTAKEN:
            return oldest
        return min(own, key=lambda s: (s.priority, s.came))

    def begins(self, head: Sequence, waiting: Collection[Sequence]) -> None:
        """A request begins; `waiting` are those of all owners that wait on."""
        name = _name(head.owner)
        if any(s.came < head.came and s.owner.same(head.owner) for s in waiting):
            self._overtaken[name] = self._overtaken.get(name, 0) + 1
        else:
            self._overtaken.pop(name, None)
        if len(self._overtaken) > REMEMBERED:  # the requests of some were cancelled
            names = {_name(s.owner) for s in waiting}
            self._overtaken = {each: n for each, n in self._overtaken.items() if each in names}


def _name(owner: Owner) -> _Name:
    return owner.name, owner.batch
