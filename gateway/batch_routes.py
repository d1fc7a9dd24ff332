"""/v1/files and /v1/batches: for people what the API keeps (`busbar.kube.contracts.batches`), in OpenAI's form.

A file is read from its client and handed on part by part, so none is ever whole in memory. Files and batches belong to
the person whose key asks, in the key's tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
from aiohttp import BodyPartReader, web
from pydantic import ValidationError

from busbar.gateway.api_client import ApiClient, ApiRefused
from busbar.gateway.documents import object_of
from busbar.gateway.errors import (
    BadRequest,
    ClientError,
    Conflict,
    NoSuchObject,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from busbar.gateway.keys import ApiUnreachable, KeyDirectory, digest_in
from busbar.kube.contracts import batches as wire
from busbar.kube.contracts.keys import KeyIdentity
from busbar.kube.contracts.wire import WireModel
from busbar.kube.documents import LONGEST_SHOWN, shown

CHUNK_S = 60.0
"""The longest silence of a client in the middle of its file."""
MOST_FIELD = 255
M = TypeVar("M", bound=WireModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ERRORS: dict[int, type[ClientError]] = {404: NoSuchObject, 409: Conflict, 413: TooLarge}


class BatchRoutes:
    """Handlers of the public port."""

    def __init__(self, keys: KeyDirectory, api: ApiClient) -> None:
        self._keys = keys
        self._api = api

    def add_to(self, router: web.UrlDispatcher) -> None:
        for method, path, handler in (
            ("POST", "/v1/files", self._upload),
            ("GET", "/v1/files", self._files),
            ("GET", "/v1/files/{id}", self._file),
            ("DELETE", "/v1/files/{id}", self._delete),
            ("GET", "/v1/files/{id}/content", self._content),
            ("POST", "/v1/batches", self._create),
            ("GET", "/v1/batches", self._batches),
            ("GET", "/v1/batches/{id}", self._batch),
            ("POST", "/v1/batches/{id}/cancel", self._cancel),
        ):
            router.add_route(method, path, _told(handler))

    # -- files --------------------------------------------------------------------------------------

    async def _upload(self, request: web.Request) -> web.Response:
        holder = _holder(await self._key(request))
        if request.content_type != "multipart/form-data":
            raise BadRequest("Send the file as multipart/form-data with the fields `purpose` and `file`.")
        if (request.content_length or 0) > wire.FILE_BYTES + (1 << 20):
            raise TooLarge(f"A file has at most {wire.FILE_BYTES >> 20} MiB; cut it into several.")
        fields: dict[str, str] = {}
        made: wire.FileInfo | None = None
        try:
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader):
                    raise BadRequest("A part of the form is a form itself.")
                if part.name == "file" and made is None:
                    made = await self._take(part, holder)
                elif part.name in ("purpose", "file"):
                    fields[part.name] = await _text(part)
                else:
                    raise BadRequest(
                        f"The form has a field that is not served: {shown(str(part.name))}.",
                        param=str(part.name)[:LONGEST_SHOWN],
                    )
        except (ValueError, aiohttp.http_exceptions.HttpProcessingError, AssertionError) as error:
            raise BadRequest("The form cannot be read.") from error
        except TimeoutError as error:
            raise BadRequest(f"The file stopped arriving for {CHUNK_S:.0f} s.") from error
        if made is None:
            raise BadRequest("The form needs a field `file`.", param="file")
        wanted = wire.CompleteFile(**holder, id=made.id, purpose=fields.get("purpose", "")[:32])
        return web.json_response(_file(await self._api.ask(f"{wire.FILES}/complete", wanted, wire.FileInfo)))

    async def _take(self, part: BodyPartReader, holder: dict[str, str]) -> wire.FileInfo:
        """Hand a file on as it arrives."""
        name = (part.filename or "file.jsonl")[:255]
        wanted = wire.NewFile(**holder, name=name)
        made = await self._api.ask(f"{wire.FILES}/create", wanted, wire.FileInfo)
        number = 0
        async for data in _parts(part):
            path = f"{wire.FILES}/{made.id}/parts/{number}"
            async with self._api.call("PUT", path, data=data):
                number += 1
        return made

    async def _files(self, request: web.Request) -> web.Response:
        wanted = self._page(request, await self._key(request))
        found = await self._api.ask(f"{wire.FILES}/list", wanted, wire.Files)
        return web.json_response(_list([_file(each) for each in found.files], found.more))

    async def _file(self, request: web.Request) -> web.Response:
        wanted = await self._reference(request)
        return web.json_response(_file(await self._api.ask(f"{wire.FILES}/get", wanted, wire.FileInfo)))

    async def _delete(self, request: web.Request) -> web.Response:
        wanted = await self._reference(request)
        async with self._api.call("POST", f"{wire.FILES}/delete", json=wanted.to_wire()):
            return web.json_response({"id": wanted.id, "object": "file", "deleted": True})

    async def _content(self, request: web.Request) -> web.StreamResponse:
        wanted = (await self._reference(request)).to_wire()
        response: web.StreamResponse | None = None
        after: str | None = "0"
        while after is not None:
            async with self._api.call("POST", f"{wire.FILES}/content?after={after}", json=wanted) as piece:
                data, after = await piece.read(), piece.headers.get(wire.NEXT_HEADER)
            if response is None:
                response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
                await response.prepare(request)
            async with asyncio.timeout(CHUNK_S):
                await response.write(data)
        assert response is not None
        await response.write_eof()
        return response

    # -- batches ------------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.Response:
        key = await self._key(request)
        document = await _document(request)
        window = document.get("completion_window")
        if window != "24h":
            raise BadRequest("completion_window must be '24h'.", param="completion_window")
        unknown = document.keys() - {"input_file_id", "endpoint", "completion_window", "metadata"}
        if unknown:
            name = min(unknown)
            raise BadRequest(f"{shown(name)} is not served; leave it out.", param=name[:LONGEST_SHOWN])
        try:
            wanted = wire.NewBatch(
                **_holder(key),
                key_id=key.key_id,
                sha256=digest_in(request.headers.get("Authorization")),
                endpoint=document.get("endpoint", ""),
                input_file_id=document.get("input_file_id", ""),
                metadata=document.get("metadata") or {},
            )
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            raise BadRequest(f"{name}: {error.errors()[0]['msg']}.", param=name) from error
        made = await self._api.ask(f"{wire.BATCHES}/create", wanted, wire.BatchInfo)
        return web.json_response(_batch(made))

    async def _batches(self, request: web.Request) -> web.Response:
        wanted = self._page(request, await self._key(request))
        found = await self._api.ask(f"{wire.BATCHES}/list", wanted, wire.Batches)
        return web.json_response(_list([_batch(each) for each in found.batches], found.more))

    async def _batch(self, request: web.Request) -> web.Response:
        wanted = await self._reference(request)
        return web.json_response(_batch(await self._api.ask(f"{wire.BATCHES}/get", wanted, wire.BatchInfo)))

    async def _cancel(self, request: web.Request) -> web.Response:
        wanted = await self._reference(request)
        return web.json_response(
            _batch(await self._api.ask(f"{wire.BATCHES}/cancel", wanted, wire.BatchInfo))
        )

    # -- both ---------------------------------------------------------------------------------------

    async def _key(self, request: web.Request) -> KeyIdentity:
        return await self._keys.identify(request.headers.get("Authorization"))

    async def _reference(self, request: web.Request) -> wire.FileRef:
        key = await self._key(request)
        try:
            return wire.FileRef(**_holder(key), id=request.match_info["id"])
        except ValidationError as error:
            raise NoSuchObject(f"There is no {shown(request.match_info['id'])}.") from error

    def _page(self, request: web.Request, key: KeyIdentity) -> wire.ListWanted:
        query = {name: request.query[name] for name in ("after", "limit") if name in request.query}
        try:
            return wire.ListWanted.model_validate({**_holder(key), **query})
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            raise BadRequest(f"{name}: {error.errors()[0]['msg']}.", param=name) from error


def _told(handler: Handler) -> Handler:
    """What the API says, as an error of the gateway."""

    async def told(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiRefused as error:
            kind = _ERRORS.get(error.status, BadRequest)
            raise kind(f"{error}.", param=error.field) from error
        except ApiUnreachable as error:
            raise Unavailable(
                "Files and batches cannot be reached at the moment.", retry_after_s=5
            ) from error

    return told


async def _parts(part: BodyPartReader) -> AsyncIterator[bytes]:
    """Pieces of one size, but the last."""
    held = bytearray()
    while True:
        async with asyncio.timeout(CHUNK_S):
            piece = await part.read_chunk(wire.PART_BYTES)
        if not piece:
            break
        held += piece
        while len(held) >= wire.PART_BYTES:
            yield bytes(held[: wire.PART_BYTES])
            del held[: wire.PART_BYTES]
    if held:
        yield bytes(held)


async def _text(part: BodyPartReader) -> str:
    """A short field of a form."""
    held = bytearray()
    while not part.at_eof():
        async with asyncio.timeout(CHUNK_S):
            held += await part.read_chunk(wire.PART_BYTES)
        if len(held) > MOST_FIELD:
            raise BadRequest(f"The form's field {part.name!r} is too long.", param=part.name)
    return held.decode(errors="replace")


async def _document(request: web.Request) -> dict[str, Any]:
    data = bytearray()
    try:
        async with asyncio.timeout(CHUNK_S):
            async for piece in request.content.iter_any():
                data += piece
                if len(data) > 1 << 16:
                    raise TooLarge("The request's body has more than 64 KiB.")
    except TimeoutError as error:
        raise BadRequest(f"The request's body did not arrive within {CHUNK_S:.0f} s.") from error
    return object_of(bytes(data))


def _holder(key: KeyIdentity) -> dict[str, str]:
    if not key.tenant:
        raise Unauthenticated("This key counts for no tenant.")
    return {"tenant": key.tenant, "subject": key.subject}


def _list(found: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
    return {"object": "list", "data": found, "has_more": more, **ends}


def _file(info: wire.FileInfo) -> dict[str, Any]:
    purpose = "batch_output" if info.purpose.startswith("batch_") else info.purpose
    return {**info.model_dump(), "object": "file", "purpose": purpose, "status": "processed"}


def _batch(info: wire.BatchInfo) -> dict[str, Any]:
    """OpenAI's form, in which each end has a time of its own."""
    problem = {"code": "invalid_file", "message": info.problem, "line": None, "param": None}
    ends = {
        "completed": "completed_at",
        "failed": "failed_at",
        "expired": "expired_at",
        "cancelled": "cancelled_at",
    }
    return {
        "id": info.id,
        "object": "batch",
        "endpoint": info.endpoint,
        "errors": {"object": "list", "data": [problem]} if info.problem else None,
        "input_file_id": info.input_file_id,
        "completion_window": "24h",
        "status": info.status,
        "output_file_id": info.output_file_id,
        "error_file_id": info.error_file_id,
        "created_at": info.created_at,
        "expires_at": info.expires_at,
        **{field: info.ended_at if info.status == status else None for status, field in ends.items()},
        "request_counts": {"total": info.total, "completed": info.completed, "failed": info.failed},
        "metadata": info.metadata or None,
    }
