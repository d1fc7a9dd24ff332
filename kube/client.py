"""A small Kubernetes client over raw JSON: no models, no code generation, bounded connections.

Objects are plain dicts, as the server sends them. Every call either returns the parsed answer or raises a
typed error of ``busbar.kube.errors``. It handles:

* 429 and 503 with ``Retry-After`` are retried after that time (bounded by ``ClientLimits.retry_s``), because the server
  guarantees that it did not act on them; any other failure of a write is left to the caller, which must read the
  object again.
* A broken connection is retried for reads only. A write whose answer was lost may have happened.
* ``resourceVersion`` inside a body or a ``Preconditions`` on a delete make a write conditional.
* Tokens in files are read again as they rotate. An exec plug-in runs again when its credential expires, and when the
  server answers 401: it has not acted then, so the call is repeated once.

``guard`` is called before every write; the operator uses it as its lease fence. It may raise, and it returns for how many
seconds the write may last at most; nothing of it is sent later. It is called again when a connection was had and the first
byte is about to be sent: a process that was frozen in between sends nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from pydantic_core import from_json, to_json

from busbar.kube.errors import (
    ApiError,
    ConfigError,
    ConnectionFailed,
    TooManyRequests,
    Unauthorized,
    api_error,
)
from busbar.kube.exec_plugin import Credential
from busbar.kube.login import Login
from busbar.kube.resources import Resource

Object = dict[str, Any]

MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"

_SAFE = frozenset({"GET"})
_NETWORK_ERRORS = (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError, OSError)


@dataclass(frozen=True)
class ClientLimits:
    """ClientLimits on one process's use of the API server."""

    connections: int = 32  # sockets, without those of watches: each watch has one more
    request_s: float = 15.0  # one call, connection included
    connect_s: float = 5.0
    retry_s: float = 30.0  # total time spent on Retry-After before TooManyRequests is raised
    read_retries: int = 3  # retries of a GET after a broken connection


@dataclass(frozen=True)
class Preconditions:
    """Conditions on the stored object, without which a delete is refused."""

    uid: str | None = None
    resource_version: str | None = None


