"""Exploration: the accounting of held time, who explores, and a simulated cluster that stays within the bound."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import ENGINE as ENGINE_SPEC
from tests.operator.builders import NOW, SETTINGS, job, tenant
from tests.operator.profiles.parts import NODES, POOLS, TENANT_OF, formula, profile, waiting, written
from tests.operator.profiles.test_speeds import CONFIG, STEPS, ran, tokens

from busbar.kube.types import PerformanceProfile, TrainingJob
from busbar.kube.types.performance_profile import HeldTime
from busbar.operator.profiles.observations import Stay, digests, hold, read
from busbar.operator.profiles.reconcile import ProfileView, reconcile
from busbar.operator.profiles.table import performance_table, workload
from busbar.operator.scheduling.snapshot import ClusterObjects, build
from busbar.scheduler import Policy, Snapshot, plan
from busbar.scheduler.model.table import Exploration
from busbar.scheduler.performance.learning import EXPLORED


def test_held_time_counts_as_unmeasured_until_a_measurement_is_written() -> None:
    known = read(profile(), {})
    place = ("A100", 2000, "resident", 1.0, 0)
    first = hold(known, [Stay(place, NOW)], NOW + timedelta(seconds=100))
    assert (first.measured, first.unmeasured) == (0.0, 200.0)
    there = replace(known, held=first)
    again = hold(there, [Stay(place, NOW)], NOW + timedelta(seconds=150))
    assert again.unmeasured == pytest.approx(300.0, rel=1e-3)
    ended = hold(there, [Stay(place, NOW, NOW + timedelta(seconds=120))], NOW + timedelta(seconds=150))
    assert ended.unmeasured == pytest.approx(240.0, rel=1e-3)


def test_held_time_fades_by_half_in_a_week() -> None:
    known = replace(read(profile(), {}), held=HeldTime(measured=1000, unmeasured=10, as_of=NOW))
    later = hold(known, [], NOW + timedelta(days=7))
    assert (later.measured, later.unmeasured) == (500.0, 5.0)


@pytest.mark.parametrize(
    ("guaranteed", "held", "tempted"),
    [
        (0, {"measured": 1000.0, "unmeasured": 1000.0 * EXPLORED / 2}, True),
        (0, {"measured": 1000.0, "unmeasured": 1000.0 * EXPLORED * 2}, False),
        (1, {"measured": 1000.0, "unmeasured": 0.0}, False),
    ],
    ids=["room left", "used up", "has a guarantee"],
)
def test_only_tenants_without_a_guarantee_explore_and_only_while_capacity_is_free(
    guaranteed: float, held: dict[str, float], tempted: bool
) -> None:
    of = written(profile(), ran(formula("A100") * 0.8), waiting())
    assert of.status is not None
    account = HeldTime(**held, as_of=NOW)
    of = of.model_copy(update={"status": of.status.model_copy(update={"held": account})})
    team = tenant("team", ["team"], quota=[{"accelerator": "V100", "guaranteed": guaranteed}])
    table = performance_table((ran(formula("A100") * 0.8), waiting()), POOLS, TENANT_OF, (of,), (team,))
    trials = [c for c in table.learned if c.trial]
    assert {(c.accelerator, c.tenant) for c in trials} == ({("V100", "team")} if tempted else set())
    assert table.explored == Exploration(held["unmeasured"], held["unmeasured"] + held["measured"])


TRUTH = {"A100": 10_000.0, "V100": 16_000.0}
"""Tokens per second of every class; the formula orders the types the other way round."""


class Life:
    """Jobs arrive, run at true speeds that the operator does not know, report, and end; objects are written as the
    operator writes them.

    Each job runs for up to two hours where the plan places it. One node with one accelerator per type.
    """

    step = timedelta(minutes=5)

    def __init__(self, tenant_quota: list[dict[str, Any]]) -> None:
        self.team = tenant("team", ["team"], quota=tenant_quota)
        self.now = NOW
        self.jobs: dict[str, TrainingJob] = {}
        self.profiles: dict[str, PerformanceProfile] = {}
        self.seen: set[tuple[str, str]] = set()
        self.first_s = 0.0
        self.total_s = 0.0
        self.count = 0

    def submit(self, layers: int) -> None:
        self.count += 1
        config = {**CONFIG, "num_hidden_layers": layers}
        steps = round(2 * 3600 * TRUTH["A100"] / (tokens() / STEPS))
        engine = {**ENGINE_SPEC, "model": {"config": config}, "steps": steps, "mode": "resident"}
        made = job(f"j{self.count}", engine=engine)
        self.jobs[made.metadata.name] = made

    def build(self) -> Snapshot:
        nodes = tuple(replace(n, devices=(("nvidia.com/gpu", 1),)) for n in NODES)
        profiles = tuple(self.profiles.values())
        return build(
            ClusterObjects(tuple(self.jobs.values()), (), POOLS, (self.team,), nodes, (), profiles), self.now
        )

    def tick(self) -> None:
        """A round, and what happens until the next."""
        made = plan(self.build(), Policy(), self.now.timestamp())[0]
        by_uid = {j.metadata.uid: name for name, j in self.jobs.items()}
        for action in made.actions:
            if action.kind == "start" and action.to is not None:
                self._start(by_uid[action.job], action.to.pool, action.to.accelerator)
        self.now += self.step
        for name in list(self.jobs):
            self._live(name)
        self._write()

    def _start(self, name: str, of_pool: str, accelerator: str) -> None:
        at = {
            "id": name, "pool": of_pool, "accelerator": accelerator, "mode": "resident", "pods": 1,
            "nodes": [f"n-{of_pool}"], "perPod": {"acceleratorsM": 1000},
            "admittedAt": self.now.isoformat(), "startedAt": self.now.isoformat(), "image": {"verified": True},
        }  # fmt: skip
        self._set(name, {"phase": "Running", "attempt": 1, "admission": at})

    def _set(self, name: str, status: dict[str, Any]) -> None:
        old = self.jobs[name].to_wire()
        self.jobs[name] = TrainingJob.model_validate(
            {**old, "status": {**(old.get("status") or {}), **status}}
        )

    def _live(self, name: str) -> None:
        of = self.jobs[name]
        if of.status is None or of.status.admission is None or of.status.admission.admitted_at is None:
            return
        at, load = of.status.admission, workload(of)
        if of.status.completion_time is not None:
            del self.jobs[name]  # its ttlSecondsAfterFinished has passed
            return
        held = self.step / timedelta(seconds=1)
        place = (load.workload_class, at.accelerator)
        self.total_s += held
        self.first_s += held if place not in self.seen else 0.0
        truth = TRUTH[at.accelerator]
        self.seen.add(place)
        self._set(name, {"progress": {"step": 1, "totalSteps": 100, "tokensPerSecond": truth, "tokens": 1}})
        assert at.admitted_at is not None
        end = at.admitted_at + timedelta(seconds=(load.remaining(0) or 0.0) / truth)
        if self.now >= end:
            self._set(name, {"phase": "Succeeded", "completionTime": end.isoformat()})

    def _write(self) -> None:
        jobs = tuple(self.jobs.values())
        for of in jobs:
            name = workload(of).workload_class
            if of.status is not None and name not in self.profiles:
                self.profiles[name] = profile(name.lower(), workloadClass=name)
        for name, of_class in self.profiles.items():
            view = ProfileView(
                of_class,
                of_class.metadata.name,
                performance_table(
                    jobs, POOLS, TENANT_OF, self.profiles.values(), (self.team,), absent_too=True
                ),
                tuple(j for j in jobs if workload(j).workload_class == name),
                frozenset(j.metadata.uid for j in jobs),
                (),
                TENANT_OF,
                digests((self.team,)),
                self.now,
                SETTINGS,
            )
            status = reconcile(view).status
            if status is not None:
                self.profiles[name] = of_class.model_copy(update={"status": status})


def test_a_cluster_with_jobs_tries_every_type_within_its_bound() -> None:
    life = Life([])
    for number in range(12):
        life.submit(12 + number % 3)
        life.submit(12 + number % 3)
        for _ in range(26):
            life.tick()
    assert {kind for _, kind in life.seen} == {"A100", "V100"}
    assert 0 < life.first_s / life.total_s < 0.05
    explored = life.build().table.explored
    assert explored.share < 0.05
    # The accounting agrees with the run: exploration counts until the first report is recorded.
    assert explored.unmeasured_s == pytest.approx(life.first_s, rel=0.35, abs=600)
    assert sum(len(p.status.evidence or ()) for p in life.profiles.values() if p.status) >= 3
