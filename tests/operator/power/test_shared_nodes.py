"""Pods under different caps on one node, from the kubelet's word to the limits of its boards, while it is unknown, late and
wrong who holds which board.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import pytest
from tests.operator.power.feeds import RED, Feeds
from tests.operator.power.test_board_parts import replica

from busbar.kube.informer import Key
from busbar.operator.agent.limits import NEAR_W
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.work import NodeWork, node_work
from busbar.operator.watch.projections import Pod

NODE = RED[0]
BOARDS = "abcd"
TOLD_S = 5.0
"""A lease is renewed every three seconds, and the agent writes limits a fifth of a second later."""


class Shared:
    """Replicas of one board each on the first node of a rack; the test plays the kubelet."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.feeds = Feeds(folder, seed)
        self.on: dict[str, tuple[Pod, float]] = {}
        """By board its holder, and the cap of that one."""
        self.told: dict[str, tuple[Key, ...]] | None = {}
        """What the kubelet says; None: nothing."""
        self.since: dict[Key, float] = {}
        """Since when the kubelet has said where a pod is."""
        self.count = 0
        self.feeds.works = self._works

    def _works(self) -> Mapping[str, NodeWork]:
        boards: dict[str, Boards] = {}
        if self.told is not None:
            boards[NODE] = {uuid: self.told.get(uuid, ()) for uuid in BOARDS}
        pods = [pod for pod, _ in self.on.values()]
        return node_work(self.feeds.membership, pods, {}, {}, boards=boards)

    def starts(self, board: str, cap: float) -> None:
        self.count += 1
        self.on[board] = replica(cap, self.count, node=NODE), cap

    def tells(self) -> None:
        """The kubelet says it as it is."""
        self.told = {board: (pod.key,) for board, (pod, _) in self.on.items()}

    def limits(self) -> list[float]:
        boards = self.feeds.machines[NODE].boards.truth
        return [boards.limit_w(board) for board in BOARDS]

    def look(self) -> None:
        """No feed carries too much, no node has more than its lease, and no board more than its holder may have."""
        self.feeds.within()
        machine, now_s = self.feeds.machines[NODE], self.feeds.world.now_s
        if machine.agent is not None:
            held = machine.agent._limiters[NODE].held
            assert sum(self.limits()) <= max(held.boards_w, 400.0) + 4 * NEAR_W / 2
        for board in BOARDS:
            pod, cap = self.on.get(board, (None, 1.0))
            if pod is None or self.told is None or self.told.get(board) != (pod.key,):
                self.since = {key: since for key, since in self.since.items() if pod and key != pod.key}
            elif now_s - self.since.setdefault(pod.key, now_s) > TOLD_S:
                assert machine.boards.truth.limit_w(board) <= max(400.0 * cap, 100.0) + NEAR_W / 2

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        def step() -> None:
            self.look()
            each()

        self.feeds.run(seconds, step)


def roomy(folder: Path) -> Shared:
    """With watts for every board."""
    made = Shared(folder)
    made.feeds.set("row", budgetWatts=20_000.0)
    made.feeds.set("red", budgetWatts=9_000.0)
    return made


def half_and_whole(folder: Path) -> Shared:
    """With a pod under a cap of one half on the first board and one without on the second, as the kubelet says."""
    made = roomy(folder)
    made.starts("a", 0.5)
    made.starts("b", 1.0)
    made.tells()
    made.run(30)
    return made


def test_each_board_has_the_limit_of_its_holder_and_free_ones_that_of_who_comes(tmp_path: Path) -> None:
    made = half_and_whole(tmp_path)
    assert made.limits() == [200.0, 400.0, 400.0, 400.0]
    made.starts("c", 0.8)
    made.run(6)
    assert made.limits() == [200.0, 400.0, 320.0, 320.0], "it is on one of them"
    made.tells()
    made.run(6)
    assert made.limits() == [200.0, 400.0, 320.0, 400.0]


def test_while_the_kubelet_is_silent_nobody_is_slowed_and_the_feed_holds(tmp_path: Path) -> None:
    made = half_and_whole(tmp_path)
    made.told = None
    made.run(10)
    assert made.limits() == [400.0] * 4
    made.tells()
    made.run(6)
    assert made.limits() == [200.0, 400.0, 400.0, 400.0]


def test_a_board_that_changes_hands_has_the_cap_of_the_new_holder(tmp_path: Path) -> None:
    made = half_and_whole(tmp_path)
    made.starts("a", 1.0)
    made.starts("b", 0.6)
    made.tells()
    made.run(6)
    assert made.limits() == [400.0, 240.0, 400.0, 400.0]


def test_an_agent_that_starts_anew_holds_the_lowest_limits_and_then_those_of_the_holders(
    tmp_path: Path,
) -> None:
    made = roomy(tmp_path)
    made.starts("a", 0.5)
    made.tells()
    made.run(30)
    made.feeds.machines[NODE].start()
    made.run(0.4)
    assert made.limits() == [100.0] * 4
    made.run(20)
    assert made.limits() == [200.0, 400.0, 400.0, 400.0]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_mix_of_caps_no_feed_is_over_and_no_board_above_its_holders_cap(
    tmp_path: Path, seed: int
) -> None:
    """Pods come and go; the kubelet is late, silent or right; agents and operator start anew."""
    random, made = Random(seed), Shared(tmp_path, seed)
    made.feeds.set("red", budgetWatts=3_200.0 + 800.0 * seed)

    def happens() -> None:
        if random.random() < 0.06:
            board = random.choice(BOARDS)
            if random.random() < 0.3:
                made.on.pop(board, None)
            else:
                made.starts(board, random.choice((0.3, 0.5, 0.7, 1.0)))
        if random.random() < 0.06:
            made.tells()
        elif random.random() < 0.01:
            made.told = None
        if random.random() < 0.005:
            made.feeds.machines[NODE].start()
        if random.random() < 0.005:
            made.feeds.lead()

    made.run(40, happens)
    made.tells()
    made.run(15)
    watts = dict(zip(BOARDS, made.limits(), strict=True))
    for board, (_, cap) in made.on.items():
        assert watts[board] <= max(400.0 * cap, 100.0) + NEAR_W / 2
