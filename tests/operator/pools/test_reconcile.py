"""The status of a pool."""

from __future__ import annotations

from datetime import timedelta

from tests.operator.builders import NOW, pool

from busbar.operator.accounting.allocations import PoolAllocation
from busbar.operator.pools.reconcile import reconcile as reconcile_pool


def test_a_pool_says_what_it_has() -> None:
    update = reconcile_pool(pool(), PoolAllocation(2, 8.0, 3.0), NOW)
    assert update.status is not None
    assert (update.status.capacity, update.status.free) == (8.0, 5.0)
    again = pool().model_copy(update={"status": update.status})
    assert reconcile_pool(again, PoolAllocation(2, 8.0, 3.0), NOW + timedelta(hours=1)).status is None


def test_only_what_jobs_hold_may_be_told_later() -> None:
    first = reconcile_pool(pool(), PoolAllocation(2, 8.0, 3.0), NOW)
    assert not first.waits
    told = pool().model_copy(update={"status": first.status})
    assert reconcile_pool(told, PoolAllocation(2, 8.0, 4.0), NOW).waits
    assert not reconcile_pool(told, PoolAllocation(1, 4.0, 4.0), NOW).waits
