"""What boards may draw by the caps of those that hold them, where that is known, where not yet, and where nobody says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.builders import job, placement, pod
from tests.operator.power.parts import domain, node

from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.operator.pods.replica_place import placement_note
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.board_parts import WHOLE, Parts, board_parts
from busbar.operator.power.membership import membership
from busbar.operator.watch.projections import Pod, Requests

FEED = membership([domain("rack", 2000.0, None, "Lease", 200.0, rack="a")], [node("n0", rack="a")])
FREE: Boards = dict.fromkeys("abcd", ())


def replica(cap: float, index: int = 0, boards: int = 1, **fields: Any) -> Pod:
    note = placement_note(placement(power_cap=cap))
    return holder("web", index, boards, kind="modelservice", placement=note, **fields)


def holder(of: str, index: int = 0, boards: int = 1, **fields: Any) -> Pod:
    requests = Requests(devices=(("nvidia.com/gpu", boards),))
    return pod(index, **{"owner": of, "node": "n0", "requests": requests, **fields})


def trains(percent: int | None, pods: int = 1, phase: str = "Running") -> TrainingJob:
    place = {"id": "x", "pool": "p", "accelerator": "A100", "pods": pods, "nodes": ["n0"] * pods}
    status = {"phase": phase, "admission": place | {"powerCapPercent": percent}}
    return job("big", status=status)


def parts(
    *pods: Pod, on: Mapping[str, tuple[Pod, ...]] | None = None, of: TrainingJob | None = None
) -> Parts:
    """Of a node with four boards.

    Args:
        on: who holds boards, by uuid; None: nobody says.
    """
    jobs = {Key("team", "big"): of} if of is not None else {}
    held = {} if on is None else {"n0": {**FREE, **{u: tuple(p.key for p in own) for u, own in on.items()}}}
    return board_parts(FEED, pods, jobs, held).get("n0", WHOLE)


def each(found: Parts) -> list[float]:
    return [found.of(uuid) for uuid in "abcd"]


def test_a_board_has_the_cap_of_its_holder_and_the_others_have_none() -> None:
    low, plain, of = replica(0.6), replica(1.0, 1), trains(70, pods=2)
    lead, second = holder("big"), holder("big", 1)
    found = parts(
        low, plain, lead, second, on={"a": (low,), "b": (lead,), "c": (second,), "d": (plain,)}, of=of
    )
    assert each(found) == [0.6, 0.7, 0.7, 1.0]
    ended = {"a": (low,), "b": (lead,), "c": (second,)}
    assert each(parts(low, lead, second, on=ended, of=trains(70, 2, "Succeeded"))) == [0.6, 1.0, 1.0, 1.0]
    assert each(parts(low, lead, second, on=ended, of=trains(None, 2))) == [0.6, 1.0, 1.0, 1.0]


def test_boards_that_nobody_holds_have_the_lowest_cap_of_those_that_come() -> None:
    low, high, plain = replica(0.6), replica(0.8, 1), replica(1.0, 2)
    assert each(parts(low, high, plain, on={"a": (plain,)})) == [1.0, 0.6, 0.6, 0.6]
    assert each(parts(low, high, plain, on={"a": (plain,), "b": (low,)})) == [1.0, 0.6, 0.8, 0.8]
    assert each(parts(low, high, plain, on={"a": (plain,), "b": (low,), "c": (high,)})) == [
        1.0,
        0.6,
        0.8,
        1.0,
    ]
    assert parts(plain, replica(1.0, 3), on={"a": (plain,)}) == WHOLE
    assert each(parts(replace(low, deleting=True), plain, on={"a": (plain,)})) == [1.0] * 4, (
        "it has left them"
    )


def test_a_job_that_was_admitted_comes_until_all_its_pods_are_found_on_boards() -> None:
    of, lead, second = trains(50, pods=2), holder("big"), holder("big", 1)
    plain = replica(1.0)
    assert each(parts(plain, on={"a": (plain,)}, of=of)) == [1.0, 0.5, 0.5, 0.5]
    assert each(parts(plain, lead, on={"a": (plain,), "b": (lead,)}, of=of)) == [1.0, 0.5, 0.5, 0.5]
    both = {"a": (plain,), "b": (lead,), "c": (second,)}
    assert each(parts(plain, lead, second, on=both, of=of)) == [1.0, 0.5, 0.5, 1.0]


def test_pods_that_are_gone_hold_nothing_and_one_that_changes_its_board_takes_its_cap_along() -> None:
    low, plain = replica(0.6), replica(1.0, 1)
    assert each(parts(low, on={"a": (plain,), "b": (low,)})) == [1.0, 0.6, 1.0, 1.0]
    assert each(parts(low, plain, on={"b": (plain,), "a": (low,)})) == [0.6, 1.0, 1.0, 1.0]


def test_a_board_of_several_pods_has_the_highest_of_their_caps() -> None:
    low, plain = replica(0.6), replica(1.0, 1)
    assert each(parts(low, plain, on={"a": (low, plain)})) == [1.0] * 4
    assert each(parts(low, replica(0.8, 1), on={"a": (low, replica(0.8, 1))})) == [0.8, 1.0, 1.0, 1.0]


def test_where_nobody_says_who_holds_boards_all_have_the_highest_cap_of_those_that_do() -> None:
    low, high, plain = replica(0.6), replica(0.8, 1), replica(1.0, 2)
    assert [parts(*held).rest for held in ((low,), (low, high), (low, plain))] == [0.6, 0.8, 1.0]
    of, lead = trains(70), holder("big")
    assert [parts(*held, of=of).rest for held in ((), (lead,), (lead, low), (lead, plain))] == [
        0.7,
        0.7,
        0.7,
        1.0,
    ]
    leaves = replace(plain, deleting=True)
    assert [parts(*held, of=of).rest for held in ((leaves,), (lead, leaves))] == [0.7, 0.7]
    assert parts(replace(low, deleting=True)).rest == 0.6


@pytest.mark.parametrize("on", [None, {}])
def test_nodes_that_no_policy_limits_and_pods_without_boards_have_no_parts(on: dict[str, Any] | None) -> None:
    assert parts(replica(0.6, node="n9"), replica(0.6, 1, boards=0), on=on) == WHOLE
    assert parts(replica(0.6, phase="Succeeded"), on=on) == WHOLE


CAPS = st.sampled_from((0.5, 0.6, 0.8, 1.0))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.tuples(CAPS, st.booleans()), max_size=4), st.randoms(use_true_random=False))
def test_no_board_is_above_its_holders_cap_nor_above_that_of_one_that_may_be_on_it(
    made: list[tuple[float, bool]], random: Any
) -> None:
    """Replicas of one board each, of which the kubelet has told some."""
    pods = [replica(cap, index) for index, (cap, _) in enumerate(made)]
    boards = random.sample("abcd", len(pods))
    told = {board: (each,) for board, each, (_, known) in zip(boards, pods, made, strict=True) if known}
    found = parts(*pods, on=told)
    for board, own in zip(boards, pods, strict=True):
        cap = made[pods.index(own)][0]
        assert found.of(board) <= cap
        if board in told:
            assert found.of(board) == cap, "and nobody is slowed for another's cap"
    if len(told) == len(pods):
        assert all(found.of(board) == 1.0 for board in set("abcd") - set(boards))
