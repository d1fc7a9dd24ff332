"""What the controller and one node call each other's starts and messages. Pure.

The controller numbers the messages to all nodes in one row, and knows a node's starts by numbers that rise. On the wire a
start is any text, and each node has sequences of its own, which must be above all that any earlier leader has sent. A new
leader does not know how far that one came: it begins a gap above the sequence that the node reports, wider than anything
that can be under way. Sequences that the node reports and that are not ours confirm nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from busbar.kube.contracts.power import MOST_SEQUENCE, LeaseState
from busbar.operator.power.readings import Reading

GAP = 1 << 20
"""More messages than one leader sends to a node in a week while none is confirmed; thousands of millions of leaders find
room."""
STARTS = 16
"""So many starts of a node are remembered: a late answer of an earlier one is known as such."""
REMEMBERED = 64
"""Messages that may be confirmed yet."""


@dataclass(frozen=True, slots=True)
class Line:
    """The line to one node."""

    last: int
    """The highest sequence on the wire."""
    starts: tuple[tuple[str, int], ...]
    """The node's starts with their numbers, oldest first."""
    ours: tuple[tuple[int, int], ...] = ()
    """Sequences on the wire, and the controller's numbers of these messages, oldest first."""

    @property
    def is_full(self) -> bool:
        """No higher sequence is left: the node cannot be told anything."""
        return self.last + GAP > MOST_SEQUENCE

    def number_of(self, epoch: str) -> int:
        """Of this start, which was heard."""
        return dict(self.starts)[epoch]

    def heard(self, reading: Reading) -> tuple[Line, bool]:
        """The line after this reading, and whether somebody else has sent messages meanwhile."""
        starts = self.starts
        if reading.epoch not in dict(starts):
            starts = (*starts, (reading.epoch, starts[-1][1] + 1))[-STARTS:]
        told = _sequence(reading)
        if told > self.last:
            return Line(told + GAP, starts), True
        return Line(self.last, starts, tuple(pair for pair in self.ours if pair[0] >= told)), False

    def sent(self, number: int) -> Line:
        """The line with one more message; its sequence is `last`."""
        newest = (*self.ours, (self.last + 1, number))
        return Line(self.last + 1, self.starts, (*newest[:1], *newest[1:][-REMEMBERED:]))

    def forgetting(self) -> Line:
        """What was sent until now confirms nothing."""
        return replace(self, ours=())

    def told(self, reading: Reading) -> int:
        """The newest of our messages that the node has in force, as the controller numbers it; 0: none."""
        limits = reading.limits
        if limits is None or limits.state is LeaseState.RELEASED:
            return 0
        return dict(self.ours).get(limits.sequence, 0)


def opened(reading: Reading) -> Line:
    """The line of a new leader to a node."""
    return Line(_sequence(reading) + GAP, ((reading.epoch, 1),))


def _sequence(reading: Reading) -> int:
    return reading.limits.sequence if reading.limits is not None else 0
