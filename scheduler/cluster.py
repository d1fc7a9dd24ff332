"""The nodes while a plan is being made: what is free now, what will be free, and where a gang fits.

Two books are kept per node. `later` counts the resources of jobs that are being stopped as free: a job may be
planned into them, it then waits for the release. `now` does not.

Small requests go to the node that they leave fullest (the least left of the accelerator, then of the CPU), so
that whole nodes stay whole for gangs; gangs go to the domain with the least room that holds them.
"""

from __future__ import annotations

from collections.abc import Iterable

from .types import Job, Node, Placement, Pool, Resources, Snapshot, Toleration

_Selector = tuple[tuple[str, str], ...]
_Free = list[int]
"""accelerators_m, cpu_m, memory_mib, ephemeral_mib."""


def request(per_pod: Resources, is_cpu: bool) -> tuple[int, int, int, int]:
    """What a pod takes from a node: in a CPU pool the accelerator and the CPU are one thing."""
    accelerators_m = 0 if is_cpu else per_pod.accelerators_m
    return accelerators_m, per_pod.cpu_m, per_pod.memory_mib, per_pod.ephemeral_mib


def tolerated(node: Node, tolerations: Iterable[Toleration]) -> bool:
    """Whether nothing on the node keeps away a pod with these tolerations."""
    tolerations = tuple(tolerations)
    for taint in node.taints:
        if taint.effect not in ("NoSchedule", "NoExecute"):
            continue
        if not any(_tolerates(t, taint.key, taint.value, taint.effect) for t in tolerations):
            return False
    return True


def _tolerates(toleration: Toleration, key: str, value: str, effect: str) -> bool:
    if toleration.effect and toleration.effect != effect:
        return False
    if toleration.operator == "Exists":
        return toleration.key in ("", key)
    return toleration.key == key and toleration.value == value


