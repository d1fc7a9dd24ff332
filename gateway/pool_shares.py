"""Of several pools that could take a request: the one that the service's shares say.

A service with replicas on several accelerator types has shares by class of prompts (`ServiceRoute.shares`), from the mix that
decided how many replicas each pool has: long prompts go where they are cheap for what they need, and no pool gets more than it
can serve within the target, which the first token alone does not show. Within the pool, and where the shares say nothing, the
choice is `picking`'s. A pool whose prompts wait longer than `PATIENCE` of the target is passed over; pools that are full,
suspected or not ready are not among the candidates at all, and the others take over. A request whose prefix is cached in a
replica follows it, and is charged to its pool.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from busbar.gateway.picking import MOST_OF_PREFIX, STEP_TOKENS, Ask, Candidate, Choice, step_s
from busbar.kube.contracts.demand import PROMPT_EDGES
from busbar.kube.contracts.routes import ServiceRoute
from busbar.scheduler.autoscale.shares import PATIENCE, Turns, prompts_wait_s


def pick(
    service: ServiceRoute,
    turns: Turns,
    candidates: Sequence[Candidate],
    ask: Ask,
    choice: Choice,
    rng: random.Random,
) -> Candidate | None:
    """The candidate for a request; None of none."""
    bucket = bisect_left(PROMPT_EDGES, ask.prompt_tokens)
    shares = next((row.pools for row in service.shares if row.prompt == bucket), {})
    able = [c for c in candidates if c.endpoint.pool in shares]
    if not able:
        return choice(candidates, ask, rng)
    warm = _with_prefix(able, ask)
    if warm:
        found = choice(able, ask, rng)
        if found in warm:
            turns.charge(bucket, shares, {c.endpoint.pool for c in able}, found.endpoint.pool)
            return found
    best = _best_by_pool(able, ask, choice, rng)
    slo = service.slo
    first_s = slo.ttft_ms / 1000 if slo is not None and slo.ttft_ms else 0.0
    token_s = slo.tpot_ms / 1000 if slo is not None and slo.tpot_ms else None
    pool = turns.next(
        bucket, shares, best, lambda name: _wait_s(best[name], ask, token_s), PATIENCE * first_s
    )
    return best[pool] if pool is not None else choice(able, ask, rng)


def _with_prefix(candidates: Sequence[Candidate], ask: Ask) -> list[Candidate]:
    if not ask.blocks:
        return []
    return [c for c in candidates if c.prefix.found(ask.blocks) >= MOST_OF_PREFIX * len(ask.blocks)]


def _best_by_pool(
    candidates: Sequence[Candidate], ask: Ask, choice: Choice, rng: random.Random
) -> Mapping[str, Candidate]:
    by_pool: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_pool.setdefault(candidate.endpoint.pool, []).append(candidate)
    found = {pool: choice(those, ask, rng) for pool, those in by_pool.items()}
    return {pool: chosen for pool, chosen in found.items() if chosen is not None}


def _wait_s(candidate: Candidate, ask: Ask, tpot_s: float | None) -> float:
    """Seconds until the prompts there that come before the request are computed, as far as the replica has told its speed."""
    speed = candidate.endpoint.speed
    if speed is None:
        return 0.0
    prompts_s = candidate.prompt_tokens_ahead * speed.per_prompt_token_s
    return prompts_wait_s(
        prompts_s, step_s(candidate, speed, ask), speed.per_prompt_token_s, STEP_TOKENS, tpot_s
    )
