"""A service's scaling status in words."""

from __future__ import annotations

from typing import Any

from busbar.kube.types.lost_work import LostWork
from busbar.kube.types.service_access import Access
from busbar.kube.types.service_status import ModelServiceStatus, ScalingDecision
from busbar.kube.types.service_words import (
    access_facts,
    adapter_facts,
    change_words,
    charged_words,
    count_words,
    level_facts,
    loss_facts,
    pool_words,
)

STATUS: dict[str, Any] = {
    "slo": {
        "scaledBy": "Promise", "attainmentRecent": 0.982, "requestsRecent": 600, "attainmentHour": 0.9951,
        "requestsHour": 7000,
    },
    "forecast": {
        "now": 6, "atReady": 6.5, "p90": 7.25, "readyInSeconds": 90, "method": "trend", "inside": 0.93, "capacity": 8.1,
    },
    "pools": [
        {"pool": "l4", "replicas": 2, "ready": 1, "desired": 3, "requestsPerSecond": 2.5, "costPerHour": 0.7},
        {"pool": "cpu", "replicas": 1},
        {"pool": "h100", "replicas": 4, "ready": 1, "starting": 1, "sleeping": 2, "watts": 912.0},
    ],
    "scalingHistory": [
        {"time": "2026-11-21T12:00:00Z", "previous": 1, "desired": 3, "cause": "Panic", "requestsPerSecond": 6},
        {"time": "2026-11-21T13:00:00Z", "previous": 3, "desired": 2},
    ],
}  # fmt: skip


def test_the_target_the_demand_and_the_capacity_are_told_with_their_numbers() -> None:
    assert level_facts(ModelServiceStatus.model_validate(STATUS)) == [
        ("Decided by", "the latency target"),
        ("Target kept", "98.2 % of 600 requests in 5 minutes, 99.5 % of 7000 requests in an hour"),
        (
            "Demand",
            "6 requests/s now, 6.5 expected in 90 s, nine times in ten 7.25 or fewer (so far in 93 %)",
        ),
        ("Capacity", "8.1 requests/s within the target by ready replicas"),
    ]


def test_the_last_day_its_times_and_what_its_tokens_took_are_told() -> None:
    status = ModelServiceStatus.model_validate(
        {
            "slo": {
                "scaledBy": "Promise", "attainmentDay": 0.9912, "requestsDay": 90_000, "ttftMilliseconds": 812,
                "tpotMilliseconds": 41.5,
            },
            "costPerMillionTokens": 0.312, "joulesPerToken": 1.2,
        }
    )  # fmt: skip
    assert level_facts(status)[1:] == [
        ("Target kept", "99.1 % of 90000 requests in a day"),
        ("Times", "first token 812 ms, each further one 41.5 ms, at the target's percentile of a day"),
        ("Costs", "0.312 per million tokens, 1.2 J per token, of a day"),
    ]


def test_a_target_that_does_not_decide_says_why_and_a_service_without_one_says_nothing() -> None:
    why = {"slo": {"scaledBy": "InFlight", "message": "No replica has measured its speed."}}
    assert level_facts(ModelServiceStatus.model_validate(why)) == [
        ("Decided by", "requests in flight"),
        ("Remark", "No replica has measured its speed."),
    ]
    assert level_facts(ModelServiceStatus()) == []


def test_pools_and_changes_tell_what_is_known_of_them() -> None:
    status = ModelServiceStatus.model_validate(STATUS)
    assert [pool_words(row) for row in status.pools or ()] == [
        "2 on l4 (3 wanted, 1 ready, 2.5 requests/s each, 0.7/h each)",
        "1 on cpu",
        "4 on h100 (1 ready, 1 starting, 2 sleeping, 912 W together)",
    ]
    row = (status.pools or [])[0]
    capped = pool_words(row.model_copy(update={"power_cap_percent": 70}))
    assert capped == "2 on l4 (3 wanted, 1 ready, 2.5 requests/s each, boards limited to 70 %, 0.7/h each)"
    assert [change_words(entry) for entry in status.scaling_history or ()] == [
        "1 → 3 for 6 requests/s",
        "3 → 2",
    ]


