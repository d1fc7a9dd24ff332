"""What nodes draw at least, and which work may be stopped."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, admitted, job, pool, replica, running, service
from tests.operator.power.parts import domain
from tests.operator.power.test_leasing import standing

from busbar.kube.informer import Key
from busbar.kube.types import ModelService, TrainingJob
from busbar.kube.types.power_domain import PowerEnforcement
from busbar.kube.types.training_status import CheckpointStatus
from busbar.operator.power.leasts import RESTART_S, Objects, leasts, places, tree_of, works
from busbar.operator.power.membership import Membership, membership
from busbar.operator.power.readings import HOST, Metered, Reading
from busbar.operator.watch.projections import Node, Pod, Requests, Sleep
from busbar.scheduler.power import NodeLeast, Tier, Work

A100 = pool("a100", accelerator="A100", resourceName="nvidia.com/gpu", nodeSelector={"pool": "a100"})
GPUS = 2


def node(name: str, in_pool: bool = True) -> Node:
    labels = (("rack", "red"), *((("pool", "a100"),) if in_pool else ()))
    return Node(name, labels, (), 8000, 32768, 0, (("nvidia.com/gpu", GPUS),), True)


def found(nodes: tuple[Node, ...], policy: str = "Static", host_w: float | None = 200.0) -> Membership:
    red = domain("red", 5000.0, None, policy, host_w, rack="red")
    red.spec.enforcement = PowerEnforcement.PREEMPT
    return membership([red], nodes)


def on_boards(pod: Pod, count: int, at: str = "n0") -> Pod:
    return replace(pod, node=at, requests=Requests(100, devices=(("nvidia.com/gpu", count),)))


def two_boards(at_s: float = 0.0) -> Reading:
    """Of 100 to 400 W."""
    return standing("n0", at_s, a=(100.0, 0.0), b=(100.0, 0.0))


def one(
    reading: Reading | None, *pods: Pod, policy: str = "Static", silent_w: float | None = None, **more: Any
) -> NodeLeast | None:
    nodes = (node("n0", more.get("in_pool", True)),)
    seen = found(nodes, policy, more.get("host_w", 200.0))
    at = places(seen, nodes, (A100,))
    readings = {} if reading is None else {"n0": reading}
    return leasts(seen, at, readings, pods, {} if silent_w is None else {"n0": silent_w}, -3.0).get("n0")


def test_a_board_that_works_counts_its_lowest_limit_and_an_idle_one_what_its_type_draws() -> None:
    reading, pod = two_boards(), on_boards(running(), 1)
    assert one(reading) == NodeLeast(200.0 + 2 * 63.0, (37.0, 37.0), 0.0)
    assert one(reading, pod) == NodeLeast(326.0, (37.0, 37.0), 1.0)
    assert one(reading, replace(pod, phase="Succeeded")) == one(reading), "it holds nothing any more"
    assert one(reading, on_boards(running(), 1, at="elsewhere")) == one(reading)


def test_what_nothing_limits_counts_with_its_nameplate() -> None:
    reading = two_boards()
    free = NodeLeast(326.0, (337.0, 337.0), 0.0)
    assert one(replace(reading, limits=None)) == free
    assert reading.limits is not None
    fought = replace(reading, limits=reading.limits.model_copy(update={"conflicts": 1}))
    assert one(fought) == free
    assert one(reading, policy="Observe") == free
    deaf = {**reading.meters, "a": replace(reading.meters["a"], refuses=True)}
    assert one(replace(reading, meters=deaf)) == NodeLeast(326.0, (337.0, 37.0), 0.0)


def test_a_silent_node_counts_with_what_was_sent_to_it() -> None:
    late = two_boards(-4.0)
    assert one(late, silent_w=700.0) == NodeLeast(326.0, (187.0, 187.0), 0.0)
    assert one(late, silent_w=100.0) == NodeLeast(326.0, (37.0, 37.0), 0.0), "no less than the lowest limits"
    assert one(late) == NodeLeast(326.0, (337.0, 337.0), 0.0), "nobody knows what was sent"
    assert one(None) is None


def test_where_the_idle_draw_or_the_holders_are_unknown_nothing_is_saved_on_paper() -> None:
    """The node is in no pool: nobody knows its boards' type, and who works on them."""
    assert one(two_boards(), in_pool=False) == NodeLeast(400.0, (0.0, 0.0), 2.0)


