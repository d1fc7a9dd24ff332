"""Guesses of the tokens that a request samples next, and whether they are worth their time. Pure Python.

Prompt lookup: where a request's last tokens have come before in its own prompt or answer, the tokens that followed them
there are guessed again. A guess is checked in the same step: it is one more row of the decoding request, behind the
guesses before it, and right if the row before it has sampled it. Every row draws with the random number of its own
token (`sampling.Randomness`), so a wrong guess costs time, and changes no token.

A guess is made only where it is expected to win time: the chance that it and those before it are right, times the time
in which the step yields one token, must exceed the time of one more row. That time is measured for each batch size
(`RowCosts`). How often a request's guesses are right is known without checking them: the token that comes is compared
with the one that would have been guessed.

A step with guesses takes longer for all requests of the batch. While others wait for their places, more tokens in less
time help everybody. While nobody waits, a request that ends early helps only itself, so guesses are made only where
most of the batch has good ones.

Where nothing is found that way, or the request's guesses of a draft model were right more often, the draft guesses, if there
is one (`drafting.py`). Its guesses are checked like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from busbar.scheduler.fit.online import OnlineStepModel

if TYPE_CHECKING:
    from busbar.workloads.serving import sequence
    from busbar.workloads.serving.drafting import Drafts
    from busbar.workloads.serving.live import Live

MATCH = 3
"""So many last tokens must have come before."""
LEAST_CHANCE = 0.2
"""A guess that is less likely than this is not made, however cheap a row is."""
MARGIN = 1.2
"""What a guess must win, over what it costs: the step model has an error."""
KNOWN_STEPS = 16
"""Steps that a model must have seen; before, guesses are made by their chance alone."""
GOOD, MOST_OF_THE_BATCH = 0.5, 0.75
"""So many of a request's next tokens are guessed right, in so large a share of the requests, where nobody waits."""
TRIAL_STEPS, TRIAL_CHANCE = 64, 0.5
"""After so many steps without any guess likely ones are tried again, because steps of equal size do not tell the step
model what a row costs."""
PRIOR = 4.0
"""Guesses that the rate of all requests counts for in a new one."""
ID_BITS = 21
MOST_AT_ONCE = 4096
"""Tokens of a long prompt that are read in one step (about 2 ms), so that nobody waits for all of them."""


Room = Callable[["sequence.Sequence"], int]


@dataclass(frozen=True)
class StepCosts:
    """A step before a draft has guessed for it."""

    tokens: float
    """That it is expected to yield."""
    seconds: float = 0.0
    """0: not known yet."""
    row_s: float = 0.0
    """Of one more row."""
    limit_s: float = inf


class Lookup:
    """Where the runs of `MATCH` tokens in a growing list of tokens were last. About 120 bytes for each token."""

    def __init__(self) -> None:
        self._behind: dict[int, int] = {}
        self._next = MATCH

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """The tokens behind the latest earlier place of the last `MATCH` ones; `most` or none. A place near the end goes
        on with the guesses themselves, as a loop does. `tokens` are those of the last call, and more."""
        end = len(tokens)
        if end < MATCH:
            return []
        reached = min(end, self._next + MOST_AT_ONCE)
        for place in range(self._next, reached):
            self._behind[_key(tokens, place)] = place
        self._next = max(self._next, reached)
        start = self._behind.get(_key(tokens, end))
        return [] if start is None else [tokens[start + i % (end - start)] for i in range(most)]


def _key(tokens: Sequence[int], place: int) -> int:
    """Of the `MATCH` tokens before a place."""
    key = 0
    for token in tokens[place - MATCH : place]:
        key = key << ID_BITS | token
    return key


@dataclass
class Rate:
    """How often guesses were right; old ones are forgotten."""

    right: float
    seen: float
    kept: float
    """Weight of what was known before, after one more guess."""

    @property
    def value(self) -> float:
        return self.right / self.seen

    def learn(self, is_right: bool) -> None:
        self.right = self.right * self.kept + is_right
        self.seen = self.seen * self.kept + 1.0


