"""The engine without its thread: requests in, text deltas out, one step at a time.

`step` plans, runs, samples, then turns each new token into text and decides whether its request ends:
at an end token, a stop string or the length limit, in that order. A finished request's blocks are
free before the next plan. The clock is an argument, so tests need no waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from busbar.workloads.serving.errors import BadRequest
from busbar.workloads.serving.metrics import Metrics
from busbar.workloads.serving.runner import Runner
from busbar.workloads.serving.sampler import Draw, logprobs_of, sample
from busbar.workloads.serving.sampling import Randomness, SamplingParams, TokenLogprob
from busbar.workloads.serving.scheduler import Scheduler, Sequence, Step
from busbar.workloads.serving.speed import Speed
from busbar.workloads.serving.text import Detokenizer, StopMatcher, special_tokens


@dataclass(frozen=True)
class Delta:
    """What one step adds to one request."""

    request_id: str
    text: str
    tokens: tuple[int, ...] = ()
    index: int = 0
    """Completion tokens so far, these included."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    """None, stop, length or error."""
    error: str | None = None


@dataclass(eq=False)
class Live:
    """A request that is in the engine."""

    id: str
    params: SamplingParams
    sequence: Sequence
    detokenizer: Detokenizer
    matcher: StopMatcher
    randomness: Randomness
    arrived_s: float
    joined_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def sampled(self) -> int:
        return len(self.sequence.tokens) - self.sequence.prompt_len


class EngineCore:
    """Scheduler, runner and text of one model."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        metrics: Metrics,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos = eos
        self.metrics = metrics
        self.max_model_len = max_model_len
        self.speed = Speed()
        self.requests_total = 0
        self.tokens_total = 0
        self._clock = clock
        self._special = special_tokens(tokenizer)
        self._live: dict[str, Live] = {}
        self._of: dict[Sequence, Live] = {}

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def live(self) -> int:
        return len(self._live)

    def admissible(self, prompt_len: int, max_tokens: int) -> None:
        """Raises BadRequest when the request can never run. Safe to call from any thread."""
        if prompt_len < 1:
            raise BadRequest("the prompt is empty; give at least one token", param="prompt")
        if prompt_len + max_tokens > self.max_model_len:
            raise BadRequest(
                f"this model's maximum context length is {self.max_model_len} tokens; the request has "
                f"{prompt_len} in the prompt and asks for up to {max_tokens} more. Shorten one of them",
                param="max_tokens" if prompt_len < self.max_model_len else "prompt",
            )

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams, arrived_s: float) -> None:
        """Queues a request that `admissible` has passed."""
        sequence = Sequence(self.requests_total, list(prompt), len(prompt) + params.max_tokens)
        self.scheduler.add(sequence)
        self.requests_total += 1
        live = Live(
            id=request_id,
            params=params,
            sequence=sequence,
            detokenizer=Detokenizer(
                self.tokenizer, self._special if params.skip_special_tokens else frozenset()
            ),
            matcher=StopMatcher(params.stop, params.include_stop_text),
            randomness=Randomness() if params.seed is None else Randomness(params.seed),
            arrived_s=arrived_s,
        )
        self._live[request_id] = live
        self._of[sequence] = live
        self._gauges()

    def cancel(self, request_id: str) -> bool:
        """Drops a request and frees its blocks. Harmless for one that has ended."""
        live = self._live.get(request_id)
        if live is None:
            return False
        self._end(live, "abort", self._clock())
        self._gauges()
        return True

    def step(self) -> list[Delta]:
        """One forward pass over everything that runs."""
        began = self._clock()
        step = self.scheduler.plan()
        for sequence in step.joined:
            live = self._of[sequence]
            live.joined_s = began if live.joined_s is None else live.joined_s
        if step.preempted:
            self.metrics.preemptions.inc(len(step.preempted))
        if not step.chunks:
            return []
        sequences, logits = self.runner.run(step)
        lives = [self._of[s] for s in sequences]
        tokens = sample(logits, [self._draw(live) for live in lives]) if lives else []
        self.scheduler.commit(step, dict(zip(sequences, tokens, strict=True)))
        now = self._clock()
        self._record(step, now - began)
        deltas = []
        for row, (live, token) in enumerate(zip(lives, tokens, strict=True)):
            wanted = live.params.logprobs
            logprobs = () if wanted is None else (logprobs_of(logits[row], token, wanted),)
            deltas.append(self._advance(live, token, logprobs, now))
        self._gauges()
        return deltas

    def abandon(self) -> list[str]:
        """Ends every request (the engine has failed or the drain is over); their ids."""
        now = self._clock()
        lives = list(self._live.values())
        for live in lives:
            self._end(live, "abort", now)
        self._gauges()
        return [live.id for live in lives]

    # -- inside -------------------------------------------------------------------------------

    def _draw(self, live: Live) -> Draw:
        params = live.params
        early = params.min_tokens > live.sampled
        forbidden = (self.eos | params.stop_token_ids) if early else frozenset()
        return Draw(params, live.randomness, live.sampled, live.counts, forbidden)

    def _advance(self, live: Live, token: int, logprobs: tuple[TokenLogprob, ...], now: float) -> Delta:
        params, sampled = live.params, live.sampled
        self.tokens_total += 1
        self.metrics.generation_tokens.inc()
        if live.first_s is None:
            live.first_s = now
            self.metrics.prompt_tokens.inc(live.sequence.prompt_len)
            self.metrics.ttft.observe(now - live.arrived_s)
        elif live.last_s is not None:
            self.metrics.itl.observe(now - live.last_s)
        live.last_s = now
        if params.presence_penalty or params.frequency_penalty:
            live.counts[token] = live.counts.get(token, 0) + 1
        finish: str | None = None
        if token in params.stop_token_ids or (token in self.eos and not params.ignore_eos):
            finish = "stop"
            text = live.matcher.add(live.detokenizer.flush())
        else:
            text = live.matcher.add(live.detokenizer.add(token))
            if sampled >= params.max_tokens:
                finish = "length"
                text += live.matcher.add(live.detokenizer.flush())
        if live.matcher.matched is not None:
            finish = "stop"
        elif finish is not None:
            text += live.matcher.flush()
        if finish is not None:
            self._end(live, finish, now)
        return Delta(live.id, text, (token,), sampled, logprobs, finish)

    def _end(self, live: Live, reason: str, now: float) -> None:
        del self._live[live.id]
        del self._of[live.sequence]
        self.scheduler.finish(live.sequence)
        metrics = self.metrics
        metrics.finished(reason)
        if reason == "abort":
            return
        joined, first, last = (now if t is None else t for t in (live.joined_s, live.first_s, live.last_s))
        metrics.e2e.observe(now - live.arrived_s)
        metrics.queue_time.observe(joined - live.arrived_s)
        metrics.prefill_time.observe(first - joined)
        metrics.decode_time.observe(last - first)
        metrics.inference_time.observe(last - joined)
        if live.sampled > 1:
            metrics.tpot.observe((last - first) / (live.sampled - 1))
        metrics.request_prompt.observe(live.sequence.prompt_len)
        metrics.request_generation.observe(live.sampled)
        metrics.params_n.observe(1)
        metrics.params_max_tokens.observe(live.params.max_tokens)

    def _record(self, step: Step, seconds: float) -> None:
        decoding = [c for c in step.chunks if c.count == 1]
        context = sum(c.start + c.count for c in step.chunks)
        self.speed.record(len(decoding), context, step.token_count - len(decoding), seconds)
        self.metrics.step_tokens.observe(step.token_count)

    def _gauges(self) -> None:
        scheduler = self.scheduler
        self.metrics.running.set(len(scheduler.running))
        self.metrics.waiting.set(len(scheduler.waiting))
        usage = scheduler.pool.used / scheduler.pool.total
        self.metrics.kv_usage.set(usage)
        self.metrics.kv_usage_old.set(usage)