class KubeClient:
    """One process's connection to one cluster. Use as an async context manager, or call ``close``."""

    def __init__(
        self,
        login: Login,
        *,
        user_agent: str = "busbar",
        limits: ClientLimits | None = None,
        guard: Callable[[], float] | None = None,
    ) -> None:
        self.login = login
        self.limits = limits or ClientLimits()
        self.guard = guard
        self._agent = user_agent
        self._session: aiohttp.ClientSession | None = None
        self._watching: aiohttp.ClientSession | None = None
        self._certificate: str | None = None  # the plug-in's, on the open connections
        self._retired: set[aiohttp.ClientSession] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> KubeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for session in (self._session, self._watching, *self._retired):
            if session is not None:
                await session.close()
        self._session = self._watching = None
        self._retired.clear()

    # -- reading ---------------------------------------------------------------------------------------

    async def get(
        self, resource: Resource, name: str, namespace: str | None = None, subresource: str | None = None
    ) -> Object:
        """One object; NotFound when it does not exist."""
        return await self.call("GET", resource.path(namespace, name, subresource))

    async def pages(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        page: int = 500,
    ) -> AsyncIterator[tuple[list[Object], str]]:
        """All objects page by page, for lists that are too much to be kept at once; each with the list's resourceVersion."""
        params: dict[str, str] = {"limit": str(page)}
        _select(params, label_selector, field_selector)
        while True:
            answer = await self.call("GET", resource.path(namespace), params=params)
            items: list[Object] = answer.get("items") or []
            for item in items:
                # A list's items come without these two.
                item.setdefault("kind", resource.kind)
                item.setdefault("apiVersion", resource.api_version)
            meta = answer.get("metadata") or {}
            yield items, str(meta.get("resourceVersion") or "")
            if not meta.get("continue"):
                return
            params["continue"] = meta["continue"]

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        page: int = 500,
    ) -> tuple[list[Object], str]:
        """All objects and the list's resourceVersion, read in pages of ``page``."""
        found: list[Object] = []
        made_at = ""
        async for items, revision in self.pages(
            resource, namespace, label_selector=label_selector, field_selector=field_selector, page=page
        ):
            found += items
            made_at = revision
        return found, made_at

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        params: Mapping[str, str],
        inactivity_s: float,
    ) -> AsyncIterator[Object]:
        """Events ({"type", "object"}) until the server ends the stream; inactivity raises ConnectionFailed."""
        path = resource.path(namespace)
        what = f"watch {path}"
        try:
            async with self.stream(
                path, {"watch": "true", **params}, what=what, inactivity_s=inactivity_s
            ) as response:
                buffer = bytearray()
                async for chunk in response.content.iter_any():
                    buffer += chunk
                    if b"\n" not in chunk:
                        continue
                    *lines, rest = buffer.split(b"\n")
                    buffer = bytearray(rest)
                    for line in lines:
                        if line.strip():
                            yield from_json(line, cache_strings="all")
        except ValueError as error:
            raise ConnectionFailed(f"{what}: cut in the middle of an event: {error}") from error

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, what: str, inactivity_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A streamed answer: a socket of its own, no limit on its duration, only on its inactivity.

        Raises:
            KubeError: the server refuses, does not answer, or disconnects.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self.limits.connect_s, sock_read=inactivity_s
        )
        proof = await self._proof(what)
        try:
            async with self._watch_session().get(
                self.login.server + path,
                params=params,
                headers=_headers(self._agent, proof),
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.status == 401:
                    self._refused(proof)
                if response.status != 200:
                    raise api_error(response.status, await _body(response), what)
                yield response
        except _NETWORK_ERRORS as error:
            raise ConnectionFailed(f"{what}: {type(error).__name__}: {error}") from error

    # -- writing ---------------------------------------------------------------------------------------

    async def create(
        self, resource: Resource, body: Object, namespace: str | None = None, subresource: str | None = None
    ) -> Object:
        """POST; AlreadyExists when the name is taken."""
        name = body.get("metadata", {}).get("name") if subresource else None
        return await self.call("POST", resource.path(namespace, name, subresource), body=body)

    async def patch(
        self,
        resource: Resource,
        name: str,
        patch: object,
        namespace: str | None = None,
        *,
        kind: str = MERGE,
        subresource: str | None = None,
    ) -> Object:
        """PATCH; a JSON patch's failed ``test`` raises Invalid, a stale resourceVersion Conflict."""
        path = resource.path(namespace, name, subresource)
        return await self.call("PATCH", path, body=patch, content_type=kind)

    async def apply(
        self,
        resource: Resource,
        body: Object,
        *,
        manager: str,
        force: bool = False,
        subresource: str | None = None,
    ) -> Object:
        """Server-side apply; use ``force`` only for fields that no other manager may own."""
        meta = body["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"], subresource)
        params = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self.call("PATCH", path, body=body, content_type=APPLY, params=params)

    async def replace(
        self,
        resource: Resource,
        body: Object,
        namespace: str | None = None,
        *,
        subresource: str | None = None,
    ) -> Object:
        """PUT; conditional on the body's metadata.resourceVersion when that is present."""
        path = resource.path(namespace, body["metadata"]["name"], subresource)
        return await self.call("PUT", path, body=body)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        grace_s: int | None = None,
        propagation: str | None = "Background",
        preconditions: Preconditions | None = None,
    ) -> Object:
        """DELETE; NotFound when it does not exist, Conflict when a precondition fails."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if propagation is not None:
            options["propagationPolicy"] = propagation
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if preconditions is not None:
            held = {"uid": preconditions.uid, "resourceVersion": preconditions.resource_version}
            options["preconditions"] = {k: v for k, v in held.items() if v is not None}
        return await self.call("DELETE", resource.path(namespace, name), body=options)

    # -- all requests -------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: object | None = None,
        content_type: str = "application/json",
        params: Mapping[str, str] | None = None,
    ) -> Object:
        """One request with the retries described in the module's head; returns the parsed JSON object."""
        what = f"{method} {path}"
        data = None if body is None else to_json(body)
        waited, broken, renewed = 0.0, 0, False
        while True:
            proof = await self._proof(what)
            limit_s = self.limits.request_s
            if method not in _SAFE and self.guard is not None:
                limit_s = min(limit_s, self.guard())
            try:
                sent = None if data is None else _Body(data, None if method in _SAFE else self.guard)
                return await self._once(method, path, sent, content_type, params, what, proof, limit_s)
            except Unauthorized:
                if renewed or not self._refused(proof):
                    raise
                renewed = True
            except _Later as later:
                if waited + later.seconds > self.limits.retry_s:
                    raise later.error from None
                waited += later.seconds
                await asyncio.sleep(later.seconds)
            except ConnectionFailed:
                broken += 1
                if method not in _SAFE or broken > self.limits.read_retries:
                    raise
                await asyncio.sleep(random.uniform(0.05, 0.2) * broken)

    async def _once(
        self,
        method: str,
        path: str,
        data: _Body | None,
        content_type: str,
        params: Mapping[str, str] | None,
        what: str,
        proof: Credential,
        limit_s: float,
    ) -> Object:
        headers = _headers(self._agent, proof)
        if data is not None:
            headers["Content-Type"] = content_type
        try:
            async with self._call_session().request(
                method,
                self.login.server + path,
                data=data,
                params=params,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=limit_s, sock_connect=self.limits.connect_s),
                allow_redirects=False,
            ) as response:
                answer = await _body(response)
                status = response.status
                retry_after = response.headers.get("Retry-After")
        except _NETWORK_ERRORS as error:
            if data is not None and data.refusal is not None:
                raise data.refusal from error
            raise ConnectionFailed(f"{what}: {type(error).__name__}: {error}") from error
        if 200 <= status < 300:
            return answer if isinstance(answer, dict) else {}
        failure = api_error(status, answer, what)
        if status in (429, 503) and (retry_after is not None or isinstance(failure, TooManyRequests)):
            raise _Later(failure, _seconds(retry_after))
        raise failure

    async def _proof(self, what: str) -> Credential:
        """What to send now; connections are opened anew when the client certificate is another one."""
        plugin = self.login.plugin
        try:
            if plugin is not None and plugin.is_due():
                proof = await asyncio.to_thread(plugin.current)
            else:
                proof = self.login.credential()
        except (ConfigError, OSError) as error:
            raise ConnectionFailed(f"{what}: no credential: {error}") from error
        if plugin is not None and proof.client_cert_pem != self._certificate:
            self._certificate = proof.client_cert_pem
            self._retire()
        return proof

    def _refused(self, proof: Credential) -> bool:
        """The server answered 401: whether another credential can be had now."""
        return self.login.plugin is not None and self.login.plugin.refuse(proof)

    def _retire(self) -> None:
        """Leaves the open connections to the requests on them; watches on them end and begin again."""
        loop = asyncio.get_running_loop()
        for session in (self._session, self._watching):
            if session is not None:
                self._retired.add(session)
                loop.call_later(2 * self.limits.request_s, self._close_retired, session)
        self._session = self._watching = None

    def _close_retired(self, session: aiohttp.ClientSession) -> None:
        if session in self._retired:
            self._retired.discard(session)
            task = asyncio.get_running_loop().create_task(session.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _call_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = self._open(self.limits.connections)
        return self._session

    def _watch_session(self) -> aiohttp.ClientSession:
        if self._watching is None:
            self._watching = self._open(0)
        return self._watching

    def _open(self, connections: int) -> aiohttp.ClientSession:
        context = self.login.ssl_context()
        connector = aiohttp.TCPConnector(limit=connections, ssl=context if context is not None else True)
        return aiohttp.ClientSession(connector=connector, trust_env=False, proxy=self.login.proxy_url)


class _Body(aiohttp.BytesPayload):
    """The body of a request, which asks the guard before anything of the request is sent: headers go with it."""

    def __init__(self, value: bytes, guard: Callable[[], float] | None) -> None:
        super().__init__(value)
        self.refusal: Exception | None = None
        self._guard = guard

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        if self._guard is not None:
            try:
                self._guard()
            except Exception as refusal:
                self.refusal = refusal
                raise
        await super().write_with_length(writer, content_length)


class _Later(Exception):
    """The server asked for a retry; it did not act on the request."""

    def __init__(self, error: ApiError, seconds: float) -> None:
        self.error, self.seconds = error, seconds


def _headers(agent: str, proof: Credential) -> dict[str, str]:
    headers = {"Accept": "application/json", "User-Agent": agent}
    if proof.token:
        headers["Authorization"] = f"Bearer {proof.token}"
    return headers


def _seconds(retry_after: str | None) -> float:
    try:
        asked = float(retry_after) if retry_after is not None else 1.0
    except ValueError:
        asked = 1.0  # an HTTP date: the API server never sends one
    # Jitter, so that many callers do not retry at the same time.
    return max(0.0, asked) + random.uniform(0.0, 0.1)


def _select(params: dict[str, str], label_selector: str | None, field_selector: str | None) -> None:
    if label_selector:
        params["labelSelector"] = label_selector
    if field_selector:
        params["fieldSelector"] = field_selector


async def _body(response: aiohttp.ClientResponse) -> object:
    raw = await response.read()
    if not raw:
        return {}
    try:
        return from_json(raw, cache_strings="all")
    except ValueError:
        return raw.decode(errors="replace")