@dataclass(eq=False)
class Guesser:
    """The guesses of one request."""

    rate: Rate
    """Of guesses that were right."""
    hits: Rate
    """Of tokens that were guessed right."""
    lookup: Lookup = field(default_factory=Lookup)
    guesses: list[int] = field(default_factory=list)
    """Of the present step, by lookup, whether they are checked or not."""
    drafting: Rate | None = None
    """Of the draft's guesses that were right; None: there is no draft."""
    drafted: list[int] = field(default_factory=list)
    """The draft's of the present step; where there are some, they are what is checked."""


class RowCosts:
    """What one more row costs in steps that only decode, by batch size: a processor takes a few rows more in the time of
    one, and none when it is at its limit."""

    def __init__(self) -> None:
        self._models: dict[int, OnlineStepModel] = {}

    def learn(self, decoding: int, context_tokens: int, guesses: int, seconds: float) -> None:
        """A step with so many requests, and guesses of them."""
        self._models.setdefault(decoding.bit_length(), OnlineStepModel()).learn(
            decoding, context_tokens, guesses, seconds
        )

    def of(self, decoding: int, context_tokens: int) -> tuple[float, float] | None:
        """(seconds of the step without guesses, of one more row); None until it is known."""
        model = self._models.get(decoding.bit_length())
        if model is None or model.steps < KNOWN_STEPS:
            return None
        return model.predict(decoding, context_tokens, 0), max(0.0, model.theta[3])


