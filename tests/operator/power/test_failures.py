"""Whatever dies, hangs, is cut off, lies or changes: no feed carries more than its budget. The truth is the boards' draw."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.power.feeds import BLUE, FLOOR_W, HOST_W, RED, Feeds
from tests.operator.power.parts import domain, node

from busbar.operator.agent import heartbeat
from busbar.operator.agent.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats in memory: files are tested elsewhere, and are slow."""
    files: dict[Path, Heartbeat] = {}

    def write(path: Path, at_s: float, released: Iterable[str]) -> None:
        files[path] = Heartbeat(at_s, frozenset(released))

    monkeypatch.setattr(heartbeat, "write", write)
    monkeypatch.setattr(heartbeat, "read", lambda path: files.get(path, Heartbeat()))


@pytest.fixture
def feeds(tmp_path: Path) -> Feeds:
    """A row whose budget has been in use for a while."""
    made = Feeds(tmp_path)
    made.run(30, made.within)
    assert made.used() > 0.97
    return made


@pytest.mark.parametrize("policy", ["Static", "Lease"])
def test_the_budget_is_used_and_never_exceeded_from_the_first_moment(tmp_path: Path, policy: str) -> None:
    made = Feeds(tmp_path, policy=policy)
    made.run(40, made.within)
    assert made.used() > 0.97
    assert made.last is not None
    assert made.last.feeds["row"].leased_w <= 0.99 * 9_500 + 1e-6


def test_static_leases_are_equal_and_others_go_where_they_are_wanted(tmp_path: Path) -> None:
    limits = {}
    for policy in ("Static", "Lease"):
        made = Feeds(tmp_path, policy=policy)
        for name in RED:
            made.machines[name].boards.wants.update(dict.fromkeys("abcd", 120.0))
        made.run(90, made.within)
        limits[policy] = {name: made.machines[name].limit_w for name in RED + BLUE}
    static, lease = limits["Static"], limits["Lease"]
    assert max(static.values()) - min(static.values()) <= 4, "whole watts on four boards"
    assert lease["blue-0"] > static["blue-0"] + 100
    assert lease["red-0"] < static["red-0"]
    assert lease["red-0"] >= 500 + 4 * 120, "what it wants"


def test_agents_that_are_killed_or_stopped_are_lowered_by_their_guards(feeds: Feeds) -> None:
    feeds.machines["red-0"].agent = None
    feeds.machines["blue-0"].stopped = True
    feeds.run(2, feeds.within)
    assert feeds.machines["red-0"].limit_w == feeds.machines["blue-0"].limit_w == FLOOR_W
    feeds.run(20, feeds.within)
    feeds.machines["red-0"].start()
    feeds.machines["blue-0"].stopped = False
    feeds.run(30, feeds.within)
    assert feeds.used() > 0.97


def test_all_agents_at_once(feeds: Feeds) -> None:
    for machine in feeds.machines.values():
        machine.stopped = True
    feeds.run(3, feeds.within)
    assert feeds.draws()["row"] == 6 * FLOOR_W
    for machine in feeds.machines.values():
        machine.stopped = False
    feeds.run(30, feeds.within)
    assert feeds.used() > 0.97


def test_agent_and_guard_dead_leave_the_last_limit_and_the_others_respect_it(feeds: Feeds) -> None:
    dead = feeds.machines["red-0"]
    before = dead.limit_w
    dead.agent, dead.guarded = None, False
    feeds.run(60, feeds.within)
    assert dead.limit_w == before > FLOOR_W
    feeds.set("row", budgetWatts=8_000.0)
    feeds.run(3)
    feeds.run(60, feeds.within)
    dead.start()
    feeds.run(30, feeds.within)
    assert feeds.used() > 0.97


def test_an_operator_that_is_killed_leaves_leases_that_end(feeds: Feeds) -> None:
    feeds.away()
    feeds.run(6, feeds.within)
    assert feeds.used() > 0.97
    feeds.run(600, feeds.within)
    assert feeds.draws()["row"] == 6 * FLOOR_W
    feeds.lead()
    feeds.run(30, feeds.within)
    assert feeds.used() > 0.97


