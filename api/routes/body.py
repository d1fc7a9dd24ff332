"""Reading JSON bodies, and answering with Kubernetes objects as they are."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from busbar.api.errors import BadRequest
from busbar.api.kubernetes.client import Object
from busbar.api.objects.objects import check_unicode
from busbar.kube.documents import DocumentError, value_of_json
from busbar.kube.types.meta import Resource


class _Read(Request):
    """A request whose JSON is read as all of ours."""

    async def json(self) -> Any:
        try:
            return value_of_json(await self.body())
        except DocumentError as error:  # FastAPI lets no other error through from here
            raise HTTPException(400, f"the body is not JSON: {error}") from error


class ModelRoute(APIRoute):
    """A route whose body is a model: FastAPI's own reader loses all but the last of equal names."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Read(request.scope, request.receive))

        return handle


async def read_object(request: Request) -> Object:
    """The body as a JSON object.

    Raises:
        BadRequest: it is not JSON, not an object, or holds text that is not Unicode.
    """
    try:
        body = value_of_json(await request.body())
    except DocumentError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    check_unicode(body)
    return body


Body = Annotated[Object, Depends(read_object)]
"""Put it after the caller in a handler's parameters, so that unauthenticated requests are refused before
their body is parsed."""


def takes(kinds: tuple[str, ...], description: str) -> dict[str, Any]:
    """OpenAPI for a body that is one of these kinds; of none, any object."""
    models = [{"$ref": f"#/components/schemas/{kind}"} for kind in kinds]
    schema = {"oneOf": models} if len(models) > 1 else models[0] if models else {"type": "object"}
    return {
        "requestBody": {
            "required": True,
            "description": description,
            "content": {"application/json": {"schema": schema}},
        }
    }


def one(found: Resource, status: int = 200) -> Response:
    """An answer that is one object, with the fields that Kubernetes sent."""
    return Response(_json(found), status_code=status, media_type="application/json")


def many(found: Iterable[Resource]) -> Response:
    """An answer that is a list of objects."""
    items = ",".join(map(_json, found))
    return Response(f'{{"items":[{items}]}}', media_type="application/json")


def _json(found: Resource) -> str:
    return found.model_dump_json(by_alias=True, exclude_unset=True)
