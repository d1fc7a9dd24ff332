"""A service that lacks nodes says so once, with the types that would help, and no longer than it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import pool, replica
from tests.operator.serving.test_reconcile import view, wanting

from busbar.kube.types.meta import Condition
from busbar.operator.decisions import Wait
from busbar.operator.serving.fleet_plan import Plan
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.view import ServiceUpdate, ServiceView
from busbar.scheduler import WaitCode

POOLS = {
    name: pool(name, accelerator=name.upper(), resourceName="nvidia.com/gpu", **more)
    for name, more in (("l4", {}), ("t4", {}), ("h100", {"tenants": ["other"]}))
}
NO_ROOM = Wait(WaitCode.CAPACITY, "1 L4 is asked for, and 0 are free.")


def told(update: ServiceUpdate) -> Condition | None:
    conditions = (update.status.conditions if update.status is not None else None) or ()
    return next((c for c in conditions if c.type == "NodeShortage"), None)


def next_view(of: ServiceView, update: ServiceUpdate, **fields: Any) -> ServiceView:
    assert update.status is not None
    return replace(of, service=of.service.model_copy(update={"status": update.status}), **fields)


def test_a_replica_without_room_is_told_by_an_event_until_it_has_a_pod() -> None:
    first = view(wanting(2), replica(0), pools=POOLS, tenant="ours")
    update = reconcile(first, (NO_ROOM,))
    sentence = f"Replicas find no room: {NO_ROOM.message} Missing: nodes with L4 or T4."
    condition = told(update)
    assert condition is not None
    assert (condition.status, condition.reason, condition.message) == ("True", "NodeShortage", sentence)
    assert ("NodeShortage", sentence) in update.notices
    second = next_view(first, update)
    again = reconcile(second, (NO_ROOM,))
    assert not again.notices, "it is told once"
    assert reconcile(second).status is None, "between two rounds it stays"
    placed = told(reconcile(replace(second, pods=(replica(0), replica(1, ready=False)))))
    assert placed is not None
    assert (placed.status, placed.reason) == ("False", "NodesSuffice")


@pytest.mark.parametrize("code", [WaitCode.CEILING, WaitCode.POWER, WaitCode.PREEMPTING, WaitCode.FAIR_SHARE])
def test_quota_power_and_work_that_leaves_are_no_shortage_of_nodes(code: WaitCode) -> None:
    of = view(wanting(2), replica(0), pools=POOLS)
    update = reconcile(of, (Wait(code, "It waits."),))
    assert told(update) is None
    assert update.notices == ()
    short = next_view(of, reconcile(of, (NO_ROOM,)))
    ended = told(reconcile(short, (Wait(code, "It waits."),)))
    assert ended is not None
    assert ended.status == "False"


def test_a_mix_without_room_names_the_full_pools() -> None:
    of = view(
        wanting(1, accelerators=["L4"]), replica(0), pools=POOLS, plan=Plan({"l4": 1}, full=frozenset({"l4"}))
    )
    condition = told(reconcile(of))
    assert condition is not None
    assert condition.message.endswith("are full: l4. Missing: nodes with L4.")


def test_a_type_without_a_pool_is_named_beside_those_that_exist() -> None:
    of = view(wanting(1, accelerators=["L4", "A100"]), replica(0), pools=POOLS)
    update = reconcile(of)
    condition = told(update)
    assert condition is not None
    assert (condition.reason, condition.message) == (
        "AcceleratorWithoutPool",
        "spec.accelerators names A100, and no AcceleratorPool has it; there are H100, L4, T4.",
    )
    assert [reason for reason, _ in update.notices] == ["AcceleratorWithoutPool"]
    assert told(reconcile(view(wanting(1, accelerators=["L4"]), replica(0), pools=POOLS))) is None
    assert told(reconcile(view(wanting(1, accelerators=["L4"]), replica(0)))) is None, "no pool is known yet"
    gone = told(reconcile(next_view(of, update, pools={**POOLS, "a100": pool("a100", accelerator="A100")})))
    assert gone is not None
    assert gone.status == "False"


def test_a_shortage_goes_before_a_type_without_a_pool_and_names_it() -> None:
    of = view(wanting(2, accelerators=["L4", "A100"]), replica(0), pools=POOLS)
    condition = told(reconcile(of, (NO_ROOM,)))
    assert condition is not None
    assert condition.reason == "NodeShortage"
    assert condition.message.endswith(
        "Missing: nodes with L4 or A100. spec.accelerators names A100, and no AcceleratorPool has it; there are H100, L4, T4."
    )


def test_a_service_that_is_off_lacks_nothing() -> None:
    of = view(wanting(2, suspend=True), pools=POOLS)
    assert told(reconcile(of, (NO_ROOM,))) is None
