"""Which requests a draft model guesses for, how deep, and whether that is worth its time. Pure Python.

A draft is a small model with the served model's tokens (`draft.py`). Each of its passes adds one guess to every request that
takes part, and costs its own time and a row of each guess in the step that checks them. So another pass is made only where
the chances that its guesses are right, times the time in which the step yields a token, exceed both. The times are measured:
the draft's by a model of its passes, the step's by `speculation.RowCosts`.

Before it can guess, the draft has to compute the tokens of a request that it does not know: the prompt, or what came while
it was switched off. That is begun only where what the guesses are expected to save of the rest of the answer is more.

While nobody waits for a place, all requests of the batch must have good guesses: those that have none would be delayed, and
since the batch is busy until the last one ends, a few that end early save little.

How often a draft is right is known only while it guesses. Where it is switched off, it is tried again now and then for one
request, each time after twice as many steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol

from busbar.scheduler.fit.online import OnlineStepModel
from busbar.workloads.serving.speculation import (
    GOOD,
    KNOWN_STEPS,
    LEAST_CHANCE,
    MARGIN,
    PRIOR,
    TRIAL_STEPS,
    Guesser,
    Rate,
    StepCosts,
)

if TYPE_CHECKING:
    from busbar.workloads.serving import sequence
    from busbar.workloads.serving.live import Live

VIEW = 256
"""Tokens of an answer, at most, that are expected to come when a prompt is computed for their sake."""
LEAST_GAIN = 1.25
"""By which the step must be expected to yield more tokens in the same time, where nobody waits: new requests need not be like
those before, and then what the draft has computed of them is lost."""
USUAL_LAG = 2
"""Tokens that the draft does not know after a step in which all its guesses were right."""
TRIAL_GUESSES = 8
"""In a row, for one request, so that its rate tells something."""
MOST_TRIAL_STEPS = 64 * TRIAL_STEPS
TRIAL_SHARE = 0.02
"""Of the time since the last trial, that the tokens may take which the draft has to compute for the next one."""


class DraftModel(Protocol):
    """What `draft.Draft` does, for tests without torch."""

    costs: OnlineStepModel
    """Of a pass: by rows of requests, their context, and further tokens that it computes."""
    seconds: float
    """Spent on passes since the start."""

    def lag(self, sequence: sequence.Sequence, guesses: int) -> int | None:
        """How many of its tokens are not computed (1 or more); None where so many guesses have no place."""
        ...

    def guess(self, wanted: Mapping[Live, int], budget: int) -> dict[Live, list[int]]:
        """So many guesses for each request that is caught up when up to `budget` tokens have been computed, in this order;
        the others get none."""
        ...

    def forget(self, sequence: sequence.Sequence) -> None:
        """It has ended. Harmless for one that is not known."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A request that could be guessed for."""

    rate: float
    """Of guesses that were right."""
    room: int
    """Guesses, at most."""
    lag: int
    """Tokens that the draft has not computed."""
    left: int
    """Tokens that the request may still sample."""
    context: int = 0
    """Tokens that it has."""

    @property
    def unknown(self) -> int:
        """Tokens to compute before the first guess, beyond the usual ones."""
        return max(0, self.lag - USUAL_LAG)


@dataclass(frozen=True)
class Passes:
    """How deep to guess for each candidate, and what becomes of the step by that."""

    depths: list[int]
    tokens: float
    seconds: float


