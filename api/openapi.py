"""The OpenAPI description of the public REST API, as a file: `docs/openapi.json`.

Generated from the routes themselves, without a cluster or a database, and tested for drift.
"""

from __future__ import annotations

import json
from typing import Any

PATH = "docs/openapi.json"
ERROR = {"$ref": "#/components/schemas/ErrorBody"}


def description() -> dict[str, Any]:
    """The description as a JSON value."""
    from busbar.api.app import rest_app

    return exact(rest_app().openapi())


def exact(found: dict[str, Any]) -> dict[str, Any]:
    """What FastAPI cannot know: errors are JSON also where a success is not, and it never answers the 422s that
    it adds by itself (every one of ours is declared)."""
    for operations in found["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status.startswith(("4", "5")) and "HTTPValidationError" not in json.dumps(response):
                    response["content"] = {"application/json": {"schema": ERROR}}
            automatic = operation["responses"].get("422", {})
            if "HTTPValidationError" in json.dumps(automatic):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        found["components"]["schemas"].pop(name, None)
    return found


def generated() -> dict[str, str]:
    """Path to text, for `tools/generate`."""
    return {PATH: json.dumps(description(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"}
