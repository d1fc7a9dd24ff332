"""The engine without its thread: requests in, tokens out, one step at a time.

`step` plans, runs, samples, and decides of each new token whether its request ends: at an end token or the length limit.
Text is made elsewhere (`answer_text.py`): a stop string is found by the reader, who ends the request a step or more later.
A finished request's blocks are free before the next plan. The clock is an argument, so tests need no waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import astuple
from math import inf

import torch
from tokenizers import Tokenizer

from busbar.kube.contracts.workload import PhaseSeconds
from busbar.scheduler.fit.chunks import CHUNK_STEP_FRACTION, MIN_CHUNK_TOKENS
from busbar.scheduler.fit.online import Speed
from busbar.workloads.serving.adapters import Adapter
from busbar.workloads.serving.blocks import CopyCost
from busbar.workloads.serving.budget import step_budget
from busbar.workloads.serving.context_limits import ContextLimits
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.draft import Draft
from busbar.workloads.serving.drafting import Drafts
from busbar.workloads.serving.expert_stream import ExpertStreamedLayers
from busbar.workloads.serving.fairness import NOBODY, Owner
from busbar.workloads.serving.flight import Flight
from busbar.workloads.serving.grammar import Allowed, Grammars, GrammarTooComplex
from busbar.workloads.serving.history import History, replay
from busbar.workloads.serving.live import Live
from busbar.workloads.serving.metrics import Metrics
from busbar.workloads.serving.mover import BlockMover
from busbar.workloads.serving.prefix import salt_of
from busbar.workloads.serving.prompt_logprobs import PromptLogprobs
from busbar.workloads.serving.quota import Quota
from busbar.workloads.serving.runner import Runner
from busbar.workloads.serving.sampler import Draw, Sampled, sample
from busbar.workloads.serving.sampling import Randomness, SamplingParams, TokenLogprob
from busbar.workloads.serving.scheduler import Scheduler
from busbar.workloads.serving.sequence import Chunk, Pooling, Sequence, Step
from busbar.workloads.serving.speculation import Speculation
from busbar.workloads.serving.tally import Tally
from busbar.workloads.serving.text import special_tokens
from busbar.workloads.serving.token_rules import TokenRules
from busbar.workloads.serving.vocabulary import vocabulary_of


class EngineCore:
    """Scheduler, runner and sampling of one model."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        metrics: Metrics,
        max_model_len: int,
        clock: Callable[[], float],
        tpot_s: float | None = None,
        guesses: int = 0,
        draft: Draft | None = None,
    ) -> None:
        """With `guesses`, so many next tokens of a request are guessed and checked in a step at most; also by the `draft`."""
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary_of(tokenizer)
        self.metrics = metrics
        self.max_model_len = max_model_len
        self.speed = Speed()
        self.tpot_s = tpot_s
        limit_s = inf if tpot_s is None else CHUNK_STEP_FRACTION * tpot_s
        self.draft = draft
        drafts = None if draft is None else Drafts(draft, scheduler.limits.max_batched_tokens)
        self.speculation = Speculation(guesses, limit_s, drafts) if guesses else None
        self.least_prompt_tokens = MIN_CHUNK_TOKENS
        """Of a step that computes prompts, also where the promised time per token is short. While layers are streamed as
        many as are computed in the time that the step takes anyway."""
        self.saturated = False
        """The promised time per token cannot be kept by smaller pieces of prompts."""
        self.requests_total = 0
        self.tally = Tally(metrics)
        self._clock = clock
        self._began_s = clock()
        self.special = special_tokens(tokenizer)
        """Tokens that are never part of a text."""
        width = runner.decoder.arch.vocab_size
        self.grammars = Grammars(self.vocabulary, width, eos, self.special)
        self.rules = TokenRules(self.vocabulary, width, eos)
        self._live: dict[str, Live] = {}
        self._of: dict[Sequence, Live] = {}
        self._flight: Flight | None = None
        """Launched ahead."""

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def phase_seconds(self) -> PhaseSeconds:
        """Since the start. Any thread may ask."""
        prefill, decode = self.speed.for_prompts_s, self.speed.for_decoding_s
        idle = max(0.0, self._clock() - self._began_s - prefill - decode)
        return PhaseSeconds(prefill=prefill, decode=decode, idle=idle)

    @property
    def context_limits(self) -> ContextLimits:
        """The longest prompts plus outputs. Any thread may ask."""
        quotas, size = self.scheduler.quotas, self.scheduler.limits.block_tokens
        return ContextLimits(
            self.max_model_len,
            {tenant: quotas.limit(tenant) * size for tenant in quotas.tenants},
        )

    def change_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Other quotas of the KV cache, from the next step on. Raises SettingsError."""
        before = self.scheduler.quotas.tenants
        self.scheduler.change_quotas(quotas)
        for tenant in before:
            if tenant not in quotas:
                self.metrics.forget_tenant(tenant)

    def replay(self, prompt: list[int], params: SamplingParams, tokens: list[int]) -> History:
        """The history of a request that has sampled `tokens`. Safe to call from any thread."""
        grammar = None if params.grammar is None else self.grammars.compile(params.grammar)
        return replay(prompt, params, grammar, tokens)

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        arrived_s: float,
        owner: Owner = NOBODY,
        cache_salt: str = "",
        history: History | None = None,
        adapter: Adapter | None = None,
        priority: int = 0,
        confirms: bool = False,
    ) -> None:
        """Queues a request within `context_limits`; with a `history`, one that goes on behind its tokens.

        Its `adapter` is held for it, and released at its end. A reader that `confirms` calls `read`.
        """
        sequence = Sequence(
            self.requests_total,
            list(prompt),
            len(prompt) + params.max_tokens,
            owner=owner,
            salt=salt_of(owner.tenant, cache_salt, *(() if adapter is None else adapter.salt)),
            resumed=history is not None,
            priority=priority,
            explains=params.prompt_logprobs is not None,
            adapter=adapter,
        )
        if history is not None:
            sequence.tokens += history.tokens
            sequence.charged = len(prompt)
        self._enter(request_id, params, sequence, history, arrived_s, confirms)

    def embed(
        self,
        request_id: str,
        tokens: list[int],
        pooling: Pooling,
        arrived_s: float,
        owner: Owner = NOBODY,
        cache_salt: str = "",
        adapter: Adapter | None = None,
    ) -> None:
        """Queues a text that is to become a vector, within `context_limits`. The adapter is as in `submit`."""
        # The mean needs every token's state, which a cached block does not have: nobody shares these blocks.
        alone = (f"mean {self.requests_total}",) if pooling is Pooling.MEAN else ()
        sequence = Sequence(
            self.requests_total,
            list(tokens),
            len(tokens),
            owner=owner,
            salt=salt_of(owner.tenant, cache_salt, *(() if adapter is None else adapter.salt), *alone),
            pooling=pooling,
            adapter=adapter,
        )
        self._enter(request_id, SamplingParams(), sequence, None, arrived_s, confirms=False)

    def sequence_of(self, request_id: str) -> Sequence | None:
        """None for a request that has ended."""
        live = self._live.get(request_id)
        return None if live is None else live.sequence

    def cancel(self, request_id: str) -> bool:
        """Drops a request and frees its blocks. Harmless for one that has ended."""
        live = self._live.get(request_id)
        if live is None:
            return False
        self._end(live, "abort", self._clock())
        self._gauges()
        return True

    def read(self, request_id: str, taken: int, finish: str | None = None) -> None:
        """The reader of a request, one that confirms, has taken so many completion tokens. With `finish` it is done: what
        came behind them is not counted, but where the reader has left (abort)."""
        live = self._live.get(request_id)
        if live is not None and finish is not None:
            self._end(live, finish, self._clock())
        self.tally.read(request_id, live, taken, finish)
        self._gauges()

    def step(self) -> list[Delta]:
        """One forward pass over everything that runs."""
        flight = self._landed() or self._launch(self._clock())
        if flight is None:
            return []
        step, outcome = flight.step, flight.outcome
        failed: dict[Live, str] = {}
        draws = [self._draw(chunk, failed) for chunk in outcome.chunks]
        drawn = list(zip(outcome.chunks, sample(outcome.logits, draws) if draws else [], strict=True))
        self.scheduler.commit(step, {c.sequence: each.token for c, each in drawn if c.guess is None})
        now = self._clock()
        self._launch_ahead(drawn, now)
        texts = self._take_states(outcome.states)
        deltas: list[Delta] = []
        rows: dict[Live, list[tuple[Chunk, Sampled]]] = {}
        for chunk, each in drawn:
            rows.setdefault(self._of[chunk.sequence], []).append((chunk, each))
        for live, own in rows.items():
            if live in failed:
                self._end(live, "abort", now)
                deltas.append(Delta(live.id, finish="error", error=failed[live], refused=True))
            else:
                deltas += self._take(live, own, now)
        explains = any(chunk.sequence.explains for chunk, _ in outcome.states)
        self._record(flight, now - flight.began, explains, wrong=len(drawn) - len(deltas))
        deltas += [self._vector(self._of[chunk.sequence], now) for chunk in texts]
        self._gauges()
        return deltas

    def abandon(self) -> list[str]:
        """Ends every request (the engine has failed or the drain is over); their ids."""
        now = self._clock()
        lives = list(self._live.values())
        for live in lives:
            self._end(live, "abort", now)
        self.tally.close()
        self._gauges()
        return [live.id for live in lives]

    # -- inside -------------------------------------------------------------------------------

    def _launch(self, began: float) -> Flight | None:
        """Plans a step and launches it; None where there is nothing to compute."""
        if self.runner.mover is not None:
            self._learn_copies(self.runner.mover)
        decoding = [s for s in self.scheduler.running if s.missing == 1]
        budget = self._budget(decoding)
        step = self.scheduler.plan(budget, self._guesses(decoding))
        for sequence in step.joined:
            live = self._of[sequence]
            live.joined_s = began if live.joined_s is None else live.joined_s
        if step.preempted:
            self.metrics.preemptions.inc(len(step.preempted))
        if not step.chunks:
            self._wait_for_copies(step)
            return None
        drafted_s = 0.0 if self.speculation is None else self.speculation.drafted_s
        return Flight(step, self.runner.run(step), began, drafted_s)

    def _guesses(self, decoding: Tokens[Sequence]) -> Mapping[Sequence, list[int]]:
        """A draft takes part where no prompt is computed, which would need what its guesses take of the step."""
        if self.speculation is None:
            return {}
        scheduler, lives = self.scheduler, [self._of[s] for s in decoding]
        only_decodes = 0 < len(decoding) == len(scheduler.running)
        room = scheduler.room if only_decodes else None
        return self.speculation.propose(lives, bool(scheduler.waiting), room)

    def _landed(self) -> Flight | None:
        """What was launched ahead, for those who still want it."""
        flight, self._flight = self._flight, None
        return None if flight is None else flight.landed(lambda chunk: chunk.sequence in self._of)

    def _launch_ahead(self, drawn: Tokens[tuple[Chunk, Sampled]], now: float) -> None:
        """Launches the next step where it only decodes, as a graph. Of requests that end those whose last token says so
        have no part in it."""
        if not self.runner.runs_ahead or self.speculation is not None:
            return
        for chunk, each in drawn:
            live = self._of[chunk.sequence]
            if each.token in self.rules.ends(live.params) or live.sampled >= live.params.max_tokens:
                self.scheduler.finish(live.sequence)
        scheduler = self.scheduler
        room = len(scheduler.running) < scheduler.limits.max_running
        plain = all(s.missing == 1 and s.adapter is None for s in scheduler.running)
        if scheduler.running and plain and not (scheduler.waiting and room):
            self._flight = self._launch(now)

    def _enter(
        self,
        request_id: str,
        params: SamplingParams,
        sequence: Sequence,
        history: History | None,
        arrived_s: float,
        confirms: bool,
    ) -> None:
        self.scheduler.add(sequence, admitted=True)
        self.requests_total += 1
        if sequence.adapter is not None:
            self.metrics.adapter_request(sequence.adapter.name)
        live = Live(
            id=request_id,
            params=params,
            sequence=sequence,
            history=history or self.replay(sequence.tokens, params, []),
            randomness=Randomness() if params.seed is None else Randomness(params.seed),
            arrived_s=arrived_s,
            prompt_logprobs=None
            if params.prompt_logprobs is None
            else PromptLogprobs(params.prompt_logprobs),
            confirms=confirms,
        )
        live.counted = live.sampled
        if self.speculation is not None and live.is_predictable:
            live.guesser = self.speculation.guesser()
        self._live[request_id] = live
        self._of[sequence] = live
        self._gauges()

    def _learn_copies(self, mover: BlockMover) -> None:
        """Tells the scheduler which copies are done, and what a copy costs beside computing."""
        self.scheduler.copied(mover.done)
        self.scheduler.pool.cost = CopyCost(mover.block_s, self.speed.prompt_token_s)

    def _wait_for_copies(self, step: Step) -> None:
        """Where nothing can be computed, somebody may wait for content from the host."""
        self.runner.start_copies(step)
        arrives = [sequence.arrives for sequence in self.scheduler.fetching]
        if arrives and self.runner.mover is not None:
            self.runner.mover.wait(min(arrives))

    def _take_states(self, states: Tokens[tuple[Chunk, torch.Tensor]]) -> list[Chunk]:
        """Explains prompts, and adds to texts that become vectors; the chunks with which such a text is complete."""
        texts = []
        for chunk, found in states:
            live, sequence = self._of[chunk.sequence], chunk.sequence
            if live.prompt_logprobs is None:
                live.pool.add(chunk, found)
                texts.append(chunk)
                continue
            kept = chunk.kept
            following = sequence.tokens[kept.start + 1 : kept.stop + 1]
            live.prompt_logprobs.add(found, following, self.runner.logits)
            sequence.explained = kept.stop
        return [chunk for chunk in texts if chunk.completes]

    def _vector(self, live: Live, now: float) -> Delta:
        """The end of a text that has become a vector."""
        live.first_s = now
        self.metrics.prompt_tokens.inc(live.sequence.prompt_len)
        self._end(live, "stop", now)
        return Delta(live.id, finish="stop", cached=live.sequence.cached, vector=live.pool.vector())

    def _budget(self, decoding: Tokens[Sequence]) -> int:
        most = self.scheduler.limits.max_batched_tokens
        budget = step_budget(
            self.speed.model,
            self.tpot_s,
            len(decoding),
            sum(len(s.tokens) for s in decoding),
            min(self.least_prompt_tokens, most),
            most,
        )
        self.saturated = budget.saturated
        return budget.tokens

    def _draw(self, chunk: Chunk, failed: dict[Live, str]) -> Draw:
        """What to sample behind a chunk. A request whose grammar breaks a limit goes into `failed` with the reason; its
        token is not used."""
        live, sequence = self._of[chunk.sequence], chunk.sequence
        params, index = live.params, live.sampled + chunk.start + chunk.count - len(sequence.tokens)
        forbidden = self.rules.forbidden(params, sequence.tokens, sequence.prompt_len)
        allowed: Allowed | None = None
        if live.history.guide is not None:
            try:
                allowed = live.history.guide.allowed()
            except GrammarTooComplex as error:
                failed[live] = f"the answer's grammar is too complex to go on with: {error}"
            if allowed is not None and forbidden and not allowed.any_but(forbidden):
                forbidden = frozenset()  # min_tokens asks for more than the grammar has
        return Draw(params, live.randomness, index, live.history.counts, forbidden, allowed)

    def _take(self, live: Live, rows: list[tuple[Chunk, Sampled]], now: float) -> list[Delta]:
        """A request's next token, and those behind it whose guess was right."""
        deltas: list[Delta] = []
        for chunk, each in rows:
            if chunk.guess is not None:
                if deltas[-1].finish is not None or chunk.guess != live.sequence.tokens[-1]:
                    break
                self.scheduler.accept(live.sequence, each.token)
            logprobs = () if each.logprob is None else (each.logprob,)
            deltas.append(self._advance(live, each.token, logprobs, now))
        if live.guesser is not None and self.speculation is not None:
            self.speculation.learn(live.guesser, len(rows) - 1, [delta.tokens[0] for delta in deltas])
            if len(rows) > 1:
                self.scheduler.roll_back(live.sequence)
        return deltas

    def _advance(self, live: Live, token: int, logprobs: tuple[TokenLogprob, ...], now: float) -> Delta:
        history = live.history
        self.tally.token(live, now)
        if history.counts is not None:
            history.counts.add(token)
        if history.guide is not None:
            history.guide.take((token,))
        finish = self._finish(live, token)
        if finish is not None:
            self._end(live, finish, now)
        told, live.prompt_logprobs = live.prompt_logprobs, None
        cached = live.sequence.cached
        return Delta(live.id, (token,), live.sampled, logprobs, finish, cached=cached, prompt_logprobs=told)

    def _finish(self, live: Live, token: int) -> str | None:
        """Whether a request ends with its last token."""
        params, guide = live.params, live.history.guide
        if token in self.rules.ends(params) or (guide is not None and guide.over):
            return "stop"
        if live.sampled >= params.max_tokens:
            return "length"
        stuck = self.rules.is_stuck(params, live.sequence.tokens, live.sequence.prompt_len)
        return "stop" if stuck else None

    def _end(self, live: Live, reason: str, now: float) -> None:
        del self._live[live.id]
        del self._of[live.sequence]
        self.scheduler.finish(live.sequence)
        if self.speculation is not None:
            self.speculation.forget(live.sequence)
        if not self._live:
            self._flight = None
        if live.sequence.adapter is not None:
            live.sequence.adapter.release()
        self.tally.ended(live, reason, now)

    def _record(self, flight: Flight, seconds: float, explains: bool, wrong: int) -> None:
        """Guesses are rows like others, but read the context of the row before them. What a prompt reads of its own beginning is
        part of what its tokens cost, as where steps are planned. A draft's time is not the step's."""
        step, drafted_s = flight.step, flight.drafted_s
        decoding = [c for c in step.chunks if c.count == 1]
        context = sum(c.start + c.count for c in decoding if c.guess is None)
        if not explains:  # such a step takes longer than others of its size
            prompt = step.token_count - len(decoding)
            self.speed.record(len(decoding), context, prompt, seconds - drafted_s, wrong, beside_s=drafted_s)
            if self.speculation is not None and not prompt:
                guesses = sum(c.guess is not None for c in decoding)
                self.speculation.costs.learn(len(decoding) - guesses, context, guesses, seconds - drafted_s)
        self.metrics.step_tokens.observe(step.token_count)

    def _gauges(self) -> None:
        scheduler = self.scheduler
        self.metrics.running.set(len(scheduler.running))
        self.metrics.waiting.set(len(scheduler.waiting))
        usage = scheduler.pool.used / scheduler.pool.total
        self.metrics.kv_usage.set(usage)
        self.metrics.kv_usage_old.set(usage)
        self.metrics.prefix_cache(scheduler.cache_queries, scheduler.cache_hits)
        self.metrics.host_tier(scheduler.pool.host)
        for tenant in scheduler.quotas.tenants:
            self.metrics.tenant_blocks(tenant, scheduler.pool.held[tenant])
        if self.speculation is not None:
            totals = self.speculation
            self.metrics.speculation(totals.drafts_total, totals.proposed_total, totals.accepted_total)
        layers = self.runner.decoder.weights.layers
        if isinstance(layers, ExpertStreamedLayers):
            self.metrics.experts(*astuple(layers.cache.counts))
        self.metrics.saturated.set(self.saturated)
