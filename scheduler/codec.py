"""Frozen dataclasses to JSON values and back.

Fields that hold their default are left out, so a snapshot stays small; unknown fields are refused, so a
misspelt one is seen. Keys are the field names. Tuples become lists, enums their values.
"""

from __future__ import annotations

import dataclasses
import types
from enum import Enum
from functools import cache
from typing import Any, NewType, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import DecodeError

Json: TypeAlias = Any
"""A JSON value. The one place where the type is not checked: the boundary."""

T = TypeVar("T")


def encode(value: object) -> Json:
    """The JSON value of a dataclass, tuple, enum or plain value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Json] = {}
        for name, default in _defaults(type(value)):
            item = getattr(value, name)
            if default is not dataclasses.MISSING and item == default and type(item) is type(default):
                continue
            out[name] = encode(item)
        return out
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(cls: type[T], data: Json, where: str = "") -> T:
    """An instance of the dataclass `cls`.

    Raises:
        DecodeError: names the field (as a path) that is missing, unknown or of another type.
    """
    return cast(T, _decode(cls, data, where or cls.__name__))


@cache
def _defaults(cls: type) -> tuple[tuple[str, object], ...]:
    rows: list[tuple[str, object]] = []
    for item in dataclasses.fields(cls):
        if item.default_factory is not dataclasses.MISSING:
            rows.append((item.name, item.default_factory()))
        else:
            rows.append((item.name, item.default))
    return tuple(rows)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _decode(kind: Any, data: Json, where: str) -> Any:
    if isinstance(kind, NewType):
        kind = kind.__supertype__
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, data, where)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_optional(kind, data, where)
    if origin is tuple:
        return _decode_tuple(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError as error:
            known = ", ".join(str(item.value) for item in kind)
            raise DecodeError(f"{where}: {data!r} is not one of {known}") from error
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if kind is int and isinstance(data, float) and data.is_integer():
        return int(data)
    if not isinstance(data, kind) or (kind is not bool and isinstance(data, bool)):
        raise DecodeError(f"{where}: expected {kind.__name__}, found {type(data).__name__}")
    return data


def _decode_dataclass(kind: type, data: Json, where: str) -> Any:
    if not isinstance(data, dict):
        raise DecodeError(f"{where}: expected an object, found {type(data).__name__}")
    hints = _hints(kind)
    values: dict[str, Any] = {}
    for name, default in _defaults(kind):
        if name in data:
            values[name] = _decode(hints[name], data[name], f"{where}.{name}")
        elif default is dataclasses.MISSING:
            raise DecodeError(f"{where}: the field {name!r} is missing")
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise DecodeError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(hints))}")
    return kind(**values)


def _decode_optional(kind: Any, data: Json, where: str) -> Any:
    options = get_args(kind)
    if data is None:
        if type(None) in options:
            return None
        raise DecodeError(f"{where}: must not be null")
    (inner,) = (option for option in options if option is not type(None))
    return _decode(inner, data, where)


def _decode_tuple(kind: Any, data: Json, where: str) -> Any:
    if not isinstance(data, list | tuple):
        raise DecodeError(f"{where}: expected a list, found {type(data).__name__}")
    args = get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if len(args) != len(data):
        raise DecodeError(f"{where}: expected {len(args)} items, found {len(data)}")
    return tuple(
        _decode(arg, item, f"{where}[{index}]")
        for index, (arg, item) in enumerate(zip(args, data, strict=True))
    )
