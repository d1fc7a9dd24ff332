"""Orphaned pods: how they are recognized, when they are deleted, and which tenant is charged until then."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from tests.operator.builders import NOW, admitted, ended, gated, job, pod, pool, running, service, tenant

from busbar.operator.accounting.allocations import allocations
from busbar.operator.pods.orphans import Owner, Verdict, is_stray, judge
from busbar.operator.scheduling.snapshot import ClusterObjects, build
from busbar.operator.scheduling.wakes import matters
from busbar.operator.watch.projections import Node, Requests
from busbar.scheduler import Policy, plan

GRACE_S = 30.0
MINE = Owner("uid-job")
LATER = NOW + timedelta(seconds=GRACE_S)


def test_a_pod_of_a_living_job_is_never_deleted() -> None:
    assert not is_stray(running(), MINE)
    assert judge(running(), MINE, NOW, LATER, GRACE_S) == Verdict()


def test_a_pod_without_an_owner_reference_goes_at_once_even_while_its_job_lives() -> None:
    stripped = running(owner_uid="")
    for owner in (None, MINE):
        assert "no owner reference" in judge(stripped, owner, NOW, NOW, GRACE_S).why


@pytest.mark.parametrize("owner", [None, Owner("uid-of-another")], ids=["gone", "another of the name"])
def test_a_pod_whose_owner_is_gone_is_the_garbage_collectors_first(owner: Owner | None) -> None:
    assert judge(running(), owner, NOW, NOW + timedelta(seconds=10), GRACE_S) == Verdict(again_s=20.0)
    assert "its TrainingJob job is gone" in judge(running(), owner, NOW, LATER, GRACE_S).why


def test_a_deletion_that_somebody_holds_up_frees_its_pods_all_the_same() -> None:
    held = Owner("uid-job", deleting_since=NOW)
    assert judge(running(), held, LATER, NOW, GRACE_S) == Verdict(again_s=30.0)
    assert "something holds that up" in judge(running(), held, LATER, LATER, GRACE_S).why


def test_what_is_deleted_already_and_what_is_not_ours_stays() -> None:
    for other in (running(owner_uid="", deleting=True), running(kind="", owner_uid="")):
        assert judge(other, None, NOW, LATER, GRACE_S) == Verdict()


def seen(**fields: object) -> ClusterObjects:
    node = Node("node-0", (("pool", "cpu"),), (), 8000, 32768, 100_000, (("nvidia.com/gpu", 8),), True)
    base = ClusterObjects(pools=(pool(),), tenants=(tenant("team", ["team"]),), nodes=(node,))
    return replace(base, **fields)  # type: ignore[arg-type]


def test_an_orphan_is_held_by_its_namespaces_tenant_and_not_free() -> None:
    made = build(seen(pods=(running(owner_uid="", requests=Requests(3000)),)), NOW)
    found = allocations(made)
    assert found.tenants["team"].allocated == {"cpu": 3.0}
    assert (found.pools["cpu"].capacity, found.pools["cpu"].allocated) == (8.0, 3.0)


def test_an_orphan_with_devices_is_counted_by_its_devices() -> None:
    gpus = pool(resourceName="nvidia.com/gpu", accelerator="H100")
    stripped = running(owner_uid="", requests=Requests(1000, devices=(("nvidia.com/gpu", 4),)))
    made = build(seen(pools=(gpus,), pods=(stripped,)), NOW)
    assert allocations(made).tenants["team"].allocated == {"H100": 4.0}


def test_an_orphan_takes_room_from_those_who_wait_and_is_not_ordered_about() -> None:
    stripped = running(owner_uid="", requests=Requests(8000))
    made = build(seen(jobs=(job("next"),), pods=(stripped,)), NOW)
    decided, _ = plan(made, Policy(), NOW.timestamp())
    assert decided.actions == ()


def test_pods_with_an_owner_that_ended_or_of_no_tenant_are_no_orphans() -> None:
    of = admitted(job())
    alone = service(status={"desiredReplicas": 0})
    made = build(
        seen(
            jobs=(of,),
            services=(alone,),
            pods=(gated(0), ended(1, owner_uid=""), running(2, owner_uid="", pinned="node-9", node="node-9")),
        ),
        NOW,
    )
    assert [j.id for j in made.jobs] == ["uid-job"]
    assert build(seen(tenants=(), pods=(running(owner_uid=""),)), NOW).jobs == ()


def test_losing_its_owner_wakes_the_scheduler() -> None:
    assert matters("Pod", pod(), pod(owner_uid=""))
