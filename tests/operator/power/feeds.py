"""Two racks on one row, with real agents, guards and rounds, and one clock. The truth is what the boards draw.

Six nodes with four boards of 100 to 400 W and a host of 500 W: 900 W at the lowest limits, 2,100 W at most. Every board
draws all that its limit lets it, unless a test says otherwise. A step is a fifth of a second; the operator asks, decides
and sends once a second. Everything between operator and agents can be late, lost, doubled or out of order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.operator.agent.boards import Boards, Clock
from tests.operator.power.parts import domain, node

from busbar.kube.contracts.power import AgentReport, Backend, LeaseMessage
from busbar.kube.types import PowerDomain
from busbar.operator.agent.guard import Guard
from busbar.operator.agent.limits import BoardLimit
from busbar.operator.agent.meters import HOST, Node, Sample
from busbar.operator.agent.server import Agent
from busbar.operator.agent.settings import Settings
from busbar.operator.agent.simulated import SimulatedBoards
from busbar.operator.power.gatherer import Gatherer, Source
from busbar.operator.power.leasing import Round, State, new_leader, take_round
from busbar.operator.power.lessor import control_settings
from busbar.operator.power.membership import Membership, membership
from busbar.operator.power.work import NodeWork
from busbar.operator.settings import Settings as OperatorSettings

STEP_S = 0.2
HOST_W = 500.0
RED, BLUE = ("red-0", "red-1", "red-2"), ("blue-0", "blue-1", "blue-2")
FLOOR_W, NAMEPLATE_W = 900.0, 2100.0


@dataclass(frozen=True)
class Metered(SimulatedBoards):
    """Boards whose truth is a `Boards`; a back end whose limits are obeyed."""

    truth: Boards = field(default_factory=Boards)
    wants: dict[str, float] = field(default_factory=dict)
    """Of some boards; others want all that they can draw."""
    backend: Backend = Backend.NVML

    def draws(self, name: str) -> float:
        limit_w = 400.0 if name in self.wants and name in self.truth.deaf else self.truth.limit_w(name)
        return min(limit_w, self.wants.get(name, 400.0))

    def sample(self, clock_s: float) -> Sequence[Sample]:
        return [Sample(name, 100.0, 400.0, self.draws(name)) for name in self.truth.names]

    def limits(self) -> Sequence[BoardLimit]:
        return self.truth.limits()

    def set_limit(self, uuid: str, watts: float) -> None:
        self.truth.set_limit(uuid, watts)


@dataclass(frozen=True)
class Host:
    backend: Backend = Backend.RAPL

    def sample(self, clock_s: float) -> Sequence[Sample]:
        return [Sample(HOST, HOST_W, HOST_W, HOST_W)]


class Machine:
    """A node: boards, agent and guard, each of which can be stopped or killed."""

    def __init__(self, name: str, folder: Path, world: Clock, offset_s: float) -> None:
        self.name, self.folder = name, folder
        self.boards = Metered(name, truth=Boards())
        self.clock = lambda: world.now_s + offset_s
        self.starts = 0
        self.agent: Agent | None = None
        self.stopped = False
        self.guarded = True
        self.settings = Settings(node=name, set_limits=True, heartbeat_file=str(folder / name))
        self.start()
        self.guard = Guard(self.settings, {name: self.boards}, self.clock)

    def start(self) -> None:
        """The agent starts, or starts again."""
        self.starts += 1
        epoch = f"{self.name}/{self.starts}"
        self.agent = Agent(
            self.settings, [Node(self.name, epoch, self.boards, Host(), (), {}, 0.0)], self.clock
        )
        self.agent.sample()

    @property
    def works(self) -> bool:
        return self.agent is not None and not self.stopped

    def step(self) -> None:
        if self.works:
            assert self.agent is not None
            self.agent.sample()
        if self.guarded:
            self.guard.look()

    def answer(self) -> AgentReport:
        assert self.agent is not None
        return self.agent._told[self.name]

    def take(self, message: LeaseMessage) -> None:
        if self.works:
            assert self.agent is not None
            self.agent._take((message,))

    @property
    def draw_w(self) -> float:
        return HOST_W + sum(self.boards.draws(name) for name in self.boards.truth.names)

    @property
    def limit_w(self) -> float:
        return HOST_W + self.boards.truth.total_w


@dataclass
class Network:
    """Between the operator and the nodes."""

    random: Random
    loss: float = 0.0
    delay_s: float = 0.0
    doubles: float = 0.0
    no_leases: set[str] = field(default_factory=set)
    """Nodes that hear nothing."""
    no_answers: set[str] = field(default_factory=set)
    """Nodes that are not heard."""
    _due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def carry(self, now_s: float, what: Callable[[], None]) -> None:
        for _ in range(2 if self.random.random() < self.doubles else 1):
            if self.random.random() >= self.loss:
                self._due.append((now_s + self.random.uniform(0, self.delay_s), what))

    def deliver(self, now_s: float) -> None:
        due = [item for item in self._due if item[0] <= now_s]
        self._due = [item for item in self._due if item[0] > now_s]
        for _, what in due:
            what()


class Feeds:
    """The row, and one operator."""

    def __init__(self, folder: Path, seed: int = 0, policy: str = "Lease") -> None:
        self.random = Random(seed)
        self.world = Clock(5000.0)
        self.network = Network(self.random)
        self.machines = {
            name: Machine(name, folder, self.world, self.random.uniform(0, 1e6)) for name in RED + BLUE
        }
        self.nodes = [node(name, rack=name.split("-")[0]) for name in RED + BLUE]
        self.domains = {
            each.metadata.name: each
            for each in (
                domain("row", 9_500.0),
                domain("red", 5_000.0, "row", policy, HOST_W, rack="red"),
                domain("blue", 5_500.0, "row", policy, HOST_W, rack="blue"),
            )
        }
        self.settings = OperatorSettings(power_key=b"0123456789abcdef")
        self.works: Callable[[], Mapping[str, NodeWork]] = dict
        """What the operator knows of the work on boards."""
        self.dies_after: int | None = None
        """The operator is killed when it has sent so many messages of a round."""
        self.steps = 0
        self.means: dict[str, list[float]] = {"row": [], "red": [], "blue": []}
        self._sums = dict.fromkeys(self.means, 0.0)
        self.lead()

    def lead(self) -> None:
        """An operator starts and knows nothing."""
        self.gatherer = Gatherer(self.settings, lambda: self.world.now_s)
        self.state: State | None = new_leader(self.world.now_s)
        self.last: Round | None = None

    def away(self) -> None:
        """The operator is killed."""
        self.state = None

    def set(self, name: str, **spec: object) -> None:
        """Changes a domain."""
        raw = self.domains[name].to_wire()
        raw["spec"] |= spec
        self.domains[name] = PowerDomain.model_validate(raw)

    @property
    def membership(self) -> Membership:
        return membership(self.domains.values(), self.nodes)

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Steps, with a look of the test after each."""
        for _ in range(round(seconds / STEP_S)):
            self.step()
            each()

    def step(self) -> None:
        self.steps += 1
        self.world.now_s += STEP_S
        self.network.deliver(self.world.now_s)
        for machine in self.machines.values():
            machine.step()
        self._measure()
        if self.steps % 5 == 0 and self.state is not None:
            self._operate()

    def _operate(self) -> None:
        at_s = self.world.now_s
        for name, machine in self.machines.items():
            if machine.works and name not in self.network.no_answers:
                source, told = Source(name, name, frozenset({name})), machine.answer()
                gatherer = self.gatherer
                self.network.carry(at_s, lambda s=source, t=told, g=gatherer: g.take(s, t, at_s))  # type: ignore[misc]
        self.network.deliver(at_s)
        self.gatherer.keep(each.name for each in self.nodes)
        assert self.state is not None
        self.last = take_round(
            self.state,
            self.membership,
            self.gatherer.readings,
            at_s,
            control_settings(self.settings),
            self.works(),
        )
        self.state = self.last.state
        for sent, message in enumerate(self.last.messages):
            if sent == self.dies_after:
                self.away()
                break
            if message.node not in self.network.no_leases:
                take = self.machines[message.node].take
                self.network.carry(at_s, lambda t=take, m=message: t(m))  # type: ignore[misc]
        self.network.deliver(at_s)

    def _measure(self) -> None:
        for name, watts in self.draws().items():
            self._sums[name] += watts
            if self.steps % 5 == 0:
                self.means[name].append(self._sums[name] / 5)
                self._sums[name] = 0.0

    def draws(self) -> dict[str, float]:
        """What each feed carries now, whatever the operator thinks."""
        red = sum(self.machines[name].draw_w for name in RED)
        blue = sum(self.machines[name].draw_w for name in BLUE)
        return {"row": red + blue, "red": red, "blue": blue}

    def within(self) -> None:
        """No feed carries more than its budget now."""
        for name, watts in self.draws().items():
            budget_w = self.domains[name].spec.budget_watts
            assert watts <= budget_w + 1e-6, f"{name} carries {watts:.0f} W of {budget_w:.0f} W"

    def unknown(self, name: str) -> tuple[str, ...]:
        """Nodes of the feed of which the last round knew nothing."""
        assert self.last is not None
        return self.last.feeds[name].unknown

    def used(self, name: str = "row") -> float:
        """Part of the budget less margin that is drawn."""
        return self.draws()[name] / (0.99 * self.domains[name].spec.budget_watts)
