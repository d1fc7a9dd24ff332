"""Capacity of pools that pods of no job hold: no tenant is charged for it, and no plan can free it.

Counted are pods that are bound to a ready node of the pool and have not ended. On a CPU pool only what exceeds
``spec.reserved`` of a node counts, because DaemonSets and the system's own pods run on every node. The pool's status,
which members see, has the amounts; the namespaces are named in an event, which only admins see.
"""

from __future__ import annotations

from collections.abc import Iterable

from busbar.kube.types import AcceleratorPool, quantity
from busbar.operator.accounting.allocations import HeldElsewhere
from busbar.operator.pools.nodes import unit_m
from busbar.operator.watch.projections import Pod

MOST_NAMESPACES = 5
"""Named in an event."""


def total(held: Iterable[tuple[str, HeldElsewhere]]) -> dict[str, HeldElsewhere]:
    """By pool, from pools and what is held of one of their nodes."""
    found: dict[str, HeldElsewhere] = {}
    for pool, here in held:
        found[pool] = _sum(found.get(pool, HeldElsewhere()), here)
    return found


def sentence(pool: AcceleratorPool, held: HeldElsewhere) -> str:
    """For the condition; without names."""
    if pool.spec.is_cpu:
        amount = f"{held.accelerators * unit_m(pool) / 1000:g} cores beyond the pool's reserve"
    else:
        amount = f"{held.accelerators:g} accelerators"
    pods = "pod that belongs" if held.pods == 1 else "pods that belong"
    return f"{amount} are held by {held.pods} {pods} to no job of this platform."


def namespaces_sentence(held: HeldElsewhere) -> str:
    """Whose pods they are, for the event."""
    named = ", ".join(held.namespaces[:MOST_NAMESPACES])
    more = len(held.namespaces) - MOST_NAMESPACES
    return f"Their namespaces: {named}{f' and {more} more' if more > 0 else ''}."


def held_on_node(pool: AcceleratorPool, pods: Iterable[Pod]) -> HeldElsewhere | None:
    """What these pods, which belong to no job, hold of a node of this pool; None: nothing."""
    pods, name = tuple(pods), pool.spec.resource_name
    if name == "cpu":
        reserved_m = quantity.to_millis((pool.spec.reserved or {}).get("cpu", 0))
        holders = [pod for pod in pods if pod.requests.cpu_m]
        excess_m = sum(pod.requests.cpu_m for pod in holders) - reserved_m
        amount = excess_m / unit_m(pool)
    else:
        holders = [pod for pod in pods if pod.requests.device(name)]
        amount = float(sum(pod.requests.device(name) for pod in holders))
    if amount <= 0:
        return None
    return HeldElsewhere(amount, len(holders), tuple(sorted({pod.key.namespace for pod in holders})))


def _sum(a: HeldElsewhere, b: HeldElsewhere) -> HeldElsewhere:
    names = tuple(sorted({*a.namespaces, *b.namespaces}))
    return HeldElsewhere(round(a.accelerators + b.accelerators, 3), a.pods + b.pods, names)
