"""A row of servers on one feed: our leases beside two yardsticks, on public traces.

    python benchmarks/power/run.py --data DATA [--minutes 120] [--seeds 0,1,2] [--day-minutes 720] [--only PART] [--keep]

First the yardstick has to give its published result; what deviates is printed. Then come the rows with their bars.
A bar that is missed stays in the table with its ratio. The results are written after every row, so a run that is cut
short leaves what it has measured, and says what is missing; `--keep` runs that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.power.two_threshold import TwoThreshold

from busbar.scheduler.power import PowerPolicy
from busbar.scheduler.simulate.power_load import Requests, load_maker
from busbar.scheduler.simulate.power_row import ServerModel, layout
from busbar.scheduler.simulate.power_run import (
    DELAYS,
    Figures,
    LeaseLaw,
    Outcome,
    Unlimited,
    figures,
    run,
)

BUDGET_W = 40 * 6500.0
RESULTS = Path(__file__).resolve().parent.parent / "results"
MODEL = ServerModel()
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of servers under one law."""

    part: str
    law: str
    delay: str
    load: str
    servers: int
    mix: float

    @property
    def key(self) -> str:
        return f"{self.law} {self.delay} {self.load} {self.servers} {self.mix}"


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure must be at most (or at least) this in the worst seed."""

    figure: str
    limit: float
    most: bool = True


def cases() -> list[Case]:
    """In the order in which they are run: what matters most first."""
    mixes = (0.0, 0.25, 0.5, 0.75)
    found = [Case("yardstick", "TwoThreshold", "outofband", "azure", n, 0.0) for n in (52, 56)]
    found += [Case("in-band", "LeaseWithBurst", "inband", "azure", 56, mix) for mix in mixes]
    found += [Case("out-of-band", "Lease", "outofband", "azure", 56, mix) for mix in mixes]
    found += [Case("static", "Static", "inband", "azure", 56, mix) for mix in mixes]
    found += [Case("servegen", "LeaseWithBurst", "inband", f"servegen:{day}", 60, 0.0) for day in (2, 9)]
    found += [
        Case("out-of-band", "Lease", "outofband", "azure", n, mix) for n in (60, 52, 48) for mix in mixes
    ]
    found += [Case("yardstick", "TwoThreshold", "outofband", "azure", 56, mix) for mix in mixes[1:]]
    found += [Case("static", "Static", "inband", "azure", n, mix) for n in (48, 52, 60) for mix in mixes]
    found += [
        Case("in-band", "LeaseWithBurst", "inband", "azure", n, mix) for n in (48, 52, 60) for mix in mixes
    ]
    return found


def bars(case: Case) -> list[Bar]:
    """What the row must reach. Latencies are ratios to the same row without limits."""
    if case.part == "out-of-band":
        found = [Bar("over_s", 0)]
        if case.servers == 56:
            high = {0.0: 1.06, 0.25: 1.06, 0.5: 1.09, 0.75: 1.12}[case.mix]
            found += [Bar("high_p99", high), Bar("low_p99", 1.27)]
        return found
    if case.part == "in-band" and case.servers == 56:
        found = [
            Bar("over_1_percent_run_s", 1),
            Bar("over_10s", 0),
            Bar("high_p50", 1.015),
            Bar("high_p99", 1.025),
            Bar("low_p99", 1.26),
            Bar("high_first_p99", 1.05),
        ]
        if case.mix:
            found.append(Bar("training_speed", {0.25: 0.88, 0.5: 0.86, 0.75: 0.82}[case.mix], most=False))
        else:
            found += [Bar("joules_per_token", 0.97), Bar("served_within", 1.38, most=False)]
        if case.mix >= 0.5:
            found.append(Bar("training_work", {0.5: 1.19, 0.75: 1.14}[case.mix], most=False))
        return found
    if case.part == "servegen":
        return [Bar("over_10s", 0), Bar("high_p99", 1.05), Bar("low_p99", 1.16)]
    return []


class Runs:
    """Makes requests and unlimited twins once, and follows all cases."""

    def __init__(self, data: Path, minutes: int, day_minutes: int, seeds: tuple[int, ...]) -> None:
        self.data, self.seeds = data, seeds
        self.seconds: Callable[[str], int] = lambda load: (
            60 * (day_minutes if load.startswith("servegen") else minutes)
        )
        self._twins: dict[tuple[str, int, float, int], tuple[Requests, Outcome]] = {}

    def twin(self, load: str, servers: int, mix: float, seed: int) -> tuple[Requests, Outcome]:
        """The requests and what becomes of them without limits."""
        key = (load, servers, mix, seed)
        if key not in self._twins:
            places, seconds = layout(servers, mix), self.seconds(load)
            requests = load_maker(load, self.data)(places.serving, seconds, seed)
            outcome = run(places, MODEL, requests, Unlimited(places, MODEL), seconds, seed)
            self._twins[key] = requests, outcome
        return self._twins[key]

    def measure(self, case: Case) -> Row:
        """All seeds of a case, and the worst of them beside its bars."""
        begin = time.process_time()
        found = [self._one(case, seed) for seed in self.seeds]
        checks = [_check(bar, [one[bar.figure] for one in found]) for bar in bars(case)]
        return {
            **asdict(case),
            "seeds": dict(zip(map(str, self.seeds), found, strict=True)),
            "bars": checks,
            "cpu_s": round(time.process_time() - begin, 1),
        }

    def _one(self, case: Case, seed: int) -> Row:
        places, seconds = layout(case.servers, case.mix), self.seconds(case.load)
        requests, twin = self.twin(case.load, case.servers, case.mix, seed)
        if case.law == "TwoThreshold":
            yardstick = TwoThreshold(places, MODEL, BUDGET_W)
            ours = run(places, MODEL, requests, yardstick, seconds, seed)
            more: Row = {"brakes": yardstick.brakes}
        else:
            law = LeaseLaw(places, MODEL, BUDGET_W, PowerPolicy(case.law), DELAYS[case.delay])
            ours = run(places, MODEL, requests, law, seconds, seed)
            more = {}
        measured = figures(ours, twin, requests, BUDGET_W, seconds)
        return {
            **{key: _short(value) for key, value in asdict(measured).items()},
            **more,
            **self._per_feed_watt(case, measured),
        }

    def _per_feed_watt(self, case: Case, measured: Figures) -> Row:
        """Work on this feed over that of 40 servers without limits on it."""
        more = case.servers / 40
        found: Row = {}
        if measured.training_speed is not None:
            trains = layout(case.servers, case.mix).training / layout(40, case.mix).training
            found["training_work"] = _short(trains * measured.training_speed)
        if measured.within_5_percent is not None:
            # Of the twin's requests 99 % are within its 99th percentile, so 0.99 is all of them.
            found["served_within"] = _short(more * min(measured.within_5_percent / 0.99, 1.0))
        return found


def _check(bar: Bar, values: list[float]) -> Row:
    worst = max(values) if bar.most else min(values)
    held = worst <= bar.limit if bar.most else worst >= bar.limit
    ratio = worst / bar.limit if bar.limit else None
    return {
        "figure": bar.figure,
        "bar": bar.limit,
        "worst": _short(worst),
        "ratio": _short(ratio),
        "held": bool(held),
    }


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def gate(rows: list[Row], peak_percent: float) -> list[str]:
    """What the yardstick must give before anything is compared; each line says whether it does."""

    def line(what: str, value: float, holds: bool) -> str:
        return f"{'holds' if holds else 'DEVIATES'}: {what} (measured {value:g})"

    found = [
        line("40 serving servers peak at 79 % +- 2 of the feed", peak_percent, abs(peak_percent - 79) <= 2)
    ]
    for row in rows:
        if row["law"] != "TwoThreshold" or row["mix"]:
            continue
        seeds = list(row["seeds"].values())
        worst = {key: max(one[key] for one in seeds) for key in ("brakes", "high_p50", "high_p99")}
        if row["servers"] == 52:
            found += [
                line("yardstick, 52 servers: no brakes", worst["brakes"], worst["brakes"] == 0),
                line("yardstick, 52: HP p50 below +1 %", worst["high_p50"], worst["high_p50"] < 1.01),
                line("yardstick, 52: HP p99 below +5 %", worst["high_p99"], worst["high_p99"] < 1.05),
            ]
        else:
            least = min(one["brakes"] for one in seeds)
            found.append(line("yardstick, 56 servers: brakes", least, least > 0))
    return found


def static_beaten(rows: list[Row]) -> list[str]:
    """Ours beside equal static caps: high-priority p99 and training speed, in the worst seed."""
    found = []
    static = {(row["servers"], row["mix"]): row for row in rows if row["part"] == "static"}
    for row in rows:
        other = static.get((row["servers"], row["mix"]))
        if row["part"] != "in-band" or other is None:
            continue
        text = []
        for key, most in (("high_p99", True), ("training_speed", False)):
            mine, theirs = (
                [one[key] for one in it["seeds"].values() if one[key] is not None] for it in (row, other)
            )
            if mine:
                ours, equal = (max(mine), max(theirs)) if most else (min(mine), min(theirs))
                better = ours < equal if most else ours > equal
                text.append(f"{key} {ours:.3f} against {equal:.3f} {'better' if better else 'WORSE'}")
        found.append(f"{row['servers']} servers, {100 * row['mix']:.0f} % training: {', '.join(text)}")
    return found


def table(result: Row) -> str:
    """The result for people."""
    lines = [result["command"], f"{result['date']}, {result['versions']}", result["scope"], ""]
    lines += [*result["gate"], ""]
    head = ["law", "delay", "load", "servers", "train", "over_s", "over_10s", "worst_%", "brakes"]
    head += ["HP_p50", "HP_p99", "HP_ttft", "LP_p50", "LP_p99", "speed", "J/tok"]
    form = "{:14} {:9} {:10} {:>7} {:>5} {:>6} {:>8} {:>7} {:>6} " + "{:>7} " * 7
    lines.append(form.format(*head).rstrip())
    for row in result["rows"]:
        for one in row["seeds"].values():
            cells = [row["law"], row["delay"], row["load"], row["servers"], row["mix"], one["over_s"]]
            cells += [one["over_10s"], f"{one['worst_percent']:.2f}", one.get("brakes", "-")]
            for key in ("high_p50", "high_p99", "high_first_p99", "low_p50", "low_p99", "training_speed"):
                cells.append("-" if one[key] is None else f"{one[key]:.3f}")
            cells.append(f"{one['joules_per_token']:.3f}")
            lines.append(form.format(*cells).rstrip())
    lines += ["", "Bars, in the worst seed:"]
    for row in result["rows"]:
        for check in row["bars"]:
            ratio = "" if check["held"] or check["ratio"] is None else f", {check['ratio']:.3f} of the bar"
            state = "held  " if check["held"] else "MISSED"
            where = f"{row['law']} {row['delay']} {row['load']} {row['servers']} {row['mix']}"
            lines.append(
                f"{state} {where:42} {check['figure']:22} {check['worst']} (bar {check['bar']}{ratio})"
            )
    lines += ["", "In-band leases beside equal static caps:", *result["static"]]
    dates: dict[str, set[str]] = {}
    for row in result["rows"]:
        dates.setdefault(row["part"], set()).add(row["date"])
    said = (f"{part} {' and '.join(sorted(own))}" for part, own in sorted(dates.items()))
    lines += ["", "Run on: " + ", ".join(said)]
    if result["missing"]:
        lines += ["", "Not run: " + "; ".join(result["missing"])]
    return "\n".join(lines) + "\n"


def _scope(minutes: int, day_minutes: int, seeds: str) -> str:
    return (
        f"Azure {minutes} min at the peak rate, ServeGen {day_minutes} min around the day's peak, seeds {seeds}; "
        "feed for 40 servers of 6.5 kW"
    )


def kept(file: Path, scope: str, part: str | None) -> list[Row]:
    """The rows that the file has, with their date, but those of `part`; none of another scope."""
    before: Row = json.loads(file.read_text()) if file.is_file() else {"scope": "", "rows": []}
    if before["scope"] != scope:
        return []
    return [{"date": before["date"], **row} for row in before["rows"] if row["part"] != part]


def _key(row: Row) -> str:
    return " ".join(str(row[name]) for name in ("law", "delay", "load", "servers", "mix"))


def _in_order(rows: list[Row]) -> list[Row]:
    places = {case.key: place for place, case in enumerate(cases())}
    return sorted(rows, key=lambda row: places[_key(row)])


def main() -> None:
    """Run the cases and write the results after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minutes", type=int, default=120)
    parser.add_argument("--day-minutes", type=int, default=720)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", help="a part: yardstick, in-band, out-of-band, static, servegen")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the rows of the output's file: with --only those of the other parts, without it all, and run the missing ones",
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "power")
    given = parser.parse_args()
    seeds = tuple(int(seed) for seed in given.seeds.split(","))
    runs = Runs(given.data, given.minutes, given.day_minutes, seeds)
    scope = _scope(given.minutes, given.day_minutes, given.seeds)
    others = kept(given.output.with_suffix(".json"), scope, given.only) if given.keep else []
    have = {_key(row) for row in others}
    chosen = [case for case in cases() if given.only in (None, case.part) and case.key not in have]
    wanted = cases() if others else chosen
    peak = max(float(runs.twin("azure", 40, 0.0, seed)[1].feed_w.max()) for seed in seeds)
    rows: list[Row] = []
    for case in chosen:
        rows.append({**runs.measure(case), "date": datetime.now(UTC).date().isoformat()})
        every = _in_order([*others, *rows])
        result = {
            "command": "python benchmarks/power/run.py --data DATA "
            f"--minutes {given.minutes} --day-minutes {given.day_minutes} --seeds {given.seeds}"
            + (f" --only {given.only}" if given.only and not others else "")
            + (f" --output {given.output}" if given.output != RESULTS / "power" else ""),
            "date": datetime.now(UTC).date().isoformat(),
            "versions": f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, "
            f"{os.cpu_count()} cores",
            "scope": scope,
            "gate": gate(every, _short(100 * peak / BUDGET_W)),
            "static": static_beaten(every),
            "missing": [case.key for case in wanted if case.key not in {_key(row) for row in every}],
            "rows": every,
        }
        given.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        given.output.with_suffix(".txt").write_text(table(result))
        print(
            f"{len(rows)}/{len(chosen)} {case.key}: {rows[-1]['cpu_s']} s of CPU", file=sys.stderr, flush=True
        )
    print(given.output.with_suffix(".txt").read_text())


if __name__ == "__main__":
    main()