def test_a_change_names_the_pools_where_there_are_several() -> None:
    entry = {"time": "2026-11-24T12:00:00Z", "previous": 2, "desired": 3, "requestsPerSecond": 6.0}
    for before, after, words in (
        ({"l4": 2}, {"l4": 3}, "2 → 3 for 6 requests/s"),
        ({"l4": 2}, {"l4": 2, "h100": 1}, "2 (l4 2) → 3 (h100 1, l4 2) for 6 requests/s"),
        (None, {"l4": 2, "h100": 1}, "2 → 3 (h100 1, l4 2) for 6 requests/s"),
    ):
        made = ScalingDecision.model_validate(entry | {"previousPools": before, "desiredPools": after})
        assert change_words(made) == words


def test_the_count_names_those_that_sleep_where_there_are_any() -> None:
    numbers = {"readyReplicas": 1, "desiredReplicas": 2}
    assert count_words(ModelServiceStatus.model_validate(numbers)) == "1 ready of 2 wanted"
    some = ModelServiceStatus.model_validate(numbers | {"sleepingReplicas": 3})
    assert count_words(some) == "1 ready of 2 wanted, 3 sleeping"


def test_adapters_are_told_with_their_replicas_and_why_one_is_refused() -> None:
    rows = [{"name": "a", "replicas": 1}, {"name": "b", "replicas": 0, "message": "rank 4096"}]
    assert adapter_facts(ModelServiceStatus.model_validate({"adapters": rows})) == [
        ("Adapters", "a on 1 replica, b on 0 replicas (refused: rank 4096)")
    ]
    assert adapter_facts(ModelServiceStatus()) == []


def test_who_shares_a_service_is_said_with_what_each_may_use() -> None:
    tenants = [{"name": "guest"}, {"name": "lab", "weight": 0.5, "tokensPerMinute": 1500}]
    access = Access.model_validate({"tenants": tenants})
    quiet = ModelServiceStatus()
    assert access_facts(access, quiet) == [("Shared with", "guest, lab (weight 0.5, 1,500 tokens/min)")]
    asks = {"tenants": [{"name": "guest", "running": 2, "waiting": 1}, {"name": "lab"}]}
    [(_, words)] = access_facts(access, ModelServiceStatus.model_validate(asks))
    assert words.startswith("guest (2 running, 1 waiting), lab")
    parts = Access.model_validate({"tenants": [{"name": "lab", "guaranteedKv": 0.25, "maxKv": 0.5}]})
    holds = {"tenants": [{"name": "lab", "kvBlocks": 3, "kvBlocksGuaranteed": 10, "kvBlocksMost": 20}]}
    [(_, words)] = access_facts(parts, ModelServiceStatus.model_validate(holds))
    assert words == ("lab (25 % of the KV cache guaranteed, at most 50 % of the KV cache, 3 of 20 KV blocks)")
    assert access_facts(None, quiet) == []


def test_lost_work_is_told_on_both_sides() -> None:
    loss = {"times": 2, "acceleratorSeconds": 1800.0, "cost": 1.25}
    caused = {"lostWorkCaused": loss | {"tenants": [loss | {"tenant": "lab"}]}}
    assert loss_facts(ModelServiceStatus.model_validate(caused)) == [
        (
            "Lost work caused",
            "0.5 accelerator-hours (1.25), training gave way 2 times (lab 0.5 accelerator-hours (1.25))",
        )
    ]
    assert loss_facts(ModelServiceStatus()) == []
    to = loss | {"uid": "u", "namespace": "shop", "name": "web", "tenant": "shop"}
    assert charged_words(LostWork.model_validate({"charged": [to]})) == (
        "0.5 accelerator-hours (1.25) to shop/web of tenant shop"
    )
    assert charged_words(LostWork()) == charged_words(None) == ""
