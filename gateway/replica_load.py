"""What this gateway has sent to one replica, and whether it takes more.

A replica computes so many requests together (`most_running`) and holds so many tokens of context (`kv_tokens`). What is
beyond would wait in its own queue, where a later request of somebody who had less cannot pass it any more. So a little
more is sent than it can run, which begins as soon as a place is free, and the rest waits here.

Batch work counts for batch work only: the engine gives its place to others. It leaves an eighth of the places free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from busbar.gateway.picking import STEP_TOKENS, Ask, Candidate, predicted_s
from busbar.gateway.prefix_table import BLOCK_TOKENS, PrefixTable
from busbar.kube.contracts.routes import Endpoint

AHEAD = 4
"""One request is sent ahead for so many that run, at least one. These places are for owners who are not ahead: the engine lets
as many of the others' requests rest for theirs (`giving_way.py` there)."""
KV_AHEAD = 8
"""Requests of one more of so many parts of the KV cache are sent ahead, because answers end before their expected length."""
BATCH_KEPT = 8
"""Batch work leaves one of so many places free."""
HEAVY_PART = 64
"""Tokens by which a prompt of an owner who is ahead delays one of an owner who is not, at most: the engine computes so many in a
step, and none in a step with the other one."""
LATE = 2.0
"""After so many times the predicted time a prompt counts as computed, where no first token can be seen."""
MOST_ADAPTERS = 64


@dataclass(eq=False)
class Work:
    """One request at a replica."""

    ask: Ask
    tenant: str
    begins_by: float
    """When its first token should have come, at the latest."""
    begun: bool = False
    to: tuple[str, ...] = ()
    """Addresses to which its stream is to be handed at its first token, best first."""
    is_ahead: bool = False
    """Its owner was served most, so that its prompt gives way to those of others, where the engine knows owners."""


@dataclass
class ReplicaLoad:
    """One replica."""

    works: set[Work] = field(default_factory=set)
    failures: int = 0
    suspect_until: float = 0.0
    prefix: PrefixTable = field(default_factory=PrefixTable)
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)

    @property
    def in_flight(self) -> int:
        return len(self.works)

    @property
    def others(self) -> list[Work]:
        """Requests that somebody waits for."""
        return [work for work in self.works if not work.ask.batch]

    def takes(
        self, endpoint: Endpoint, ask: Ask, most: int, now: float, coming: Collection[Work] = ()
    ) -> bool:
        """Whether a request can be sent there now, of at most `most`; `coming` are streams that will be handed over to it."""
        if not endpoint.ready or endpoint.draining or self.suspect_until > now:
            return False
        if ask.adapter in endpoint.lacks:
            return False
        works: Collection[Work] = [*(self.works if ask.batch else self.others), *coming]
        room = 1 - 1 / BATCH_KEPT if ask.batch else 1 + 1 / KV_AHEAD
        if ask.batch:
            places = min(most, endpoint.most_running or most // 2)
            most = max(1, places - places // BATCH_KEPT)
        elif endpoint.most_running is not None:
            most = min(most, endpoint.most_running + max(1, endpoint.most_running // AHEAD))
        if len(works) >= most:
            return False
        if endpoint.kv_tokens is None or not works:
            return True
        held = sum(work.ask.prompt_tokens + work.ask.output_tokens for work in works)
        return held + ask.prompt_tokens + ask.output_tokens <= endpoint.kv_tokens * room

    def candidate(
        self, endpoint: Endpoint, now: float, is_ahead: bool = True, coming: Collection[Work] = ()
    ) -> Candidate:
        """The replica as the choice sees it, for a request of an owner who is ahead or not: prompts of those who are give way
        to the others'. `coming` as in `takes`."""
        works = self.others
        begin = [w for w in works if not w.begun and now < w.begins_by]
        ahead = sum(w.ask.prompt_tokens for w in begin if is_ahead or not w.is_ahead)
        if not is_ahead:
            ahead += min(STEP_TOKENS, sum(min(HEAVY_PART, w.ask.prompt_tokens) for w in begin if w.is_ahead))
        works = [*works, *coming]
        context = sum(w.ask.prompt_tokens + w.ask.output_tokens // 2 for w in works)
        return Candidate(endpoint, len(works), ahead, context, self.prefix, frozenset(self.adapters))

    def take(self, endpoint: Endpoint, ask: Ask, tenant: str, now: float, is_ahead: bool = True) -> Work:
        """A request of a tenant is sent there."""
        speed = endpoint.speed
        expected = (
            predicted_s(self.candidate(endpoint, now, is_ahead), speed, ask) if speed is not None else 0.0
        )
        work = Work(ask, tenant, now + LATE * expected, is_ahead=is_ahead)
        self.works.add(work)
        if endpoint.kv_tokens is not None:
            self.prefix.most = max(1, endpoint.kv_tokens // BLOCK_TOKENS)
        self.prefix.add(ask.blocks)
        if ask.adapter:
            self.adapters[ask.adapter] = None
            self.adapters.move_to_end(ask.adapter)
            while len(self.adapters) > MOST_ADAPTERS:
                self.adapters.popitem(last=False)
        return work

    def fail(self, until: float) -> None:
        """It failed: it gets nothing until then, and what it had in its caches is not relied on."""
        self.failures += 1
        self.suspect_until = until
        self.prefix.clear()
        self.adapters.clear()


def is_last_place(candidate: Candidate) -> bool:
    """Whether the replica's next place is one of the last, which are for owners who were served less."""
    most = candidate.endpoint.most_running
    return most is not None and candidate.running >= most
