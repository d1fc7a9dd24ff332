"""Which tokens run in the next step. Pure Python: no torch, no clock, no text.

There is no prefill phase (Dynamic SplitFuse, DeepSpeed-FastGen, arXiv 2401.08671): a sequence has
`tokens` and `computed`, and a step lets `computed` catch up under a budget of tokens per step.

    1. every running sequence that lacks one token decodes
    2. running sequences that lack more get chunks of their prompt
    3. waiting sequences join, first come first served, if *all* their blocks fit above the watermark

A sequence reserves the blocks of its whole prompt when it joins, so only decoding asks for more. When
the pool is dry the newest running sequence is preempted: its blocks go back, its tokens stay, and it
waits at the head of the queue to be recomputed. The oldest is never preempted by a newer one, and a
sequence that could not fit alone is refused by `add`; so the oldest always finishes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

from busbar.workloads.serving.blocks import BlockPool


class State(StrEnum):
    WAITING = "Waiting"
    RUNNING = "Running"
    FINISHED = "Finished"


@dataclass(frozen=True)
class Limits:
    """What one step may hold."""

    block_tokens: int = 64
    """Tokens per KV block."""
    max_batched_tokens: int = 512
    """Tokens of all sequences in one step; long prompts are split to it."""
    max_running: int = 64
    """Sequences in one step."""
    watermark: float = 0.02
    """Share of the pool kept free when a sequence joins others, so that they can grow."""


@dataclass(eq=False)
class Sequence:
    """One request's tokens and blocks."""

    order: int
    """Arrival number; smaller is older."""
    tokens: list[int]
    """Prompt, then everything sampled."""
    max_total: int
    """Prompt plus the most that may be sampled."""
    prompt_len: int = 0
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    blocks: list[int] = field(default_factory=list)
    state: State = State.WAITING
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of one sequence from position `start`."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Only the chunk that reaches the end of the tokens yields a new one."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True)
class Step:
    chunks: tuple[Chunk, ...]
    joined: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]

    @property
    def token_count(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Owns the queue, the running set and the block pool."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemption_count = 0

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that the pool can hold alone."""
        return self.pool.total * self.limits.block_tokens

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        if not sequence.tokens:
            raise ValueError("a sequence needs at least one token")
        if sequence.max_total > self.capacity_tokens:
            raise ValueError(
                f"a sequence of up to {sequence.max_total} tokens does not fit the KV cache of "
                f"{self.capacity_tokens} tokens even alone"
            )
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in any state (done or cancelled) and frees its blocks. Harmless twice."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        self._release(sequence)

    def plan(self) -> Step:
        """The next step. Blocks are reserved; nothing is computed until `commit`."""
        budget = self.limits.max_batched_tokens
        counts: dict[Sequence, int] = {}
        preempted: list[Sequence] = []
        decoding = [s for s in self.running if s.missing == 1]
        catching_up = [s for s in self.running if s.missing > 1]
        for sequence in decoding + catching_up:
            if sequence.state is not State.RUNNING or budget < 1:
                continue  # preempted a moment ago for an older one, or the step is full
            count = min(sequence.missing, budget)
            budget += self._make_room(sequence, sequence.computed + count, counts, preempted)
            if sequence.state is State.RUNNING:
                counts[sequence] = count
                budget -= count
        joined = [] if preempted else self._join(counts, budget)
        chunks = tuple(Chunk(s, s.computed, n) for s, n in counts.items())
        return Step(chunks, tuple(joined), tuple(preempted))

    def commit(self, step: Step, sampled: dict[Sequence, int]) -> None:
        """The step has run: its tokens are in the cache, and `sampled` follow."""
        for chunk in step.chunks:
            if chunk.sequence.state is not State.RUNNING:
                continue
            chunk.sequence.computed += chunk.count
            token = sampled.get(chunk.sequence)
            if token is not None:
                chunk.sequence.tokens.append(token)

    # -- inside -------------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    def _make_room(
        self, sequence: Sequence, tokens: int, counts: dict[Sequence, int], preempted: list[Sequence]
    ) -> int:
        """Gives `sequence` blocks for `tokens`, preempting newer ones. Returns budget won back."""
        won_back = 0
        need = self._blocks_for(tokens) - len(sequence.blocks)
        while need > self.pool.free:
            victim = max(self.running, key=lambda s: s.order)
            won_back += counts.pop(victim, 0)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return won_back
        if need > 0:
            sequence.blocks += self.pool.take(need)
        return won_back

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.state = State.WAITING
        victim.computed = 0
        victim.preemptions += 1
        self.preemption_count += 1
        position = next((i for i, s in enumerate(self.waiting) if s.order > victim.order), len(self.waiting))
        self.waiting.insert(position, victim)

    def _join(self, counts: dict[Sequence, int], budget: int) -> list[Sequence]:
        joined: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_running:
            head = self.waiting[0]
            need = self._blocks_for(len(head.tokens))
            if need > self.pool.free - self._watermark():
                break
            self.waiting.popleft()
            head.state = State.RUNNING
            head.blocks = self.pool.take(need)
            self.running.append(head)
            joined.append(head)
            counts[head] = min(head.missing, budget)
            budget -= counts[head]
        return joined

    def _watermark(self) -> int:
        if not self.running:
            return 0
        return max(ceil(self.pool.total * self.limits.watermark), len(self.running))

    def _release(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
