"""The difference between two tuples of objects that follow each other, such as those of snapshots."""

from __future__ import annotations

from collections import deque
from itertools import compress, count, islice
from operator import is_not
from typing import Any, TypeVar

T = TypeVar("T")

LARGE = 64
"""Tuples of more objects are compared once, however often they are asked about in turn."""
_compared: deque[tuple[Any, Any, list[Any], list[Any]]] = deque(maxlen=4)
"""The tuples compared last, and the result: several parts of a round follow the same two snapshots."""


def differing(old: tuple[T, ...], new: tuple[T, ...]) -> tuple[list[T], list[T]]:
    """The objects that only one of the tuples has; equal objects that are not identical count as two.

    Consecutive snapshots share nearly all their objects, so comparing identities leaves few to compare by
    value.
    """
    if old is new:
        return [], []
    if len(old) <= LARGE:
        return _differing(old, new)
    for before, after, gone, come in tuple(_compared):
        if before is old and after is new:
            return list(gone), list(come)
    found = _differing(old, new)
    _compared.append((old, new, *found))
    return list(found[0]), list(found[1])


def _differing(old: tuple[T, ...], new: tuple[T, ...]) -> tuple[list[T], list[T]]:
    if len(old) == len(new):  # objects were replaced: identical ones have the same index
        gone, come = list(compress(old, map(is_not, old, new))), list(compress(new, map(is_not, old, new)))
    else:  # objects were added or removed: identical ones stand before or after them
        shorter = min(len(old), len(new))
        start = next(compress(count(), map(is_not, old, new)), shorter)
        backwards = map(is_not, islice(reversed(old), shorter - start), reversed(new))
        end = next(compress(count(), backwards), shorter - start)
        gone, come = list(old[start : len(old) - end]), list(new[start : len(new) - end])
    before, after = set(map(id, gone)), set(map(id, come))
    return [one for one in gone if id(one) not in after], [one for one in come if id(one) not in before]
