"""The sum of what the nodes of a domain may draw never exceeds its budget, whatever happens to the messages.

The nodes here are the truth: each holds what it accepted, on a clock of its own. Messages and answers are late, lost
and out of order; the controller and nodes restart; budgets change.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scheduler.power.row import BUSY, CURVES, FLAT, SERVING, STEEP, node

from busbar.scheduler.power import (
    ControlSettings,
    Domain,
    HeldLease,
    Lease,
    NodeTelemetry,
    PhaseLoad,
    accepted,
    allowed_w,
    begin,
    control,
    domain_tree,
)

NAMES = tuple("abcdef")
FLOOR_W = node("a").floor_w


@dataclass
class World:
    """Nodes, the network and one controller, in steps of half a second."""

    random: Random
    loss: float
    delay_s: float
    restarts: float
    cuts_off: float
    settings: ControlSettings
    now: float = 0.0
    term: int = 1
    budgets: dict[str, float] = field(default_factory=dict)
    held: dict[str, HeldLease] = field(default_factory=dict)
    offset_s: dict[str, float] = field(default_factory=dict)
    phases: dict[str, tuple[PhaseLoad, ...]] = field(default_factory=dict)
    to_nodes: list[tuple[float, Lease]] = field(default_factory=list)
    answers: list[tuple[float, NodeTelemetry]] = field(default_factory=list)
    known: dict[str, NodeTelemetry] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    """Nodes that nobody reaches; what was on its way arrives."""
    dies: float = 0.0
    dead: dict[str, float] = field(default_factory=dict)
    """Nodes on which every process is stopped, with the limit that their boards keep."""

    def __post_init__(self) -> None:
        self.budgets = {"site": 24_000.0, "left": 11_000.0, "right": 15_000.0}
        self.memory = begin(0.0, self.term)
        for name in NAMES:
            self.held[name] = HeldLease(1, FLOOR_W)
            self.offset_s[name] = self.random.uniform(0, 1e6)
            self.phases[name] = BUSY

    def domains(self) -> tuple[Domain, ...]:
        return (
            Domain("site", self.budgets["site"]),
            Domain("left", min(self.budgets["left"], self.budgets["site"]), "site", nodes=NAMES[:3]),
            Domain("right", min(self.budgets["right"], self.budgets["site"]), "site", nodes=NAMES[3:]),
        )

    def late(self) -> float:
        return self.now + self.random.uniform(0, self.delay_s)

    def step(self) -> None:
        self.now += 0.5
        self._restart()
        for arrives, lease in [item for item in self.to_nodes if item[0] <= self.now]:
            self.to_nodes.remove((arrives, lease))
            if lease.node in self.dead:
                continue
            clock_s = self.now + self.offset_s[lease.node]
            self.held[lease.node] = accepted(self.held[lease.node], lease, clock_s)
        for name in NAMES:
            if name not in self.away and name not in self.dead and self.random.random() > self.loss:
                self.answers.append((self.late(), self._answer(name)))
        for arrives, answer in [item for item in self.answers if item[0] <= self.now]:
            self.answers.remove((arrives, answer))
            self.known[answer.node] = answer  # the newest to arrive, not the newest asked for
        if self.now % 1.0 == 0:
            self._control()

    def _answer(self, name: str) -> NodeTelemetry:
        held, clock_s = self.held[name], self.now + self.offset_s[name]
        limit_w = allowed_w(held, clock_s)
        bucket_j = self.random.choice((None, -300.0, 0.0, 200.0, 1e6))
        return NodeTelemetry(
            name,
            self.now,
            held.epoch,
            clock_s,
            held.sequence,
            limit_w,
            limit_w,
            100.0,
            self.phases[name],
            bucket_j,
        )

    def _restart(self) -> None:
        if self.random.random() < self.restarts:
            self.term += 1
            self.memory, self.known = begin(self.now, self.term), {}
        if self.random.random() < self.restarts:
            name = self.random.choice(NAMES)
            self.held[name] = HeldLease(self.held[name].epoch + 1, FLOOR_W)
            self.dead.pop(name, None)
        if self.random.random() < self.dies:
            name = self.random.choice(NAMES)
            if self.dead.pop(name, None) is None:
                self.dead[name] = allowed_w(self.held[name], self.now + self.offset_s[name])
        if self.random.random() < self.cuts_off:
            self.away ^= {self.random.choice(NAMES)}
        if self.random.random() < 0.1:
            self.phases[self.random.choice(NAMES)] = self.random.choice((BUSY, SERVING, FLAT, STEEP))

    def _control(self) -> None:
        decision = control(
            domain_tree(self.domains()),
            {name: node(name) for name in NAMES},
            self.known,
            CURVES,
            self.now,
            self.memory,
            self.settings,
        )
        self.memory = decision.memory
        for lease in decision.leases:
            if lease.node not in self.away and self.random.random() > self.loss:
                self.to_nodes.append((self.late(), lease))

    def may_draw_w(self) -> dict[str, float]:
        each = {
            name: allowed_w(self.held[name], self.now + self.offset_s[name]) for name in NAMES
        } | self.dead
        return {
            "site": sum(each.values()),
            "left": sum(each[name] for name in NAMES[:3]),
            "right": sum(each[name] for name in NAMES[3:]),
        }


def _run(world: World, steps: int, cuts: bool) -> float:
    """Run and hold the invariant in every step; the highest use of the site's budget seen."""
    usable: dict[str, list[tuple[float, float]]] = {}
    used = 0.0
    for _ in range(steps):
        if cuts and world.random.random() < 0.03:
            name = world.random.choice(tuple(world.budgets))
            world.budgets[name] *= world.random.uniform(0.8, 1.2)
            world.budgets[name] = max(world.budgets[name], 13_000.0 if name == "site" else 7000.0)
        for domain in world.domains():
            usable.setdefault(domain.name, []).append((world.now, domain.usable_w))
        world.step()
        # After a cut, leases that were not reached end by themselves: a time to live and one round later at most.
        ttl_s = world.settings.ttl_s
        since = -1.0 if ttl_s is None else world.now - ttl_s - world.settings.drift_s - 1.5
        for name, watts in world.may_draw_w().items():
            most_w = max(budget for at_s, budget in usable[name] if at_s >= since)
            assert watts <= most_w + 1e-6, (name, world.now, watts, most_w)
        used = max(used, world.may_draw_w()["site"] / usable["site"][-1][1])
    return used


