"""What does each mechanism of the search earn? Every one is switched off, alone, on the same rows.

    python -m benchmarks.scheduling.ablate --data DIR [--only NAME ...]

A mechanism is switched off by replacing its entry point (or a constant by the value that does nothing) in this process;
the product has no switches for this. A row is a published case cut short, so that one mechanism takes some three minutes
of one core: T1 with lengths known and unknown, two seeds of the generator, elastic jobs within eight hours (known) and
within one (unknown), the scenarios, tenants with a backlog, and the small clusters of the oracle. Each number is the ratio
to the complete search in the same run (above 1: the mechanism earns something); scenarios are the number that the search
misses without it. Results are written after every mechanism, and an interrupted run goes on where it stopped. Mechanisms
that a run leaves out keep their rows in the file, each with the commit that it measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.scheduling import elastic, oracle, scenarios, work_shares
from benchmarks.scheduling.gavel_generator import generate
from benchmarks.scheduling.kit import LARGE, PHYSICAL, RESULTS, _commit, _t1
from benchmarks.scheduling.parts import folder
from benchmarks.scheduling.replay import replay

from busbar.scheduler import Policy, plan, planner
from busbar.scheduler.search import migration, preemption, proposal, rules, start, stoppable, victims
from busbar.scheduler.search import round as rounds
from busbar.scheduler.search.rules import Rule
from busbar.scheduler.search.state import PlanningState
from busbar.scheduler.simulate.engine import Settings, simulate
from busbar.scheduler.simulate.metrics import Result, percentile
from busbar.scheduler.simulate.readers import gavel_throughputs

Off = contextlib.AbstractContextManager[object]
Numbers = dict[str, float]


def _nothing(*_: object, **__: object) -> bool:
    return False


def _policy(**fields: Any) -> Off:
    """Another policy for every plan."""

    def built(snapshot: Any, policy: Policy, *more: Any) -> PlanningState:
        return PlanningState(snapshot, replace(policy, **fields), *more)

    return patch.object(planner, "PlanningState", built)


def _without(rule: Rule) -> Off:
    """The rights without this one."""
    return patch.object(preemption, "RIGHTS", tuple(one for one in rules.RIGHTS if one is not rule))


def _both(*names: str) -> Off:
    """Several mechanisms at once."""
    stack = contextlib.ExitStack()
    for name in names:
        stack.enter_context(MECHANISMS[name]())
    return stack


def _swaps_alone() -> Off:
    return patch.dict(proposal._DISPLACED, {rules.Displaced.CHAIN: proposal._wait})


MECHANISMS: dict[str, Callable[[], Off]] = {
    "nothing": contextlib.nullcontext,
    "mixed-integer step": lambda: patch.object(planner, "worth_trying", _nothing),
    "thorough victims of gangs": lambda: patch.object(victims._Search, "best", victims._Search.many),
    "swaps by value": lambda: patch.object(planner, "improve", _nothing),
    "chains behind a swap": _swaps_alone,
    "moves": lambda: patch.object(planner, "move", _nothing),
    "mixed-integer step and moves": lambda: _both("mixed-integer step", "moves"),
    "moves into the place of others": lambda: patch.object(migration, "_exchange", lambda *_: None),
    "exchange between tenants": lambda: patch.object(planner, "exchange", _nothing),
    "defragmentation": lambda: patch.object(planner, "defragment", _nothing),
    "growth": lambda: patch.object(planner, "grow", _nothing),
    "transfer of pods": lambda: patch.object(planner, "transfer", _nothing),
    "reservations": lambda: _policy(reservations=0),
    "reservations by patience": lambda: _policy(patience=0.0),
    "places kept by patience": lambda: patch.object(rounds.Round, "was_patient", _nothing),
    "hysteresis (1.1)": lambda: _policy(hysteresis=1.0),
    "least rise of an exchange (0.25)": lambda: _policy(least_rise=0.0),
    "margin of a transfer (2.0)": lambda: _policy(transfer_gain_factor=1.0),
    "longer runs for small lacks of share": lambda: patch.object(
        rules, "share_run_s", lambda round_, _: round_.policy.min_run_s
    ),
    "rank of the recently stopped": lambda: patch.object(
        start, "order", lambda round_, one: _own_order(round_, one)
    ),
    "limit of preemptions": lambda: _policy(max_preemptions=1000),
    "turns between large jobs": lambda: _without(rules.TURN),
    "victims that are only planned": lambda: patch.object(stoppable.Stoppable, "planned", lambda *_: []),
}


_ORDER = start.order


def _own_order(round_: Any, assignment: Any) -> Any:
    key = _ORDER(round_, assignment)
    return (*key[:2], False, *key[3:])


def measured(data: Path) -> Iterator[tuple[str, Numbers]]:
    """The rows, by name: all numbers are better when lower."""
    table = gavel_throughputs(data / "gavel" / "simulation_throughputs.json")
    for known in (True, False):
        settings = Settings(charge_s=30.0, steps_known=known)
        yield f"T1, {_length(known)}", _trace(simulate(_t1(data), PHYSICAL, Policy(), settings))
    for seed in (2, 3):
        trace = generate(table, LARGE, seed, 240, (80, 160))
        yield f"seed {seed}", _trace(simulate(trace, LARGE, Policy(), Settings(charge_s=30.0)))
    for hours, known in ((8.0, True), (1.0, False)):
        row = elastic._replayed("busbar", elastic.trace(data, 1, hours), None, known)
        kept = {name: row[name] for name in ("mean_h", "p99_h", "gpu_h_per_job", "moves_per_job")}
        yield f"elastic in {hours:g} h, {_length(known)}", kept
    found = scenarios.rows()
    yield "scenarios", {"missed": float(sum(not row["met"] for row in found))}
    row = work_shares._row(5, 10.0, replay(work_shares.situation(5, 10.0)))
    yield "work shares", {"one_over_least_part": 1 / row["least_part"], "moves": row["moves_per_job"]}
    parts = []
    for seed in range(400):
        snapshot = oracle.case(seed)
        most = oracle.best(snapshot)
        parts.append(1.0 if most <= 0 else plan(snapshot, oracle.POLICY, oracle.NOW)[0].value / most)
    lost = [2 - part for part in parts]
    yield "oracle", {"mean": sum(lost) / len(lost), "p99": percentile(lost, 99)}


def _length(known: bool) -> str:
    return "lengths known" if known else "unknown"


def _trace(result: Result) -> Numbers:
    row = result.to_json()
    return {name: float(str(row[name])) for name in ("mean_h", "p99_h", "worst_ftf", "moves_per_job")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=sorted(MECHANISMS), default=sorted(MECHANISMS))
    arguments = parser.parse_args()
    place = folder("ablate")
    found: dict[str, dict[str, Numbers]] = {}
    wanted = [name for name in MECHANISMS if name in {"nothing", *arguments.only}]
    for number, name in enumerate(wanted, 1):
        path = place / (name.replace(" ", "-").replace("/", "") + ".json")
        if not path.exists():
            begin = time.process_time()
            with MECHANISMS[name]():
                rows = dict(measured(arguments.data))
            path.write_text(json.dumps(rows | {"cpu_s": {"cpu_s": time.process_time() - begin}}))
        found[name] = json.loads(path.read_text())
        print(
            f"  {number} of {len(wanted)}: {name}: {found[name]['cpu_s']['cpu_s']:.0f} s of CPU",
            file=sys.stderr,
            flush=True,
        )
        _write(found)


def _write(found: dict[str, dict[str, Numbers]]) -> None:
    whole, commit, path = found["nothing"], _commit(), RESULTS / "ablate.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = {row["mechanism"]: row for row in before["rows"] if row["mechanism"] in MECHANISMS}
    for name, numbers in found.items():
        rows[name] = {"mechanism": name, "commit": commit, "ratios": _ratios(numbers, whole)}
    head = {
        "case": "ablate",
        "command": "python -m benchmarks.scheduling.ablate --data DIR",
        "policy": Policy().hash,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "whole": whole,
    }
    path.write_text(json.dumps(before | head | {"rows": list(rows.values())}, indent=1) + "\n")


def _ratios(numbers: dict[str, Numbers], whole: dict[str, Numbers]) -> dict[str, Numbers]:
    return {
        row: {
            name: round(
                value - whole[row][name] if row == "scenarios" else value / max(whole[row][name], 1e-9), 3
            )
            for name, value in own.items()
        }
        for row, own in numbers.items()
    }


if __name__ == "__main__":
    main()
