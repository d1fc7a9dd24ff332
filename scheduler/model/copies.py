"""Copies of frozen objects with some fields changed, for the few places that make thousands in every round.

`dataclasses.replace` looks at each field's definition and calls the constructor, which sets frozen fields one by one
through `object.__setattr__`: a job costs four times as much that way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def copier(kind: type[T]) -> Callable[..., T]:
    """A function `(object, field=value, ...)` that copies objects of a dataclass with slots and without
    `__post_init__` that has at least two fields."""
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    read = attrgetter(*names)
    setters = {name: kind.__dict__[name].__set__ for name in names}
    in_order = tuple(setters.values())

    def changed(one: T, **new: Any) -> T:
        copy = object.__new__(kind)
        for write, value in zip(in_order, read(one), strict=True):
            write(copy, value)
        for name, value in new.items():
            setters[name](copy, value)
        return copy

    return changed
