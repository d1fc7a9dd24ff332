"""A request as the scheduler and the runner see it: tokens, blocks, and its share of a step. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from busbar.workloads.serving.fairness import NOBODY, Owner
from busbar.workloads.serving.hosttier import Move

if TYPE_CHECKING:
    from busbar.workloads.serving.adapters import Adapter


class State(StrEnum):
    WAITING = "Waiting"
    FETCHING = "Fetching"
    """It has its blocks, and some of their content is on its way from host memory."""
    RUNNING = "Running"
    HELD = "Held"
    """It keeps its blocks and does not run, because it is about to go on at another replica."""
    FINISHED = "Finished"


class Pooling(StrEnum):
    """How a text becomes one vector."""

    LAST = "last"
    """The last token's hidden state."""
    MEAN = "mean"
    """The mean over all tokens."""


@dataclass(eq=False)
class Sequence:
    """One request's tokens and blocks."""

    order: int
    """Arrival number; smaller is older. A request that starts before an older one of its owner exchanges it."""
    tokens: list[int]
    """Prompt, then everything sampled."""
    max_total: int
    """Prompt plus the most that may be sampled."""
    prompt_len: int = 0
    came: int = 0
    """The arrival number that it came with, which it keeps."""
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    blocks: list[int] = field(default_factory=list)
    state: State = State.WAITING
    preemptions: int = 0
    rested: int = 0
    """Steps in which it gave way while it ran (`giving_way.py`)."""
    stepped: int = 0
    """Number of the last step that computes something of it (`under_way.py`)."""
    owner: Owner = NOBODY
    salt: bytes = b""
    """Sequences share blocks of equal tokens only where this is equal."""
    names: list[bytes] = field(default_factory=list)
    """Of the full blocks, as far as they were needed."""
    named: int = 0
    """Blocks that the pool knows by name."""
    fetched: tuple[int, ...] = ()
    """While it fetches: which of its full blocks are on their way."""
    arrives: int = 0
    """While it fetches: the number of the last copy (`hosttier.py`)."""
    cached: int = 0
    """Prompt tokens that came from the cache, before the first preemption."""
    charged: int = 0
    """Tokens whose computing was charged to the owner already."""
    priority: int = 0
    """Among the waiting requests of its owner: smaller starts first (`ageing.py`)."""
    resumed: bool = False
    """It began on another replica, which charged and counted its prompt."""
    pooling: Pooling | None = None
    """A vector is wanted, and no further token."""
    explains: bool = False
    """Log-probabilities of its prompt's tokens are wanted."""
    explained: int = 0
    """Positions whose hidden state has told that of the next token."""
    adapter: Adapter | None = None
    """Held until the sequence ends; None: the model alone."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        self.came = self.order

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def has_begun(self) -> bool:
        """It has run before, here or elsewhere, so that its last block may be found although it is not full."""
        return bool(self.preemptions) or self.resumed

    @property
    def is_explaining(self) -> bool:
        """Some of the prompt's hidden states are still wanted, which a cached block does not have."""
        return self.explains and self.explained < self.prompt_len - 1


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of one sequence from position `start`."""

    sequence: Sequence
    start: int
    count: int
    guess: int | None = None
    """Its one token, if that is none of the sequence's yet (`speculation.py`)."""

    @property
    def tokens(self) -> list[int]:
        return (
            self.sequence.tokens[self.start : self.start + self.count] if self.guess is None else [self.guess]
        )

    @property
    def completes(self) -> bool:
        """Whether it reaches the end of the tokens."""
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def samples(self) -> bool:
        """Only the chunk that reaches the end of the tokens, and a guess behind it, yield a new one."""
        return (self.completes or self.guess is not None) and self.sequence.pooling is None

    @property
    def kept(self) -> range:
        """Positions whose hidden state is wanted."""
        sequence, end = self.sequence, self.start + self.count
        if self.guess is not None:
            return range(0)
        if sequence.is_explaining:
            return range(max(self.start, sequence.explained), min(end, sequence.prompt_len - 1))
        if sequence.pooling is Pooling.MEAN:
            return range(self.start, end)
        is_last = self.completes and sequence.pooling is Pooling.LAST
        return range(end - 1, end) if is_last else range(0)


@dataclass(frozen=True)
class Step:
    chunks: tuple[Chunk, ...]
    """A sequence's guesses come behind its own chunk, in order."""
    joined: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    moves: tuple[Move, ...] = ()
    """Copies between device and host that begin with this step, in order."""
    waits_for: int = 0
    """Number of the copy that must be done before this step computes."""

    @property
    def token_count(self) -> int:
        return sum(chunk.count for chunk in self.chunks)
