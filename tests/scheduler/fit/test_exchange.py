"""What processes hand over in a step, and what of it the passes hide, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler.fit.exchange import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Link,
    Links,
    Part,
    Sharing,
    beside,
    counts,
    exchanges,
    sent_bytes,
    stated,
)
from busbar.scheduler.fit.timeline import Beside, GroupWork, Rates, step_time

FOUR = Sharing(4, OPTIMIZER, 3, 2, 4, gradients_beside=False, weights_beside=False)
PARTS = [Part(80, False), Part(40, True), Part(40, True), Part(40, True), Part(8, False)]
FAST = Rates(1.0, 1.0, 1e12)


def test_bytes_are_those_of_a_ring() -> None:
    """Three quarters of 208 parameters, 2 bytes each as gradients and 4 as weights."""
    assert sent_bytes(PARTS, FOUR) == 156 * (2 + 4)
    assert sent_bytes(PARTS, replace(FOUR, sharding=GRADIENTS)) == 156 * (3 * 2 + 4)
    # of a block in the middle 6 gathers; the first one is there still for two of them, the last one for three
    gathered = 66 + 30 * (6 + 4 + 3)
    assert sent_bytes(PARTS, replace(FOUR, sharding=PARAMETERS)) == 156 * 3 * 2 + gathered * 4
    assert sent_bytes(PARTS, replace(FOUR, ranks=1)) == 0


def test_a_single_block_is_gathered_once() -> None:
    found = counts([Part(8, False), Part(40, True)], replace(FOUR, sharding=PARAMETERS))
    assert [each.first_weights + each.later_weights for each in found] == [1, 1]


def test_an_exchange_takes_a_latency_and_its_bytes() -> None:
    links = Links(Link(0.5, 30.0), Link(0.25, 60.0))
    found = exchanges(PARTS, FOUR, links)[1]
    assert (found.inside_s, found.reduce_s, found.gather_s) == (0.0, 0.5 + 60 / 30, 0.25 + 120 / 60)
    divided = exchanges(PARTS, replace(FOUR, sharding=GRADIENTS), links)[1]
    assert (divided.inside_s, divided.reduce_s) == (3 * 2.5, 0.0)
    whole = exchanges(PARTS, replace(FOUR, sharding=PARAMETERS), links)[2]
    assert (whole.inside_s, whole.gather_s) == (3 * 2.5 + 5 * 2.25, 2.25)
    assert sum(each.whole_s for each in exchanges(PARTS, replace(FOUR, ranks=1), links)) == 0


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    between, inside = 3e9, 24e9
    assert stated(between, inside, 8, 4).weights.bytes_per_s == between
    assert stated(between, 1e9, 8, 4).weights.bytes_per_s == 1e9
    assert stated(None, inside, 4, 4).weights.bytes_per_s == inside
    assert stated(between, inside, 4, 1).weights.bytes_per_s == between
    assert stated(between, inside, 8, 1).weights.latency_s > stated(between, inside, 2, 1).weights.latency_s


def group(forward_s: float, backward_s: float, gather_s: float, reduce_s: float) -> GroupWork:
    return GroupWork(forward_s, backward_s, (), travels=False, gather_s=gather_s, reduce_s=reduce_s)


def seconds(groups: list[GroupWork], shared: Beside) -> float:
    return step_time(groups, 3, 8, FAST, gated=False, beside=shared).seconds


def test_exchanges_between_the_passes_are_added() -> None:
    three = [group(1.0, 2.0, 0.5, 0.25)] * 3
    assert seconds(three, Beside()) == pytest.approx(3 * 3.75)


def test_gradients_of_a_group_go_beside_the_backward_of_the_one_before() -> None:
    """Of three groups, the last one's go first and the first one's beside nothing."""
    hidden = [replace(group(1.0, 2.0, 0.0, 0.5), last_backward_s=2.0)] * 3
    assert seconds(hidden, Beside(gradients=True)) == pytest.approx(9 + 0.5)
    slow = [replace(group(1.0, 2.0, 0.0, 3.0), last_backward_s=2.0)] * 3
    assert seconds(slow, Beside(gradients=True)) == pytest.approx(3 + 2 + 3 * 3)
    later = [replace(group(1.0, 12.0, 0.0, 3.0), last_backward_s=2.0)] * 3
    assert seconds(later, Beside(gradients=True)) == pytest.approx(3 + 30 + 2 + 3 * 3)


def test_weights_of_a_group_come_beside_the_forward_of_the_one_before() -> None:
    assert seconds([group(1.0, 2.0, 0.5, 0.0)] * 3, Beside(weights=True)) == pytest.approx(9 + 0.5)
    assert seconds([group(1.0, 2.0, 1.5, 0.0)] * 3, Beside(weights=True)) == pytest.approx(3 * 1.5 + 1 + 6)


def test_weights_come_beside_a_pass_only_as_far_as_they_are_updated_before_it() -> None:
    """Of three groups, each of which is updated in one second behind the one before it, in the gated schedule."""
    one_second = Rates(1e9, 1e9, 1.0)
    late = [replace(group(0.5, 2.0, 0.25, 0.0), chunks=(1,))] * 3
    found = step_time(late, 3, 8, one_second, gated=True, beside=Beside(weights=True))
    assert found.seconds == pytest.approx(
        3 + 0.25 + 0.5 + 6
    )  # the last one's update, gather and pass; backward
    long = [replace(group(4.0, 2.0, 0.25, 0.0), chunks=(1,))] * 3
    found = step_time(long, 3, 8, one_second, gated=True, beside=Beside(weights=True))
    assert found.seconds == pytest.approx(
        1 + 0.25 + 4 + 0.25 + 4 + 4 + 6
    )  # the third one comes beside the second


def test_a_device_that_exchanges_loses_a_part_of_that_time() -> None:
    hidden = [replace(group(1.0, 2.0, 0.0, 0.5), last_backward_s=2.0)] * 3
    assert seconds(hidden, Beside(gradients=True, busy=0.5)) == pytest.approx(9 + 0.5 + 2 * 0.25)
    assert seconds(hidden, Beside(gradients=True, busy=1.0)) == pytest.approx(9 + 3 * 0.5)


times = st.floats(0, 5, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(times, times, times, times), min_size=1, max_size=6), st.floats(0, 1))
def test_a_step_is_between_the_longer_of_both_and_their_sum(
    given_s: list[tuple[float, float, float, float]], busy: float
) -> None:
    groups = [replace(group(*each), last_backward_s=each[1]) for each in given_s]
    computed = sum(each[0] + each[1] for each in given_s)
    exchanged = sum(each[2] + each[3] for each in given_s)
    for gradients in (False, True):
        for weights in (False, True):
            found = seconds(groups, Beside(gradients, weights, busy))
            assert max(computed, exchanged) - 1e-9 <= found <= computed + exchanged + 1e-9


def test_a_slower_network_never_helps() -> None:
    links = [stated(rate, 24e9, 4, 1) for rate in (1e1, 1e2, 1e3, 1e4)]
    sharing = replace(FOUR, gradients_beside=True, weights_beside=True)
    found = []
    for between in links:
        works = [
            replace(group(1.0, 2.0, each.gather_s, each.reduce_s), last_backward_s=2.0)
            for each in exchanges(PARTS, sharing, between)
        ]
        found.append(seconds(works, beside(sharing, between)))
    assert found == sorted(found, reverse=True)
