"""A cache of one resource, updated by a watch, with only the fields that its caller projects.

    list (streamed where served) ──► items ──► watch from there ──► on_change(key, old, new)
          ▲                                        │
          └────────── 410 Gone, ERROR event ───────┘      (cut or silent stream: watch again from the last
                                                          resourceVersion, after a jittered back-off)

* The first list is streamed (``sendInitialEvents``), so neither side builds the whole list in memory; a
  server without it answers 400 or 422 and we read pages of 500 instead.
* Bookmarks keep the resourceVersion recent; a stream without events for ``inactivity_s`` is closed.
* ``project`` turns a raw object, without ``managedFields``, into the cached value. None leaves the object out.
* After a relist, objects that no longer exist are reported as deleted, so no deletion is missed.
* ``observe`` stores the answer to our own write at once, so that the next decision sees it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from busbar.kube.client import KubeClient, Object
from busbar.kube.errors import ApiError, BadRequest, ConnectionFailed, Gone, Invalid
from busbar.kube.resources import Resource

T = TypeVar("T")

log = logging.getLogger(__name__)
SHORT_WATCH_S = 1.0
INITIAL_END = "k8s.io/initial-events-end"


class Key(NamedTuple):
    """An object's namespace and name; the namespace is empty for cluster-scoped kinds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def key_of(obj: Object) -> Key:
    meta = obj["metadata"]
    return Key(meta.get("namespace", ""), meta["name"])


def version_of(obj: Object) -> int:
    """The resourceVersion as a number (comparable within one resource since Kubernetes 1.35)."""
    try:
        return int(obj["metadata"].get("resourceVersion") or 0)
    except ValueError:
        return 0


class Cache(Generic[T]):
    """The projected objects of one resource by key. An older version never overwrites a newer one, from any source."""

    def __init__(
        self,
        resource: Resource,
        project: Callable[[Object], T | None],
        on_change: Callable[[Key, T | None, T | None], None] | None = None,
    ) -> None:
        self.resource = resource
        self.items: dict[Key, T] = {}
        self._project = project
        self._on_change = on_change
        self._versions: dict[Key, int] = {}
        self._tombstones: dict[Key, int] = {}

    def observe(self, obj: Object) -> None:
        """Store an object from a watch or from the answer to our own write, unless a newer version is stored."""
        if obj.get("kind", self.resource.kind) == self.resource.kind:
            self._put(obj)

    def forget(self, key: Key, version: int | None = None) -> None:
        """Remove a deleted object; ``version`` is that of its deletion, if known."""
        self._drop(key, self._versions.get(key, 0) if version is None else version)

    def replace(self, objects: list[Object], revision: str) -> None:
        """Store a complete list made at ``revision``; objects that it lacks are deleted, unless they are newer."""
        for obj in objects:
            self.observe(obj)
        self._drop_unlisted({key_of(obj) for obj in objects}, revision)

    async def replace_by_pages(self, pages: AsyncIterator[tuple[list[Object], str]]) -> None:
        """The same with a list that is read page by page, of which one is kept at a time."""
        seen: set[Key] = set()
        made_at = ""
        async for objects, revision in pages:
            for obj in objects:
                self.observe(obj)
                seen.add(key_of(obj))
            objects.clear()  # not kept while the next page is read
            made_at = revision
        self._drop_unlisted(seen, made_at)

    def _drop_unlisted(self, seen: set[Key], revision: str) -> None:
        listed = int(revision) if revision.isdigit() else 0
        for key in [k for k in self._versions if k not in seen and self._versions[k] <= listed]:
            self._drop(key, listed)

    def _put(self, obj: Object) -> None:
        key, version = key_of(obj), version_of(obj)
        if version <= self._versions.get(key, -1) or version <= self._tombstones.get(key, -1):
            return
        obj["metadata"].pop("managedFields", None)
        try:
            projected = self._project(obj)
        except Exception:
            # An object that cannot be projected must not end the watch; it is treated as absent.
            log.exception("%s %s is left out", self.resource.kind, key)
            projected = None
        old = self.items.get(key)
        self._versions[key] = version
        self._tombstones.pop(key, None)
        if projected is None:
            self.items.pop(key, None)
        else:
            self.items[key] = projected
        if projected != old and self._on_change is not None:
            self._on_change(key, old, projected)

    def _drop(self, key: Key, version: int) -> None:
        if version < self._versions.get(key, -1):
            return  # a late deletion of an earlier object with this name
        self._versions.pop(key, None)
        # Recorded so that a late answer to our own write cannot restore the object; bounded.
        self._tombstones[key] = version
        while len(self._tombstones) > 1000:
            self._tombstones.pop(next(iter(self._tombstones)))
        old = self.items.pop(key, None)
        if old is not None and self._on_change is not None:
            self._on_change(key, old, None)


