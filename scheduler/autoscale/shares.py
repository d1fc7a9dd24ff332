"""Whose turn it is: how whoever routes requests gives each pool the share of a bucket that the mix says.

    pool = turns.next(bucket, shares, wait_s, patience_s)

Smooth weighted round robin, by bucket: each request gives every pool that is open its share as credit, and takes one whole
credit from the pool that has most. So the counts of any stretch of requests are within one request per pool of the shares, and
those of several routers add up without talking to one another. Pools that are not open get no credit: when they come back
they get their share, not what they have missed.

A pool whose prompts wait too long is passed over, for the one with the shortest wait of those that serve the bucket within
the target. A request that goes to a pool for another reason (its prefix is there) is charged with `charge`.

Needs nothing of the scheduler but the sizes of prompts' pieces: the gateway and the simulator both route by it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..fit.chunks import CHUNK_STEP_FRACTION, MIN_CHUNK_TOKENS

PATIENCE = 0.5
"""Part of the target for the first token that prompts may wait where the shares send them."""
MOST_DEBT = 8.0
"""Requests that a pool may have had before its turn, or not have had although it was; more are forgotten, so that nobody is
left out or flooded for long."""


def prompts_wait_s(
    prompt_s: float, decode_s: float, token_s: float, most_tokens: int, tpot_s: float | None
) -> float:
    """Seconds until a replica has computed the prompts that it holds: it does so in the part of each step that decoding leaves.

    A type whose decoding takes most of the promised time per token needs many times the seconds that the prompts take alone.

    Args:
        prompt_s: of the prompts alone.
        decode_s: of a step without prompts.
        token_s: per prompt token.
        most_tokens: prompt tokens of a step at most.
        tpot_s: the promised time per token; None: steps take as many prompt tokens as they may."""
    if prompt_s <= 0 or token_s <= 0:
        return 0.0
    left_s = most_tokens * token_s
    if tpot_s is not None:
        left_s = min(left_s, max(CHUNK_STEP_FRACTION * tpot_s - decode_s, MIN_CHUNK_TOKENS * token_s))
    return prompt_s * (decode_s + left_s) / left_s


class Turns:
    """One router's credits, by bucket and pool."""

    def __init__(self) -> None:
        self._credits: dict[int, dict[str, float]] = {}

    def next(
        self,
        bucket: int,
        shares: Mapping[str, float],
        able: Collection[str],
        wait_s: Callable[[str], float],
        patience_s: float,
    ) -> str | None:
        """The pool for the next request of a bucket; None: the shares say nothing about the pools that are open.

        Args:
            shares: of the pools that serve the bucket within the target; 0: only where the others wait too long.
            able: pools that can take the request now.
            wait_s: seconds until a pool would begin with the request.
            patience_s: how long it may wait there before another one is taken.
        """
        open_ = {name: share for name, share in shares.items() if name in able}
        if len(open_) < 2:
            return next(iter(open_), None)
        row = self._credited(bucket, open_)
        if not row:
            return None
        best = max(row, key=row.__getitem__)
        row[best] -= 1
        if wait_s(best) <= patience_s:
            return best
        return min(open_, key=lambda name: (wait_s(name), name))

    def charge(self, bucket: int, shares: Mapping[str, float], able: Collection[str], pool: str) -> None:
        """A request of the bucket went to a pool whose turn it may not have been."""
        row = self._credited(bucket, {name: share for name, share in shares.items() if name in able})
        if pool in row:
            row[pool] -= 1

    def _credited(self, bucket: int, shares: Mapping[str, float]) -> dict[str, float]:
        """The bucket's credits after one more request; empty where no pool has a share."""
        total = sum(shares.values())
        if total <= 0:
            return {}
        old = self._credits.get(bucket, {})
        row = {
            name: min(max(old.get(name, 0.0), -MOST_DEBT), MOST_DEBT) + share / total
            for name, share in shares.items()
        }
        self._credits[bucket] = row
        return row
