"""What a service's status says of its load: tokens per second, the KV cache, and replicas that cannot keep the time per token."""

from __future__ import annotations

from collections.abc import Iterable

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.types.reasons import Reason
from busbar.kube.types.service_status import KvCacheStatus, ModelServiceStatus
from busbar.operator.serving.view import ServiceView
from busbar.operator.watch.projections import Pod

WINDOW_S = 60
"""Of the gateway's windows, the one that tells tokens per second."""


def load_fields(view: ServiceView, serving: Iterable[Pod]) -> dict[str, object]:
    """The fields of the status, from the gateway's last minute and what replicas that take requests report."""
    readings = [view.readings[pod.uid] for pod in serving if pod.uid in view.readings]
    told = [reading for reading in readings if reading.kv_blocks_total]
    blocks = sum(reading.kv_blocks_total for reading in told)
    held = sum(reading.kv_blocks_total - reading.kv_blocks_free for reading in told)
    return {
        "tokens_per_second": _tokens_per_second(view.demand),
        "kv_cache": KvCacheStatus(blocks=blocks, held=max(0, held)) if told else None,
        "saturated_replicas": sum(reading.saturated for reading in readings) or None,
    }


def saturation_notices(old: ModelServiceStatus, new: ModelServiceStatus) -> list[tuple[str, str]]:
    """The event of a service in which no replica was saturated before."""
    count = new.saturated_replicas
    if not count or old.saturated_replicas:
        return []
    replicas = "1 replica does" if count == 1 else f"{count} replicas do"
    words = (
        f"{replicas} not keep spec.slo.tpotMilliseconds even with the smallest pieces of prompts: add replicas, or a faster"
        " accelerator type, or allow more time."
    )
    return [(Reason.REPLICAS_SATURATED, words)]


def _tokens_per_second(demand: ServiceDemand | None) -> float | None:
    window = next((w for w in (demand and demand.windows) or () if w.seconds == WINDOW_S), None)
    if window is None:
        return None
    tokens = sum(size.output_tokens for size in window.sizes)
    return float(f"{tokens / WINDOW_S:.3g}") if tokens else None
