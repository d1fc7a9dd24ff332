"""Previews: a real plan on the operator's snapshot with the draft in it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.api.conftest import BASE, JOB, SERVICE, World

from busbar.api.access.identity import CallerRole
from busbar.kube.contracts.preview import PreviewAnswer, span
from busbar.kube.contracts.service_plan import PlannedPool, ServicePlanAnswer
from busbar.kube.resources import TRAINING_JOBS
from busbar.scheduler import Finished

AT = f"{BASE}/namespaces/ada-lab/preview"
SERVICES = f"{BASE}/namespaces/ada-lab/modelservices"
PLAN = f"{SERVICES}/ada-chat/plan"


def job(**spec: Any) -> dict[str, Any]:
    return {
        "kind": "TrainingJob",
        "metadata": {"name": "draft"},
        "spec": {"template": {"image": "x"}, **spec},
    }


async def test_a_job_that_fits_starts_now_at_the_pools_price(world: World) -> None:
    alice = await world.as_("alice")
    found = (await alice.post(AT, json=JOB)).json()
    assert (found["startsNow"], found["possible"], found["pool"], found["when"]) == (True, True, "cpu", "Now")
    assert found["costPerHour"] == pytest.approx(2.5 * 0.5)
    assert found["reason"].endswith(".")
    assert found["nodes"] == []


async def test_nothing_is_made_by_a_preview(world: World) -> None:
    alice = await world.as_("alice")
    before = dict(world.kube.objects)
    await alice.post(AT, json=JOB)
    assert world.kube.objects == before


async def test_the_operator_gets_the_draft_as_the_server_would_store_it(world: World) -> None:
    alice = await world.as_("alice")
    await alice.post(AT, json=JOB)
    (draft,) = world.operator.drafts
    assert draft["metadata"]["namespace"] == "ada-lab"
    assert draft["metadata"]["annotations"]["busbar.dev/requester"] == "alice"
    assert draft["metadata"]["uid"] == "dry-run"


async def test_a_job_that_never_fits_says_so_and_why(world: World) -> None:
    alice = await world.as_("alice")
    found = (await alice.post(AT, json=job(accelerators=["H100"], shape={"acceleratorsPerPod": 64}))).json()
    assert (found["startsNow"], found["possible"]) == (False, False)
    assert found["code"] == "NoNodeLargeEnough"
    assert "64" in found["reason"]
    assert "8" in found["reason"]


async def test_a_pool_that_is_not_the_tenants_does_not_exist_for_it(world: World) -> None:
    alice = await world.as_("alice")
    found = (await alice.post(AT, json=job(accelerators=["L4"]))).json()
    assert (found["possible"], found["code"]) == (False, "NoPoolForTenant")
    assert "bob" not in str(found).lower()


def fill_the_pool(world: World) -> None:
    for index in range(2):
        body = job(accelerators=["H100"], shape={"acceleratorsPerPod": 8}, preemptible=False)
        body["metadata"] = {"name": f"bobs-{index}", "namespace": "bob-lab"}
        world.kube.put(TRAINING_JOBS, body)
        admission = {"pool": "h100", "accelerator": "H100", "nodes": [f"h100-node-{index}"]}
        world.kube.status(TRAINING_JOBS, "bob-lab", f"bobs-{index}", phase="Running", admission=admission)


async def test_a_full_pool_makes_it_wait_and_names_no_other_tenant(world: World) -> None:
    fill_the_pool(world)
    draft = job(accelerators=["H100"], shape={"acceleratorsPerPod": 8})
    alice, root = await world.as_("alice"), await world.as_("root", CallerRole.ADMIN)
    seen = (await alice.post(AT, json=draft)).json()
    assert (seen["startsNow"], seen["possible"]) == (False, True)
    assert "bob" not in str(seen).lower()
    assert (await root.post(AT, json=draft)).json()["code"] == seen["code"]


async def test_a_draft_that_waits_says_when_it_would_start_and_how_such_forecasts_turned_out(
    world: World,
) -> None:
    fill_the_pool(world)
    world.operator.ended = tuple(Finished("bob", 8000, time.time() + 1000.0 * i) for i in range(50))
    draft = job(accelerators=["H100"], shape={"acceleratorsPerPod": 8})
    alice = await world.as_("alice")
    seen = (await alice.post(AT, json=draft)).json()
    assert 0 < seen["startP50Seconds"] <= seen["startP90Seconds"]
    assert seen["when"].startswith("Likely in ")
    assert span(seen["startP90Seconds"]) in seen["when"]
    assert (seen["pastForecasts"], seen["pastBeforeP50"], seen["pastBeforeP90"]) == (20, 0.45, 0.9)
    assert "bob" not in str(seen).lower()


async def test_a_draft_that_waits_is_answered_without_a_forecast_where_none_is_known(world: World) -> None:
    fill_the_pool(world)
    alice = await world.as_("alice")
    seen = (await alice.post(AT, json=job(accelerators=["H100"], shape={"acceleratorsPerPod": 8}))).json()
    assert (seen["possible"], seen["startP50Seconds"], seen["when"]) == (
        True,
        None,
        "When what it waits for is free",
    )


async def test_the_operator_is_told_who_is_an_admin_and_nobody_can_say_it_of_himself(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    ask = world.operator.preview

    async def preview(draft: dict[str, Any], *, admin: bool) -> PreviewAnswer:
        told.append(admin)
        return await ask(draft, admin=admin)

    monkeypatch.setattr(world.operator, "preview", preview)
    alice, root = await world.as_("alice"), await world.as_("root", CallerRole.ADMIN)
    assert (await alice.post(AT, json={**JOB, "admin": True})).status_code == 422
    assert (await alice.post(AT, json=JOB)).json()["nodes"] == []
    await root.post(AT, json=JOB)
    assert told == [False, True]


async def test_admins_read_the_nodes(world: World) -> None:
    root = await world.as_("root", CallerRole.ADMIN)
    assert (await root.post(AT, json=JOB)).json()["nodes"] == ["cpu-node-0"]


async def test_a_service_that_may_sleep_and_a_suspended_job_say_what_wakes_them(world: World) -> None:
    alice = await world.as_("alice")
    sleeping = (await alice.post(AT, json=SERVICE)).json()
    assert "request" in sleeping["reason"]
    suspended = (await alice.post(AT, json=job(suspend=True))).json()
    assert (suspended["code"], suspended["when"]) == ("Suspended", "When it is resumed")


async def test_a_draft_needs_no_name_and_a_bad_one_is_refused_with_its_field(world: World) -> None:
    alice = await world.as_("alice")
    assert (await alice.post(AT, json={**JOB, "metadata": {}})).status_code == 200
    bad = await alice.post(AT, json=job(priority=5000))
    assert (bad.status_code, bad.json()["error"]["field"]) == (422, "spec.priority")


async def test_without_the_operator_there_is_no_guess(world: World) -> None:
    alice = await world.as_("alice")
    world.operator.away = True
    answer = await alice.post(AT, json=JOB)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "Unavailable")


async def test_a_name_that_is_taken_says_what_to_do(world: World) -> None:
    alice = await world.as_("alice")
    world.kube.put(TRAINING_JOBS, {**job(), "metadata": {"name": "draft", "namespace": "ada-lab"}})
    answer = await alice.post(AT, json=job())
    assert answer.status_code == 409
    assert "leave it out" in answer.json()["error"]["message"]
    again = await alice.post(AT, json={**job(), "metadata": {}})
    assert again.json()["possible"]


async def test_viewers_preview_nothing(world: World) -> None:
    vera = await world.as_("vera")
    assert (await vera.post(AT, json=JOB)).status_code == 403


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "not known"),
        (5, "5 s"),
        (89, "89 s"),
        (90, "1 min"),
        (7260, "2 h 01 min"),
        (90_000, "1 d 1 h"),
        (float("inf"), "not known"),
    ],
)
def test_durations_are_said_in_words(seconds: float | None, words: str) -> None:
    assert span(seconds) == words


async def test_a_plan_of_a_service_is_passed_on_with_its_load_and_targets(world: World) -> None:
    alice = await world.as_("alice")
    pool = PlannedPool(pool="h100", accelerator="H100", replicas=2, requests_per_second=9.5, alone=2)
    world.operator.plan = ServicePlanAnswer(possible=True, reason="Enough.", rate=1.0, pools=(pool,))
    asked = {"rate": "40", "ttftMilliseconds": "1500", "percentile": "95"}
    found = (await alice.get(PLAN, params=asked)).json()
    assert (found["possible"], found["rate"], found["costPerHour"]) == (True, 40.0, None)
    assert found["pools"][0]["requestsPerSecond"] == 9.5
    (sent,) = world.operator.planned
    assert (sent.namespace, sent.name, sent.rate) == ("ada-lab", "ada-chat", 40.0)
    assert (sent.ttft_milliseconds, sent.tpot_milliseconds, sent.percentile) == (1500.0, None, 95.0)


@pytest.mark.parametrize(
    "asked",
    [{}, {"rate": "0"}, {"rate": "-4"}, {"rate": "nan"}, {"rate": "inf"}, {"rate": "4", "percentile": "100"}],
    ids=["none", "zero", "negative", "nan", "infinite", "percentile"],
)
async def test_a_load_or_target_that_cannot_be_is_refused_before_anybody_plans(
    world: World, asked: dict[str, str]
) -> None:
    alice = await world.as_("alice")
    assert (await alice.get(PLAN, params=asked)).status_code == 422
    assert world.operator.planned == []


PLAN_PAGE = "/services/ada-lab/ada-chat/plan"


async def test_the_page_shows_the_cheapest_mix_for_a_load_as_a_part_and_as_a_whole(world: World) -> None:
    alice = await world.as_("alice")
    each = {"accelerator": "H100", "requests_per_second": 9.5, "cost_per_hour": 7.5}
    pools = (
        PlannedPool(pool="h100", replicas=2, alone=3, **each),
        PlannedPool(pool="h100-far", replicas=0, **each),
    )
    world.operator.plan = ServicePlanAnswer(
        possible=True, reason="2 replicas carry it.", rate=1.0, pools=pools, notes=("A note.",)
    )
    asked = {"rate": " 40 ", "ttft": "", "tpot": "50.5"}
    part = (await alice.get(PLAN_PAGE, params=asked, headers={"HX-Request": "true"})).text
    (sent,) = world.operator.planned
    assert (sent.namespace, sent.name, sent.rate) == ("ada-lab", "ada-chat", 40.0)
    assert (sent.ttft_milliseconds, sent.tpot_milliseconds) == (None, 50.5)
    assert part.lstrip().startswith('<p class="sentence">2 replicas carry it.</p>')
    for words in ("3 for 22.50", "does not carry it", "A note.", "40 requests/s"):
        assert words in part
    whole = (await alice.get(PLAN_PAGE, params=asked)).text
    assert "2 replicas carry it." in whole
    assert 'value="50.5"' in whole


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "how many?"),
        ({"rate": "0"}, "requests per second must be above 0 and at most 1,000,000"),
        ({"rate": "many"}, "is not a number"),
        ({"rate": "4", "ttft": "0.5"}, "first token must be from 1 to 3,600,000"),
    ],
    ids=["none", "zero", "words", "target"],
)
async def test_the_page_says_what_is_wrong_with_a_load_and_asks_nobody(
    world: World, asked: dict[str, str], says: str
) -> None:
    alice = await world.as_("alice")
    part = (await alice.get(PLAN_PAGE, params=asked, headers={"HX-Request": "true"})).text
    assert 'role="alert"' in part
    assert says in part
    assert world.operator.planned == []


async def test_the_page_says_that_the_operator_is_away_and_shows_nobody_a_foreign_service(
    world: World,
) -> None:
    alice, bob = await world.as_("alice"), await world.as_("bob")
    world.operator.away = True
    part = await alice.get(PLAN_PAGE, params={"rate": "4"}, headers={"HX-Request": "true"})
    assert 'role="alert"' in part.text
    assert (await bob.get(PLAN_PAGE, params={"rate": "4"})).status_code == 404


async def test_a_plan_is_for_those_who_may_read_the_service(world: World) -> None:
    bob, alice = await world.as_("bob"), await world.as_("alice")
    assert (await bob.get(PLAN, params={"rate": "4"})).status_code == 404
    assert (await alice.get(f"{SERVICES}/nothing/plan", params={"rate": "4"})).status_code == 404
    assert world.operator.planned == []
    world.operator.away = True
    assert (await alice.get(PLAN, params={"rate": "4"})).status_code == 503
