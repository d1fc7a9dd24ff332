"""Runs the scheduling rows and writes them to benchmarks/results/scheduling/<case>.json.

    python -m benchmarks.scheduling.kit gate t1 t3 t5 seeds decision openb reclaim --data DIR

DIR contains `gavel/`, `alibaba_openb_2023/`, `philly/`, `elasticflow/` and `pollux_t4/` with the layout of the public
repositories (see README.md); `decision`, `reclaim`, `entitlements`, `oracle`, `scenarios`, `waiting` and `work_shares`
need none of it. Every file contains the policy's hash, versions, the command and the commit; a row that misses its
bar is marked.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.scheduling import (
    contended,
    deadlines,
    decision,
    elastic,
    entitled,
    forecasts,
    learning,
    openb,
    openb_planner,
    oracle,
    philly_month,
    reclaim,
    scenarios,
    static_makespan,
    waiting,
    work_shares,
)
from benchmarks.scheduling.gavel_generator import generate
from benchmarks.scheduling.peers import finish_time, max_min

from busbar.scheduler import Objective, Policy
from busbar.scheduler.simulate.engine import SETTLE_S, Settings, simulate
from busbar.scheduler.simulate.metrics import Result
from busbar.scheduler.simulate.readers import gavel, gavel_throughputs
from busbar.scheduler.simulate.rounds import simulate_rounds
from busbar.scheduler.simulate.trace import Trace, TraceCluster

ORDER = ("v100", "p100", "k80")
PHYSICAL = TraceCluster({"v100": 8, "p100": 16, "k80": 24})
LARGE = TraceCluster({"v100": 36, "p100": 36, "k80": 36})
RESULTS = Path(__file__).parents[1] / "results" / "scheduling"

Row = dict[str, Any]


def _row(result: Result, **more: Any) -> Row:
    numbers = result.to_json()
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in (numbers | more).items()}


def _bars(row: Row, **most: float) -> Row:
    """Mark which bars (at most) the row meets."""
    return row | {"bars": {key: {"at_most": bar, "met": row[key] <= bar} for key, bar in most.items()}}


def _t1(data: Path) -> Trace:
    root = data / "gavel"
    return gavel(
        root / "traces_physical" / "max_min_fairness.trace",
        gavel_throughputs(root / "simulation_throughputs.json"),
    )


def _generated(data: Path, name: str, measured: tuple[int, int] | None = None) -> Trace:
    root = data / "gavel"
    table = gavel_throughputs(root / "simulation_throughputs.json")
    return gavel(root / "traces_generated" / f"{name}.trace", table, measured)


def gate(data: Path) -> list[Row]:
    """Gavel's rules without restart costs: published 5.55 h and 4.06 h, within 2 %."""
    rows = []
    for aware, published in ((False, 5.55), (True, 4.06)):
        shuffle = None if aware else 5
        result = simulate_rounds(_t1(data), PHYSICAL, max_min(aware), ORDER, shuffle=shuffle)
        row = _row(result, name="max-min, " + ("aware" if aware else "agnostic"), published_h=published)
        off = abs(row["mean_h"] / published - 1)
        rows.append(row | {"off_by": round(off, 4), "met": off <= 0.02})
    return rows


