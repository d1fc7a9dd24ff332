"""The overview: what runs, what waits and why, who holds what, what it costs per hour; and who may see it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.api.conftest import BASE, JOB, NOW, SERVICE, World

from busbar.api.access.identity import CallerRole
from busbar.api.objects.overview import Held, Overview, overview
from busbar.api.portal.front_page import page_of
from busbar.api.portal.render import templates
from busbar.kube.resources import ACCELERATOR_POOLS, TRAINING_JOBS
from busbar.kube.types import AcceleratorPool, ModelService, Tenant, TrainingJob


def at(**later: float) -> str:
    return (NOW + timedelta(**later)).isoformat()


def admission(pool: str, accelerator: str, pods: int, each: int) -> dict[str, Any]:
    return {
        "id": "a",
        "pool": pool,
        "accelerator": accelerator,
        "pods": pods,
        "acceleratorsPerPod": each,
        "nodes": ["n"],
        "admittedAt": at(hours=-1),
    }


def job(name: str, namespace: str = "ada-lab", **status: Any) -> TrainingJob:
    meta = {"name": name, "namespace": namespace, "creationTimestamp": at(hours=-2)}
    return TrainingJob.model_validate({**JOB, "metadata": meta, "status": status})


def running(name: str, namespace: str = "ada-lab", **more: Any) -> TrainingJob:
    return job(name, namespace, phase="Running", admission=admission("h100", "H100", 2, 4), **more)


def service(name: str, each: int = 1, **status: Any) -> ModelService:
    meta = {"name": name, "namespace": "ada-lab", "creationTimestamp": at(hours=-2)}
    spec = {**SERVICE["spec"], "shape": {"acceleratorsPerPod": each}}
    return ModelService.model_validate({**SERVICE, "metadata": meta, "spec": spec, "status": status})


def pool(name: str, accelerator: str, price: float, allocated: float = 0.0) -> AcceleratorPool:
    return AcceleratorPool.model_validate(
        {
            "metadata": {"name": name},
            "kind": "AcceleratorPool",
            "spec": {
                "accelerator": accelerator,
                "resourceName": "nvidia.com/gpu",
                "nodeSelector": {"pool": name},
                "pricePerHour": price,
            },
            "status": {"nodes": 2, "capacity": 16, "allocated": allocated, "free": 16 - allocated},
        }
    )


def tenant(name: str, namespace: str, guaranteed: float = 0.0) -> Tenant:
    quota = [{"accelerator": "H100", "guaranteed": guaranteed}] if guaranteed else None
    return Tenant.model_validate(
        {"metadata": {"name": name}, "kind": "Tenant", "spec": {"namespaces": [namespace], "quota": quota}}
    )


H100, L4 = pool("h100", "H100", 2.5, allocated=12), pool("l4", "L4", 0.5, allocated=3)
ADA, BOB = tenant("ada", "ada-lab", guaranteed=8), tenant("bob-corp", "bob-lab")


def seen(
    jobs: Sequence[TrainingJob] = (),
    services: Sequence[ModelService] = (),
    tenants: Sequence[Tenant] = (ADA, BOB),
    open_to_them: Sequence[AcceleratorPool] = (H100, L4),
    now: datetime = NOW,
) -> Overview:
    return overview(jobs, services, [H100, L4], open_to_them, tenants, now)


def test_a_running_job_costs_its_accelerators_at_the_pools_price() -> None:
    progress = {"step": 30, "totalSteps": 120, "etaP50": at(minutes=90)}
    (one,) = seen([running("big", progress=progress)]).running
    assert (one.tenant, one.cost_per_hour, one.percent) == ("ada", 8 * 2.5, 25.0)
    assert one.ends_at == NOW + timedelta(minutes=90)


def test_a_service_costs_what_its_replicas_hold_in_each_pool() -> None:
    pools = [{"pool": "h100", "replicas": 1}, {"pool": "l4", "replicas": 2}, {"pool": "gone", "replicas": 1}]
    found = seen([], [service("chat", 2, phase="Ready", desiredReplicas=4, readyReplicas=4, pools=pools)])
    (one,) = found.running
    assert [(p.pool, p.accelerator, p.accelerators) for p in one.places] == [
        ("h100", "H100", 2.0),
        ("l4", "L4", 4.0),
        ("gone", "", 2.0),
    ]
    assert found.cost_per_hour == 2 * 2.5 + 4 * 0.5
    assert found.waiting == ()


def test_what_waits_says_why_since_when_and_until_when_the_longest_first() -> None:
    forecast = {"madeAt": at(), "startP50": at(minutes=20), "startP90": at(minutes=70)}
    late = job("late", phase="Queued", reason="Waiting", message="Needs 8 H100.", forecast=forecast)
    scaled: dict[str, Any] = {
        "desiredReplicas": 2,
        "pools": [{"pool": "l4", "replicas": 1}],
        "lastScaleTime": at(hours=-5),
    }
    found = seen([late, running("big")], [service("chat", phase="Ready", **scaled)])
    assert [(w.kind, w.name) for w in found.waiting] == [("ModelService", "chat"), ("TrainingJob", "late")]
    assert (found.waiting[1].message, found.waiting[1].since) == ("Needs 8 H100.", NOW - timedelta(hours=2))
    assert found.waiting[1].start_p50 == NOW + timedelta(minutes=20)


@pytest.mark.parametrize("phase", ["Suspended", "Succeeded", "Failed"])
def test_what_neither_runs_nor_waits_is_in_neither_list(phase: str) -> None:
    found = seen([job("rest", phase=phase, admission=admission("h100", "H100", 1, 8))])
    assert (found.running, found.waiting, found.cost_per_hour) == ((), (), 0.0)


def test_jobs_that_ended_count_for_a_day() -> None:
    def ended(name: str, phase: str, hours: float) -> TrainingJob:
        return job(name, phase=phase, reason="OutOfMemory", completionTime=at(hours=hours))

    found = seen(
        [
            ended("old", "Failed", -25),
            ended("first", "Failed", -20),
            ended("last", "Failed", -1),
            ended("good", "Succeeded", -3),
        ]
    )
    assert [f.name for f in found.failed] == ["last", "first"]
    assert found.succeeded == 1


def test_each_tenant_is_shown_with_what_it_holds_and_what_it_is_guaranteed() -> None:
    found = seen([running("a"), running("b", "bob-lab"), job("c", phase="Queued")], open_to_them=[])
    ada, bob = found.holders
    assert (ada.tenant, ada.held, ada.running, ada.waiting) == ("ada", (Held("H100", 8.0, 8.0),), 1, 1)
    assert (bob.tenant, bob.held, bob.cost_per_hour) == ("bob-corp", (Held("H100", 8.0, None),), 20.0)


def test_what_others_hold_is_an_amount_without_a_name_a_number_or_a_price() -> None:
    found = seen([running("a")], tenants=[ADA], open_to_them=[H100])
    ada, others = found.holders
    assert ada.tenant == "ada"
    assert (others.tenant, others.held) == ("", (Held("H100", 4.0, None),))
    assert (others.running, others.waiting, others.cost_per_hour) == (None, None, None)
    assert (found.capacity, found.allocated) == (16.0, 12.0)


def test_the_page_says_it_in_words() -> None:
    late = job("late", phase="Queued", message="Needs 8 H100, 4 are free.")
    failed = job("oops", phase="Failed", message="Out of memory.", completionTime=at(minutes=-30))
    progress = {"step": 30, "totalSteps": 120, "etaP50": at(minutes=90)}
    found = seen([running("big", progress=progress), late, failed], tenants=[ADA], open_to_them=[H100])
    page = templates().get_template("overview_parts.html").render(page_of(found, everybody=False))
    for words in (
        "Needs 8 H100, 4 are free.",
        "the longest for 2 h 00 min",
        "Out of memory.",
        "1 h 30 min",
        "8 × H100",
        "20.00",
        "12 of 16",
        "Everybody else",
    ):
        assert words in page, words


async def test_a_member_reads_their_own_tenants_and_an_admin_all(world: World) -> None:
    for namespace, name in (("ada-lab", "ada-run"), ("bob-lab", "bob-run")):
        world.kube.status(
            TRAINING_JOBS, namespace, name, phase="Running", admission=admission("h100", "H100", 1, 2)
        )
    world.kube.status(ACCELERATOR_POOLS, "", "h100", capacity=16, allocated=4)
    await world.settle()
    alice, root = await world.as_("alice"), await world.as_("root", CallerRole.ADMIN)
    hers, all_of_it = [(await http.get(f"{BASE}/overview")).json() for http in (alice, root)]
    assert [row["name"] for row in hers["running"]] == ["ada-run"]
    assert [(row["tenant"], row["held"]) for row in hers["holders"]] == [
        (
            "ada",
            [
                {"accelerator": "H100", "held": 2.0, "guaranteed": None},
                {"accelerator": "cpu", "held": 0.0, "guaranteed": 1.0},
            ],
        ),
        ("", [{"accelerator": "H100", "held": 2.0, "guaranteed": None}]),
    ]
    assert hers["costPerHour"] == 5.0
    assert {row["tenant"] for row in all_of_it["holders"]} == {"ada", "bob-corp"}
    assert all_of_it["costPerHour"] == 10.0
    for path in ("/", f"{BASE}/overview"):
        answer = await alice.get(path)
        assert answer.status_code == 200
        assert "bob" not in answer.text
    assert "bob-run" in (await root.get("/")).text


async def test_who_is_in_no_tenant_reads_an_empty_page(world: World) -> None:
    stranger = await world.as_("zoe")
    found = (await stranger.get(f"{BASE}/overview")).json()
    assert (found["running"], found["waiting"], found["holders"], found["capacity"]) == ([], [], [], 0.0)
    assert "You are a member of no tenant" in (await stranger.get("/")).text
