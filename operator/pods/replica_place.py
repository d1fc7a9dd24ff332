"""Where a replica was placed, in the annotation of its pod."""

from __future__ import annotations

import json
from dataclasses import asdict

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
        cap = int(raw.get("powerCapPercent", 100))
        if not 1 <= cap <= 100:
            return None
        return Placement(pool, accelerator, mode, (node,), per_pod, power_cap=cap / 100)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # an annotation; outside tenants' namespaces anybody may have written it


def placement_note(placement: Placement) -> str:
    """The annotation of a replica of one pod with this placement."""
    cap = {"powerCapPercent": round(100 * placement.power_cap)} if placement.power_cap < 1 else {}
    return json.dumps(
        {
            "pool": placement.pool,
            "accelerator": placement.accelerator,
            "mode": placement.mode,
            "node": placement.nodes[0],
            "perPod": {k: v for k, v in asdict(placement.per_pod).items() if v},
            **cap,
        }
    )
