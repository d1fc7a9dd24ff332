"""`make test`: which tier a test belongs to, and what the processes of the tests are given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools import tiers
from tools.tiers import TIERS, Tier


def test_a_test_of_two_markers_runs_in_one_tier() -> None:
    selections = {tier.name: tier.selection for tier in TIERS}
    assert selections["apiserver"] == "apiserver and not postgres"
    assert selections["postgres"] == "postgres"


def test_each_tier_looks_where_its_tests_are() -> None:
    tiers = {tier.name: tier for tier in TIERS}
    assert tiers["unit"].looks_in(Path("tests/kube"))
    assert not tiers["unit"].looks_in(Path("tests/training"))
    assert tiers["engines"].looks_in(Path("tests/training"))
    assert not tiers["engines"].looks_in(Path("tests/kube"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`main` with other tiers, all of them."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # put back afterwards, as the other

    def run(*given: Tier) -> int:
        monkeypatch.setattr(tiers, "TIERS", given)
        monkeypatch.setattr(sys, "argv", ["tiers.py", *(tier.name for tier in given)])
        return tiers.main()

    return run


def program(name: str, text: str, **more: Any) -> Tier:
    return Tier(name, 1, prepare=((sys.executable, "-S", "-c", text),), **more)


def test_the_processes_of_the_tests_keep_compiled_modules(run: Callable[..., int]) -> None:
    assert run(program("main", "import sys; raise SystemExit(sys.dont_write_bytecode)")) == 0


NOTED = """
import sys, time
log, needs = open({log!r}, "a"), {needs!r}
print("begin {name}", file=log, flush=True)
end = time.monotonic() + 60
while not set(needs) <= set(open({log!r}).read().splitlines()):
    if time.monotonic() > end: sys.exit("nobody came")
    time.sleep(0.01)
print("end {name}", file=log, flush=True)
print("said by {name}")
"""


def test_tiers_of_one_core_run_side_by_side_and_others_alone(
    run: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"

    def noted(name: str, *needs: str, **more: Any) -> Tier:
        return program(name, NOTED.format(log=str(log), name=name, needs=needs), **more)

    order = (
        noted("first", alone=True),
        noted("one", "begin two"),
        noted("both", "end one", "end two", workers=2),
        noted("two", "begin one"),
    )
    assert run(*order) == 0
    lines = log.read_text().splitlines()
    assert lines[:2] == ["begin first", "end first"]
    assert set(lines[2:4]) == {"begin one", "begin two"}
    assert lines[-2:] == ["begin both", "end both"]
    said = capfd.readouterr().out.splitlines()
    assert {f"{name:<10} said by {name}" for name in ("first", "one", "both", "two")} <= set(said)
    table = said[said.index(next(line for line in said if line.startswith("tier "))) + 1 :]
    assert [line.split()[:2] for line in table[:4]] == [[tier.name, "ok"] for tier in order]


def test_nothing_runs_after_a_set_up_that_failed(run: Callable[..., int], tmp_path: Path) -> None:
    def tier(name: str, code: int) -> Tier:
        text = f"open({str(tmp_path / name)!r}, 'w'); raise SystemExit({code})"
        return program(name, text, alone=name == "setup")

    assert run(tier("setup", 1), tier("after", 0)) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["setup"]
    assert run(tier("setup", 0), tier("fails", 1), tier("goes-on", 0)) == 1
    assert {each.name for each in tmp_path.iterdir()} == {"setup", "fails", "goes-on"}


FAILING = """
import pytest
@pytest.mark.parametrize("rate", [0.5])
def test_rates(rate):
    assert rate == 1, "the rate"
class TestMore:
    @pytest.fixture
    def broken(self):
        raise OSError("no room")
    def test_passes(self): pass
    def test_setup(self, broken): pass
"""


def test_failed_tests_are_named_again_above_the_table(
    run: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tiers, "PYTHON", sys.executable)
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    monkeypatch.setenv("CI", "1")  # pytest gives whole messages then, of more than a terminal's width
    (tmp_path / "test_failing.py").write_text(FAILING)
    assert run(Tier("unit", 1, "not engine", ("test_failing.py",))) == 1
    said = capfd.readouterr().out
    told, _, table = said.partition("\nfailed tests\n")[2].partition("\ntier ")
    assert [line for line in told.splitlines() if line] == [
        "FAILED test_failing.py::test_rates[0.5] - AssertionError: the rate",
        "assert 0.5 == 1",
        "  at test_failing.py:5",
        "ERROR test_failing.py::TestMore::test_setup - OSError: no room",
        "  at test_failing.py:9",
    ]
    assert "1 failed, 1 passed, 1 error" in table
