"""What differs between two tuples of objects that follow each other, as those of snapshots do."""

from __future__ import annotations

from itertools import compress, count, islice
from operator import is_not
from typing import TypeVar

T = TypeVar("T")


def differing(old: tuple[T, ...], new: tuple[T, ...]) -> tuple[list[T], list[T]]:
    """The objects that only the one or only the other has; those that are equal but not the same count as two.

    Snapshots follow each other and share nearly all their objects, so comparing identities leaves little to
    look at.
    """
    if old is new:
        return [], []
    if len(old) == len(new):  # changed in place, as a rule: what is the same stands where it stood
        gone, come = list(compress(old, map(is_not, old, new))), list(compress(new, map(is_not, old, new)))
    else:  # something came or went: what is the same stands before or after it
        shorter = min(len(old), len(new))
        start = next(compress(count(), map(is_not, old, new)), shorter)
        backwards = map(is_not, islice(reversed(old), shorter - start), reversed(new))
        end = next(compress(count(), backwards), shorter - start)
        gone, come = list(old[start : len(old) - end]), list(new[start : len(new) - end])
    before, after = set(map(id, gone)), set(map(id, come))
    return [one for one in gone if id(one) not in after], [one for one in come if id(one) not in before]
