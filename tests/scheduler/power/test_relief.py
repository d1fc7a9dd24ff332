"""What is stopped where the lowest limits are above a budget: the order, no more than needed, nothing without need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busbar.scheduler.power import (
    Domain,
    DomainTree,
    NodeLeast,
    Relief,
    Tier,
    Work,
    domain_tree,
    relieve,
)

NODE = NodeLeast(idle_w=500.0, gains_w=(40.0,) * 8, boards=8.0)
"""A host of 500 W with its boards idle; each adds 40 W at work: 820 W."""


def tree(row_w: float = 10_000.0, red_w: float = 10_000.0, blue_w: float = 10_000.0) -> DomainTree:
    return domain_tree(
        (
            Domain("row", row_w, margin_percent=0),
            Domain("red", red_w, "row", nodes=("r0", "r1"), margin_percent=0),
            Domain("blue", blue_w, "row", nodes=("b0",), margin_percent=0),
        )
    )


def work(name: str, node: str = "r0", boards: float = 4.0, **more: object) -> Work:
    return replace(Work(name, {node: boards}), **more)  # type: ignore[arg-type]


def stopped(of: DomainTree, *works: Work, nodes: dict[str, NodeLeast] | None = None) -> list[str]:
    nodes = nodes or {"r0": NODE, "r1": NODE, "b0": NODE}
    return [stop.work for stop in relieve(of, nodes, works, of.order).stops]


def test_nothing_is_stopped_without_need() -> None:
    assert stopped(tree(red_w=1640.0), work("a")) == []
    assert stopped(tree(red_w=1639.0), work("a")) == ["a"]


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ((work("a", priority=5), work("b", priority=1, lost=99.0)), ["b"]),
        ((work("a", lost=9.0), work("b", lost=5.0)), ["b"]),
        ((work("a", boards=2, lost=9.0), work("b", boards=4, lost=9.0)), ["b"]),  # less lost for each watt
        ((work("a"), work("b")), ["a"]),
        ((work("a", priority=900), work("b", tier=Tier.SPARE)), ["a"]),
        ((work("a", priority=900, tier=Tier.SPARE), work("b", tier=Tier.NEEDED)), ["a"]),
        ((work("a", going=True), work("b")), []),
        ((work("a", node="b0"), work("b", node="r1")), ["b"]),
    ],
)
def test_the_order_of_victims(works: tuple[Work, ...], expected: list[str]) -> None:
    """80 W are lacking in one rack: two boards."""
    assert stopped(tree(red_w=1560.0), *works) == expected


def test_what_a_dearer_victim_makes_needless_is_spared() -> None:
    cheap, dear = work("cheap", boards=1, lost=1.0), work("dear", boards=4, lost=99.0)
    assert stopped(tree(red_w=1560.0), cheap, dear) == ["dear"]
    assert stopped(tree(red_w=1630.0), cheap, dear) == ["cheap"]


def test_a_stopped_board_goes_on_idling() -> None:
    made = relieve(tree(red_w=1000.0), {"r0": NODE}, [work("a", boards=8)], ["red"])
    assert (made.lacks_w, made.stops) == ({"red": -180.0}, ())
    made = relieve(tree(red_w=700.0), {"r0": NODE}, [work("a", boards=8)], ["red"])
    assert [(stop.work, stop.domain, stop.watts) for stop in made.stops] == [("a", "red", 320.0)]
    assert (made.lacks_w, made.remains_w) == ({"red": 120.0}, {"red": -200.0})


def test_the_lower_domain_goes_first_and_counts_above() -> None:
    cheap_blue, dear_red = work("blue", "b0", lost=0.0), work("red", "r0", lost=99.0)
    both = tree(row_w=2300.0, red_w=1560.0, blue_w=2300.0)
    made = relieve(both, {"r0": NODE, "r1": NODE, "b0": NODE}, [cheap_blue, dear_red], both.order)
    assert [(stop.work, stop.domain) for stop in made.stops] == [("red", "red")], "160 W suffice for the row"
    only_row = relieve(both, {"r0": NODE, "r1": NODE, "b0": NODE}, [cheap_blue, dear_red], ["row"])
    assert [(stop.work, stop.domain) for stop in only_row.stops] == [("blue", "row")]


def test_where_nothing_suffices_jobs_are_stopped_and_needed_replicas_serve_on() -> None:
    works = work("job"), work("spare", "r1", tier=Tier.SPARE), work("needed", "r1", tier=Tier.NEEDED)
    assert stopped(tree(red_w=900.0), *works) == ["job", "spare"]
    assert stopped(tree(red_w=1160.0), *works) == ["job", "spare", "needed"]
    assert stopped(tree(red_w=1000.0), work("saves", boards=0.0)) == []


def test_boards_without_limits_count_with_what_frees_least() -> None:
    """Nobody knows on which board the job is, so seven of eight free only what the obeying ones add."""
    mixed = replace(NODE, gains_w=(340.0, *(40.0,) * 7))
    assert (mixed.least_w(8), mixed.least_w(1), mixed.least_w(0)) == (1120.0, 840.0, 500.0)
    made = relieve(tree(red_w=900.0), {"r0": mixed}, [work("a", boards=7)], ["red"])
    assert [stop.watts for stop in made.stops] == [280.0]


BOARDS = st.integers(0, 4).map(float)


@st.composite
def cases(draw: st.DrawFn) -> tuple[DomainTree, dict[str, NodeLeast], list[Work]]:
    works, held = [], dict.fromkeys(("r0", "r1", "b0"), 0.0)
    for i in range(draw(st.integers(0, 7))):
        boards = {}
        for name in draw(st.sets(st.sampled_from(sorted(held)), min_size=1, max_size=2)):
            room = min(draw(BOARDS), 8.0 - held[name])
            held[name] += room
            boards[name] = room
        works.append(
            Work(
                str(i),
                boards,
                draw(st.sampled_from(Tier)),
                draw(st.integers(0, 2)),
                float(draw(st.integers(0, 3))),
                draw(st.integers(0, 5)) == 0,
            )
        )
    nodes = {}
    for name, boards_held in held.items():
        gains = tuple(float(g) for g in draw(st.lists(st.sampled_from((0, 37, 337)), min_size=8, max_size=8)))
        nodes[name] = NodeLeast(500.0, gains, min(8.0, boards_held + draw(BOARDS)))
    row, red, blue = (float(draw(st.integers(400, most))) for most in (4000, 3000, 1500))
    return tree(max(row, red, blue), red, blue), nodes, works


def lacks(of: DomainTree, nodes: dict[str, NodeLeast], gone: list[Work]) -> dict[str, float]:
    """Counted anew."""
    found = {}
    for name in of.order:
        least = 0.0
        for node in of.members[name]:
            left = nodes[node].boards - sum(work.boards.get(node, 0.0) for work in gone)
            least += nodes[node].least_w(max(0.0, left))
        found[name] = least - of.domains[name].usable_w
    return found


def split(works: list[Work], made: Relief) -> tuple[list[Work], list[Work]]:
    """What goes by these stops or already, and what of it is stopped."""
    names = {stop.work for stop in made.stops}
    stops = [work for work in works if work.id in names]
    return [work for work in works if work.going or work.id in names], stops


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cases())
def test_as_few_as_needed_are_stopped_and_never_without_need(
    case: tuple[DomainTree, dict[str, NodeLeast], list[Work]],
) -> None:
    of, nodes, works = case
    made = relieve(of, nodes, works, of.order)
    gone, stops = split(works, made)
    remains = lacks(of, nodes, gone)
    assert made.remains_w == pytest.approx(remains)
    assert made.lacks_w == pytest.approx(lacks(of, nodes, []))
    assert not any(work.going for work in stops)
    for one in stops:
        without = lacks(of, nodes, [work for work in gone if work is not one])
        assert any(without[name] > max(0.0, remains[name]) + 1e-6 for name in of.order), "it is needed"
    if all(watts <= 0 for watts in made.unmet_w.values()):
        assert not stops
    for name in of.order:
        if remains[name] > 1e-2:
            rest = [w for w in works if w not in gone and any(n in of.members[name] for n in w.boards)]
            for one in rest:
                if one.tier is not Tier.NEEDED:
                    helped = lacks(of, nodes, [*gone, one])
                    assert helped[name] >= remains[name] - 1e-2, "all that helps is stopped"
            every = lacks(of, nodes, [*gone, *rest])
            assert every[name] > 0, "needed replicas are spared only where even they would not do"


@settings(max_examples=100, derandomize=True, deadline=None)
@given(cases())
def test_stopping_what_it_says_leaves_nothing_to_stop(
    case: tuple[DomainTree, dict[str, NodeLeast], list[Work]],
) -> None:
    of, nodes, works = case
    made = relieve(of, nodes, works, of.order)
    names = {stop.work for stop in made.stops}
    after = [replace(work, going=work.going or work.id in names) for work in works]
    assert relieve(of, nodes, after, of.order).stops == ()
    assert relieve(of, nodes, list(reversed(works)), of.order) == made
