"""The test tiers: the tests of each, its time budget, and one table at the end.

``make test`` runs all of them in the order below, and side by side those that need one core each; ``make test-unit`` and
its siblings run one.  A tier is a selection of pytest markers, so a new test belongs to a tier by its marker alone.  To look
at all 11,000 tests takes 40 s, so a tier looks only where its tests are; a test that is elsewhere fails the collection
(`tests/conftest.py`).
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
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = str(ROOT / ".venv" / "bin" / "python")
CORES = 2
"""Of the smallest machine that runs them."""
SUMMARY = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed|xpassed)")
HEADING = re.compile(r"_+ (?:ERROR at \w+ of )?(\S+) _+$")
"""Of the report of one test, with its class and name."""
PLACE = re.compile(r"\S+\.py:\d+: ")
FAILED = re.compile(r"(?:FAILED|ERROR) (\S+)")
"""What pytest repeats of a failed test at the end."""
LINES_OF_A_FAILURE = 12


@dataclass(frozen=True)
class Tier:
    """One tier: ``prepare`` commands, then pytest with ``marker`` in the folders ``where``; ``budget_min`` in minutes.

    Tests that have the marker ``without`` too belong to the tier of that one. ``without_folders`` have no test of the tier.

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
    without_folders: tuple[str, ...] = ()
    alone: bool = False
    """Nothing runs beside it."""

    @property
    def cores(self) -> int:
        return CORES if self.alone else min(self.workers, CORES)

    def looks_in(self, folder: Path) -> bool:
        """Whether it finds the tests of a folder, which is relative to the root."""
        return any(folder.is_relative_to(place) for place in self.where) and not any(
            folder.is_relative_to(place) for place in self.without_folders
        )

    @property
    def selection(self) -> str:
        """What pytest selects by."""
        return f"{self.marker} and not {self.without}" if self.without else self.marker


UNIT_MARKER = "not apiserver and not node and not browser and not postgres and not engine"
UNIT = Tier("unit", 1, UNIT_MARKER, workers=2, without_folders=("tests/e2e", "tests/training"))
"""Of the tests without a marker."""
TIERS = (
    Tier(
        "setup",
        20,
        prepare=(
            ("python3", "tools/bootstrap.py", "--test"),
            (PYTHON, "-m", "busbar.cli.main", "up", "--build-only"),
        ),
        alone=True,
    ),
    Tier("check", 2, prepare=(("make", "--no-print-directory", "check"),)),
    UNIT,
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
    Tier("e2e", 12, "node", ("tests/e2e", "tests/local"), names=True, alone=True),
)


@dataclass
class Outcome:
    """The result of one tier."""

    tier: Tier
    seconds: float = 0.0
    ok: bool = True
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    """Lines: each failed test with its message, and where it was raised."""


Say = Callable[[str], None]
"""Prints a line."""


def say_of(tier: Tier, among: Sequence[Tier]) -> Say:
    """For a tier's lines, which have its name in front where others may run beside it."""
    name = f"{tier.name:<10} " if len(among) > 1 else ""
    return lambda line: print(f"{name}{line}\n", end="", flush=True)  # in one write, or lines would mix


class Failures:
    """Takes pytest's output line by line, and keeps what says of each failed test why and where.

    The output of ten thousand tests is long, and of a run elsewhere often only its end is kept.
    """

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}  # by test: the frames of its traceback
        self._reading = ""
        self._found: list[tuple[str, list[str]]] = []
        self._at_the_end = False

    def take(self, line: str) -> None:
        """The next line."""
        if line.startswith("=====") or _sums_up(line):
            self._at_the_end = "short test summary" in line
            self._reading = ""
        elif self._at_the_end and (name := FAILED.match(line)):
            self._found.append((name[1], [line]))
        elif self._at_the_end and self._found:
            self._found[-1][1].append(line)
        elif heading := HEADING.match(line):
            self._reading = heading[1]
        elif self._reading and (place := PLACE.match(line)):
            self._places.setdefault(self._reading, []).append(place[0].strip(": "))

    def lines(self) -> list[str]:
        """All failures, each in at most `LINES_OF_A_FAILURE` lines and one with the first and last frame."""
        said = []
        for test, message in self._found:
            said += message[:LINES_OF_A_FAILURE]
            name = test.partition("::")[2].replace("::", ".")
            if places := self._places.get(name):
                said.append(f"  at {' ... '.join(dict.fromkeys((places[0], places[-1])))}")
        return said


