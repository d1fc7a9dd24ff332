"""Profiles of one workload class, jobs that were measured, and reconciles of the profile."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from tests.operator.builders import ENGINE as ENGINE_SPEC
from tests.operator.builders import NOW, SETTINGS, job, pool, tenant
from tests.operator.profiles.test_speeds import CONFIG, done, ran, tokens

from busbar.kube.types import PerformanceProfile, TrainingJob
from busbar.kube.types.performance_profile import ProfileCell
from busbar.operator.profiles.observations import digests
from busbar.operator.profiles.reconcile import ProfileUpdate, ProfileView, reconcile
from busbar.operator.profiles.table import performance_table, workload
from busbar.operator.scheduling.snapshot import ClusterObjects, build
from busbar.operator.watch.projections import Node
from busbar.scheduler import Snapshot

POOLS = (
    pool("a100", accelerator="A100", resourceName="nvidia.com/gpu"),
    pool("v100", accelerator="V100", resourceName="nvidia.com/gpu"),
)
TEAM = tenant("team", ["team"])
TENANT_OF = {"team": "team"}
KEYS = digests((TEAM,))
NODES = tuple(
    Node(
        f"n-{p.metadata.name}",
        (("pool", p.metadata.name),),
        (),
        64_000,
        512_000,
        0,
        (("nvidia.com/gpu", 8),),
        True,
    )
    for p in POOLS
)
CLASS = workload(ran(1.0)).workload_class


def profile(
    name: str = "of-class", status: Any = None, created: str = "2026-11-01T00:00:00Z", **spec: Any
) -> PerformanceProfile:
    meta = {"name": name, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1"}
    return PerformanceProfile.model_validate(
        {
            "metadata": {**meta, "creationTimestamp": created},
            "spec": {"workloadClass": CLASS, **spec},
            "status": status,
        }
    )


def look(of: PerformanceProfile, *jobs: TrainingJob, now: datetime = NOW, **fields: Any) -> ProfileUpdate:
    view = ProfileView(
        profile=of,
        counts=of.metadata.name,
        table=performance_table(jobs, POOLS, TENANT_OF, (of,), (TEAM,)),
        jobs=jobs,
        uids=frozenset(j.metadata.uid for j in jobs),
        left=(),
        tenant_of=TENANT_OF,
        keys=KEYS,
        now=now,
        settings=SETTINGS,
    )
    return reconcile(replace(view, **fields))


def written(of: PerformanceProfile, *jobs: TrainingJob, **fields: Any) -> PerformanceProfile:
    """The profile after a reconcile, serialized and parsed."""
    update = look(of, *jobs, **fields)
    assert update.status is not None
    return PerformanceProfile.model_validate({**of.to_wire(), "status": update.status.to_wire()})


def cell(of: PerformanceProfile, accelerator: str) -> ProfileCell:
    assert of.status is not None
    found = [c for c in of.status.cells or () if (c.accelerator, c.mode) == (accelerator, "resident")]
    assert len(found) == 1
    return found[0]


def waiting(name: str = "next") -> TrainingJob:
    engine = {**ENGINE_SPEC, "model": {"config": CONFIG}, "steps": 1000, "mode": "resident"}
    return job(name, engine=engine)


def formula(accelerator: str) -> float:
    table = performance_table((waiting(),), POOLS, TENANT_OF)
    return next(c.speed for c in table.cells if c.accelerator == accelerator)


def snapshot(*profiles: PerformanceProfile, jobs: tuple[TrainingJob, ...]) -> Snapshot:
    return build(ClusterObjects(jobs, (), POOLS, (TEAM,), NODES, (), profiles), NOW)


def finished(factor: float, name: str = "job", on: str = "A100") -> TrainingJob:
    speed = formula(on) * factor
    return done(speed, tokens() / speed + 60, name=name, on=on)
