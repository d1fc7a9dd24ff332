"""What kinds of pods the jobs of a snapshot request: the demand that packing (`packing.py`) prepares for.

Running and waiting jobs count alike, each with its smallest number of pods. Only counts are kept, so a
snapshot and the same snapshot with its plan carried out have the same mix, and following changes gives what a
new count gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..model.snapshot import Job, Pool, Resources
from .packing import PodRequest, Workload, typical
from .sharing import is_share

Shape = tuple[Resources, tuple[str, ...], tuple[str, ...], str]
"""Of a pod: its request; accelerators and pools allowed; the tenant, if some pools are not open to all."""


class DemandMix:
    """Counts of pods by shape."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._pools = sorted((pool for pool in pools if not pool.is_cpu), key=lambda pool: pool.name)
        self._closed = any(pool.tenants is not None for pool in self._pools)
        self.counts: dict[Shape, int] = {}

    @property
    def models(self) -> list[str]:
        """Pools of accelerators, by name: packing treats each as a device model of its own."""
        return [pool.name for pool in self._pools]

    def count(self, job: Job, sign: int = 1) -> None:
        """Count a job (sign=-1: remove it)."""
        shape = (job.per_pod, job.accelerators, job.pools, job.tenant if self._closed else "")
        left = self.counts.get(shape, 0) + sign * job.min_pods
        if left:
            self.counts[shape] = left
        else:
            del self.counts[shape]

    def workload(self) -> Workload:
        """How often each kind of request occurs."""
        requests: dict[PodRequest, int] = {}
        for shape, count in self.counts.items():
            for request in self._requests(shape):
                requests[request] = requests.get(request, 0) + count
        return typical(requests)

    def _requests(self, shape: Shape) -> Iterable[PodRequest]:
        """The requests of a shape: in pools that do not share, a part of an accelerator is a whole one."""
        per_pod, accelerators, names, tenant = shape
        if per_pod.accelerators_m <= 0:
            return
        usable = [
            pool
            for pool in self._pools
            if (not accelerators or pool.accelerator in accelerators)
            and (not names or pool.name in names)
            and (pool.tenants is None or tenant in pool.tenants)
        ]
        found: Mapping[bool, list[str]] = {True: [], False: []}
        for pool in usable:
            found[pool.shareable and is_share(per_pod.accelerators_m)].append(pool.name)
        for share, models in found.items():
            if models:
                allowed = frozenset(models) if len(models) < len(self._pools) else frozenset()
                yield request_of(per_pod.accelerators_m, per_pod.cpu_m, share, allowed)


def request_of(
    accelerators_m: int, cpu_m: int, share: bool, models: frozenset[str] = frozenset()
) -> PodRequest:
    """A request as packing sees it: a share of one device, or whole devices."""
    if share:
        return PodRequest(cpu_m, 0, 1, accelerators_m, models)
    return PodRequest(cpu_m, 0, -(-accelerators_m // 1000), 1000, models)
