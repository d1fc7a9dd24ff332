"""Where a replica was placed, from the annotation of its pod."""

from __future__ import annotations

import json

from busbar.operator.watch.projections import Pod
from busbar.scheduler import Placement, Resources


def place_of(pod: Pod) -> Placement | None:
    """The placement that a replica's pod was created with."""
    if not pod.placement:
        return None
    try:
        raw = json.loads(pod.placement)
        per_pod = Resources(**{k: int(v) for k, v in raw["perPod"].items()})
        pool, accelerator, mode, node = (str(raw[k]) for k in ("pool", "accelerator", "mode", "node"))
        return Placement(pool, accelerator, mode, (node,), per_pod)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # an annotation; outside tenants' namespaces anybody may have written it
