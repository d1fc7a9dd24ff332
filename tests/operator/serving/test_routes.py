"""What the gateway is told of replicas and of who may use a service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, RENDERING, replica, service
from tests.operator.serving.test_reconcile import view
from tests.operator.serving.test_warm import AWAKE

from busbar.kube.client import KubeClient
from busbar.kube.contracts.bearers import Role, bearer_for
from busbar.kube.contracts.demand import ServiceDemand, TenantDemand
from busbar.kube.contracts.report import ServingReport, StepModelReport
from busbar.kube.contracts.routes import ReplicaSpeed, ServiceRoute
from busbar.kube.contracts.workload import AdapterReport, ReplicaRole, ServingStatus
from busbar.kube.informer import Key
from busbar.kube.login import Login
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.routes import build_routes
from busbar.operator.serving.shares import Shares
from busbar.operator.watch.caches import Caches


def route(
    told: ServingStatus = AWAKE,
    shares: Shares = (),
    keys: Sequence[bytes] = (RENDERING.workload_key,),
    **spec: Any,
) -> ServiceRoute:
    """The route of a service with one replica that says this of itself."""
    caches = Caches(KubeClient(Login(server="http://127.0.0.1:1")), lambda *_: None, inactivity_s=60.0)
    caches.services.items[Key("team", "web")] = service(**spec)
    pod = replace(replica(0), ip="10.0.0.5")
    caches.pods.items[pod.key] = pod
    caches._pod_changed(pod.key, None, pod)
    uid = caches.services.items[Key("team", "web")].metadata.uid
    made = build_routes(
        caches,
        keys,
        1,
        ("10.0.0.0/8",),
        {pod.uid: told},
        shares_of={uid: shares}.__getitem__,
    )
    return made.services[0]


def test_a_replica_of_the_former_key_is_called_with_its_own_bearer() -> None:
    old, new = RENDERING.workload_key, b"n" * 16
    bearers = {}
    for keys in ([old], [new, old], [new]):
        made = route(keys=keys)
        bearers[tuple(keys)] = (made.bearer, made.endpoints[0].bearer)
    of_old, of_new = (bearer_for(key, "uid-web", Role.INFER) for key in (old, new))
    assert list(bearers.values()) == [(of_old, None), (of_new, of_old), (of_new, None)]


def measured(steps: int = 100, **fields: float) -> ServingStatus:
    model = StepModelReport(
        seconds_per_step=0.0051234,
        seconds_per_sequence=-0.001,
        seconds_per_thousand_context_tokens=0.00123,
        seconds_per_prompt_token=2.04e-5,
        rms_error_seconds=0.001,
        steps=steps,
    )
    report = ServingReport(
        workload_class="c", accelerator="cpu", kv_bytes=1000, kv_bytes_per_token=7, step_model=model
    )
    return AWAKE.model_copy(update={"report": report.model_copy(update=fields)})


def test_the_shares_of_the_mix_come_by_class_of_prompts_and_name_the_replicas_pool() -> None:
    made = route(shares=({}, {"l4": 0.7, "h100": 0.3}, {"h100": 1.0}))
    assert [(row.prompt, row.pools) for row in made.shares] == [
        (1, {"l4": 0.7, "h100": 0.3}), (2, {"h100": 1.0})
    ]  # fmt: skip
    assert made.endpoints[0].pool == replica(0).pool
    assert route().shares == []


def test_the_step_model_of_a_replica_comes_in_two_digits_and_without_noise_below_zero() -> None:
    [endpoint] = route(measured()).endpoints
    assert endpoint.speed == ReplicaSpeed(
        per_step_s=0.0051, per_sequence_s=0.0, per_context_token_s=1.2e-6, per_prompt_token_s=2.0e-5
    )
    assert endpoint.kv_tokens == 142


def test_the_role_of_a_replica_is_the_one_that_it_tells() -> None:
    told = AWAKE.model_copy(update={"role": ReplicaRole.PREFILL})
    assert route(told).endpoints[0].role is ReplicaRole.PREFILL
    assert route(AWAKE).endpoints[0].role is ReplicaRole.BOTH


def test_an_adapter_that_the_replicas_refuse_comes_with_the_reason() -> None:
    adapters = [{"name": name, "uri": f"pvc://claim/{name}"} for name in ("good", "bad", "unknown")]
    told = AWAKE.model_copy(
        update={"adapters": [AdapterReport(name="good"), AdapterReport(name="bad", message="rank 4096")]}
    )
    made = route(told, adapters=adapters)
    assert [(each.name, each.problem) for each in made.adapters] == [
        *(("good", None), ("bad", "rank 4096"), ("unknown", None))
    ]


def test_a_replica_that_has_not_measured_enough_tells_no_speed() -> None:
    assert route(measured(steps=10)).endpoints[0].speed is None
    assert route().endpoints[0].speed is None
    assert route(measured(kv_bytes_per_token=0)).endpoints[0].kv_tokens is None


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ({}, 64),
        ({"args": ["--max-running", "16"]}, 16),
        ({"args": ["--max-running=8", "--kv-dtype", "int8"]}, 8),
        ({"args": ["--max-running"]}, 64),
        ({"args": ["--max-running", "many"]}, 64),
        ({"engine": "vllm", "image": "vllm/vllm-openai"}, None),
        ({"engine": "vllm", "image": "vllm/vllm-openai", "args": ["--max-num-seqs", "32"]}, 32),
        ({"engine": "sglang", "image": "sglang", "args": ["--max-num-seqs", "32"]}, None),
        ({"engine": "sglang", "image": "sglang", "args": ["--max-running-requests=32"]}, 32),
    ],
)
def test_how_many_requests_a_replica_computes_together(spec: dict[str, Any], most: int | None) -> None:
    assert route(**spec).endpoints[0].most_running == most


def test_who_may_use_it_and_what_it_costs() -> None:
    made = route(
        access={"tenants": [{"name": "guest", "weight": 0.5, "tokensPerMinute": 9}]},
        price={"promptPerMillion": 1.0, "outputPerMillion": 3.0},
        adapters=[
            {
                "name": "own",
                "uri": "pvc://claim/own",
                "price": {"promptPerMillion": 2.0, "cachedPerMillion": 0.5},
            },
            {"name": "same", "uri": "pvc://claim/same"},
        ],
    )
    assert [(a.tenant, a.weight, a.tokens_per_minute) for a in made.access] == [("guest", 0.5, 9)]
    assert made.price is not None
    assert (made.price.prompt, made.price.cached, made.price.output) == (1.0, 1.0, 3.0)
    own = made.price_of("own")
    assert own is not None
    assert (own.prompt, own.cached, own.output) == (2.0, 0.5, 0.0)
    assert made.price_of("same") == made.price_of("") == made.price
    free = route(price={"promptPerMillion": 1.0, "cachedPerMillion": 0.0})
    assert free.price is not None
    assert free.price.cached == 0.0


def test_the_status_says_what_each_tenant_of_a_shared_service_asks_for() -> None:
    rows = [TenantDemand(tenant="guest", waiting=2, in_flight=1), TenantDemand(tenant="team")]
    demand = ServiceDemand(namespace="team", name="web", tenants=rows)
    shared = service(access={"tenants": [{"name": "guest"}]}, status={"observedGeneration": 1})
    told = reconcile(view(shared, demand=demand), ()).status
    assert told is not None
    assert [(t.name, t.waiting, t.running) for t in told.tenants or ()] == [("guest", 2, 1), ("team", 0, 0)]
    closed = service(status=told.to_wire())
    after = reconcile(view(closed, demand=demand, now=NOW + timedelta(seconds=61)), ()).status
    assert after is not None
    assert after.tenants is None


@pytest.mark.parametrize(
    ("spec", "ranked"),
    [
        ({}, False),
        ({"args": ["--scheduling-policy", "priority"]}, False),
        ({"engine": "vllm", "image": "vllm/vllm-openai"}, False),
        ({"engine": "vllm", "image": "vllm/vllm-openai", "args": ["--scheduling-policy", "priority"]}, True),
        ({"engine": "vllm", "image": "vllm/vllm-openai", "args": ["--scheduling-policy=priority"]}, True),
        ({"engine": "vllm", "image": "vllm/vllm-openai", "args": ["--scheduling-policy=fcfs"]}, False),
    ],
)
def test_only_a_vllm_that_orders_by_priority_gets_ranks(spec: dict[str, Any], ranked: bool) -> None:
    assert route(**spec).ranked is ranked


@pytest.mark.parametrize(
    ("args", "ranked"),
    [
        ([], False),
        (["--scheduling-policy", "priority"], False),
        (["--enable-priority-scheduling"], False),  # the greatest number first
        (["--schedule-low-priority-values-first"], False),
        (["--enable-priority-scheduling", "--schedule-low-priority-values-first"], True),
    ],
)
def test_an_sglang_gets_ranks_where_it_takes_the_lowest_first(args: list[str], ranked: bool) -> None:
    assert route(engine="sglang", image="sglang", args=args).ranked is ranked


@pytest.mark.parametrize(
    ("engine", "args", "length"),
    [
        ("vllm", [], 4096),
        ("vllm", ["--max-model-len=8192"], None),
        ("sglang", ["--max-model-len=8192"], 4096),
        ("sglang", ["--context-length", "8192"], None),
    ],
)
def test_the_length_of_a_prompt_is_that_of_the_spec_unless_an_argument_changes_it(
    engine: str, args: list[str], length: int | None
) -> None:
    assert route(engine=engine, image="any", args=args, maxModelLen=4096).max_model_len == length
