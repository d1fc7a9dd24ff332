"""Which node hangs on which feed, and which trees are refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.power.parts import domain, node

from busbar.kube.types import PowerDomain
from busbar.operator.power.membership import Membership, membership
from busbar.scheduler.power import DomainFault


def reasons(found: Membership) -> dict[str, str]:
    return {name: fault.reason for name, fault in found.faults.items()}


def test_a_node_counts_on_its_feed_and_on_all_above() -> None:
    found = membership(
        [domain("row", 3000), domain("a", parent="row", rack="a"), domain("b", parent="row", rack="b")],
        [node("a1", rack="a"), node("a2", rack="a"), node("b1", rack="b"), node("away", rack="c")],
    )
    assert found.feeds == {"a1": ("a",), "a2": ("a",), "b1": ("b",)}
    assert found.members == {"row": ("a1", "a2", "b1"), "a": ("a1", "a2"), "b": ("b1",)}
    assert found.faults == {}


def test_more_labels_win_and_a_domain_below_wins_before_that() -> None:
    wide, narrow = domain("wide", rack="a"), domain("narrow", rack="a", row="1")
    assert membership([wide, narrow], [node("n", rack="a", row="1")]).feeds == {"n": ("narrow",)}
    below = domain("below", parent="narrow", rack="a")
    assert membership([narrow, below], [node("n", rack="a", row="1")]).feeds == {"n": ("below",)}


def test_a_node_on_two_feeds_is_an_error_at_both_and_counts_once_above_them() -> None:
    tree = [domain("row", 3000), domain("a", parent="row", rack="a"), domain("b", parent="row", kind="gpu")]
    found = membership(tree, [node("both", rack="a", kind="gpu"), node("a1", rack="a")])
    assert reasons(found) == {"a": DomainFault.NODE_TWICE, "b": DomainFault.NODE_TWICE}
    assert "both is selected by a, b" in found.faults["a"].message
    assert found.members == {"row": ("a1", "both"), "a": ("a1", "both"), "b": ("both",)}


FAULTY: tuple[tuple[str, list[PowerDomain], dict[str, str]], ...] = (
    ("unknown parent", [domain("a", parent="gone"), domain("b")], {"a": DomainFault.UNKNOWN_PARENT}),
    (
        "cycle",
        [domain("a", parent="b"), domain("b", parent="a"), domain("c")],
        {"a": DomainFault.CYCLE, "b": DomainFault.CYCLE},
    ),
    (
        "child above parent",
        [domain("row", 999), domain("a", 1000, "row"), domain("b", 999, "row")],
        {"a": DomainFault.CHILD_ABOVE_PARENT},
    ),
    (
        "sixth level",
        [domain(f"d{i}", parent=f"d{i - 1}" if i else None) for i in range(6)],
        {"d5": DomainFault.TOO_DEEP},
    ),
)


@pytest.mark.parametrize(("domains", "wrong"), [row[1:] for row in FAULTY], ids=[row[0] for row in FAULTY])
def test_a_wrong_domain_is_at_fault_and_its_neighbours_are_not(
    domains: list[PowerDomain], wrong: dict[str, str]
) -> None:
    found = membership(domains, [])
    assert reasons(found) == wrong
    assert all(fault.message.endswith(".") for fault in found.faults.values())


def test_a_domain_below_a_wrong_one_is_not_ready_either() -> None:
    found = membership([domain("a", parent="gone"), domain("b", parent="a")], [])
    assert reasons(found) == dict.fromkeys("ab", DomainFault.UNKNOWN_PARENT)


def test_nodes_in_a_cycle_are_members_of_all_of_it() -> None:
    found = membership(
        [domain("a", parent="b", rack="a"), domain("b", parent="a", rack="a")], [node("n", rack="a")]
    )
    assert found.members == {"a": ("n",), "b": ("n",)}


NAMES = ("a", "b", "c", "d", "e", "f")
LABELS = st.dictionaries(st.sampled_from("xyz"), st.sampled_from("01"), max_size=3)
SELECTED = st.dictionaries(st.sampled_from("xyz"), st.sampled_from("01"), min_size=1, max_size=2)
DOMAINS = st.lists(
    st.tuples(
        st.integers(1, 5), st.none() | st.sampled_from((*NAMES, "gone")), st.one_of(st.just({}), SELECTED)
    ),
    min_size=1,
    max_size=6,
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(DOMAINS, st.lists(LABELS, max_size=5))
def test_every_tree_has_an_answer_that_does_not_depend_on_the_order(
    trees: list[tuple[int, str | None, dict[str, str]]], labels: list[dict[str, str]]
) -> None:
    domains = [
        domain(name, watts * 100.0, parent if parent != name else None, "Observe", None, **selector)
        for name, (watts, parent, selector) in zip(NAMES, trees, strict=False)
    ]
    nodes = [node(f"n{i}", **each) for i, each in enumerate(labels)]
    found = membership(domains, nodes)
    assert found == membership(domains[::-1], nodes[::-1])
    by_name = {each.metadata.name: each for each in domains}
    for each in nodes:
        matching = {
            name
            for name, of in by_name.items()
            if of.spec.node_selector and of.spec.node_selector.items() <= set(each.labels)
        }
        on = found.feeds.get(each.name, ())
        assert bool(on) == bool(matching), "a node is in no domain only if none selects it"
        assert set(on) <= matching
        if len(on) > 1:
            assert all(name in found.faults for name in on)
    for name, members in found.members.items():
        parent = by_name[name].spec.parent
        if parent in by_name:
            assert set(members) <= set(found.members[parent]), "what hangs below counts above"
        if name not in found.faults and parent is not None:
            assert parent in by_name
            assert by_name[name].spec.budget_watts <= by_name[parent].spec.budget_watts
    ready = [name for name in by_name if name not in found.faults]
    for name in ready:
        chain = [name]
        while (parent := by_name[chain[-1]].spec.parent) is not None:
            chain.append(parent)
        assert len(chain) == len(set(chain)) <= 5
        assert all(
            by_name[lower].spec.budget_watts <= by_name[upper].spec.budget_watts
            for lower, upper in pairwise(chain)
        )
