"""How owners that ask for more than others give way, so that a request of another owner gets its first token almost as if it
were alone. Pure choice: `scheduler.py` carries it out.

Who is ahead says `Places.is_ahead`: nobody where one owner asks, or all ask alike, and then every step is as without this
module, except for `REST`. What those who are ahead have in the batch gives way in three ways, and only while a request of another owner waits,
except for the last:

    places   all places are theirs, and a request of another owner joins nevertheless: then some of theirs rest. They keep their
             blocks, get no token in the step, and go on before another of theirs joins. Those rest who rested least, so each
             runs in every second step at least. Also where a few tokens are missing so that the prompts of others end in
             this step, as many rest
    steps    their prompts get nothing in a step that computes a prompt of another owner, so that it is short; at most
             `MOST_SKIPPED` times in a row
    parts    otherwise each of their prompts gets `PROMPT_PART` tokens of a step, so that a request that comes while a step runs
             waits for a shorter one. Where many of theirs begin, the step is full nevertheless, and the batch stays full
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from sys import maxsize

from busbar.workloads.serving.fairness import Owner, Places
from busbar.workloads.serving.sequence import Sequence

PROMPT_PART = 64
"""Tokens of a prompt in one step, of an owner who is ahead. Shorter parts cost throughput, longer ones the others' first tokens: in
the busier row of `benchmarks/gateway_picking.py` 32, 64 and 128 give 0.969, 0.982 and 0.991 of the throughput, and a worst
p99 of 1.85, 1.89 and 2.19 times alone."""
MOST_SKIPPED = 4
"""Steps in a row in which prompts of owners who are ahead get nothing: the others' prompts may fill every step."""
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
        self._is_due = False
        """The step computes a prompt of an owner who is not ahead."""
        self._skipped = 0
        """Steps before this one that gave prompts of owners who are ahead nothing."""

    def begin(self) -> None:
        """A step is going to be planned."""
        self._ahead.clear()
        self._is_due = False

    def end(self) -> None:
        """The step is planned."""
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
            self._is_due = True

    def ends_soon(self, sequence: Sequence, budget: int) -> bool:
        """Whether the rest of its prompt, which fits in a step of `budget` tokens, goes before other prompts, whoever's turn it
        is."""
        fits = 1 < sequence.missing <= min(REST, budget)
        return fits and sequence.computed > 0 and self._is_waited_for(sequence)

    def order(self, sequence: Sequence, budget: int) -> tuple[bool, tuple[tuple[float, float], int]]:
        """Of prompts that have begun: the smallest goes first."""
        return not self.ends_soon(sequence, budget), self._turn(sequence)

    def resting(self, waiting: Iterable[Sequence], budget: int) -> set[Sequence]:
        """Running sequences that get nothing in a step of `budget` tokens."""
        able = [s for s in self._running if self._may_rest(s)]
        if not able:
            return set()
        able.sort(key=lambda s: (s.rested, -s.order))
        excess = max(0, sum(not s.owner.batch for s in self._running) - self._places.total)
        found = able[:excess]
        decoding = [s for s in able[excess:] if s.missing == 1]
        over = self._over(waiting, budget, found) if decoding and self._skipped < MOST_SKIPPED else 0
        if 0 < over <= len(decoding) // 2:  # the others go on, whoever of those that wait may join
            found += decoding[:over]
        for sequence in found:
            sequence.rested += 1
        return set(found)

    def rest(self, counts: dict[Sequence, int]) -> int:
        """Takes one that decodes out of the step, whose tokens are `counts`; what that wins."""
        able = [s for s in counts if s.missing == 1 and self._may_rest(s)]
        if not able:
            return 0
        chosen = min(able, key=lambda s: (s.rested, -s.order))
        chosen.rested += 1
        return counts.pop(chosen)

    def _over(self, waiting: Iterable[Sequence], budget: int, resting: list[Sequence]) -> int:
        """Tokens of a step that the prompts of owners who are not ahead lack, beside all that decode. Batch work takes none
        from them."""
        prompts = sum(s.missing for s in (*self._running, *waiting) if self._is_waited_for(s))
        decoding = [s for s in self._running if s.missing == 1 and not s.owner.batch and s not in resting]
        return prompts + len(decoding) - budget if prompts else 0

    @property
    def _gives_step(self) -> bool:
        return self._is_due and self._skipped < MOST_SKIPPED

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
