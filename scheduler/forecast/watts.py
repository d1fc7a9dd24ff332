"""Power domains for the light model of the queue, which knows accelerators only.

A domain that carries no more than some of the accelerators below it looks to the model as if it had no others: as many
free ones are taken out of its nodes as it has no watts for, at what an accelerator in use there draws on average. When
jobs end, their accelerators, and so their watts, are free again. Where jobs draw much more or less than the average, or
would start under a power cap, starts come later or sooner than told; the correction by earlier forecasts sees that.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from ..candidates.draw import Draws
from ..model.snapshot import Resources, Snapshot
from ..model.table import TableView
from ..placement.feeds import EMPTY, Feeds


def carried(snapshot: Snapshot, table: TableView) -> Snapshot:
    """The snapshot with no more free accelerators than its power domains have watts for; itself where none limits."""
    draws = Draws(snapshot, table)
    if not draws.counts:
        return snapshot
    feeds = Feeds(snapshot, table)
    held: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    for job in snapshot.jobs:
        if job.run is not None:
            place = draws.counted(job, job.run.placement)
            for name in place.nodes:
                held[name] += place.per_pod.accelerators_m
                drawn[name] += place.watts
    most = {
        pool.name: max(0.0, table.nameplate_watts(pool.key) - table.idle_watts(pool.key))
        for pool in snapshot.pools
        if not pool.is_cpu
    }
    nodes = {node.name: node for node in snapshot.nodes if node.pool in most and node.name in feeds.chains}
    free = {name: max(0, node.capacity.accelerators_m - held[name]) for name, node in nodes.items()}
    depth = {number: at - len(chain) for chain in feeds.chains.values() for at, number in enumerate(chain)}
    for number in sorted(depth, key=lambda number: (depth[number], number)):
        inside = sorted(name for name in nodes if number in feeds.chains[name])
        run_w, run_m = sum(drawn[name] for name in inside), sum(held[name] for name in inside)
        each_w = (
            1000 * run_w / run_m if run_w else max((most[nodes[name].pool] for name in inside), default=0.0)
        )
        left_w = 0.0 if feeds.domains[number].closed else max(0, feeds.left[EMPTY][number] - run_w)
        if each_w <= 0:
            continue
        excess_m = sum(free[name] for name in inside) - 1000 * math.floor(left_w / each_w)
        for name in reversed(inside):  # so that what is left is whole nodes, as far as it can be
            taken_m = min(free[name], max(0, excess_m))
            free[name] -= taken_m
            excess_m -= taken_m
    return replace(
        snapshot,
        nodes=tuple(
            replace(
                node,
                capacity=node.capacity
                - Resources(_taken_m(nodes[node.name].capacity, held[node.name], free[node.name])),
            )
            if node.name in nodes
            else node
            for node in snapshot.nodes
        ),
    )


def _taken_m(capacity: Resources, held_m: int, free_m: int) -> int:
    return max(0, capacity.accelerators_m - held_m) - free_m
