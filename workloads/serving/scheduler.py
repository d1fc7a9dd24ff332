"""Which tokens run in the next step. Pure Python: no torch, no clock, no text.

There is no prefill phase (Dynamic SplitFuse, DeepSpeed-FastGen, arXiv 2401.08671): a sequence has
`tokens` and `computed`, and a step lets `computed` catch up under a budget of tokens per step.

    1. every running sequence that lacks one token decodes
    2. running sequences that lack more get chunks of their prompt, and waiting sequences join if *all*
       their blocks fit above the watermark: by the virtual counter of their owner (`fairness.py`), running
       before waiting where it is equal, then first come first served; an owner's turn goes to that
       of its waiting requests with the smallest `priority`, and at times to its oldest (`ageing.py`)

A sequence that joins finds the full blocks of its beginning that are in the cache (`prefix.py`); its last
token is always computed. While it catches up it looks again before each chunk, and no block is computed
twice: of those with equal beginnings one computes, the others wait and share its blocks (`under_way.py`). A sequence reserves the blocks of its whole prompt, so only decoding asks for more. When
the pool is dry, of all running sequences but the oldest the newest of the owner with the largest counter is
preempted: its blocks go back, its tokens stay, and it waits to be recomputed. A sequence that could not fit
alone is refused by `add`; so the oldest always finishes.

Batch work (`Owner.batch`) comes last: it gets what is left of a step's budget, and gives its places and blocks to whoever
else needs them, so that the first token of a request that somebody waits for comes at most the running step later.

With a host tier (`hosttier.py`) a preempted sequence finds there what its blocks held, also the last one, which is not
full. It gets blocks again, their content is fetched while the others go on, and it runs from the step after that.

With quotas (`quota.py`) only tenants that hold more than is guaranteed to them are preempted for others, and the oldest
of their sequences is the one that is spared. A tenant that needs blocks within its guarantee gets them at once, also
for a request that waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from functools import partial

from busbar.workloads.serving.ageing import Ageing
from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.fairness import CACHED, OUTPUT, PROMPT, Counters, Places
from busbar.workloads.serving.giving_way import GivingWay
from busbar.workloads.serving.preemption import Preemption
from busbar.workloads.serving.prefix import extend_names, name_of_part
from busbar.workloads.serving.quota import Quota, Quotas
from busbar.workloads.serving.sequence import Chunk, Sequence, State, Step
from busbar.workloads.serving.under_way import UnderWay

NO_GUESSES: Mapping[Sequence, Tokens[int]] = {}
MOST_PASSED = 32
"""Waiting sequences that are passed over at most, because somebody computes already what they begin with."""


@dataclass(frozen=True)
class StepLimits:
    """What one step may hold."""

    block_tokens: int = 64
    """Tokens per KV block."""
    max_batched_tokens: int = 512
    """Tokens of all sequences in one step; long prompts are split to it."""
    max_running: int = 64
    """Sequences in one step."""
    watermark: float = 0.02
    """Share of the pool kept free when a sequence joins others, so that they can grow."""
    prefix_cache: bool = False


@dataclass(frozen=True)
class _Found:
    """Blocks of a waiting sequence whose content is known."""

    blocks: list[int | None]
    """From the first on; None: in host memory only."""
    full: int
    """Of them; one more is its last, which is not."""
    names: list[bytes]

    @property
    def here(self) -> list[int]:
        """Those on the device."""
        return [block for block in self.blocks if block is not None]


class Scheduler:
    """Owns the queue, the running set and the block pool."""

    def __init__(self, pool: BlockPool, limits: StepLimits, quotas: Quotas | None = None) -> None:
        self.pool = pool
        self.limits = limits
        self.quotas = Quotas({}, pool.total) if quotas is None else quotas
        self.waiting: deque[Sequence] = deque()
        self.fetching: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemption_count = 0
        self.counters = Counters()
        self.places = Places(limits.max_running, self.counters, limits.max_batched_tokens)
        self._preemption = Preemption(
            pool,
            self.quotas,
            self.counters,
            self.running,
            self.fetching,
            limits.max_running,
            limits.watermark,
        )
        self._under_way = UnderWay(limits.block_tokens, limits.prefix_cache)
        self.giving_way = GivingWay(self.places, self.running, self._preemption.turn)
        self._ageing = Ageing()
        self._held: set[Sequence] = set()
        self._oversized: set[Sequence] = set()  # they need more than their tenant may hold now
        self.cache_queries = 0
        """Prompt tokens of all that joined first."""
        self.cache_hits = 0
        """Those of them that were in the cache."""

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that the pool can hold alone."""
        return self.pool.total * self.limits.block_tokens

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting and not self.fetching

    def add(self, sequence: Sequence, *, admitted: bool = False) -> None:
        """Raises ValueError for one that could never run. `admitted`: it was told that it could, maybe under other quotas."""
        if not sequence.tokens:
            raise ValueError("a sequence needs at least one token")
        if sequence.max_total > self.capacity_tokens:
            raise ValueError(
                f"a sequence of up to {sequence.max_total} tokens does not fit the KV cache of "
                f"{self.capacity_tokens} tokens even alone"
            )
        most = self.quotas.limit(sequence.owner.tenant)
        if self._blocks_for(sequence.max_total) > most:
            if not admitted:
                raise ValueError(
                    f"a sequence of up to {sequence.max_total} tokens does not fit the {most * self.limits.block_tokens} "
                    "tokens of the KV cache that its tenant may hold"
                )
            self._oversized.add(sequence)
            self._keep()
        self.counters.join(sequence.owner)
        self.places.join(sequence.owner)
        self.waiting.append(sequence)

    def change_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """From the next step on; see `Quotas.change`."""
        self.quotas.change(quotas)
        known = (*self.waiting, *self.fetching, *self.running, *self._held)
        self._oversized = {
            s for s in known if self._blocks_for(s.max_total) > self.quotas.limit(s.owner.tenant)
        }
        self._keep()

    def _keep(self) -> None:
        needs: dict[str, int] = {}
        for sequence in self._oversized:
            tenant, need = sequence.owner.tenant, self._blocks_for(sequence.max_total)
            needs[tenant] = max(need, needs.get(tenant, 0))
        self.quotas.keep(needs)

    def forget(self) -> None:
        """Drops the prefix cache: the blocks' content is gone. Only while nothing runs or waits."""
        if not self.idle:
            raise RuntimeError("blocks are in use")
        self.pool = BlockPool(self.pool.total, self.limits.block_tokens, self.pool.host.total)
        self._preemption.pool = self.pool

    def copied(self, number: int) -> None:
        """All copies of earlier steps up to this number are done: who waited for them runs from the next step on."""
        self.pool.host.done(number)
        still: list[Sequence] = []
        for sequence in self.fetching:
            if sequence.arrives > number:
                still.append(sequence)
                continue
            for index in sequence.fetched:
                self.pool.name(sequence.blocks[index], sequence.names[index])
            sequence.fetched = ()
            sequence.state = State.RUNNING
            self.running.append(sequence)
        self.fetching[:] = still

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in any state (done or cancelled) and frees its blocks. Harmless twice."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state in (State.RUNNING, State.FETCHING):
            self._stop(sequence)
        if sequence.state is not State.FINISHED:
            self.counters.leave(sequence.owner)
        sequence.state = State.FINISHED
        self._release(sequence)
        self._held.discard(sequence)
        if sequence in self._oversized:
            self._oversized.remove(sequence)
            self._keep()

    def hold(self, sequence: Sequence) -> None:
        """Takes a running sequence out of the batch with its blocks, until `let_go` or `finish`."""
        self._stop(sequence)
        self._held.add(sequence)
        sequence.state = State.HELD

    def let_go(self, sequence: Sequence) -> None:
        """A held sequence runs on."""
        self._held.discard(sequence)
        sequence.state = State.RUNNING
        self.running.append(sequence)

    def may_hold(self, tenant: str, blocks: int) -> bool:
        """Whether so many blocks more can be held for a tenant's sequence that will come."""
        most = self.quotas.most(tenant)
        return (
            blocks <= self.pool.free - self._preemption.watermark()
            and self.pool.held[tenant] + blocks <= most
        )

    def plan(self, budget: int | None = None, guesses: Mapping[Sequence, Tokens[int]] = NO_GUESSES) -> Step:
        """The next step of at most `budget` tokens (default: the limit); nothing is computed until `commit`.

        What is left of the budget goes to `guesses` of decoding sequences, for which nobody waits or is preempted.
        """
        budget = self.limits.max_batched_tokens if budget is None else budget
        counts: dict[Sequence, int] = {}
        preempted: list[Sequence] = []
        joined: list[Sequence] = []
        self._under_way.begin(self.running)
        self.giving_way.begin()
        for batch in (False, True):
            budget = self._fill(batch, budget, counts, joined, preempted)
        self.giving_way.end(counts)
        joined = [s for s in joined if s.state is not State.WAITING]
        chunks = [Chunk(s, s.computed, n) for s, n in counts.items()]
        if not preempted:
            decoding = [s for s in self.running if s.missing == 1 and counts.get(s) == 1]
            chunks += self._guessed(decoding, budget, guesses)
        self.pool.copy_ahead()
        moves, waits_for = self.pool.take_moves()
        return Step(tuple(chunks), tuple(joined), tuple(preempted), moves, waits_for)

    def commit(self, step: Step, sampled: dict[Sequence, int]) -> None:
        """The step has run: its tokens are in the cache, and `sampled` follow. Guesses are not (`accept`)."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.state is not State.RUNNING or chunk.guess is not None:
                continue
            sequence.computed += chunk.count
            self._charge_prompt(sequence)
            token = sampled.get(sequence)
            if token is not None:
                sequence.tokens.append(token)
                self.counters.charge(sequence.owner, OUTPUT)
            if self.limits.prefix_cache:
                self._name_blocks(sequence)

    def accept(self, sequence: Sequence, token: int) -> None:
        """The sequence's last token is what was guessed, so that it is in the cache, and `token` follows."""
        sequence.computed += 1
        sequence.tokens.append(token)
        self.counters.charge(sequence.owner, OUTPUT)
        if self.limits.prefix_cache:
            self._name_blocks(sequence)

    def roll_back(self, sequence: Sequence) -> None:
        """Takes back the blocks of the guesses that were not accepted."""
        kept = self._blocks_for(sequence.computed)
        self.pool.give_back(sequence.blocks[kept:])
        del sequence.blocks[kept:]

    def room(self, sequence: Sequence) -> int:
        """For so many guesses behind its tokens there are blocks, for which nobody has to wait."""
        tenant = sequence.owner.tenant
        spare = min(
            self.pool.free - self._preemption.watermark(),
            self.quotas.most(tenant) - self.pool.held[tenant],
        )
        blocks = max(0, spare) + len(sequence.blocks)
        return max(0, blocks * self.limits.block_tokens - len(sequence.tokens))

    # -- inside -------------------------------------------------------------------------------

    def _fill(
        self,
        batch: bool,
        budget: int,
        counts: dict[Sequence, int],
        joined: list[Sequence],
        preempted: list[Sequence],
    ) -> int:
        """Chunks of batch work, or of all else, which goes before it. Returns the budget that is left."""
        resting = [] if batch else self.giving_way.resting(self.waiting, budget)
        kept = set(resting)
        own = [s for s in self.running if s.owner.batch is batch and s not in kept]
        decoding = [s for s in own if s.missing == 1]
        catching_up = sorted(
            (s for s in own if s.missing > 1), key=partial(self.giving_way.order, budget=budget)
        )
        for sequence in decoding + catching_up:
            if sequence.missing > 1 and not (
                self.giving_way.ends_soon(sequence, budget) or self._is_pressed(preempted, batch)
            ):
                before = self.counters.of(sequence.owner)  # those who are owed more go before it
                budget -= self._join(batch, counts, budget, joined, preempted, before)
            budget = self._give(sequence, budget, counts, preempted)
        if not self._is_pressed(preempted, batch):
            budget -= self._join(batch, counts, budget, joined, preempted)
        if self.giving_way.is_short:
            return 0
        for sequence in resting:
            budget = self._give(sequence, budget, counts, preempted)
        return budget

    def _give(
        self, sequence: Sequence, budget: int, counts: dict[Sequence, int], preempted: list[Sequence]
    ) -> int:
        """A running sequence gets what it may have of the step. Returns the budget that is left."""
        if sequence.state is not State.RUNNING or budget < 1:
            return budget  # preempted a moment ago for an older one, or the step is full
        if sequence.missing > 1:
            self._adopt(sequence)
            if self._is_under_way(sequence, sequence.computed):
                return budget
        count = min(sequence.missing, budget, self.giving_way.most_tokens(sequence))
        if count < 1 or len(counts) >= self.limits.max_running:
            return budget
        budget += self._make_room(sequence, sequence.computed + count, counts, preempted)
        if sequence.state is State.RUNNING:
            self.giving_way.gets(sequence)
            counts[sequence] = count
            self._under_way.gets(sequence, count)
            budget -= count
        return budget

    @staticmethod
    def _is_pressed(preempted: list[Sequence], batch: bool) -> bool:
        """Whether somebody gave way in this step already, so that nobody joins: batch work may for the others."""
        return any(batch or not victim.owner.batch for victim in preempted)

    def _guessed(
        self, decoding: list[Sequence], budget: int, guesses: Mapping[Sequence, Tokens[int]]
    ) -> list[Chunk]:
        """Chunks for guesses, as far as budget and free blocks reach."""
        chunks: list[Chunk] = []
        for sequence in decoding:
            first, wanted = len(sequence.tokens), guesses.get(sequence, ())
            count = min(len(wanted), budget, self.room(sequence))
            if count < 1:
                continue
            need = self._blocks_for(first + count) - len(sequence.blocks)
            sequence.blocks += self.pool.take(max(0, need), sequence.owner.tenant)
            chunks += [Chunk(sequence, first + i, 1, wanted[i]) for i in range(count)]
            budget -= count
        return chunks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    def _make_room(
        self, sequence: Sequence, tokens: int, counts: dict[Sequence, int], preempted: list[Sequence]
    ) -> int:
        """Gives `sequence` blocks for `tokens`, preempting others. Returns budget won back."""
        won_back = 0
        need = self._blocks_for(tokens) - len(sequence.blocks)
        while need > 0 and not self._preemption.has_room(sequence, need):
            victim = self._preemption.victim(sequence, need)
            won_back += counts.pop(victim, 0)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return won_back
        if need > 0:
            sequence.blocks += self.pool.take(need, sequence.owner.tenant)
        return won_back

    def _wished(self, turn: Sequence, passed: Collection[Sequence]) -> Sequence:
        """The waiting sequence that the owner wants in this turn."""
        return self._ageing.choose([s for s in self.waiting if s.owner.same(turn.owner) and s not in passed])

    def _charge_prompt(self, sequence: Sequence) -> None:
        """Prompt tokens computed for the first time."""
        reached = min(sequence.computed, sequence.prompt_len)
        if reached > sequence.charged:
            self.counters.charge(sequence.owner, PROMPT * (reached - sequence.charged))
            sequence.charged = reached

    def _name_blocks(self, sequence: Sequence) -> None:
        """Lets others find the blocks that are full now."""
        full = sequence.computed // self.limits.block_tokens
        if full > sequence.named:
            extend_names(sequence.names, sequence.tokens, self.limits.block_tokens, sequence.salt)
            for index in range(sequence.named, full):
                self.pool.name(sequence.blocks[index], sequence.names[index])
            sequence.named = full

    def _lookup(self, sequence: Sequence, first: int = 0) -> list[bytes]:
        """Names of the blocks from `first` on that may come from the cache: not the one of the last token, and none
        of a prompt that is to be explained."""
        if sequence.is_explaining or not (self.limits.prefix_cache or sequence.has_begun):
            return []
        size = self.limits.block_tokens
        extend_names(sequence.names, sequence.tokens, size, sequence.salt)
        return sequence.names[first : (len(sequence.tokens) - 1) // size]

    def _adopt(self, sequence: Sequence) -> None:
        """Takes the blocks that others have computed since it joined, for its own that are not full."""
        first = sequence.computed // self.limits.block_tokens
        found = self.pool.find(self._lookup(sequence, first))
        if not found:
            return
        for block in found:
            self.pool.share(block, sequence.owner.tenant)
        end = first + len(found)
        own, sequence.blocks[first:end] = sequence.blocks[first:end], found
        self.pool.give_back(own)
        before, sequence.computed, sequence.named = sequence.computed, end * self.limits.block_tokens, end
        self._count_cached(sequence, before)

    def _is_under_way(self, sequence: Sequence, computed: int) -> bool:
        """Whether somebody computes the block behind so many tokens of the sequence already."""
        wanted = self._lookup(sequence, computed // self.limits.block_tokens)[:1]
        return bool(wanted) and self._under_way.has(wanted[0], sequence)

    def _stop(self, sequence: Sequence) -> None:
        """It runs, or fetches, no longer."""
        (self.running if sequence.state is State.RUNNING else self.fetching).remove(sequence)
        sequence.fetched = ()

    def _preempt(self, victim: Sequence) -> None:
        if victim.state is State.RUNNING and self.pool.host.total:
            self._park(victim)
        self._stop(victim)
        self._release(victim)
        victim.state = State.WAITING
        victim.computed = victim.named = 0
        victim.preemptions += 1
        self.preemption_count += 1
        position = next((i for i, s in enumerate(self.waiting) if s.order > victim.order), len(self.waiting))
        self.waiting.insert(position, victim)

    def _park(self, victim: Sequence) -> None:
        """Names what its blocks hold, also the last one, so that it finds them again when it comes back."""
        self._name_blocks(victim)
        full, part = divmod(victim.computed, self.limits.block_tokens)
        if part and victim.missing == 1 and not victim.is_explaining:
            tokens = victim.tokens[victim.computed - part : victim.computed]
            self.pool.name(victim.blocks[full], name_of_part(victim.names[:full], tokens, victim.salt), part)

    def _join(
        self,
        batch: bool,
        counts: dict[Sequence, int],
        budget: int,
        joined: list[Sequence],
        preempted: list[Sequence],
        before: tuple[float, float] | None = None,
    ) -> int:
        """Lets waiting sequences of batch work in, or all others, only those with a counter under `before`; the budget
        they take."""
        room = self._preemption
        taken = 0
        passed: set[Sequence] = set()
        refused: set[str] = set()
        """Tenants that have no room for the next of theirs."""
        full = False
        """Only guarantees still count."""
        while budget > taken and len(passed) < MOST_PASSED:
            able = (
                s
                for s in self.waiting
                if s.owner.batch is batch and s not in passed and s.owner.tenant not in refused
            )
            turn = min((s for s in able if not full or room.is_owed(s, 1)), key=room.turn, default=None)
            if turn is None or (before is not None and not self.counters.of(turn.owner) < before):
                break
            places = room.in_batch - (0 if batch else len(room.batch_work))
            if not self.giving_way.may_take(turn.owner, places):
                break
            head = self._wished(turn, passed)
            found = self._locate(head)
            if self._is_under_way(head, found.full * self.limits.block_tokens):
                passed.add(head)
                continue
            need, grows = self._needs(head, found)
            if not batch and room.displaces(head, grows):
                taken -= self._preempt_for(partial(self._who_gives, room.displaced, head), counts, preempted)
                found = self._locate(head)
                need, grows = self._needs(head, found)
            if not room.may_join(head, grows):
                refused.add(head.owner.tenant)
                continue
            if full or grows > self.pool.free - room.watermark(batch):
                full = True
                if batch or not room.is_owed(head, grows + self.pool.foreign(found.here, head.owner.tenant)):
                    refused.add(head.owner.tenant)
                    continue
                taken -= self._preempt_for(partial(self._who_gives, room.reclaimed, head), counts, preempted)
                found = self._locate(head)
                need, grows = self._needs(head, found)
            if grows > self.pool.free:  # nobody gives more
                refused.add(head.owner.tenant)
                continue
            self.waiting.remove(head)
            self._ageing.begins(head, self.waiting)
            # As if they had come in this order: no owner wins a turn by its priorities.
            head.order, turn.order = turn.order, head.order
            self._start(head, found, need)
            joined.append(head)
            if len(counts) >= self.limits.max_running:
                taken -= self.giving_way.rest(counts)
            if head.state is State.RUNNING and len(counts) < self.limits.max_running:
                counts[head] = min(head.missing, budget - taken, self.giving_way.most_tokens(head))
                self.giving_way.gets(head)
                self._under_way.gets(head, counts[head])
                taken += counts[head]
        return taken

    def _needs(self, head: Sequence, found: _Found) -> tuple[int, int]:
        """How many fresh blocks the sequence takes when it joins, and how many fewer are free then."""
        need = self._blocks_for(len(head.tokens)) - len(found.here)
        return need, need + self.pool.idle(found.here)

    def _who_gives(
        self, choose: Callable[[Sequence, int], Sequence | None], head: Sequence
    ) -> Sequence | None:
        """Who is preempted next for the sequence, by what it needs now: blocks that it finds may be those of a victim, and are
        free once that has gone."""
        return choose(head, self._needs(head, self._locate(head))[1])

    def _preempt_for(
        self, choose: Callable[[], Sequence | None], counts: dict[Sequence, int], preempted: list[Sequence]
    ) -> int:
        """Preempts whom `choose` names, until it names nobody. Returns budget won back."""
        won_back = 0
        while (victim := choose()) is not None:
            won_back += counts.pop(victim, 0)
            self._preempt(victim)
            preempted.append(victim)
        return won_back

    def _locate(self, head: Sequence) -> _Found:
        """What is known of its blocks: the full ones, and of one that has run before also the last."""
        names = self._lookup(head)
        found, size = self.pool.locate(names), self.limits.block_tokens
        full, tokens, part = len(found), head.tokens, None
        open_at = (len(tokens) - 1) // size * size
        if head.has_begun and full * size == open_at < len(tokens) - 1 and not head.is_explaining:
            part = name_of_part(names[:full], tokens[open_at:-1], head.salt)
            found += self.pool.locate([part])
        return _Found(found, full, names[:full] if part is None else [*names[:full], part])

    def _start(self, head: Sequence, found: _Found, need: int) -> None:
        """The sequence gets its blocks, and runs where all that was found is on the device."""
        size, tenant, pool = self.limits.block_tokens, head.owner.tenant, self.pool
        for index, block in enumerate(found.blocks):
            if block is not None:
                (pool.share if index < found.full else pool.claim)(block, tenant)
        away = [index for index, block in enumerate(found.blocks) if block is None]
        pool.host.keep(found.names[index] for index in away)
        fresh = pool.take(need, tenant)
        places = iter(fresh)
        head.blocks = [next(places) if block is None else block for block in found.blocks] + list(places)
        for index in away:
            head.arrives = pool.host.fetch(found.names[index], head.blocks[index])
        head.named = found.full
        head.computed = min(len(found.blocks) * size, len(head.tokens) - 1)
        head.fetched = tuple(index for index in away if index < found.full)
        head.state = State.FETCHING if away else State.RUNNING
        (self.fetching if away else self.running).append(head)
        if not head.preemptions and not head.resumed:
            self.cache_queries += head.prompt_len
        self._count_cached(head, 0)

    def _count_cached(self, sequence: Sequence, before: int) -> None:
        """Counts and charges the tokens that came from the cache behind the first `before`."""
        reached = min(sequence.computed, sequence.prompt_len)
        if not sequence.preemptions and not sequence.resumed:
            sequence.cached += max(0, reached - before)
            self.cache_hits += max(0, reached - before)
        if reached > sequence.charged:
            self.counters.charge(sequence.owner, CACHED * (reached - sequence.charged))
            sequence.charged = reached

    def _release(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
