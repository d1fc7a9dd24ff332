"""What a node's numbers are worth: a fault of an agent never becomes a wrong sum."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.power.parts import told

from busbar.kube.contracts.power import AgentReport
from busbar.operator.power.readings import Reading, Refusal, read

FIRST = read(None, told(clock_s=10.0, a=(200.0, 5000.0), b=(100.0, 7000.0)), 50.0)
assert isinstance(FIRST, Reading)


def after(report: AgentReport) -> Reading | Refusal:
    return read(FIRST if isinstance(FIRST, Reading) else None, report, 51.0)


def test_the_first_reading_has_the_watts_told_and_the_next_the_slope_of_the_counters() -> None:
    assert isinstance(FIRST, Reading)
    assert (FIRST.watts, FIRST.floor_w, FIRST.nameplate_w) == (300.0, 200.0, 800.0)
    found = after(told(clock_s=12.0, a=(999 / 2, 5500.0), b=(0.0, 7100.0)))
    assert isinstance(found, Reading)
    assert {name: meter.watts for name, meter in found.meters.items()} == {"a": 250.0, "b": 50.0}


BAD = (
    ("not a number", told(clock_s=11.0, a=(math.nan, 5300.0)), told(clock_s=11.0, a=(300.0, 5300.0))),
    ("infinite", told(clock_s=11.0, a=(math.inf, 5300.0)), told(clock_s=11.0, a=(300.0, 5300.0))),
    ("negative", told(clock_s=11.0, a=(-1.0, 5300.0)), told(clock_s=11.0, a=(0.0, 5300.0))),
    ("ten times", told(clock_s=11.0, a=(2000.0, 5300.0)), told(clock_s=11.0, a=(600.0, 5300.0))),
    ("counter NaN", told(clock_s=11.0, a=(200.0, math.nan)), told(clock_s=11.0, a=(200.0, 5200.0))),
    ("counter negative", told(clock_s=11.0, a=(200.0, -1.0)), told(clock_s=11.0, a=(200.0, 1.0))),
    ("counter jumps", told(clock_s=11.0, a=(200.0, 50_000.0)), told(clock_s=11.0, a=(200.0, 5600.0))),
    ("counter stands still", told(clock_s=11.0, a=(200.0, 5000.0)), told(clock_s=11.0, a=(0.0, 5000.0))),
    ("clock stands still", told(clock_s=10.0, a=(200.0, 5200.0)), told(clock_s=10.1, a=(200.0, 5020.0))),
    ("clock NaN", told(clock_s=math.nan, a=(200.0, 5200.0)), told(clock_s=10.5, a=(200.0, 5100.0))),
    ("no meters", told(clock_s=11.0), told(clock_s=11.0, host=(100.0, 1.0))),
)  # fmt: skip


@pytest.mark.parametrize(("bad", "good"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_what_cannot_be_true_is_refused_and_its_neighbour_is_not(bad: AgentReport, good: AgentReport) -> None:
    assert isinstance(after(bad), Refusal)
    assert isinstance(after(good), Reading)


def test_two_meters_of_one_name_and_limits_the_wrong_way_round_are_refused() -> None:
    twice = told(clock_s=11.0, a=(1.0, 1.0))
    assert isinstance(after(twice.model_copy(update={"boards": twice.boards * 2})), Refusal)
    board = twice.boards[0].model_copy(update={"floor_watts": 401.0})
    assert isinstance(after(twice.model_copy(update={"boards": (board,)})), Refusal)


def test_a_counter_that_begins_anew_never_counts_backwards() -> None:
    for report in (
        told(clock_s=11.0, a=(210.0, 3.0), b=(90.0, 7090.0)),  # the driver was loaded again
        told(clock_s=1.0, epoch="e2", a=(210.0, 3.0), b=(90.0, 1.0)),  # the node was started again
        told(clock_s=11.0, new=(300.0, 9.0)),  # a board was changed
        told(clock_s=9.0, a=(210.0, 5001.0), b=(90.0, 7001.0)),  # its clock went back
        told(clock_s=1e12, a=(210.0, 5001.0), b=(90.0, 7001.0)),  # or jumped
    ):
        found = after(report)
        assert isinstance(found, Reading)
        assert found.watts == 300.0


WATTS = st.floats(0, 400)
FAULTS = st.sampled_from((1.0, 1.0, 1.0, 10.0, -1.0, math.nan, math.inf, 0.0))
STEP = st.tuples(WATTS, FAULTS, FAULTS, st.sampled_from((0.0, 0.5, 1.0, 1.0, 3.0)), st.booleans())


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=20))
def test_whatever_an_agent_says_the_watts_are_those_of_a_possible_node(
    steps: list[tuple[float, float, float, float, bool]],
) -> None:
    last: Reading | None = None
    clock_s = joules = 0.0
    for i, (watts, wrong_watts, wrong_joules, passed_s, restarts) in enumerate(steps):
        clock_s += passed_s
        joules = 0.0 if restarts else joules + watts * passed_s
        report = told(clock_s=clock_s, a=(watts * wrong_watts, joules * wrong_joules))
        found = read(last, report, float(i))
        if isinstance(found, Refusal):
            continue
        assert 0 <= found.watts <= 1.5 * found.nameplate_w
        assert all(meter.joules >= 0 for meter in found.meters.values())
        last = found


def test_a_spike_of_the_watts_alone_changes_nothing_once_the_counter_is_known() -> None:
    quiet = read(None, told(clock_s=1.0, a=(40.0, 100.0)), 0.0)
    assert isinstance(quiet, Reading)
    spiked = read(quiet, told(clock_s=2.0, a=(400.0, 140.0)), 1.0)
    assert isinstance(spiked, Reading)
    assert spiked.watts == 40.0
