"""Tells open pages that something changed, but not what: pages then fetch what they may see.

A browser holds one event stream. Changes within `QUIET_S` are announced once, so a thousand status writes a
second cost a page one refresh a second. Callers are told only of changes in namespaces they may see, and the
event itself carries nothing. What a caller may see is checked again every `LOOK_AGAIN_S`; the stream of a
caller who is no longer known ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from busbar.api.access.authorization import LOOK_AGAIN_S, Reach
from busbar.api.errors import ApiError
from busbar.api.kubernetes.store import Store
from busbar.kube.informer import Key
from busbar.kube.types import ModelService, TrainingJob
from busbar.kube.types.meta import Resource as Model

QUIET_S = 1.0
HEARTBEAT_S = 15.0
MAX_STREAMS = 500
MAX_STREAMS_EACH = 50
"""Limit for one caller, so that nobody can use up all streams."""

Look = Callable[[], Awaitable[Reach]]
"""Returns what the caller may see now; raises ApiError when the caller is no longer known."""


@dataclass(eq=False)
class _Listener:
    subject: str
    reach: Reach
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class ChangeStream:
    """Fans changes out to listeners."""

    def __init__(self, store: Store) -> None:
        self._listeners: set[_Listener] = set()
        self._closing = asyncio.Event()
        store.subscribe(self._on_change)

    def _on_change(self, key: Key, old: Model | None, new: Model | None) -> None:
        if not isinstance(new or old, (TrainingJob, ModelService)):
            return
        for listener in self._listeners:
            if key.namespace in listener.reach:
                listener.changed.set()

    def full(self, subject: str) -> bool:
        """Whether the caller, or everybody together, has as many streams as allowed."""
        mine = sum(listener.subject == subject for listener in self._listeners)
        return mine >= MAX_STREAMS_EACH or len(self._listeners) >= MAX_STREAMS

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        self._closing.set()
        for listener in self._listeners:
            listener.changed.set()

    async def stream(self, subject: str, reach: Reach, look: Look) -> AsyncGenerator[bytes]:
        """Server-sent events: `changed`, or a comment every 15 s so that dead connections are noticed."""
        listener = _Listener(subject, reach)
        self._listeners.add(listener)
        looked_at = time.monotonic()
        try:
            yield b"retry: 2000\nevent: hello\ndata: 1\n\n"
            while not self._closing.is_set():
                if time.monotonic() - looked_at >= LOOK_AGAIN_S:
                    looked_at = time.monotonic()
                    try:
                        listener.reach = await look()
                    except ApiError:
                        return  # the browser reconnects, and gets the error
                try:
                    await asyncio.wait_for(listener.changed.wait(), HEARTBEAT_S)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if self._closing.is_set():
                    return
                listener.changed.clear()
                yield b"event: changed\ndata: 1\n\n"
                await asyncio.sleep(QUIET_S)
        finally:
            self._listeners.discard(listener)