class PoolNodes:
    """The nodes of one pool, by index in name order."""

    def __init__(self, pool: Pool, nodes: Iterable[Node]) -> None:
        self.pool = pool
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.index = {node.name: i for i, node in enumerate(self.nodes)}
        self.now = [self._capacity(node) for node in self.nodes]
        self.later = [list(free) for free in self.now]
        self.total = [tuple(free) for free in self.now]
        self.usable = [node.ready and tolerated(node, pool.tolerations) for node in self.nodes]
        self.key = 1 if pool.is_cpu else 0
        """Which of the four resources is the accelerator."""
        self.releasing = 0
        """Placements here that are held by jobs that are being stopped."""
        self.first: dict[int, tuple[_Free, _Free]] = {}
        """How nodes stood (now, later) when the round began, of those that changed since."""
        self._buckets: tuple[dict[int, set[int]], dict[int, set[int]]] = ({}, {})
        """Usable nodes by free accelerators, for each book."""
        self._selected: dict[_Selector, frozenset[int]] = {}
        self._empty: dict[tuple[tuple[int, int, int, int], _Selector], int] = {}
        for i in range(len(self.nodes)):
            if self.usable[i]:
                for which in (0, 1):
                    self._buckets[which].setdefault(self.now[i][self.key], set()).add(i)

    def _capacity(self, node: Node) -> _Free:
        free = node.capacity - self.pool.reserved
        accelerators_m = 0 if self.pool.is_cpu else free.accelerators_m
        return [accelerators_m, free.cpu_m, free.memory_mib, free.ephemeral_mib]

    def capacity_m(self) -> int:
        """All accelerators of usable nodes."""
        key = self.key
        total = sum(max(0, self.total[i][key]) for i in range(len(self.nodes)) if self.usable[i])
        return self.pool.cpu_accelerators_m(total) if self.pool.is_cpu else total

    def free_m(self, later: bool = False) -> int:
        """Free accelerators of usable nodes."""
        buckets = self._buckets[later]
        free = sum(max(0, size) * len(nodes) for size, nodes in buckets.items())
        return self.pool.cpu_accelerators_m(free) if self.pool.is_cpu else free

    def take(self, names: Iterable[str], per_pod: Resources, sign: int = -1) -> None:
        """Take (or with sign=1 give back) one pod's request on each node named; unknown nodes are ignored."""
        self._book(names, per_pod, sign, sign)

    def leave(self, names: Iterable[str], per_pod: Resources, sign: int = -1) -> None:
        """A stopping job: its resources are held now and free later (sign=1: it is gone)."""
        self.releasing -= sign
        self._book(names, per_pod, sign, 0)

    def _book(self, names: Iterable[str], per_pod: Resources, now: int, later: int) -> None:
        amounts, key = request(per_pod, self.pool.is_cpu), self.key
        for name in names:
            i = self.index.get(name)
            if i is None:
                continue
            if i not in self.first:
                self.first[i] = (list(self.now[i]), list(self.later[i]))
            for which, book, sign in ((0, self.now, now), (1, self.later, later)):
                if sign:
                    free = book[i]
                    before = free[key]
                    for k in range(4):
                        free[k] += sign * amounts[k]
                    if free[key] != before and self.usable[i]:
                        self._refile(which, i, before, free[key])

    def _refile(self, which: int, i: int, before: int, after: int) -> None:
        buckets = self._buckets[which]
        own = buckets[before]
        own.discard(i)
        if not own:
            del buckets[before]
        if after in buckets:
            buckets[after].add(i)
        else:
            buckets[after] = {i}

    def begin(self) -> None:
        """The round begins: nothing has changed yet."""
        self.first.clear()

    def rewind(self) -> None:
        """As it was when the round began."""
        for i, (now, later) in self.first.items():
            for which, book, free in ((0, self.now, now), (1, self.later, later)):
                before = book[i][self.key]
                book[i] = free
                if free[self.key] != before and self.usable[i]:
                    self._refile(which, i, before, free[self.key])
        self.first.clear()

    def one(self, per_pod: Resources, later: bool, allowed: frozenset[int] | None) -> tuple[str, ...] | None:
        """The node that one pod should go to."""
        ask = request(per_pod, self.pool.is_cpu)
        book, buckets = (self.later if later else self.now), self._buckets[later]
        plain = allowed is None and not (ask[1] or ask[2] or ask[3])
        for size in sorted(size for size in buckets if size >= ask[self.key]):
            if plain:
                # Nothing else is asked for: but a node may be over-committed in what is not asked for.
                best = min(buckets[size])
                if min(book[best][1:]) >= 0:
                    return (self.nodes[best].name,)
            for i in sorted(buckets[size]):
                free = book[i]
                if (allowed is None or i in allowed) and (
                    ask[1] <= free[1] and ask[2] <= free[2] and ask[3] <= free[3]
                ):
                    return (self.nodes[i].name,)
        return None

    def room(self, i: int, ask: tuple[int, int, int, int], later: bool) -> int:
        """How many pods with this request node i can take."""
        free = (self.later if later else self.now)[i]
        most = 1 << 30
        for k in range(4):
            if ask[k] > 0:
                most = min(most, free[k] // ask[k])
            elif free[k] < 0:
                return 0
        return max(0, most)

    def rooms(
        self, ask: tuple[int, int, int, int], later: bool, allowed: frozenset[int] | None
    ) -> list[tuple[int, int]]:
        """Usable nodes with room for at least one such pod, and for how many."""
        least = ask[self.key]
        some = [i for size, nodes in self._buckets[later].items() if size >= least for i in nodes]
        some.sort()
        found = []
        for i in some:
            if allowed is None or i in allowed:
                room = self.room(i, ask, later)
                if room:
                    found.append((i, room))
        return found

    def room_if_empty(self, i: int, ask: tuple[int, int, int, int]) -> int:
        """How many such pods node i would take if nothing of ours ran on it; 0 for unusable nodes."""
        if not self.usable[i]:
            return 0
        return max(0, min((self.total[i][k] // ask[k] for k in range(4) if ask[k] > 0), default=1 << 30))

    def places_if_empty(self, ask: tuple[int, int, int, int], selector: _Selector) -> int:
        """How many such pods the pool would take if nothing of ours ran on it."""
        key = (ask, selector)
        if key not in self._empty:
            allowed = self._with(selector)
            some = range(len(self.nodes)) if allowed is None else allowed
            self._empty[key] = sum(self.room_if_empty(i, ask) for i in some)
        return self._empty[key]

    def gang(
        self, pods: int, per_pod: Resources, later: bool, allowed: frozenset[int] | None, depth: int | None
    ) -> tuple[str, ...] | None:
        """Nodes for all pods or None: inside one topology domain where possible (`depth`: where required)."""
        rooms = self.rooms(request(per_pod, self.pool.is_cpu), later, allowed)
        if sum(room for _, room in rooms) < pods:
            return None
        deepest = max((len(self.nodes[i].topology) for i, _ in rooms), default=0)
        for level in range(deepest, -1, -1):
            if depth is not None and level < depth:
                return None
            domains: dict[tuple[str, ...], list[tuple[int, int]]] = {}
            for i, room in rooms:
                domain = self.nodes[i].topology[:level]
                if len(domain) == level:
                    domains.setdefault(domain, []).append((i, room))
            fitting = [
                (sum(room for _, room in own), domain)
                for domain, own in domains.items()
                if sum(room for _, room in own) >= pods
            ]
            if fitting:
                return self._pack(domains[min(fitting)[1]], pods)
        return None

    def _pack(self, rooms: list[tuple[int, int]], pods: int) -> tuple[str, ...]:
        """Fewest nodes: fill the roomiest, and end on the node that the rest fits best."""
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
        return tuple(self.nodes[i].name for i in sorted(chosen))

    def selected(self, job: Job) -> frozenset[int] | None:
        """Nodes that the job's own selector and tolerations allow; None: all usable nodes of the pool."""
        return self._with(job.node_selector)

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


class Cluster:
    """All pools."""

    def __init__(self, snapshot: Snapshot) -> None:
        by_pool: dict[str, list[Node]] = {}
        for node in snapshot.nodes:
            by_pool.setdefault(node.pool, []).append(node)
        self.pools = {pool.name: PoolNodes(pool, by_pool.get(pool.name, [])) for pool in snapshot.pools}

    def take(self, placement: Placement, sign: int = -1) -> None:
        """Book a placement (sign=1: give it back)."""
        pool = self.pools.get(placement.pool)
        if pool is not None:
            pool.take(placement.nodes, placement.per_pod, sign)

    def leave(self, placement: Placement, sign: int = -1) -> None:
        """Book the placement of a job that is being stopped (sign=1: it is gone)."""
        pool = self.pools.get(placement.pool)
        if pool is not None:
            pool.leave(placement.nodes, placement.per_pod, sign)

    def begin(self) -> None:
        """The round begins."""
        for pool in self.pools.values():
            pool.begin()

    def rewind(self) -> None:
        """As it was when the round began."""
        for pool in self.pools.values():
            pool.rewind()

    def find(self, job: Job, pool: str, pods: int, per_pod: Resources, later: bool) -> tuple[str, ...] | None:
        """Nodes for a gang of the job in this pool, or None."""
        nodes = self.pools[pool]
        allowed = nodes.selected(job)
        if pods == 1:
            return nodes.one(per_pod, later, allowed)
        return nodes.gang(pods, per_pod, later, allowed, job.required_domain)

    def capacity_m(self) -> dict[str, int]:
        """Accelerators of usable nodes, by accelerator key."""
        total: dict[str, int] = {}
        for pool in self.pools.values():
            key = pool.pool.accelerator
            total[key] = total.get(key, 0) + pool.capacity_m()
        return total
