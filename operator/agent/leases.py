"""What a node holds: the standing cap, a lease until a moment of its own clock, or nothing. Pure.

The rules are those of `busbar.scheduler.power.leases`, on the node's side. A lease is over half a second before its end
as the controller counts it, because the boards need that time to be lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from busbar.kube.contracts.power import LeaseMessage, LeaseState

ENDS_EARLY_S = 0.5
"""Two readings of the meters and one write."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the node holds."""

    state: LeaseState = LeaseState.STANDING
    sequence: int = 0
    """Of the newest message that was taken."""
    watts: float = 0.0
    host_w: float = 0.0
    until_clock_s: float = 0.0
    burst_j: float = 0.0
    """Depth of the bucket; 0: none."""
    board_part: float = 1.0
    """Of its nameplate, the most for each board that `board_parts` does not name."""
    board_parts: Mapping[str, float] = field(default_factory=dict)
    """The same of single boards, by uuid."""

    @property
    def boards_w(self) -> float:
        """What a lease leaves to the boards."""
        return self.watts - self.host_w

    def part(self, uuid: str) -> float:
        """Of its nameplate, the most for this board."""
        return self.board_parts.get(uuid, self.board_part)


class LeaseRefused(Exception):
    """The message changes nothing; the text says why."""


def taken(held: Held, epoch: str, message: LeaseMessage, clock_s: float) -> Held:
    """What the node holds after this message.

    Raises:
        LeaseRefused: it is old, for another start of the agent, or has ended already.
    """
    if message.epoch != epoch:
        raise LeaseRefused("it is for another start of this agent; read the telemetry again")
    if message.sequence <= held.sequence:
        raise LeaseRefused(f"its sequence is {message.sequence}, and {held.sequence} was taken already")
    if message.watts is None or message.ttl_s is None:
        return Held(LeaseState.RELEASED, message.sequence)
    if message.clock_s > clock_s:
        raise LeaseRefused(f"it counts from {message.clock_s:.3f} s, which this node's clock has not reached")
    until_s = message.clock_s + message.ttl_s - ENDS_EARLY_S
    if clock_s >= until_s:
        raise LeaseRefused(f"it has ended {clock_s - until_s:.1f} s before it arrived")
    return Held(
        LeaseState.LEASED,
        message.sequence,
        message.watts,
        message.host_watts,
        until_s,
        message.burst_j,
        message.board_part,
        message.board_parts,
    )


def at(held: Held, clock_s: float) -> Held:
    """What the node holds at this moment: a lease that has ended is the standing cap."""
    if held.state is LeaseState.LEASED and clock_s >= held.until_clock_s:
        return standing(held)
    return held


def standing(held: Held) -> Held:
    """The standing cap; the sequence stays, so that no older message is taken."""
    return Held(LeaseState.STANDING, held.sequence)
