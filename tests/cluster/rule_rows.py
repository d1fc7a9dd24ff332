"""One row for each cross-field rule of our kinds, and what people may change."""

from __future__ import annotations

from tests.cluster import manifests as m
from tests.cluster.cluster_rules import POOL, POWER, PROFILE, TENANT
from tests.cluster.rule_row import RUNNING, SUSPENDED
from tests.cluster.service_rules import FIELDS, OTHER_ADAPTER, SERVICE, shared
from tests.cluster.training_rules import TRAINING

ROWS = (*TRAINING, *SERVICE, *POOL, *TENANT, *PROFILE, *POWER)

STAYS_MUTABLE = (
    ("a suspended job changes its size", m.template_job, SUSPENDED, {"spec/shape/minPods": 2}),
    ("a suspended job changes its types", m.engine_job, SUSPENDED, {"spec/accelerators": ["H100"]}),
    ("a job is suspended", m.engine_job, RUNNING, SUSPENDED),
    ("a job changes its priority", m.engine_job, RUNNING, {"spec/priority": 1}),
    ("a job changes its retries", m.engine_job, RUNNING, {"spec/retryLimit": 0}),
    ("a job changes when it is cleaned up", m.engine_job, RUNNING, {"spec/ttlSecondsAfterFinished": ...}),
    ("a service gets an external target", m.model_service, {"spec/replicas": ...}, {"spec/replicas": 0}),
    ("a service changes its range", m.model_service, RUNNING, {"spec/minReplicas": 0, "spec/maxReplicas": 9}),
    ("a feed gets another budget", m.power_domain, {}, {"spec/budgetWatts": 40_000}),
    ("a feed moves in the tree", m.power_domain, {}, {"spec/parent": "row-2"}),
    ("a feed becomes the root", m.power_domain, {}, {"spec/parent": ...}),
    ("a feed gets other nodes", m.power_domain, {}, {"spec/nodeSelector": {"rack": "b1"}}),
    ("a feed stops no work", m.power_domain, {}, {"spec/enforcement": "Cap"}),
    (
        "a feed is limited no more",
        m.power_domain,
        {},
        {"spec/policy": "Observe", "spec/enforcement": ..., "spec/rideThroughSeconds": ...},
    ),
    (
        "a feed is limited from now on",
        m.power_domain,
        {"spec/policy": "Observe", "spec/enforcement": ..., "spec/rideThroughSeconds": ...},
        {"spec/policy": "Static"},
    ),
    ("a feed gets another margin", m.power_domain, {}, {"spec/marginPercent": 5}),
    *(
        (f"a suspended service changes its {name}", m.model_service, SUSPENDED, change)
        for name, change in (*FIELDS, ("adapters", OTHER_ADAPTER))
    ),
    ("a running service drops its adapters", m.model_service_from_weights, RUNNING, {"spec/adapters": ...}),
    (
        "a running service gets its first adapter",
        m.model_service_from_weights,
        {"spec/adapters": ...},
        OTHER_ADAPTER,
    ),
    (
        "a running service changes its tenants' KV cache",
        m.model_service_from_weights,
        RUNNING,
        {"spec/access": shared(maxKv=0.5)},
    ),
    (
        "a running service is opened to a tenant without a part of its KV cache",
        m.model_service_from_weights,
        RUNNING,
        {"spec/access": {"tenants": [*shared(guaranteedKv=0.25)["tenants"], {"name": "sales"}]}},
    ),
)
"""What people may change: (why, accepted manifest, before, change)."""
