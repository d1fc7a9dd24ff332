"""Replicas that somebody outside decides: `spec.replicas`, or `spec.scaling.external` by pool."""

from __future__ import annotations

from collections.abc import Mapping

from busbar.kube.types import AcceleratorPool
from busbar.kube.types.model_service import ModelServiceSpec


def external_words(spec: ModelServiceSpec) -> str:
    """What the external target asks for."""
    if spec.scaling.external is None:
        return f"spec.replicas is {spec.replicas}"
    rows = [f"{count} in {pool}" for pool, count in sorted(spec.scaling.external.items())]
    return f"spec.scaling.external asks for {', '.join(rows)}"


def unusable(spec: ModelServiceSpec, pools: Mapping[str, AcceleratorPool], tenant: str) -> list[str]:
    """A sentence for each pool with a target above 0 that the service cannot use."""
    found = []
    for name, count in sorted((spec.scaling.external or {}).items()):
        pool = pools.get(name)
        if not count:
            continue
        if pool is None:
            found.append(f"There is no AcceleratorPool {name}.")
        elif pool.spec.tenants is not None and tenant not in pool.spec.tenants:
            found.append(f"This tenant may not use AcceleratorPool {name}.")
        elif spec.accelerators is not None and pool.spec.accelerator not in spec.accelerators:
            found.append(
                f"AcceleratorPool {name} has {pool.spec.accelerator}, which spec.accelerators leaves out."
            )
    return found
