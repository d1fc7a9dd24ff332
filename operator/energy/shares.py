"""The joules of one node, shared among those who hold its boards. Pure.

Where it is known which boards each pod holds, the joules of a board are its holder's, and nobody's where nobody holds it. Those
of a board that is divided, into slices or in time, are shared by the pods on it, and marked estimated.

Elsewhere only is known how many boards each pod holds. So:

* boards that nobody holds are those that draw the least; their idle draw is nobody's;
* the other boards are shared by the number held. A holder so pays once for the idle draw of what it holds;

Then only a node whose boards are all held by one pod, or all by nobody, has joules that are known to be its holder's; where
boards are shared, the joules are marked estimated.

The host's joules are shared in any case by the part of all boards that each holds, on a node of a CPU pool by the part of its
cores that each requests, and the rest is nobody's. Joules of simulated nodes are marked simulated in any case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

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
    boards: float
    """The part of the node's boards."""
    host: float
    """The part of the host that it pays for."""


@dataclass(frozen=True, slots=True)
class HeldBoard:
    """A board of which it is known who holds it."""

    parts: tuple[tuple[Owner, float], ...]
    """Of each pod on it: the owner, and how much of the board it holds beside the others; empty: nobody holds it."""
    divided: bool
    """Slices of it are held, or times: a pod alone on it need not hold all of it."""


@dataclass(frozen=True, slots=True)
class Charge:
    """Joules of one owner."""

    owner: Owner
    joules: float
    source: Source


Sums = defaultdict[tuple[Owner, Source], float]
NOT_KNOWN: Mapping[str, HeldBoard] = MappingProxyType({})


def shared(
    drawn: Sequence[Drawn],
    holders: Sequence[Holder],
    boards_from: Backend,
    host_from: Backend,
    known: Mapping[str, HeldBoard] = NOT_KNOWN,
) -> list[Charge]:
    """Everything that was drawn, each joule once.

    Args:
        known: who holds which board; it counts if all boards are in it.
    """
    sums: Sums = defaultdict(float)
    boards = [d for d in drawn if d.meter != HOST]
    host = [d for d in drawn if d.meter == HOST]
    if all(board.meter in known for board in boards):
        _add_boards(sums, boards, known, boards_from)
    else:
        _add_parts(sums, boards, [(h.owner, h.boards) for h in holders], boards_from, Source.COUNTER)
    _add_parts(sums, host, [(h.owner, h.host) for h in holders], host_from, Source.RAPL)
    return [Charge(owner, joules, source) for (owner, source), joules in sums.items() if joules > 0]


def _add_boards(
    sums: Sums, boards: Iterable[Drawn], known: Mapping[str, HeldBoard], backend: Backend
) -> None:
    """Each board to its holders."""
    for board in boards:
        held = known[board.meter]
        source = _source(backend, Source.COUNTER, sure=board.measured and not held.divided)
        parts = held.parts or ((NOBODY, 1.0),)
        whole = sum(part for _, part in parts)
        for owner, part in parts:
            sums[owner, source] += board.joules * part / whole


def _add_parts(
    sums: Sums,
    meters: Iterable[Drawn],
    parts: Sequence[tuple[Owner, float]],
    backend: Backend,
    measured: Source,
) -> None:
    """All meters together, by the part of them that each holds."""
    held = sum(part for _, part in parts)
    owners = sum(part > 0 for _, part in parts)
    whole = not owners or (owners == 1 and held > 1 - NEARLY)
    for sure, of_holders, of_nobody in _split(meters, min(1.0, held), whole=whole):
        source = _source(backend, measured, sure=sure)
        for owner, part in parts:
            if part > 0:
                sums[owner, source] += of_holders * part / held
        sums[NOBODY, source] += of_nobody


def _split(drawn: Iterable[Drawn], held: float, *, whole: bool) -> list[tuple[bool, float, float]]:
    """Joules of the holders together and joules of nobody, first those that are sure; what is held draws the most.

    Args:
        held: the part of the meters that is held.
        whole: whether it is known whose they are.
    """
    meters = sorted(drawn, key=lambda d: -d.joules)
    sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
    left = held * len(meters)
    for meter in meters:
        taken = min(1.0, max(0.0, left))
        left -= taken
        sides = sums[whole and meter.measured]
        sides[0] += meter.joules * taken
        sides[1] += meter.joules * (1 - taken)
    return [(sure, sides[0], sides[1]) for sure, sides in sums.items()]


def nobodys(drawn: Iterable[Drawn], boards_from: Backend) -> list[Charge]:
    """Joules of which nobody knows who held the meters."""
    joules = sum(each.joules for each in drawn)
    source = _source(boards_from, Source.ESTIMATED, sure=False)
    return [Charge(NOBODY, joules, source)] if joules > 0 else []


def _source(backend: Backend, measured: Source, *, sure: bool) -> Source:
    if backend is Backend.SIMULATED:
        return Source.SIMULATED
    return measured if sure else Source.ESTIMATED