@pytest.mark.parametrize(("host_w", "idle_w"), [(None, 1126.0), (0.0, 126.0)])
def test_the_host_is_what_the_domain_says_or_its_meter(host_w: float | None, idle_w: float) -> None:
    reading = two_boards()
    metered = replace(reading, meters={**reading.meters, HOST: Metered(90.0, 0.0, 1000.0, 1000.0)})
    nodes = (node("n0"),)
    seen = replace(found(nodes), host_w={"red": host_w})
    made = leasts(seen, places(seen, nodes, (A100,)), {"n0": metered}, (), {}, -3.0)["n0"]
    assert made.idle_w == idle_w


def test_the_tree_is_that_of_sound_domains_and_nodes_of_two_are_in_none() -> None:
    nodes = (node("n0"),)
    assert tree_of(found(nodes)).members == {"red": ("n0",)}
    two = membership([domain("one", rack="red"), domain("two", rack="red")], nodes)
    assert tree_of(two).members == {}
    below = membership(
        [
            domain("one", rack="red"),
            domain("two", rack="red"),
            domain("three", 900.0, "one", pool="a100", gpus="yes"),
        ],
        [replace(node("n1"), labels=(("gpus", "yes"), ("pool", "a100"))), *nodes],
    )
    assert tree_of(below).members == {"three": ("n1",)}


def stoppable(
    *pods: Pod, job: TrainingJob | None = None, service: ModelService | None = None, ceiling: int = 1000
) -> list[Work]:
    nodes = (node("n0"),)
    seen = found(nodes)
    at = places(seen, nodes, (A100,))
    least = leasts(seen, at, {"n0": two_boards()}, pods, {}, -3.0)
    objects = Objects(
        pods,
        {Key("team", "job"): job} if job is not None else {},
        {Key("team", "web"): service} if service is not None else {},
        {"team": ceiling},
    )
    return [work for work, _, _ in works(at, least, objects, NOW).values()]


def test_a_job_counts_with_the_work_since_its_checkpoint_and_a_priority_within_its_tenants() -> None:
    pod = on_boards(running(), 2)
    a = admitted(job(priority=7))
    assert a.status is not None
    assert a.status.admission is not None
    early = a.status.admission.model_copy(
        update={"admitted_at": NOW - timedelta(hours=1), "accelerator": "A100"}
    )
    saved = CheckpointStatus(step=1, saved_at=NOW - timedelta(seconds=60))
    began = a.model_copy(update={"status": a.status.model_copy(update={"admission": early})})
    [work] = stoppable(pod, job=began)
    assert work == Work("uid-job", {"n0": 2.0}, Tier.JOB, 7, 2 * (3600 + RESTART_S))
    kept = a.model_copy(
        update={"status": a.status.model_copy(update={"admission": early, "checkpoint": saved})}
    )
    [work] = stoppable(pod, job=kept, ceiling=3)
    assert (work.priority, work.lost) == (3, 2 * (60 + RESTART_S))


def test_what_may_not_be_stopped_is_none_of_it_and_what_is_leaving_says_so() -> None:
    pod = on_boards(running(), 1)
    firm = admitted(job(preemptible=False))
    assert stoppable(pod, job=firm) == []
    [leaving] = stoppable(pod, job=firm.model_copy(update={"status": None}))
    assert leaving.going, "its pods are left over"
    assert stoppable(pod) == [], "its object is not known"
    assert stoppable(replace(pod, kind="", owner_uid="uid-set"), job=admitted(job())) == []


def test_replicas_beyond_the_least_number_are_spare_those_that_do_not_serve_first() -> None:
    pods = [on_boards(replica(i), 1) for i in range(3)]
    pods[0] = replace(pods[0], ready=False)
    pods[1] = replace(pods[1], draining_since=NOW)
    web = service(minReplicas=1, maxReplicas=3)
    assert {work.id: (work.tier, work.going) for work in stoppable(*pods, service=web)} == {
        "uid-web/0": (Tier.SPARE, False),
        "uid-web/1": (Tier.SPARE, True),
        "uid-web/2": (Tier.NEEDED, False),
    }


def test_a_replica_that_sleeps_goes_before_every_job_and_counts_for_no_least_number() -> None:
    pods = [on_boards(replica(i), 1) for i in range(2)]
    pods[0] = replace(pods[0], sleep=Sleep.ASLEEP, sleep_since=NOW)
    asleep, serves = stoppable(*pods, service=service(minReplicas=1, maxReplicas=3))
    assert (asleep.id, asleep.tier, asleep.priority, asleep.lost) == ("uid-web/0", Tier.JOB, -1, 0.0)
    assert (serves.id, serves.tier) == ("uid-web/1", Tier.NEEDED)
