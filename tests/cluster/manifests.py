"""Accepted manifests of every kind, which together use every field of every spec.

The tables of bad manifests change one of these in one place; the unchanged one is the accepted neighbour.
"""

from __future__ import annotations

import copy
from typing import Any

JSON = dict[str, Any]

SHAPE: JSON = {
    "minPods": 1,
    "maxPods": 1024,
    "acceleratorsPerPod": 8,
    "cpu": "500m",
    "memory": "2Gi",
    "ephemeralStorage": "1Gi",
}


def _document(kind: str, spec: JSON, name: str = "sample") -> JSON:
    return {"apiVersion": "busbar.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def engine_job() -> JSON:
    """A TrainingJob for our engine, from a configuration."""
    return _document(
        "TrainingJob",
        {
            "engine": {
                "model": {"config": {"model_type": "llama", "hidden_size": 128, "rope": {"factor": 0.5}}},
                "tokenizer": {"train": {"vocabSize": 4096}},
                "data": {
                    "uri": "builtin://python-stdlib",
                    "holdoutFraction": 0.05,
                    "sequenceLength": 256,
                },
                "steps": 100_000_000,
                "batch": {"sequences": 1_048_576, "microBatch": 1},
                "optimizer": {
                    "name": "AdamW",
                    "learningRate": 0.003,
                    "betas": [0.9, 0.95],
                    "eps": 1e-8,
                    "weightDecay": 0.1,
                    "warmupSteps": 1,
                    "schedule": "linear",
                    "gradientClip": 1.0,
                    "perturbation": 0.001,
                },
                "dtype": "float32",
                "mode": "optimizer-offload",
                "activations": "recompute",
                "loss": "tiled",
                "mlp": "tiled",
                "gradientSums": "weights",
                "schedule": "gated",
                "freeze": ["model.embed_tokens.*", "model.layers.[0-3].*"],
                "state": "exact",
                "deviceMemory": "256Mi",
                "threads": 1,
                "seed": 0,
                "maxBadSteps": 10,
                "parallelism": {
                    "order": "fixed",
                    "sharding": "optimizer",
                    "sequence": 1,
                    "processesPerPod": 1,
                },
                "evaluation": {"ngramOrder": 3},
            },
            "accelerators": ["cpu"],
            "priority": 100,
            "preemptible": True,
            "checkpoint": {"everySteps": 50, "keep": 2, "uri": "pvc://stdlib/checkpoints"},
            "preemption": {"gracePeriodSeconds": 60},
            "suspend": False,
            "output": {"uri": "pvc://stdlib/model"},
            "retryLimit": 3,
            "ttlSecondsAfterFinished": 3600,
            "activeDeadlineSeconds": 3600,
            "managedBy": "example.com/other",
        },
    )


def engine_job_that_drops_layers() -> JSON:
    """A TrainingJob for our engine, whose steps leave blocks out."""
    document = engine_job()
    document["spec"]["engine"]["layerDrop"] = {"keep": 0.5, "rate": 0.001}
    return document


def engine_job_from_weights() -> JSON:
    """A TrainingJob for our engine, from existing weights."""
    document = engine_job()
    spec = document["spec"]
    spec["engine"]["model"] = {"uri": "pvc://base/model"}
    spec["engine"]["tokenizer"] = {"uri": "pvc://base/model"}
    del spec["engine"]["freeze"]
    spec["engine"] |= {"mode": "auto", "scratchDisk": "1Gi"}
    spec["engine"]["parallelism"]["order"] = "fast"
    spec["engine"]["adapter"] = {
        "rank": 16,
        "alpha": 32,
        "dropout": 0.05,
        "targets": ["q_proj", "self_attn.v_proj"],
        "rsLora": True,
        "dora": True,
        "merge": True,
    }
    spec["engine"]["data"] |= {
        "uri": "pvc://corpus/rows.jsonl",
        "format": "jsonl",
        "fields": {"text": "body", "prompt": "question", "completion": "answer", "messages": "turns"},
        "chatTemplate": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "onBadRow": "skip",
        "packing": "within-documents",
    }
    spec["engine"]["lengthWarmup"] = {"start": 8, "steps": 1}
    spec["checkpoint"] = {"everySeconds": 60, "memory": {"everySteps": 10, "parity": 0}}
    return document


def engine_job_with_adapters() -> JSON:
    """A TrainingJob for our engine that trains several adapters, one of which has everything of its own."""
    document = engine_job_from_weights()
    engine = document["spec"]["engine"]
    adapter = engine.pop("adapter")
    del document["spec"]["checkpoint"]["memory"], engine["scratchDisk"]
    own = {name: engine_job()["spec"]["engine"][name] for name in ("batch", "optimizer", "seed")}
    engine["adapters"] = [
        {"name": "plain"},
        {"name": "own", **adapter, **own, "steps": 100_000_000, "data": dict(engine["data"])},
    ]
    return document


def template_job() -> JSON:
    """A TrainingJob with an own image, using every field of the template."""
    return _document(
        "TrainingJob",
        {
            "template": {
                "image": "registry.example.com/team/train:1",
                "imagePullPolicy": "IfNotPresent",
                "imagePullSecrets": [{"name": "registry"}],
                "command": ["python", "train.py"],
                "args": ["--epochs", "3"],
                "env": [
                    {"name": "PLAIN", "value": "1"},
                    {
                        "name": "SECRET",
                        "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}},
                    },
                    {
                        "name": "CONFIG",
                        "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}},
                    },
                    {"name": "FIELD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
                "envFrom": [
                    {"prefix": "A_", "secretRef": {"name": "s"}},
                    {"configMapRef": {"name": "c"}},
                ],
                "workingDir": "/work",
                "volumes": [
                    {"name": "data", "mountPath": "/data", "readOnly": True, "claim": "data"},
                    {"name": "settings", "mountPath": "/settings", "configMap": "settings"},
                    {"name": "keys", "mountPath": "/keys", "secret": "keys"},
                    {"name": "scratch", "mountPath": "/scratch", "emptyDir": {"sizeLimit": "2Gi"}},
                ],
                "metadata": {
                    "labels": {"example.com/team": "a"},
                    "annotations": {"example.com/note": "b"},
                },
                "port": True,
            },
            "shape": copy.deepcopy(SHAPE) | {"within": "rack"},
            "output": {"uri": "pvc://stdlib/model"},
        },
    )


def model_service() -> JSON:
    """A ModelService with every field but a model by uri."""
    return _document(
        "ModelService",
        {
            "model": {"trainingJob": "stdlib"},
            "modelId": "stdlib",
            "adapters": [
                {
                    "name": "support",
                    "uri": "pvc://stdlib/support",
                    "tenants": ["research"],
                    "price": {"promptPerMillion": 1, "cachedPerMillion": 0.1, "outputPerMillion": 3},
                },
                {"name": "SQL.v2", "uri": "pvc://adapters/sql"},
            ],
            "engine": "vllm",
            "image": "registry.example.com/vllm:1",
            "args": ["--dtype", "auto"],
            "replicas": 1,
            "minReplicas": 1,
            "maxReplicas": 256,
            "scaling": {
                "idleSeconds": 60,
                "downAfterSeconds": 120,
                "targetInFlightPerReplica": 8,
                "warm": {"replicas": 1, "level": "loaded"},
            },
            "shape": {key: value for key, value in SHAPE.items() if not key.endswith("Pods")},
            "accelerators": ["cpu"],
            "access": {"tenants": [{"name": "guest", "weight": 0.5, "tokensPerMinute": 1000}]},
            "price": {"promptPerMillion": 0.5, "cachedPerMillion": 0.05, "outputPerMillion": 1.5},
            "maxModelLen": 256,
            "kvCacheMemory": "256Mi",
            "suspend": False,
            "priority": 500,
            "drainSeconds": 30,
        },
    )


def model_service_of_sglang() -> JSON:
    """A ModelService by SGLang, with a latency target."""
    document = model_service()
    spec = document["spec"]
    del spec["kvCacheMemory"], spec["replicas"]
    spec |= {
        "engine": "sglang",
        "image": "registry.example.com/sglang:1",
        "args": ["--mem-fraction-static", "0.85"],
        "slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50},
    }
    return document


def model_service_from_weights() -> JSON:
    """A ModelService of weights on a claim, by our own engine, with a latency target, scaled by pool from outside."""
    document = model_service()
    spec = document["spec"]
    del spec["image"], spec["args"], spec["replicas"]
    spec["scaling"] |= {"external": {"l4": 1, "h100": 2}, "maxCostPerHour": 12.5}
    spec |= {
        "model": {"uri": "pvc://stdlib/model"},
        "engine": "builtin",
        "slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50, "percentile": 99},
        "access": {
            "tenants": [
                {"name": "guest", "guaranteedKv": 0.25},
                {"name": "research", "maxKv": 0.5},
            ]
        },
    }
    return document


def model_service_with_roles() -> JSON:
    """A ModelService of which one replica computes prompts for the others."""
    document = model_service_from_weights()
    spec = document["spec"]
    del spec["scaling"]["external"]
    spec |= {"replicas": 256, "prefillReplicas": 1}
    return document


def model_service_in_zones() -> JSON:
    """A ModelService whose replicas Busbar chooses, in several zones."""
    document = model_service_from_weights()
    spec = document["spec"]
    spec["scaling"] = {"minZones": 2, "zoneReserve": 0.5}
    spec["minReplicas"] = 16
    return document


def pool() -> JSON:
    """An AcceleratorPool with every field."""
    return _document(
        "AcceleratorPool",
        {
            "interconnect": {
                "linkClass": "pcie5",
                "fabric": {
                    "resources": {"rdma/hca_shared_devices_a": 1},
                    "annotations": {"k8s.v1.cni.cncf.io/networks": "ib"},
                    "env": {"NCCL_IB_HCA": "mlx5"},
                },
            },
            "runtimeClassName": "nvidia",
            "accelerator": "H100",
            "resourceName": "nvidia.com/gpu",
            "nodeSelector": {"busbar.dev/accelerator": "H100"},
            "tolerations": [
                {"key": "nvidia.com/gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}
            ],
            "tenants": ["research"],
            "pricePerHour": 2.5,
            "memoryGib": 80,
            "sharing": "none",
            "reserved": {"cpu": "500m"},
        },
    )


def cpu_pool() -> JSON:
    """An AcceleratorPool of cores."""
    document = pool()
    document["spec"] |= {"accelerator": "cpu", "resourceName": "cpu", "unit": "500m"}
    del document["spec"]["interconnect"]["fabric"]["resources"]
    return document


def tenant() -> JSON:
    """A Tenant with every field."""
    return _document(
        "Tenant",
        {
            "displayName": "Research",
            "organisation": "Example",
            "namespaces": ["research"],
            "members": [
                {"subject": {"kind": "User", "name": "alice"}, "role": "admin", "weight": 2},
                {
                    "subject": {"kind": "ServiceAccount", "name": "ci", "namespace": "research"},
                    "role": "member",
                },
            ],
            "weight": 1,
            "quota": [{"accelerator": "H100", "guaranteed": 0, "borrowable": 4, "ceiling": 1_000_000}],
            "priorityCeiling": 500,
            "limits": {
                "trainingJobs": 100,
                "modelServices": 10,
                "waitingJobs": 50,
                "pods": 200,
                "persistentVolumeClaims": 20,
                "storageGib": 1000,
            },
            "inference": {
                "requestsPerMinute": 600,
                "tokensPerMinute": 200_000,
                "budgets": [{"period": "month", "cost": 500}],
            },
            "onDelete": "refuse",
            "budgets": [
                {
                    "period": "month",
                    "acceleratorHours": 100,
                    "cost": 500,
                    "kilowattHours": 50,
                    "enforcement": "StopAdmitting",
                    "warnAtPercent": 90,
                }
            ],
        },
    )


def profile() -> JSON:
    """A PerformanceProfile with every field but an interval."""
    return _document(
        "PerformanceProfile",
        {
            "workloadClass": "llama-7B-3f9a0c11",
            "cells": [
                {
                    "accelerator": "H100",
                    "linkClass": "pcie5",
                    "accelerators": 8,
                    "nodes": 2,
                    "mode": "resident",
                    "powerCapPercent": 80,
                    "tokensPerSecond": 90_000.5,
                    "memoryGib": 60.5,
                    "watts": 550.5,
                    "override": True,
                    "note": "measured by the vendor",
                }
            ],
        },
    )


def fastest_profile() -> JSON:
    """A PerformanceProfile with the largest speed, so that its low end may be anything."""
    document = profile()
    document["spec"]["cells"][0] |= {"tokensPerSecond": 1e12, "low": 80_000.5}
    return document


def slowest_profile() -> JSON:
    """A PerformanceProfile with the smallest speed, so that its high end may be anything."""
    document = profile()
    document["spec"]["cells"][0] |= {"tokensPerSecond": 0, "high": 80_000.5}
    return document


def power_domain() -> JSON:
    """A PowerDomain with every field."""
    return _document(
        "PowerDomain",
        {
            "budgetWatts": 52_000.5,
            "parent": "row-1",
            "nodeSelector": {"topology.kubernetes.io/rack": "a1"},
            "policy": "LeaseWithBurst",
            "enforcement": "Preempt",
            "hostWatts": 1_750.5,
            "rideThroughSeconds": 0.05,
            "unreportedNodeWatts": 6_500,
            "marginPercent": 1.5,
            "meter": {
                "prometheus": {
                    "url": "https://prometheus.monitoring:9090/base",
                    "query": 'sum(pdu_energy_kwh{rack="a1"})',
                    "unit": "KilowattHours",
                },
                "secretName": "meter-rack-a1",
            },
        },
    )


def power_domain_with_redfish() -> dict[str, Any]:
    """A PowerDomain whose meter is a Redfish resource."""
    url = "https://[fd00::7]/redfish/v1/PowerEquipment/RackPDUs/1/Metrics"
    return _document("PowerDomain", {"budgetWatts": 52_000, "meter": {"redfish": {"url": url}}})


BASES = {
    "TrainingJob": (
        template_job,
        engine_job,
        engine_job_that_drops_layers,
        engine_job_from_weights,
        engine_job_with_adapters,
    ),
    "ModelService": (
        model_service,
        model_service_from_weights,
        model_service_in_zones,
        model_service_of_sglang,
        model_service_with_roles,
    ),
    "AcceleratorPool": (pool, cpu_pool),
    "Tenant": (tenant,),
    "PerformanceProfile": (profile, fastest_profile, slowest_profile),
    "PowerDomain": (power_domain, power_domain_with_redfish),
}
"""Kind to the functions that make its accepted manifests."""
