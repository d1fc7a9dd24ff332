"""A small model that guesses what the served one samples next: its cache, and its passes.

It has blocks of its own, as many as the served model, because what it knows of a request differs from what the cache
holds: it computes a prompt when guesses are first wanted, skips tokens while it is switched off, and has computed wrong
guesses besides. Before each round a request's tokens are compared with those that it has computed, and what differs is
computed anew. So nothing of a request's way through the engine (preemption, swap, resume, migration) concerns
it, and a request that finds no blocks is not guessed for.

Its full blocks have the names that the served model's have (`prefix.py`), once all of their tokens are the request's own. So
a prompt that begins like one that the draft has computed finds them, and the draft computes the rest.

Each guess is drawn as the request's own token will be: with its parameters, and with the random number of that token. So
where both models find the same tokens likely, they also choose the same one when they sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain

import torch
import torch.nn.functional as F

from busbar.scheduler.fit.online import OnlineStepModel
from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.live import Live
from busbar.workloads.serving.runner import Runner
from busbar.workloads.serving.sampler import Draw, sample
from busbar.workloads.serving.sequence import Chunk, Sequence, Step

AS_ROWS = 4
"""So many tokens of a request that are not computed yet are rows of a decoding step; more are a chunk of a prompt."""


class Draft:
    """The model's passes, and what it has computed of each request."""

    def __init__(
        self,
        runner: Runner,
        blocks: int,
        positions: int,
        vocabulary: int,
        clock: Callable[[], float],
        prefix_cache: bool = True,
    ) -> None:
        """`positions`: of a context, at most; `vocabulary`: the width of the served model's logits."""
        self.runner = runner
        self.pool = BlockPool(blocks, runner.cache.shape.block_tokens)
        self.costs = OnlineStepModel()
        self.seconds = 0.0
        self.cached_total = 0
        """Tokens that were found in its blocks."""
        self._prefix_cache = prefix_cache
        self._positions = positions
        self._vocabulary = vocabulary
        self._clock = clock
        self._own: dict[Sequence, Sequence] = {}
        """What the draft knows of a request: the tokens that it has been given or has guessed."""

    def lag(self, sequence: Sequence, guesses: int) -> int | None:
        """See `drafting.DraftModel`."""
        if len(sequence.tokens) + guesses > self._positions:
            return None
        own = self._own.get(sequence)
        if own is None:
            return len(sequence.tokens) - len(self._cached(sequence)) * self.pool.block_tokens
        return self._follow(own, sequence.tokens).missing

    def guess(self, wanted: Mapping[Live, int], budget: int) -> dict[Live, list[int]]:
        """See `drafting.DraftModel`."""
        chunks: list[Chunk] = []
        ready: dict[Live, Sequence] = {}
        for live, depth in wanted.items():
            own = self._known(live.sequence)
            count = min(own.missing, budget)
            if count < 1 or not self._makes_room(own, len(own.tokens) + depth - 1, wanted):
                continue
            budget -= count
            chunks += _chunks(own, count)
            if count == own.missing:
                ready[live] = own
        guesses: dict[Live, list[int]] = {live: [] for live in ready}
        while chunks:
            drawn = self._pass(chunks, ready)
            for live, token in drawn.items():
                guesses[live].append(token)
            ready = {live: own for live, own in ready.items() if len(guesses[live]) < wanted[live]}
            for live, own in ready.items():
                own.tokens.append(guesses[live][-1])
            chunks = list(chain.from_iterable(_chunks(own, 1) for own in ready.values()))
        return guesses

    def forget(self, sequence: Sequence) -> None:
        """See `drafting.DraftModel`."""
        own = self._own.pop(sequence, None)
        if own is not None:
            self.pool.give_back(own.blocks)

    def _pass(self, chunks: list[Chunk], ready: Mapping[Live, Sequence]) -> dict[Live, int]:
        """Computes the chunks; the next token of each request that is ready."""
        began = self._clock()
        outcome = self.runner.run(Step(tuple(chunks), (), ()))
        place = {chunk.sequence: row for row, chunk in enumerate(outcome.chunks)}
        rows = [place[own] for own in ready.values()]
        drawn: dict[Live, int] = {}
        if rows:
            logits = outcome.logits
            if rows != list(range(len(logits))):
                logits = logits[torch.tensor(rows, device=logits.device)]
            draws = [_draw(live, own) for live, own in ready.items()]
            tokens = [each.token for each in sample(self._as_wide(logits), draws)]
            drawn = dict(zip(ready, tokens, strict=True))
        elif outcome.logits.is_cuda:
            torch.cuda.synchronize(outcome.logits.device)  # its time is this pass's
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        for own in {chunk.sequence: None for chunk in chunks}:
            self._name_blocks(own)
        seconds = self._clock() - began
        self.seconds += seconds
        single = [chunk for chunk in chunks if chunk.count == 1]
        further = sum(chunk.count for chunk in chunks) - len(single)
        self.costs.learn(len(single), sum(chunk.start + chunk.count for chunk in single), further, seconds)
        return drawn

    def _as_wide(self, logits: torch.Tensor) -> torch.Tensor:
        """With the width of the served model's: families fill their vocabularies up differently."""
        more = self._vocabulary - logits.shape[1]
        if more < 0:
            return logits[:, : self._vocabulary].contiguous()
        return F.pad(logits, (0, more), value=float("-inf")) if more else logits

    def _known(self, sequence: Sequence) -> Sequence:
        if sequence not in self._own:
            cached = self._cached(sequence)
            for block in cached:
                self.pool.share(block)
            found = len(cached) * self.pool.block_tokens
            own = Sequence(sequence.order, self._readable(sequence.tokens[:found]), sequence.max_total)
            own.blocks, own.computed, own.named, own.names = cached, found, len(cached), sequence.names
            self.cached_total += found
            self._own[sequence] = own
        return self._follow(self._own[sequence], sequence.tokens)

    def _cached(self, sequence: Sequence) -> list[int]:
        """Blocks with the beginning of a request that it does not know; the last token is always computed."""
        if not self._prefix_cache:
            return []
        return self.pool.find(sequence.names[: (len(sequence.tokens) - 1) // self.pool.block_tokens])

    def _name_blocks(self, own: Sequence) -> None:
        """Lets others find the blocks that are full of the request's own tokens; guesses are behind `prompt_len`."""
        if not self._prefix_cache:
            return
        full = min(min(own.computed, own.prompt_len) // self.pool.block_tokens, len(own.names))
        for index in range(own.named, full):
            self.pool.name(own.blocks[index], own.names[index])
            own.named = index + 1

    def empty(self) -> None:
        """The blocks' content is gone. Only while nothing runs."""
        self.pool = BlockPool(self.pool.total, self.pool.block_tokens)

    def _readable(self, tokens: list[int]) -> list[int]:
        """A token that only the served model's embedding has becomes another one."""
        width = self.runner.decoder.arch.vocab_size
        return [token if token < width else 0 for token in tokens]

    def _follow(self, own: Sequence, tokens: list[int]) -> Sequence:
        """Gives it the request's tokens; of what it has computed remains what is equal. Before its `prompt_len`, which is how
        many tokens it was given last, all is."""
        end = min(own.computed, len(tokens))
        kept = min(own.prompt_len, end)
        while kept < end and own.tokens[kept] == tokens[kept]:
            kept += 1
        own.computed = kept
        own.tokens[own.prompt_len :] = self._readable(tokens[own.prompt_len :])
        own.prompt_len = len(tokens)
        return own

    def _makes_room(self, own: Sequence, tokens: int, wanted: Mapping[Live, int]) -> bool:
        """Whether it has blocks for so many tokens now. Requests that nobody guesses for in this step lose theirs to it."""
        need = -(-tokens // self.pool.block_tokens) - len(own.blocks)
        if need > self.pool.free:
            taking = {live.sequence for live in wanted}
            for sequence in [each for each in self._own if each not in taking]:
                self.forget(sequence)
        if need > self.pool.free:
            return False
        own.blocks += self.pool.take(max(0, need))
        return True


def _chunks(own: Sequence, count: int) -> list[Chunk]:
    """The next tokens of it that are not computed."""
    if count > AS_ROWS:
        return [Chunk(own, own.computed, count)]
    return [Chunk(own, own.computed + i, 1) for i in range(count)]


def _draw(live: Live, own: Sequence) -> Draw:
    """The token behind those that the draft knows of the request."""
    params = live.params if live.params.logprobs is None else replace(live.params, logprobs=None)
    return Draw(params, live.randomness, len(own.tokens) - live.sequence.prompt_len)
