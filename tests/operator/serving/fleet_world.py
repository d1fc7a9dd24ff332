"""A service with its pods, its gateway and a fake clock, for tests of how many replicas it gets in which pools."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from tests.operator.builders import NOW, pool, replica, service

from busbar.kube.contracts.demand import ServiceDemand, SizeCount, Totals, WindowDemand
from busbar.kube.types import AcceleratorPool, ModelService, PerformanceProfile
from busbar.operator.serving.fleet_input import Seen
from busbar.operator.serving.fleet_plan import Plan
from busbar.operator.serving.fleets import Fleets
from busbar.operator.watch.projections import Pod
from busbar.scheduler.autoscale.day_profile import DayProfile
from busbar.scheduler.explain.service_room import ServiceRoom

SLO = {"ttftMilliseconds": 2000, "tpotMilliseconds": 100}
STEP = {
    "secondsPerStep": 0.02, "secondsPerSequence": 0.001, "secondsPerThousandContextTokens": 0.0005,
    "secondsPerPromptToken": 0.0001, "rmsErrorSeconds": 0.001, "steps": 500,
}  # fmt: skip
START = timedelta(seconds=40)


def line(kind: str, **step: Any) -> dict[str, Any]:
    return {
        "workloadClass": "serve-x", "accelerator": kind, "accelerators": 1, "mode": "resident", "kvTokens": 200_000,
        "stepModel": STEP | step,
    }  # fmt: skip


def kind(name: str, price: float, capacity: float = 16) -> AcceleratorPool:
    made = pool(name, accelerator=name.upper(), resourceName="nvidia.com/gpu", pricePerHour=price)
    return made.model_validate(made.to_wire() | {"status": {"capacity": capacity}})


def windows(rate: float, seconds: int = 10, kept: float = 1.0) -> list[WindowDemand]:
    count = round(rate * seconds)
    sums = {"count": count, "prompt_tokens": 400 * count, "output_tokens": 200 * count}
    sizes = [SizeCount(prompt=2, output=3, **sums)] if count else []
    answers = {"answered": count, "within": round(kept * count)}
    return [WindowDemand(seconds=seconds, arrivals=count, sizes=sizes, **answers)]


@dataclass
class World:
    """A service, its pods and its gateway; replicas start after `START` and are placed in `full` pools never."""

    spec: dict[str, Any] = field(default_factory=dict)
    pools: tuple[AcceleratorPool, ...] = (kind("l4", 1.0),)
    lines: list[dict[str, Any]] = field(default_factory=lambda: [line("L4")])
    full: set[str] = field(default_factory=set)
    desired: int = 1
    now_s: float = 1000.0
    counted_s: float = 500.0
    overdue: int = 0
    kept: float = 1.0
    knows: bool = True
    """Whether the gateway has the service's route."""
    fleets: Fleets = field(default_factory=Fleets)
    plans: list[Plan] = field(default_factory=list)
    pods: dict[int, tuple[Pod, float]] = field(default_factory=dict)
    """By rank, with the time at which each becomes ready."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    reading: int = 0
    room: ServiceRoom | None = None
    """What quota, power and other work leave."""
    days: DayProfile = field(default_factory=DayProfile)
    profiles: tuple[PerformanceProfile, ...] = ()

    @property
    def service(self) -> ModelService:
        status = {"desiredReplicas": self.desired, "measured": self.lines, "pools": self.rows}
        return service(status=status, **{"slo": SLO, "maxReplicas": 10, **self.spec})

    def run(self, seconds: int, rate: float | None) -> Plan:
        """Seconds with so many requests per second; None: the gateway is away."""
        for _ in range(seconds):
            self.now_s += 1
            self.reading += rate is not None
            plan = self.fleets.plan(self.seen(rate))
            self.plans.append(plan)
            if plan.target is not None and self.spec.get("replicas") is None:
                self.follow(dict(plan.target))
        return self.plans[-1]

    def seen(self, rate: float | None) -> Seen:
        demand = None
        if rate is not None:
            self.counted_s += 1
            demand = ServiceDemand(
                namespace="team", name="web", overdue=self.overdue, windows=[w for s in (10, 60, 180) for w in windows(rate, s, self.kept)],
                totals=Totals(),
            )  # fmt: skip
            demand = demand if self.knows else ServiceDemand(namespace="team", name="web")
        pods = tuple(
            replace(pod, ready=self.now_s >= at, ready_since=NOW + START if self.now_s >= at else None)
            for pod, at in self.pods.values()
        )
        return Seen(
            self.service,
            pods,
            self.pools,
            self.profiles,
            demand,
            self.reading,
            self.counted_s,
            self.now_s,
            room=self.room,
            days=self.days,
        )

    def follow(self, target: dict[str, int]) -> None:
        """What the reconcile and the scheduler do with a target."""
        self.desired = sum(target.values())
        self.rows = [{"pool": name, "replicas": 0, "desired": count} for name, count in target.items()]
        for name in {pod.pool for pod, _ in self.pods.values()} | target.keys():
            held = [rank for rank, (pod, _) in self.pods.items() if pod.pool == name]
            for rank in held[target.get(name, 0) :]:
                del self.pods[rank]
            for _ in range(target.get(name, 0) - len(held) if name not in self.full else 0):
                self.start(name)

    def start(self, name: str, ready_in_s: float = START.total_seconds()) -> None:
        rank = next(i for i in range(99) if i not in self.pods)
        made = replica(rank, pool=name, phase="Running", created_at=NOW)
        self.pods[rank] = (made, self.now_s + ready_in_s)


def one(**fields: Any) -> World:
    """A service with one ready replica on L4, and a gateway that has counted for a while."""
    world = World(**fields)
    world.start("l4", 0)
    return world


def each(world: World) -> float:
    """What one replica sustains."""
    rate = world.run(1, 0.1).rates["l4"]
    assert 1 < rate < 20, "the loads of these tests are relative to it"
    return rate
