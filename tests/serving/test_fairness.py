"""The scheduler with several tenants and a prefix cache, without a model: fair shares, and never a wrong block."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from busbar.scheduler.fit.chunks import CHUNK_STEP_FRACTION
from busbar.scheduler.fit.online import TRUSTED_STEPS, OnlineStepModel
from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.budget import step_budget
from busbar.workloads.serving.fairness import Counters, Owner, Places
from busbar.workloads.serving.giving_way import MOST_SKIPPED, PROMPT_PART, GivingWay
from busbar.workloads.serving.prefix import extend_names, salt_of
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence, State, Step
from busbar.workloads.serving.under_way import PATIENCE, UnderWay

SIZE = 4


class Memory:
    """The true content of each block: written as the runner writes, checked as attention reads."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[tuple[int, int], int] = {}

    def step(self, token: int) -> Step:
        """One step; every sequence that reaches its end samples `token`."""
        step = self.scheduler.plan()
        for chunk in step.chunks:
            tokens, blocks = chunk.sequence.tokens, chunk.sequence.blocks
            for position in range(chunk.start, chunk.start + chunk.count):
                self.slots[blocks[position // SIZE], position % SIZE] = tokens[position]
        for chunk in step.chunks:  # after all writes: no sequence may have written into another's context
            sequence = chunk.sequence
            seen = range(chunk.start + chunk.count)
            found = [self.slots[sequence.blocks[p // SIZE], p % SIZE] for p in seen]
            assert found == sequence.tokens[: len(found)]
        sampled = {c.sequence: token for c in step.chunks if c.samples}
        self.scheduler.commit(step, sampled)
        for done in [s for s in sampled if len(s.tokens) >= s.max_total]:
            self.scheduler.finish(done)
        return step


def make(blocks: int = 64, budget: int = 16, running: int = 8, cache: bool = True) -> Scheduler:
    return Scheduler(BlockPool(blocks), StepLimits(SIZE, budget, running, prefix_cache=cache))


def sequence(order: int, tokens: list[int], output: int, tenant: str = "", key: str = "") -> Sequence:
    owner = Owner(tenant, key)
    return Sequence(order, tokens, len(tokens) + output, owner=owner, salt=salt_of(tenant))


PROMPT = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=14)


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.integers(7, 16),
    budget=st.integers(1, 20),
    arrivals=st.lists(
        st.tuples(PROMPT, st.integers(1, 10), st.sampled_from("ab"), st.integers(0, 20)),
        min_size=1,
        max_size=10,
    ),
    cancels=st.dictionaries(st.integers(0, 40), st.integers(0, 9), max_size=3),
)
def test_shared_blocks_hold_what_each_sequence_would_have_computed(
    blocks: int,
    budget: int,
    arrivals: list[tuple[list[int], int, str, int]],
    cancels: dict[int, int],
) -> None:
    scheduler = make(blocks, budget, 4)
    memory = Memory(scheduler)
    todo = [sequence(i, list(p), n, tenant) for i, (p, n, tenant, _) in enumerate(arrivals)]
    starts = sorted((delay, i) for i, (*_, delay) in enumerate(arrivals))
    for tick in range(3000):
        while starts and starts[0][0] <= tick:
            scheduler.add(todo[starts.pop(0)[1]])
        victim = cancels.get(tick)
        if victim is not None and victim < len(todo) and victim not in {i for _, i in starts}:
            scheduler.finish(todo[victim])
        if scheduler.idle and not starts:
            break
        step = memory.step(1 + tick % 2)
        assert step.token_count <= budget
        held = Counter(block for s in scheduler.running for block in s.blocks)
        assert all(scheduler.pool.holders(block) == count for block, count in held.items())
        assert scheduler.pool.used == len(held)
    assert scheduler.idle
    assert scheduler.pool.free == scheduler.pool.total
    assert all(s.state is State.FINISHED for s in todo)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    budget=st.integers(1, 200),
    ends=st.lists(
        st.tuples(
            st.integers(0, 1), st.lists(st.integers(3, 9), min_size=1, max_size=9), st.sampled_from("xyz")
        ),
        min_size=1,
        max_size=12,
    ),
    delays=st.lists(st.integers(0, 6), min_size=12, max_size=12),
)
@example(
    1, [(0, [3], "x"), (0, [3], "y")], [0] * 12
)  # in steps of one token, two owners take turns within a block
def test_equal_beginnings_are_computed_once_whoever_asks_and_whenever(
    budget: int, ends: list[tuple[int, list[int], str]], delays: list[int]
) -> None:
    """With room for all: apart from parts of blocks, each block of equal tokens is computed once."""
    beginnings = ([1] * 62, [2] * 45)
    scheduler = make(blocks=300, budget=budget, running=12)
    memory = Memory(scheduler)
    todo = [sequence(i, beginnings[b] + end, 2, key=key) for i, (b, end, key) in enumerate(ends)]
    prompts = [list(s.tokens) for s in todo]
    starts = sorted(zip(delays, range(len(todo)), strict=False))
    computed, tick = 0, 0
    while starts or not scheduler.idle:
        while starts and starts[0][0] <= tick:
            scheduler.add(todo[starts.pop(0)[1]])
        step = memory.step(0)
        computed += step.token_count - sum(c.start >= c.sequence.prompt_len for c in step.chunks)
        tick += 1
    blocks = {tuple(p[: (i + 1) * SIZE]) for p in prompts for i in range(len(p) // SIZE)}
    tails = sum(len(p) % SIZE for p in prompts)
    whole = {tuple(p) for p in prompts if len(p) % SIZE == 0}
    again = sum(tuple(p) in whole for p in prompts) * SIZE  # the block of the last token is never taken over
    assert computed <= SIZE * len(blocks) + tails + again + (SIZE - 1) * len(prompts)
    assert scheduler.cache_queries == sum(map(len, prompts))
    assert scheduler.cache_hits == sum(s.cached for s in todo)


def test_equal_prompts_that_come_together_wait_a_step_for_one_of_them() -> None:
    scheduler = make(budget=100)
    memory = Memory(scheduler)
    for order in range(4):
        scheduler.add(sequence(order, list(range(9)), 1))
    scheduler.add(sequence(4, [70] * 5, 1))
    assert [(c.sequence.order, c.count) for c in memory.step(5).chunks] == [(0, 9), (4, 5)]
    assert [(c.sequence.order, c.start, c.count) for c in memory.step(5).chunks] == [
        (1, 8, 1),
        (2, 8, 1),
        (3, 8, 1),
    ]


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_two_keys_that_take_turns_at_one_prompt_share_the_work(budget: int) -> None:
    scheduler = make(budget=budget)
    memory = Memory(scheduler)
    both = [sequence(order, [*range(60), order], 1, key=f"k{order}") for order in range(2)]
    for each in both:
        scheduler.add(each)
    computed = 0
    while not scheduler.idle:
        computed += memory.step(5).token_count
    assert computed == 60 + 2
    assert sum(each.cached for each in both) == 60
    assert min(each.cached for each in both) > 0


def within_a_block(order: int, computed: int, stepped: int = 0, batch: bool = False) -> Sequence:
    """Of a prompt of two blocks and a half, so many tokens are computed."""
    made = Sequence(
        order, [7] * 10, 12, owner=Owner("", "k", batch=batch), computed=computed, stepped=stepped
    )
    made.names, made.state = [b"first", b"second"], State.RUNNING
    return made


def test_of_those_within_one_block_the_furthest_goes_on_and_nobody_waits_for_whom_nothing_is_computed() -> (
    None
):
    ahead, behind, third = within_a_block(1, 3), within_a_block(0, 1), within_a_block(2, 0)
    under_way = UnderWay(SIZE, on=True)
    under_way.begin([behind, ahead])
    assert [under_way.has(b"first", each) for each in (ahead, behind, third)] == [False, True, True]
    assert not under_way.has(b"second", third)
    for _ in range(PATIENCE - 1):
        under_way.begin([ahead])
    assert under_way.has(b"first", third)
    under_way.begin([ahead])
    assert not under_way.has(b"first", third), "it had no token for long"
    under_way.gets(ahead, 1)
    under_way.begin([ahead])
    assert under_way.has(b"first", third)
    ahead.state = State.WAITING
    assert not under_way.has(b"first", third), "it was preempted in this step"


def test_only_batch_work_waits_for_batch_work() -> None:
    under_way = UnderWay(SIZE, on=True)
    under_way.begin([within_a_block(0, 3, batch=True)])
    assert under_way.has(b"first", within_a_block(1, 0, batch=True))
    assert not under_way.has(b"first", within_a_block(1, 0))


def test_a_prompt_that_begins_alike_computes_only_its_own_end() -> None:
    scheduler = make()
    memory = Memory(scheduler)
    prefix = list(range(12))
    for order, end in enumerate(([90], [91, 92])):
        scheduler.add(sequence(order, prefix + end, 1))
        step = memory.step(5)
        assert [c.count for c in step.chunks] == [[13], [2]][order]
    assert (scheduler.cache_queries, scheduler.cache_hits) == (27, 12)


def test_the_last_token_of_a_prompt_is_computed_even_where_all_of_it_is_cached() -> None:
    scheduler = make()
    memory = Memory(scheduler)
    for order in range(2):
        scheduler.add(sequence(order, list(range(8)), 1))
        step = memory.step(5)
    assert [(c.start, c.count) for c in step.chunks] == [(4, 4)]


def test_another_tenant_or_salt_finds_nothing() -> None:
    scheduler = make()
    memory = Memory(scheduler)
    for order, tenant in enumerate("aba"):
        scheduler.add(sequence(order, list(range(9)), 1, tenant))
        counts = [c.count for c in memory.step(5).chunks]
        assert counts == [[9], [9], [1]][order]
    assert salt_of("a", "bc") != salt_of("ab", "c")


def test_a_block_of_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    scheduler = make(blocks=4)
    memory = Memory(scheduler)
    scheduler.add(sequence(0, list(range(12)), 1))
    memory.step(5)
    scheduler.add(sequence(1, [50] * 7, 1))  # two blocks: one was free, one must be evicted
    memory.step(5)
    scheduler.add(sequence(2, list(range(12)), 1))
    assert [c.start for c in memory.step(5).chunks] == [8]


def test_a_preempted_sequence_finds_what_it_had_computed() -> None:
    scheduler = make(blocks=5, budget=64)
    memory = Memory(scheduler)
    scheduler.add(sequence(0, [1] * 7, 12))
    memory.step(5)
    scheduler.add(sequence(1, [2] * 5, 8))
    while not memory.step(5).preempted:
        pass
    before = scheduler.counters.of(Owner())
    while scheduler.waiting:
        memory.step(5)
    assert scheduler.counters.of(Owner()) > before


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_names_are_equal_exactly_as_far_as_the_tokens_are(one: list[int], other: list[int]) -> None:
    names: list[list[bytes]] = [[], []]
    for found, tokens in zip(names, (one, other), strict=True):
        extend_names(found, tokens, 3, b"salt")
        assert len(found) == len(tokens) // 3
    for index, (a, b) in enumerate(zip(*names, strict=False)):
        assert (a == b) == (one[: 3 * index + 3] == other[: 3 * index + 3])


# -- turns ------------------------------------------------------------------------------------------


def work_done(scheduler: Scheduler, backlog: dict[Owner, int], steps: int) -> Counter[str]:
    """Tokens served to each tenant while each has more requests than fit."""
    order = 0
    waiting: Counter[Owner] = Counter()
    done: Counter[str] = Counter()
    for _ in range(steps):
        for owner, count in backlog.items():
            waiting[owner] = sum(s.owner == owner for s in (*scheduler.waiting, *scheduler.running))
            for _ in range(count - waiting[owner]):
                scheduler.add(Sequence(order, [order % 7] * 8, 16, owner=owner, salt=b"x"))
                order += 1
        step = scheduler.plan()
        sampled = {c.sequence: 7 for c in step.chunks if c.samples}
        for chunk in step.chunks:
            done[chunk.sequence.owner.tenant] += chunk.count + (2 if chunk.samples else 0)
        scheduler.commit(step, sampled)
        for ended in [s for s in sampled if len(s.tokens) >= s.max_total]:
            scheduler.finish(ended)
    return done


def test_a_tenant_with_ten_times_the_requests_gets_no_more_than_the_others() -> None:
    scheduler = make(blocks=200, budget=32, running=8, cache=False)
    done = work_done(scheduler, {Owner("greedy"): 40} | {Owner(f"t{i}"): 4 for i in range(4)}, 1500)
    assert max(done.values()) / min(done.values()) < 1.05


def test_ten_keys_of_one_tenant_get_one_tenants_share_and_share_it_evenly() -> None:
    scheduler = make(blocks=200, budget=32, running=8, cache=False)
    keys = {Owner("many", f"k{i}"): 4 for i in range(10)}
    done = work_done(scheduler, {**keys, Owner("one", "k"): 8}, 1500)
    assert done["many"] / done["one"] == pytest.approx(1.0, abs=0.06)
    values = [scheduler.counters.of(owner)[1] for owner in keys]
    assert max(values) - min(values) < 200


def crowd(output: int = 100) -> tuple[Scheduler, Memory]:
    """A batch whose 32 places are all taken by a key that asks for more than another one."""
    scheduler = make(blocks=400, budget=64, running=32, cache=False)
    scheduler.add(sequence(0, [1] * 4, 1, key="light"))
    for order in range(1, 80):
        scheduler.add(sequence(order, [1] * 4, output, key="heavy"))
    memory = Memory(scheduler)
    for _ in range(10):
        memory.step(5)
    assert len(scheduler.running) == 32
    return scheduler, memory


def test_a_key_joins_at_once_while_another_has_all_places_and_one_of_that_rests() -> None:
    scheduler, memory = crowd()
    again = sequence(80, [1] * 4, 3, key="light")
    scheduler.add(again)
    step = memory.step(5)
    assert step.joined == (again,)
    assert not step.preempted
    assert len(scheduler.running) == 33
    assert len(step.chunks) == 32
    assert sum(s.rested for s in scheduler.running) == 1
    for _ in range(2):
        step = memory.step(5)
        assert again in {c.sequence for c in step.chunks}
        assert len(step.chunks) == 32
    assert sum(s.rested for s in scheduler.running) == 3
    assert max(s.rested for s in scheduler.running) == 1, "not one of them rests for all"
    assert len(memory.step(5).chunks) == 32
    assert len(scheduler.running) == 32


def test_no_more_rest_than_a_quarter_of_the_places() -> None:
    scheduler, memory = crowd()
    for order in range(80, 92):
        scheduler.add(sequence(order, [1] * 4, 50, key="light"))
    for _ in range(10):
        step = memory.step(5)
        assert len(step.chunks) <= 32
    assert len(scheduler.running) == 32 + scheduler.places.most_resting == 40


def test_a_prompt_of_a_key_that_asks_for_more_gets_a_part_and_nothing_beside_anothers() -> None:
    scheduler = make(blocks=2000, budget=512, running=8, cache=False)
    scheduler.add(sequence(0, [1] * 4, 1, key="light"))
    memory = Memory(scheduler)
    memory.step(5)
    long = [sequence(order, list(range(400)), 40, key="heavy") for order in range(1, 32)]
    for each in long:
        scheduler.add(each)
    memory.step(5)
    assert memory.step(5).token_count > 100
    counts = {c.count for c in memory.step(5).chunks}
    assert max(counts) <= PROMPT_PART
    light = sequence(40, [1] * 300, 2, key="light")
    scheduler.add(light)
    assert [c.sequence for c in memory.step(5).chunks if c.count > 1] == [light]
    assert any(c.count == PROMPT_PART for c in memory.step(5).chunks)


def test_prompts_of_a_key_that_asks_for_more_go_on_beside_endless_prompts_of_others() -> None:
    scheduler = make(blocks=4000, budget=64, running=8, cache=False)
    scheduler.add(sequence(0, [1] * 4, 1, key="light"))
    memory = Memory(scheduler)
    memory.step(5)
    for order in range(1, 20):
        scheduler.add(sequence(order, list(range(400)), 40, key="heavy"))
    memory.step(5)
    idle = 0
    for order in range(30, 90):
        scheduler.add(sequence(order, [1] * 30, 1, key="light"))
        step = memory.step(5)
        heavy = any(c.sequence.owner.key == "heavy" for c in step.chunks)
        idle = 0 if heavy else idle + 1
        assert idle <= MOST_SKIPPED


def test_a_key_that_asks_alone_gets_whole_steps() -> None:
    scheduler = make(blocks=2000, budget=512, running=8, cache=False)
    for order in range(20):
        scheduler.add(sequence(order, list(range(400)), 40, key="heavy"))
    assert [c.count for c in scheduler.plan().chunks] == [400, 112]


@pytest.mark.parametrize("keys", [["only"], ["one", "other"]])
def test_keys_that_were_served_alike_take_all_places(keys: list[str]) -> None:
    scheduler = make(blocks=400, budget=64, running=32, cache=False)
    for order in range(60):
        scheduler.add(sequence(order, [1] * 4, 100, key=keys[order % len(keys)]))
    memory = Memory(scheduler)
    for _ in range(10):
        memory.step(5)
    assert len(scheduler.running) == 32


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    total=st.integers(1, 64),
    asked=st.lists(
        st.tuples(st.sampled_from([Owner("a", "x"), Owner("a", "y"), Owner("b", "z")]), st.integers(0, 9)),
        min_size=1,
        max_size=80,
    ),
)
def test_no_more_places_are_given_than_there_are_and_an_empty_batch_takes_anybody(
    total: int, asked: list[tuple[Owner, int]]
) -> None:
    counters = Counters()
    places, running = Places(total, counters), 0
    giving_way = GivingWay(places, [], lambda s: (counters.of(s.owner), s.order))
    for owner, work in asked:
        counters.join(owner)
        places.join(owner)
        counters.charge(owner, work)
        giving_way.begin()
        assert giving_way.may_take(owner, 0)
        running += giving_way.may_take(owner, running)
    assert running == min(len(asked), total)


def test_a_weight_of_three_gets_three_times_as_much() -> None:
    scheduler = make(blocks=200, budget=32, running=8, cache=False)
    done = work_done(scheduler, {Owner("a", weight=3.0): 16, Owner("b"): 16}, 1500)
    assert done["a"] / done["b"] == pytest.approx(3.0, rel=0.1)


def test_an_idle_tenant_gains_no_credit() -> None:
    counters = Counters()
    busy, idle = Owner("busy"), Owner("idle")
    counters.join(idle)
    counters.leave(idle)
    counters.join(busy)
    counters.charge(busy, 1000.0)
    counters.join(idle)
    assert counters.of(idle)[0] == pytest.approx(1000.0)
    assert counters.of(idle) < counters.of(busy)


def test_a_short_prompt_of_another_tenant_does_not_wait_for_a_long_one() -> None:
    scheduler = make(blocks=200, budget=16, cache=False)
    long = sequence(0, list(range(400)), 1, "long")
    scheduler.add(long)
    scheduler.commit(scheduler.plan(), {})
    short = sequence(1, list(range(10)), 1, "short")
    scheduler.add(short)
    assert {c.sequence: c.count for c in scheduler.plan().chunks} == {short: 10, long: 6}


def test_computing_again_after_a_preemption_is_charged_to_nobody() -> None:
    """At the end the two counters equal the prompt tokens and twice the output tokens."""
    scheduler = make(blocks=5, budget=64, cache=False)
    memory = Memory(scheduler)
    both = [sequence(0, [1] * 7, 12, "a"), sequence(1, [2] * 5, 8, "b")]
    keep = [sequence(2, [3], 1, "a"), sequence(3, [3], 1, "b")]
    for s in both:
        scheduler.add(s)
    for s in keep:  # so that the counters are not reset
        scheduler.counters.join(s.owner)
    while not scheduler.idle:
        memory.step(5)
    assert scheduler.preemption_count > 0
    assert scheduler.counters.of(both[0].owner)[0] == 7 + 2 * 12
    assert scheduler.counters.of(both[1].owner)[0] == 5 + 2 * 8


# -- the promised step time ------------------------------------------------------------------------------------


def taught(base: float, each: float, context: float, prompt: float) -> OnlineStepModel:
    model = OnlineStepModel()
    for i in range(400):
        decoding, tokens, chunk = i % 16, (i * 37) % 4000, (i * 13) % 500
        model.learn(
            decoding, tokens, chunk, base + each * decoding + context * tokens / 1000 + prompt * chunk
        )
    return model


@settings(max_examples=60, deadline=None)
@given(st.floats(0.001, 0.02), st.floats(0.0001, 0.002), st.floats(0.00005, 0.0005), st.floats(0.02, 0.2))
def test_a_step_of_the_budget_keeps_the_promise_or_says_that_it_cannot(
    base: float, each: float, prompt: float, promise: float
) -> None:
    model = taught(base, each, 0.001, prompt)
    for decoding, tokens in ((1, 100), (8, 2000), (16, 4000)):
        budget = step_budget(model, promise, decoding, tokens, 32, 2048)
        took = base + each * decoding + 0.001 * tokens / 1000 + prompt * (budget.tokens - decoding)
        assert decoding < budget.tokens <= 2048
        assert budget.saturated or took <= promise * CHUNK_STEP_FRACTION * 1.02
        if budget.tokens < 2048 and not budget.saturated:  # and the budget is not too small
            assert took >= promise * CHUNK_STEP_FRACTION * 0.95 - prompt


def test_without_a_promise_or_without_knowledge_the_budget_is_the_constant() -> None:
    model = taught(0.01, 0.001, 0.001, 0.001)
    assert step_budget(model, None, 8, 1000, 32, 512).tokens == 512
    assert step_budget(model, 0.02, 0, 0, 32, 512).tokens == 512
    assert step_budget(OnlineStepModel(steps=TRUSTED_STEPS - 1), 0.02, 8, 1000, 32, 512).tokens == 512
