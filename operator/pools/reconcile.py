"""The reconcile of an AcceleratorPool: its status, from what a snapshot says about it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from busbar.kube.types import AcceleratorPool
from busbar.kube.types.accelerator_pool import AcceleratorPoolStatus, ForeignCapacity
from busbar.kube.types.reasons import ConditionType, Reason
from busbar.operator.accounting.allocations import HeldElsewhere, Overlap, PoolAllocation
from busbar.operator.pools.held_elsewhere import namespaces_sentence, sentence
from busbar.operator.write.status import clip, conditions

COUNTS_S = 2.0
"""What jobs hold of a pool is written at most so often."""


@dataclass(frozen=True)
class PoolUpdate:
    status: AcceleratorPoolStatus | None = None
    waits: bool = False
    """Only the amounts that jobs hold differ: people read them, and every `COUNTS_S` will do."""
    event: str = ""
    """For admins, when it changes what pods of no job hold: how much, and in which namespaces."""


def reconcile(pool: AcceleratorPool, allocation: PoolAllocation, now: datetime) -> PoolUpdate:
    """The pool's status from what a snapshot says about it."""
    old = pool.status or AcceleratorPoolStatus()
    elsewhere = allocation.elsewhere
    generation = pool.metadata.generation
    ready = allocation.nodes > 0
    reason = Reason.NODES_READY if ready else Reason.NO_NODES
    selector = ", ".join(f"{k}={v}" for k, v in sorted(pool.spec.node_selector.items()))
    text = f"{allocation.nodes} nodes are ready." if ready else f"No ready node has the labels {selector}."
    lacking = [fabric_sentence(pool, allocation.without_fabric)] if allocation.without_fabric else []
    text = clip(" ".join([text, *lacking, *map(overlap_sentence, allocation.overlaps)]))
    new = old.model_copy(
        update={
            "observed_generation": generation,
            "nodes": allocation.nodes,
            "capacity": allocation.capacity,
            "allocated": allocation.allocated,
            "free": round(max(0.0, allocation.capacity - allocation.allocated), 3),
            "held_elsewhere": _foreign(elsewhere),
            "conditions": [
                *conditions(old.conditions, {ConditionType.READY: ready}, reason, text, generation, now),
                *conditions(
                    old.conditions,
                    {ConditionType.CAPACITY_HELD_ELSEWHERE: elsewhere.pods > 0},
                    Reason.FOREIGN_PODS if elsewhere.pods else Reason.NO_FOREIGN_PODS,
                    sentence(pool, elsewhere) if elsewhere.pods else "No other pods hold its capacity.",
                    generation,
                    now,
                ),
            ],
        }
    )
    if new == old:
        return PoolUpdate()
    waits = new == old.model_copy(update={"allocated": new.allocated, "free": new.free})
    changed = elsewhere.pods > 0 and new.held_elsewhere != old.held_elsewhere
    return PoolUpdate(
        new, waits, f"{sentence(pool, elsewhere)} {namespaces_sentence(elsewhere)}" if changed else ""
    )


def fabric_sentence(pool: AcceleratorPool, nodes: int) -> str:
    """That so many ready nodes have too few devices of the pool's network."""
    wanted = " and ".join(f"{each} x {name}" for name, each in sorted(pool.spec.fabric_devices.items()))
    have = "1 node has" if nodes == 1 else f"{nodes} nodes have"
    return (
        f"{have} less than {wanted} for each accelerator (spec.interconnect.fabric.resources), and only the accelerators "
        "that have them count; look for the device plugin's pod there."
    )


def overlap_sentence(overlap: Overlap) -> str:
    """What both pools say of nodes that both select."""
    nodes, are = ("1 node", "is") if overlap.nodes == 1 else (f"{overlap.nodes} nodes", "are")
    if overlap.ours:
        return f"{nodes} {are} selected by pool {overlap.other} too, and {'counts' if overlap.nodes == 1 else 'count'} here."
    return f"{nodes} that it selects {'belongs' if overlap.nodes == 1 else 'belong'} to pool {overlap.other}."


def _foreign(held: HeldElsewhere) -> ForeignCapacity | None:
    return ForeignCapacity(accelerators=held.accelerators, pods=held.pods) if held.pods else None
