"""Topology: gangs stay together.

Nodes stand in a tree of domains (`Node.topology`, outermost first); a node is the innermost domain. A gang
goes to the deepest domain that holds it: one node, else one NVLink domain, one rack, and so on as the
snapshot says, up to the whole pool. That is a preference; `Job.required_domain` is the level outside which it
waits instead. Of equal domains the one with the least room is taken, so that larger gangs find the others
whole. `most` bounds the number of nodes: speeds are known by it (`model/table.py`), and a gang that is worth its place on
two nodes only does not go to three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..model.snapshot import Node

Rooms = Sequence[tuple[int, int]]
"""(index of the node, pods that fit on it)."""


def domains_of(
    nodes: Sequence[Node], rooms: Iterable[tuple[int, int]], level: int
) -> dict[tuple[str, ...], Rooms]:
    """Nodes with room by their domain of a level; nodes outside all domains are left out."""
    found: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for i, room in rooms:
        domain = nodes[i].topology[:level]
        if len(domain) == level and (not level or domain[-1]):
            found.setdefault(domain, []).append((i, room))
    return dict(found)


def _all(rooms: Rooms) -> Rooms:
    return rooms


def place_gang(
    nodes: Sequence[Node],
    rooms: Rooms,
    pods: int,
    required: int | None,
    together: Callable[[Rooms], Rooms] = _all,
    most: int = 0,
) -> list[int] | None:
    """Nodes for all pods of a gang (one index per pod) in the deepest domain that holds them, or None.

    Args:
        together: of rooms, how many pods the nodes may have together; each alone may have all of its own.
        most: different nodes that it may use; 0: any number.
    """
    if sum(room for _, room in rooms) < pods:
        return None
    alone = [(room, i) for i, room in rooms if room >= pods]
    if alone:
        return [min(alone)[1]] * pods
    deepest = max((len(nodes[i].topology) for i, _ in rooms), default=0)
    for level in range(deepest, (required or 0) - 1, -1):
        domains = {domain: together(own) for domain, own in domains_of(nodes, rooms, level).items()}
        sizes = [(held_by(own, most), domain) for domain, own in domains.items()]
        fitting = [
            (sum(room for _, room in domains[domain]), domain) for size, domain in sizes if size >= pods
        ]
        if fitting:
            return _pack(domains[min(fitting)[1]], pods)
    return None


def held_by(rooms: Rooms, most: int) -> int:
    """How many pods these nodes hold, or the `most` roomiest of them (0: all)."""
    sizes = [room for _, room in rooms]
    return sum(sorted(sizes, reverse=True)[:most] if most else sizes)


def _pack(rooms: Rooms, pods: int) -> list[int]:
    """On few nodes: fill the roomiest, and end on the node that the rest fits best."""
    chosen: list[int] = []
    left = pods
    ordered = sorted(rooms, key=lambda item: (-item[1], item[0]))
    while left:
        fits = [item for item in ordered if item[1] >= left]
        i, room = min(fits, key=lambda item: (item[1], item[0])) if fits else ordered[0]
        ordered.remove((i, room))
        count = min(room, left)
        chosen.extend([i] * count)
        left -= count
    return sorted(chosen)
