"""The ledger on simulated nodes: sums, feeds, metrics, and totals for statuses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.builders import job, pool, service, tenant
from tests.operator.power.parts import domain, node

from busbar.kube.client import KubeClient
from busbar.kube.contracts.power import Backend
from busbar.kube.informer import Key
from busbar.kube.login import Login
from busbar.kube.types import PowerDomain, TrainingJob
from busbar.operator.agent.meters import Node as AgentNode
from busbar.operator.agent.meters import report, sampled
from busbar.operator.agent.simulated import SimulatedBoards, SimulatedHost
from busbar.operator.energy.ledger import Ledger
from busbar.operator.pods.manifests import KIND_SERVICE, KIND_TRAINING
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.energy import FeedEnergy
from busbar.operator.power.membership import membership
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.readings import Reading, read
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.projections import Pod, Requests

GPU = "example.com/gpu"
NODES = ("red-0", "red-1", "blue-0")


def caches() -> Caches:
    made = Caches(KubeClient(Login(server="http://127.0.0.1:1")), lambda *_: None, inactivity_s=60.0)
    gpu = pool("gpu", resourceName=GPU, accelerator="A100", memoryGib=80, nodeSelector={"gpu": "yes"})
    made.pools.items[Key("", "gpu")] = gpu
    for name in ("a", "b"):
        made.tenants.items[Key("", name)] = tenant(name, [name])
    for feed in (
        domain("row", 1e6),
        domain("red", 1e6, "row", rack="red"),
        domain("blue", 1e6, "row", rack="blue"),
    ):
        feed.metadata.uid = f"uid-{feed.metadata.name}"
        made.power_domains.items[Key("", feed.metadata.name)] = feed
    for name in NODES:
        plain = node(name, gpu="yes", rack=name.partition("-")[0])
        made.nodes.items[Key("", name)] = type(plain)(
            plain.name, plain.labels, (), 8000, 32_000, 0, ((GPU, 8),), True
        )
    return made


def hold(of: Caches, namespace: str, name: str, on: str, boards: int, kind: str = KIND_TRAINING) -> None:
    key = Key(namespace, name)
    requests = Requests(devices=((GPU, boards),))
    of.pods.items[key] = Pod(
        key, f"uid-pod-{name}", "Running", None, on, requests, kind=kind, owner_uid=f"uid-{name}"
    )


def own(of: Caches, namespace: str, name: str) -> None:
    """The object of these pods."""
    made = job(name) if name == "train" else service(name)
    made.metadata.namespace = namespace
    if isinstance(made, TrainingJob):
        of.jobs.items[Key(namespace, name)] = made
    else:
        of.services.items[Key(namespace, name)] = made


class Row:
    """Nodes that draw simulated watts, and a ledger that looks once a second."""

    def __init__(self, of: Caches) -> None:
        self.caches, self.registry = of, CollectorRegistry()
        self.ledger = Ledger(of, PowerMetrics(self.registry), fresh_s=3.0)
        self.agents = {name: self.agent(name) for name in NODES}
        self.readings: dict[str, Reading] = {}
        self.truth_j = dict.fromkeys(NODES, 0.0)
        self.counted_j: dict[tuple[str, str], float] = {}
        self.second = 0

    def agent(self, name: str, epoch: str = "e0") -> AgentNode:
        return AgentNode(name, epoch, SimulatedBoards(name), SimulatedHost(), (), {}, 0.0)

    def draw(self) -> None:
        """A second passes."""
        self.second += 1
        for name, agent in self.agents.items():
            for tenth in range(5):
                self.agents[name] = agent = sampled(agent, self.second + tenth / 5)
            joules = sum(counter.joules for counter in agent.counters.values())
            before = self.counted_j.get((name, agent.epoch), joules)
            self.truth_j[name] += joules - before
            self.counted_j[name, agent.epoch] = joules

    def tick(
        self, silent: frozenset[str] = frozenset(), boards: Mapping[str, Boards] = MappingProxyType({})
    ) -> None:
        self.draw()
        for name, agent in self.agents.items():
            if name in silent:
                continue
            found = read(self.readings.get(name), report(agent), self.second + 0.8)
            if isinstance(found, Reading):
                self.readings[name] = found
        found_there = membership(self.caches.power_domains.items.values(), self.caches.nodes.items.values())
        self.ledger.tick(self.readings, found_there, self.second + 0.9, boards)

    def feed(self, name: str) -> FeedEnergy:
        found = self.ledger.feed(f"uid-{name}", None)
        assert found is not None
        return found

    def tenant(self, name: str) -> float:
        return self.ledger.accounts.total(f"uid-{name}", None) or 0.0

    def metric(self, **labels: str) -> float:
        return self.registry.get_sample_value("busbar_energy_joules_total", labels) or 0.0


def test_tenants_and_nobody_add_up_to_the_feeds_and_to_what_was_drawn() -> None:
    """Twenty minutes, with pods that come and go, agents that are silent, and some that restart. Whose boards are known
    changes every minute: of no node, of one, of all, and with pods that are gone or elsewhere on boards."""
    of, rng = caches(), random.Random(3)
    row, boards = Row(of), dict[str, Boards]()
    for second in range(1200):
        if second % 60 == 0:
            of.pods.items.clear()
            for on in NODES:
                hold(of, rng.choice("ab"), f"job-{on}", on, rng.choice((2, 4, 8)))
            pods = [*of.pods.items, Key("a", "gone")]
            boards = {
                on: {uuid: tuple(rng.sample(pods, rng.choice((0, 1, 1, 2)))) for uuid in uuids(on)}
                for on in rng.sample(NODES, rng.choice((0, 1, 3)))
            }
        if second in (300, 700):
            row.agents["red-0"] = row.agent("red-0", epoch=f"e{second}")
        row.tick(frozenset({"red-1"}) if second % 400 > 360 else frozenset(), boards)
    tenants, whole = row.tenant("a") + row.tenant("b"), row.feed("row")
    assert tenants + whole.unassigned_joules == pytest.approx(whole.joules, rel=1e-6)
    assert whole.joules == pytest.approx(sum(row.truth_j.values()), rel=0.02)
    red, blue = row.feed("red"), row.feed("blue")
    assert red.joules + blue.joules == pytest.approx(whole.joules, rel=1e-6)
    assert red.unassigned_joules + blue.unassigned_joules == pytest.approx(whole.unassigned_joules, rel=1e-6)
    assert row.truth_j["blue-0"] == pytest.approx(blue.joules, rel=0.02)
    assert row.tenant("a") > 0 < row.tenant("b")


class Measured(Row):
    """The first node's meters are said to be real, and it has no meter of the host."""

    def agent(self, name: str, epoch: str = "e0") -> AgentNode:
        if name != "red-0":
            return super().agent(name, epoch)
        return AgentNode(name, epoch, SimulatedBoards(name, backend=Backend.NVML), None, (), {}, 0.0)

    def drawn(self, *indexes: int) -> float:
        """What these boards have counted since the second reading."""
        counters = self.agents["red-0"].counters
        return sum(counters[uuids("red-0")[i]].joules - self.first[uuids("red-0")[i]] for i in indexes)

    def run(self, boards: Boards, seconds: int = 4) -> None:
        self.tick(boards={"red-0": boards})
        self.first = {uuid: counter.joules for uuid, counter in self.agents["red-0"].counters.items()}
        for _ in range(seconds):
            self.tick(boards={"red-0": boards})


