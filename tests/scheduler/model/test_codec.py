"""Snapshots, plans and policies as JSON: exact both ways, defaults left out, and mistakes named by their place."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from tests.scheduler.build import NOW, cluster, job, placed

from busbar.scheduler import Cell, DecodeError, PerformanceTable, Plan, Policy, Rate, Snapshot, plan


def small() -> Snapshot:
    snapshot = cluster(job("a", on=placed("H100", "H100-0000")), job("b", "b", size=8, pods=2), H100=1)
    cells = (Cell("c", "H100", 1000, speed=10.0, memory_mib=60_000),)
    return replace(snapshot, table=PerformanceTable(cells, (Rate("H100"),)))


def test_a_snapshot_a_plan_and_a_policy_come_back_as_they_were() -> None:
    snapshot = small()
    assert Snapshot.from_json(json.loads(json.dumps(snapshot.to_json()))) == snapshot
    made, _ = plan(snapshot, Policy(), NOW)
    assert made.waiting
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made
    for policy in (Policy(), Policy(usage_half_life_s=math.inf), Policy(guarantee_reclaim_s=1)):
        assert Policy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


def test_defaults_are_left_out() -> None:
    assert Snapshot().to_json() == {}
    assert Policy(guarantee_reclaim_s=1.0).to_json() == {"guarantee_reclaim_s": 1.0}
    assert "mode" not in small().to_json()["table"]["cells"][0]


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("jobs", 1, "tenent"), "b", "Snapshot.jobs[1].tenent: "),
        (("jobs", 1, "min_pods"), "2", "Snapshot.jobs[1].min_pods: "),
        (("jobs", 1, "min_pods"), True, "Snapshot.jobs[1].min_pods: "),
        (("jobs", 1, "kind"), "Dance", "Snapshot.jobs[1].kind: "),
        (("jobs", 1, "submitted_at_s"), None, "Snapshot.jobs[1].submitted_at_s: "),
        (("jobs", 1, "preemptible"), 1, "Snapshot.jobs[1].preemptible: "),
        (("jobs", 1), [], "Snapshot.jobs[1]: "),
        (("jobs",), {}, "Snapshot.jobs: "),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(path: tuple[str | int, ...], value: Any, where: str) -> None:
    data = json.loads(json.dumps(small().to_json()))
    holder = data
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    with pytest.raises(DecodeError) as refused:
        Snapshot.from_json(data)
    assert str(refused.value).startswith(where)


def test_a_missing_field_is_named() -> None:
    data = json.loads(json.dumps(small().to_json()))
    del data["nodes"][0]["name"]
    with pytest.raises(DecodeError, match=r"Snapshot\.nodes\[0\]\.name: "):
        Snapshot.from_json(data)