@pytest.mark.parametrize("away_s", [0.2, 1.0, 3.0, 9.6, 11.0])
def test_an_operator_that_is_back_before_its_leases_have_ended_raises_nothing_too_early(
    feeds: Feeds, away_s: float
) -> None:
    feeds.network.delay_s = 4.0
    for name in RED:
        feeds.machines[name].boards.wants.update(dict.fromkeys("abcd", 60.0))
    feeds.run(20, feeds.within)
    feeds.away()
    feeds.run(away_s, feeds.within)
    for name in RED:
        feeds.machines[name].boards.wants.clear()
    feeds.lead()
    feeds.run(40, feeds.within)


@pytest.mark.parametrize("messages", range(6))
def test_an_operator_that_is_killed_between_two_messages(feeds: Feeds, messages: int) -> None:
    """Work moves from red to blue, and the round that follows is sent in part."""
    for name in RED:
        feeds.machines[name].boards.wants.update(dict.fromkeys("abcd", 60.0))
    feeds.run(65, feeds.within)
    for name in RED:
        feeds.machines[name].boards.wants.clear()
    feeds.dies_after = messages
    feeds.run(8, feeds.within)
    assert feeds.state is None
    feeds.dies_after = None
    feeds.lead()
    feeds.run(30, feeds.within)
    assert feeds.used() > 0.97


def test_a_third_of_the_nodes_is_cut_off_both_ways_or_one(feeds: Feeds) -> None:
    for cut in (feeds.network.no_answers, feeds.network.no_leases):
        cut |= {"red-0", "blue-0"}
        feeds.run(25, feeds.within)
        assert feeds.machines["red-0"].limit_w == FLOOR_W, "its lease has ended"
        cut.clear()
        feeds.run(30, feeds.within)
        assert feeds.used() > 0.97
    feeds.network.no_answers |= {"red-0", "blue-0"}
    feeds.network.no_leases |= {"red-0", "blue-0"}
    feeds.run(25, feeds.within)


@settings(derandomize=True, max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    loss=st.sampled_from((0.0, 0.3, 0.6)),
    delay_s=st.sampled_from((0.0, 1.5, 5.0, 15.0)),
    doubles=st.sampled_from((0.0, 0.3)),
)
def test_messages_that_are_late_lost_doubled_or_reordered(
    tmp_path_factory: pytest.TempPathFactory, seed: int, loss: float, delay_s: float, doubles: float
) -> None:
    made = Feeds(tmp_path_factory.mktemp("feeds"), seed)
    made.network.loss, made.network.delay_s, made.network.doubles = loss, delay_s, doubles
    for _ in range(8):
        name = made.random.choice(RED + BLUE)
        machine = made.machines[name]
        match made.random.choice(("wants", "stop", "kill", "lead", "nothing")):
            case "wants":
                watts = made.random.choice((60.0, 250.0, 400.0))
                machine.boards.wants.update(dict.fromkeys("abcd", watts))
            case "stop":
                machine.stopped = not machine.stopped
            case "kill":
                machine.start()
            case "lead":
                made.lead()
        made.run(6, made.within)


def test_frozen_or_impossible_telemetry_is_silence(feeds: Feeds) -> None:
    machine = feeds.machines["red-0"]
    told = machine.answer()
    nan = told.model_copy(update={"clock_s": float("nan")})
    spike = told.boards[0].model_copy(update={"watts": 4000.0})
    for lie in (told, nan, told.model_copy(update={"boards": (spike, *told.boards[1:])})):
        machine.answer = lambda lie=lie: lie  # type: ignore[method-assign, misc]
        feeds.run(20, feeds.within)
        assert machine.limit_w == FLOOR_W, "its lease was not renewed"
    del machine.answer
    feeds.run(30, feeds.within)
    assert feeds.used() > 0.97


