"""The alerts of the chart: they read only metrics that our processes export, and each has its runbook."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from tests.charts.exported import exported, families
from tests.charts.promql import parse
from tests.charts.rendering import CHARTS, ROOT

ALERTS: list[dict[str, Any]] = yaml.safe_load((CHARTS / "busbar" / "alerts.yaml").read_text())
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()
SECTIONS = dict(re.findall(r"^## (Busbar\w+)\n(.*?)(?=^## |\Z)", RUNBOOKS, re.MULTILINE | re.DOTALL))
PARTS = ("Meaning.", "See it.", "Causes, most likely first.", "Do.", "Over when")
TARGET_LABELS = {"pod", "namespace"}
"""Those of ours that a PodMonitor adds to every series."""
PLACEHOLDER = re.compile(r"\{\{ *(.*?) *\}\}")


def names() -> list[str]:
    return [alert["alert"] for alert in ALERTS]


@pytest.fixture(params=ALERTS, ids=names())
def alert(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def test_the_registries_export_all_that_this_test_knows() -> None:
    known = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in exported()}
    assert known == families()


def test_an_alert_is_written_as_the_others(alert: dict[str, Any]) -> None:
    assert set(alert) - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert set(alert["labels"]) == {"severity"}
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "description"}
    assert alert["annotations"]["summary"].endswith(".")
    assert re.search(r"\d|\$value", alert["annotations"]["description"]), "it says no number"


def test_an_alert_reads_only_what_the_code_exports(alert: dict[str, Any]) -> None:
    read = parse(alert["expr"])
    assert read.metrics
    assert read.metrics - exported().keys() == set()
    assert {(name, label) for name, label in read.matched if label not in exported()[name]} == set()
    if read.kept:
        labels = {label for name in read.metrics for label in exported()[name]}
        assert read.kept - labels == set(), "an aggregation keeps a label that no series has"


def test_an_alert_says_only_labels_that_it_has(alert: dict[str, Any]) -> None:
    read = parse(alert["expr"])
    labels = read.kept
    if labels is None:
        labels = frozenset(TARGET_LABELS).union(*(exported()[name] for name in read.metrics))
    for text in alert["annotations"].values():
        for said in PLACEHOLDER.findall(text):
            what, _, shown = said.partition(" | ")
            assert shown in ("", "humanize", "humanizeDuration")
            assert what == "$value" or what.removeprefix("$labels.") in labels, said


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert names() == list(SECTIONS), "in the same order, too"


def test_a_runbook_says_what_is_needed_in_order(alert: dict[str, Any]) -> None:
    section = SECTIONS[alert["alert"]]
    at = [section.find(f"**{part}") for part in PARTS]
    assert -1 not in at, dict(zip(PARTS, at, strict=True))
    assert at == sorted(at)
    assert "```sh\nkubectl " in section, "it has no command"
    assert re.search(r"^1\. ", section[at[2] : at[3]], re.MULTILINE), "the causes are a numbered list"


def test_a_runbook_names_only_metrics_that_the_code_exports() -> None:
    said = set(re.findall(r"\bbusbar_[a-z_]+", RUNBOOKS))
    assert said - exported().keys() - {re.sub(r"_bucket$", "", name) for name in exported()} == set()


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("sum(a", "character"),
        ("rate(a) > 1", "rate takes"),
        ("rate(a[5m])[5m]", "a range of something else"),
        ("a[5m] > 1", "operator on a range"),
        ("absent(a[5m])", "absent takes"),
        ("histogram_quantile(a, b)", "histogram_quantile takes"),
        ("histogram_quantile(0.9, sum by (x) (rate(a[5m])))", "needs the label le"),
        ("sum(a) > 0 unless max by (b) (c) > 0", "never have the same labels"),
        ("a and 1", "on a scalar"),
        ("deriv(a[5m])", "character"),
        ('a{b="c}', "character"),
        ("a[5x]", "character"),
        ("a >> 1", "character"),
        ("", "character"),
    ],
)
def test_a_wrong_expression_is_refused(expression: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(expression)


def test_an_expression_is_read_whole() -> None:
    read = parse('sum by (b) (rate(a{b=~"x|y"}[5m])) * 2 > 1 or on () max_over_time((c + 1)[6h:5m]) == 0')
    assert read.metrics == {"a", "c"}
    assert read.matched == {("a", "b")}
    assert read.kept == frozenset({"b"})
