"""What the controller decides, by example."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from tests.scheduler.power.row import BUSY, CURVES, IDLE, delivered, fresh, node, told

from busbar.scheduler.errors import PowerError
from busbar.scheduler.power import (
    ControlSettings,
    Decision,
    Domain,
    HeldLease,
    LeaseReason,
    Memory,
    NodePower,
    NodeReport,
    NodeTelemetry,
    Phase,
    PhaseLoad,
    PowerPolicy,
    begin,
    control,
    domain_tree,
)

QUICK = ControlSettings(raise_per_s=10.0)


Change = Callable[[NodeTelemetry], NodeTelemetry]


def _unchanged(answer: NodeTelemetry) -> NodeTelemetry:
    return answer


class Row:
    """A controller and its nodes; every message arrives within the round."""

    def __init__(self, domains: tuple[Domain, ...], nodes: tuple[NodePower, ...]) -> None:
        self.domains = domains
        self.nodes = {one.name: one for one in nodes}
        self.held = fresh(nodes)
        self.memory: Memory = begin(0.0, 1)
        self.now = 0.0
        self.phases: dict[str, tuple[PhaseLoad, ...]] = {}
        self.changes: dict[str, Change] = {}
        self.silent: set[str] = set()

    def round(self, settings: ControlSettings = QUICK) -> Decision:
        self.now += 1.0
        decision = control(
            domain_tree(self.domains),
            self.nodes,
            self._telemetry(),
            CURVES,
            self.now,
            self.memory,
            settings,
        )
        self.memory = decision.memory
        self.held = delivered(self.held, decision, self.now)
        return decision

    def _telemetry(self) -> dict[str, NodeTelemetry]:
        return {
            name: self.changes.get(name, _unchanged)(
                told(self.held[name], name, self.now, self.phases.get(name, BUSY))
            )
            for name in self.nodes
            if name not in self.silent
        }

    def rounds(self, count: int, settings: ControlSettings = QUICK) -> Decision:
        for _ in range(count - 1):
            self.round(settings)
        return self.round(settings)


def _by_name(decision: Decision) -> Mapping[str, NodeReport]:
    return {report.node: report for report in decision.nodes}


def _watts(decision: Decision) -> dict[str, float]:
    return {report.node: round(report.counted_w) for report in decision.nodes}


def _two(budget_w: float, policy: PowerPolicy = PowerPolicy.LEASE, weight: float = 1.0) -> Row:
    nodes = (node("a", weight), node("b"))
    return Row((Domain("d", budget_w, policy=policy, nodes=("a", "b"), margin_percent=0),), nodes)


def test_the_first_leases_are_floors_until_the_node_confirms_one() -> None:
    row = _two(8000)
    first = row.round()
    assert _by_name(first)["a"].reason is LeaseReason.UNKNOWN
    assert [lease.watts for lease in first.leases] == [2000, 2000]
    assert _watts(row.rounds(3)) == {"a": 4000, "b": 4000}


def test_with_watts_for_all_nobody_is_limited() -> None:
    decision = _two(20_000).rounds(4)
    assert _watts(decision) == {"a": 5000, "b": 5000}
    assert _by_name(decision)["a"].reason is LeaseReason.UNLIMITED


def test_equal_work_gets_equal_watts_and_a_higher_weight_more() -> None:
    assert _watts(_two(8000).rounds(4)) == {"a": 4000, "b": 4000}
    favoured = _watts(_two(8000, weight=4.0).rounds(6))
    assert favoured["a"] > favoured["b"]
    assert sum(favoured.values()) <= 8000


def test_watts_move_to_the_steeper_loss_only_after_the_lowering_is_read_back() -> None:
    row = _two(8000)
    row.rounds(4)
    row.phases["a"] = IDLE
    change = row.round()
    assert change.leases[0].watts < 4000  # a is lowered at once
    assert _by_name(change)["b"].reason is LeaseReason.WAITING
    assert change.leases[1].watts == pytest.approx(4000)
    assert row.round().leases[1].watts > 4000  # the lowering of a was read back


def test_static_leases_are_equal_whatever_runs() -> None:
    row = _two(7000, PowerPolicy.STATIC, weight=9.0)
    decision = row.rounds(4)
    assert _watts(decision) == {"a": 3500, "b": 3500}
    assert _by_name(decision)["a"].reason is LeaseReason.STATIC


def test_buckets_go_by_weight_to_nodes_that_serve_and_none_to_nodes_that_train() -> None:
    nodes = (node("a", weight=4.0), node("b"), node("c"), node("d"))
    row = Row((Domain("row", 14_000.0, policy=PowerPolicy.LEASE_WITH_BURST, nodes=tuple("abcd")),), nodes)
    serving = (PhaseLoad(Phase.PREFILL, 0.3, 400.0), PhaseLoad(Phase.DECODE, 0.7, 220.0))
    row.phases = {"a": serving, "b": serving}
    for _ in range(5):
        row.round()
    leases = [row.held[name].lease for name in "abcd"]
    depths_j = [lease.burst_s * lease.watts for lease in leases if lease is not None]
    assert depths_j[0] == pytest.approx(4 * depths_j[1], rel=0.02)
    assert depths_j[2:] == [0, 0]
    assert sum(depths_j) == pytest.approx(0.1 * sum(lease.watts for lease in leases if lease), rel=0.02)


def test_a_silent_node_whose_boards_may_run_free_counts_whole_where_limits_stay() -> None:
    domains = (Domain("row", 9000.0, policy=PowerPolicy.LEASE_WITH_BURST, nodes=tuple("ab")),)
    row = Row(domains, (node("a"), node("b")))
    row.phases = {"a": (PhaseLoad(Phase.PREFILL, 0.3, 400.0), PhaseLoad(Phase.DECODE, 0.7, 220.0))}
    stays = replace(QUICK, limits_stay=True)
    for _ in range(15):
        row.round(stays)
    for name, whole in (("b", False), ("a", True)):
        row.silent = {name}
        for _ in range(6):
            decision = row.round(stays)
        counted = {report.node: report.counted_w for report in decision.nodes}
        assert (counted[name] == 5000.0) == whole
        assert sum(counted.values()) <= 0.99 * 9000.0 + 1e-6
        row.silent = set()
        for _ in range(15):
            row.round(stays)


def test_a_bucket_is_no_deeper_than_a_long_queue_needs() -> None:
    row = Row(
        (Domain("row", 9000.0, policy=PowerPolicy.LEASE_WITH_BURST, nodes=tuple("ab")),),
        (node("a"), node("b")),
    )
    row.phases = {"a": (PhaseLoad(Phase.PREFILL, 0.3, 400.0, 0.01), PhaseLoad(Phase.DECODE, 0.7, 220.0))}
    for _ in range(5):
        row.round()
    lease = row.held["a"].lease
    assert lease is not None
    assert 0 < lease.burst_s * lease.watts <= 0.05 * (5000 - lease.watts)


def test_observe_sends_nothing_and_counts_the_nameplate() -> None:
    decision = _two(8000, PowerPolicy.OBSERVE).rounds(3)
    assert decision.leases == ()
    assert _watts(decision) == {"a": 5000, "b": 5000}


def test_a_node_that_refuses_limits_counts_whole_and_the_others_give_way() -> None:
    nodes = (node("a", controllable=False), node("b"), node("c"))
    row = Row((Domain("d", 11_000, nodes=("a", "b", "c"), margin_percent=0),), nodes)
    assert _watts(row.rounds(4)) == {"a": 5000, "b": 3000, "c": 3000}


def test_a_limit_above_the_lease_is_a_conflict_and_counts_whole() -> None:
    row = _two(8000)
    row.rounds(4)
    row.changes["a"] = lambda answer: replace(answer, limit_w=5000.0)
    decision = row.rounds(2)
    assert _by_name(decision)["a"].reason is LeaseReason.CONFLICT
    assert _watts(decision)["a"] == 5000
    assert decision.leases[1].watts == pytest.approx(3000)
    row.changes.clear()
    assert _watts(row.rounds(5)) == {"a": 4000, "b": 4000}


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: replace(answer, drawn_w=math.nan),
        lambda answer: replace(answer, drawn_w=-5.0),
        lambda answer: replace(answer, drawn_w=50_000.0),
        lambda answer: replace(answer, limit_w=math.inf),
        lambda answer: replace(answer, clock_s=1003.0),
        lambda answer: replace(answer, at_s=0.0),
        lambda answer: replace(answer, bucket_j=math.nan),
        lambda answer: replace(answer, bucket_j=-math.inf),
    ],
)
def test_implausible_frozen_and_old_telemetry_is_silence(change: Change) -> None:
    row = _two(8000)
    row.rounds(4)
    row.changes["a"] = change
    decision = row.rounds(8)
    assert _by_name(decision)["a"].reason is LeaseReason.STALE
    decision = row.rounds(12)
    assert _watts(decision) == {"a": 2000, "b": 5000}  # its lease has ended: the other one has the watts


def test_out_of_band_a_silent_node_keeps_what_it_has() -> None:
    settings = ControlSettings(ttl_s=None, raise_per_s=10.0)
    row = _two(8000)
    row.rounds(5, settings)
    row.silent.add("a")
    assert _watts(row.rounds(30, settings)) == {"a": 4000, "b": 4000}


def test_out_of_band_nothing_is_written_twice() -> None:
    settings = ControlSettings(ttl_s=None, raise_per_s=10.0, repeat_s=100.0)
    row = _two(8000)
    row.rounds(6, settings)
    assert row.round(settings).leases == ()


def test_a_child_keeps_its_own_budget_and_the_parent_its_own() -> None:
    nodes = tuple(node(name) for name in "abcd")
    domains = (
        Domain("site", 14_000, margin_percent=0),
        Domain("left", 6000, "site", nodes=("a", "b"), margin_percent=0),
        Domain("right", 9000, "site", nodes=("c", "d"), margin_percent=0),
    )
    decision = Row(domains, nodes).rounds(6)
    assert _watts(decision) == {"a": 3000, "b": 3000, "c": 4000, "d": 4000}


def test_a_smaller_budget_is_reached_in_the_next_round_however_small_the_step() -> None:
    row = _two(8000)
    row.rounds(5)
    row.domains = (replace(row.domains[0], budget_w=7990.0),)
    assert sum(lease.watts for lease in row.round().leases) <= 7990


def test_floors_above_the_budget_are_said_and_nothing_rises() -> None:
    decision = _two(3900).rounds(4)
    assert _watts(decision) == {"a": 2000, "b": 2000}
    assert decision.domains[0].reason is LeaseReason.FLOOR


def test_leases_rise_slowly_and_fall_at_once() -> None:
    row = _two(8000)
    slow = ControlSettings(raise_per_s=0.1)
    row.rounds(2, slow)
    assert _watts(row.round(slow))["a"] - 2000 <= 2 * 500
    row.rounds(8, slow)
    row.domains = (replace(row.domains[0], budget_w=5000.0),)
    assert sum(lease.watts for lease in row.round(slow).leases) <= 5000


def test_a_restarted_node_begins_at_its_floor_and_rises_again() -> None:
    row = _two(8000)
    row.rounds(5)
    row.held["a"] = HeldLease(epoch=2, floor_w=2000.0)
    row.round()
    assert row.held["a"].epoch == 2
    assert _watts(row.rounds(5))["a"] == 4000


def test_the_order_of_domains_and_nodes_changes_nothing() -> None:
    nodes = tuple(node(name, weight) for name, weight in zip("abcd", (1, 2, 1, 3), strict=True))
    domains = (
        Domain("site", 14_000),
        Domain("left", 6000, "site", nodes=("a", "b")),
        Domain("right", 9000, "site", nodes=("c", "d")),
    )
    swapped = (
        Domain("right", 9000, "site", nodes=("d", "c")),
        Domain("left", 6000, "site", nodes=("b", "a")),
        Domain("site", 14_000),
    )
    assert Row(domains, nodes).rounds(5).nodes == Row(swapped, nodes[::-1]).rounds(5).nodes


def test_an_unknown_node_and_bad_settings_are_refused() -> None:
    with pytest.raises(PowerError, match="unknown node 'z'"):
        control(
            domain_tree((Domain("d", 1, nodes=("z",)),)), {}, {}, CURVES, 0.0, begin(0, 1), ControlSettings()
        )
    with pytest.raises(PowerError):
        ControlSettings(ttl_s=0)
    with pytest.raises(PowerError):
        NodePower("n", 100, 8, 400, 100)
    with pytest.raises(PowerError):
        NodePower("n", math.nan, 8, 100, 400)
