"""What callers of the serving engine would see of a load: its own scheduler, step by step, without a model or a clock.

Steps take what a step model says. All else is the engine's: who joins a step and when, how many prompt tokens a step has under a
promised time per token, blocks, prefix cache, preemption. Not in it is what lies outside of steps: HTTP, tokens to text, the
gateway. Swapping to host memory and guesses of tokens are not replayed. Pure Python.

    engine = simulated(StepTimes(0.004, 0.0003, 1e-4, 5e-5), blocks=512, limits=StepLimits())
    seen = replay(requests_of([(0.0, 300, 20), (0.2, 40, 8)]), engine)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from busbar.scheduler.fit.chunks import MIN_CHUNK_TOKENS
from busbar.scheduler.fit.online import TRUSTED_STEPS, OnlineStepModel
from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.budget import step_budget
from busbar.workloads.serving.fairness import NOBODY, Owner
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence as Tokens
from busbar.workloads.serving.sequence import Step


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, as an engine reports them (`stepModel`): its own, per decoding sequence, per thousand tokens of context, and
    per prompt token."""

    per_step_s: float
    per_sequence_s: float
    per_thousand_context_s: float
    per_prompt_token_s: float

    def fitted(self) -> OnlineStepModel:
        """The model as an engine that has learnt it."""
        theta = [
            self.per_step_s,
            self.per_sequence_s,
            self.per_thousand_context_s,
            self.per_prompt_token_s,
        ]
        return OnlineStepModel(theta=theta, steps=TRUSTED_STEPS)


@dataclass(frozen=True)
class Request:
    """One request; `at_s` is since the load's begin."""

    at_s: float
    prompt: list[int]
    output_tokens: int
    owner: Owner = NOBODY
    salt: bytes = b""


@dataclass
class Seen:
    """What became of it: when each token came; none: it was refused."""

    request: Request
    times_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.times_s[0] - self.request.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of a further token; None: there is one token."""
        further = len(self.times_s) - 1
        return (self.times_s[-1] - self.times_s[0]) / further if further else None


@dataclass
class SimulatedEngine:
    """One replica: a step is begun with what waits for it, takes its time, and then brings tokens."""

    times: StepTimes
    scheduler: Scheduler
    tpot_s: float | None = None
    """The promised time per token."""
    computed_tokens: int = 0

    def __post_init__(self) -> None:
        self._model = self.times.fitted()

    def begin(self) -> tuple[Step, float] | None:
        """The next step and its seconds; None: nothing can be computed."""
        scheduler = self.scheduler
        decoding = [one for one in scheduler.running if one.missing == 1]
        context = sum(len(one.tokens) for one in decoding)
        most = scheduler.limits.max_batched_tokens
        least = min(MIN_CHUNK_TOKENS, most)
        budget = step_budget(self._model, self.tpot_s, len(decoding), context, least, most)
        step = scheduler.plan(budget.tokens)
        if not step.chunks:
            return None
        return step, self.seconds(step)

    def seconds(self, step: Step) -> float:
        """What a step takes by the model."""
        ends = [chunk.start + 1 for chunk in step.chunks if chunk.count == 1]
        return self._model.predict(len(ends), sum(ends), step.token_count - len(ends))

    def end(self, step: Step) -> list[Tokens]:
        """The step is over: those that got a token. Who has all of its tokens is finished."""
        self.computed_tokens += step.token_count
        sampled = {chunk.sequence: 0 for chunk in step.chunks if chunk.samples}
        self.scheduler.commit(step, sampled)
        for sequence in sampled:
            if len(sequence.tokens) >= sequence.max_total:
                self.scheduler.finish(sequence)
        return list(sampled)


def replay(
    requests: Iterable[Request],
    engine: SimulatedEngine,
    told: Callable[[], object] = lambda: None,
    max_waiting: int | None = None,
) -> list[Seen]:
    """Feed requests at their times until all have been answered; `told` hears of each that has.

    Args:
        max_waiting: a request that finds so many waiting is refused, as the server does; None: none is.

    Raises ValueError for a request that the engine could never run.
    """
    ordered = sorted(requests, key=lambda one: one.at_s)
    seen: dict[Tokens, Seen] = {}
    found: list[Seen] = []
    now, number = 0.0, 0
    while number < len(ordered) or not engine.scheduler.idle:
        if engine.scheduler.idle:
            now = max(now, ordered[number].at_s)
        while number < len(ordered) and ordered[number].at_s <= now:
            one = ordered[number]
            found.append(Seen(one))
            number += 1
            if max_waiting is not None and len(engine.scheduler.waiting) >= max_waiting:
                told()
                continue
            total = len(one.prompt) + one.output_tokens
            made = Tokens(number, list(one.prompt), total, owner=one.owner, salt=one.salt)
            engine.scheduler.add(made)
            seen[made] = found[-1]
        begun = engine.begin()
        assert begun is not None, "nobody waits for nothing"
        step, took = begun
        now += took
        for sequence in engine.end(step):
            mine = seen[sequence]
            mine.times_s.append(now)
            mine.cached_tokens = sequence.cached
            if len(mine.times_s) == mine.request.output_tokens:
                told()
    return found


def simulated(
    times: StepTimes, blocks: int, limits: StepLimits, tpot_s: float | None = None
) -> SimulatedEngine:
    """An engine with an empty cache of so many blocks."""
    return SimulatedEngine(times, Scheduler(BlockPool(blocks), limits), tpot_s)


def requests_of(rows: Iterable[tuple[float, int, int]], shared_tokens: int = 0) -> list[Request]:
    """Requests of these times, prompt and output tokens. Prompts are equal in their first `shared_tokens` and in no other."""
    shared = list(range(shared_tokens))
    fresh = itertools.count(shared_tokens)
    return [
        Request(
            at_s,
            [*shared[: prompt - 1], *itertools.islice(fresh, max(1, prompt - shared_tokens))],
            output,
        )
        for at_s, prompt, output in rows
    ]
