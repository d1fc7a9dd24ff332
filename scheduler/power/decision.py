"""What goes into a round of the controller beside the domains, and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import PowerError
from .leases import SENTENCES, Lease, LeaseReason, NodeMemory


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """How the controller reaches the nodes."""

    ttl_s: float | None = 10.0
    """How long a lease lasts. None: limits written out of band stay in the boards until they are replaced."""
    drift_s: float = 0.1
    """What the two clocks may differ by over one time to live."""
    stale_s: float = 3.0
    """Telemetry older than this is silence: no lease is renewed, the node falls to its floor."""
    repeat_s: float = 0.0
    """A write that was not read back is repeated after this time, unless something lower is due."""
    renew_s: float = 0.0
    """A confirmed lease that does not change is renewed after this time; far less than its time to live."""
    raise_per_s: float = 0.10
    """A lease rises by at most this part of the nameplate in a second."""
    deadband: float = 0.01
    """A lease is not changed by less than this part of itself."""
    limits_stay: bool = False
    """The boards keep their limits if nothing on the node is left to lower them. Then a lease that ends on a node that
    nobody hears counts until the node is heard again."""

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not 0 < self.ttl_s < math.inf:
            raise PowerError("ttl_s must be above 0 or None")
        times = (self.drift_s, self.stale_s, self.repeat_s, self.renew_s, self.raise_per_s, self.deadband)
        if min(times) < 0:
            raise PowerError("the controller's times and parts must not be negative")

    def ends_s(self, now: float) -> float:
        """When a lease sent now has ended wherever it went."""
        return math.inf if self.ttl_s is None else now + self.ttl_s + self.drift_s


@dataclass(frozen=True, slots=True)
class Excess:
    """A domain whose nodes may draw more than its budget: the budget was cut, or a node counts whole."""

    since_s: float
    usable_w: float
    """When this began; a further cut begins anew."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What must be kept between rounds. After a restart begin a new one with a higher term; that is safe."""

    term: int
    at_s: float
    sent: int = 0
    nodes: Mapping[str, NodeMemory] = field(default_factory=dict)
    excess: Mapping[str, Excess] = field(default_factory=dict)


def begin(now: float, term: int) -> Memory:
    """A controller that has just become the leader and knows nothing."""
    if term < 0:
        raise PowerError("the term of a controller must not be negative")
    return Memory(term=term, at_s=now)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What was decided for a node."""

    node: str
    domain: str
    target_w: float
    """What it should have; raising may take more rounds."""
    counted_w: float
    """What it may draw at most, by everything that was sent to it."""
    reason: LeaseReason
    lease: Lease | None = None
    """The message to send now, if any."""

    @property
    def sentence(self) -> str:
        return SENTENCES[self.reason]


@dataclass(frozen=True, slots=True)
class DomainReport:
    """A domain after the round."""

    domain: str
    budget_w: float
    usable_w: float
    counted_w: float
    """The sum of what its nodes may draw, the messages of this round included."""
    floor_w: float
    """The least to which its nodes can be lowered."""
    drawn_w: float
    """The sum of what was last heard."""
    reason: LeaseReason | None = None
    """FLOOR, when even the lowest limits of all boards are above the budget."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A round's outcome."""

    nodes: tuple[NodeReport, ...]
    domains: tuple[DomainReport, ...]
    memory: Memory

    @property
    def leases(self) -> tuple[Lease, ...]:
        return tuple(report.lease for report in self.nodes if report.lease is not None)
