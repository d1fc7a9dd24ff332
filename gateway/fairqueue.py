"""A queue that is first-in-first-out within an owner and takes turns between owners, level by level.

An owner is a path such as (tenant, user, key): tenants take turns, within a tenant its users, within a user
their keys. So nobody gets more turns by making more keys.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
Owner = tuple[str, ...]
"""From the outermost name to the innermost."""


@dataclass
class _Branch(Generic[T]):
    """The branches below in the order of their turns, or the items of one whole path."""

    below: OrderedDict[str, _Branch[T]] = field(default_factory=OrderedDict)
    items: deque[T] = field(default_factory=deque)
    count: int = 0


class FairQueue(Generic[T]):
    """Items of many owners; `pop` gives each that waits its turn, one item at a time."""

    def __init__(self) -> None:
        self._root: _Branch[T] = _Branch()

    def __len__(self) -> int:
        return self._root.count

    def waiting(self, owner: Owner) -> int:
        """Items of an owner; of a shorter path all below it."""
        branch: _Branch[T] | None = self._root
        for name in owner:
            branch = branch.below.get(name) if branch else None
        return branch.count if branch else 0

    def push(self, owner: Owner, item: T) -> None:
        """Add at the end of the owner's items; a new owner is served after those that wait already."""
        branches = self._path(owner)
        branches[-1].items.append(item)
        for branch in branches:
            branch.count += 1

    def push_front(self, owner: Owner, item: T) -> None:
        """Put back an item that was served in vain: it is next, before every owner."""
        branches = self._path(owner)
        branches[-1].items.appendleft(item)
        for branch, name in zip(branches, owner, strict=False):
            branch.below.move_to_end(name, last=False)
        for branch in branches:
            branch.count += 1

    def pop(self) -> T:
        """Take the next item; raises IndexError when empty."""
        if not self._root.count:
            raise IndexError("pop from an empty queue")
        branch = self._root
        while branch.below:
            branch.count -= 1
            name, below = next(iter(branch.below.items()))
            if below.count > 1:
                branch.below.move_to_end(name)
            else:
                del branch.below[name]
            branch = below
        branch.count -= 1
        return branch.items.popleft()

    def remove(self, owner: Owner, item: T) -> bool:
        """Take out an item whose owner has left; False when it was not there."""
        branches = [self._root]
        for name in owner:
            below = branches[-1].below.get(name)
            if below is None:
                return False
            branches.append(below)
        if item not in branches[-1].items:
            return False
        branches[-1].items.remove(item)
        for branch in branches:
            branch.count -= 1
        for branch, name in zip(branches, owner, strict=False):
            if not branch.below[name].count:
                del branch.below[name]
                break
        return True

    def drain(self) -> list[T]:
        """Take everything, in the order `pop` would have given."""
        return [self.pop() for _ in range(len(self))]

    def _path(self, owner: Owner) -> list[_Branch[T]]:
        """The branches from the root to the owner's, made where they are missing."""
        branches = [self._root]
        for name in owner:
            branches.append(branches[-1].below.setdefault(name, _Branch()))
        return branches
