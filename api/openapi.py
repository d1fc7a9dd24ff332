"""The OpenAPI description of the public REST API, as a file: `docs/openapi.json`.

Generated from the routes themselves, without a cluster or a database, and tested for drift.
"""

from __future__ import annotations

import json
from typing import Any, cast

from busbar.api.kubernetes import KubeApi
from busbar.api.operator_client import Snapshots
from busbar.api.settings import Settings

PATH = "docs/openapi.json"


def description() -> dict[str, Any]:
    """The description as a JSON value."""
    from busbar.api import services
    from busbar.api.app import public_app

    class Nothing:
        """Stands for the outside world, which describing the routes never touches."""

    settings = Settings(session_secret="", database_url="sqlite+aiosqlite:///:memory:")
    built = services.build(settings, cast(KubeApi, Nothing()), cast(Snapshots, Nothing()))
    return public_app(built).openapi()


def generated() -> dict[str, str]:
    """Path to text, for `tools/generate`."""
    return {PATH: json.dumps(description(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"}