class Informer(Cache[T]):
    """A cache that lists and watches the API server. Run ``run()`` as a task; wait for ``synced``."""

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        project: Callable[[Object], T | None],
        on_change: Callable[[Key, T | None, T | None], None] | None = None,
        *,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        inactivity_s: float = 75.0,
        server_timeout_s: int = 240,
        backoff_s: tuple[float, float] = (0.2, 30.0),
    ) -> None:
        super().__init__(resource, project, on_change)
        self.synced = asyncio.Event()
        self.heard_at = time.monotonic()
        self.relists = 0
        self._client = client
        self._namespace = namespace
        self._selectors = {
            k: v for k, v in (("labelSelector", label_selector), ("fieldSelector", field_selector)) if v
        }
        self._inactivity_s = inactivity_s
        self._server_timeout_s = server_timeout_s
        self._backoff_s = backoff_s
        self._revision = ""
        self._streams_lists = True

    @property
    def age_s(self) -> float:
        """Seconds since the last data on this watch."""
        return time.monotonic() - self.heard_at

    async def run(self) -> None:
        """List and watch until cancelled."""
        wait, longest = self._backoff_s
        delay = wait
        while True:
            begun = self._revision
            try:
                if not self._revision:
                    await self._fill()
                await self._follow()
                delay = wait
            except Gone:
                self._revision = ""
            except (ConnectionFailed, ApiError):
                if begun and self._revision != begun:
                    delay = wait  # this watch had worked, so the back-off starts again
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(delay * 2, longest)

    # -- listing ---------------------------------------------------------------------------------------

    async def relist(self) -> None:
        """Takes in a complete list beside the watch: afterwards nothing older than this call is missing."""
        objects, revision = await self._client.list(
            self.resource,
            self._namespace,
            label_selector=self._selectors.get("labelSelector"),
            field_selector=self._selectors.get("fieldSelector"),
        )
        self.replace(objects, revision)

    async def _fill(self) -> None:
        self.relists += 1
        seen: set[Key] = set()
        if self._streams_lists:
            try:
                revision = await self._fill_streaming(seen)
            except (BadRequest, Invalid):
                self._streams_lists = False
                seen.clear()
        if not self._streams_lists:
            objects, revision = await self._client.list(
                self.resource,
                self._namespace,
                label_selector=self._selectors.get("labelSelector"),
                field_selector=self._selectors.get("fieldSelector"),
            )
            for obj in objects:
                seen.add(key_of(obj))
                self._put(obj)
        self._drop_unlisted(seen, revision)
        self._revision = revision
        self.heard_at = time.monotonic()
        self.synced.set()

    async def _fill_streaming(self, seen: set[Key]) -> str:
        params = {
            **self._selectors,
            "sendInitialEvents": "true",
            "resourceVersionMatch": "NotOlderThan",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._server_timeout_s),
        }
        stream = self._client.watch(
            self.resource, self._namespace, params=params, inactivity_s=self._inactivity_s
        )
        async for event in stream:
            self.heard_at = time.monotonic()
            obj = event["object"]
            if event["type"] == "ERROR":
                raise _stream_error(self.resource, obj)
            if event["type"] == "BOOKMARK":
                if (obj["metadata"].get("annotations") or {}).get(INITIAL_END) == "true":
                    return str(obj["metadata"]["resourceVersion"])
            elif event["type"] == "DELETED":
                seen.discard(key_of(obj))
                self._drop(key_of(obj), version_of(obj))
            else:
                seen.add(key_of(obj))
                self._put(obj)
        raise ConnectionFailed(f"list {self.resource.plural}: the stream ended before the list was complete")

    # -- watching --------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        params = {
            **self._selectors,
            "resourceVersion": self._revision,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(self._server_timeout_s * random.uniform(0.8, 1.0)) or 1),
        }
        stream = self._client.watch(
            self.resource, self._namespace, params=params, inactivity_s=self._inactivity_s
        )
        opened, said = time.monotonic(), False
        async for event in stream:
            self.heard_at, said = time.monotonic(), True
            obj = event["object"]
            if event["type"] == "ERROR":
                raise _stream_error(self.resource, obj)
            if event["type"] == "DELETED":
                self._drop(key_of(obj), version_of(obj))
            elif event["type"] != "BOOKMARK":
                self._put(obj)
            self._revision = str(obj["metadata"]["resourceVersion"])
        if not said and time.monotonic() - opened < SHORT_WATCH_S:
            # Do not reconnect in a tight loop to a server or proxy that ends each watch at once.
            raise ConnectionFailed(f"watch {self.resource.plural}: ended at once and said nothing")


def _stream_error(resource: Resource, status: dict[str, Any]) -> Exception:
    """An ERROR event carries a Status; 410 means that our resourceVersion is too old."""
    code, message = int(status.get("code") or 0), str(status.get("message") or "")
    if code == 410 or status.get("reason") == "Expired":
        return Gone(410, "Expired", message, f"watch {resource.plural}")
    return ConnectionFailed(f"watch {resource.plural}: {code} {message}")
