"""Where the gateway shall send each class of prompts: the shares of the mix over the replicas that are ready.

They come from the same columns and the same program as the number of replicas (`scheduler.autoscale.mix`), in steps of
`STEP`, and stay while they change by less than that: each change sends the routes to every gateway again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from busbar.scheduler.autoscale.mix import Column, Mix, routing_shares

Shares = tuple[Mapping[str, float], ...]
"""By class of prompts: pool → part of the requests; 0 where the pool could serve them and others do it for less."""
STEP = 0.02


def shares_now(columns: Sequence[Column], level: Mix, before: Shares) -> Shares:
    """The shares of `level` (of `mix.spread`), or those of before where they hardly differ; none for a single pool."""
    if sum(count > 0 for count in level.replicas.values()) < 2:
        return ()
    found = tuple(
        {pool: round(STEP * round(share / STEP), 4) for pool, share in row.items()}
        for row in routing_shares(columns, level)
    )
    return before if _alike(found, before) else found


def _alike(new: Shares, old: Shares) -> bool:
    return len(new) == len(old) and all(
        here.keys() == there.keys() and all(abs(here[pool] - there[pool]) < 1.5 * STEP for pool in here)
        for here, there in zip(new, old, strict=True)
    )
