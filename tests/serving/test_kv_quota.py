"""Quotas of the KV cache, without a model: guarantees are kept, idle blocks are lent, and nobody exceeds their most."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from busbar.workloads.serving.blocks import BlockPool
from busbar.workloads.serving.errors import SettingsError
from busbar.workloads.serving.fairness import Owner
from busbar.workloads.serving.quota import Quota, Quotas
from busbar.workloads.serving.scheduler import Scheduler, StepLimits
from busbar.workloads.serving.sequence import Sequence, State, Step

SIZE = 4
A, B, C = (Owner(name, "key") for name in "abc")


def make(
    blocks: int, quotas: dict[str, Quota], budget: int = 64, running: int = 16, host: int = 0
) -> Scheduler:
    limits = StepLimits(SIZE, budget, running)
    return Scheduler(BlockPool(blocks, SIZE, host), limits, Quotas(quotas, blocks))


def sequence(order: int, owner: Owner, prompt: int, output: int) -> Sequence:
    return Sequence(order, [7] * prompt, prompt + output, owner=owner)


def run_step(scheduler: Scheduler) -> Step:
    scheduler.copied(10**9)
    step = scheduler.plan()
    sampled = {c.sequence: 7 for c in step.chunks if c.samples}
    scheduler.commit(step, sampled)
    for done in [s for s in sampled if len(s.tokens) == s.max_total]:
        scheduler.finish(done)
    return step


def test_idle_blocks_are_lent_and_taken_back_from_the_borrowers_newest() -> None:
    scheduler = make(20, {"b": Quota(guaranteed=0.5)})
    borrowed = [sequence(i, A, 16, 16) for i in range(4)]
    for each in borrowed:
        scheduler.add(each)
    run_step(scheduler)
    assert scheduler.pool.held["a"] > 10  # more than is left beside the guarantee
    scheduler.add(sequence(9, B, 36, 2))  # nine blocks
    step = run_step(scheduler)
    assert [s.owner for s in step.joined] == [B]
    assert step.preempted == (borrowed[3], borrowed[2])
    assert borrowed[0].state is borrowed[1].state is State.RUNNING


def test_a_tenant_grows_within_its_guarantee_at_the_cost_of_borrowers() -> None:
    scheduler = make(10, {"b": Quota(guaranteed=0.6)})
    own = sequence(5, B, 8, 16)
    scheduler.add(own)
    run_step(scheduler)
    lent = sequence(1, A, 24, 8)  # older, and the only one of its tenant
    scheduler.add(lent)
    preempted: list[Sequence] = []
    while own.state is not State.FINISHED:
        preempted += run_step(scheduler).preempted
    assert set(preempted) == {lent}
    while not scheduler.idle:
        run_step(scheduler)
    assert len(lent.tokens) == lent.max_total


def test_nobody_within_the_guarantee_is_preempted_for_a_borrower() -> None:
    scheduler = make(12, {"b": Quota(guaranteed=0.5)})
    old, kept = sequence(0, A, 8, 40), sequence(1, B, 16, 8)
    scheduler.add(old)
    scheduler.add(kept)
    preempted: list[Sequence] = []
    while not scheduler.idle:
        preempted += run_step(scheduler).preempted
    assert kept not in preempted
    assert len(old.tokens) == 48  # it had the whole pool in the end


def test_a_tenant_at_its_most_waits_and_does_not_hold_up_others() -> None:
    scheduler = make(20, {"a": Quota(most=0.25)})
    for order in range(3):
        scheduler.add(sequence(order, A, 12, 4))  # three blocks, then four, of five
    scheduler.add(sequence(3, C, 12, 4))
    step = run_step(scheduler)
    assert [s.owner for s in step.joined] == [A, C]
    while not scheduler.idle:
        run_step(scheduler)
        assert scheduler.pool.held["a"] <= 5


def test_a_sequence_over_its_tenants_most_is_refused_and_its_neighbour_is_not() -> None:
    scheduler = make(20, {"a": Quota(most=0.25)})
    with pytest.raises(
        ValueError, match="does not fit the 20 tokens of the KV cache that its tenant may hold"
    ):
        scheduler.add(sequence(0, A, 16, 5))
    scheduler.add(sequence(0, A, 16, 4))
    scheduler.add(sequence(1, B, 16, 5))


@pytest.mark.parametrize(
    ("quotas", "problem"),
    [
        ({"a": Quota(0.6), "b": Quota(0.5)}, "add up to 110 %"),
        ({"a": Quota(0.6, 0.5)}, "the KV quota of 'a' must be 0 <= guaranteed <= most"),
        ({"a": Quota(0.0, 0.01)}, "less than one block"),
    ],
)
def test_quotas_that_cannot_be_kept_are_refused(quotas: dict[str, Quota], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        Quotas(quotas, 20)


def test_quotas_that_fill_the_pool_are_accepted() -> None:
    assert Quotas({"a": Quota(0.6), "b": Quota(0.4)}, 20).guaranteed("b") == 8


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.integers(6, 24),
    shares=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    mosts=st.tuples(st.integers(4, 10), st.integers(4, 10)),
    host=st.integers(0, 8),
    shares_content=st.booleans(),
    arrivals=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(1, 6), st.integers(0, 12)),
        min_size=1,
        max_size=14,
    ),
)
@example(  # a tenant that joins within the step borrows, and gives back in the same step
    6,
    (2, 4),
    (4, 4),
    0,
    False,
    [(0, 1, 1, 0), (1, 1, 1, 0), (2, 7, 3, 1), (0, 5, 1, 0), (1, 1, 2, 0), (1, 5, 1, 0), (2, 1, 1, 1)],
)
@example(  # what a sequence finds is its victim's, and free once that has gone
    6,
    (5, 5),
    (7, 5),
    1,
    True,
    [(0, 11, 3, 0), (1, 8, 3, 1), (2, 3, 3, 0)],
)
def test_guarantees_and_limits_hold_and_everything_ends(
    blocks: int,
    shares: tuple[int, int],
    mosts: tuple[int, int],
    host: int,
    shares_content: bool,
    arrivals: list[tuple[int, int, int, int]],
) -> None:
    quotas = {
        name: Quota(min(share, most) / 10, most / 10)
        for name, share, most in zip("ab", shares, mosts, strict=True)
    }
    scheduler = make(blocks, quotas, budget=16, running=8, host=host)
    limits = {name: scheduler.quotas.most(name) for name in "abc"}
    owners = (A, B, C)
    todo = [
        sequence(i, owners[who], prompt, min(output, limits["abc"[who]] * SIZE - prompt))
        for i, (who, prompt, output, _) in enumerate(arrivals)
        if prompt < limits["abc"[who]] * SIZE
    ]
    for each in todo:
        each.salt = b"" if shares_content else each.owner.tenant.encode()
    starts = sorted((arrivals[s.order][3], i) for i, s in enumerate(todo))
    held: dict[Sequence, int] = {}
    preempt = scheduler._preempt

    def noted(victim: Sequence) -> None:
        held[victim] = scheduler.pool.held[victim.owner.tenant]
        preempt(victim)

    scheduler._preempt = noted  # type: ignore[method-assign]
    for tick in range(4000):
        while starts and starts[0][0] <= tick:
            scheduler.add(todo[starts.pop(0)[1]])
        if scheduler.idle and not starts:
            break
        step = run_step(scheduler)
        for name in "abc":
            assert scheduler.pool.held[name] <= limits[name]
        for victim in step.preempted:
            if shares_content:  # blocks count for the tenant that was the first to hold them
                continue
            # Its tenant borrowed at that moment, be it since this step, or it wanted to, or it made room for another of its own.
            name = victim.owner.tenant
            gained = [c.sequence for c in step.chunks if c.sequence.owner.tenant == name]
            assert held[victim] >= scheduler.quotas.guaranteed(name) or gained
    assert scheduler.idle
    assert all(len(s.tokens) == s.max_total for s in todo)
    assert scheduler.pool.free == scheduler.pool.total


def test_a_request_that_its_tenant_may_not_hold_any_more_runs_to_its_end() -> None:
    scheduler = make(20, {})
    large, small = sequence(0, A, 30, 30), sequence(1, A, 8, 8)
    for each in (large, small):
        scheduler.add(each)
    run_step(scheduler)
    scheduler.change_quotas({"a": Quota(most=0.25), "b": Quota(guaranteed=0.5)})
    assert (scheduler.quotas.limit("a"), scheduler.quotas.most("a")) == (5, 15)
    with pytest.raises(ValueError, match="does not fit the 20 tokens"):
        scheduler.add(sequence(2, A, 16, 5))
    late = sequence(3, A, 16, 20)  # it was taken a moment before
    scheduler.add(late, admitted=True)
    while not scheduler.idle:
        run_step(scheduler)
    assert [len(s.tokens) for s in (large, small, late)] == [60, 16, 36]
    assert scheduler.quotas.most("a") == 5


def test_a_held_request_goes_on_under_the_quotas_that_it_was_taken_under() -> None:
    scheduler = make(20, {})
    held = sequence(0, A, 30, 30)
    scheduler.add(held)
    run_step(scheduler)
    scheduler.hold(held)
    scheduler.change_quotas({"a": Quota(most=0.25)})
    scheduler.let_go(held)
    while not scheduler.idle:
        run_step(scheduler)
    assert len(held.tokens) == 60


def test_a_guarantee_that_grows_is_taken_from_the_borrowers_at_once() -> None:
    scheduler = make(20, {})
    for order in range(4):
        scheduler.add(sequence(order, A, 16, 16))
    run_step(scheduler)
    scheduler.change_quotas({"b": Quota(guaranteed=0.5)})
    scheduler.add(sequence(9, B, 36, 2))
    step = run_step(scheduler)
    assert [s.owner for s in step.joined] == [B]
    assert len(step.preempted) == 2


def test_quotas_that_cannot_be_kept_leave_the_old_ones() -> None:
    scheduler = make(20, {"a": Quota(most=0.25)})
    with pytest.raises(SettingsError, match="add up to 110 %"):
        scheduler.change_quotas({"a": Quota(0.6), "b": Quota(0.5)})
    assert scheduler.quotas.tenants == ["a"]
    assert scheduler.quotas.most("a") == 5


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.integers(6, 24),
    changes=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 5), st.integers(2, 10)),
        min_size=1,
        max_size=6,
    ),
    host=st.integers(0, 8),
    arrivals=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(1, 12), st.integers(0, 20)),
        min_size=1,
        max_size=14,
    ),
)
def test_everything_ends_however_quotas_change(
    blocks: int,
    changes: list[tuple[int, int, int, int]],
    host: int,
    arrivals: list[tuple[int, int, int, int]],
) -> None:
    scheduler = make(blocks, {}, budget=16, running=8, host=host)
    owners, taken = (A, B, C), list[Sequence]()
    for tick in range(4000):
        for at, first, second, most in changes:
            if at == tick:
                quotas = {"a": Quota(min(first, most) / 10, most / 10), "b": Quota(second / 10)}
                scheduler.change_quotas(quotas)
        for order, (who, prompt, output, at) in enumerate(arrivals):
            new = sequence(order, owners[who], prompt, output)
            need = -(-new.max_total // SIZE)
            if at == tick and need <= scheduler.quotas.limit(new.owner.tenant):
                scheduler.add(new)
                taken.append(new)
        if scheduler.idle and tick > 20:
            break
        before = dict(scheduler.pool.held)
        run_step(scheduler)
        for name in "abc":
            assert scheduler.pool.held[name] <= max(scheduler.quotas.most(name), before.get(name, 0))
    assert scheduler.idle
    assert all(len(s.tokens) == s.max_total for s in taken)
    assert scheduler.pool.free == scheduler.pool.total
    assert all(scheduler.quotas.most(name) == scheduler.quotas.limit(name) for name in "abc")
