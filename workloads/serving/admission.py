"""Whether a replica takes a request now. Pure Python but for the engine's states."""

from __future__ import annotations

from dataclasses import dataclass

from busbar.workloads.serving.engine import EngineState, unavailable
from busbar.workloads.serving.errors import Overloaded


@dataclass(frozen=True)
class Standing:
    """How a replica is at one moment."""

    state: EngineState
    draining: bool
    stalled_s: float | None
    """No step has ended for so long, which is too long; None: one has."""
    waiting: int
    most_waiting: int


def refusal_of(now: Standing) -> tuple[str, Overloaded] | None:
    """(the reason that is counted, or nothing, and the answer); None: requests are taken."""
    if now.draining:
        return "draining", Overloaded("this replica is draining; send the request again", retry_after_s=1)
    if now.state is not EngineState.READY:
        return "", unavailable(now.state)
    if now.stalled_s is not None:
        return "stalled", Overloaded(f"no step has ended for {now.stalled_s:.0f} s; ask another replica")
    if now.waiting >= now.most_waiting:
        text = f"{now.waiting} requests wait already; try again shortly"
        return "queue_full", Overloaded(text, retry_after_s=2)
    return None
