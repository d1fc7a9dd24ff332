"""Where a job could run: what it needs of memory is known also of accelerators that it was never measured on."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import Cell, PerformanceTable, Rate, Snapshot, WaitCode, sentence

from ..build import cluster, job
from ..test_planner import decide, started

TABLE = PerformanceTable(
    (Cell("c", "H100", 1000, speed=1.0, memory_mib=40_960, host_memory_mib=2048),),
    (Rate("H100"), Rate("A100"), Rate("L4")),
)
JOB = job("x", workload_class="c")


def _measured(snapshot: Snapshot) -> Snapshot:
    """With pools of 80 GiB and of 24 GiB, and a class that was measured on H100 alone: it needs 40 GiB."""
    memory = {"H100": 81_920, "A100": 81_920, "L4": 24_576}
    sized = tuple(replace(pool, memory_mib=memory[pool.accelerator]) for pool in snapshot.pools)
    return replace(snapshot, pools=sized, table=TABLE)


def test_a_job_does_not_start_where_its_measured_memory_does_not_fit() -> None:
    result = decide(_measured(cluster(JOB, L4=1)))
    assert result.actions == ()
    (record,) = result.waiting
    assert record.code is WaitCode.DOES_NOT_FIT
    assert "Needs 40,960 MiB" in sentence(record, True)


def test_it_starts_where_it_fits_and_asks_for_the_measured_host_memory() -> None:
    result = decide(_measured(cluster(JOB, L4=1, A100=1)))
    assert started(result) == {"x"}
    (action,) = result.actions
    assert action.to is not None
    assert (action.to.pool, action.to.per_pod.memory_mib) == ("A100", 2048)
