"""Validation of snapshots."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import SnapshotError
from .snapshot import Job, JobId, Snapshot


def validate(snapshot: Snapshot, known: Snapshot | None = None, jobs: Iterable[Job] | None = None) -> None:
    """Raise `SnapshotError` if a snapshot contradicts itself. Nodes that it shares with `known`, an earlier
    valid snapshot, are not checked again; with `jobs`, only these are checked, and ids are taken to be
    unique."""
    pools = {pool.name for pool in snapshot.pools}
    _unique("pool", [pool.name for pool in snapshot.pools])
    _unique("tenant", [tenant.name for tenant in snapshot.tenants])
    if jobs is None:
        _unique("job", [job.id for job in snapshot.jobs])
    if known is None or snapshot.nodes is not known.nodes:
        _unique("node", [node.name for node in snapshot.nodes])
        for node in snapshot.nodes:
            if node.pool not in pools:
                raise SnapshotError(
                    f"node {node.name!r} names the pool {node.pool!r}, which is not in the snapshot"
                )
    for job in snapshot.jobs if jobs is None else jobs:
        if not 1 <= job.min_pods <= job.max_pods:
            raise SnapshotError(
                f"job {job.key}: pods {job.min_pods}..{job.max_pods} is not a range from 1 up"
            )


def _unique(what: str, names: list[str] | list[JobId]) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SnapshotError(f"two {what}s are called {name!r}")
        seen.add(name)
