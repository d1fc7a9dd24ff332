"""Fair order of requests: virtual token counters (Sheng et al., Fairness in Serving LLMs, arXiv 2401.00588). Pure
Python.

Each tenant has a counter of the work done for it, and below it each of its keys has one. The smallest counter
is served next. Work is counted in tokens: a prompt token that was computed 1, one that came from the prefix
cache 0.1, a sampled token 2, over the tenant's weight. A tenant that becomes active again starts directly below the
least counter of the active ones, so idle time gives no credit. Tokens that are computed again after a preemption
are charged to nobody.

The order alone does not help a request that comes while all places of the batch are taken, or while a long step runs. So what
owners have who are ahead of the others (`Places.is_ahead`) gives way to it (`giving_way.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf, nextafter, sqrt

PROMPT, CACHED, OUTPUT = 1.0, 0.1, 2.0
REMEMBERED = 4096
"""Counters of owners with nothing to do that are kept, at most."""


@dataclass(frozen=True)
class Owner:
    """The tenant and key of a request. All requests without one have the same owner."""

    tenant: str = ""
    key: str = ""
    weight: float = 1.0
    """The tenant's share, relative to the other tenants'."""
    batch: bool = False
    """Nobody waits for the answer: it gets what the others leave."""

    @property
    def name(self) -> tuple[str, str]:
        return self.tenant, self.key

    def same(self, other: Owner) -> bool:
        """Whether both are one owner, whatever its weight was when it asked."""
        return (self.name, self.batch) == (other.name, other.batch)


NOBODY = Owner()


@dataclass
class _Level:
    """The counters of tenants, or those of one tenant's keys."""

    value: dict[str, float] = field(default_factory=dict)
    active: dict[str, int] = field(default_factory=dict)
    """Requests that wait or run, where there are any."""

    def join(self, name: str) -> None:
        """A request begins to wait. An owner that comes back goes directly before the least served of the others; with
        an equal counter it would go behind all that this one has waiting."""
        if name not in self.active:
            least = min((self.value[other] for other in self.active), default=0.0)
            self.value[name] = max(self.value.pop(name, 0.0), nextafter(least, -inf))
            self._forget()
        self.active[name] = self.active.get(name, 0) + 1

    def leave(self, name: str) -> None:
        self.active[name] -= 1
        if not self.active[name]:
            del self.active[name]

    def _forget(self) -> None:
        if len(self.value) > REMEMBERED + len(self.active):
            oldest = next(name for name in self.value if name not in self.active)
            del self.value[oldest]


class _Tree:
    """Counters of tenants and of their keys."""

    def __init__(self) -> None:
        self._tenants = _Level()
        self._keys: dict[str, _Level] = {}

    def join(self, owner: Owner) -> None:
        """A request of the owner begins to wait."""
        self._tenants.join(owner.tenant)
        self._keys.setdefault(owner.tenant, _Level()).join(owner.key)
        if len(self._keys) > REMEMBERED + len(self._tenants.active):
            self._keys = {name: keys for name, keys in self._keys.items() if name in self._tenants.value}

    def leave(self, owner: Owner) -> None:
        """A request of the owner has ended."""
        self._tenants.leave(owner.tenant)
        self._keys[owner.tenant].leave(owner.key)

    def charge(self, owner: Owner, work: float) -> None:
        self._tenants.value[owner.tenant] += work / owner.weight
        self._keys[owner.tenant].value[owner.key] += work

    def of(self, owner: Owner) -> tuple[float, float]:
        """(tenant's, key's) counters: the smaller is served first."""
        return self._tenants.value[owner.tenant], self._keys[owner.tenant].value[owner.key]

    def requests(self, owner: Owner) -> int:
        """Of the owner's, those that wait or run."""
        return self._keys[owner.tenant].active.get(owner.key, 0)

    def is_ahead(self, owner: Owner, others: Collection[Owner], slack: float = 0.0) -> bool:
        """Whether the owner has been served as much as the middle between the least and the most served of `others`, or at most
        `slack` less: compared by tenant, and by key where all are of one tenant."""
        tenants = {each.tenant for each in others} | {owner.tenant}
        level, name, names = self._tenants, owner.tenant, tenants
        if len(tenants) == 1:
            level, name, names = self._keys[owner.tenant], owner.key, {each.key for each in others}
        values = [level.value.get(each, 0.0) for each in names]
        return bool(values) and level.value[name] >= (min(values) + max(values)) / 2 - slack


class Counters:
    """All counters of one engine. Batch work has its own, so that it costs nobody a turn."""

    def __init__(self) -> None:
        self._trees = {False: _Tree(), True: _Tree()}

    def join(self, owner: Owner) -> None:
        """A request of the owner begins to wait."""
        self._trees[owner.batch].join(owner)

    def leave(self, owner: Owner) -> None:
        """A request of the owner has ended."""
        self._trees[owner.batch].leave(owner)

    def charge(self, owner: Owner, work: float) -> None:
        self._trees[owner.batch].charge(owner, work)

    def of(self, owner: Owner) -> tuple[float, float]:
        """(tenant's, key's) counters: the smaller is served first."""
        return self._trees[owner.batch].of(owner)

    def requests(self, owner: Owner) -> int:
        """Of the owner's, those that wait or run."""
        return self._trees[owner.batch].requests(owner)

    def is_ahead(self, owner: Owner, others: Collection[Owner], slack: float = 0.0) -> bool:
        """Whether the owner has been served as much as the middle between the least and the most served of `others`, or at most
        `slack` less: compared by tenant, and by key where all are of one tenant."""
        return self._trees[owner.batch].is_ahead(owner, [o for o in others if o.batch is owner.batch], slack)


class Places:
    """The places of the batch, and who asks for more of them than others."""

    def __init__(self, total: int, counters: Counters, step_tokens: int = 0) -> None:
        """`step_tokens`: of the largest step. An owner that comes back after a pause starts where the least served one is, and a
        prompt of it counts at once: by so much another one may be behind it that is to give way to it nevertheless."""
        self.total = total
        self._slack = float(step_tokens)
        self.kept = total // 8
        """Places that are not for batch work."""
        self.most_resting = total // 4
        """Sequences that may rest at once for requests of other owners: each holds its blocks meanwhile."""
        self._counters = counters
        self._last: deque[Owner] = deque()
        self._recent: Counter[Owner] = Counter()
        """The owners of the last requests, so that nobody is ahead where only one owner asks."""

    def join(self, owner: Owner) -> None:
        """A request of the owner begins to wait. Batch work asks for nothing that others have."""
        if owner.batch:
            return
        self._last.append(owner)
        self._recent[owner] += 1
        if len(self._last) > 4 * self.total:
            first = self._last.popleft()
            self._recent[first] -= 1
            if not self._recent[first]:
                del self._recent[first]

    def is_ahead(self, owner: Owner) -> bool:
        """Whether the owner asks for more than the others that asked lately, and was not served less than the middle of them (as
        one with a large weight may be): it asked a quarter more often than the mean and two standard deviations of that
        count, or has more requests than an equal part of the places and was served more. Nobody is ahead where all ask
        alike."""
        names = len(self._recent)
        if names < 2:
            return False
        mean = len(self._last) / names
        asks_more = self._recent[owner] > 1.25 * mean + 2 * sqrt(mean)
        has_more = self._counters.requests(owner) * names > self.total
        slack = self._slack if asks_more else -1.0
        return (asks_more or has_more) and self._counters.is_ahead(owner, self._recent.keys(), slack)