def test_a_budget_that_is_cut_is_reached_in_two_rounds(feeds: Feeds) -> None:
    feeds.set("row", budgetWatts=6_650.0)
    feeds.set("red", budgetWatts=3_500.0)
    feeds.set("blue", budgetWatts=3_850.0)
    feeds.run(2)
    feeds.run(30, feeds.within)
    assert feeds.used() > 0.97


def test_a_budget_that_is_cut_while_nodes_are_away_is_reached_when_their_leases_have_ended(
    feeds: Feeds,
) -> None:
    feeds.network.no_leases |= {"red-0", "blue-0"}
    feeds.set("row", budgetWatts=6_650.0)
    feeds.run(11)
    feeds.run(20, feeds.within)


def test_budgets_below_the_lowest_limits_are_said_and_everything_is_at_them(feeds: Feeds) -> None:
    feeds.set("red", budgetWatts=2_000.0)
    feeds.run(3)
    assert feeds.draws()["red"] == 3 * FLOOR_W
    assert feeds.last is not None
    assert feeds.last.feeds["red"].floor_above_budget
    assert not feeds.last.feeds["row"].floor_above_budget


def test_somebody_else_writes_limits(feeds: Feeds) -> None:
    """A second's mean is what breakers and bills see; a foreign limit lasts until the agent looks, a fifth of it."""
    before = len(feeds.means["row"])
    for second in range(20):
        feeds.machines["red-0"].boards.truth.set_w["a"] = 400.0
        feeds.run(1)
        if second == 3:
            (conflicts,) = (
                r.limits and r.limits.conflicts for n, r in feeds.gatherer.readings.items() if n == "red-0"
            )
            assert conflicts == ("a",)
            assert feeds.machines["red-0"].limit_w == FLOOR_W, (
                "it counts with its nameplate, and is not to use it"
            )
    for name, means in feeds.means.items():
        assert max(means[before:]) <= feeds.domains[name].spec.budget_watts
    feeds.run(50, feeds.within)
    assert feeds.used() < 0.97, "for a minute after the last foreign write"
    feeds.run(40, feeds.within)
    assert feeds.used() > 0.97


def test_a_board_that_ignores_limits_counts_with_its_nameplate(feeds: Feeds) -> None:
    boards = feeds.machines["red-0"].boards
    boards.truth.deaf.add("a")
    boards.wants["a"] = 400.0  # and draws it
    feeds.run(5)
    feeds.run(60, feeds.within)
    assert feeds.gatherer.readings["red-0"].refuses
    refusing = feeds.machines["blue-0"].boards.truth
    refusing.refusing.add("b")
    feeds.set("row", budgetWatts=8_000.0)
    feeds.run(4)
    feeds.run(40, feeds.within)
    assert feeds.gatherer.readings["blue-0"].refuses


def test_a_policy_that_goes_back_to_observe_puts_the_defaults_back(feeds: Feeds) -> None:
    feeds.set("red", policy="Observe", budgetWatts=6_400.0)
    feeds.set("row", budgetWatts=12_000.0)
    feeds.run(5)
    assert all(feeds.machines[name].limit_w == 2100 for name in RED)
    feeds.run(20, feeds.within)
    feeds.set("red", policy="Lease", budgetWatts=5_000.0)
    feeds.set("row", budgetWatts=9_500.0)
    feeds.run(4)
    feeds.run(30, feeds.within)
    assert feeds.used() > 0.97


def test_boards_are_released_only_when_their_nameplates_fit_beside_the_others(feeds: Feeds) -> None:
    """Red with its nameplates and blue at its lowest limits are 9,000 W; blue has to give way first."""
    feeds.set("red", policy="Observe", budgetWatts=6_400.0)
    feeds.run(30, feeds.within)
    assert all(feeds.machines[name].limit_w == 2100 for name in RED)
    assert feeds.used() > 0.97
    feeds.set("row", budgetWatts=8_000.0)
    feeds.set("red", policy="Lease", budgetWatts=5_000.0)
    feeds.run(5)
    feeds.run(30, feeds.within)
    feeds.set("red", policy="Observe", budgetWatts=6_400.0)
    feeds.run(60)
    assert all(feeds.machines[name].limit_w < 2100 for name in RED), "they do not fit, so nothing is released"
    feeds.within()


