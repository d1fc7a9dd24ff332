"""What Prometheus reads from our processes: the names of the series and their labels."""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry

from busbar.api.database.metrics import DatabaseMetrics
from busbar.gateway.metrics import Metrics as GatewayMetrics
from busbar.operator.metrics import Metrics as OperatorMetrics
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.serving.metrics import ScalingMetrics

SAMPLES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


@cache
def exported() -> dict[str, frozenset[str]]:
    """The labels of every series, by its name."""
    apart = (ScalingMetrics(CollectorRegistry()), PowerMetrics(CollectorRegistry()))
    owners = (OperatorMetrics(), *apart, GatewayMetrics(), DatabaseMetrics())
    found: dict[str, frozenset[str]] = {}
    for owner in owners:
        for metric in vars(owner).values():
            if isinstance(metric, CollectorRegistry) or not hasattr(metric, "_labelnames"):
                continue
            for family in metric.describe():
                for suffix in SAMPLES[family.type]:
                    le = {"le"} if suffix == "_bucket" else set()
                    found[family.name + suffix] = frozenset({*metric._labelnames, *le})
    return found


def families() -> set[str]:
    """The names of the families that the registries of these owners have."""
    operator = OperatorMetrics().registry
    ScalingMetrics(operator)
    PowerMetrics(operator)
    registries = (operator, GatewayMetrics().totals, GatewayMetrics().per_service, DatabaseMetrics().registry)
    return {family.name for registry in registries for family in registry.collect()}
