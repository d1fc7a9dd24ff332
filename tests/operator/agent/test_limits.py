"""Limits are written, read back, and never above what the node holds."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.agent.boards import EPOCH, Boards, Clock, capped, lease, release

from busbar.kube.contracts.power import LeaseState
from busbar.operator.agent.leases import LeaseRefused
from busbar.operator.agent.limits import NEAR_W, Limiter

BUSY = dict.fromkeys("abcd", 100.0)


class Made:
    """A limiter that has looked once, as after the agent's start."""

    def __init__(self) -> None:
        self.clock, self.boards = Clock(), Boards()
        self.limiter = Limiter(EPOCH, self.boards, self.clock, 0.9)
        self.limiter.look({})

    def looks(self, seconds: float, **drawn: float) -> None:
        """Looks five times a second; boards draw all that they may, or what is said."""
        for _ in range(round(seconds * 5)):
            self.clock.now_s += 0.2
            self.limiter.look({n: drawn.get(n, self.boards.limit_w(n)) for n in self.boards.names})

    def lease(self, watts: float, sequence: int) -> None:
        self.limiter.take(lease(watts, sequence, self.clock.now_s))


def test_the_start_holds_the_standing_cap_until_something_is_said() -> None:
    made = Made()
    assert made.boards.total_w == 400.0
    told = made.limiter.report()
    assert (told.state, told.sequence, told.lease_watts, told.conflicts) == (LeaseState.STANDING, 0, None, ())


def test_a_lease_is_split_written_read_back_and_reported() -> None:
    made = Made()
    made.lease(1700.0, 3)
    assert made.boards.total_w == 1200.0, "less 500 W of the host"
    told = made.limiter.report()
    assert (told.state, told.sequence, told.lease_watts) == (LeaseState.LEASED, 3, 1700.0)
    assert told.remaining_s == 9.5
    assert told.actuation_s == 0.0
    assert made.limiter.limit_w("a") == 300.0


def test_a_lease_that_ends_leaves_the_standing_cap_and_nothing_raises_it_again() -> None:
    made = Made()
    made.lease(1700.0, 3)
    made.looks(9.2)
    assert made.boards.total_w == 1200.0
    made.looks(0.4)
    assert made.boards.total_w == 400.0
    with pytest.raises(LeaseRefused):
        made.limiter.take(lease(1700.0, 3, made.clock.now_s))
    made.looks(20)
    assert (made.boards.total_w, made.limiter.report().sequence) == (400.0, 3)


def test_lowering_comes_first_and_its_failure_stops_the_raise() -> None:
    made = Made()
    made.lease(1700.0, 1)
    made.looks(1.0, a=60.0, b=60.0)
    made.boards.most_w = 0.0
    made.looks(12.0, c=60.0, d=60.0)  # the work moves from c and d to a and b; the old lease ends
    made.lease(1700.0, 2)
    assert made.boards.limit_w("a") > made.boards.limit_w("c")
    assert made.boards.most_w <= 1200.0
    made.boards.refusing = {"a"}
    made.boards.writes.clear()
    made.lease(1100.0, 3)
    assert made.limiter.report().sequence == 2, "not in force: a is above its share"
    assert made.limiter.refuses("a")
    made.looks(0.2)
    assert made.limiter.report().sequence == 3, "a counts with its nameplate, the others are at their lowest"
    assert {made.boards.limit_w(n) for n in "bcd"} == {100.0}


def test_a_board_that_ignores_its_limit_counts_with_its_nameplate_within_three_seconds() -> None:
    made = Made()
    made.lease(1700.0, 1)
    made.looks(1.0)
    made.looks(2.4, a=390.0)
    assert made.limiter.refuses("a")
    assert made.boards.total_w - made.boards.limit_w("a") <= 1200.0 - 400.0
    made.boards.deaf = {"b"}
    made.lease(900.0, 2)
    assert made.limiter.refuses("b"), "it kept the limit that it had"


