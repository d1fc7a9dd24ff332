"""The routes document that the gateway streams from the operator: each service's replicas and their addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from busbar.kube.contracts.allowances import Price
from busbar.kube.contracts.bearers import Role, bearer_for, former_bearer_for, key_of
from busbar.kube.contracts.report import ServingReport
from busbar.kube.contracts.routes import (
    AccessRoute,
    AdapterRoute,
    BucketShares,
    Endpoint,
    Promise,
    ReplicaSpeed,
    Routes,
    ServiceRoute,
)
from busbar.kube.contracts.workload import MOST_RUNNING, ReplicaRole, ServingStatus
from busbar.kube.informer import Key
from busbar.kube.types.engines import FOREIGN
from busbar.kube.types.inference import InferencePrice
from busbar.kube.types.model_service import ModelServiceSpec
from busbar.operator.errors import ProbeRefused
from busbar.operator.pods.manifests import KIND_SERVICE
from busbar.operator.pods.prober import address_of
from busbar.operator.serving.adapters import adapter_problem, lacking
from busbar.operator.serving.replica_speed import LEAST_STEPS
from busbar.operator.serving.shares import Shares
from busbar.operator.watch.caches import Caches
from busbar.operator.watch.projections import Node, Pod


def build_routes(
    caches: Caches,
    workload_keys: Sequence[bytes],
    revision: int,
    pod_cidrs: Iterable[str] = (),
    readings: Mapping[str, ServingStatus] = MappingProxyType({}),
    is_stopped: Callable[[str], bool] = lambda namespace: False,
    shares_of: Callable[[str], Shares] = lambda uid: (),
) -> Routes:
    """The whole document as of now.

    Args:
        workload_keys: the one of new pods first; a replica of another has a bearer of its own.
        readings: the last answers of replicas, by pod uid.
        is_stopped: whether a spent budget stops what runs in a namespace.
        shares_of: where each class of a service's prompts shall go, by its uid.
    """
    tenant_of = caches.tenant_of
    services: list[ServiceRoute] = []
    for key, service in sorted(caches.services.items.items()):
        if service.metadata.deletion_timestamp is not None:
            continue
        spec, status = service.spec, service.status
        pods = caches.owned_pods(KIND_SERVICE, service)
        endpoints = [
            endpoint
            for pod in pods
            if (endpoint := _endpoint(pod, spec, caches.nodes.items, workload_keys, pod_cidrs, readings))
            is not None
        ]
        services.append(
            ServiceRoute(
                tenant=tenant_of.get(key.namespace, ""),
                namespace=key.namespace,
                name=key.name,
                uid=service.metadata.uid,
                model_id=spec.model_id or key.name,
                desired_replicas=(status.desired_replicas or 0) if status is not None else 0,
                ready_replicas=sum(e.ready for e in endpoints),
                suspended=spec.suspend or key.namespace not in tenant_of or is_stopped(key.namespace),
                min_replicas=spec.min_replicas,
                max_replicas=spec.replica_ceiling,
                slo=_promise(spec),
                access=_access(spec),
                price=_price(spec.price),
                ranked=_ranked(spec),
                adapters=[
                    AdapterRoute(
                        name=a.name,
                        tenants=a.tenants,
                        problem=adapter_problem(a.name, pods, readings),
                        price=_price(a.price),
                    )
                    for a in spec.adapters or ()
                ],
                bearer=bearer_for(workload_keys[0], service.metadata.uid, Role.INFER),
                endpoints=endpoints,
                shares=[
                    BucketShares(prompt=prompt, pools=pools)
                    for prompt, pools in enumerate(shares_of(service.metadata.uid))
                    if pools
                ],
                max_model_len=_context_length(spec, pods, readings),
            )
        )
    return Routes(revision=revision, services=services)


def _promise(spec: ModelServiceSpec) -> Promise | None:
    if spec.slo is None:
        return None
    return Promise(ttft_ms=spec.slo.ttft_milliseconds, tpot_ms=spec.slo.tpot_milliseconds)


def _access(spec: ModelServiceSpec) -> list[AccessRoute]:
    if spec.access is None:
        return []
    return [
        AccessRoute(tenant=t.name, weight=t.weight, tokens_per_minute=t.tokens_per_minute)
        for t in spec.access.tenants
    ]


def _price(price: InferencePrice | None) -> Price | None:
    if price is None:
        return None
    prompt, cached = price.prompt_per_million, price.cached_per_million
    return Price(prompt=prompt, cached=prompt if cached is None else cached, output=price.output_per_million)


def _context_length(
    spec: ModelServiceSpec, pods: Iterable[Pod], readings: Mapping[str, ServingStatus]
) -> int | None:
    """The least that a ready replica reports, else what the spec asks for, else None.

    A replica may serve less than the spec asks for, because its KV cache holds no more. Of other engines than ours it is not
    read; they do not start with less than their flag says, but arguments of the spec's own can change the flag.
    """
    serving = [p for p in pods if p.takes_requests]
    reports = [readings[p.uid].report for p in serving if p.uid in readings]
    told = [report.max_model_len for report in reports if report is not None and report.max_model_len]
    if told:
        return min(told)
    engine = FOREIGN.get(spec.engine)
    flag = "--max-model-len" if engine is None else engine.length_flag
    if any(argument.startswith(flag) for argument in spec.args or ()):
        return None
    return spec.max_model_len


def _endpoint(
    pod: Pod,
    spec: ModelServiceSpec,
    nodes: dict[Key, Node],
    workload_keys: Sequence[bytes],
    pod_cidrs: Iterable[str],
    readings: Mapping[str, ServingStatus],
) -> Endpoint | None:
    if pod.ended or pod.phase != "Running":
        return None
    try:
        url = address_of(pod, nodes.get(Key("", pod.node)), pod_cidrs)
    except ProbeRefused:
        return None
    told = readings.get(pod.uid)
    report = told.report if told is not None else None
    return Endpoint(
        pod=pod.key.name,
        pool=pod.pool,
        url=url,
        ready=pod.is_open,
        draining=pod.leaving or pod.parked,
        bearer=_own_bearer(pod, workload_keys),
        speed=speed_of(report),
        kv_tokens=report.cache_tokens if report else None,
        most_running=_most_running(spec),
        role=told.role if told is not None else ReplicaRole.BOTH,
        lacks=lacking(spec, told),
    )


def _own_bearer(pod: Pod, keys: Sequence[bytes]) -> str | None:
    """The bearer for inference of a replica that does not know its service's: it is of a release that had no roles, or was
    made under the former key."""
    if not pod.bearers:
        return former_bearer_for(keys[0], pod.owner_uid)
    key = key_of(pod.bearers, pod.owner_uid, keys[1:])
    return None if key is None else bearer_for(key, pod.owner_uid, Role.INFER)


def speed_of(report: ServingReport | None) -> ReplicaSpeed | None:
    """The step model, in two digits: what changes less changes no choice, and would send the routes again."""
    model = report.step_model if report is not None else None
    if model is None or model.steps < LEAST_STEPS:
        return None
    return ReplicaSpeed(
        per_step_s=_two_digits(model.seconds_per_step),
        per_sequence_s=_two_digits(model.seconds_per_sequence),
        per_context_token_s=_two_digits(model.seconds_per_thousand_context_tokens / 1000),
        per_prompt_token_s=_two_digits(model.seconds_per_prompt_token),
    )


def _two_digits(seconds: float) -> float:
    """At least 0: noise can make a coefficient negative."""
    return float(f"{max(0.0, seconds):.1e}")


def _most_running(spec: ModelServiceSpec) -> int | None:
    """How many requests a replica computes together: its flag, else our engine's default; None: another engine's own choice."""
    engine = FOREIGN.get(spec.engine)
    text = _flag(spec, "--max-running" if engine is None else engine.running_flag)
    if text.isdecimal() and int(text):
        return int(text)
    return MOST_RUNNING if engine is None else None


def _ranked(spec: ModelServiceSpec) -> bool:
    """Whether its model server orders requests by their `priority`, lowest first: its arguments say so."""
    engine = FOREIGN.get(spec.engine)
    if engine is None:
        return False
    return all(
        _flag(spec, flag) == value if value else flag in (spec.args or ()) for flag, value in engine.ranked_by
    )


def _flag(spec: ModelServiceSpec, flag: str) -> str:
    """What an argument of the spec says, as `--flag value` or `--flag=value`; empty where it is not there."""
    arguments = list(spec.args or ())
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, _, value = argument.partition("=")
        if name == flag:
            return value or following
    return ""
