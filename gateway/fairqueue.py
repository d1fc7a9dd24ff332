"""A queue that is first-in-first-out within a key and takes turns between keys."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of many keys; `pop` gives each key that waits its turn, one item at a time."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, deque[T]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def waiting(self, key: str) -> int:
        """Items of one key."""
        return len(self._lanes.get(key, ()))

    def push(self, key: str, item: T) -> None:
        """Add at the end of the key's lane; a new key is served after those that wait already."""
        self._lanes.setdefault(key, deque()).append(item)
        self._length += 1

    def push_front(self, key: str, item: T) -> None:
        """Put back an item that was served in vain: it is next, before every key."""
        self._lanes.setdefault(key, deque()).appendleft(item)
        self._lanes.move_to_end(key, last=False)
        self._length += 1

    def pop(self) -> T:
        """Take the next item; raises IndexError when empty."""
        if not self._lanes:
            raise IndexError("pop from an empty queue")
        key, lane = next(iter(self._lanes.items()))
        item = lane.popleft()
        if lane:
            self._lanes.move_to_end(key)
        else:
            del self._lanes[key]
        self._length -= 1
        return item

    def remove(self, key: str, item: T) -> bool:
        """Take out an item whose owner has left; False when it was not there."""
        lane = self._lanes.get(key)
        if lane is None or item not in lane:
            return False
        lane.remove(item)
        if not lane:
            del self._lanes[key]
        self._length -= 1
        return True

    def drain(self) -> list[T]:
        """Take everything, in the order `pop` would have given."""
        return [self.pop() for _ in range(self._length)]