def test_a_foreign_limit_is_a_conflict_is_lowered_and_not_raised() -> None:
    made = Made()
    made.lease(1700.0, 1)
    made.boards.set_w["a"] = 400.0
    made.looks(0.2)
    assert made.limiter.report().conflicts == ("a",)
    assert made.boards.limit_w("a") == 300.0
    made.boards.set_w["b"] = 150.0
    made.looks(0.2)
    assert made.limiter.report().conflicts == ("a", "b")
    assert made.boards.limit_w("b") == 150.0
    for sequence in range(2, 70):
        made.lease(1700.0, sequence)
        made.looks(1.0)
    assert made.limiter.report().conflicts == ()
    assert made.boards.limit_w("b") == 300.0


def test_an_agent_that_stood_still_gives_up_its_lease() -> None:
    made = Made()
    made.lease(1700.0, 1)
    made.clock.now_s += 2.0
    made.boards.set_w = dict.fromkeys("abcd", 100.0)  # the guard was there
    made.limiter.look(BUSY)
    told = made.limiter.report()
    assert (told.state, told.conflicts, made.boards.total_w) == (LeaseState.STANDING, (), 400.0)
    made.lease(1700.0, 2)
    assert made.boards.total_w == 1200.0


def test_a_raise_that_was_decided_before_the_agent_stood_still_is_not_written() -> None:
    made = Made()
    reads = made.boards.limits

    def stopped() -> object:
        made.clock.now_s += 5.0  # between the reading and the write
        return reads()

    made.boards.limits = stopped  # type: ignore[assignment, method-assign]
    made.lease(1700.0, 1)
    assert made.boards.total_w == 400.0


def test_a_release_puts_the_defaults_back_once_and_then_touches_nothing() -> None:
    made = Made()
    made.lease(1700.0, 1)
    made.boards.set_w["a"] = 222.0
    made.looks(0.2)
    made.limiter.take(release(2))
    assert [made.boards.limit_w(n) for n in "abcd"] == [222.0, 400.0, 400.0, 400.0], "a is somebody else's"
    made.boards.set_w["b"] = 333.0
    made.looks(3.0)
    made.limiter.stand()
    assert made.boards.limit_w("b") == 333.0
    told = made.limiter.report()
    assert (told.state, told.sequence, told.conflicts) == (LeaseState.RELEASED, 2, ())


def test_a_board_that_refuses_its_default_is_asked_again() -> None:
    made = Made()
    made.boards.refusing = {"a"}
    made.limiter.take(release(1))
    assert [made.boards.limit_w(n) for n in "ab"] == [100.0, 400.0]
    made.boards.refusing = set()
    made.looks(9.0)
    assert made.boards.limit_w("a") == 100.0
    made.looks(2.0)
    assert made.boards.limit_w("a") == 400.0
    assert made.limiter.report().sequence == 1


def test_no_lease_raises_a_board_above_its_default() -> None:
    made = Made()
    made.boards.default_w = 350.0
    made.lease(9000.0, 1)
    assert made.boards.total_w == 4 * 350.0
    made.limiter.take(release(2))
    assert made.boards.total_w == 4 * 350.0


def test_the_end_of_the_agent_leaves_the_standing_cap() -> None:
    made = Made()
    made.lease(1700.0, 1)
    made.limiter.stand()
    assert made.boards.total_w == 400.0


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_limits_are_within_the_lease_whatever_happens(seed: int) -> None:
    """Leases, ends, pauses and foreign writes; after each look the boards have no more than is held."""
    random, made = Random(seed), Made()
    for sequence in range(1, 60):
        made.clock.now_s += random.choice((0.2, 0.2, 0.5, 1.5, 12.0))
        if random.random() < 0.7:
            made.limiter.take(
                lease(random.uniform(0, 3000), sequence, made.clock.now_s - random.uniform(0, 5))
            )
        if random.random() < 0.2:
            made.boards.set_w[random.choice("abcd")] = random.uniform(100, 400)
        made.limiter.look({n: random.choice((50.0, made.boards.limit_w(n))) for n in "abcd"})
        held = made.limiter.held
        most_w = max(held.boards_w, 400.0) if held.state is LeaseState.LEASED else 400.0
        assert made.boards.total_w <= most_w + 4 * NEAR_W / 2, "each to half of what drivers round"


