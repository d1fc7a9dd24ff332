"""The JSON object that a request's body holds."""

from __future__ import annotations

from typing import Any

from busbar.gateway.errors import BadRequest
from busbar.kube.documents import DocumentError, value_of_json


def object_of(data: bytes) -> dict[str, Any]:
    """The object. Raises BadRequest for what is not JSON, such as NaN, and for what a parser would lose unseen."""
    try:
        document = value_of_json(data)
    except DocumentError as error:
        raise BadRequest(f"The body is not JSON: {error}.", param=error.field) from error
    if not isinstance(document, dict):
        raise BadRequest("The body must be a JSON object.")
    return document