def test_a_domain_that_is_deleted_releases_its_nodes(feeds: Feeds) -> None:
    for name in ("row", "red", "blue"):
        del feeds.domains[name]
    feeds.run(3)
    assert all(machine.limit_w == 2100 for machine in feeds.machines.values())


@pytest.mark.parametrize("fault", [{"parent": "nowhere"}, {"parent": "blue"}, {"budgetWatts": 9_600.0}])
def test_a_domain_at_fault_leaves_its_nodes_at_their_lowest_limits_and_counts_where_it_was(
    feeds: Feeds, fault: dict[str, object]
) -> None:
    """Its parent is unknown or smaller than it is."""
    before = {"parent": "row", "budgetWatts": 5_000.0}
    if fault == {"parent": "blue"}:
        feeds.set("blue", budgetWatts=4_900.0)
        feeds.run(3)
    feeds.set("red", **fault)
    assert "red" in feeds.membership.faults
    feeds.run(40, feeds.within)
    assert feeds.draws()["red"] == 3 * FLOOR_W
    feeds.set("red", **before)
    feeds.run(30, feeds.within)


def test_two_domains_that_select_one_node(feeds: Feeds) -> None:
    feeds.domains["second"] = domain("second", 4_000.0, "row", "Lease", HOST_W, rack="blue")
    assert feeds.membership.faults.keys() == {"blue", "second"}
    feeds.run(40, feeds.within)
    assert feeds.draws()["blue"] == 3 * FLOOR_W
    del feeds.domains["second"]
    feeds.run(30, feeds.within)
    assert feeds.used() > 0.97


def test_nodes_that_move_under_load_count_in_one_budget(feeds: Feeds) -> None:
    """Red may carry 5,000 W and blue 5,500 W, with two nodes and with four."""
    moved = [each for each in feeds.nodes if each.name != "red-0"]
    feeds.nodes = [*moved, node("red-0", rack="blue")]

    def holds() -> None:
        draws = feeds.draws()
        red_0 = feeds.machines["red-0"].draw_w
        assert draws["row"] <= 9_500
        assert draws["red"] - red_0 <= 5_000

    feeds.run(2, holds)

    def settled() -> None:
        holds()
        assert feeds.draws()["blue"] + feeds.machines["red-0"].draw_w <= 5_500

    feeds.run(40, settled)


def test_a_node_whose_object_is_deleted_counts_until_its_lease_has_ended(feeds: Feeds) -> None:
    feeds.nodes = [each for each in feeds.nodes if each.name != "red-0"]
    gone = feeds.machines["red-0"]
    feeds.run(10, feeds.within)
    assert gone.limit_w == FLOOR_W

    def without() -> None:
        assert feeds.draws()["row"] - gone.draw_w <= 9_500

    feeds.run(30, without)
    assert feeds.draws()["row"] - gone.draw_w > 0.97 * 0.99 * 9_500, "from then on it counts on no feed"


def test_a_node_that_never_reported_keeps_all_others_at_their_lowest_limits(tmp_path: Path) -> None:
    made = Feeds(tmp_path)
    made.network.no_answers.add("red-0")
    made.run(20, made.within)
    assert made.draws()["row"] == 6 * FLOOR_W
    assert [made.unknown(name) for name in ("red", "row", "blue")] == [("red-0",), ("red-0",), ()]
    for name in ("red", "blue"):
        made.set(name, unreportedNodeWatts=2_100.0)
    made.machines["red-0"].boards.truth.set_w.clear()
    made.machines["red-0"].agent, made.machines["red-0"].guarded = None, False
    made.run(30, made.within)
    assert made.machines["red-0"].limit_w == 2_100, "whatever it does"
    assert made.unknown("red") == ()
    assert made.used() > 0.97
    made.machines["red-0"].start()
    made.network.no_answers.clear()
    made.run(30, made.within)
    assert made.used() > 0.97
