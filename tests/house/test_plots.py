"""What is drawn of the control plane's kept results says the same as their figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.control import plots

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks" / "results" / "control_queues.json"
ROWS: list[dict[str, Any]] = json.loads(KEPT.read_text())["rows"]

HALF_OF_THE_LAST_DIGIT = 0.005 + 1e-9
"""Figures of a row are rounded; sums of floating-point numbers are, too."""


@pytest.mark.parametrize("row", ROWS, ids=[row["row"] for row in ROWS])
def test_bars_are_as_long_as_the_figures_of_the_row(row: dict[str, Any]) -> None:
    (made,) = plots.writes([row])
    assert sum(made.values()) == pytest.approx(row["writes_per_pod"], abs=HALF_OF_THE_LAST_DIGIT)
    assert plots.cpu(row)["operator"] == pytest.approx(row["cpu_ms_per_pod"], rel=0.02, abs=0.01)
    assert plots.memory(row).get("operator") == row.get("operator_peak_mib")


def test_kinds_that_are_few_in_every_row_are_drawn_as_one() -> None:
    common = {"jobs": 10, "pods": 10, "ended": {}, "kwok_repeats": 0}
    few = {**common, "writes": {"pods": 99, "secrets": 1, "pods/status": 0, "events": 500}}
    many = {**common, "writes": {"pods": 90, "tenants/status": 10, "secrets": 1, "pods/status": 0}}
    assert plots.writes([few, many]) == [
        {"pods": 9.9, plots.OTHERS: 0.1},
        {"pods": 9.0, "tenants/status": 1.0, plots.OTHERS: 0.1},
    ]


def test_a_kept_result_is_drawn_and_another_file_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some, file = tmp_path / "some.json", tmp_path / "use.svg"
    some.write_text(json.dumps({"rows": ROWS[:2]}))
    monkeypatch.setattr(sys, "argv", ["plots.py", str(some), str(file)])
    plots.main()
    assert "<svg" in file.read_text()
    monkeypatch.setattr(sys, "argv", ["plots.py", str(KEPT.with_name("soak.json")), str(file)])
    with pytest.raises(SystemExit):
        plots.main()
    assert "soak.json is no result of queues.py" in capsys.readouterr().err
