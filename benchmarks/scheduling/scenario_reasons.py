"""Scenarios of impossible demand: the reason of the waiting job, and the forecast of its start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.scheduling.replay import Outcome, Situation
from benchmarks.scheduling.scenario_parts import Scenario, cluster, exactly, job

from busbar.scheduler import Cell, Quota, Tenant, what_if
from busbar.scheduler.model.plans import NEVER


def never() -> Iterator[Scenario]:
    promise = "impossible demand said as never"
    asked = job("asked", 1, gpus=8, pods=6, accelerators=("H100",))
    limited = Tenant("a", quotas=(Quota("H100", 8_000, 16_000),))
    for tenants, neighbour, quota in (
        ((limited,), False, "a borrowing limit of 24"),
        ((Tenant("a"),), True, "no limit"),
    ):
        here = Situation(cluster({"H100": 4}, *tenants), (asked,), 0.1)
        yield Scenario(
            f"48 H100 asked where there are 32, {quota}: the reason",
            promise,
            "No quota, order or patience gives 48 of 32: the reason is the capacity, with its number.",
            exactly("never: 32 of 48"), "reason",
            here, lambda o: _reason(o, "asked"), neighbour=neighbour,
        )  # fmt: skip
        yield Scenario(
            f"48 H100 asked where there are 32, {quota}: the forecast",
            promise, "For the same reason.", exactly("never"), "forecast",
            here, lambda o: _forecast(o.situation), neighbour=neighbour,
        )  # fmt: skip
    beyond = Tenant("a", quotas=(Quota("H100", 8_000, 8_000),))
    possible = Situation(
        cluster({"H100": 4}, beyond), (job("asked", 1, gpus=8, pods=3, accelerators=("H100",)),), 0.1
    )
    yield Scenario(
        "24 H100 asked where there are 32, a borrowing limit of 16: the reason",
        promise, "The capacity is there, the limit is what holds it back.", exactly("BorrowingLimit"), "reason",
        possible, lambda o: _reason(o, "asked"), neighbour=True,
    )  # fmt: skip
    need = (("resident", 1_100_000), ("optimizer-offload", 290_000), ("parameter-offload", 90_000))
    cells = tuple(
        Cell("70b", "H100", 1000 * n, mode, 0.01 * n, memory_mib=-(-mib // n))
        for mode, mib in need
        for n in (1, 2, 4, 8)
    )
    large = cluster({"H100": 1}, cells=cells, memory_mib=81_920)
    modes = tuple(mode for mode, _ in need)
    yield Scenario(
        "a 70 B model on one GPU: the numbers",
        promise,
        "The smallest mode needs 90,000 MiB and the GPU has 81,920.", exactly("never: 81920 of 90000 MiB"),
        "reason",
        Situation(large, (job("asked", 1, workload="70b", modes=modes),), 0.1),
        lambda o: _reason(o, "asked"),
    )  # fmt: skip
    yield Scenario(
        "a 70 B model on one GPU: what would fit",
        promise,
        "Two GPUs hold 45,000 MiB each in the smallest mode, so twice the GPUs are the smallest change.",
        exactly("2"), "accelerators suggested",
        Situation(large, (job("asked", 1, workload="70b", modes=modes),), 0.1),
        lambda o: next(
            (c.needed for c in o.records["asked"].changes if c.kind in ("accelerators", "pods")), ""
        ),
    )  # fmt: skip
    yield Scenario(
        "100 CPUs per pod asked where nodes have 64: the reason",
        promise, "No node has more than 64,000 millicores.", exactly("never: 64 of 100"), "reason",
        Situation(cluster({"H100": 1}), (job("asked", 1, cpu_m=100_000),), 0.1),
        lambda o: _reason(o, "asked"), neighbour=True,
    )  # fmt: skip


def _reason(outcome: Outcome, name: str) -> str:
    """The record's code, or that the job can never run, with the available amount of its request."""
    record = outcome.records[name]
    if record.code not in NEVER:
        return record.code.value
    if record.limit is None:
        return "never"
    if record.resource.endswith("memory"):
        return f"never: {record.limit} of {record.requested} MiB"
    return f"never: {record.limit // 1000} of {record.requested // 1000}"


def _forecast(situation: Situation) -> str:
    """The preview of the (only) waiting job."""
    arrived = [arrival.job for arrival in situation.arrivals]
    asked = next(one for one in arrived if one.run is None)
    others = tuple(one for one in arrived if one is not asked)
    found = what_if(replace(situation.cluster, jobs=others), situation.policy, asked, 0.0)
    if found.starts_now:
        return "now"
    return "never" if found.p50_s is None else "later"