IN_BAND = ControlSettings(ttl_s=10.0)
IN_BOARDS = ControlSettings(ttl_s=10.0, renew_s=3.0, limits_stay=True)
OUT_OF_BAND = ControlSettings(ttl_s=None, stale_s=20.0, repeat_s=5.0, raise_per_s=1.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    loss=st.sampled_from((0.0, 0.1, 0.3, 0.6)),
    delay_s=st.sampled_from((0.0, 0.9, 5.0, 20.0)),
    restarts=st.sampled_from((0.0, 0.01, 0.05)),
    cuts_off=st.sampled_from((0.0, 0.1)),
    settings_=st.sampled_from((IN_BAND, IN_BOARDS, OUT_OF_BAND)),
    cuts=st.booleans(),
)
def test_the_sum_never_exceeds_the_budget(
    seed: int,
    loss: float,
    delay_s: float,
    restarts: float,
    cuts_off: float,
    settings_: ControlSettings,
    cuts: bool,
) -> None:
    _run(World(Random(seed), loss, delay_s, restarts, cuts_off, settings_), 160, cuts)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    loss=st.sampled_from((0.0, 0.3)),
    delay_s=st.sampled_from((0.0, 0.9, 5.0, 20.0)),
    restarts=st.sampled_from((0.0, 0.02)),
    dies=st.sampled_from((0.02, 0.1, 0.3)),
)
def test_nor_does_it_where_limits_stay_in_boards_that_nothing_is_left_to_lower(
    seed: int, loss: float, delay_s: float, restarts: float, dies: float
) -> None:
    _run(World(Random(seed), loss, delay_s, restarts, 0.0, IN_BOARDS, dies=dies), 160, cuts=False)


@pytest.mark.parametrize("settings_", [IN_BAND, IN_BOARDS, OUT_OF_BAND])
def test_with_a_sound_network_the_budget_is_used(settings_: ControlSettings) -> None:
    world = World(Random(1), 0.0, 0.4, 0.0, 0.0, settings_)
    assert _run(world, 120, cuts=False) > 0.97


@pytest.mark.parametrize("settings_", [IN_BAND, IN_BOARDS])
def test_after_the_network_has_healed_the_row_is_fast_again_within_30_s(settings_: ControlSettings) -> None:
    world = World(Random(2), 0.0, 0.4, 0.0, 0.0, settings_)
    _run(world, 60, cuts=False)
    world.loss = 1.0
    _run(world, 40, cuts=False)
    assert world.may_draw_w()["site"] == 6 * FLOOR_W
    world.loss = 0.0
    _run(world, 60, cuts=False)
    assert world.may_draw_w()["site"] > 0.95 * 0.99 * world.budgets["site"]


def test_a_second_lease_message_that_was_overtaken_changes_nothing() -> None:
    held = HeldLease(1, 2000.0)
    low = Lease("a", 2500.0, 2, 1, 50.0, 150.0)
    high = replace(low, watts=4000.0, sequence=1)
    held = accepted(accepted(held, low, 40.0), high, 41.0)
    assert allowed_w(held, 42.0) == 2500
    assert allowed_w(held, 50.0) == 2000
    assert accepted(held, replace(low, sequence=9, until_clock_s=43.0), 43.0) is held
    assert accepted(held, replace(low, sequence=9, epoch=2), 43.0) is held
