"""A queue that is first-in-first-out within an owner and fair in tokens between owners, level by level.

An owner is a path such as (tenant, user, key). On each level a counter says what each name was served, in tokens over
its weight, and the name with the least is served next: so a tenant's users share its part, and nobody gets more by making
more keys or longer requests. A name that comes back counts at least as much as the least of those that wait or run, or as
the last that was served: being away saves nothing up. Whoever has something running has not been away, although nothing of it
may wait. Engines count the same (virtual token counters, arXiv 2401.00588):
1 for a prompt token, 0.1 for a cached one, 2 for an output token. An item is charged its estimate when it is served;
`settle` corrects that.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")
Owner = tuple[str, ...]
"""From the outermost name to the innermost."""
PROMPT, CACHED, OUTPUT = 1.0, 0.1, 2.0
RECENT = 256
"""The last items, whose owners are compared with each other."""
REMEMBERED = 4096
"""Names whose counters are kept while they wait for nothing."""


def cost_of(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
    """What a request is charged; `cached_tokens` are some of `prompt_tokens`."""
    return PROMPT * (prompt_tokens - cached_tokens) + CACHED * cached_tokens + OUTPUT * output_tokens


@dataclass
class _Branch(Generic[T]):
    """The branches below in the order in which they came, or the items of one whole path."""

    below: dict[str, _Branch[T]] = field(default_factory=dict)
    items: deque[tuple[T, float, float]] = field(default_factory=deque)
    """With cost and weight."""
    count: int = 0


class FairQueue(Generic[T]):
    """Items of many owners; `pop` gives the first of the owner that was served least."""

    def __init__(self) -> None:
        self._root: _Branch[T] = _Branch()
        self._front: deque[tuple[Owner, T]] = deque()
        """Served in vain: they are next, before every owner, and are charged already."""
        self._served: OrderedDict[Owner, float] = OrderedDict()
        """By path and by the paths above it, what was served."""
        self._running: dict[Owner, Counter[str]] = {}
        """By path, the names below it with items that were served and have not ended, and how many."""
        self._pushed: deque[Owner] = deque(maxlen=RECENT)
        self._last: dict[Owner, Owner] = {}
        """By path, the one below it that was served last."""

    def __len__(self) -> int:
        return self._root.count + len(self._front)

    def waiting(self, owner: Owner) -> int:
        """Items of an owner; of a shorter path all below it."""
        branch: _Branch[T] | None = self._root
        for name in owner:
            branch = branch.below.get(name) if branch else None
        front = sum(path[: len(owner)] == owner for path, _ in self._front)
        return (branch.count if branch else 0) + front

    def push(self, owner: Owner, item: T, cost: float = 1.0, weight: float = 1.0) -> None:
        """Add at the end of the owner's items; `weight` is that of the outermost name."""
        self._pushed.append(owner)
        branch = self._root
        branch.count += 1
        for depth, name in enumerate(owner):
            below = branch.below.get(name)
            if below is None:
                self._join(owner[: depth + 1], branch)
                below = branch.below[name] = _Branch()
            branch = below
            branch.count += 1
        branch.items.append((item, cost, weight))

    def push_front(self, owner: Owner, item: T) -> None:
        """Put back an item that was served in vain: it is next, before every owner."""
        self._front.appendleft((owner, item))

    def peek(self) -> T:
        """The next item; raises IndexError when empty."""
        if self._front:
            return self._front[0][1]
        if not self._root.count:
            raise IndexError("an empty queue has no next item")
        return self._path()[-1][1].items[0][0]

    def pop(self) -> T:
        """Take the next item and charge its owner; raises IndexError when empty."""
        if self._front:
            return self._front.popleft()[1]
        if not self._root.count:
            raise IndexError("pop from an empty queue")
        path = self._path()
        item, cost, weight = path[-1][1].items.popleft()
        self._leave(path)
        self._charge(path[-1][0], cost, weight)
        for owner, _ in path[1:]:
            self._last[owner[:-1]] = owner
            self._running.setdefault(owner[:-1], Counter())[owner[-1]] += 1
        return item

    def is_ahead(self, owner: Owner) -> bool:
        """Whether on some level the owner was served more than the middle between the least and the most served of those
        that asked lately."""
        for depth in range(1, len(owner) + 1):
            beside = {path[:depth] for path in self._pushed if path[: depth - 1] == owner[: depth - 1]}
            if len(beside) > 1:
                served = [self._served.get(path, 0.0) for path in beside]
                if self._served.get(owner[:depth], 0.0) > (min(served) + max(served)) / 2:
                    return True
        return False

    def asks_more(self, owner: Owner) -> bool:
        """Whether the owner asked lately half as often again as the mean of those that did."""
        counts = Counter(self._pushed)
        return 2 * counts[owner] * len(counts) > 3 * len(self._pushed)

    def rank(self, owner: Owner) -> int:
        """How many of the owners that asked lately were served less."""
        mine = self._counters(owner)
        return sum(self._counters(other) < mine for other in set(self._pushed))

    def _counters(self, owner: Owner) -> tuple[float, ...]:
        return tuple(self._served.get(owner[:depth], 0.0) for depth in range(1, len(owner) + 1))

    def settle(self, owner: Owner, more: float, weight: float = 1.0) -> None:
        """An item of the owner has ended, and cost so much more (below 0: less) than it was charged."""
        self._charge(owner, more, weight)
        for *above, name in (owner[:depth] for depth in range(1, len(owner) + 1)):
            running = self._running.get(tuple(above), Counter())
            running[name] -= 1
            if running[name] < 1:
                del running[name]
            if not running:
                self._running.pop(tuple(above), None)

    def remove(self, owner: Owner, item: T) -> bool:
        """Take out an item whose owner has left; False when it was not there."""
        for place, (_, waiting) in enumerate(self._front):
            if waiting == item:
                del self._front[place]
                return True
        path: list[tuple[Owner, _Branch[T]]] = [((), self._root)]
        for depth, name in enumerate(owner):
            below = path[-1][1].below.get(name)
            if below is None:
                return False
            path.append((owner[: depth + 1], below))
        items = path[-1][1].items
        found = next((entry for entry in items if entry[0] == item), None)
        if found is None:
            return False
        items.remove(found)
        self._leave(path)
        return True

    def drain(self) -> list[T]:
        """Take everything; as nothing of it was served, nobody is charged for it."""
        taken = [item for _, item in self._front]
        branches = [self._root]
        while branches:
            branch = branches.pop()
            taken += [item for item, _, _ in branch.items]
            branches += branch.below.values()
        self._front.clear()
        self._root = _Branch()
        return taken

    def _path(self) -> list[tuple[Owner, _Branch[T]]]:
        """The branches from the root to the owner that is served next."""
        path: list[tuple[Owner, _Branch[T]]] = [((), self._root)]
        while path[-1][1].below:
            above, branch = path[-1]
            name = min(branch.below, key=lambda name: self._served[(*above, name)])
            path.append(((*above, name), branch.below[name]))
        return path

    def _leave(self, path: list[tuple[Owner, _Branch[T]]]) -> None:
        """One item less on the way from the root."""
        for _, branch in path:
            branch.count -= 1
        for (_, above), (owner, branch) in pairwise(path):
            if not branch.count:
                del above.below[owner[-1]]
                break

    def _join(self, path: Owner, above: _Branch[T]) -> None:
        """A name begins to wait. It keeps its counter while something of it runs: then it has not been away."""
        own = self._served.get(path, 0.0)
        running = self._running.get(path[:-1], Counter())
        if path[-1] in running:
            least = own
        else:
            beside = {(*path[:-1], other) for other in (*above.below, *running)}
            last = self._last.get(path[:-1], ())
            least = min((self._served[other] for other in beside), default=self._served.get(last, 0.0))
        # Just before those who have been waiting with that counter: it was served less.
        self._served[path] = own if own >= least else math.nextafter(least, 0.0)
        self._served.move_to_end(path)
        if len(self._served) > 2 * REMEMBERED:
            self._forget()

    def _charge(self, owner: Owner, cost: float, weight: float) -> None:
        for depth in range(1, len(owner) + 1):
            path = owner[:depth]
            share = cost / weight if depth == 1 else cost
            self._served[path] = max(0.0, self._served.get(path, 0.0) + share)

    def _forget(self) -> None:
        """Drop the oldest counters of names that wait for nothing."""
        for path in list(self._served)[: len(self._served) - REMEMBERED]:
            branch: _Branch[T] | None = self._root
            for name in path:
                branch = branch.below.get(name) if branch else None
            if branch is None and path[-1] not in self._running.get(path[:-1], ()):
                del self._served[path]
                self._last.pop(path, None)
