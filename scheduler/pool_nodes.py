"""The nodes of one pool while a plan is being made: what is free now, what will be free, and what fits where.

Two books are kept per node. `later` counts the resources of jobs that are being stopped as free: a job may be
planned into them, it then waits for the release. `now` does not.

What fits one node goes to the node that it leaves most useful for what the snapshot's jobs ask for (`packing.py`;
in a CPU pool: to the one that it leaves fullest). A gang goes to one node if one holds it, else to the deepest
topology domain that does, and of those to the one with the least room (`domains.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from . import devices
from .domains import domains_of, within
from .mix import request_of
from .packing import Loss, Request, Scorer, State
from .shelves import Shelves
from .types import Job, Node, Placement, Pool, Resources, Toleration

_Selector = tuple[tuple[str, str], ...]
_Free = list[int]
"""accelerators_m, cpu_m, memory_mib, ephemeral_mib; where shares are allowed, what they hold of each device
(`devices.py`)."""


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


def _left_over(states: Sequence[State], kind: Request) -> list[Loss | None]:
    """In a CPU pool: what a request leaves of the CPU."""
    return [(float(cpu_m - kind.cpu_m), 0) if cpu_m >= kind.cpu_m else None for _, cpu_m, _, _ in states]


class PoolNodes:
    """The nodes of one pool, by index in name order."""

    def __init__(self, pool: Pool, nodes: Iterable[Node], scorer: Scorer, model: int = 0) -> None:
        """
        Args:
            scorer: knows what the cluster's jobs ask for.
            model: the pool's number there.
        """
        self.pool = pool
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.index = {node.name: i for i, node in enumerate(self.nodes)}
        sizes = [node.capacity.accelerators_m // 1000 for node in self.nodes]
        self.width = max(sizes, default=0) if pool.shareable and not pool.is_cpu else 0
        """Devices counted one by one."""
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
        self._selected: dict[_Selector, frozenset[int]] = {}
        self._empty: dict[tuple[tuple[int, int, int, int], _Selector, int | None], int] = {}
        self._model = model
        self._scorer = scorer
        self._stock()

    def _capacity(self, node: Node) -> _Free:
        free = node.capacity - self.pool.reserved
        accelerators_m = 0 if self.pool.is_cpu else free.accelerators_m
        return [accelerators_m, free.cpu_m, free.memory_mib, free.ephemeral_mib, *([0] * self.width)]

    def _stock(self) -> None:
        """Put all usable nodes on their shelves, one set of them for each book."""
        losses: Callable[[Sequence[State], Request], list[Loss | None]] = self._scorer.losses
        if self.pool.is_cpu:
            losses = _left_over
        self._cpu = self.pool.is_cpu or self._scorer.counts_cpu
        self._kinds: dict[Resources, Request] = {}
        self._shelves = (Shelves(losses), Shelves(losses))
        self._states: tuple[list[State], list[State]] = ([], [])
        self._stale: tuple[set[int], set[int]] = (set(), set())
        """Nodes that have changed since they were put on their shelf: looked at again when a shelf is needed, however
        often they change until then."""
        for which, book in enumerate((self.now, self.later)):
            states = self._states[which]
            for i, free in enumerate(book):
                states.append(self._state(free))
                if self.usable[i]:
                    self._shelves[which].put(i, states[i])

    def _state(self, free: _Free) -> State:
        """What packing sees of a node."""
        cpu_m = max(0, free[1]) if self._cpu else 0
        if self.width:
            return self._model, cpu_m, devices.whole(free), devices.parts(free)
        return self._model, cpu_m, max(0, free[0]) // 1000, ()

    def learn(self, scorer: Scorer) -> None:
        """The jobs ask for something else now."""
        self._scorer = scorer
        if self._cpu == (self.pool.is_cpu or scorer.counts_cpu):
            for shelves in self._shelves:
                shelves.learn(self._scorer.losses)
        else:
            self._stock()

    @property
    def parts(self) -> list[int]:
        """Thousandths left of devices that are shared, now."""
        self._filed(0)
        states = self._states[0]
        return [left for i, state in enumerate(states) if self.usable[i] for left in state[3]]

    def capacity_m(self) -> int:
        """All accelerators of usable nodes."""
        key = self.key
        total = sum(max(0, self.total[i][key]) for i in range(len(self.nodes)) if self.usable[i])
        return self.pool.cpu_accelerators_m(total) if self.pool.is_cpu else total

    def free_m(self, later: bool = False) -> int:
        """Free accelerators of usable nodes."""
        book, key = (self.later if later else self.now), self.key
        free = sum(max(0, own[key]) for i, own in enumerate(book) if self.usable[i])
        return self.pool.cpu_accelerators_m(free) if self.pool.is_cpu else free

    def take(self, placement: Placement, sign: int = -1) -> None:
        """Take (or with sign=1 give back) what a placement holds; unknown nodes are ignored."""
        self._book(placement, sign, sign)

    def leave(self, placement: Placement, sign: int = -1) -> None:
        """A stopping job: its resources are held now and free later (sign=1: it is gone)."""
        self.releasing -= sign
        self._book(placement, sign, 0)

    def _each(self, placement: Placement) -> list[tuple[int, Sequence[int]]]:
        """The node of each rank, and what the pod takes of it."""
        amounts = request(placement.per_pod, self.pool.is_cpu)
        index, width = self.index, self.width
        if not width:
            return [(index[name], amounts) for name in placement.nodes if name in index]
        return [
            (index[name], devices.taken(placement, rank, amounts, width))
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

    def _book(self, placement: Placement, now: int, later: int) -> None:
        first, stale = self.first, self._stale
        books = [(self.now, now, stale[0])] if now else []
        if later:
            books.append((self.later, later, stale[1]))
        for i, amounts in self._each(placement):
            if i not in first:
                first[i] = (self.now[i].copy(), self.later[i].copy())
            for book, sign, changed in books:
                free = book[i]
                for k, amount in enumerate(amounts):
                    if amount:
                        free[k] += sign * amount
                changed.add(i)

    def _filed(self, which: int) -> Shelves:
        """The shelves of one book, every node on its own."""
        shelves, states, stale = self._shelves[which], self._states[which], self._stale[which]
        if stale:
            book = self.later if which else self.now
            for i in sorted(stale):
                state, before = self._state(book[i]), states[i]
                if state != before:
                    states[i] = state
                    if self.usable[i]:
                        shelves.take(i, before)
                        shelves.put(i, state)
            stale.clear()
        return shelves

    def begin(self) -> None:
        """The round begins: nothing has changed yet."""
        self.first.clear()

    def rewind(self) -> None:
        """As it was when the round began."""
        for i, (now, later) in self.first.items():
            for which, book, free in ((0, self.now, now), (1, self.later, later)):
                book[i] = free
                self._stale[which].add(i)
        self.first.clear()

    def _kind(self, per_pod: Resources) -> Request:
        known = self._kinds.get(per_pod)
        if known is None:
            cpu_m = per_pod.cpu_m if self._cpu else 0
            share = self.width > 0 and devices.is_share(per_pod.accelerators_m)
            kind = Request(cpu_m, 0, 0, 0) if self.pool.is_cpu else None
            known = self._kinds[per_pod] = kind or request_of(per_pod.accelerators_m, cpu_m, share)
        return known

    def best(
        self, per_pod: Resources, later: bool, allowed: frozenset[int] | None
    ) -> tuple[int, Loss] | None:
        """The node that one pod should go to, and what that costs the rest of the cluster."""
        ask = request(per_pod, self.pool.is_cpu)
        book, shelves = (self.later if later else self.now), self._filed(later)
        kind = self._kind(per_pod)
        if allowed is None and not (ask[1] or ask[2] or ask[3]):
            # Nothing else is asked for: but a node may be over-committed in what is not asked for.
            found = shelves.best(kind)
            if found is None or min(book[found[0]][1:4]) >= 0:
                return found

        def fits(i: int) -> bool:
            free = book[i]
            return (allowed is None or i in allowed) and (
                ask[1] <= free[1] and ask[2] <= free[2] and ask[3] <= free[3]
            )

        return shelves.best(kind, fits)

    def devices(self, per_pod: Resources, names: Iterable[str], later: bool) -> tuple[int, ...]:
        """The devices that shares on these nodes should go to; none for whole accelerators."""
        if not self.width or not devices.is_share(per_pod.accelerators_m):
            return ()
        amounts, kind = request(per_pod, False), self._kind(per_pod)
        book = self.later if later else self.now
        left: dict[int, _Free] = {}
        found: list[int] = []
        for name in names:
            i = self.index[name]
            free = left.setdefault(i, list(book[i]))
            (loss,) = self._scorer.losses((self._state(free),), kind)
            assert loss is not None, f"no device of {name} has {per_pod.accelerators_m} left"
            found.append(devices.device_with(free, loss[1]))
            for k, amount in enumerate(amounts):
                free[k] -= amount
            free[devices.FIRST + found[-1]] -= amounts[0]
        return tuple(found)

    def room(self, i: int, ask: tuple[int, int, int, int], later: bool) -> int:
        """How many pods with this request node i can take."""
        return self.room_in((self.later if later else self.now)[i], ask)

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
            most = min(most, devices.room(free, ask[0]))
        return most if most > 0 else 0

    def fits(self, placement: Placement) -> bool:
        """Whether exactly this placement is free now."""
        if not all(name in self.index for name in placement.nodes):
            return False
        for i, taken in self.holds(placement).items():
            left = [has - takes for has, takes in zip(self.now[i], taken, strict=True)]
            if min(left[: devices.FIRST]) < 0 or not devices.sound(left):
                return False
        return True

    def short(self, placement: Placement, already: dict[str, list[int]]) -> bool:
        """Whether a placement needs room that was not free when the round began.

        `already` is what earlier placements take, by node; this one is added to it.
        """
        short = False
        for i, takes in self.holds(placement).items():
            taken = already.setdefault(self.nodes[i].name, [0] * len(takes))
            free = self.first[i][0] if i in self.first else self.now[i]
            for k, amount in enumerate(takes):
                taken[k] += amount
                short = short or (k < devices.FIRST and amount > 0 and free[k] < taken[k])
            if self.width:
                short = short or not devices.sound([has - t for has, t in zip(free, taken, strict=True)])
        return short

    def rooms(
        self, ask: tuple[int, int, int, int], later: bool, allowed: frozenset[int] | None
    ) -> list[tuple[int, int]]:
        """Usable nodes with room for at least one such pod, and for how many."""
        book, is_cpu = (self.later if later else self.now), self.pool.is_cpu
        found = []
        for (_, cpu_m, whole, parts), nodes in self._filed(later).nodes.items():
            if cpu_m >= ask[1] if is_cpu else 1000 * whole >= ask[0] or (parts and max(parts) >= ask[0]):
                for i in nodes if allowed is None else nodes & allowed:
                    room = self.room_in(book[i], ask)
                    if room:
                        found.append((i, room))
        found.sort()
        return found

    def room_if_empty(self, i: int, ask: tuple[int, int, int, int]) -> int:
        """How many such pods node i would take if nothing of ours ran on it; 0 for unusable nodes."""
        return self.room_in(self.total[i], ask) if self.usable[i] else 0

    def places_if_empty(
        self, ask: tuple[int, int, int, int], selector: _Selector, depth: int | None = None
    ) -> int:
        """How many such pods the pool would take if nothing of ours ran on it (`depth`: one domain of it)."""
        key = (ask, selector, depth)
        if key not in self._empty:
            allowed = self._with(selector)
            some = range(len(self.nodes)) if allowed is None else allowed
            rooms = [(i, self.room_if_empty(i, ask)) for i in sorted(some)]
            sizes = [sum(room for _, room in rooms)]
            if depth is not None:
                sizes = [
                    sum(room for _, room in own) for own in domains_of(self.nodes, rooms, depth).values()
                ]
                sizes += [room for _, room in rooms]
            self._empty[key] = max(sizes, default=0)
        return self._empty[key]

    def inside(self, depth: int, allowed: frozenset[int] | None) -> list[frozenset[int]]:
        """The nodes of each domain of this level, in order of their names; below the last level: of each node."""
        every = [(i, 1) for i in range(len(self.nodes)) if allowed is None or i in allowed]
        own = domains_of(self.nodes, every, depth)
        found = [frozenset(i for i, _ in own[domain]) for domain in sorted(own)]
        standing = {i for domain in found for i in domain}
        return found + [frozenset((i,)) for i, _ in every if i not in standing]

    def gang(
        self, pods: int, per_pod: Resources, later: bool, allowed: frozenset[int] | None, depth: int | None
    ) -> tuple[str, ...] | None:
        """Nodes for all pods, or None (`depth`: all inside one domain of this level)."""
        chosen = within(
            self.nodes, self.rooms(request(per_pod, self.pool.is_cpu), later, allowed), pods, depth
        )
        return None if chosen is None else tuple(self.nodes[i].name for i in chosen)

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
