"""`make test`: which tier a test belongs to, and what the processes of the tests are given."""

from __future__ import annotations

import sys

import pytest
from tools import tiers
from tools.tiers import TIERS, Tier


def test_a_test_of_two_markers_runs_in_one_tier() -> None:
    selections = {tier.name: tier.selection for tier in TIERS}
    assert selections["apiserver"] == "apiserver and not postgres"
    assert selections["postgres"] == "postgres"


def test_the_processes_of_the_tests_keep_compiled_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # put back afterwards, as the other
    seen = "import sys; raise SystemExit(sys.dont_write_bytecode)"
    prepare = ((sys.executable, "-S", "-c", seen),)
    monkeypatch.setattr(tiers, "TIERS", (Tier("main", 1, prepare=prepare),))
    monkeypatch.setattr(sys, "argv", ["tiers.py", "main"])
    assert tiers.main() == 0
