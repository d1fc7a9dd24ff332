"""What the engine's thread does for a request that moves to another replica, between two steps. No torch.

At the source a running request is looked at, its full blocks are pinned while they are read (they never change), and
for the last stage it is held: it keeps its blocks and computes nothing, until it is let go again or handed over.

At the destination blocks arrive before anybody knows what they are: nobody computes on them. The commit gives them
their names (`prefix.py`), so the stream that goes on here finds them as it finds the blocks of a preempted request. What
was committed stays pinned until that has happened, or until nobody has come for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from busbar.workloads.serving.prefix import extend_names, name_of_part
from busbar.workloads.serving.sequence import State, Step

if TYPE_CHECKING:
    from busbar.workloads.serving.blocks import BlockPool
    from busbar.workloads.serving.core import EngineCore


class LeftError(Exception):
    """A request cannot move now; why."""


@dataclass(frozen=True)
class Snapshot:
    """A running request between two steps."""

    tokens: list[int]
    computed: int
    """Of them; one less than all once the prompt is computed."""
    full: int
    """Blocks that are complete."""
    used: int
    """Blocks with any content."""


@dataclass(frozen=True)
class Stage:
    """Requests that move, at one moment, and what is to be sent of them now."""

    seen: dict[str, Snapshot]
    pinned: dict[str, list[int]]
    """Of each request blocks that were not sent; nobody gets them before `unpin`."""
    held: bool
    """The requests compute nothing any more, and the blocks are all that was not sent. Otherwise they are the full ones."""
    is_computing: bool
    """A prompt is not computed yet."""

    @property
    def blocks(self) -> list[int]:
        return [block for each in self.pinned.values() for block in each]


@dataclass(eq=False)
class Arriving:
    """A sequence that is on its way here."""

    salt: bytes
    tenant: str
    pool: BlockPool
    """Whose blocks they are; an engine that has slept has another one."""
    blocks: dict[int, int] = field(default_factory=dict)
    """Place in the sequence → block, of those that are held for it."""


class Handover:
    """Of one engine core. Every method runs in the engine's thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    # -- the source ---------------------------------------------------------------------------

    def look(self, request_id: str) -> Snapshot | None:
        """None for a request that has no blocks now, or has ended."""
        sequence = self._core.sequence_of(request_id)
        if sequence is None or sequence.state not in (State.RUNNING, State.HELD):
            return None
        size = self._core.scheduler.limits.block_tokens
        return Snapshot(
            list(sequence.tokens),
            sequence.computed,
            sequence.computed // size,
            -(-sequence.computed // size),
        )

    def pin(self, request_id: str, first: int, last: int) -> list[int] | None:
        """The request's blocks `first` to `last - 1`, which must be full or those of a held one: nobody gets them before
        `unpin`. None where it has been preempted, or has ended."""
        seen = self.look(request_id)
        sequence = self._core.sequence_of(request_id)
        if seen is None or sequence is None or seen.used < last:
            return None
        blocks = sequence.blocks[first:last]
        for block in blocks:
            self._core.scheduler.pool.share(block)
        return blocks

    def unpin(self, blocks: list[int]) -> None:
        self._core.scheduler.pool.give_back(blocks)

    def stage(self, sent: Mapping[str, int], most: int, waits: bool = False) -> Stage | None:
        """What is to be sent next of requests of which so many first blocks were sent: all that is left, and the requests are
        held, once their prompts are computed and at most `most` blocks of each are left; until then their full blocks.

        `waits`: None as long as there is nothing to send, because one has not begun to run, or computes its prompt. Raises
        LeftError, and nothing is done, where one has ended or was preempted, and without `waits` there too.
        """
        for name in sent:
            self._check(name, waits)
        found = {each: self.look(each) for each in sent}
        seen = {name: each for name, each in found.items() if each is not None}
        if len(seen) < len(sent):
            return None
        computing = any(each.computed < len(each.tokens) - 1 for each in seen.values())
        held = not computing and all(each.used - sent[name] <= most for name, each in seen.items())
        if held:
            self._hold(sent)
        ends = {name: each.used if held else each.full for name, each in seen.items()}
        if waits and computing and all(ends[name] <= sent[name] for name in sent):
            return None
        stage = Stage(seen, {}, held, computing)
        for name, end in ends.items():
            pinned = self.pin(name, sent[name], end) if end > sent[name] else []
            assert pinned is not None  # it runs, or is held
            stage.pinned[name] = pinned
        return stage

    def _check(self, request_id: str, waits: bool) -> None:
        sequence = self._core.sequence_of(request_id)
        if sequence is None:
            raise LeftError("it has ended")
        if sequence.state in (State.RUNNING, State.HELD):
            if sequence.missing > 1 and not waits:
                raise LeftError("it computes its prompt")
        elif sequence.preemptions or not waits:
            raise LeftError("it was preempted")

    def _hold(self, request_ids: Iterable[str]) -> None:
        for sequence in map(self._core.sequence_of, request_ids):
            if sequence is not None and sequence.state is State.RUNNING:
                self._core.scheduler.hold(sequence)

    def let_go(self, request_ids: list[str]) -> None:
        """Those that were held run on here. Harmless for others."""
        for request_id in request_ids:
            sequence = self._core.sequence_of(request_id)
            if sequence is not None and sequence.state is State.HELD:
                self._core.scheduler.let_go(sequence)

    # -- the destination ----------------------------------------------------------------------

    def expect(self, salt: bytes, tenant: str, tokens: list[int]) -> tuple[Arriving, int]:
        """(a sequence to come, how many of its first blocks are here already, and held). For the others, and one more,
        there is room where blocks are free, so that later messages need not wait for a step to end."""
        pool, names = self._core.scheduler.pool, list[bytes]()
        extend_names(names, tokens, self._core.scheduler.limits.block_tokens, salt)
        arriving, found = Arriving(salt, tenant, pool), pool.locate(names)
        for place, block in enumerate(found):
            if block is not None:
                pool.share(block, tenant)
                arriving.blocks[place] = block
        used = -(-(len(tokens) - 1) // self._core.scheduler.limits.block_tokens)
        self.make_room(arriving, len(found), used + 1)
        return arriving, len(found)

    def make_room(self, arriving: Arriving, first: int, last: int) -> list[int] | None:
        """Blocks for these places, whose content may be anything until it has been written. None where none are free;
        nobody is preempted."""
        scheduler = self._core.scheduler
        if scheduler.pool is not arriving.pool:
            return None
        wanted = [place for place in range(first, last) if place not in arriving.blocks]
        if not scheduler.may_hold(arriving.tenant, len(wanted)):
            return None
        arriving.blocks |= zip(wanted, scheduler.pool.take(len(wanted), arriving.tenant), strict=True)
        # What was in these blocks may be on its way to the host.
        self._core.runner.start_copies(Step((), (), (), *scheduler.pool.take_moves()))
        return [arriving.blocks[place] for place in range(first, last)]

    def commit(self, arrived: Iterable[tuple[Arriving, list[int]]]) -> None:
        """All content of each sequence's tokens but the last is here."""
        for arriving, tokens in arrived:
            self._commit(arriving, tokens)

    def _commit(self, arriving: Arriving, tokens: list[int]) -> None:
        pool, names = arriving.pool, list[bytes]()
        size = self._core.scheduler.limits.block_tokens
        extend_names(names, tokens, size, arriving.salt)
        full, part = divmod(len(tokens) - 1, size)
        for place, block in arriving.blocks.items():
            if place < full:
                pool.name(block, names[place])
        last = arriving.blocks.pop(full, None)
        if last is not None:
            if part:
                name = name_of_part(names[:full], tokens[full * size : -1], arriving.salt)
                pool.name(last, name, part)
            pool.give_back([last])  # who goes on writes to it, and so takes it for good
        spare = [place for place in arriving.blocks if place > full]
        pool.give_back([arriving.blocks.pop(place) for place in spare])

    def forget(self, sequences: Iterable[Arriving]) -> None:
        """Gives back what is held for them; what was committed can be found until it is evicted."""
        for arriving in sequences:
            arriving.pool.give_back(list(arriving.blocks.values()))
            arriving.blocks.clear()
