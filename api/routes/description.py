"""REST's own description: OpenAPI made from the routes, and the address that answers it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import Response

from busbar.api.dependencies import Public

ERROR = {"$ref": "#/components/schemas/ErrorBody"}
PATH_PARTS = {
    "namespace": "A tenant's namespace.",
    "name": "The object's name.",
    "token_id": "The `id` of a token, not its text.",
}
"""What the variables of paths mean; each means the same everywhere."""


def router(make_app: Callable[[], FastAPI]) -> APIRouter:
    """The route of the OpenAPI description, which is made on the first request.

    Args:
        make_app: makes the application to describe; the one that answers has the portal's pages too.
    """
    routes = APIRouter()
    made: list[bytes] = []

    @routes.get("/api/v1alpha1/openapi.json", include_in_schema=False)
    async def openapi(
        _: Annotated[None, Depends(Public("the description is in the repository too"))],
    ) -> Response:
        if not made:
            made.append(as_text(make_app()).encode())
        return Response(made[0], media_type="application/json")

    return routes


def as_text(app: FastAPI) -> str:
    """An application's description in the form in which it is committed."""
    return json.dumps(described(app), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def described(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description with three corrections: errors are JSON also where a success is not, the 422
    answers that FastAPI adds by itself are removed (every one of ours is declared), and the variables of paths are
    described."""
    found = app.openapi()
    for operations in found["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    parameter["description"] = PATH_PARTS[parameter["name"]]
            for status, response in operation["responses"].items():
                if status.startswith(("4", "5")) and "HTTPValidationError" not in json.dumps(response):
                    response["content"] = {"application/json": {"schema": ERROR}}
            automatic = operation["responses"].get("422", {})
            if "HTTPValidationError" in json.dumps(automatic):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        found["components"]["schemas"].pop(name, None)
    return found
