"""What a step costs whose state travels, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.scheduler.fit.timeline import GroupWork, Rates, StepTime, step_time

BLOCKS = 16
BLOCK = GroupWork(forward_s=1.0, backward_s=2.0, chunks=(10,), travels=True)
MODEL = [BLOCK] * BLOCKS
FAST = 1e12  # parameters per second


def step(slots: int, link_s: float, *, gated: bool, **changes: float) -> StepTime:
    """A step in which all of the state needs `link_s` in each direction."""
    rate = BLOCKS * 10 * 8 / link_s
    return step_time(MODEL, slots, 8, replace(Rates(rate, rate, FAST), **changes), gated=gated)


def test_a_blocking_step_is_computation_then_the_link() -> None:
    found = step(3, 48.0, gated=False)
    assert found.compute_s == 48
    assert found.seconds == pytest.approx(
        48 + 48 * (1 + 1 / BLOCKS)
    )  # the first load is stored after it came
    assert found.waited_s == pytest.approx(found.seconds - 48)
    assert (
        step(3, 48.0, gated=False, update_parameters_per_s=1.0).seconds > 48 + 160
    )  # the update is the bottleneck


def test_with_slots_for_the_state_a_gated_step_is_the_slower_of_computation_and_link() -> None:
    assert step(BLOCKS, 24.0, gated=True).seconds == pytest.approx(48)
    assert step(BLOCKS, 24.0, gated=True).waited_s == pytest.approx(0, abs=1e-9)
    assert step(BLOCKS, 96.0, gated=True).seconds == pytest.approx(96, rel=0.05)


def test_with_few_slots_it_is_backward_and_the_slower_of_forward_and_the_link() -> None:
    assert step(2, 48.0, gated=True).seconds == pytest.approx(32 + 48, rel=0.1)
    assert step(2, 8.0, gated=True).seconds == pytest.approx(48, rel=0.05)
    more = [step(slots, 48.0, gated=True).seconds for slots in range(1, BLOCKS + 1)]
    assert more == sorted(more, reverse=True)


def test_state_on_the_device_waits_for_no_link() -> None:
    here = [replace(BLOCK, travels=False)] * BLOCKS
    rates = Rates(1.0, 1.0, update_parameters_per_s=10, norm_s=0.5)
    assert step_time(here, 3, 8, rates, gated=False).seconds == pytest.approx(48 + 0.5 + 16)
    # the updates of the next forward pass run ahead of it, but for the first block's
    assert step_time(here, 3, 8, rates, gated=True).seconds == pytest.approx(48 + 0.5 + 1)


def test_last_groups_on_the_host_are_needed_last() -> None:
    rates = Rates(10 * 8 / 2.0, 10 * 8 / 2.0, FAST)  # 2 s for each group
    first, last = (
        [replace(BLOCK, travels=(n < 8) is early) for n in range(BLOCKS)] for early in (True, False)
    )
    seconds = [step_time(groups, 2, 8, rates, gated=True).seconds for groups in (first, last)]
    assert seconds[1] < seconds[0]
