"""Replicas by pool that somebody outside decides (`spec.scaling.external`)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from tests.operator.builders import NOW, pool, replica, service
from tests.operator.serving.test_reconcile import view

from busbar.kube.informer import Key
from busbar.kube.types import API_VERSION, ModelService
from busbar.operator.serving.claims import claims
from busbar.operator.serving.fleet_plan import Ahead, Plan
from busbar.operator.serving.metrics import ScalingMetrics
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.replicas import kept_pods, wanted_indexes
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Patch

POOLS = {
    name: pool(name, accelerator=name.upper(), resourceName="nvidia.com/gpu", pricePerHour=1.0)
    for name in ("l4", "h100")
}


def wanting(told: ModelService | None = None, **by_pool: int) -> ModelService:
    """A service with this target, and the status that a reconcile has given it."""
    of = service(scaling={"external": by_pool}, maxReplicas=2, minReplicas=0)
    of = of.model_copy(update={"status": told.status}) if told is not None else of
    for _ in range(2):
        written = reconcile(view(of, pools=POOLS, tenant="team")).status
        of = of if written is None else of.model_copy(update={"status": written})
    return of


def on(name: str, index: int, **fields: Any) -> Pod:
    return replica(index, pool=name, **fields)


def asked(of: ModelService, *pods: Pod) -> list[tuple[str, ...]]:
    """The pools of the replicas that are missing."""
    return [claim.job.pools for claim in claims(of, pods, (), "team", NOW) if claim.job.run is None]


def test_each_missing_replica_claims_its_pool_whatever_max_replicas_says() -> None:
    of = wanting(l4=2, h100=1)
    assert of.status is not None
    assert of.status.desired_replicas == 3
    assert [(row.pool, row.desired) for row in of.status.pools or ()] == [("h100", 1), ("l4", 2)]
    assert sorted(asked(of)) == [("h100",), ("l4",), ("l4",)]
    assert sorted(asked(of, on("l4", 0))) == [("h100",), ("l4",)]
    assert asked(of, on("l4", 0), on("l4", 1), on("h100", 2)) == []


def test_a_replica_in_another_pool_stays_until_its_successor_serves() -> None:
    of = wanting(h100=2)
    old = on("l4", 0), on("l4", 1)
    assert asked(of, *old) == [("h100",), ("h100",)]
    assert wanted_indexes(of, old) == [0, 1, 2, 3]
    starting = replace(on("h100", 2), ready=False, phase="Pending")
    assert {p.rank for p in kept_pods(of, (*old, starting))} == {0, 1, 2}
    half = (*old, on("h100", 2))
    assert {p.rank for p in kept_pods(of, half)} == {0, 2}
    update = reconcile(view(of, *half, pools=POOLS, tenant="team"))
    assert [a.key.name for a in update.actions if isinstance(a, Patch)] == ["web-1"], "it drains"
    done = on("h100", 2), on("h100", 3)
    assert {p.rank for p in kept_pods(of, (*old, *done))} == {2, 3}
    assert asked(of, *done) == []


def test_without_it_the_replicas_that_run_stay_where_they_are() -> None:
    before = wanting(h100=1)
    free = service(status=before.status.to_wire() if before.status is not None else None)
    assert {p.rank for p in kept_pods(free, (on("l4", 0),))} == {0}
    assert wanted_indexes(free, (on("l4", 0),)) == [0]


@pytest.mark.parametrize(
    ("by_pool", "fields", "words"),
    [
        ({"l4": 1}, {}, ""),
        ({"l4": 1, "t4": 0}, {}, ""),
        ({"l4": 1, "t4": 1}, {}, "There is no AcceleratorPool t4."),
        ({"l4": 1}, {"tenant": "guest"}, "This tenant may not use AcceleratorPool l4."),
        (
            {"h100": 1},
            {"accelerators": ["L4"]},
            "AcceleratorPool h100 has H100, which spec.accelerators leaves out.",
        ),
    ],
)
def test_a_pool_that_the_service_cannot_use_is_said_once(
    by_pool: dict[str, int], fields: dict[str, Any], words: str
) -> None:
    of = service(scaling={"external": by_pool}, accelerators=fields.get("accelerators"))
    closed = POOLS["l4"].model_copy(
        update={"spec": POOLS["l4"].spec.model_copy(update={"tenants": ["team"]})}
    )
    at = view(of, pools=POOLS | {"l4": closed}, tenant=fields.get("tenant", "team"))
    update = reconcile(at)
    assert update.status is not None
    found = (update.status.conditions or [])[2]
    assert (found.type, found.status) == ("ExternallyScaled", "True")
    assert found.reason == ("ExternalTargetUnusable" if words else "ExternalTarget")
    assert words in found.message
    assert [told for told, _ in update.notices] == (["ExternalTargetUnusable"] if words else [])
    again = replace(at, service=of.model_copy(update={"status": update.status}))
    assert reconcile(again).notices == ()


def test_zero_everywhere_is_zero_and_a_request_wakes_one_anywhere() -> None:
    of = wanting(l4=0)
    assert of.status is not None
    assert of.status.desired_replicas == 0
    assert "except that a request wakes the service" in (of.status.conditions or [])[2].message


def test_the_example_for_keda_asks_for_metrics_that_exist_of_an_object_that_can_be_scaled() -> None:
    scaled = yaml.safe_load((Path(__file__).parents[3] / "examples/keda-scaledobject.yaml").read_text())[
        "spec"
    ]
    target = scaled["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (API_VERSION, "ModelService")
    registry, key = CollectorRegistry(), Key("team-a", target["name"])
    ahead, kept = Ahead(6.0, 6.5, 7.25, 90.0, "trend", 0.93), (0.98, 600)
    ScalingMetrics(registry).show(key, Plan({"l4": 1}, ahead=ahead, attainment=kept), None)
    for trigger in scaled["triggers"]:
        [(name, labels)] = re.findall(r"(busbar_\w+)\{(.*?)\}", trigger["metadata"]["query"])
        wanted = dict(re.findall(r'(\w+)="(.*?)"', labels))
        assert registry.get_sample_value(name, wanted) is not None, trigger
