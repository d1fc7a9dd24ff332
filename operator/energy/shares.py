"""The joules of one node, shared among those who hold its boards. Pure.

Which board is whose is not known, only how many each pod holds. So:

* boards that nobody holds are those that draw the least; their idle draw is nobody's;
* the other boards are shared by the number held. A holder so pays once for the idle draw of what it holds;
* the host's joules are shared by the part of all boards that each holds, on a node without boards by the part of its
  cores that each requests, and the rest is nobody's.

Only a node whose boards are all held by one pod, or all by nobody, has joules that are known to be its holder's; where
boards are shared, the joules are marked estimated. Those of simulated nodes are marked simulated in any case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from busbar.kube.contracts.power import Backend
from busbar.operator.energy.metering import Drawn
from busbar.operator.power.readings import HOST

NEARLY = 1e-9


class Source(StrEnum):
    """Where joules come from; values of a label, which never change."""

    COUNTER = "counter"
    RAPL = "rapl"
    ESTIMATED = "estimated"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who pays; the empty one is nobody."""

    tenant: str = ""
    kind: str = "unassigned"
    """job, service or pod."""
    uid: str = ""
    """Of the TrainingJob or ModelService."""


NOBODY = Owner()


@dataclass(frozen=True, slots=True)
class Holder:
    """What one pod holds of a node."""

    owner: Owner
    part: float
    """Of the node's boards; on a node without boards, of its cores."""


@dataclass(frozen=True, slots=True)
class Charge:
    """Joules of one owner."""

    owner: Owner
    joules: float
    source: Source


def shared(
    drawn: Sequence[Drawn], holders: Sequence[Holder], boards_from: Backend, host_from: Backend
) -> list[Charge]:
    """Everything that was drawn, each joule once."""
    held = sum(holder.part for holder in holders)
    scale = 1 / held if held > 1 else 1.0
    parts = [(holder.owner, holder.part * scale) for holder in holders if holder.part > 0]
    held = min(1.0, held)
    whole = not parts or (len(parts) == 1 and held > 1 - NEARLY)
    sums: defaultdict[tuple[Owner, Source], float] = defaultdict(float)
    for source, of_holders, of_nobody in (
        *_boards(drawn, held, boards_from, whole=whole),
        *_host(drawn, held, host_from, whole=whole),
    ):
        for owner, part in parts:
            sums[owner, source] += of_holders * part / held
        sums[NOBODY, source] += of_nobody
    return [Charge(owner, joules, source) for (owner, source), joules in sums.items() if joules > 0]


_Split = tuple[Source, float, float]
"""Joules of one source: those of the holders together, and those of nobody."""


def _boards(drawn: Sequence[Drawn], held: float, backend: Backend, *, whole: bool) -> list[_Split]:
    boards = sorted((d for d in drawn if d.meter != HOST), key=lambda d: -d.joules)
    sums: dict[Source, list[float]] = {}
    left = held * len(boards)
    for board in boards:
        taken = min(1.0, max(0.0, left))
        left -= taken
        source = _source(backend, Source.COUNTER, sure=whole and board.measured)
        sides = sums.setdefault(source, [0.0, 0.0])
        sides[0] += board.joules * taken
        sides[1] += board.joules * (1 - taken)
    return [(source, sides[0], sides[1]) for source, sides in sums.items()]


def _host(drawn: Sequence[Drawn], held: float, backend: Backend, *, whole: bool) -> list[_Split]:
    return [
        (
            _source(backend, Source.RAPL, sure=whole and host.measured),
            host.joules * held,
            host.joules * (1 - held),
        )
        for host in drawn
        if host.meter == HOST
    ]


def nobodys(drawn: Iterable[Drawn], boards_from: Backend) -> list[Charge]:
    """Joules of which nobody knows who held the meters."""
    joules = sum(each.joules for each in drawn)
    source = _source(boards_from, Source.ESTIMATED, sure=False)
    return [Charge(NOBODY, joules, source)] if joules > 0 else []


def _source(backend: Backend, measured: Source, *, sure: bool) -> Source:
    if backend is Backend.SIMULATED:
        return Source.SIMULATED
    return measured if sure else Source.ESTIMATED
