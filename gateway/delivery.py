"""One call of a client, and what the client has of its answer so far, over all replicas that worked on it.

Nothing here is done twice: what was passed on stays passed on. Until the first text a delivery can start anew on
any replica; after it, another replica must go on behind the last token, which needs the tokens' ids from the engine
(`busbar.kube.contracts.streams`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from busbar.gateway import responses, sse
from busbar.gateway.load_counts import Progress
from busbar.gateway.picking import ANY, Ask
from busbar.gateway.replica_load import Work
from busbar.kube.contracts.streams import ResumedChoice, ResumeRequest, StreamTerms, UsageShown

EARLY_EVENTS = 16
"""Reads without content (the role, comments) kept back at most, so that a replica's death may still be hidden."""


Keep = Callable[[int, bytes], Awaitable[bool]]
"""Stores (status, body) of an answer; False: another one of the same request was first, and this one costs nothing."""


@dataclass(frozen=True)
class Call:
    """A client's parsed request."""

    path: str
    request_id: str
    document: dict[str, Any]
    stream: bool
    arrived: float
    """Monotonic time."""
    tenant: str = ""
    key_id: str = ""
    weight: float = 1.0
    """The tenant's among those that use the service."""
    adapter: str = ""
    """Empty: the model alone."""
    seed: int = field(default_factory=lambda: secrets.randbits(62))
    """For an engine that draws: every replica draws the same."""
    created: int = field(default_factory=lambda: int(time.time()))
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of the answer, beside its own: the limits of the key."""
    progress: Progress = field(default_factory=lambda: Progress(stream=False))
    keep: Keep | None = None
    """Of batch work: takes the answer in place of a client."""

    def upstream_body(self, model_id: str, *, continuous: bool, rank: int | None = None) -> bytes:
        """What the replica gets: the model's own id, a wish for usage that we can count by, and the owner's rank where
        the model server orders by it, whatever the client says."""
        document = {**self.document, "model": self.named(model_id)}
        if rank is not None:
            document["priority"] = rank
        if self.stream and not self.is_response:
            options = self.document.get("stream_options")
            options = dict(options) if isinstance(options, dict) else {}
            options["include_usage"] = True
            if continuous:
                options["continuous_usage_stats"] = True
            document["stream_options"] = options
        return _encoded(document)

    @property
    def is_response(self) -> bool:
        """Of /v1/responses, whose streams have a form of their own and always tell their usage (`responses`)."""
        return self.path == responses.PATH

    def named(self, model_id: str) -> str:
        """The name by which a replica of the model knows what was asked for."""
        return f"{model_id}:{self.adapter}" if self.adapter else model_id

    def terms(self, hand_over: Sequence[str] = ()) -> str:
        """The header by which our engine does the same on every replica, and perhaps hands the stream over; others ignore it."""
        wish = sse.Wish.of(self.document)
        usage = UsageShown.EACH if wish.continuous else UsageShown.LAST if wish.total else UsageShown.NONE
        terms = StreamTerms(
            seed=self.seed, created=self.created, usage=usage, moves=True, hand_over=list(hand_over)
        )
        return terms.model_dump_json(by_alias=True)


class Delivery:
    """The answer to one call, as far as it has come."""

    def __init__(
        self,
        call: Call,
        tokens_limit: int,
        ask: Ask = ANY,
        on_moved: Callable[[float], None] = lambda stall_s: None,
    ) -> None:
        """`on_moved` is told of each time for which the stream stood still because it moved."""
        self._call = call
        self._on_moved = on_moved
        self.ask = ask
        """What it needs of a replica."""
        self._tokens_limit = tokens_limit
        self.response: web.StreamResponse | None = None
        """Set when the first event goes to the client."""
        self.work: Work | None = None
        """At the replica that works on it now."""
        self.moved_at: float | None = None
        """Monotonic time at which the stream left a replica for one that has its keys and values, until it goes on there."""
        self.charged: Ask | None = None
        """What its owner was charged for in the queue; None: it has not been served."""
        self.restart()

    def begin(self, digest: str) -> None:
        """A replica has begun the stream, under this name; empty: it has none."""
        self.digest = digest
        self.meter.holds = bool(digest)

    def restart(self) -> None:
        """Forget what a replica said, of which nothing has gone to the client."""
        self.meter = (
            responses.ResponsesMeter(self._tokens_limit)
            if self._call.is_response
            else sse.Meter(sse.Wish.of(self._call.document), self._tokens_limit)
        )
        self.early: list[bytes] = []
        self.digest = ""
        """The engine's name for this stream; empty where it has none."""

    def goes_on(self) -> None:
        """The replica that works on it now has sent something for the client."""
        if self.work is not None:
            self.work.begun = True
        if self.moved_at is not None:
            stall_s, self.moved_at = time.monotonic() - self.moved_at, None
            self._on_moved(stall_s)

    def hold_early(self, shown: bytes) -> bytes:
        """What begins the answer, with all that was kept back; empty as long as `shown` is kept back as well."""
        self.early.append(shown)
        if not self.meter.begun and len(self.early) < EARLY_EVENTS:
            return b""
        return b"".join(self.early)

    @property
    def begun(self) -> bool:
        return self.response is not None

    @property
    def resumable(self) -> bool:
        """Whether another replica can go on from here."""
        return bool(self.digest) and self.meter.traced

    @property
    def tokens(self) -> int:
        """Tokens passed on."""
        return self.meter.completion_tokens

    def resume_body(self, model_id: str) -> bytes:
        """What the next replica gets."""
        meter, count = self.meter, self._choices()
        request = ResumeRequest(
            path=self._call.path,
            request={**self._call.document, "model": self._call.named(model_id)},
            digest=self.digest,
            cached_tokens=meter.cached_tokens,
            events=meter.events,
            choices=[
                ResumedChoice(tokens=list(meter.traces.get(index, ())), ended=index in meter.ended)
                for index in range(count)
            ],
        )
        return _encoded(request.to_wire())

    def _choices(self) -> int:
        """How many choices the engine gives, as far as the request tells it."""
        n, prompt = self._call.document.get("n"), self._call.document.get("prompt")
        many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return (n if isinstance(n, int) else 1) * (len(prompt) if many and isinstance(prompt, list) else 1)


def _encoded(document: dict[str, Any]) -> bytes:
    """JSON no larger than what the client sent: characters as they are; half a surrogate pair, which UTF-8 lacks, as
    its escape."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")
