"""Leases, on both sides: what a node holds, and what the controller must count until it knows better.

A lease ends at a moment of the **node's own** monotonic clock, counted from the clock that the node reported before
the lease was written. So a message that arrives late has less time left, and no clocks need to agree. The node takes
only leases of its present epoch and of a higher sequence than it has. The controller therefore knows:

- a lease that it sent ends at the latest `ttl_s` (and the clocks' drift) after it was sent, wherever the message is;
- once the node has reported a sequence, no lease with a lower one can come into force any more.

Without a time to live (out-of-band limits, which stay in the board) only the second rule ends a lease. Where limits are
in the boards, and what lowers them at the end of a lease may be dead (`ControlSettings.limits_stay`), the first rule
counts only up to the moment at which the node was last heard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

TERM = 1 << 40
"""Sequences of one controller; a restarted controller has a higher term, so its leases are newer than all before."""


class LeaseReason(StrEnum):
    """Why a node has these watts; the values never change."""

    OBSERVED = "Observed"
    STATIC = "EqualShare"
    UNLIMITED = "Unlimited"
    SHARE = "MarginalShare"
    LOWERED = "Lowered"
    RAISED = "Raised"
    WAITING = "WaitsForLowering"
    UNKNOWN = "NotReadBack"
    STALE = "TelemetryStale"
    CONFLICT = "CapConflict"
    UNCONTROLLABLE = "RefusesLimits"
    FLOOR = "FloorAboveBudget"


SENTENCES = {
    LeaseReason.OBSERVED: "the domain's policy is Observe, so nothing is limited",
    LeaseReason.STATIC: "the domain's policy is Static: every node has the same lease",
    LeaseReason.UNLIMITED: "there are watts enough for all that this node can draw",
    LeaseReason.SHARE: "the watts that are left save more work on other nodes",
    LeaseReason.LOWERED: "lowered: the watts save more work on other nodes",
    LeaseReason.RAISED: "raised: others have given watts back",
    LeaseReason.WAITING: "more is due and follows when the lowering of other nodes was read back",
    LeaseReason.UNKNOWN: "held at the floor until the node has confirmed a lease of this controller",
    LeaseReason.STALE: "no fresh telemetry: nothing is renewed or raised, and a lease that ends leaves the floor",
    LeaseReason.CONFLICT: "the limit read back is above the lease: the node counts with all it can draw",
    LeaseReason.UNCONTROLLABLE: "the boards refuse limits: the node counts with all it can draw",
    LeaseReason.FLOOR: "the lowest limits of all boards together are above the budget",
}


@dataclass(frozen=True, slots=True)
class Lease:
    """The message to a node: so many watts, until that moment of its own clock."""

    node: str
    watts: float
    sequence: int
    epoch: int
    until_clock_s: float | None
    """None: until another lease replaces it."""
    board_limit_w: float
    """What every board is limited to if the node does not split the lease itself."""
    burst_s: float = 0.0
    """Depth of the token bucket in seconds of the lease; 0: the boards' limits alone keep the lease."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The node's side: what it holds. `lease` None: the floor."""

    epoch: int
    floor_w: float
    lease: Lease | None = None

    @property
    def sequence(self) -> int:
        return self.lease.sequence if self.lease else 0


def accepted(held: HeldLease, lease: Lease, clock_s: float) -> HeldLease:
    """What the node holds after this message. Old, foreign and ended leases change nothing."""
    if lease.epoch != held.epoch or lease.sequence <= held.sequence:
        return held
    if lease.until_clock_s is not None and clock_s >= lease.until_clock_s:
        return held
    return HeldLease(held.epoch, held.floor_w, lease)


def allowed_w(held: HeldLease, clock_s: float) -> float:
    """What the node may draw now: its lease while that lasts, then its floor."""
    lease = held.lease
    if lease is None or (lease.until_clock_s is not None and clock_s >= lease.until_clock_s):
        return held.floor_w
    return max(lease.watts, held.floor_w)


@dataclass(frozen=True, slots=True)
class Grant:
    """The controller's side: a lease that may be in force, or may still come into force, until `ends_s`."""

    sequence: int
    watts: float
    sent_s: float
    ends_s: float
    """On the controller's clock; infinite without a time to live."""
    burst: bool = False
    """The boards may be without limits while the node's bucket is not empty."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """What the controller remembers of a node."""

    epoch: int = -1
    clock_s: float = -math.inf
    """Of the newest telemetry: older answers that arrive later are ignored."""
    advanced_s: float = -math.inf
    """The controller's clock when the node's clock last moved on: an answer that repeats itself is silence."""
    confirmed: int = 0
    """The highest sequence that the node has reported in this epoch."""
    inherited_ends_s: float = -math.inf
    """Until then another controller's lease may be in force or come into force."""
    grants: tuple[Grant, ...] = ()
    conflict: bool = False
    """The limit last read back was above everything that was granted: somebody else writes limits."""
    heard_s: float = -math.inf
    """The controller's clock when it asked for the newest telemetry."""

    def certain(self, now: float) -> bool:
        """Whether only this controller's leases can be in force."""
        return now >= self.inherited_ends_s

    def counted_w(self, floor_w: float, nameplate_w: float, now: float) -> float:
        """The most that the node may draw by anything that was ever sent to it.

        Args:
            now: leases that ended until then are over.
        """
        if not self.certain(now):
            return nameplate_w
        most_w = floor_w
        for grant in self.grants:
            if grant.ends_s > now and grant.watts > most_w:
                most_w = grant.watts
        return most_w

    def sent_since_w(self, floor_w: float, nameplate_w: float, since_s: float, now: float) -> float:
        """As `counted_w`, without what was sent earlier and will end by itself or be replaced."""
        if not self.certain(now):
            return nameplate_w
        recent = (grant.watts for grant in self.grants if grant.sent_s >= since_s and grant.ends_s > now)
        return max((floor_w, *recent))

    @property
    def may_run_free(self) -> bool:
        """Whether the boards can be without limits now: then nothing but a process on the node keeps the lease."""
        return any(grant.burst for grant in self.grants)

    @property
    def newest(self) -> Grant | None:
        return self.grants[-1] if self.grants else None