def uuids(node: str) -> list[str]:
    return [f"SIMULATED-{node}-{i}" for i in range(8)]


def board_map(**holders: tuple[int, ...]) -> dict[str, tuple[Key, ...]]:
    """Boards of the first node by who holds them, `tenant_pod`."""
    return {
        uuid: tuple(Key(*who.split("_")) for who, indexes in holders.items() if i in indexes)
        for i, uuid in enumerate(uuids("red-0"))
    }


def test_joules_are_those_of_the_boards_that_a_pod_holds_and_of_no_others() -> None:
    of = caches()
    own(of, "a", "train")
    hold(of, "a", "train", "red-0", 2)
    hold(of, "b", "web", "red-0", 3, KIND_SERVICE)
    row = Measured(of)
    row.run(board_map(a_train=(1, 6), b_web=(0, 2, 3)))
    assert row.tenant("a") == pytest.approx(row.drawn(1, 6), abs=0.01)
    assert row.tenant("b") == pytest.approx(row.drawn(0, 2, 3), abs=0.01)
    assert row.metric(tenant="a", kind="job", source="counter") == pytest.approx(row.drawn(1, 6))
    assert row.metric(tenant="", kind="unassigned", source="counter") == pytest.approx(row.drawn(4, 5, 7))
    assert row.metric(tenant="a", kind="job", source="estimated") == 0


