"""The dashboards of the chart: their expressions read only series that our processes export, with labels that they have."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.charts.exported import exported
from tests.charts.promql import parse
from tests.charts.rendering import CHARTS

from busbar.gateway.metrics import Metrics as GatewayMetrics

DASHBOARDS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text())
    for file in sorted((CHARTS / "busbar" / "dashboards").glob("*.json"))
}
PANELS = [(name, panel) for name, found in DASHBOARDS.items() for panel in found["panels"]]
WIDTH = 24
VARIABLES = {"services": ["namespace", "service"], "power": ["domain"], "energy": ["tenant"]}


@pytest.fixture(params=PANELS, ids=[f"{name}: {panel['title']}" for name, panel in PANELS])
def panel(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param[1]
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


@pytest.mark.parametrize("name_of_dashboard", DASHBOARDS)
def test_the_variables_are_labels_of_what_they_are_read_from_and_are_all_used(name_of_dashboard: str) -> None:
    dashboard = DASHBOARDS[name_of_dashboard]
    said = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(said) == ["datasource", *VARIABLES[name_of_dashboard]]
    for name in VARIABLES[name_of_dashboard]:
        query = re.fullmatch(r"label_values\((\w+)(\{.*\})?, (\w+)\)", said[name]["query"]["query"])
        assert query is not None
        assert query[3] == name
        assert name in exported()[query[1]]
    text = json.dumps(dashboard["panels"])
    used = set(re.findall(r"\$\{?(\w+)", text))
    assert used == set(said), "Grafana leaves a variable that it does not know as it is"


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_panels_say_what_they_show_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    taken: set[tuple[int, int]] = set()
    for one in panels:
        assert one["description"].endswith(".")
        assert one["fieldConfig"]["defaults"]["unit"]
        at = one["gridPos"]
        assert at["x"] + at["w"] <= WIDTH
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, one["title"]
        taken |= cells
    assert len({one["id"] for one in panels}) == len(panels)


def test_each_dashboard_has_a_name_of_its_own() -> None:
    assert len({found["uid"] for found in DASHBOARDS.values()}) == len(DASHBOARDS) == len(VARIABLES)