def heard(
    memory: NodeMemory, epoch: int, clock_s: float, sequence: int, term: int, now: float, asked_s: float
) -> NodeMemory:
    """After telemetry: what the node has confirmed can no longer be replaced by anything older."""
    if epoch < memory.epoch or (epoch == memory.epoch and clock_s < memory.clock_s):
        return memory
    if epoch > memory.epoch >= 0:  # restarted: it holds its floor and refuses leases of the epoch before
        return NodeMemory(epoch, clock_s, now, sequence, memory.inherited_ends_s, heard_s=asked_s)
    moved = clock_s > memory.clock_s
    ours = sequence > term * TERM
    confirmed = max(memory.confirmed, sequence)
    return NodeMemory(  # written out: `replace` costs five times as much, and this runs for every node and second
        epoch,
        clock_s,
        now if moved else memory.advanced_s,
        confirmed,
        -math.inf if ours else memory.inherited_ends_s,
        memory.grants
        if not memory.grants or memory.grants[0].sequence >= confirmed
        else tuple(grant for grant in memory.grants if grant.sequence >= confirmed),
        memory.conflict,
        max(memory.heard_s, asked_s) if moved else memory.heard_s,
    )


def granted(memory: NodeMemory, grant: Grant, now: float) -> NodeMemory:
    """After sending: the new grant counts, and so does every older one that it does not cover and that has not ended."""
    kept = tuple(
        old
        for old in memory.grants
        if old.ends_s > now
        and (old.watts > grant.watts or old.ends_s > grant.ends_s or old.burst > grant.burst)
    )
    return NodeMemory(
        memory.epoch,
        memory.clock_s,
        memory.advanced_s,
        memory.confirmed,
        memory.inherited_ends_s,
        (*kept, grant),
        memory.conflict,
        memory.heard_s,
    )