@pytest.mark.parametrize("burst_j", [0.0, 1e6])
def test_no_board_gets_more_than_the_cap_of_its_job_however_much_the_lease_leaves(burst_j: float) -> None:
    made = Made()
    made.limiter.take(capped(9000.0, 1, 0.7, made.clock.now_s, burst_j))
    assert {made.boards.limit_w(name) for name in made.boards.names} == {280.0}
    made.limiter.take(capped(900.0, 2, 0.7, made.clock.now_s))
    assert made.boards.total_w == 400.0, "and no more than the lease"
    made.limiter.take(capped(9000.0, 3, 0.1, made.clock.now_s, burst_j))
    assert made.boards.total_w == 400.0, "no less than the lowest limit"
    made.limiter.take(capped(9000.0, 4, 0.9, made.clock.now_s, burst_j))
    assert made.boards.total_w == 1440.0
    made.looks(11.0)
    assert made.boards.total_w == 400.0, "a lease that has ended is the standing cap"
    made.lease(9000.0, 5)
    assert made.boards.total_w == 1600.0


@pytest.mark.parametrize("burst_j", [0.0, 1e6])
def test_a_board_is_held_to_its_own_part_and_leaves_the_rest_of_the_lease_to_the_others(
    burst_j: float,
) -> None:
    made = Made()
    made.limiter.take(capped(9000.0, 1, 1.0, made.clock.now_s, burst_j, a=0.5, b=0.7))
    assert [made.boards.limit_w(name) for name in "abcd"] == [200.0, 280.0, 400.0, 400.0]
    made.limiter.take(capped(1500.0, 2, 1.0, made.clock.now_s, a=0.5, b=0.5))
    low, also, high, too = (made.boards.limit_w(name) for name in "abcd")
    assert low == also <= 200.0 < high == too <= 400.0
    assert 990.0 <= made.boards.total_w <= 1000.0, "what two may not have is not left over"
    made.limiter.take(capped(9000.0, 3, 0.8, made.clock.now_s, burst_j, a=1.0, gone=0.3))
    assert [made.boards.limit_w(name) for name in "abcd"] == [400.0, 320.0, 320.0, 320.0]
    made.limiter.take(capped(9000.0, 4, 1.0, made.clock.now_s, burst_j))
    assert made.boards.total_w == 1600.0, "parts are those of one message"


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_no_mix_of_parts_takes_the_boards_above_the_lease_or_a_board_above_its_own(seed: int) -> None:
    """Leases with parts of any boards, ends, pauses, agents that start anew, and foreign writes."""
    random, made = Random(seed), Made()
    for sequence in range(1, 50):
        made.clock.now_s += random.choice((0.2, 0.2, 0.5, 1.5, 12.0))
        if random.random() < 0.05:
            made.limiter = Limiter(EPOCH, made.boards, made.clock, 0.9)
            made.limiter.look({})
        if random.random() < 0.7:
            of = random.sample("abcd", random.randint(0, 4))
            parts = {name: random.choice((0.2, 0.5, 0.8, 1.0)) for name in of}
            lease_w, rest = random.uniform(600, 3000), random.choice((0.6, 1.0))
            made.limiter.take(capped(lease_w, sequence, rest, made.clock.now_s, **parts))
        if random.random() < 0.2:
            made.boards.set_w[random.choice("abcd")] = random.uniform(100, 400)
        made.limiter.look({n: random.choice((50.0, made.limiter.limit_w(n) or 50.0)) for n in "abcd"})
        held = made.limiter.held
        most_w = max(held.boards_w, 400.0) if held.state is LeaseState.LEASED else 400.0
        assert made.boards.total_w <= most_w + 4 * NEAR_W / 2
        for name in "abcd":
            assert made.boards.limit_w(name) <= max(held.part(name) * 400.0, 100.0) + NEAR_W / 2
