"""Reading JSON bodies, and answering with Kubernetes objects as they are."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import JSONResponse

from busbar.api.errors import BadRequest
from busbar.api.kubernetes import Object


async def read_object(request: Request) -> Object:
    """The body as a JSON object.

    Raises:
        BadRequest: it is not JSON, or not an object.
    """
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


Body = Annotated[Object, Depends(read_object)]
"""Stands after the caller in a handler's parameters: who is not known does not hear about their JSON."""


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


def raw(body: Any, status: int = 200) -> JSONResponse:
    """An answer that is JSON already: no second validation of objects that the API server has validated."""
    return JSONResponse(body, status_code=status)