def _sums_up(line: str) -> bool:
    return SUMMARY.match(line.lstrip("= ")) is not None and re.search(r" in \d+\.\d+s", line) is not None


def run_told(command: Sequence[str], say: Say, failures: Failures | None = None) -> tuple[int, str]:
    """Run a command and pass its output on, line by line; its exit code, and the last line that sums up tests."""
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip("\n"))
            if failures:
                failures.take(line.rstrip("\n"))
            if _sums_up(line):
                last = line
    return process.returncode, last


def run_pytest(tier: Tier, outcome: Outcome, say: Say) -> bool:
    """Run the tier's tests; true when all passed and at least one ran."""
    command = [
        PYTHON,
        "-m",
        "pytest",
        *tier.where,
        *(f"--ignore={folder}" for folder in tier.without_folders),
        "-m",
        tier.selection,
        "--durations=5",
        "-v" if tier.names else "-q",
        "--color=no",
    ]
    if tier.workers > 1:
        command += ["-n", str(tier.workers), "--dist", "loadfile"]
        command += ["--no-loadscope-reorder"] if tier.listed else []
    failures = Failures()
    code, last = run_told(command, say, failures)
    outcome.failures = failures.lines()
    for number, word in SUMMARY.findall(last):
        outcome.counts[word.rstrip("s") if word == "errors" else word] = int(number)
    return code == 0 and outcome.counts.get("passed", 0) > 0


def run_tier(tier: Tier, say: Say) -> Outcome:
    """Run one tier and time it."""
    print(f"\n=== tier {tier.name} (budget {tier.budget_min:g} min) ===", flush=True)
    outcome = Outcome(tier)
    started = time.monotonic()
    outcome.ok = all(run_told(command, say)[0] == 0 for command in tier.prepare)
    if outcome.ok and tier.marker:
        outcome.ok = run_pytest(tier, outcome, say)
    outcome.seconds = time.monotonic() - started
    return outcome


def run_tiers(chosen: Sequence[Tier]) -> list[Outcome]:
    """Run the tiers in their order, but each as soon as those that run leave it its cores.

    Nothing runs after a set-up that failed.
    """
    waiting, outcomes = list(chosen), list[Outcome]()
    running: dict[Future[Outcome], Tier] = {}
    with ThreadPoolExecutor(CORES) as threads:
        while waiting or running:
            free = CORES - sum(tier.cores for tier in running.values())
            if fits := next((tier for tier in waiting if tier.cores <= free), None):
                waiting.remove(fits)
                running[threads.submit(run_tier, fits, say_of(fits, chosen))] = fits
                continue
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                del running[done]
                outcomes.append(done.result())
                if done.result().tier.name == "setup" and not done.result().ok:
                    waiting.clear()
    return sorted(outcomes, key=lambda outcome: chosen.index(outcome.tier))


def report(outcomes: list[Outcome], seconds: float) -> None:
    """Print the failures, the table of tiers, and totals, which are no sums: tiers that ran side by side took less in all."""
    if failures := [line for outcome in outcomes for line in outcome.failures]:
        print("\nfailed tests", *failures, sep="\n")
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
    print(f"total      {seconds / 60:.1f} min of 60; {broken} tier(s) failed")
    print(f"{passed} passed, {failed} failed", flush=True)


def main() -> int:
    """Entry point; 0 when every tier passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("tier", nargs="*", choices=[[], *(t.name for t in TIERS)], help="tiers to run")
    names = parser.parse_args().tier or [t.name for t in TIERS]
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a new process would compile torch and the rest again
    started = time.monotonic()
    outcomes = run_tiers([tier for tier in TIERS if tier.name in names])
    report(outcomes, time.monotonic() - started)
    return 0 if all(o.ok for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
