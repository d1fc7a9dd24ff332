"""Joules of a node among those who hold its boards."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.kube.contracts.power import Backend
from busbar.operator.energy.metering import Drawn
from busbar.operator.energy.shares import NOBODY, Charge, Holder, Owner, Source, shared
from busbar.operator.power.readings import HOST

A, B = Owner("a", "job", "uid-a"), Owner("b", "service", "uid-b")


def holds(owner: Owner, part: float) -> Holder:
    """A pod with this part of the boards."""
    return Holder(owner, part, part)


def drawn(*boards: float, host: float = 0.0, measured: bool = True) -> list[Drawn]:
    found = [Drawn(f"b{i}", joules, measured) for i, joules in enumerate(boards)]
    return [*found, Drawn(HOST, host, measured)] if host else found


def charges(
    of: list[Drawn], *holders: Holder, backend: Backend = Backend.NVML
) -> dict[tuple[Owner, Source], float]:
    host = Backend.SIMULATED if backend is Backend.SIMULATED else Backend.RAPL
    found: list[Charge] = shared(of, holders, backend, host)
    return {(charge.owner, charge.source): round(charge.joules, 6) for charge in found}


def test_whoever_holds_all_boards_pays_what_they_counted() -> None:
    found = charges(drawn(60.0, 400.0, host=300.0), holds(A, 1.0))
    assert found == {(A, Source.COUNTER): 460.0, (A, Source.RAPL): 300.0}


def test_boards_that_nobody_holds_are_nobodys() -> None:
    found = charges(drawn(60.0, 63.0, host=300.0))
    assert found == {(NOBODY, Source.COUNTER): 123.0, (NOBODY, Source.RAPL): 300.0}


def test_the_boards_that_draw_the_least_are_those_that_nobody_holds() -> None:
    """The holder of an idle board pays for it; so do holders that work, once."""
    found = charges(drawn(60.0, 400.0, 61.0, 380.0, host=400.0), holds(A, 0.5))
    assert found == {(A, Source.ESTIMATED): 780.0 + 200.0, (NOBODY, Source.ESTIMATED): 121.0 + 200.0}


def test_boards_of_several_holders_are_shared_by_their_number() -> None:
    found = charges(drawn(100.0, 200.0, 300.0, 400.0), holds(A, 0.25), holds(B, 0.75))
    assert found == {(A, Source.ESTIMATED): 250.0, (B, Source.ESTIMATED): 750.0}


def test_slices_of_one_board_are_shares_of_it() -> None:
    found = charges(drawn(280.0), holds(A, 3 / 7), holds(B, 2 / 7))
    assert found == {
        (A, Source.ESTIMATED): 120.0,
        (B, Source.ESTIMATED): 80.0,
        (NOBODY, Source.ESTIMATED): 80.0,
    }


def test_a_node_of_a_cpu_pool_is_shared_by_its_cores_and_its_boards_are_nobodys() -> None:
    found = charges(drawn(60.0, host=100.0), Holder(A, 0.0, 0.5), Holder(B, 0.0, 0.3))
    assert found == {
        (A, Source.ESTIMATED): 50.0,
        (B, Source.ESTIMATED): 30.0,
        (NOBODY, Source.ESTIMATED): 20.0,
        (NOBODY, Source.COUNTER): 60.0,
    }


def test_invented_joules_always_say_so() -> None:
    found = charges(drawn(100.0, measured=False), holds(A, 0.5), holds(B, 0.5), backend=Backend.SIMULATED)
    assert {source for _, source in found} == {Source.SIMULATED}


def test_what_a_gap_is_filled_with_is_estimated() -> None:
    assert charges(drawn(100.0, measured=False), holds(A, 1.0)) == {(A, Source.ESTIMATED): 100.0}


@settings(max_examples=50, derandomize=True)
@given(
    boards=st.lists(st.floats(0, 1e6), max_size=8),
    host=st.floats(0.001, 1e6),
    parts=st.lists(st.floats(0, 0.6), max_size=6),
)
def test_every_joule_is_somebodys_or_nobodys_once(
    boards: list[float], host: float, parts: list[float]
) -> None:
    of = drawn(*boards, host=host)
    found = shared(
        of, [holds(Owner(str(i), "job"), p) for i, p in enumerate(parts)], Backend.NVML, Backend.RAPL
    )
    assert sum(charge.joules for charge in found) == pytest.approx(sum(each.joules for each in of))
    assert all(charge.joules > 0 for charge in found)
