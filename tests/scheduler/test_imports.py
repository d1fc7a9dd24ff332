"""`busbar.scheduler` loads its names when one is first used, and each of its modules can be the first that is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from busbar import scheduler

FIRST = """
import importlib, sys
for name in sys.argv[1:]:
    for known in [key for key in sys.modules if key.startswith("busbar")]:
        del sys.modules[known]
    importlib.import_module(name)
"""
MODULES = (
    "planner", "highs", "check", "exports", "simulate.engine", "autoscale.fleet", "search.state", "forecast.what_if",
    "fairness.quota", "candidates.candidates", "explain.service_room", "placement.cluster", "power", "fit",
)  # fmt: skip


def test_each_module_can_be_the_first() -> None:
    names = [f"busbar.scheduler.{name}" for name in MODULES]
    subprocess.run([sys.executable, "-c", FIRST, *names], check=True)


def test_a_name_that_there_is_not_is_no_attribute() -> None:
    assert scheduler.Snapshot().jobs == ()
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = scheduler.Nothing
