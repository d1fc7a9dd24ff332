"""Frozen dataclasses to JSON values and back, by pydantic.

Fields that hold their default are left out, so a snapshot stays small; unknown fields and values of another type are
refused, so a misspelt one is noticed. Keys are the field names. Tuples become lists, enums their values.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from ..errors import DecodeError

Json: TypeAlias = Any
"""A JSON value. The one place where the type is not checked: the boundary."""

T = TypeVar("T")
_adapters: dict[type, TypeAdapter[Any]] = {}


def encode(value: object) -> Json:
    """The JSON value of a dataclass."""
    return _adapter(type(value)).dump_python(value, mode="json", exclude_defaults=True)


def decode(cls: type[T], data: Json) -> T:
    """An instance of the dataclass `cls`.

    Raises:
        DecodeError: names the field (as a path) that is missing, unknown or of another type.
    """
    try:
        # As JSON text: there a list may be a tuple and a text an enum, and strict refuses every other conversion.
        return cast(T, _adapter(cls).validate_json(json.dumps(data), strict=True, extra="forbid"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise DecodeError(f"{cls.__name__}{where}: {first['msg']}") from error


def _adapter(cls: type) -> TypeAdapter[Any]:
    """Building one takes as long as thousands of uses."""
    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]
