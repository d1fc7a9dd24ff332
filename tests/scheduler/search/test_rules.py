"""The rules of the search are data: the page that explains them shows the same table."""

from __future__ import annotations

from pathlib import Path

import pytest

from busbar.scheduler.search.rules import RIGHTS, RULES, Rule

PAGE = Path(__file__).parents[3] / "docs" / "scheduling-rules.md"


def _rows(heading: str) -> list[list[str]]:
    """The rows of the page's table that begins with this heading."""
    lines = PAGE.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(heading)) + 2
    rows = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def _columns(rule: Rule) -> list[str]:
    flags = (rule.ran, rule.planned, rule.guaranteed, rule.at_once)
    return [
        rule.name,
        rule.whose.value,
        *("yes" if flag else "no" for flag in flags),
        rule.displaced.value,
        "no" if rule.gains is None else "yes",
    ]


def test_the_page_shows_every_rule_as_it_is() -> None:
    assert _rows("| rule | whose |") == [_columns(rule) for rule in RULES]
    assert [row[0] for row in _rows("| rule | asks |")] == [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", RIGHTS, ids=lambda rule: rule.name)
def test_rights_are_carried_out_alike_so_that_they_are_searched_together(rule: Rule) -> None:
    assert (rule.displaced, rule.thorough, rule.at_once) == (
        RIGHTS[0].displaced,
        RIGHTS[0].thorough,
        RIGHTS[0].at_once,
    )
    assert rule.gains is None
    assert rule.cost is None, "the work that is repeated, so that the costs of all rights compare"
    assert rule.losses is None


def test_who_takes_what_is_guaranteed_leaves_a_place_as_good() -> None:
    assert [rule.name for rule in RULES if rule.guaranteed] == ["room"]
    assert all(rule.displaced.value == "must have a place as good" for rule in RULES if rule.guaranteed)
