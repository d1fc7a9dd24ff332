"""The internal port's part for files and batches, which gateways pass on to people."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from busbar.api.access.identity import Caller
from busbar.api.dependencies import GatewayOnly, services_of
from busbar.api.errors import TooLarge
from busbar.api.routes.schemas import errors
from busbar.kube.contracts import batches as wire

Gateway = Annotated[Caller, Depends(GatewayOnly())]
REFUSALS = errors(401, 403, 404, 409, 413, 422, 503)


def router() -> APIRouter:
    routes = APIRouter(tags=["Internal"])

    @routes.post(f"{wire.FILES}/create", operation_id="createFile", responses=REFUSALS)
    async def create_file(request: Request, body: wire.NewFile, _caller: Gateway) -> wire.FileInfo:
        return await services_of(request).files.create(body)

    @routes.put(wire.FILES + "/{file}/parts/{number}", operation_id="addPart", responses=REFUSALS)
    async def add_part(request: Request, file: str, number: int, _caller: Gateway) -> Response:
        data = await request.body()
        if len(data) > wire.PART_BYTES:
            raise TooLarge(f"a part has at most {wire.PART_BYTES} bytes")
        await services_of(request).files.add(file, number, data)
        return Response(status_code=204)

    @routes.post(f"{wire.FILES}/complete", operation_id="completeFile", responses=REFUSALS)
    async def complete_file(request: Request, body: wire.CompleteFile, _caller: Gateway) -> wire.FileInfo:
        return await services_of(request).files.complete(body)

    @routes.post(f"{wire.FILES}/list", operation_id="listFiles", responses=REFUSALS)
    async def list_files(request: Request, body: wire.ListWanted, _caller: Gateway) -> wire.Files:
        return await services_of(request).files.page(body)

    @routes.post(f"{wire.FILES}/get", operation_id="getFile", responses=REFUSALS)
    async def get_file(request: Request, body: wire.FileRef, _caller: Gateway) -> wire.FileInfo:
        return await services_of(request).files.get(body)

    @routes.post(f"{wire.FILES}/delete", operation_id="deleteFile", status_code=204, responses=REFUSALS)
    async def delete_file(request: Request, body: wire.FileRef, _caller: Gateway) -> None:
        await services_of(request).files.delete(body)

    @routes.post(f"{wire.FILES}/content", operation_id="readFile", responses=REFUSALS)
    async def read_file(request: Request, body: wire.FileRef, _caller: Gateway, after: int = 0) -> Response:
        data, following = await services_of(request).files.content(body, after)
        headers = {} if following is None else {wire.NEXT_HEADER: str(following)}
        return Response(data, media_type="application/octet-stream", headers=headers)

    @routes.post(f"{wire.BATCHES}/create", operation_id="createBatch", responses=REFUSALS)
    async def create(request: Request, body: wire.NewBatch, _caller: Gateway) -> wire.BatchInfo:
        return await services_of(request).batches.create(body)

    @routes.post(f"{wire.BATCHES}/list", operation_id="listBatches", responses=REFUSALS)
    async def list_batches(request: Request, body: wire.ListWanted, _caller: Gateway) -> wire.Batches:
        return await services_of(request).batches.page(body)

    @routes.post(f"{wire.BATCHES}/get", operation_id="getBatch", responses=REFUSALS)
    async def get(request: Request, body: wire.FileRef, _caller: Gateway) -> wire.BatchInfo:
        return await services_of(request).batches.get(body)

    @routes.post(f"{wire.BATCHES}/cancel", operation_id="cancelBatch", responses=REFUSALS)
    async def cancel(request: Request, body: wire.FileRef, _caller: Gateway) -> wire.BatchInfo:
        return await services_of(request).batches.cancel(body)

    @routes.post(f"{wire.BATCHES}/claim", operation_id="claimLines", responses=REFUSALS)
    async def claim(request: Request, body: wire.Claim, _caller: Gateway) -> wire.Lent:
        return await services_of(request).batches.claim(body)

    @routes.post(f"{wire.BATCHES}/settle", operation_id="settleLine", responses=REFUSALS)
    async def settle(request: Request, body: wire.Settled, _caller: Gateway) -> wire.Kept:
        return wire.Kept(kept=await services_of(request).batches.settle(body))

    return routes
