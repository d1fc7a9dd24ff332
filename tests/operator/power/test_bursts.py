"""LeaseWithBurst, with real agents, guards and rounds: what passes above the leases, and what holds when something dies.

Red serves: its boards draw 400 W for 0.4 s of every two seconds, and 150 W otherwise. Blue trains: 400 W all the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.operator.power.feeds import BLUE, FLOOR_W, HOST_W, NAMEPLATE_W, RED, STEP_S, Feeds

from busbar.operator.agent import heartbeat
from busbar.operator.agent.heartbeat import Heartbeat

PEAK_STEPS, EVERY_STEPS = 2, 10
EXCESS_W = NAMEPLATE_W - FLOOR_W


@pytest.fixture(autouse=True)
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats in memory: files are tested elsewhere, and are slow."""
    files: dict[Path, Heartbeat] = {}

    def write(path: Path, at_s: float, released: Iterable[str]) -> None:
        files[path] = Heartbeat(at_s, frozenset(released))

    monkeypatch.setattr(heartbeat, "write", write)
    monkeypatch.setattr(heartbeat, "read", lambda path: files.get(path, Heartbeat()))


class Row:
    """The feeds with that work, and what they carried."""

    def __init__(self, folder: Path, policy: str = "LeaseWithBurst") -> None:
        self.feeds = Feeds(folder, policy=policy)
        self.serving = True
        self.draws: list[dict[str, float]] = []
        self.above = 0
        self.work()

    def work(self) -> None:
        """What the boards want in the next step."""
        for i, name in enumerate(RED):
            peak = (self.feeds.steps + 3 * i) % EVERY_STEPS < PEAK_STEPS
            watts = 400.0 if peak or not self.serving else 150.0
            self.feeds.machines[name].boards.wants.update(dict.fromkeys("abcd", watts))

    def run(self, seconds: float) -> None:
        """Steps, and notes what the feeds carry."""

        def each() -> None:
            self.draws.append(self.feeds.draws())
            self.above += sum(self._lease_w(name) < self.feeds.machines[name].draw_w for name in RED)
            self.work()

        self.feeds.run(seconds, each)

    def _lease_w(self, name: str) -> float:
        machine = self.feeds.machines[name]
        limits = machine.answer().limits if machine.agent is not None else None
        return limits.lease_watts or FLOOR_W if limits is not None else NAMEPLATE_W

    def worst(self, feed: str, seconds: float) -> float:
        """The highest mean of so many seconds above the budget, in watts; below 0: never above."""
        steps = round(seconds / STEP_S)
        watts = [draws[feed] for draws in self.draws]
        means = (sum(watts[i : i + steps]) / steps for i in range(len(watts) - steps + 1))
        return max(means) - self.feeds.domains[feed].spec.budget_watts

    def within(self, seconds: float = 10.0) -> None:
        for feed in self.feeds.domains:
            assert self.worst(feed, seconds) <= 0, feed


@pytest.fixture
def row(tmp_path: Path) -> Row:
    made = Row(tmp_path)
    made.run(60)
    return made


def test_peaks_pass_and_the_feed_is_above_its_budget_by_the_buckets_at_most(row: Row) -> None:
    row.draws.clear()
    row.above = 0
    row.run(60)
    assert row.above >= 20, "peaks were above the leases"
    row.within()
    depth_j = 0.1 * 0.99 * row.feeds.domains["red"].spec.budget_watts
    one_look_late_j = len(RED) * EXCESS_W * STEP_S
    assert row.worst("red", 1.0) <= depth_j + one_look_late_j


def test_peaks_are_higher_than_under_leases_alone(tmp_path: Path) -> None:
    drawn = {}
    for policy in ("Lease", "LeaseWithBurst"):
        (tmp_path / policy).mkdir()
        made = Row(tmp_path / policy, policy)
        made.run(60)
        made.draws.clear()
        made.run(40)
        made.within()
        drawn[policy] = sum(draws["red"] for draws in made.draws) / len(made.draws)
    assert drawn["LeaseWithBurst"] > drawn["Lease"] + 100


def test_nodes_that_train_have_no_bucket_and_their_return_is_limited_at_once(row: Row) -> None:
    for name in BLUE:
        row.feeds.machines[name].boards.wants.update(dict.fromkeys("abcd", 60.0))
    row.run(20)
    for name in BLUE:
        row.feeds.machines[name].boards.wants.clear()
    row.draws.clear()
    row.run(20)
    assert row.worst("blue", STEP_S) <= 0
    row.within()


def test_peaks_that_do_not_end_are_limited_and_lose_their_bucket(row: Row) -> None:
    row.serving = False
    row.draws.clear()
    row.run(60)
    row.within()
    row.draws.clear()
    row.run(10)
    assert row.worst("row", STEP_S) <= 0


def test_agents_that_die_or_stand_still_are_lowered_by_their_guards(row: Row) -> None:
    row.draws.clear()
    row.feeds.machines["red-0"].agent = None
    row.feeds.machines["red-1"].stopped = True
    row.run(2)
    assert row.feeds.machines["red-0"].limit_w == row.feeds.machines["red-1"].limit_w == FLOOR_W
    row.run(20)
    row.feeds.machines["red-0"].start()
    row.feeds.machines["red-1"].stopped = False
    row.run(30)
    row.within()


def test_agent_and_guard_dead_leave_boards_without_limits_and_the_others_give_way(row: Row) -> None:
    """No process is left that could limit them: from when the node is silent it counts with its nameplate."""
    dead = row.feeds.machines["red-0"]
    for _ in range(100):
        if dead.boards.truth.total_w == 1600.0:
            break
        row.run(STEP_S)
    assert dead.limit_w == NAMEPLATE_W, "its boards run free"
    dead.agent, dead.guarded, row.serving = None, False, False
    row.run(6)
    row.draws.clear()
    row.run(60)
    assert row.worst("red", STEP_S) <= 0
    assert row.worst("row", STEP_S) <= 0
    dead.start()
    row.serving = True
    row.run(40)
    row.within()
    assert row.feeds.machines["red-1"].limit_w > FLOOR_W


def test_an_operator_that_dies_leaves_leases_and_buckets_that_end(row: Row) -> None:
    row.draws.clear()
    row.feeds.away()
    row.run(11)
    row.run(60)
    row.within()
    assert row.draws[-1]["row"] <= 6 * FLOOR_W
    row.feeds.lead()
    row.run(60)
    row.within()
    assert row.feeds.used() > 0.8


def test_a_cut_network_and_lost_messages(row: Row) -> None:
    row.draws.clear()
    row.feeds.network.no_leases |= {"red-0", "blue-0"}
    row.run(25)
    row.feeds.network.no_leases.clear()
    row.feeds.network.loss, row.feeds.network.delay_s = 0.3, 3.0
    row.run(60)
    row.within()


def test_a_domain_that_lets_no_peaks_pass_any_more(row: Row) -> None:
    for name in ("red", "blue"):
        row.feeds.set(name, policy="Lease")
    row.run(5)
    row.draws.clear()
    row.run(30)
    for feed in row.feeds.domains:
        assert row.worst(feed, STEP_S) <= 0
    assert row.feeds.machines["red-0"].limit_w > HOST_W
