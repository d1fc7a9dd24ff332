"""Rows of the rules of ModelServices."""

from __future__ import annotations

from typing import Any

from tests.cluster import manifests as m
from tests.cluster.manifests import JSON
from tests.cluster.rule_row import FIXED, RUNNING, SUSPENDED, WHILE_SUSPENDED, Change, Row

FIELDS: tuple[tuple[str, Change], ...] = (
    ("model", {"spec/model": {"trainingJob": "other"}}),
    ("image", {"spec/image": "other"}),
    ("args", {"spec/args": ...}),
    ("shape", {"spec/shape/memory": "3Gi"}),
    ("accelerators", {"spec/accelerators": ["L4"]}),
    ("maxModelLen", {"spec/maxModelLen": 512}),
    ("kvCacheMemory", {"spec/kvCacheMemory": ...}),
)
OTHER_ADAPTER: Change = {"spec/adapters": [{"name": "support", "uri": "pvc://stdlib/other"}]}


def shared(**guest: Any) -> JSON:
    return {"tenants": [{"name": "guest", **guest}, {"name": "research", "maxKv": 0.5}]}


BUILTIN: Change = {"spec/image": ..., "spec/engine": "builtin"}
SERVICE = (
    Row(
        m.model_service,
        "spec",
        "kvCacheMemory must be more than 0; write an amount such as 2Gi, or leave it out",
        {"spec/kvCacheMemory": "0.0Gi", **BUILTIN},
        {"spec/kvCacheMemory": "0.05Gi", **BUILTIN},
    ),
    Row(
        m.model_service,
        "spec.access.tenants[]",
        "guaranteedKv must not be greater than maxKv",
        {"spec/access": {"tenants": [{"name": "guest", "guaranteedKv": 0.5, "maxKv": 0.25}]}, **BUILTIN},
        {"spec/access": {"tenants": [{"name": "guest", "guaranteedKv": 0.25, "maxKv": 0.25}]}, **BUILTIN},
        blames="spec.access.tenants[0]",
    ),
    Row(
        m.model_service,
        "spec.access",
        "the guaranteedKv of all tenants together must not be greater than 1",
        {
            "spec/access": {"tenants": [{"name": f"guest{n}", "guaranteedKv": 0.11} for n in range(10)]},
            **BUILTIN,
        },
        {
            "spec/access": {"tenants": [{"name": f"guest{n}", "guaranteedKv": 0.1} for n in range(10)]},
            **BUILTIN,
        },
    ),
    Row(
        m.model_service,
        "spec",
        "guaranteedKv and maxKv of spec.access are kept by the builtin engine alone",
        {"spec/access": {"tenants": [{"name": "guest", "maxKv": 0.5}]}},
        {"spec/access": {"tenants": [{"name": "guest", "maxKv": 0.5}]}, **BUILTIN},
    ),
    Row(
        m.model_service,
        "",
        "at most 46 lower-case letters",
        {"metadata/name": "1service"},
        {"metadata/name": "service1"},
        blames="metadata.name",
    ),
    Row(
        m.model_service,
        "spec.slo",
        "ttftMilliseconds needs tpotMilliseconds beside it",
        {"spec/slo": {"ttftMilliseconds": 500}, **BUILTIN},
        {"spec/slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50}, **BUILTIN},
    ),
    Row(
        m.model_service,
        "spec.slo",
        "percentile needs ttftMilliseconds and tpotMilliseconds",
        {"spec/slo": {"percentile": 99, "tpotMilliseconds": 50}, **BUILTIN},
        {"spec/slo": {"percentile": 99, "ttftMilliseconds": 500, "tpotMilliseconds": 50}, **BUILTIN},
    ),
    Row(
        m.model_service,
        "spec",
        "slo of engine vllm needs ttftMilliseconds",
        {"spec/slo": {"tpotMilliseconds": 50}},
        {"spec/slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50}},
    ),
    Row(
        m.model_service,
        "spec",
        "engine vllm needs spec.image",
        {"spec/image": ...},
        {"spec/image": ..., "spec/engine": "builtin"},
    ),
    Row(
        m.model_service,
        "spec",
        "--api-key and --config of engine vllm are set by Busbar",
        {"spec/args": ["--api_key=mine"]},
        {"spec/args": ["--api-server-count=2", "--config-format", "hf"]},
        blames="spec",
    ),
    Row(
        m.model_service,
        "spec",
        "minReplicas must not be greater than maxReplicas",
        {"spec/minReplicas": 3, "spec/maxReplicas": 2},
        {"spec/minReplicas": 2, "spec/maxReplicas": 2},
    ),
    Row(
        m.model_service,
        "spec",
        "scaling.warm.replicas must not be greater than maxReplicas",
        {"spec/scaling/warm/replicas": 3, "spec/maxReplicas": 2},
        {"spec/scaling/warm/replicas": 2, "spec/maxReplicas": 2},
    ),
    Row(
        m.model_service,
        "spec",
        "scaling.warm.replicas must not be greater than maxReplicas",
        {"spec/scaling/warm/replicas": 3, "spec/minReplicas": 2, "spec/maxReplicas": ...},
        {"spec/scaling/warm/replicas": 2, "spec/minReplicas": 2, "spec/maxReplicas": ...},
    ),
    Row(
        m.model_service_from_weights,
        "spec",
        "replicas and scaling.external each decide the number of replicas; give one of them",
        {"spec/replicas": 1},
        {"spec/replicas": 1, "spec/scaling/external": ...},
    ),
    Row(
        m.model_service_from_weights,
        "spec.scaling.external",
        "every key must have at most 63 characters and match",
        {"spec/scaling/external": {"L4": 1}},
        {"spec/scaling/external": {"l4": 1}},
    ),
    Row(
        m.model_service_from_weights,
        "spec",
        "scaling.maxCostPerHour needs slo.ttftMilliseconds and slo.tpotMilliseconds",
        {"spec/slo": {"tpotMilliseconds": 50}},
        {"spec/slo": {"tpotMilliseconds": 50}, "spec/scaling/maxCostPerHour": ...},
    ),
    Row(
        m.model_service_in_zones,
        "spec",
        "scaling.minZones needs slo.ttftMilliseconds and slo.tpotMilliseconds",
        {"spec/slo": {"tpotMilliseconds": 50}},
        {"spec/slo": {"tpotMilliseconds": 50}, "spec/scaling": ...},
    ),
    Row(
        m.model_service_in_zones,
        "spec",
        "scaling.minZones must not be greater than minReplicas: each zone needs a replica",
        {"spec/minReplicas": 1},
        {"spec/minReplicas": 2},
    ),
    Row(
        m.model_service_in_zones,
        "spec.scaling",
        "zoneReserve needs minZones: it is kept for the loss of one of these zones",
        {"spec/scaling/minZones": ...},
        {"spec/scaling/zoneReserve": ...},
    ),
    Row(
        m.model_service_with_roles,
        "spec",
        "prefillReplicas needs spec.replicas above it",
        {"spec/replicas": 1},
        {"spec/replicas": 2},
    ),
    Row(
        m.model_service_in_zones,
        "spec",
        "prefillReplicas and scaling.minZones are not built together",
        {"spec/replicas": 3, "spec/prefillReplicas": 1},
        {"spec/replicas": 3, "spec/prefillReplicas": 1, "spec/scaling": ...},
    ),
    Row(
        m.model_service,
        "spec",
        "prefillReplicas is for the builtin engine",
        {"spec/prefillReplicas": 1, "spec/replicas": 2},
        {"spec/replicas": 2},
    ),
    Row(
        m.model_service_with_roles,
        "spec",
        f"spec.prefillReplicas {WHILE_SUSPENDED}",
        {"spec/prefillReplicas": 2},
        {"spec/replicas": 4},
        RUNNING,
    ),
    Row(
        m.model_service_in_zones,
        "spec",
        "scaling.external chooses the pools, and with them the zones; leave scaling.minZones out",
        {"spec/scaling/external": {"l4": 2}},
        {"spec/scaling": {"external": {"l4": 2}}},
    ),
    Row(
        m.model_service,
        "spec",
        "Busbar does not use the sleep mode of engine vllm; set scaling.warm.level to loaded",
        {"spec/scaling/warm/level": "sleeping"},
        {"spec/scaling/warm/level": "loaded"},
    ),
    Row(
        m.model_service,
        "spec",
        f"spec.engine {FIXED}",
        {"spec/engine": "builtin"},
        {"spec/replicas": ...},
        RUNNING,
    ),
    Row(
        m.model_service,
        "spec",
        f"spec.modelId {FIXED}",
        {"spec/modelId": "other"},
        {"spec/minReplicas": 0},
        SUSPENDED,
    ),
    *(
        Row(
            m.model_service,
            "spec",
            f"spec.{name} {WHILE_SUSPENDED}",
            change,
            {"spec/maxReplicas": 3},
            RUNNING,
        )
        for name, change in FIELDS
    ),
    Row(
        m.model_service,
        "spec",
        f"spec.adapters of engine vllm {WHILE_SUSPENDED}",
        OTHER_ADAPTER,
        before=RUNNING,
    ),
    *(
        Row(m.model_service_of_sglang, "spec", says, bad, good, blames="spec")
        for says, bad, good in (
            ("engine sglang needs spec.image", {"spec/image": ...}, BUILTIN),
            (
                "slo of engine sglang needs ttftMilliseconds",
                {"spec/slo": {"tpotMilliseconds": 50}},
                {"spec/slo": {"tpotMilliseconds": 50}, **BUILTIN},
            ),
            (
                "--api-key and --config of engine sglang are set by Busbar",
                {"spec/args": ["--api-key", "mine"]},
                {"spec/args": ["--context-length=4096", "--attention-backend", "triton"]},
            ),
            (
                "--api-key and --config of engine sglang are set by Busbar",
                {"spec/args": ["--config=/own.yaml"]},
                {"spec/args": ["--constrained-json-disable-any-whitespace"]},
            ),
            (
                "Busbar does not use the sleep mode of engine sglang; set scaling.warm.level to loaded",
                {"spec/scaling/warm/level": "sleeping"},
                {"spec/scaling/warm/level": "loaded"},
            ),
            (
                "kvCacheMemory is not for engine sglang, which takes no size in bytes",
                {"spec/kvCacheMemory": "2Gi"},
                {"spec/args": ["--max-total-tokens", "65536"]},
            ),
            (
                "modelId of engine sglang must have no colon",
                {"spec/modelId": "llama:8b"},
                {"spec/modelId": "llama-8b"},
            ),
        )
    ),
    Row(
        m.model_service_of_sglang,
        "spec",
        f"spec.adapters of engine sglang {WHILE_SUSPENDED}",
        OTHER_ADAPTER,
        before=RUNNING,
    ),
    Row(
        m.model_service_from_weights,
        "spec",
        "a new adapter of a service that runs must be on a claim that its pods mount",
        {"spec/adapters": [{"name": "support", "uri": "pvc://elsewhere/support"}]},
        {
            "spec/adapters": [
                {"name": "sql", "uri": "pvc://adapters"},
                {"name": "new", "uri": "pvc://stdlib/a/b"},
            ]
        },
        before=RUNNING,
    ),
    Row(
        m.model_service,
        "spec.model",
        "exactly one of uri and trainingJob",
        {"spec/model": {}},
    ),
)
