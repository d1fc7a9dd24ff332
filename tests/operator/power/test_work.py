"""What nodes are used for, what their work weighs, and which of them are under the power cap of a job."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.builders import job, placement, pod, service
from tests.operator.power.parts import domain, node

from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.operator.pods.replica_place import placement_note
from busbar.operator.power.board_parts import WHOLE
from busbar.operator.power.membership import Membership, membership
from busbar.operator.power.work import NodeWork, WorkKind, node_work, weight_of
from busbar.operator.watch.projections import Pod, Requests

NODES = [node("n0", rack="a"), node("n1", rack="a"), node("n2", rack="b")]
RACK = domain("rack", 2000.0, None, "Lease", 200.0, rack="a")


JOBS = {Key("team", "plain"): job("plain"), Key("team", "urgent"): job("urgent", priority=300)}
SERVICES = {
    Key("team", "web"): service("web"),
    Key("team", "timed"): service(
        "timed", priority=100, slo={"ttftMilliseconds": 500, "tpotMilliseconds": 50}
    ),
}


def caps(found: Membership, jobs: list[TrainingJob]) -> dict[str, float]:
    works = node_work(found, (), {Key("team", each.metadata.name): each for each in jobs}, {})
    return {name: work.parts.rest for name, work in works.items()}


def holder(kind: str, of: str, node: str, boards: int, **fields: Any) -> Pod:
    requests = Requests(devices=(("nvidia.com/gpu", boards),) if boards else ())
    return pod(kind=kind, owner=of, node=node, requests=requests, **fields)


def works(*pods: Pod) -> dict[str, NodeWork]:
    return node_work(membership([RACK], NODES), pods, JOBS, SERVICES)


def on(
    name: str, *nodes: str, percent: int | None = 70, phase: str = "Running", **admission: Any
) -> TrainingJob:
    place = {"id": "x", "pool": "p", "accelerator": "A100", "pods": len(nodes), "nodes": list(nodes)}
    place |= {"powerCapPercent": percent} | admission
    return job(name, status={"phase": phase, "admission": place})


def test_the_nodes_of_a_capped_job_have_its_cap_until_its_admission_ends() -> None:
    found = membership([RACK], NODES)
    assert caps(found, [on("a", "n0", "n1"), job("waits")]) == {"n0": 0.7, "n1": 0.7}
    assert caps(found, [on("a", "n0", percent=None)]) == {}
    assert caps(found, [on("a", "n0", phase="Succeeded")]) == {}
    assert caps(found, [on("a", "n0", phase="Preempting")]) == {"n0": 0.7}


def test_nodes_that_no_policy_limits_have_none() -> None:
    assert caps(membership([RACK], NODES), [on("a", "n1", "n2")]) == {"n1": 0.7}
    observing = domain("rack", 2000.0, None, "Observe", rack="a")
    assert caps(membership([observing], NODES), [on("a", "n0")]) == {}


def test_the_boards_of_replicas_have_the_highest_cap_of_those_that_hold_boards_of_the_node() -> None:
    def replica(cap: float, on: str, rank: int = 0) -> Pod:
        note = placement_note(placement(power_cap=cap))
        return holder("modelservice", "web", on, 1, rank=rank, placement=note)

    low, high, plain = replica(0.6, "n0"), replica(0.8, "n0", 1), replica(1.0, "n0", 2)
    trains = holder("trainingjob", "plain", "n0", 1)
    parts = [works(*held)["n0"].parts.rest for held in ((low,), (low, high), (low, plain), (low, trains))]
    assert parts == [0.6, 0.8, 1.0, 1.0]
    forged = holder("trainingjob", "plain", "n0", 1, placement=low.placement)
    assert works(forged)["n0"].parts == WHOLE
    assert works(replica(0.6, "n2")) == {}, "no policy limits it"


def test_a_priority_weighs_within_bounds() -> None:
    assert [weight_of(p) for p in (0, 50, 100, 200, 400, 1000)] == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0]


def test_the_boards_of_a_node_are_weighed_by_who_holds_them() -> None:
    trains = holder("trainingjob", "plain", "n0", 4)
    urgent = holder("trainingjob", "urgent", "n0", 4)
    serves, timed = holder("modelservice", "web", "n1", 2), holder("modelservice", "timed", "n1", 6)
    assert works(trains, urgent, serves, timed) == {
        "n0": NodeWork(weight=2.0, kind=WorkKind.TRAINING),
        "n1": NodeWork(weight=(2 * 4.0 + 6 * 1.0) / 8, first_token=0.75, kind=WorkKind.SERVING),
    }


def test_the_prompts_of_a_node_are_the_mean_of_its_boards_where_all_tell() -> None:
    few, many = holder("modelservice", "web", "n1", 2), holder("modelservice", "timed", "n1", 6)

    def part(shares: dict[str, float]) -> float | None:
        return node_work(membership([RACK], NODES), (few, many), JOBS, SERVICES, shares)["n1"].prompt_part

    assert part({few.uid: 0.5, many.uid: 0.1}) == pytest.approx(0.2)
    assert part({few.uid: 0.5}) is None
    assert part({}) is None


@pytest.mark.parametrize(
    "other",
    [
        holder("modelservice", "timed", "n0", 1),
        holder("", "", "n0", 1),
        holder("trainingjob", "gone", "n0", 1),
    ],
    ids=["a replica", "a foreign pod", "a job that is gone"],
)
def test_what_a_node_does_is_unknown_unless_all_holders_do_the_same(other: Pod) -> None:
    assert works(holder("trainingjob", "plain", "n0", 1), other)["n0"].kind is WorkKind.UNKNOWN


def test_pods_without_boards_that_have_ended_or_are_elsewhere_count_nothing() -> None:
    idle = holder("trainingjob", "urgent", "n0", 0)
    ended = holder("trainingjob", "urgent", "n0", 8, phase="Succeeded")
    waits = holder("trainingjob", "urgent", "", 8)
    assert works(idle, ended, waits, holder("trainingjob", "urgent", "n2", 8)) == {}
    assert set(works(ended, holder("trainingjob", "plain", "n1", 8))) == {"n1"}
