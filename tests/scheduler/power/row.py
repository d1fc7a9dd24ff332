"""Nodes and telemetry for the power tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from busbar.scheduler.power import (
    CapCurve,
    HeldLease,
    NodePower,
    NodeTelemetry,
    Phase,
    PhaseLoad,
    accepted,
    allowed_w,
)
from busbar.scheduler.power.decision import Decision

CURVE = CapCurve(((0.25, 3.0), (0.5, 1.4), (0.75, 1.1), (1.0, 1.0)))
CURVES = {Phase.PREFILL: CURVE, Phase.DECODE: CURVE.softened(0.5), Phase.TRAINING: CURVE}
BUSY = (PhaseLoad(Phase.TRAINING, 1.0, 400.0),)
FLAT = (PhaseLoad(Phase.TRAINING, 1.0, 300.0, curve=CapCurve(((0.25, 1.05), (1.0, 1.0)))),)
STEEP = (PhaseLoad(Phase.TRAINING, 1.0, 400.0, curve=CapCurve(((0.25, 10.0), (0.9, 2.0), (1.0, 1.0)))),)
"""Training whose curve was learned."""
IDLE = (PhaseLoad(Phase.IDLE, 1.0, 60.0),)
SERVING = (PhaseLoad(Phase.PREFILL, 0.3, 400.0), PhaseLoad(Phase.DECODE, 0.7, 220.0))


def node(name: str, weight: float = 1.0, controllable: bool = True) -> NodePower:
    """Eight boards of 100 to 400 W: 2,000 W at the floor, 5,000 W at most."""
    return NodePower(name, 1000.0, 8, 100.0, 400.0, 1.25, weight, controllable)


def told(
    held: HeldLease,
    name: str,
    now: float,
    phases: tuple[PhaseLoad, ...] = BUSY,
    *,
    drawn_w: float = 3000.0,
    spread_w: float = 0.0,
) -> NodeTelemetry:
    """What a node with this lease says of itself; its clock is a thousand seconds ahead."""
    return NodeTelemetry(
        node=name,
        at_s=now,
        epoch=held.epoch,
        clock_s=now + 1000,
        sequence=held.sequence,
        limit_w=allowed_w(held, now + 1000),
        drawn_w=drawn_w,
        spread_w=spread_w,
        phases=phases,
    )


def fresh(nodes: Iterable[NodePower]) -> dict[str, HeldLease]:
    return {node.name: HeldLease(epoch=1, floor_w=node.floor_w) for node in nodes}


def delivered(held: Mapping[str, HeldLease], decision: Decision, now: float) -> dict[str, HeldLease]:
    after = dict(held)
    for lease in decision.leases:
        after[lease.node] = accepted(after[lease.node], lease, now + 1000)
    return after
