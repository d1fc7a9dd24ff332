"""Validation of snapshots."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..errors import SnapshotError
from .snapshot import Job, JobId, PowerDomain, Snapshot


def validate(snapshot: Snapshot, known: Snapshot | None = None, jobs: Iterable[Job] | None = None) -> None:
    """Raise `SnapshotError` if a snapshot contradicts itself. Nodes that it shares with `known`, an earlier
    valid snapshot, are not checked again; with `jobs`, only these are checked, and ids are taken to be
    unique."""
    pools = {pool.name for pool in snapshot.pools}
    if known is None or snapshot.domains is not known.domains:
        _check_domains(snapshot.domains)
    domains = {domain.name for domain in snapshot.domains}
    _unique("pool", [pool.name for pool in snapshot.pools])
    _unique("tenant", [tenant.name for tenant in snapshot.tenants])
    if jobs is None:
        _unique("job", [job.id for job in snapshot.jobs])
    if known is None or snapshot.nodes is not known.nodes or snapshot.domains is not known.domains:
        _unique("node", [node.name for node in snapshot.nodes])
        for node in snapshot.nodes:
            if node.pool not in pools:
                raise SnapshotError(
                    f"node {node.name!r} names the pool {node.pool!r}, which is not in the snapshot"
                )
            if node.domain and node.domain not in domains:
                raise SnapshotError(
                    f"node {node.name!r} names the power domain {node.domain!r}, which is not in the snapshot"
                )
    for job in snapshot.jobs if jobs is None else jobs:
        if not 1 <= job.min_pods <= job.max_pods:
            raise SnapshotError(
                f"job {job.key}: pods {job.min_pods}..{job.max_pods} is not a range from 1 up"
            )


def _check_domains(domains: tuple[PowerDomain, ...]) -> None:
    _unique("power domain", [domain.name for domain in domains])
    parents = {domain.name: domain.parent for domain in domains}
    for domain in domains:
        if not (math.isfinite(domain.usable_w) and 0 <= domain.reserved_w < math.inf):
            raise SnapshotError(
                f"power domain {domain.name!r}: {domain.usable_w} W usable and {domain.reserved_w} W reserved"
            )
        seen = {domain.name}
        at = domain.name
        while parents[at]:
            child, at = at, parents[at]
            if at not in parents:
                raise SnapshotError(
                    f"power domain {child!r} names the parent {at!r}, which is not in the snapshot"
                )
            if at in seen:
                raise SnapshotError(f"power domain {domain.name!r}: the chain of parents returns to {at!r}")
            seen.add(at)


def _unique(what: str, names: list[str] | list[JobId]) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SnapshotError(f"two {what}s are called {name!r}")
        seen.add(name)
