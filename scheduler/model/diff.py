"""The difference between two tuples of objects that follow each other, such as those of snapshots."""

from __future__ import annotations

from collections import deque
from itertools import compress
from operator import is_not
from typing import Any, TypeVar

T = TypeVar("T")

AHEAD = 8
"""So many objects may have come or gone at one place; of more, the rest of both tuples is compared as a whole."""
STEPS = 256
"""Likewise at so many places where the objects behind them stand at another place than before."""
CHUNK = 256
"""So many are compared at a time: where most are the same, the others were replaced one by one."""
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
        along = _along(old, new, i, j, gone, come)
        i, j = i + along, j + along
        meet = _meet(old[i : i + AHEAD], new[j : j + AHEAD])
        if meet is None:
            break
        gone += old[i : i + meet[0]]
        come += new[j : j + meet[1]]
        i, j = i + meet[0], j + meet[1]
    return _unlike(gone + list(old[i:]), come + list(new[j:]))


def _along(old: tuple[T, ...], new: tuple[T, ...], i: int, j: int, gone: list[T], come: list[T]) -> int:
    """For how many objects from these places on most are the same. Those that are not are added to `gone` and `come`; they
    may be the same at another place."""
    found = 0
    while True:
        before, after = old[i + found : i + found + CHUNK], new[j + found : j + found + CHUNK]
        size = min(len(before), len(after))
        unlike = list(compress(range(size), map(is_not, before, after)))
        if 2 * len(unlike) > size:
            return found + unlike[0]
        gone += map(before.__getitem__, unlike)
        come += map(after.__getitem__, unlike)
        found += size
        if size < CHUNK:
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
