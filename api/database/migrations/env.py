"""Alembic's environment; it always runs on the connection that `migrate.py` hands over."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy.types import JSON, BigInteger

from busbar.api.database.tables import metadata
from busbar.api.database.types import Utc


def render_item(kind: str, item: Any, autogen: AutogenContext) -> str | Literal[False]:
    """Plain `sa.*` for our own types, so that an old migration never imports today's code."""
    if kind != "type":
        return False
    if isinstance(item, Utc):
        return "sa.DateTime(timezone=True)"
    if isinstance(item, JSON):
        autogen.imports.add("from sqlalchemy.dialects import postgresql")
        return 'sa.JSON().with_variant(postgresql.JSONB(), "postgresql")'
    if isinstance(item, BigInteger) and item._variant_mapping:
        return 'sa.BigInteger().with_variant(sa.Integer(), "sqlite")'
    return False


connection = context.config.attributes["connection"]
if connection is None:
    raise RuntimeError("run migrations with `busbar-api migrate`, not with the alembic command")
context.configure(
    connection=connection,
    target_metadata=metadata,
    render_item=render_item,
    render_as_batch=True,
    compare_type=True,
    transaction_per_migration=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
