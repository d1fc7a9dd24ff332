"""Batch work gets what the others leave: nobody who waits for an answer is held up by it. Without a model."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.quota import Quota, Quotas
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence, State, Step

SIZE = 4
BATCH = Owner("night", "k", batch=True)


class Engine:
    """A scheduler that is stepped; token n of a sequence is n."""

    def __init__(
        self, blocks: int = 16, budget: int = 16, running: int = 4, quotas: dict[str, Quota] | None = None
    ) -> None:
        limits = StepLimits(
            block_tokens=SIZE, max_batched_tokens=budget, max_running=running, prefix_cache=True
        )
        self.scheduler = Scheduler(BlockPool(blocks, SIZE, 0), limits, Quotas(quotas or {}, blocks))
        self.first: dict[Sequence, int] = {}
        self.steps = 0

    def add(self, number: int, prompt: int, output: int, owner: Owner) -> Sequence:
        tokens = [1000 * number + i for i in range(prompt)]
        sequence = Sequence(number, tokens, prompt + output, owner=owner)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.plan()
        assert step.token_count <= self.scheduler.limits.max_batched_tokens
        assert len(step.chunks) <= self.scheduler.limits.max_running
        sampled = {c.sequence: len(c.sequence.tokens) for c in step.chunks if c.samples}
        self.scheduler.commit(step, sampled)
        self.steps += 1
        for sequence in sampled:
            self.first.setdefault(sequence, self.steps)
            if len(sequence.tokens) == sequence.max_total:
                self.scheduler.finish(sequence)
        return step

    def run(self) -> None:
        for _ in range(10_000):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("it does not come to an end")


def test_a_request_takes_place_and_blocks_of_batch_work_in_the_next_step() -> None:
    engine = Engine()
    for number in range(8):
        engine.add(number, 12, 4, BATCH)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.running
    asked = engine.add(100, 14, 2, Owner("day", "k"))
    step = engine.step()
    assert [(c.sequence.order, c.count) for c in step.chunks if not c.sequence.owner.batch] == [(100, 14)]
    assert engine.first[asked] == engine.steps
    engine.run()


def test_batch_work_fills_what_others_leave_of_a_step() -> None:
    engine = Engine(blocks=64)
    engine.add(1, 10, 20, Owner("day", "k"))
    engine.add(2, 30, 2, BATCH)
    step = engine.step()
    assert [(c.sequence.order, c.count) for c in step.chunks] == [(1, 10), (2, 6)]
    step = engine.step()
    assert [(c.sequence.order, c.count) for c in step.chunks] == [(1, 1), (2, 15)]


def test_batch_work_leaves_the_kept_places_free() -> None:
    engine = Engine(blocks=256, budget=256, running=16)
    for number in range(20):
        engine.add(number, 4, 8, BATCH)
    engine.step()
    assert len(engine.scheduler.running) == 14


def test_batch_work_takes_nothing_from_others_even_within_its_tenants_guarantee() -> None:
    engine = Engine(blocks=16, quotas={"night": Quota(0.5, 1.0)})
    first = engine.add(1, 20, 12, Owner("day", "k"))
    second = engine.add(2, 20, 12, Owner("day", "l"))
    work = engine.add(3, 20, 12, BATCH)
    engine.run()
    assert (first.preemptions, second.preemptions) == (0, 0)
    assert engine.first[work] > max(engine.first[first], engine.first[second])


def test_a_guarantee_in_a_full_cache_takes_the_place_of_batch_work_too() -> None:
    """The head's blocks are free but for the watermark, and batch work has the last place."""
    engine = Engine(blocks=16, running=2, quotas={"day": Quota(0.5, 1.0), "night": Quota(0.25, 1.0)})
    engine.add(1, 32, 8, Owner("other", "k"))
    engine.step()
    engine.step()
    work = engine.add(2, 4, 8, BATCH)
    engine.step()
    assert work.state is State.RUNNING
    asked = engine.add(3, 26, 2, Owner("day", "k"))
    for _ in range(3):
        engine.step()  # which asserts that there are no more than places
    assert engine.first[asked] <= engine.steps
    engine.run()


def test_what_a_keys_batch_work_was_served_costs_it_no_turn() -> None:
    engine = Engine(blocks=256, running=2)
    for number in range(4):
        engine.add(number, 12, 8, Owner("a", "k", batch=True))
    for _ in range(6):
        engine.step()
    engine.add(50, 8, 2, Owner("a", "k"))
    engine.add(51, 8, 2, Owner("b", "k"))
    engine.step()
    assert [s.order for s in engine.first if s.order >= 50] == [50, 51]


REQUEST = st.tuples(
    st.integers(0, 30),  # before which step it comes
    st.integers(1, 30),  # prompt
    st.integers(1, 10),  # output
    st.sampled_from(["a", "b"]),
)
Asked = tuple[int, int, int, str]


def replay(engine: Engine, people: list[Asked], work: list[Asked]) -> dict[int, list[tuple[int, int]]]:
    """By number of the step, what it computes for people; everything ends, and no block is left."""
    rows: dict[int, list[tuple[int, int]]] = {}
    added = [(at, n, p, o, Owner(who, "k")) for n, (at, p, o, who) in enumerate(people)]
    added += [(at, 50 + n, p, o, Owner(who, "k", batch=True)) for n, (at, p, o, who) in enumerate(work)]
    now = 0
    while now <= 30 or not engine.scheduler.idle:
        for _, number, prompt, output, owner in (row for row in added if row[0] == now):
            engine.add(number, prompt, output, owner)
        step = engine.step()
        found = [(c.sequence.order, c.count) for c in step.chunks if not c.sequence.owner.batch]
        if found:
            rows[now] = found
        now += 1
        assert now < 1000
    assert engine.scheduler.pool.used == 0
    return rows


@given(
    people=st.lists(REQUEST, max_size=4),
    work=st.lists(REQUEST, max_size=8),
    running=st.integers(1, 9),
    most=st.sampled_from([{}, {"a": Quota(0.25, 0.5), "b": Quota(0.5, 1.0)}]),
)
@example(
    people=[(0, 1, 1, "b"), (1, 2, 1, "a"), (1, 1, 1, "b"), (1, 1, 1, "b")],
    work=[(0, 1, 1, "a")],  # which is not one more owner that asks
    running=4,
    most={},
)
@settings(max_examples=100, deadline=None)
def test_nobody_else_is_served_later_because_of_batch_work(
    people: list[Asked], work: list[Asked], running: int, most: dict[str, Quota]
) -> None:
    """With and without batch work people get the same tokens in the same steps, where the cache holds all of theirs."""
    alone = replay(Engine(48, running=running, quotas=most), people, [])
    assert replay(Engine(48, running=running, quotas=most), people, work) == alone


@given(people=st.lists(REQUEST, max_size=6), work=st.lists(REQUEST, max_size=6), running=st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_everything_ends_in_a_small_cache(people: list[Asked], work: list[Asked], running: int) -> None:
    quotas = {"a": Quota(0.25, 1.0), "b": Quota(0.5, 1.0)}
    replay(Engine(12, running=running, quotas=quotas), people, work)


def test_batch_work_alone_runs_to_its_end_in_a_full_cache() -> None:
    engine = Engine(blocks=6)
    work = [engine.add(number, 10, 10, BATCH) for number in range(6)]
    engine.run()
    assert all(s.state is State.FINISHED and len(s.tokens) == 20 for s in work)
