"""How owners that ask for more than others give way, so that a request of another owner gets its first token almost as if it
were alone. Pure choice: `scheduler.py` carries it out.

Who is ahead says `Places.is_ahead`: nobody where one owner asks, or all ask alike, and then every step is as without this
module, except for `REST`. What those who are ahead have in the batch gives way in three ways, and only while a request of another owner waits,
except for the last:

    places   all places are theirs, and a request of another owner joins nevertheless: then some of theirs rest. They keep their
             blocks, get no token in the step, and go on before another of theirs joins. Those rest who rested least, so each
             runs in every second step at least
    steps    their prompts get nothing in a step that computes a prompt of another owner, so that it is short; at most
             `MOST_SKIPPED` times in a row. Where the prompts of others do not all fit in the step, what they decode rests as
             well until those have ended, in at most `REST_SHARE` of the steps: more of them fits, and the steps are shorter
    parts    otherwise each of their prompts gets `PROMPT_PART` tokens of a step, so that a request that comes while a step runs
             waits for a shorter one. Where many of theirs begin, the step is full nevertheless, and the batch stays full

Nobody rests for nothing: what is left of the places and of the step, because others could not begin, they get after all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from sys import maxsize

from busbar.workloads.serving.fairness import Owner, Places
from busbar.workloads.serving.sequence import Sequence

PROMPT_PART = 64
"""Tokens of a prompt in one step, of an owner who is ahead. Shorter parts cost throughput, longer ones make the step longer that
another owner's request finds running. It makes little difference: in the busier row of `benchmarks/gateway_picking.py` 32, 64 and
128 give 0.958, 0.972 and 0.979 of the throughput, and a worst p99 of 1.67, 1.77 and 1.72 times alone."""
MOST_SKIPPED = 4
"""Steps in a row in which prompts of owners who are ahead get nothing: the others' prompts may fill every step."""
REST_SHARE = 0.25
"""Of the steps, in which all that owners who are ahead decode may rest. That costs them so much of their throughput at most,
where a step takes equally long whatever it decodes, and less where each sequence takes its time."""
MOST_RESTS = 8.0
"""Such steps that may come soon after each other."""
REST = 128
"""Tokens. A prompt of which no more are left is ended before another one of somebody else begins, because a second step costs
it more than these cost the other. Prompts of owners who are ahead are excepted."""

Turn = Callable[[Sequence], tuple[tuple[float, float], int]]


class GivingWay:
    """Who gives way in the step that is being planned."""

    def __init__(self, places: Places, running: list[Sequence], turn: Turn) -> None:
        """`running` is the scheduler's own list; of `turn`, the smallest is served first."""
        self._places, self._running, self._turn = places, running, turn
        self._ahead: dict[Owner, bool] = {}
        self.is_due = False
        """The step computes a prompt of an owner who is not ahead."""
        self._resting: list[Sequence] = []
        self._rests = False
        """All that those who are ahead decode rests in the step."""
        self._credit = MOST_RESTS
        """Steps in which it may."""
        self._skipped = 0
        """Steps before this one that gave prompts of owners who are ahead nothing."""

    def begin(self) -> None:
        """A step is going to be planned."""
        self._ahead.clear()
        self.is_due = self._rests = False
        self._resting = []

    def end(self, counts: Collection[Sequence]) -> None:
        """The step is planned, with something of `counts`."""
        for sequence in self._resting:
            sequence.rested += sequence not in counts
        self._credit = min(self._credit + REST_SHARE, MOST_RESTS)
        if self._rests:
            self._credit -= 1
        self._skipped = self._skipped + 1 if self._gives_step else 0

    def may_take(self, owner: Owner, taken: int) -> bool:
        """Whether a waiting request of the owner may run beside `taken` others."""
        free = self._places.total - taken
        if owner.batch:
            return free > self._places.kept
        if self._is_ahead(owner):
            return free > 0 and not self._gives_step
        if free > 0:
            return True
        resting = 1 - free
        return resting <= self._places.most_resting and 2 * resting <= sum(map(self._may_rest, self._running))

    def most_tokens(self, sequence: Sequence) -> int:
        """Tokens of the sequence that the step may compute."""
        if sequence.missing == 1 or not self._may_rest(sequence):
            return maxsize
        return 0 if self._gives_step else PROMPT_PART

    def gets(self, sequence: Sequence) -> None:
        """The step computes something of the sequence."""
        if self._is_waited_for(sequence):
            self.is_due = True

    def ends_soon(self, sequence: Sequence, budget: int) -> bool:
        """Whether the rest of its prompt, which fits in a step of `budget` tokens, goes before other prompts, whoever's turn it
        is."""
        fits = 1 < sequence.missing <= min(REST, budget)
        return fits and sequence.computed > 0 and self._is_waited_for(sequence)

    def order(self, sequence: Sequence, budget: int) -> tuple[bool, tuple[tuple[float, float], int]]:
        """Of prompts that have begun: the smallest goes first."""
        return not self.ends_soon(sequence, budget), self._turn(sequence)

    def resting(self, waiting: Iterable[Sequence], budget: int) -> list[Sequence]:
        """Running sequences that get nothing in a step of `budget` tokens, unless others leave something: first who rested
        least last."""
        able = [s for s in self._running if self._may_rest(s)]
        if not able:
            return []
        able.sort(key=lambda s: (s.rested, -s.order))
        excess = max(0, sum(not s.owner.batch for s in self._running) - self._places.total)
        found, rest = able[:excess], [s for s in able[excess:] if s.missing == 1]
        may_rest = bool(rest) and self._credit >= 1 and self._skipped < MOST_SKIPPED
        self._rests = may_rest and self._is_crowded(waiting, budget, found)
        self._resting = [*found, *rest] if self._rests else found
        return self._resting[::-1]

    def rest(self, counts: dict[Sequence, int]) -> int:
        """Takes one that decodes out of the step, whose tokens are `counts`; what that wins."""
        able = [s for s in counts if s.missing == 1 and self._may_rest(s)]
        if not able:
            return 0
        chosen = min(able, key=lambda s: (s.rested, -s.order))
        chosen.rested += 1
        return counts.pop(chosen)

    def _is_crowded(self, waiting: Iterable[Sequence], budget: int, resting: list[Sequence]) -> bool:
        """Whether prompts of owners who are not ahead need more than decoding leaves of the step, or did so in an earlier one
        and have not ended. Batch work takes none from them."""
        begun = sum(s.missing for s in self._running if self._is_waited_for(s))
        prompts = begun + sum(s.missing for s in waiting if self._is_waited_for(s))
        decoding = sum(s.missing == 1 and not s.owner.batch for s in self._running)
        decoding -= sum(s.missing == 1 for s in resting)
        return begun > 0 or prompts > max(0, budget - decoding)

    @property
    def is_short(self) -> bool:
        """The step is left to the prompts of others: what they leave of it nobody gets."""
        return self._rests and self.is_due

    @property
    def _gives_step(self) -> bool:
        return self.is_due and self._skipped < MOST_SKIPPED

    def _is_ahead(self, owner: Owner) -> bool:
        found = self._ahead.get(owner)
        if found is None:
            found = self._ahead[owner] = self._places.is_ahead(owner)
        return found

    def _may_rest(self, sequence: Sequence) -> bool:
        return not sequence.owner.batch and self._is_ahead(sequence.owner)

    def _is_waited_for(self, sequence: Sequence) -> bool:
        """Whether it is the prompt of an owner who is not ahead."""
        return sequence.missing > 1 and not sequence.owner.batch and not self._is_ahead(sequence.owner)
