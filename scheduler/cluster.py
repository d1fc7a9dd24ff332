"""The nodes while a plan is being made: what is free now, what will be free, and where a gang fits.

Two books are kept per node. `later` counts the resources of jobs that are being stopped as free: a job may be
planned into them, it then waits for the release. `now` does not.

Small requests go to the node that they leave fullest (the least left of the accelerator, then of the CPU), so
that whole nodes stay whole for gangs; gangs go to the domain with the least room that holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from .types import Job, Node, Placement, Pool, Resources, Snapshot, Toleration

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
        self.releasing = False
        """Whether anything here is held by jobs that are being stopped."""
        self._buckets: dict[int, dict[int, list[int]]] = {0: {}, 1: {}}
        for i in range(len(self.nodes)):
            if self.usable[i]:
                self._file(0, i)
                self._file(1, i)

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
        book, key = self._book(later), self.key
        free = sum(max(0, book[i][key]) for i in range(len(self.nodes)) if self.usable[i])
        return self.pool.cpu_accelerators_m(free) if self.pool.is_cpu else free

    def take(self, names: Iterable[str], per_pod: Resources, now: bool = True, sign: int = -1) -> None:
        """Take (or with sign=1 give back) one pod's request on each node named; unknown nodes are ignored."""
        amounts = request(per_pod, self.pool.is_cpu)
        for name in names:
            i = self.index.get(name)
            if i is None:
                continue
            for book, chosen in ((self.now, now), (self.later, True)):
                if chosen:
                    free = book[i]
                    for k in range(4):
                        free[k] += sign * amounts[k]
            if self.usable[i]:
                self._file(1, i)
                if now:
                    self._file(0, i)

    def give_later(self, names: Iterable[str], per_pod: Resources) -> None:
        """A stopping job: its resources are held now and free later."""
        self.releasing = True
        amounts = request(per_pod, self.pool.is_cpu)
        for name in names:
            i = self.index.get(name)
            if i is not None:
                for k in range(4):
                    self.later[i][k] += amounts[k]
                if self.usable[i]:
                    self._file(1, i)

    def _file(self, book: int, i: int) -> None:
        free = (self.later if book else self.now)[i][self.key]
        heappush(self._buckets[book].setdefault(free, []), i)

    def _book(self, later: bool) -> list[_Free]:
        return self.later if later else self.now

    def one(self, per_pod: Resources, later: bool, allowed: frozenset[int] | None) -> tuple[str, ...] | None:
        """The node that one pod should go to."""
        ask = request(per_pod, self.pool.is_cpu)
        book, which = self._book(later), 1 if later else 0
        buckets = self._buckets[which]
        for size in sorted(size for size in buckets if size >= ask[self.key]):
            best = None
            for i in self._in_bucket(buckets[size], book, size):
                if allowed is not None and i not in allowed:
                    continue
                free = book[i]
                if ask[1] <= free[1] and ask[2] <= free[2] and ask[3] <= free[3]:
                    best = i
                    break
            if best is not None:
                return (self.nodes[best].name,)
        return None

    def _in_bucket(self, bucket: list[int], book: list[_Free], size: int) -> Iterator[int]:
        """Nodes whose free amount is still `size`, lowest index first; outdated entries are dropped."""
        kept: list[int] = []
        last = -1
        try:
            while bucket:
                i = heappop(bucket)
                if i == last or book[i][self.key] != size:
                    continue
                last = i
                kept.append(i)
                yield i
        finally:
            for i in kept:
                heappush(bucket, i)

    def room(self, i: int, ask: tuple[int, int, int, int], later: bool) -> int:
        """How many pods with this request node i can take."""
        free = self._book(later)[i]
        most = 1 << 30
        for k in range(4):
            if ask[k] > 0:
                most = min(most, free[k] // ask[k])
            elif free[k] < 0:
                return 0
        return max(0, most)

    def room_if_empty(self, i: int, ask: tuple[int, int, int, int]) -> int:
        """How many such pods node i would take if nothing of ours ran on it; 0 for unusable nodes."""
        if not self.usable[i]:
            return 0
        return max(0, min((self.total[i][k] // ask[k] for k in range(4) if ask[k] > 0), default=1 << 30))

    def gang(
        self, pods: int, per_pod: Resources, later: bool, allowed: frozenset[int] | None, depth: int | None
    ) -> tuple[str, ...] | None:
        """Nodes for all pods or None: inside one topology domain where possible (`depth`: where required)."""
        ask = request(per_pod, self.pool.is_cpu)
        rooms = []
        for i in range(len(self.nodes)):
            if self.usable[i] and (allowed is None or i in allowed):
                room = self.room(i, ask, later)
                if room:
                    rooms.append((i, room))
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
        if not job.node_selector:
            return None
        wanted = set(job.node_selector)
        return frozenset(i for i, node in enumerate(self.nodes) if wanted <= set(node.labels))


class Cluster:
    """All pools."""

    def __init__(self, snapshot: Snapshot) -> None:
        by_pool: dict[str, list[Node]] = {}
        for node in snapshot.nodes:
            by_pool.setdefault(node.pool, []).append(node)
        self.pools = {pool.name: PoolNodes(pool, by_pool.get(pool.name, [])) for pool in snapshot.pools}

    def take(self, placement: Placement, now: bool = True, sign: int = -1) -> None:
        """Book a placement (sign=1: give it back)."""
        pool = self.pools.get(placement.pool)
        if pool is not None:
            pool.take(placement.nodes, placement.per_pod, now, sign)

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
