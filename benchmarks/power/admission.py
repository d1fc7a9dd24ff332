"""What power domains add to the CPU time of a plan: 1,000 nodes, 1,000 running and 1,000 waiting jobs.

    python benchmarks/power/admission.py [--repeats 5]

The cluster is that of `benchmarks/scheduling/generator.py`. The nodes hang on racks of 16, rows of 8 racks
and one hall. A rack's budget is a part of its boards' nameplates; a row and the hall have 97 % of what is below them.
Every board draws its nameplate in use and 60 W idle. Each plan is checked, and made without the mixed-integer step and with
it; the step has no time limit here (two seconds by default), so that the plans are the same each time. The last rows offer every class three power caps besides (0.85, 0.7 and 0.5 of
the nameplate, at 0.97, 0.93 and 0.8 of the speed) to jobs that have nodes to themselves.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.scheduling.generator import NOW, generate

from busbar.scheduler import Plan, Policy, PowerDomain, Snapshot, WaitCode, check_plan, plan

NAMEPLATES = {"H100": 700.0, "A100": 400.0, "L4": 72.0, "V100": 300.0}
IDLE_W, RACK, ROW, ABOVE = 60.0, 16, 8, 0.97
PARTS = (None, 10.0, 0.9, 0.7, 0.5)
"""Of the nameplates; None: no domains."""
CAPS = {0.85: 0.97, 0.7: 0.93, 0.5: 0.8}
"""Speed by cap."""
RESULT = Path(__file__).resolve().parent.parent / "results" / "power_admission.txt"


def hung(snapshot: Snapshot, part: float) -> Snapshot:
    """The snapshot with a tree of domains."""
    kinds = {pool.name: pool.accelerator for pool in snapshot.pools}
    nodes = tuple(replace(node, domain=f"rack-{i // RACK}") for i, node in enumerate(snapshot.nodes))
    racks: Counter[str] = Counter()
    for node in nodes:
        racks[node.domain] += round(part * NAMEPLATES[kinds[node.pool]] * node.capacity.accelerators_m / 1000)
    leaves = [
        PowerDomain(name, float(watts), f"row-{int(name.removeprefix('rack-')) // ROW}")
        for name, watts in racks.items()
    ]
    rows: Counter[str] = Counter()
    for leaf in leaves:
        rows[leaf.parent] += round(ABOVE * leaf.usable_w)
    above = [PowerDomain(name, float(watts), "hall") for name, watts in rows.items()]
    rates = tuple(
        replace(rate, watts=NAMEPLATES[rate.accelerator], idle_watts=IDLE_W) for rate in snapshot.table.rates
    )
    return replace(
        snapshot,
        nodes=nodes,
        table=replace(snapshot.table, rates=rates),
        domains=(*leaves, *above, PowerDomain("hall", ABOVE * rows.total())),
    )


def capped(snapshot: Snapshot) -> Snapshot:
    """The snapshot with cells for power caps, and agents that hold boards to them."""
    table = snapshot.table
    more = tuple(
        replace(cell, power_cap=cap, speed=cell.speed * speed)
        for cell in table.cells
        for cap, speed in CAPS.items()
    )
    nodes = tuple(replace(node, limits_boards=True) for node in snapshot.nodes)
    return replace(snapshot, nodes=nodes, table=replace(table, cells=table.cells + more))


def measure(snapshot: Snapshot, policy: Policy, repeats: int) -> tuple[float, Plan]:
    """The least CPU seconds of some plans, and the plan."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        made, _ = plan(snapshot, policy, NOW)
        taken.append(time.process_time() - start)
    assert check_plan(snapshot, made) == []
    return min(taken), made


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    bare = generate(1000, 1000, 1000, 20)
    lines = [
        f"python benchmarks/power/admission.py --repeats {repeats}",
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {platform.machine()}, a shared machine",
    ]
    least = 0.0
    rows = [(part, False) for part in PARTS] + [(part, True) for part in PARTS if part is None or part < 1]
    for part, caps in rows:
        snapshot = bare if part is None else hung(bare, part)
        if caps:
            snapshot = capped(snapshot)
        alone, _ = measure(snapshot, Policy(solver=False), repeats)
        seconds, made = measure(snapshot, Policy(solver_seconds=None), repeats)
        least = least or alone
        short = sum(record.code is WaitCode.POWER for record in made.waiting)
        what = (
            "no domains" if part is None else f"{len(snapshot.domains)} domains at {part:.0%} of nameplates"
        )
        starts = sum(a.to is not None and a.to.power_cap < 1 for a in made.actions)
        if caps:
            what += f", three caps known ({starts} jobs start under one)"
        lines.append(
            f"{what}: {alone:.2f} s, {alone / least:.2f} x, and with the solver {seconds:.2f} s; "
            f"{len(made.actions)} actions, {short} jobs wait for watts"
        )
        print(lines[-1], flush=True)
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
