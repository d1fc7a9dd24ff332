"""Lost work that a service is charged for: from the release of a job to the status of both tenants, each time once."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
from tests.operator.builders import (
    NOW,
    admit,
    ended,
    job,
    pool,
    running,
    running_job,
    service,
    tenant,
    view,
    with_status,
)
from tests.operator.serving.test_reconcile import view as service_view
from tests.operator.training.test_reconcile import reading

from busbar.kube.client import KubeClient
from busbar.kube.informer import Key
from busbar.kube.login import Login
from busbar.kube.types import Tenant, TrainingJob
from busbar.kube.types.budget import BudgetUse, Period, period_start
from busbar.kube.types.lost_work import (
    MOST_COUNTED,
    ChargedLoss,
    CountedLoss,
    GivesWayTo,
    Loss,
    LostWork,
    LostWorkCaused,
)
from busbar.kube.types.tenant import TenantStatus
from busbar.kube.types.training_status import CheckedImage, Progress
from busbar.operator.accounting.lost_work import caused, of_tenant, settled
from busbar.operator.decisions import Release
from busbar.operator.serving.reconcile import reconcile as reconcile_service
from busbar.operator.tenancy.reconcile import TenantView
from busbar.operator.tenancy.reconcile import reconcile as reconcile_tenant
from busbar.operator.training.reconcile import reconcile
from busbar.operator.watch.caches import Caches

WEB = GivesWayTo(uid="uid-web", namespace="shop", name="web", tenant="shop")
GPU = pool("gpu", accelerator="H100", resourceName="nvidia.com/gpu", pricePerHour=3.6)


def given(*, verified: bool = True, ran_s: float = 3600.0, saves_s: float = 4.0) -> TrainingJob:
    """A job whose first attempt has given way to the service, and is gone."""
    of = running_job(progress=Progress(step=40, total_steps=100, tokens=400, tokens_per_second=10.0))
    assert of.status is not None
    assert of.status.admission is not None
    admission = of.status.admission.model_copy(
        update={
            "image": CheckedImage(verified=verified, digest="sha256:" + "a" * 64),
            "admitted_at": NOW - timedelta(seconds=ran_s),
            "pods": 1,
            "accelerators_per_pod": 2,
        }
    )
    of = of.model_copy(
        update={"status": of.status.model_copy(update={"admission": admission, "start_time": NOW})}
    )
    asked = reconcile(view(of, running(port=9400)), Release("Resized", "shrinks", "7", taken=True, to=WEB))
    of = with_status(of, asked)
    assert of.status is not None
    assert of.status.release is not None
    assert of.status.release.gives_way_to == WEB
    gone = reconcile(view(of, now=NOW + timedelta(seconds=saves_s), pool=GPU))
    return with_status(of, gone)


def resumed(of: TrainingJob, *, lost_steps: int = 15, attempt: int = 2) -> TrainingJob:
    """Its next attempt says from which step it goes on."""
    again = with_status(of, reconcile(view(of, now=NOW + timedelta(seconds=90)), admit()))
    lead = running(attempt=attempt)
    said = {lead.uid: reading(step=40, totalSteps=100, resumedFromStep=40 - lost_steps, lostSteps=lost_steps)}
    for after in (100, 200):  # the same answer twice
        update = reconcile(view(again, lead, readings=said, now=NOW + timedelta(seconds=after)))
        again = with_status(again, update) if update.status is not None else again
    return again


def charged(of: TrainingJob) -> list[ChargedLoss]:
    assert of.status is not None
    assert of.status.lost_work is not None
    return of.status.lost_work.charged or []


def test_repeated_steps_and_the_time_to_save_are_charged_to_the_service_once() -> None:
    of = given()
    assert of.status is not None
    assert of.status.lost_work is not None
    assert of.status.lost_work.unsettled is not None, "nobody knows yet what is repeated"
    assert charged(of) == []
    of = resumed(of)
    assert of.status is not None
    assert of.status.lost_work is not None
    assert (of.status.lost_work.steps, of.status.lost_work.seconds) == (15, 15.0)
    [entry] = charged(of)
    # 15 steps of a second and 4 s to save, on two accelerators at 3.6 an hour.
    assert (entry.uid, entry.tenant, entry.times) == ("uid-web", "shop", 1)
    assert entry.accelerator_seconds == pytest.approx(38.0)
    assert entry.cost == pytest.approx(0.038)
    assert of.status.lost_work.unsettled is None


def test_what_a_job_says_of_its_steps_charges_nobody_unless_the_platforms_image_says_it() -> None:
    [entry] = charged(resumed(given(verified=False)))
    assert entry.accelerator_seconds == pytest.approx(8.0), "the time to save is seen by the operator"


def test_no_more_is_charged_than_the_attempt_ran() -> None:
    [entry] = charged(resumed(given(ran_s=5.0), lost_steps=40))
    assert entry.accelerator_seconds == pytest.approx(2 * (5.0 + 4.0))


def test_a_job_that_stops_for_another_reason_charges_nobody() -> None:
    of = running_job(progress=Progress(step=40, total_steps=100, tokens=400, tokens_per_second=10.0))
    asked = with_status(
        of, reconcile(view(of, running(port=9400)), Release("Preempted", "x", "7", taken=True))
    )
    gone = with_status(asked, reconcile(view(asked, now=NOW + timedelta(seconds=4))))
    assert gone.status is not None
    assert gone.status.lost_work is None


def test_an_attempt_that_gives_way_before_it_resumed_settles_the_one_before_it() -> None:
    twice = settled(given().status.lost_work, 0, 0.0)  # type: ignore[union-attr]
    assert twice is not None
    [entry] = twice.charged or []
    assert (entry.times, entry.accelerator_seconds) == (1, 8.0)
    assert settled(twice, 9, 9.0) is twice
    assert settled(None, 9, 9.0) is None


def test_the_caches_know_what_jobs_lost_to_a_service_and_forget_jobs_that_are_gone() -> None:
    caches = Caches(KubeClient(Login(server="http://127.0.0.1:1")), lambda *_: None, inactivity_s=60.0)
    caches.tenants.observe(tenant("lab", ["team"]).to_wire())
    entry = {"uid": "uid-web", "namespace": "shop", "name": "web", "tenant": "shop", "times": 1}
    lost = {"lostWork": {"charged": [entry | {"acceleratorSeconds": 5.0}]}}
    made = job("a", status=lost).to_wire()
    caches.jobs.observe(made)
    assert caches.charged_to("uid-web") == {
        "uid-a": ("lab", ChargedLoss.model_validate(lost["lostWork"]["charged"][0]))
    }
    assert caches.charged_to("another") == {}
    more = job("a", status={"lostWork": {"charged": [entry | {"acceleratorSeconds": 9.0}]}}).to_wire()
    more["metadata"]["resourceVersion"] = "8"
    caches.jobs.observe(more)
    assert caches.charged_to("uid-web")["uid-a"][1].accelerator_seconds == 9.0
    caches.jobs.forget(Key("team", "a"))
    assert caches.charged_to("uid-web") == {}


def test_a_service_adds_up_what_is_new_of_each_job_in_its_status() -> None:
    made = service_view(service(), lost={"uid-a": ("lab", Loss(times=1, accelerator_seconds=8.0, cost=0.5))})
    status = reconcile_service(made).status
    assert status is not None
    found = status.lost_work_caused
    assert found is not None
    assert (found.times, found.accelerator_seconds, found.cost) == (1, 8.0, 0.5)
    assert [(t.tenant, t.accelerator_seconds) for t in found.tenants or ()] == [("lab", 8.0)]


@pytest.mark.parametrize("seed", range(40))
def test_operators_that_are_killed_anywhere_count_each_loss_once_on_both_sides(seed: int) -> None:
    """Each step may be a write that is lost, a reconcile on an old list of objects, or the deletion of a counted object."""
    rng = random.Random(seed)
    owners = {"s1": "shop", "s2": "shop", "s3": "lab"}
    jobs: dict[str, tuple[str, dict[str, Loss]]] = {
        f"j{i}": (rng.choice(["lab", "team"]), {}) for i in range(5)
    }
    services: dict[str, LostWorkCaused | None] = dict.fromkeys(owners)
    tenants: dict[str, TenantStatus] = {name: TenantStatus() for name in ("shop", "lab", "team")}
    moved = dict.fromkeys(tenants, 0.0)
    truth: dict[tuple[str, str], float] = {}

    def count(name: str, written: float, seen: float) -> None:
        known = {
            j: (owner, by[name]) for j, (owner, by) in jobs.items() if name in by and rng.random() < seen
        }
        new = caused(services[name], known)
        if rng.random() < written:
            services[name] = new

    def add_up(name: str, written: float, seen: float) -> None:
        told = [(uid, owners[uid], loss) for uid, loss in services.items() if rng.random() < seen]
        new, more, less = of_tenant(tenants[name].lost_work, name, told)
        if rng.random() < written:
            tenants[name] = tenants[name].model_copy(update={"lost_work": new})
            moved[name] += more.accelerator_seconds - less.accelerator_seconds

    for _ in range(200):
        kind = rng.randrange(3)
        if kind == 0:
            owner, by = jobs[rng.choice(sorted(jobs))]
            name, lost = rng.choice(sorted(owners)), float(rng.randint(1, 50))
            old = by.get(name, Loss())
            by[name] = Loss(
                times=old.times + 1,
                accelerator_seconds=old.accelerator_seconds + lost,
                cost=old.cost + lost / 4,
            )
            truth[name, owner] = truth.get((name, owner), 0.0) + lost
        elif kind == 1:
            count(rng.choice(sorted(services)), 0.7, 0.8)
        else:
            add_up(rng.choice(sorted(tenants)), 0.7, 0.8)
    for name in services:
        count(name, 1.0, 1.0)
    for name in tenants:
        add_up(name, 1.0, 1.0)
    for name, found in services.items():
        expected = sum(lost for (to, _), lost in truth.items() if to == name)
        assert (found.accelerator_seconds if found is not None else 0.0) == pytest.approx(expected)
    for name, status in tenants.items():
        lost_work = status.lost_work
        causes = sum(lost for (to, _), lost in truth.items() if owners[to] == name)
        suffers = sum(lost for (_, owner), lost in truth.items() if owner == name)
        assert (lost_work.caused.accelerator_seconds if lost_work else 0.0) == pytest.approx(causes)
        assert (lost_work.suffered.accelerator_seconds if lost_work else 0.0) == pytest.approx(suffers)
        assert moved[name] == pytest.approx(causes - suffers)
    assert sum(moved.values()) == pytest.approx(0.0), "what one is charged, another is not"


def test_lines_of_objects_that_are_gone_make_room_and_others_wait_for_it() -> None:
    counted = [CountedLoss(uid=f"j{i:04}", times=1, accelerator_seconds=1.0) for i in range(MOST_COUNTED)]
    old = LostWorkCaused(times=MOST_COUNTED, accelerator_seconds=float(MOST_COUNTED), counted=counted)
    alive = {entry.uid: ("lab", Loss(times=1, accelerator_seconds=1.0)) for entry in counted}
    more = alive | {"new": ("lab", Loss(times=1, accelerator_seconds=7.0))}
    assert caused(old, more) is old
    del more["j0003"]
    found = caused(old, more)
    assert found is not None
    assert found.accelerator_seconds == MOST_COUNTED + 7.0
    assert {"new"} == {e.uid for e in found.counted or ()} - alive.keys()
    assert "j0003" not in {e.uid for e in found.counted or ()}


def _tenant_view(of: Tenant, *lost: tuple[str, str, LostWorkCaused | None]) -> TenantView:
    return TenantView(of, {}, {}, (), NOW + timedelta(seconds=60), lost=lost)


@pytest.mark.parametrize(("name", "hours"), [("shop", 1.5), ("lab", 0.5)])
def test_the_budget_of_the_services_tenant_is_charged_and_that_of_the_jobs_is_not(
    name: str, hours: float
) -> None:
    made = tenant(name, ["ns"], budgets=[{"period": "day", "acceleratorHours": 10.0, "cost": 9.0}])
    use = BudgetUse(period=Period.DAY, started=period_start(Period.DAY, NOW), accelerator_hours=1.0, cost=4.0)
    made = made.model_copy(update={"status": TenantStatus(budgets=[use], last_updated=NOW)})
    loss = {"times": 2, "acceleratorSeconds": 1800.0, "cost": 1.25}
    web = LostWorkCaused.model_validate(loss | {"tenants": [loss | {"tenant": "lab"}]})
    for _ in range(2):  # the second reconcile adds nothing
        written = reconcile_tenant(_tenant_view(made, ("uid-web", "shop", web))).status
        made = made.model_copy(update={"status": written or made.status})
    written = made.status
    assert written is not None
    [after] = written.budgets or []
    assert after.accelerator_hours == pytest.approx(hours)
    assert after.cost == pytest.approx(4.0 + (1.25 if name == "shop" else -1.25))
    assert written.lost_work is not None
    side = written.lost_work.caused if name == "shop" else written.lost_work.suffered
    assert (side.times, side.accelerator_seconds) == (2, 1800.0)


def test_a_job_that_is_done_before_it_saved_owes_nothing() -> None:
    of = running_job()
    asked = with_status(
        of, reconcile(view(of, running(port=9400)), Release("Resized", "x", "7", taken=True, to=WEB))
    )
    done = reconcile(view(asked, ended()))
    assert done.status is not None
    assert done.status.phase == "Succeeded"
    assert done.status.lost_work in (None, LostWork())
