"""The dashboard of the chart: its expressions read only series that our processes export, with labels that they have."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.charts.exported import exported
from tests.charts.promql import parse
from tests.charts.rendering import CHARTS

from busbar.gateway.metrics import Metrics as GatewayMetrics

DASHBOARD: dict[str, Any] = json.loads((CHARTS / "busbar" / "dashboards" / "services.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
WIDTH = 24
SERVICE = {"$namespace": "namespace", "$service": "service"}


@pytest.fixture(params=PANELS, ids=[panel["title"] for panel in PANELS])
def panel(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def test_a_panel_reads_only_what_the_code_exports_and_shows_only_labels_that_are_left(
    panel: dict[str, Any],
) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        read = parse(target["expr"])
        assert read.metrics
        assert read.metrics - exported().keys() == set()
        assert {(name, label) for name, label in read.matched if label not in exported()[name]} == set()
        there = {label for name in read.metrics for label in exported()[name]}
        if read.kept:
            assert read.kept - there == set(), "an aggregation keeps a label that no series has"
        shown = set(re.findall(r"\{\{ *(\w+) *\}\}", target["legendFormat"]))
        assert shown - (there if read.kept is None else read.kept) == set()


def test_no_panel_reads_what_the_gateway_shows_to_named_callers_alone(panel: dict[str, Any]) -> None:
    named = {family.name for family in GatewayMetrics().per_service.collect()}
    for target in panel["targets"]:
        read = {re.sub(r"_total$", "", name) for name in parse(target["expr"]).metrics}
        assert read & named == set()


def test_the_variables_are_labels_of_what_they_are_read_from_and_are_all_used() -> None:
    said = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(said) == ["datasource", "namespace", "service"]
    for name in ("namespace", "service"):
        query = re.fullmatch(r"label_values\((\w+)(\{.*\})?, (\w+)\)", said[name]["query"]["query"])
        assert query is not None
        assert query[3] == name
        assert name in exported()[query[1]]
    text = json.dumps(PANELS)
    used = set(re.findall(r"\$\{?(\w+)", text))
    assert used == set(said), "Grafana leaves a variable that it does not know as it is"


def test_panels_say_what_they_show_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for one in PANELS:
        assert one["description"].endswith(".")
        assert one["fieldConfig"]["defaults"]["unit"]
        at = one["gridPos"]
        assert at["x"] + at["w"] <= WIDTH
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, one["title"]
        taken |= cells
    assert len({one["id"] for one in PANELS}) == len(PANELS)