class Speculation:
    """Decides for the whole batch, and counts."""

    def __init__(self, most: int, limit_s: float = inf, drafts: Drafts | None = None) -> None:
        self.drafts = drafts
        self.drafted_s = 0.0
        """Seconds that the draft took for the last proposal."""
        self.most = most
        """Guesses of one request in one step."""
        self.limit_s = limit_s
        """No guess makes a step longer than this: the promised time per token holds for those without guesses too."""
        self.drafts_total = 0
        """Times that guesses of a request were checked."""
        self.proposed_total = 0
        self.accepted_total = 0
        self.costs = RowCosts()
        self._overall = Guesser(Rate(PRIOR / 2, PRIOR, 0.995), Rate(PRIOR / 2, PRIOR, 0.995))
        self._without = 0
        """Steps without a guess, since the last with one."""

    def guesser(self) -> Guesser:
        """For a new request."""
        rate, hits = self._overall.rate.value, self._overall.hits.value
        drafting = None if self.drafts is None else self.drafts.rate()
        return Guesser(Rate(PRIOR * rate, PRIOR, 0.95), Rate(PRIOR * hits, PRIOR, 0.95), drafting=drafting)

    def propose(
        self, decoding: Sequence[Live], others_wait: bool, room: Room | None = None
    ) -> dict[sequence.Sequence, list[int]]:
        """The guesses to check in a step in which these requests decode. The draft takes part where `room` is given, which says
        for how many guesses of a request there are blocks."""
        found = self._look_up(decoding, others_wait)
        self.drafted_s = 0.0
        for live in decoding:
            if live.guesser is not None:
                live.guesser.drafted = []
        if self.drafts is not None and room is not None:
            found |= self._draft(self.drafts, decoding, others_wait, room, found)
        return found

    def _look_up(self, decoding: Sequence[Live], others_wait: bool) -> dict[sequence.Sequence, list[int]]:
        asked: list[tuple[sequence.Sequence, Guesser]] = []
        for live in decoding:
            if live.guesser is not None and live.sampled >= live.params.min_tokens:
                tokens = live.sequence.tokens
                most = min(self.most, live.sequence.max_total - len(tokens) - 1)
                live.guesser.guesses = live.guesser.lookup.propose(tokens, most)
                if live.guesser.guesses:
                    asked.append((live.sequence, live.guesser))
        context = sum(len(live.sequence.tokens) for live in decoding)
        good = sum(live.guesser is not None and live.guesser.hits.value >= GOOD for live in decoding)
        if not others_wait and good < MOST_OF_THE_BATCH * len(decoding):
            return {}
        depths = self.depths([guesser for _, guesser in asked], len(decoding), context)
        return {
            sequence: guesser.guesses[:depth]
            for (sequence, guesser), depth in zip(asked, depths, strict=True)
            if depth
        }

    def _draft(
        self,
        drafts: Drafts,
        decoding: Sequence[Live],
        others_wait: bool,
        room: Room,
        found: Mapping[sequence.Sequence, list[int]],
    ) -> dict[sequence.Sequence, list[int]]:
        """Guesses of the draft, for requests without one in `found` or with better drafts than lookups."""
        asked: dict[Live, int] = {}
        context = sum(len(live.sequence.tokens) for live in decoding)
        seconds, row_s = self.costs.of(len(decoding), context) or (0.0, 0.0)
        tokens, rows, sure = float(len(decoding)), 0, 0
        for live in decoding:
            guesser, sequence = live.guesser, live.sequence
            if guesser is None or guesser.drafting is None or live.sampled < live.params.min_tokens:
                continue
            if sequence in found and guesser.rate.value >= guesser.drafting.value:
                depth = len(found[sequence])
                tokens += sum(_chances(guesser.rate.value, depth))
                rows, sure = rows + depth, sure + (guesser.hits.value >= GOOD)
            else:
                most = min(self.most, sequence.max_total - len(sequence.tokens) - 1)
                asked[live] = min(most, room(sequence))
        before = drafts.model.seconds
        costs = StepCosts(tokens, seconds + rows * row_s, row_s, self.limit_s)
        guesses = drafts.propose(asked, sure, len(decoding), costs, others_wait)
        self.drafted_s = drafts.model.seconds - before
        for live, drafted in guesses.items():
            if live.guesser is not None:
                live.guesser.drafted = drafted
        return {live.sequence: drafted for live, drafted in guesses.items()}

    def forget(self, sequence: sequence.Sequence) -> None:
        """The request has ended."""
        if self.drafts is not None:
            self.drafts.model.forget(sequence)

    def depths(self, guessers: Collection[Guesser], decoding: int, context_tokens: int) -> list[int]:
        """How many of each one's guesses to check in a step in which `decoding` requests with so much context decode."""
        chances = sorted(
            (
                (chance, number)
                for number, guesser in enumerate(guessers)
                for chance in _chances(guesser.rate.value, len(guesser.guesses))
            ),
            reverse=True,
        )
        depths = [0] * len(guessers)
        tokens, (seconds, row_s) = float(decoding), self.costs.of(decoding, context_tokens) or (0.0, 0.0)
        for chance, number in chances:
            if seconds > 0 and (chance * seconds < MARGIN * row_s * tokens or seconds + row_s > self.limit_s):
                break
            depths[number] += 1
            tokens, seconds = tokens + chance, seconds + row_s
        self._without = 0 if any(depths) or not chances else self._without + 1
        if self._without >= TRIAL_STEPS and seconds < self.limit_s:
            self._without = 0
            return [int(bool(g.guesses) and g.rate.value >= TRIAL_CHANCE) for g in guessers]
        return depths

    def learn(self, guesser: Guesser, checked: int, sampled: Sequence[int]) -> None:
        """The request has sampled these tokens, with its first `checked` guesses in the step."""
        if checked:
            self.drafts_total += 1
            self.proposed_total += checked
            self.accepted_total += len(sampled) - 1
        if guesser.drafted and self.drafts is not None:
            self.drafts.learn(guesser, checked, sampled)
            checked = 0
        each = (guesser, self._overall)
        for guess, token in zip(guesser.guesses[: max(1, checked)], sampled, strict=False):
            for known in each:
                known.rate.learn(guess == token)
                known.hits.learn(guess == token)
        if not guesser.guesses:
            for known in each:
                known.hits.learn(False)


def _chances(rate: float, number: int) -> list[float]:
    """That each guess and all before it are right, as far as that is likely enough."""
    powers = (rate**i for i in count(1))
    return [chance for chance, _ in zip(powers, range(number), strict=False) if chance >= LEAST_CHANCE]
