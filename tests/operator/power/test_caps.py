"""Which nodes are under the power cap of a job."""

from __future__ import annotations

from typing import Any

from tests.operator.builders import job
from tests.operator.power.parts import domain, node

from busbar.kube.types import TrainingJob
from busbar.operator.power.caps import job_caps
from busbar.operator.power.membership import membership

NODES = [node("n0", rack="a"), node("n1", rack="a"), node("n2", rack="b")]
RACK = domain("rack", 2000.0, None, "Lease", 200.0, rack="a")


def on(
    name: str, *nodes: str, percent: int | None = 70, phase: str = "Running", **admission: Any
) -> TrainingJob:
    place = {"id": "x", "pool": "p", "accelerator": "A100", "pods": len(nodes), "nodes": list(nodes)}
    place |= {"powerCapPercent": percent} | admission
    return job(name, status={"phase": phase, "admission": place})


def test_the_nodes_of_a_capped_job_have_its_cap_until_its_admission_ends() -> None:
    found = membership([RACK], NODES)
    assert job_caps(found, [on("a", "n0", "n1"), job("waits")]) == {"n0": 0.7, "n1": 0.7}
    assert job_caps(found, [on("a", "n0", percent=None)]) == {}
    assert job_caps(found, [on("a", "n0", phase="Succeeded")]) == {}
    assert job_caps(found, [on("a", "n0", phase="Preempting")]) == {"n0": 0.7}


def test_nodes_that_no_policy_limits_have_none() -> None:
    assert job_caps(membership([RACK], NODES), [on("a", "n1", "n2")]) == {"n1": 0.7}
    observing = domain("rack", 2000.0, None, "Observe", rack="a")
    assert job_caps(membership([observing], NODES), [on("a", "n0")]) == {}