class Drafts:
    """Decides, and keeps the draft's part of the counts."""

    def __init__(self, model: DraftModel, budget: int) -> None:
        self.model = model
        self.budget = budget
        """Tokens of requests that the draft computes in a step, at most."""
        self.proposed_total = 0
        """Guesses of the draft that were checked."""
        self.accepted_total = 0
        self._overall = Rate(PRIOR / 2, PRIOR, 0.995)
        self._without = 0
        """Steps since the last guess that was worth its time, or the last trial."""
        self._tried = 0
        self._wait = TRIAL_STEPS

    def rate(self) -> Rate:
        """For a new request."""
        return Rate(PRIOR * self._overall.value, PRIOR, 0.95)

    def propose(
        self, asked: Mapping[Live, int], sure: int, decoding: int, step: StepCosts, others_wait: bool
    ) -> dict[Live, list[int]]:
        """Guesses for those who are asked for, at most as many as stands beside each.

        Args:
            sure: requests beside them that have good guesses already.
            decoding: all requests of the step.
            step: what it costs without these guesses, with those that it has already.
        """
        found: dict[Live, Candidate] = {}
        for live, most in asked.items():
            lag = self.model.lag(live.sequence, most) if most > 0 else None
            if lag is not None and live.guesser is not None and live.guesser.drafting is not None:
                context = len(live.sequence.tokens)
                left = live.sequence.max_total - context
                found[live] = Candidate(live.guesser.drafting.value, most, lag, left, context)
        depths = self.depths(list(found.values()), sure, decoding, step, others_wait)
        wanted = {live: depth for live, depth in zip(found, depths, strict=True) if depth}
        budget = self._most_tokens(step)
        is_trial = not wanted
        if is_trial:
            wanted = self._trial(found, step)
        else:
            self._without, self._tried, self._wait = 0, 0, TRIAL_STEPS
        if not wanted:
            return {}
        first = sorted(wanted, key=lambda live: found[live].lag)
        guesses = self.model.guess({live: wanted[live] for live in first}, budget)
        if is_trial and guesses:
            self._tried += 1
            if self._tried == TRIAL_GUESSES:
                self._without, self._tried, self._wait = 0, 0, min(2 * self._wait, MOST_TRIAL_STEPS)
        return guesses

    def depths(
        self,
        candidates: Sequence[Candidate],
        sure: int,
        decoding: int,
        step: StepCosts,
        others_wait: bool,
    ) -> list[int]:
        """Guesses of each candidate; 0 where it is not worth its time."""
        plan = self.passes(candidates, step)
        saved = step.seconds / step.tokens - plan.seconds / plan.tokens
        late = [
            c.unknown > 0 and min(c.left, VIEW) * saved < MARGIN * c.unknown * self._token_s
            for c in candidates
        ]
        if any(late):
            kept = [0 if is_late else c.room for c, is_late in zip(candidates, late, strict=True)]
            plan = self.passes(candidates, step, kept)
        good = sum(depth > 0 and c.rate >= GOOD for c, depth in zip(candidates, plan.depths, strict=True))
        gain = plan.tokens * step.seconds / (plan.seconds * step.tokens) if step.seconds > 0 else inf
        if not others_wait and (sure + good < decoding or gain < LEAST_GAIN):
            return [0] * len(candidates)
        return plan.depths

    def passes(
        self, candidates: Sequence[Candidate], step: StepCosts, rooms: Sequence[int] | None = None
    ) -> Passes:
        """As many passes as win time, each for the candidates whose guess is worth its rows."""
        rooms = [c.room for c in candidates] if rooms is None else rooms
        depths = [0] * len(candidates)
        tokens, seconds = step.tokens, step.seconds
        base_s, request_s = self._pass_costs(candidates)
        taking = list(range(len(candidates)))
        for depth in range(1, max(rooms, default=0) + 1):
            least = LEAST_CHANCE
            if seconds > 0:
                least = max(least, MARGIN * (step.row_s + request_s) * tokens / seconds)
            taking = [i for i in taking if rooms[i] >= depth and candidates[i].rate ** depth >= least]
            won = sum(candidates[i].rate ** depth for i in taking)
            cost = base_s + len(taking) * (request_s + step.row_s)
            if not taking or won * seconds < MARGIN * cost * tokens or seconds + cost > step.limit_s:
                break
            for i in taking:
                depths[i] = depth
            tokens, seconds = tokens + won, seconds + cost
        return Passes(depths, tokens, seconds)

    def learn(self, guesser: Guesser, checked: int, sampled: Sequence[int]) -> None:
        """The request has sampled these tokens, with the first `checked` guesses of the draft in the step."""
        if checked:
            self.proposed_total += checked
            self.accepted_total += len(sampled) - 1
        for guess, token in zip(guesser.drafted[: max(1, checked)], sampled, strict=False):
            for rate in filter(None, (guesser.drafting, self._overall)):
                rate.learn(guess == token)
        guesser.drafted = []

    @property
    def _known(self) -> bool:
        return self.model.costs.steps >= KNOWN_STEPS

    @property
    def _token_s(self) -> float:
        """Seconds of a token of a prompt; 0 until they are known."""
        return max(0.0, self.model.costs.theta[3]) if self._known else 0.0

    def _pass_costs(self, candidates: Sequence[Candidate]) -> tuple[float, float]:
        """Seconds of a pass, and of each request that takes part; 0 until they are known."""
        if not self._known or not candidates:
            return 0.0, 0.0
        base_s, request_s, context_s, _ = self.model.costs.theta
        context = sum(candidate.context for candidate in candidates) / len(candidates)
        return max(0.0, base_s), max(0.0, request_s + context_s * context / 1000)

    def _most_tokens(self, step: StepCosts) -> int:
        """That the draft may compute in this step, so that it stays within its limit."""
        if step.limit_s == inf or not self._token_s:
            return self.budget
        return max(0, min(self.budget, int((step.limit_s - step.seconds) / self._token_s)))

    def _trial(self, found: Mapping[Live, Candidate], step: StepCosts) -> dict[Live, int]:
        """One guess for the request that takes the least work, where it is time for that."""
        self._without += 1
        if self._without < self._wait or not found or step.seconds > step.limit_s:
            return {}
        live = min(found, key=lambda each: found[each].lag)
        may_s = TRIAL_SHARE * self._without * step.seconds
        return {live: 1} if not step.seconds or found[live].unknown * self._token_s <= may_s else {}
