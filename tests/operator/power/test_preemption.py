"""When work is stopped for a feed, how often it is told, and what is remembered of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry
from tests.operator.builders import admitted, job, running, tenant
from tests.operator.power.parts import domain
from tests.operator.power.test_leasts import A100, node, on_boards, two_boards

from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.kube.types.power_domain import PowerEnforcement
from busbar.kube.types.training_status import Release as ReleaseStatus
from busbar.operator.decisions import Decision, Release
from busbar.operator.power.membership import membership
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.preemption import FeedRelief, Preemptions, patience_s
from busbar.operator.queue.controller import Item
from busbar.operator.settings import Settings

SETTINGS = Settings()
KEY = Key("team", "job")


@dataclass
class World:
    """A node with two boards, a job on both, and a domain of which a test sets the budget; 400 W are its floor."""

    leads_s: float = 60.0
    told: list[tuple[Item, tuple[Decision, ...]]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    now_s: float = 0.0
    budget_w: float = 5000.0

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        pod = on_boards(running(), 2)
        self.pods = {pod.key: pod}
        self.jobs: dict[Key, TrainingJob] = {KEY: admitted(job())}
        caches = SimpleNamespace(
            nodes=SimpleNamespace(items={Key("", "n0"): node("n0")}),
            pools=SimpleNamespace(items={Key("", "a100"): A100}),
            pods=SimpleNamespace(items=self.pods),
            jobs=SimpleNamespace(items=self.jobs),
            services=SimpleNamespace(items={}),
            tenants=SimpleNamespace(items={Key("", "team"): tenant("team", ["team"])}),
            power_domains=SimpleNamespace(items={Key("", "red"): domain("red", rack="red")}),
        )
        self.preemptions = Preemptions(
            cast(Any, caches),
            cast(Any, SimpleNamespace(notice=lambda *of: self.notices.append(of[2]))),
            cast(Any, self),
            SETTINGS,
            PowerMetrics(self.registry),
            lambda: self.leads_s,
        )

    async def process(self, item: Item, decisions: tuple[Decision, ...]) -> None:
        """As the controller's."""
        self.told.append((item, decisions))

    async def ticks(self, seconds: float, budget_w: float | None = None) -> None:
        self.budget_w = self.budget_w if budget_w is None else budget_w
        red = domain("red", self.budget_w, None, "Static", 200.0, rack="red")
        red.spec.enforcement = PowerEnforcement.PREEMPT
        red.spec.margin_percent = 0
        found = membership([red], [node("n0")])
        for _ in range(int(seconds)):
            self.now_s += 1
            self.preemptions.look(found, {"n0": two_boards(self.now_s)}, {}, self.now_s)
            for _ in range(9):
                await asyncio.sleep(0)  # lets what was begun come to its end

    def red(self) -> FeedRelief:
        return self.preemptions.feeds["red"]

    def count(self) -> float | None:
        return self.registry.get_sample_value("busbar_power_preemptions_total", {"domain": "red"})


async def test_a_lack_that_does_not_last_and_an_operator_that_does_not_lead_stop_nothing() -> None:
    world, wait_s = World(), patience_s(SETTINGS)
    await world.ticks(wait_s, budget_w=399.0)
    await world.ticks(1, budget_w=400.0)
    await world.ticks(wait_s, budget_w=399.0)
    assert world.told == []
    assert world.red().short_w == 1.0
    world.leads_s = 0.0
    await world.ticks(5)
    assert world.told == []


async def test_work_is_told_until_it_leaves_counted_once_and_remembered_until_it_runs() -> None:
    world = World()
    await world.ticks(patience_s(SETTINGS) + 3, budget_w=399.0)
    assert {item for item, _ in world.told} == {Item("TrainingJob", KEY)}
    assert len(world.told) == 3, "as often as it was not carried out"
    [release] = world.told[0][1]
    assert isinstance(release, Release)
    assert (release.reason, release.taken, release.assumed_version) == ("InsufficientPower", False, "7")
    assert "power domain red lacks 1 W" in release.message
    assert "needs 74 W" in release.message
    assert world.count() is None

    held = world.jobs[KEY]
    assert held.status is not None
    leaving = held.status.model_copy(update={"release": ReleaseStatus(reason="InsufficientPower")})
    world.jobs[KEY] = held.model_copy(update={"status": leaving})
    await world.ticks(3)
    assert len(world.told) == 3
    assert (world.count(), world.notices) == (1.0, ["WorkStopped"])
    assert world.red().leaving == 1

    pods = dict(world.pods)
    world.pods.clear()
    world.jobs[KEY] = held.model_copy(update={"status": held.status.model_copy(update={"admission": None})})
    await world.ticks(1)
    assert world.red().short_w == 1.0, "326 W are drawn, and the job needs 74 W"
    await world.ticks(1, budget_w=400.0)
    assert world.red().short_w is None

    world.jobs[KEY] = held
    world.pods.update({name: replace(pod, attempt=2) for name, pod in pods.items()})
    await world.ticks(1)
    assert world.red().stopped_w is None
    assert world.count() == 1.0


async def test_a_stopped_job_that_ended_or_runs_elsewhere_keeps_no_domain_closed() -> None:
    world = World()
    held = world.jobs[KEY]
    for after in ({"phase": "Failed", "admission": None}, {}):
        world.jobs[KEY] = held
        pods = dict(world.pods)
        await world.ticks(patience_s(SETTINGS) + 1, budget_w=399.0)
        world.pods.clear()
        assert held.status is not None
        world.jobs[KEY] = held.model_copy(
            update={"status": held.status.model_copy(update={"admission": None})}
        )
        await world.ticks(1)
        assert world.red().stopped_w == 74.0
        world.jobs[KEY] = held.model_copy(update={"status": held.status.model_copy(update=after)})
        await world.ticks(1)
        assert world.red().stopped_w is None
        world.pods.update(pods)
