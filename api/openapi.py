"""The OpenAPI description of the public REST API, as a file: `docs/openapi.json`.

Generated from the routes themselves, without a cluster or a database, and tested for drift.
"""

from __future__ import annotations

from busbar.api.app import rest_app
from busbar.api.routes.description import as_text

PATH = "docs/openapi.json"


def generated() -> dict[str, str]:
    """Path to text, for `tools/generate`."""
    return {PATH: as_text(rest_app())}
