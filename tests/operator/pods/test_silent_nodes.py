"""Which nodes count as silent, and when what is on them is given up."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from tests.operator.builders import NOW, running

from busbar.kube.informer import Key
from busbar.operator.pods.silent_nodes import (
    all_silent,
    is_given_up,
    next_given_up_s,
    silent_nodes,
    with_silence,
)
from busbar.operator.watch.projections import Node, project_node

AFTER_S = 60.0


def node(name: str, silent_since: datetime | None = None) -> Node:
    return Node(name, (), (), 8000, 32_000, 0, (), silent_since is None, silent_since=silent_since)


def test_the_next_look_is_when_the_node_is_given_up() -> None:
    silent = {f"node-{rank}": NOW - timedelta(seconds=age) for rank, age in enumerate((59, 0, 60))}
    assert next_given_up_s(silent, NOW, AFTER_S) == 1.0
    assert [is_given_up(running(rank), silent, NOW, AFTER_S) for rank in range(4)] == [
        False,
        False,
        True,
        False,
    ]
    assert next_given_up_s({"node-2": silent["node-2"]}, NOW, AFTER_S) is None
    assert next_given_up_s({}, NOW, AFTER_S) is None


def test_where_most_nodes_are_silent_none_is_lost() -> None:
    def seen(silent: int, of: int) -> set[str]:
        nodes = [node(f"node-{number}", NOW if number < silent else None) for number in range(of)]
        return set(silent_nodes([running(0), running(of - 1)], {Key("", n.name): n for n in nodes}))

    assert [seen(*counts) for counts in ((0, 4), (1, 1), (1, 2), (2, 4), (3, 4), (4, 4))] == [
        set(), set(), {"node-0"}, {"node-0"}, set(), set(),
    ]  # fmt: skip
    assert silent_nodes([running(9)], {}) == {}, "a node that is gone: its pods are deleted by Kubernetes"


def test_all_silent_nodes_are_named_unless_they_are_most_and_their_pods_are_marked() -> None:
    nodes = [node("node-0", NOW), node("node-1"), node("node-2")]
    assert all_silent(nodes) == {"node-0"}
    assert all_silent([*nodes, node("node-3", NOW), node("node-4", NOW)]) == set()
    pods = with_silence([running(0), running(1, pinned="node-0", node="")], {"node-0"})
    assert [pod.silent for pod in pods] == [True, True]
    assert with_silence([running(1)], {"node-0"}) == (running(1),)


@pytest.mark.parametrize(
    ("status", "silent"),
    [("True", None), ("False", None), ("Unknown", NOW)],
    ids=["ready", "not ready", "silent"],
)
def test_a_node_is_silent_when_its_kubelet_is(status: str, silent: datetime | None) -> None:
    condition = {"type": "Ready", "status": status, "lastTransitionTime": NOW.isoformat()}
    seen = project_node({"metadata": {"name": "n"}, "status": {"conditions": [condition]}})
    assert (seen.ready, seen.silent_since) == (status == "True", silent)
    assert replace(seen, silent_since=None, ready=True) == replace(
        project_node({"metadata": {"name": "n"}}), ready=True
    )
