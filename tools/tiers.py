"""The test tiers: the tests of each, its time budget, and one table at the end.

``make test`` runs all of them in the order below; ``make test-unit`` and its siblings run one.  A tier is a
selection of pytest markers, so a new test belongs to a tier by its marker alone.  To look at all 11,000 tests takes 40 s,
so a tier of few looks in its own folders only; a test with its marker elsewhere fails the collection (`tests/conftest.py`).
Budgets are those of the project (60 minutes in all, 7 of them in reserve): a tier that overruns its budget is *reported*, not
failed, because a slow machine is not a defect; a failing or (on CI) skipped test fails the run.

Usage: ``python tools/tiers.py [TIER ...]``; no tier means all.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = str(ROOT / ".venv" / "bin" / "python")
SUMMARY = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed|xpassed)")


@dataclass(frozen=True)
class Tier:
    """One tier: ``prepare`` commands, then pytest with ``marker`` in the folders ``where``; ``budget_min`` in minutes.

    Tests that have the marker ``without`` too belong to the tier of that one.

    ``workers`` processes run a tier whose tests are independent, file by file: those with the most tests first, or, where
    files of few tests are the long ones, in ``listed`` order. ``names`` prints each test as it ends, for tests that take
    minutes.
    """

    name: str
    budget_min: float
    marker: str = ""
    where: tuple[str, ...] = ("tests",)
    workers: int = 1
    listed: bool = False
    names: bool = False
    prepare: tuple[tuple[str, ...], ...] = ()
    without: str = ""

    @property
    def selection(self) -> str:
        """What pytest selects by."""
        return f"{self.marker} and not {self.without}" if self.without else self.marker


UNIT_MARKER = "not apiserver and not node and not browser and not postgres and not engine"
TIERS = (
    Tier(
        "setup",
        20,
        prepare=(
            ("python3", "tools/bootstrap.py", "--test"),
            (PYTHON, "-m", "busbar.cli.main", "up", "--build-only"),
        ),
    ),
    Tier("check", 2, prepare=(("make", "--no-print-directory", "check"),)),
    Tier("unit", 1, UNIT_MARKER, workers=2),
    Tier(
        "apiserver",
        6,
        "apiserver",
        ("tests/api", "tests/charts", "tests/cluster"),
        workers=2,
        listed=True,
        without="postgres",
    ),
    Tier("engines", 8, "engine", ("tests/gateway", "tests/serving", "tests/training"), workers=2),
    Tier("portal", 4, "browser", ("tests/portal",), names=True),
    Tier("postgres", 2, "postgres", ("tests/api", "tests/gateway")),
    Tier("e2e", 12, "node", ("tests/e2e", "tests/local"), names=True),
)


@dataclass
class Outcome:
    """The result of one tier."""

    tier: Tier
    seconds: float = 0.0
    ok: bool = True
    counts: dict[str, int] = field(default_factory=dict)


def run_pytest(tier: Tier, outcome: Outcome) -> bool:
    """Run the tier's tests, passing their output through; true when all passed and at least one ran."""
    command = [
        PYTHON,
        "-m",
        "pytest",
        *tier.where,
        "-m",
        tier.selection,
        "--durations=5",
        "-v" if tier.names else "-q",
        "--color=no",
    ]
    if tier.workers > 1:
        command += ["-n", str(tier.workers), "--dist", "loadfile"]
        command += ["--no-loadscope-reorder"] if tier.listed else []
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace")
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        if " in " in line and SUMMARY.search(line):
            last = line
    code = process.wait()
    for number, word in SUMMARY.findall(last):
        outcome.counts[word.rstrip("s") if word == "errors" else word] = int(number)
    return code == 0 and outcome.counts.get("passed", 0) > 0


def run_tier(tier: Tier) -> Outcome:
    """Run one tier and time it."""
    print(f"\n=== tier {tier.name} (budget {tier.budget_min:g} min) ===", flush=True)
    outcome = Outcome(tier)
    started = time.monotonic()
    for command in tier.prepare:
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            outcome.ok = False
            break
    if outcome.ok and tier.marker:
        outcome.ok = run_pytest(tier, outcome)
    outcome.seconds = time.monotonic() - started
    return outcome


def report(outcomes: list[Outcome]) -> None:
    """Print the table of tiers, and the totals on a line of their own."""
    print(f"\n{'tier':<10} {'result':<7} {'time':>8} {'budget':>8}  tests")
    for outcome in outcomes:
        minutes = outcome.seconds / 60
        over = "  OVER BUDGET" if minutes > outcome.tier.budget_min else ""
        tests = ", ".join(f"{n} {word}" for word, n in outcome.counts.items()) or "-"
        result = "ok" if outcome.ok else "FAILED"
        print(
            f"{outcome.tier.name:<10} {result:<7} {minutes:>6.1f} m {outcome.tier.budget_min:>6g} m  {tests}{over}"
        )
    passed = sum(o.counts.get("passed", 0) for o in outcomes)
    failed = sum(o.counts.get("failed", 0) + o.counts.get("error", 0) for o in outcomes)
    broken = sum(not o.ok for o in outcomes)
    print(f"total      {sum(o.seconds for o in outcomes) / 60:.1f} min of 60; {broken} tier(s) failed")
    print(f"{passed} passed, {failed} failed", flush=True)


def main() -> int:
    """Entry point; 0 when every tier passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("tier", nargs="*", choices=[[], *(t.name for t in TIERS)], help="tiers to run")
    names = parser.parse_args().tier or [t.name for t in TIERS]
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a new process would compile torch and the rest again
    outcomes: list[Outcome] = []
    for tier in TIERS:
        if tier.name not in names:
            continue
        outcomes.append(run_tier(tier))
        if tier.name == "setup" and not outcomes[-1].ok:
            break
    report(outcomes)
    return 0 if all(o.ok for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
