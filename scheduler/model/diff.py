"""The difference between two tuples of objects that follow each other, such as those of snapshots."""

from __future__ import annotations

from collections import deque
from itertools import compress, count
from operator import is_not
from typing import Any, TypeVar

T = TypeVar("T")

AHEAD = 8
"""So many objects may have come or gone at one place; of more, the rest of both tuples is compared as a whole."""
STEPS = 256
"""Likewise at so many places."""
CHUNK = 256
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
    gone, come = list[T](), list[T]()
    i = j = 0
    for _ in range(STEPS):
        same = _same(old, new, i, j)
        i, j = i + same, j + same
        meet = _meet(old[i : i + AHEAD], new[j : j + AHEAD])
        if meet is None:
            break
        gone += old[i : i + meet[0]]
        come += new[j : j + meet[1]]
        i, j = i + meet[0], j + meet[1]
    before, after = old[i:], new[j:]
    if len(before) == len(after):  # many were replaced: identical ones have the same index
        selectors = list(map(is_not, before, after))
        return _unlike(gone + list(compress(before, selectors)), come + list(compress(after, selectors)))
    return _unlike(gone + list(before), come + list(after))


def _same(old: tuple[T, ...], new: tuple[T, ...], i: int, j: int) -> int:
    """How many objects are the same from these places on."""
    found = 0
    while True:
        before, after = old[i + found : i + found + CHUNK], new[j + found : j + found + CHUNK]
        here = next(compress(count(), map(is_not, before, after)), min(len(before), len(after)))
        found += here
        if here < CHUNK:
            return found


def _meet(old: tuple[T, ...], new: tuple[T, ...]) -> tuple[int, int] | None:
    """After how many objects of each, as few as can be, the two go on with the same one; None: not here."""
    places = {id(one): index for index, one in enumerate(new)}
    found = ((index, places[id(one)]) for index, one in enumerate(old) if id(one) in places)
    return min(found, key=sum, default=None)


def _unlike(gone: list[T], come: list[T]) -> tuple[list[T], list[T]]:
    """Those that are not in the other list, at whatever place."""
    before, after = set(map(id, gone)), set(map(id, come))
    return [one for one in gone if id(one) not in after], [one for one in come if id(one) not in before]
