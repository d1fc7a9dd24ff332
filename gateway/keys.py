"""Authentication by API key: the key's tenant is looked up at the API, and the answer is cached.

Only the SHA-256 of a key leaves this process, and only the SHA-256 is kept. An answer is used for `fresh_s`; when the
API cannot be reached, for `stale_s` at most, and never past the key's own expiry. While the API is unavailable, a
request with a cached key does not wait for the next attempt. "No such key" is cached for a short time, so that a
wrong key causes little load on the API. Concurrent look-ups of one key are one request.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from busbar.gateway.errors import Forbidden, GatewayError, Unauthenticated, Unavailable
from busbar.kube.contracts.keys import SCOPE_INFERENCE, KeyIdentity, digest_of, is_token


class ApiUnreachable(GatewayError):
    """The API gave no usable answer."""


Lookup = Callable[[str], Awaitable[KeyIdentity | None]]
"""SHA-256 (hex) of a key → what it may do, None when there is no such key. Raises ApiUnreachable."""


@dataclass(frozen=True)
class _Entry:
    key: KeyIdentity | None
    asked_at: float


class KeyDirectory:
    """Looks keys up, with the cache described above."""

    def __init__(
        self,
        lookup: Lookup,
        *,
        fresh_s: float,
        stale_s: float,
        negative_s: float,
        entries: int,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._lookup = lookup
        self._fresh_s = fresh_s
        self._stale_s = stale_s
        self._negative_s = negative_s
        self._entries = entries
        self._monotonic = monotonic
        self._now = now
        self._cache: OrderedDict[str, _Entry] = OrderedDict()
        self._asking: dict[str, asyncio.Task[_Entry]] = {}
        self._away = False
        self._gate = asyncio.Semaphore(16)

    async def identify(self, authorization: str | None) -> KeyIdentity:
        """The key behind an `Authorization` header.

        Raises Unauthenticated (no key, malformed, unknown, expired), Forbidden (a key without the inference
        scope) or Unavailable (the API is away and the key is not remembered).
        """
        return await self.identify_digest(digest_in(authorization))

    async def identify_digest(self, digest: str) -> KeyIdentity:
        """The same by the SHA-256 of the key, which a batch has."""
        key = await self._find(digest)
        if key is None or (key.expires_at is not None and key.expires_at <= self._now()):
            raise Unauthenticated(
                f"This API key is not valid: it is unknown, revoked or expired, lacks the scope {SCOPE_INFERENCE!r}, or counts"
                f" for no tenant. Make one with `busbar token create --scopes {SCOPE_INFERENCE} --tenant NAME`."
            )
        if SCOPE_INFERENCE not in key.scopes:
            raise Forbidden(
                f"This API key lacks the scope {SCOPE_INFERENCE!r}. Make one that has it: `busbar token create --scopes {SCOPE_INFERENCE}`."
            )
        return key

    async def _find(self, digest: str) -> KeyIdentity | None:
        entry = self._cache.get(digest)
        age = self._monotonic() - entry.asked_at if entry else 0.0
        if entry and age < (self._fresh_s if entry.key else self._negative_s):
            self._cache.move_to_end(digest)
            return entry.key
        remembered = entry.key if entry and age < self._stale_s else None
        asking = self._begin(digest)
        if remembered and self._away:
            return remembered  # the answer will be cached for later requests
        try:
            # Shielded: one caller's disconnect must not fail the others that wait for the same answer.
            return (await asyncio.shield(asking)).key
        except ApiUnreachable as error:
            if remembered:
                return remembered
            raise Unavailable(
                "API keys cannot be checked at the moment. Try again shortly.", retry_after_s=5
            ) from error

    def _begin(self, digest: str) -> asyncio.Task[_Entry]:
        """The look-up of a key: the one in flight, or a new one."""
        task = self._asking.get(digest)
        if task is None:
            task = asyncio.create_task(self._ask(digest))
            self._asking[digest] = task
            task.add_done_callback(lambda done: self._asked(digest, done))
        return task

    def _asked(self, digest: str, done: asyncio.Task[_Entry]) -> None:
        self._asking.pop(digest, None)
        if not done.cancelled():
            done.exception()  # seen here, so that asyncio does not warn when every caller has left

    async def _ask(self, digest: str) -> _Entry:
        async with self._gate:
            try:
                found = await self._lookup(digest)
            except ApiUnreachable:
                self._away = True
                raise
        self._away = False
        entry = _Entry(found, self._monotonic())
        self._cache[digest] = entry
        self._cache.move_to_end(digest)
        while len(self._cache) > self._entries:
            self._cache.popitem(last=False)
        return entry


def digest_in(authorization: str | None) -> str:
    """SHA-256 of the key in an `Authorization` header. Raises Unauthenticated."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("No API key. Send it as the header `Authorization: Bearer bb_…`.")
    key = key.strip()
    if not is_token(key):
        raise Unauthenticated("This is not a Busbar API key: one is `bb_` and 43 letters, digits, - or _.")
    return digest_of(key)
