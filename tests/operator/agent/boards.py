"""Boards whose limits can be watched, and an agent's clock that stands until it is moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from busbar.kube.contracts.power import LeaseMessage
from busbar.operator.agent.limits import BoardLimit, LimitFailed

EPOCH = "e1"


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Boards:
    """Boards of 100 to 400 W, with every limit at 400 W."""

    names: tuple[str, ...] = ("a", "b", "c", "d")
    set_w: dict[str, float] = field(default_factory=dict)
    refusing: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    """They take a limit, and keep the one they had."""
    writes: list[tuple[str, float]] = field(default_factory=list)
    lost: bool = False
    default_w: float = 400.0
    most_w: float = 0.0
    """The largest sum of limits since it was set to zero."""

    def limits(self) -> Sequence[BoardLimit]:
        if self.lost:
            raise OSError("the driver is gone")
        return [
            BoardLimit(n, 100.0, 400.0, self.default_w, self.limit_w(n), self.limit_w(n)) for n in self.names
        ]

    def set_limit(self, uuid: str, watts: float) -> None:
        if uuid in self.refusing:
            raise LimitFailed("Not Supported")
        self.writes.append((uuid, watts))
        if uuid not in self.deaf:
            self.set_w[uuid] = watts
        self.most_w = max(self.most_w, self.total_w)

    def limit_w(self, name: str) -> float:
        return self.set_w.get(name, 400.0)

    @property
    def total_w(self) -> float:
        return sum(self.limit_w(name) for name in self.names)


def lease(
    watts: float,
    sequence: int,
    clock_s: float = 1000.0,
    *,
    ttl_s: float = 10.0,
    host_w: float = 500.0,
    epoch: str = EPOCH,
) -> LeaseMessage:
    """A lease of so many watts for the node `n`, of which 500 are the host's."""
    return LeaseMessage(
        node="n",
        epoch=epoch,
        sequence=sequence,
        watts=watts,
        host_watts=host_w,
        clock_s=clock_s,
        ttl_s=ttl_s,
    )


def capped(
    watts: float,
    sequence: int,
    part: float,
    clock_s: float = 1000.0,
    burst_j: float = 0.0,
    **parts: float,
) -> LeaseMessage:
    """The same under which no board gets more than a part of its nameplate, these boards parts of their own."""
    told = lease(watts, sequence, clock_s)
    return told.model_copy(update={"board_part": part, "burst_j": burst_j, "board_parts": parts})


def release(sequence: int, epoch: str = EPOCH) -> LeaseMessage:
    return LeaseMessage(node="n", epoch=epoch, sequence=sequence)
