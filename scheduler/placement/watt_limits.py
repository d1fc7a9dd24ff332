"""Which power domains hold jobs back, and how many watts the jobs of which pools may draw together under them.

A domain binds if the accelerators below it, all drawing the most that any of the jobs would, drew more than it carries
(of the accelerators below another binding domain: what that one carries). Of each chain the binding domain next to the
root counts. Pools whose nodes hang on the same binding domains share one limit; nodes of theirs that no binding domain
feeds add what they could draw at most. So a limit holds for every plan, and is less exact where a pool hangs on
several domains: the market prices (`candidates/watt_market.py`) need one number for each pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..candidates.candidate import Candidate
from ..candidates.watt_market import WattLimit
from .cluster import Cluster
from .feeds import EMPTY, Chain, Feeds


def most_watts(bids: Iterable[Candidate]) -> dict[str, float]:
    """The most that a thousandth of an accelerator draws with any of these candidates, by pool; not those that draw
    nothing."""
    most: dict[str, float] = {}
    for one in bids:
        if one.draw_w and one.per_pod.accelerators_m:
            watts = one.draw_w / one.per_pod.accelerators_m
            most[one.pool] = max(watts, most.get(one.pool, 0.0))
    return most


def watt_limits(cluster: Cluster, most: Mapping[str, float]) -> tuple[WattLimit, ...]:
    """The limits that could bind.

    Args:
        most: by pool, what a thousandth of an accelerator draws at most.
    """
    feeds = cluster.feeds
    if feeds is None or not most:
        return ()
    able = {name: _able(cluster, name, watts) for name, watts in sorted(most.items())}
    binding = _binding(feeds, able)
    parts = [
        (
            name,
            {first: watts for chain, watts in own.items() if (first := _first(chain, binding)) is not None},
        )
        for name, own in able.items()
    ]
    limits: list[WattLimit] = []
    for names, numbers in _connected((name, own.keys()) for name, own in parts if own):
        free = sum(
            watts for name in names for chain, watts in able[name].items() if _first(chain, binding) is None
        )
        carried = sum(max(0, feeds.left[EMPTY][number]) for number in numbers)
        domains = tuple(feeds.domains[number].name for number in sorted(numbers))
        limits.append(WattLimit(tuple(sorted(names)), domains, carried + free))
    return tuple(sorted(limits, key=lambda limit: limit.pools))


def _able(cluster: Cluster, pool: str, most: float) -> dict[Chain, float]:
    """What the pool's accelerators draw at most, by the domains above them."""
    nodes, feeds = cluster.pools[pool], cluster.feeds
    assert feeds is not None
    found: dict[Chain, float] = {}
    for node, usable in zip(nodes.nodes, nodes.usable, strict=True):
        if usable:
            chain = feeds.chains.get(node.name, ())
            found[chain] = found.get(chain, 0.0) + most * node.capacity.accelerators_m
    return found


def _binding(feeds: Feeds, able: Mapping[str, Mapping[Chain, float]]) -> frozenset[int]:
    """The domains that carry less than what is below them could draw."""
    drawn: dict[int, float] = {}
    below: dict[int, set[int]] = {}
    depth: dict[int, int] = {}
    for own in able.values():
        for chain, watts in own.items():
            for at, number in enumerate(chain):
                depth[number] = len(chain) - at
                if at:
                    below.setdefault(number, set()).add(chain[at - 1])
                else:
                    drawn[number] = drawn.get(number, 0.0) + watts
    found: set[int] = set()
    carried: dict[int, float] = {}
    for number in sorted(depth, key=lambda number: (-depth[number], number)):
        could = drawn.get(number, 0.0) + sum(carried[one] for one in sorted(below.get(number, ())))
        left = float(max(0, feeds.left[EMPTY][number]))
        carried[number] = min(left, could)
        if left < could:
            found.add(number)
    return frozenset(found)


def _first(chain: Chain, binding: frozenset[int]) -> int | None:
    """The binding domain of a chain that is next to the root."""
    return next((number for number in reversed(chain) if number in binding), None)


def _connected(parts: Iterable[tuple[str, Iterable[int]]]) -> list[tuple[set[str], set[int]]]:
    """Pools that share domains, directly or through others, together with these domains."""
    groups: list[tuple[set[str], set[int]]] = []
    for name, numbers in parts:
        own = ({name}, set(numbers))
        for group in [group for group in groups if not group[1].isdisjoint(own[1])]:
            groups.remove(group)
            own = (own[0] | group[0], own[1] | group[1])
        groups.append(own)
    return groups
