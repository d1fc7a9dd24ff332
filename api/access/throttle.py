"""How often one address, and one person, may log in, make tokens or send wrong bearers: a token bucket for each.

The counts are in memory, so each replica of the API counts for itself and a restart begins anew. That bounds the
load of guesses; that no guess succeeds is the work of 256 random bits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from busbar.api.clock import Clock, utc_now
from busbar.api.errors import TooMany

MAX_KEYS = 10_000


@dataclass
class _Bucket:
    left: float
    at: datetime


class Throttle:
    """`per_minute` at once, refilled evenly over each minute, for every key."""

    def __init__(self, per_minute: int, what: str, clock: Clock = utc_now, max_keys: int = MAX_KEYS) -> None:
        """
        Args:
            what: for the refusal, in the plural: "logins".
            max_keys: keys that are remembered; beyond, the one that asked longest ago is forgotten.
        """
        self._size = per_minute
        self._what = what
        self._now = clock
        self._max_keys = max_keys
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, keys: Iterable[str]) -> None:
        """Count one for each of the keys, or for none of them.

        Raises:
            TooMany: one of the keys has none left; says in how many seconds it has.
        """
        for bucket in self._checked(keys):
            bucket.left -= 1

    def check(self, keys: Iterable[str]) -> None:
        """Whether `take` would succeed. Raises as it does."""
        self._checked(keys)

    def _checked(self, keys: Iterable[str]) -> list[_Bucket]:
        found = [self._bucket(key) for key in keys]
        least = min(bucket.left for bucket in found)
        if least < 1:
            wait_s = math.ceil((1 - least) * 60 / self._size)
            raise TooMany(f"too many {self._what}; try again in {wait_s} s", retry_after_s=wait_s)
        return found

    def give_back(self, keys: Iterable[str]) -> None:
        """Undo a `take`."""
        for key in keys:
            bucket = self._bucket(key)
            bucket.left = min(bucket.left + 1, self._size)

    def _bucket(self, key: str) -> _Bucket:
        now = self._now()
        bucket = self._buckets.setdefault(key, _Bucket(float(self._size), now))
        self._buckets.move_to_end(key)
        passed_s = max((now - bucket.at).total_seconds(), 0.0)  # a clock set back refills nothing
        bucket.left = min(bucket.left + passed_s * self._size / 60, self._size)
        bucket.at = now
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        return bucket


def of_address(address: str) -> str:
    """The key of a client's address."""
    return f"address {address}"


def of_subject(subject: str) -> str:
    """The key of a person."""
    return f"subject {subject}"
