"""Who is told that a tenant's budget begins to hold what waits, or no longer does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from tests.operator.builders import gated, job, service, tenant

from busbar.kube.client import KubeClient
from busbar.kube.informer import Key
from busbar.kube.login import Login
from busbar.operator.accounting.budgets import FREE
from busbar.operator.queue.controller import Controller
from busbar.operator.tenancy.budget_holds import BudgetHolds
from busbar.operator.watch.caches import Caches


class Queue:
    """Stands for the controller."""

    def __init__(self) -> None:
        self.added: list[tuple[str, str]] = []

    def add(self, kind: str, key: Key) -> None:
        self.added.append((kind, key.name))


def with_cost(limit: float) -> Any:
    return tenant(
        "team", ["team"], budgets=[{"period": "month", "cost": limit, "enforcement": "StopAdmitting"}]
    )


def test_what_waits_is_queued_once_when_the_budget_is_spent_and_once_when_it_is_raised() -> None:
    caches = Caches(KubeClient(Login(server="http://127.0.0.1:1")), lambda *_: None, inactivity_s=60.0)
    caches.jobs.items[Key("team", "job")] = job()
    caches.jobs.items[Key("other", "job")] = job()
    caches.services.items[Key("team", "web")] = service()
    own = replace(gated(0, kind="", owner="own"), queued=True)
    caches.pods.items[own.key] = own
    queue, rounds = Queue(), list[int]()
    holds = BudgetHolds(caches, cast(Controller, queue), lambda: rounds.append(1))
    key = Key("", "team")

    caches.tenants.items[key] = with_cost(1)
    holds.look("team")
    assert (queue.added, rounds, holds.of_namespace("team")) == ([], [], FREE)
    caches.tenants.items[key] = with_cost(0)
    assert "budget of 0 in cost" in holds.of_namespace("team").why
    assert holds.of_namespace("other") == FREE
    for _ in range(2):
        holds.look("team")
    waits = [("TrainingJob", "job"), ("ModelService", "web"), ("Pod", own.key.name)]
    assert (queue.added, len(rounds)) == (waits, 1)
    caches.tenants.items[key] = with_cost(2)
    for _ in range(2):
        holds.look("team")
    assert (queue.added, len(rounds)) == (waits * 2, 2)
