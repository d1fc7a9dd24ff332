"""Which replica a request goes to: the one whose first token is predicted to come soonest. Pure.

    first token = prompts that it must compute before + the own prompt without what its prefix cache has,
                  and as many steps as these take, each with all that runs there

The coefficients are those that the replica's engine has fitted to its own steps (`ReplicaSpeed`), so a fast accelerator
gets more, a prompt follows its prefix, a conversation its former turns, and a request its adapter, as long as that saves more
than the queue there costs: nothing else breaks stickiness. Where a replica has not told its speed (another engine than ours, or before its
first requests), the replica with most of the prefix is taken if it has not much more to do than the idlest, else the
idler of two random ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from busbar.gateway.prefix_table import BLOCK_TOKENS, PrefixTable
from busbar.kube.contracts.routes import Endpoint, ReplicaSpeed

STEP_TOKENS = 512
"""Prompt tokens of a step; an engine that keeps a promise per token takes fewer, and then more steps."""
ADAPTER_S = 0.05
"""What an adapter costs that a replica has not used lately: reading it into its pages."""
ALIKE = 1.02
"""Predictions closer than this do not differ: the replica with less to do is taken."""
MUCH_MORE = 8
"""Requests by which a replica may be ahead of the idlest and still be taken for its prefix, without a known speed."""
MOST_OF_PREFIX = 0.5
"""Part of a prompt's blocks that must be found for that."""


@dataclass(frozen=True)
class Ask:
    """What a request needs of a replica."""

    prompt_tokens: int = 1
    output_tokens: int = 0
    """Expected."""
    blocks: tuple[bytes, ...] = ()
    """Of its prompt (`prefix_table`)."""
    adapter: str = ""
    batch: bool = False
    """Nobody waits for the answer: it gets what the others leave."""
    moves: bool = False
    """A stream, which may go on at another replica."""


ANY = Ask()
"""A request of which nothing is known."""


@dataclass(frozen=True)
class Candidate:
    """A replica that can take the request now, with what this gateway has sent to it."""

    endpoint: Endpoint
    running: int
    prompt_tokens_ahead: int
    """Of requests there whose first token has not come, as far as they go before this one."""
    context_tokens: int
    """Of all requests there."""
    prefix: PrefixTable
    adapters: frozenset[str] = frozenset()
    """Used there lately."""


Choice = Callable[[Sequence[Candidate], Ask, random.Random], Candidate | None]
"""How one of the candidates is chosen."""


def choose(candidates: Sequence[Candidate], ask: Ask, rng: random.Random) -> Candidate | None:
    """The candidate for a request; None of none."""
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    speeds = [candidate.endpoint.speed for candidate in candidates]
    if any(speed is None for speed in speeds):
        return _by_load(candidates, ask, rng)
    times = [
        predicted_s(candidate, speed, ask)
        for candidate, speed in zip(candidates, speeds, strict=True)
        if speed is not None
    ]
    best = min(times)
    alike = [c for c, time in zip(candidates, times, strict=True) if time <= ALIKE * best]
    return _idlest(alike, rng)


def predicted_s(candidate: Candidate, speed: ReplicaSpeed, ask: Ask) -> float:
    """Seconds to the first token of the request there."""
    work = candidate.prompt_tokens_ahead + own_tokens(candidate, ask)
    steps = math.ceil(work / STEP_TOKENS) * step_s(candidate, speed, ask)
    loading = ADAPTER_S if ask.adapter and ask.adapter not in candidate.adapters else 0.0
    return work * speed.per_prompt_token_s + steps + loading


def own_tokens(candidate: Candidate, ask: Ask) -> int:
    """Tokens of the prompt that must be computed there."""
    cached = min(candidate.prefix.found(ask.blocks) * BLOCK_TOKENS, ask.prompt_tokens - 1)
    return max(1, ask.prompt_tokens - max(0, cached))


def step_s(candidate: Candidate, speed: ReplicaSpeed, ask: Ask) -> float:
    """Seconds of a step there that decodes all that runs, and the request besides."""
    return (
        speed.per_step_s
        + speed.per_sequence_s * (candidate.running + 1)
        + speed.per_context_token_s * (candidate.context_tokens + ask.prompt_tokens)
    )


def _by_load(candidates: Sequence[Candidate], ask: Ask, rng: random.Random) -> Candidate:
    fewest = min(candidate.running for candidate in candidates)
    near = [c for c in candidates if c.running <= fewest + MUCH_MORE]
    found = [c.prefix.found(ask.blocks) for c in near]
    if ask.blocks and max(found) >= MOST_OF_PREFIX * len(ask.blocks):
        return _idlest([c for c, count in zip(near, found, strict=True) if count == max(found)], rng)
    used = [c for c in near if ask.adapter and ask.adapter in c.adapters]
    if used:
        return _idlest(used, rng)
    return _idlest([candidates[place] for place in sorted(rng.sample(range(len(candidates)), 2))], rng)


def _idlest(candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    fewest = min(candidate.running for candidate in candidates)
    return rng.choice([c for c in candidates if c.running == fewest])
