"""Tells open pages that something changed, without saying what: pages then fetch what they may see.

A browser holds one event stream. Changes within `QUIET_S` are told once, so a thousand status writes a second
cost a page one refresh a second. What is sent is only "changed": a stream can leak nothing of another tenant
but that somebody, somewhere, did something; and callers are only told of changes in namespaces they may see.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from busbar.api.authorization import Reach
from busbar.api.kubernetes import Object
from busbar.api.store import Store
from busbar.kube.informer import Key
from busbar.kube.resources import MODEL_SERVICES, TRAINING_JOBS, Resource

QUIET_S = 1.0
HEARTBEAT_S = 15.0
MAX_STREAMS = 500


@dataclass(eq=False)
class _Listener:
    reach: Reach
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Live:
    """Fans changes out to listeners."""

    def __init__(self, store: Store) -> None:
        self._listeners: set[_Listener] = set()
        self._closing = asyncio.Event()
        store.subscribe(self._on_change)

    def _on_change(self, resource: Resource, key: Key, _old: Object | None, _new: Object | None) -> None:
        if resource not in (TRAINING_JOBS, MODEL_SERVICES):
            return
        for listener in self._listeners:
            if key.namespace in listener.reach:
                listener.changed.set()

    @property
    def full(self) -> bool:
        return len(self._listeners) >= MAX_STREAMS

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        self._closing.set()
        for listener in self._listeners:
            listener.changed.set()

    async def stream(self, reach: Reach) -> AsyncIterator[bytes]:
        """Server-sent events: `changed`, or a comment every 15 s so that dead connections are noticed."""
        listener = _Listener(reach)
        self._listeners.add(listener)
        try:
            yield b"retry: 2000\nevent: hello\ndata: 1\n\n"
            while not self._closing.is_set():
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
