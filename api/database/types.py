"""Column types that behave the same on SQLite and PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator


class Utc(TypeDecorator[datetime]):
    """A point in time. Naive values are refused; what comes back always carries UTC (SQLite drops the zone)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; use datetime.now(UTC)")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def json_type() -> Any:
    """JSON, as JSONB where the server has it."""
    return JSON().with_variant(JSONB(), "postgresql")


def big_id() -> Any:
    """A 64-bit key that increments by itself; SQLite does that only for INTEGER."""
    return BigInteger().with_variant(Integer(), "sqlite")


def storable(text: object, chars: int) -> str:
    """Text that both databases accept: cut to `chars` characters (SQLite has no limit of its own), without
    NUL (PostgreSQL refuses it) and without half surrogate pairs. None becomes empty."""
    clean = str(text or "").replace("\0", "\ufffd").encode(errors="replace").decode()
    return clean[:chars]