def _ours(
    trace: Trace, cluster: TraceCluster, objective: Objective = Objective.FAIRNESS, **more: Any
) -> list[Row]:
    """Steps known, then unknown, with a restart cost of 30 s; then both with 120 s."""
    rows = []
    for charge_s in (30.0, 120.0):
        for known in (True, False):
            begin = time.perf_counter()
            settings = Settings(charge_s=charge_s, steps_known=known)
            result = simulate(trace, cluster, Policy(objective=objective), settings)
            rows.append(_row(result, steps_known=known, charge_s=charge_s, who="busbar", **more))
            what = f"steps {'known' if known else 'unknown'}, {charge_s:.0f} s charged"
            print(f"  {trace.name}: {what}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return rows


def _as_operated(trace: Trace, cluster: TraceCluster) -> list[Row]:
    """The same with the operator's answers to events between full plans, charged 30 s."""
    rows = []
    for known in (True, False):
        settings = Settings(charge_s=30.0, steps_known=known, settle_s=SETTLE_S)
        result = simulate(trace, cluster, Policy(), settings)
        rows.append(_row(result, steps_known=known, charge_s=30.0, who="busbar", as_operated=True))
    return rows


def _peer_rows(trace: Trace, cluster: TraceCluster) -> list[Row]:
    rows = []
    for charge_s in (0.0, 30.0):
        for name, policy in (("max-min, aware", max_min(True)), ("finish-time, aware", finish_time())):
            result = simulate_rounds(trace, cluster, policy, ORDER, charge_s)
            rows.append(_row(result, name=name, charge_s=charge_s, who="peer"))
    return rows


def t1(data: Path) -> list[Row]:
    trace = _t1(data)
    known, unknown, *dear = _ours(trace, PHYSICAL)
    rows = [_bars(known, mean_h=3.79, p99_h=9.8), _bars(unknown, mean_h=4.06, p99_h=9.8)]
    return rows + dear + _as_operated(trace, PHYSICAL) + _peer_rows(trace, PHYSICAL)


def t3(data: Path) -> list[Row]:
    known, *others = _ours(_generated(data, "cont_single_600_lam600_s0", (200, 400)), LARGE)
    return [_bars(known, mean_h=20.5, median_h=5.6, p99_h=173.0), *others]


def t5(data: Path) -> list[Row]:
    known, *others = _ours(_generated(data, "static_multi_200_s0"), LARGE, Objective.MAKESPAN)
    return [_bars(known, makespan_h=157.6, mean_h=30.4), *others]


def seeds(data: Path, numbers: Iterable[int] = range(1, 6)) -> list[Row]:
    """Multi-GPU seeds of the generator at 90 % load; the bars are the better peer's results, also with a restart cost
    of 30 s."""
    throughputs = gavel_throughputs(data / "gavel" / "simulation_throughputs.json")
    rows: list[Row] = []
    for seed in numbers:
        trace = generate(throughputs, LARGE, seed, 240, (80, 160))
        known, *others = _ours(trace, LARGE, seed=seed)
        peers = [
            _row(
                simulate_rounds(trace, LARGE, policy, ORDER, 30.0),
                name=name,
                charge_s=30.0,
                seed=seed,
                who="peer",
            )
            for name, policy in (("max-min, aware", max_min(True)), ("finish-time, aware", finish_time()))
        ]
        least = {key: min(peer[key] for peer in peers) for key in ("mean_h", "p99_h", "worst_ftf")}
        rows += [_bars(known, **least), *others, *peers]
    return rows


CASES: dict[str, Callable[[Path], list[Row]]] = {
    "gate": gate,
    "t1": t1,
    "t3": t3,
    "t5": t5,
    "seeds": seeds,
    "more_seeds": lambda data: seeds(data, range(6, 21)),
    "deadlines": deadlines.rows,
    "decision": lambda data: decision.rows(),
    "openb": openb.rows,
    "philly": philly_month.rows,
    "planner": openb_planner.rows,
    "reclaim": lambda data: reclaim.rows(),
    "entitlements": lambda data: entitled.rows(),
    "forecasts": forecasts.rows,
    "elastic": elastic.rows,
    "learning": lambda data: learning.rows(_t1(data), PHYSICAL),
    "scenarios": lambda data: scenarios.rows(),
    "oracle": lambda data: oracle.rows(),
    "contended": contended.rows,
    "makespan": static_makespan.rows,
    "waiting": lambda data: waiting.rows(),
    "work_shares": lambda data: work_shares.rows(),
}
WITHOUT_DATA = frozenset(
    {"decision", "entitlements", "oracle", "reclaim", "scenarios", "waiting", "work_shares"}
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=sorted(CASES))
    parser.add_argument("--data", type=Path, default=Path())
    arguments = parser.parse_args()
    needing = sorted(set(arguments.cases) - WITHOUT_DATA)
    if needing and not (arguments.data / "gavel").is_dir():
        parser.error(f"--data must name a folder with gavel/ in it for {', '.join(needing)} (see README.md)")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for case in arguments.cases:
        begin = time.perf_counter()
        rows = CASES[case](arguments.data)
        head = {
            "case": case,
            "command": f"python -m benchmarks.scheduling.kit {case}"
            + ("" if case in WITHOUT_DATA else " --data DIR"),
            "policy": Policy().hash,
            "commit": _commit(),
            "versions": {name: version(name) for name in ("numpy", "highspy")}
            | {"python": platform.python_version()},
            "cpu": platform.machine(),
            "seconds": round(time.perf_counter() - begin, 1),
            "date": time.strftime("%Y-%m-%d"),
        }
        path = RESULTS / f"{case}.json"
        path.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
        print(f"{case}: {head['seconds']} s -> {path.name}", file=sys.stderr)
        for row in rows:
            print(json.dumps({k: v for k, v in row.items() if k not in ("policy", "commit")}))


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