def test_a_board_with_two_pods_and_slices_of_a_node_are_estimated() -> None:
    of = caches()
    hold(of, "a", "train", "red-0", 1)
    hold(of, "b", "web", "red-0", 3, KIND_SERVICE)
    row = Measured(of)
    row.run(board_map(a_train=(0,), b_web=(0, 1, 2)))
    assert row.metric(tenant="a", kind="job", source="estimated") == pytest.approx(row.drawn(0) / 2)
    assert row.metric(tenant="b", kind="service", source="estimated") == pytest.approx(row.drawn(0) / 2)
    assert row.metric(tenant="b", kind="service", source="counter") == pytest.approx(row.drawn(1, 2))

    plain = of.nodes.items[Key("", "red-0")]
    of.nodes.items[Key("", "red-0")] = replace(plain, devices=((GPU, 56),))
    of.pods.items.clear()
    hold(of, "a", "train", "red-0", 1)
    hold(of, "b", "web", "red-0", 2, KIND_SERVICE)
    sliced = Measured(of)
    sliced.run(board_map(a_train=(0,), b_web=(0,)))
    assert sliced.metric(tenant="a", kind="job", source="estimated") == pytest.approx(sliced.drawn(0) / 3)
    assert sliced.metric(tenant="b", kind="service", source="estimated") == pytest.approx(
        sliced.drawn(0) * 2 / 3
    )
    nobodys = sliced.metric(tenant="", kind="unassigned", source="counter")
    assert nobodys == pytest.approx(sliced.drawn(*range(1, 8)))


def test_pods_that_ended_are_gone_or_are_elsewhere_pay_for_no_board() -> None:
    of = caches()
    hold(of, "a", "train", "blue-0", 8)
    hold(of, "b", "web", "red-0", 8)
    key = Key("b", "web")
    of.pods.items[key] = replace(of.pods.items[key], phase="Succeeded")
    row = Measured(of)
    row.run(board_map(a_train=(0,), b_web=(1, 2), a_gone=(3,)))
    assert row.tenant("b") == 0
    assert row.metric(tenant="a", kind="job", source="counter") == 0
    nobodys = row.metric(tenant="", kind="unassigned", source="counter")
    assert nobodys == pytest.approx(row.drawn(*range(8)))


def test_while_a_node_is_silent_its_boards_are_shared_by_their_number() -> None:
    """Which pods came meanwhile only its kubelet knows."""
    of = caches()
    hold(of, "a", "train", "red-0", 8)
    row = Measured(of)
    row.run(board_map(a_train=()))
    assert row.tenant("a") == 0
    for _ in range(6):
        row.tick(frozenset({"red-0"}), {"red-0": board_map(a_train=())})
    assert row.metric(tenant="a", kind="job", source="estimated") > 0


def test_the_metric_says_whose_joules_they_are_and_that_they_are_invented() -> None:
    of = caches()
    own(of, "a", "train")
    own(of, "b", "web")
    hold(of, "a", "train", "red-0", 8)
    hold(of, "b", "web", "red-1", 8, KIND_SERVICE)
    hold(of, "b", "own", "blue-0", 8, "")
    row = Row(of)
    for _ in range(5):
        row.tick()
    for tenant_of, kind, uid in (("a", "job", "uid-train"), ("b", "service", "uid-web")):
        joules = row.metric(tenant=tenant_of, kind=kind, source="simulated")
        assert joules == pytest.approx(row.ledger.accounts.total(uid, None), abs=0.01)
    assert row.metric(tenant="b", kind="pod", source="simulated") > 0
    assert row.ledger.accounts.total("uid-own", None) is None
    assert row.metric(tenant="", kind="unassigned", source="simulated") == 0
    assert row.feed("row").unassigned_joules == 0


def test_a_pod_cannot_charge_another_tenants_job() -> None:
    of = caches()
    own(of, "a", "train")
    hold(of, "b", "train", "red-0", 8)
    row = Row(of)
    for _ in range(3):
        row.tick()
    assert row.ledger.accounts.total("uid-train", None) is None
    assert row.tenant("b") > 0


def test_pods_of_no_tenant_and_nodes_of_no_pool_are_nobodys() -> None:
    of = caches()
    of.pools.items.clear()
    hold(of, "a", "train", "red-0", 8)
    row = Row(of)
    for _ in range(3):
        row.tick()
    assert row.tenant("a") == 0
    assert row.feed("row").unassigned_joules == row.feed("row").joules > 0


def test_a_node_without_a_feed_is_charged_all_the_same() -> None:
    of = caches()
    of.power_domains.items.clear()
    hold(of, "a", "train", "red-0", 8)
    row = Row(of)
    for _ in range(3):
        row.tick()
    assert row.tenant("a") > 0


def test_a_feed_has_the_totals_of_its_status_and_what_came_since() -> None:
    row = Row(caches())
    row.tick()
    assert row.ledger.feed("uid-row", None) is None
    row.tick()
    found = of_status(row, 1000.0, 10.0)
    assert found is not None
    assert found.joules > 1000.0
    assert found.unassigned_joules == pytest.approx(found.joules - 990.0)


def of_status(row: Row, joules: float, unassigned: float) -> FeedEnergy | None:
    feed = row.caches.power_domains.items[Key("", "row")]
    told = PowerDomain.model_validate(
        {**feed.to_wire(), "status": {"energyJoules": joules, "unassignedJoules": unassigned}}
    ).status
    return row.ledger.feed("uid-row", told)
