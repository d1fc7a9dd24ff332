"""The nodes of one pool while a plan is being made: what is free now, what will be free, and what fits where.

Free resources are counted twice per node. `free_later` counts the resources of jobs that are being stopped as
free: a job may be planned into them and then waits for the release. `free_now` does not.

A single pod goes to the node that it leaves most useful for what the snapshot's jobs request (`packing.py`;
in a CPU pool: to the one that it leaves fullest). A gang goes to one node if one holds it, else to the
deepest topology domain that does, and of those to the one with the least room (`topology.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..candidates.candidate import Candidate
from ..model.snapshot import Job, Node, Placement, Pool, Resources
from . import sharing
from .demand_mix import request_of
from .feeds import EMPTY, LATER, NOW, Chain, Feeds
from .node_index import NodeIndex
from .open_nodes import why_closed
from .packing import Loss, NodeState, PodRequest, Scorer
from .topology import Rooms, domains_of, held_by, place_gang

_Selector = tuple[tuple[str, str], ...]
_Free = list[int]
"""accelerators_m, cpu_m, memory_mib, ephemeral_mib; in pools that share accelerators then what shares hold of
each device (`sharing.py`)."""


def request(per_pod: Resources, is_cpu: bool) -> tuple[int, int, int, int]:
    """What a pod takes from a node; in a CPU pool the accelerator and the CPU are the same resource."""
    accelerators_m = 0 if is_cpu else per_pod.accelerators_m
    return accelerators_m, per_pod.cpu_m, per_pod.memory_mib, per_pod.ephemeral_mib


def _left_over(states: Sequence[NodeState], kind: PodRequest) -> list[Loss | None]:
    """Losses in a CPU pool: the CPU that would be left."""
    return [(float(cpu_m - kind.cpu_m), 0) if cpu_m >= kind.cpu_m else None for _, cpu_m, _, _ in states]


FEEDS = 4
"""Power domains whose nodes are looked at on their own: with more, a search costs as many times more."""


class PoolNodes:
    """The nodes of one pool, by index in name order."""

    def __init__(self, pool: Pool, nodes: Iterable[Node], scorer: Scorer, model: int = 0) -> None:
        """Count the resources of empty nodes.

        Args:
            scorer: knows what the cluster's jobs request.
            model: the pool's number in the scorer.
        """
        self.pool = pool
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.index = {node.name: i for i, node in enumerate(self.nodes)}
        sizes = [node.capacity.accelerators_m // 1000 for node in self.nodes]
        self.width = max(sizes, default=0) if pool.shareable and not pool.is_cpu else 0
        """Number of devices that are counted one by one."""
        self.free_now = [self._capacity(node) for node in self.nodes]
        self.free_later = [list(free) for free in self.free_now]
        self.total = [tuple(free) for free in self.free_now]
        self.closed = [why_closed(node, pool.tolerations) for node in self.nodes]
        self.usable = [not why for why in self.closed]
        self.key = 1 if pool.is_cpu else 0
        """Which of the four resources is the accelerator."""
        self._capacity_m: int | None = None
        """Kept by `capacity_m` until a node is closed or opened."""
        self.largest = max((total[self.key] for total in self.total), default=0)
        """Accelerators of the largest node, in thousandths."""
        self.releasing = 0
        """Placements in this pool held by jobs that are being stopped."""
        self._in_round = False
        self.at_round_start: dict[int, tuple[_Free, _Free]] = {}
        """Free resources (now, later) when the round began, of nodes that changed since."""
        self._promised: dict[int, _Free] = {}
        """What promised places take of nodes although it is not free yet (`take_promised`)."""
        self._selected: dict[_Selector, frozenset[int]] = {}
        self._empty: dict[tuple[tuple[int, int, int, int], _Selector, int | None, bool, int, int], int] = {}
        self._model = model
        self._scorer = scorer
        self.feeds: Feeds | None = None
        """Power domains that limit; None: there are none."""
        self._chains: list[Chain] = []
        self._by_chain: dict[Chain, frozenset[int]] = {}
        self.limiting = frozenset[int]()
        """All power domains above its nodes."""
        limited = [(i, node.tells_boards) for i, node in enumerate(self.nodes) if node.limits_boards]
        self._limited = frozenset(i for i, _ in limited)
        self._limited_apart = frozenset(i for i, tells in limited if tells)
        """Of these, the nodes of which each board can be limited by itself."""
        self._build_indexes()

    def reopen(self, node: Node) -> bool:
        """Take a node as it is now; False: more has changed than whether it is open, and the pool must be built anew."""
        i = self.index.get(node.name)
        was = None if i is None else self.nodes[i]
        if i is None or was is None:
            return False
        if replace(node, ready=was.ready, cordoned=was.cordoned, taints=was.taints) != was:
            return False
        self.nodes[i], self.closed[i] = node, why_closed(node, self.pool.tolerations)
        if self.usable[i] == (not self.closed[i]):
            return True
        self._empty.clear()
        self._capacity_m = None
        for which, states in enumerate(self._states):
            node_index = self._current_index(which)
            (node_index.take if self.usable[i] else node_index.put)(i, states[i])
        self.usable[i] = not self.closed[i]
        return True

    def hang_on(self, feeds: Feeds | None) -> None:
        """Place nothing more from now on than these power domains carry."""
        self.feeds = feeds
        self._empty.clear()
        if feeds is not None:
            self._chains = [feeds.chains.get(node.name, ()) for node in self.nodes]
            groups: dict[Chain, list[int]] = {}
            for i, chain in enumerate(self._chains):
                groups.setdefault(chain, []).append(i)
            self._by_chain = {chain: frozenset(own) for chain, own in groups.items()}
            self.limiting = frozenset(number for chain in groups for number in chain)

    @property
    def chains(self) -> list[Chain]:
        """The different chains of limiting power domains above its nodes."""
        return sorted(self._by_chain)

    def below(self, chain: Chain) -> frozenset[int]:
        """The nodes with this chain above them."""
        return self._by_chain.get(chain, frozenset())

    def by_headroom(self, allowed: frozenset[int] | None, when: int) -> Iterator[frozenset[int]]:
        """The allowed nodes by the power domains above them, those first that are left most watts."""
        feeds = self.feeds
        if feeds is None:
            return
        for chain in sorted(self._by_chain, key=lambda chain: (-feeds.headroom(chain, when), chain)):
            own = self._by_chain[chain]
            if allowed is not None:
                own &= allowed
            if own:
                yield own

    def by_feed(self, among: Set[int]) -> Iterator[frozenset[int]]:
        """Of these nodes those below none of the power domains, and those below each of the few that have most watts
        left, where that is not all of them."""
        groups = [self._by_chain.get((), frozenset())]
        left = self.feeds.left[LATER] if self.feeds is not None else []
        for number in sorted(self.limiting, key=lambda number: (-left[number], number))[:FEEDS]:
            chains = (own for chain, own in self._by_chain.items() if number in chain)
            groups.append(frozenset[int]().union(*chains))
        for group in groups:
            own = group & among
            if own and len(own) < len(among):
                yield own

    def _powered(self, watts: int, when: int, allowed: frozenset[int] | None) -> frozenset[int] | None:
        """Of the allowed nodes, those on which one more pod may draw so much; None: all."""
        feeds = self.feeds
        if feeds is None or not watts:
            return allowed
        open_ = [chain for chain in self._by_chain if feeds.headroom(chain, when) >= watts]
        if len(open_) == len(self._by_chain):
            return allowed
        nodes = frozenset[int]().union(*(self._by_chain[chain] for chain in open_))
        return nodes if allowed is None else nodes & allowed

    def powered(self, rooms: Rooms, watts: int, when: int) -> Rooms:
        """How many pods that draw so much the nodes may have together, of these (index, pods that fit)."""
        if self.feeds is None or not watts:
            return rooms
        return self.feeds.share_out(rooms, self._chains, watts, when)

    def _capacity(self, node: Node) -> _Free:
        free = node.capacity - self.pool.reserved
        accelerators_m = 0 if self.pool.is_cpu else free.accelerators_m
        return [accelerators_m, free.cpu_m, free.memory_mib, free.ephemeral_mib, *([0] * self.width)]

    def _build_indexes(self) -> None:
        """Index all usable nodes by what is left of them: one index for now and one for later."""
        losses: Callable[[Sequence[NodeState], PodRequest], list[Loss | None]] = self._scorer.losses
        if self.pool.is_cpu:
            losses = _left_over
        self._cpu = self.pool.is_cpu or self._scorer.counts_cpu
        self._kinds: dict[Resources, PodRequest] = {}
        self._indexes = (NodeIndex(losses), NodeIndex(losses))
        self._states: tuple[list[NodeState], list[NodeState]] = ([], [])
        self._stale: tuple[set[int], set[int]] = (set(), set())
        """Nodes that changed since they were indexed; they are indexed again when an index is needed."""
        self._later = np.array([free[self.key] for free in self.free_later], np.int64)
        self._unread: set[int] = set()
        """Nodes that changed since `accelerators_later` was read."""
        for which, counts in enumerate((self.free_now, self.free_later)):
            states = self._states[which]
            for i, free in enumerate(counts):
                states.append(self._state(free))
                if self.usable[i]:
                    self._indexes[which].put(i, states[i])

    def _state(self, free: _Free) -> NodeState:
        """A node as packing sees it."""
        cpu_m = max(0, free[1]) if self._cpu else 0
        if self.width:
            return self._model, cpu_m, sharing.whole_devices(free), sharing.partial_devices(free)
        return self._model, cpu_m, max(0, free[0]) // 1000, ()

    def update_demand(self, scorer: Scorer) -> None:
        """The jobs' requests have changed."""
        self._scorer = scorer
        if self._cpu == (self.pool.is_cpu or scorer.counts_cpu):
            for node_index in self._indexes:
                node_index.update_demand(self._scorer.losses)
        else:
            self._build_indexes()

    @property
    def parts(self) -> list[int]:
        """Thousandths left of devices that are shared, now."""
        self._current_index(0)
        states = self._states[0]
        return [left for i, state in enumerate(states) if self.usable[i] for left in state[3]]

    def capacity_m(self) -> int:
        """All accelerators of usable nodes."""
        if self._capacity_m is None:
            total = self._sum_of(self.total)
            self._capacity_m = self.pool.cpu_accelerators_m(total) if self.pool.is_cpu else total
        return self._capacity_m

    def accelerators_per_node(self) -> set[int]:
        """The different numbers of whole accelerators of the nodes that are open; none in a CPU pool."""
        if self.pool.is_cpu:
            return set()
        return {total[0] // 1000 for i, total in enumerate(self.total) if self.usable[i]}

    def free_m(self, later: bool = False) -> int:
        """Free accelerators of usable nodes."""
        free = self._sum_of(self.free_later if later else self.free_now)
        return self.pool.cpu_accelerators_m(free) if self.pool.is_cpu else free

    def _sum_of(self, amounts: Iterable[Sequence[int]]) -> int:
        """The sum of the accelerators of usable nodes; a node that is over-committed counts as 0."""
        key = self.key
        return sum(
            [own[key] for own, is_open in zip(amounts, self.usable, strict=True) if is_open and own[key] > 0]
        )

    def take(self, placement: Placement, sign: int = -1) -> None:
        """Take (or with sign=1 give back) what a placement holds; unknown nodes are ignored."""
        self._change(placement, sign, sign)

    def take_releasing(self, placement: Placement, sign: int = -1) -> None:
        """Take a stopping job's resources: held now and free later (sign=1: it is gone)."""
        self.releasing -= sign
        self._change(placement, sign, 0)

    def take_promised(self, placement: Placement, sign: int = -1) -> None:
        """Take a place that a job is promised before a round begins (sign=1: it is not promised any more)."""
        self._change(placement, sign, sign)
        for i, amounts in self._each(placement):
            promised = self._promised.setdefault(i, [0] * len(amounts))
            for k, amount in enumerate(amounts):
                promised[k] -= sign * amount
            if not any(promised):
                del self._promised[i]

    def _each(self, placement: Placement) -> list[tuple[int, Sequence[int]]]:
        """The node of each rank, and what the pod takes of it."""
        amounts = request(placement.per_pod, self.pool.is_cpu)
        index, width = self.index, self.width
        if not width:
            return [(index[name], amounts) for name in placement.nodes if name in index]
        return [
            (index[name], sharing.taken_from_node(placement, rank, amounts, width))
            for rank, name in enumerate(placement.nodes)
            if name in index
        ]

    def holds(self, placement: Placement) -> dict[int, tuple[int, ...]]:
        """What a placement takes of each node."""
        found: dict[int, tuple[int, ...]] = {}
        for i, amounts in self._each(placement):
            known = found.get(i)
            found[i] = tuple(amounts if known is None else map(sum, zip(known, amounts, strict=True)))
        return found

    def _change(self, placement: Placement, now: int, later: int) -> None:
        first, (stale_now, stale_later), in_round = self.at_round_start, self._stale, self._in_round
        for i, amounts in self._each(placement):
            free_now, free_later = self.free_now[i], self.free_later[i]
            if in_round and i not in first:
                first[i] = (free_now.copy(), free_later.copy())
            for k, amount in enumerate(amounts):
                if amount:
                    free_now[k] += now * amount
                    free_later[k] += later * amount
            if now:
                stale_now.add(i)
            if later:
                stale_later.add(i)
                self._unread.add(i)

    def withhold(self, i: int, now: Sequence[int], later: Sequence[int], sign: int = -1) -> None:
        """Keep room on a node from being found (sign=1: offer it again)."""
        if self._in_round and i not in self.at_round_start:
            self.at_round_start[i] = (self.free_now[i].copy(), self.free_later[i].copy())
        for counts, amounts, stale in (
            (self.free_now, now, self._stale[0]),
            (self.free_later, later, self._stale[1]),
        ):
            for k, amount in enumerate(amounts):
                counts[i][k] += sign * amount
            stale.add(i)
        self._unread.add(i)

    def accelerators_later(self) -> NDArray[np.int64]:
        """What is free of the accelerators of each node after stopping jobs have released theirs."""
        if self._unread:
            changed = list(self._unread)
            self._later[changed] = [self.free_later[i][self.key] for i in changed]
            self._unread.clear()
        return self._later

    def _current_index(self, which: int) -> NodeIndex:
        """The index for now (0) or later (1), brought up to date."""
        node_index, states, stale = self._indexes[which], self._states[which], self._stale[which]
        if stale:
            counts = self.free_later if which else self.free_now
            for i in sorted(stale):
                state, before = self._state(counts[i]), states[i]
                if state != before:
                    states[i] = state
                    if self.usable[i]:
                        node_index.take(i, before)
                        node_index.put(i, state)
            stale.clear()
        return node_index

    def begin(self) -> None:
        """The round begins: nothing has changed yet."""
        self.at_round_start.clear()
        self._in_round = True

    def rewind(self) -> None:
        """Restore what was free when the round began."""
        for i, (now, later) in self.at_round_start.items():
            for which, counts, free in ((0, self.free_now, now), (1, self.free_later, later)):
                counts[i] = free
                self._stale[which].add(i)
            self._unread.add(i)
        self.at_round_start.clear()
        self._in_round = False

    def _kind(self, per_pod: Resources) -> PodRequest:
        known = self._kinds.get(per_pod)
        if known is None:
            cpu_m = per_pod.cpu_m if self._cpu else 0
            share = self.width > 0 and sharing.is_share(per_pod.accelerators_m)
            kind = PodRequest(cpu_m, 0, 0, 0) if self.pool.is_cpu else None
            known = self._kinds[per_pod] = kind or request_of(per_pod.accelerators_m, cpu_m, share)
        return known

    def best(
        self, per_pod: Resources, later: bool, allowed: frozenset[int] | None, watts: int = 0
    ) -> tuple[int, Loss] | None:
        """The node that one pod should go to, and what that costs the rest of the cluster."""
        allowed = self._powered(watts, LATER if later else NOW, allowed)
        if allowed is not None and not allowed:
            return None
        ask = request(per_pod, self.pool.is_cpu)
        counts, node_index = (self.free_later if later else self.free_now), self._current_index(later)
        kind = self._kind(per_pod)
        if allowed is None and not (ask[1] or ask[2] or ask[3]):
            # No other resource is requested, but the node may be over-committed in one of them.
            found = node_index.best(kind)
            if found is None or min(counts[found[0]][1:4]) >= 0:
                return found

        def fits(i: int) -> bool:
            free = counts[i]
            return (allowed is None or i in allowed) and (
                ask[1] <= free[1] and ask[2] <= free[2] and ask[3] <= free[3]
            )

        return node_index.best(kind, fits)

    def devices(self, per_pod: Resources, names: Iterable[str], later: bool) -> tuple[int, ...]:
        """The devices that shares on these nodes should use; empty for whole accelerators."""
        if not self.width or not sharing.is_share(per_pod.accelerators_m):
            return ()
        amounts, kind = request(per_pod, False), self._kind(per_pod)
        counts = self.free_later if later else self.free_now
        left: dict[int, _Free] = {}
        found: list[int] = []
        for name in names:
            i = self.index[name]
            free = left.setdefault(i, list(counts[i]))
            (loss,) = self._scorer.losses((self._state(free),), kind)
            assert loss is not None, f"no device of {name} has {per_pod.accelerators_m} left"
            found.append(sharing.device_with(free, loss[1]))
            for k, amount in enumerate(amounts):
                free[k] -= amount
            free[sharing.FIRST + found[-1]] -= amounts[0]
        return tuple(found)

    def room(self, i: int, ask: tuple[int, int, int, int], later: bool) -> int:
        """How many pods with this request fit on node i."""
        return self.room_in((self.free_later if later else self.free_now)[i], ask)

    def room_in(self, free: Sequence[int], ask: tuple[int, int, int, int]) -> int:
        """How many pods with this request fit what is free."""
        most = 1 << 30
        for k in range(4):
            if ask[k] > 0:
                room = free[k] // ask[k]
                if room < most:
                    most = room
            elif free[k] < 0:
                return 0
        if self.width and ask[0] > 0 and most > 0:
            most = min(most, sharing.room(free, ask[0]))
        return most if most > 0 else 0

    def fits(self, placement: Placement, later: bool = False) -> bool:
        """Whether exactly this placement is free now (`later`: after stopping jobs have released theirs)."""
        counts = self.free_later if later else self.free_now
        if not all(name in self.index for name in placement.nodes):
            return False
        if self.feeds is not None and not self.feeds.fits(placement, LATER if later else NOW):
            return False
        for i, taken in self.holds(placement).items():
            left = [has - takes for has, takes in zip(counts[i], taken, strict=True)]
            if min(left[: sharing.FIRST]) < 0 or not sharing.is_consistent(left):
                return False
        return True

    def short(self, placement: Placement, already: dict[str, list[int]]) -> bool:
        """Whether a placement needs room that was not free when the round began; what was only promised then was.

        `already` is what earlier placements take, by node; this one is added to it.
        """
        short = False
        for i, takes in self.holds(placement).items():
            taken = already.setdefault(self.nodes[i].name, [0] * len(takes))
            free = self.at_round_start[i][0] if i in self.at_round_start else self.free_now[i]
            if i in self._promised:
                free = list(map(sum, zip(free, self._promised[i], strict=True)))
            for k, amount in enumerate(takes):
                taken[k] += amount
                short = short or (k < sharing.FIRST and amount > 0 and free[k] < taken[k])
            if self.width:
                short = short or not sharing.is_consistent(
                    [has - t for has, t in zip(free, taken, strict=True)]
                )
        return short

    def rooms(
        self, ask: tuple[int, int, int, int], later: bool, allowed: frozenset[int] | None
    ) -> list[tuple[int, int]]:
        """Usable nodes where at least one such pod fits, and how many fit."""
        counts, is_cpu = (self.free_later if later else self.free_now), self.pool.is_cpu
        found = []
        for (_, cpu_m, whole, parts), nodes in self._current_index(later).nodes.items():
            if cpu_m >= ask[1] if is_cpu else 1000 * whole >= ask[0] or (parts and max(parts) >= ask[0]):
                for i in nodes if allowed is None else nodes & allowed:
                    room = self.room_in(counts[i], ask)
                    if room:
                        found.append((i, room))
        found.sort()
        return found

    def room_if_empty(self, i: int, ask: tuple[int, int, int, int], closed: bool = False) -> int:
        """How many such pods would fit on node i if none of our jobs ran on it; 0 for unusable nodes, unless
        `closed`."""
        return self.room_in(self.total[i], ask) if closed or self.usable[i] else 0

    def closed_nodes(self, ask: tuple[int, int, int, int], selector: _Selector) -> dict[str, int]:
        """Nodes that are closed and would hold such a pod if they were open and empty, by why."""
        allowed, found = self._with(selector), dict[str, int]()
        for i, why in enumerate(self.closed):
            if why and (allowed is None or i in allowed) and self.room_if_empty(i, ask, closed=True):
                found[why] = found.get(why, 0) + 1
        return found

    def places_if_empty(
        self,
        ask: tuple[int, int, int, int],
        selector: _Selector,
        depth: int | None = None,
        closed: bool = False,
        watts: int = 0,
        most: int = 0,
    ) -> int:
        """How many such pods would fit in the pool if none of our jobs ran (`depth`: in one domain of this
        level; `closed`: if closed nodes were open, too; `watts`: that each draws; `most`: on so many nodes)."""
        key = (ask, selector, depth, closed, watts, most)
        if key not in self._empty:
            allowed = self._with(selector)
            some = range(len(self.nodes)) if allowed is None else allowed
            rooms = [(i, self.room_if_empty(i, ask, closed)) for i in sorted(some)]
            groups: list[Rooms] = [rooms]
            if depth is not None:
                groups = [*domains_of(self.nodes, rooms, depth).values(), *([one] for one in rooms)]
            sizes = [held_by(self.powered(own, watts, EMPTY), most) for own in groups]
            self._empty[key] = max(sizes, default=0)
        return self._empty[key]

    def nodes_by_domain(self, depth: int, allowed: frozenset[int] | None) -> list[frozenset[int]]:
        """The nodes of each domain of this level, in order of their names; a node outside all domains stands
        for itself."""
        every = [(i, 1) for i in range(len(self.nodes)) if allowed is None or i in allowed]
        own = domains_of(self.nodes, every, depth)
        found = [frozenset(i for i, _ in own[domain]) for domain in sorted(own)]
        standing = {i for domain in found for i in domain}
        return found + [frozenset((i,)) for i, _ in every if i not in standing]

    def gang(
        self,
        pods: int,
        per_pod: Resources,
        later: bool,
        allowed: frozenset[int] | None,
        depth: int | None,
        watts: int = 0,
        most: int = 0,
    ) -> tuple[str, ...] | None:
        """Nodes for all pods, or None (`depth`: all inside one domain of this level; `most`: different nodes that they
        may use, 0: any number)."""
        rooms: Rooms = self.rooms(request(per_pod, self.pool.is_cpu), later, allowed)
        if self.feeds is None or not watts:
            chosen = place_gang(self.nodes, rooms, pods, depth, most=most)
        else:
            when = LATER if later else NOW
            alone = self.feeds.alone(rooms, self._chains, watts, when)
            together = partial(self.powered, watts=watts, when=when)
            chosen = place_gang(self.nodes, alone, pods, depth, together, most)
        return None if chosen is None else tuple(self.nodes[i].name for i in chosen)

    def selected_nodes(self, job: Job) -> frozenset[int] | None:
        """Nodes that the job's node selector allows; None: all usable nodes of the pool."""
        return self._with(job.node_selector)

    def open_to(self, job: Job, candidate: Candidate) -> frozenset[int] | None:
        """The same of a candidate: under a power cap, only nodes whose boards take limits; each by itself, unless the pods
        fill their nodes."""
        own = self._with(job.node_selector)
        if candidate.power_cap >= 1:
            return own
        fills = candidate.accelerators_m == (candidate.nodes or candidate.pods) * self.largest
        able = self._limited if fills else self._limited_apart
        return able if own is None else own & able

    def may_hold(self, job: Job, placement: Placement) -> bool:
        """Whether the job may have exactly this placement, if there is room: its nodes are open to it, and its power cap
        holds for their boards."""
        allowed = self._with(job.node_selector)
        indices = [self.index.get(name) for name in placement.nodes]
        return all(
            i is not None and self.usable[i] and (allowed is None or i in allowed) for i in indices
        ) and self.limits(placement)

    def limits(self, placement: Placement) -> bool:
        """Whether its power cap, if it has one, holds for its boards and for no others, on these nodes."""
        if placement.power_cap >= 1:
            return True
        each_m = placement.per_pod.accelerators_m
        return all(
            (i := self.index.get(name)) in self._limited_apart
            or (i in self._limited and count * each_m == self.nodes[i].capacity.accelerators_m)
            for name, count in Counter(placement.nodes).items()
        )

    def _with(self, selector: _Selector) -> frozenset[int] | None:
        """Nodes with these labels; None: any."""
        if not selector:
            return None
        known = self._selected.get(selector)
        if known is None:
            wanted = set(selector)
            known = frozenset(i for i, node in enumerate(self.nodes) if wanted <= set(node.labels))
            self._selected[selector] = known
        return known
