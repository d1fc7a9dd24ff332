"""Joules of a node among those who hold its boards."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.kube.contracts.power import Backend
from busbar.operator.energy.metering import Drawn
from busbar.operator.energy.shares import NOBODY, Charge, HeldBoard, Holder, Owner, Source, shared
from busbar.operator.power.readings import HOST

Known = Mapping[str, HeldBoard]
A, B = Owner("a", "job", "uid-a"), Owner("b", "service", "uid-b")


def holds(owner: Owner, part: float) -> Holder:
    """A pod with this part of the boards."""
    return Holder(owner, part, part)


def drawn(*boards: float, host: float = 0.0, measured: bool = True) -> list[Drawn]:
    found = [Drawn(f"b{i}", joules, measured) for i, joules in enumerate(boards)]
    return [*found, Drawn(HOST, host, measured)] if host else found


def charges(
    of: list[Drawn], *holders: Holder, backend: Backend = Backend.NVML, known: Known | None = None
) -> dict[tuple[Owner, Source], float]:
    host = Backend.SIMULATED if backend is Backend.SIMULATED else Backend.RAPL
    found: list[Charge] = shared(of, holders, backend, host, known or {})
    return {(charge.owner, charge.source): round(charge.joules, 6) for charge in found}


def on(*owners: Owner, divided: bool = False) -> HeldBoard:
    return HeldBoard(tuple((owner, 1.0) for owner in owners), divided or len(owners) > 1)


def test_boards_whose_holder_is_known_are_charged_to_it_by_their_own_counters() -> None:
    """The idle board is its holder's, and the busy one that nobody holds is nobody's."""
    of = drawn(60.0, 400.0, 300.0, 70.0, host=400.0)
    known = {"b0": on(A), "b1": on(), "b2": on(B), "b3": on(A)}
    assert charges(of, holds(A, 0.5), holds(B, 0.25), known=known) == {
        (A, Source.COUNTER): 130.0,
        (B, Source.COUNTER): 300.0,
        (NOBODY, Source.COUNTER): 400.0,
        (A, Source.ESTIMATED): 200.0,
        (B, Source.ESTIMATED): 100.0,
        (NOBODY, Source.ESTIMATED): 100.0,
    }


def test_a_divided_board_is_shared_by_those_on_it_and_estimated() -> None:
    known = {
        "b0": HeldBoard(((A, 1.0), (B, 3.0)), divided=True),
        "b1": on(A, divided=True),
        "b2": on(B),
    }
    assert charges(drawn(400.0, 100.0, 50.0), holds(A, 0.5), holds(B, 0.5), known=known) == {
        (A, Source.ESTIMATED): 200.0,
        (B, Source.ESTIMATED): 300.0,
        (B, Source.COUNTER): 50.0,
    }


def test_what_a_gap_is_filled_with_is_estimated_though_the_holder_is_known() -> None:
    found = charges(drawn(100.0, 100.0, measured=False), holds(A, 0.5), known={"b0": on(A), "b1": on()})
    assert found == {(A, Source.ESTIMATED): 100.0, (NOBODY, Source.ESTIMATED): 100.0}
    invented = charges(drawn(100.0), holds(A, 1.0), backend=Backend.SIMULATED, known={"b0": on(A)})
    assert invented == {(A, Source.SIMULATED): 100.0}


def test_a_board_that_is_missing_in_what_is_known_makes_the_number_count() -> None:
    of = drawn(100.0, 300.0)
    assert charges(of, holds(A, 0.5), known={"b0": on(A)}) == charges(of, holds(A, 0.5))


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
    known=st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 8)), max_size=3), st.booleans()),
        max_size=8,
    ),
    measured=st.booleans(),
)
def test_every_joule_is_somebodys_or_nobodys_once(
    boards: list[float],
    host: float,
    parts: list[float],
    known: list[tuple[list[tuple[int, float]], bool]],
    measured: bool,
) -> None:
    """Whether it is known who holds all boards, some of them or none."""
    owners = [Owner(str(i), "job") for i in range(6)]
    of = drawn(*boards, host=host, measured=measured)
    held = {
        f"b{i}": HeldBoard(tuple(((NOBODY, *owners)[who], part) for who, part in on_it), divided)
        for i, (on_it, divided) in enumerate(known)
    }
    holders = [holds(owner, part) for owner, part in zip(owners, parts, strict=False)]
    found = shared(of, holders, Backend.NVML, Backend.RAPL, held)
    assert sum(charge.joules for charge in found) == pytest.approx(sum(each.joules for each in of))
    assert all(charge.joules > 0 for charge in found)
