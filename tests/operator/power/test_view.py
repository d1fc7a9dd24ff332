"""What others are told of a feed."""

from __future__ import annotations

from tests.operator.power.parts import domain, node

from busbar.operator.power.membership import membership
from busbar.operator.power.view import picture


def test_feeds_say_what_a_watt_hour_costs_in_work_where_they_hold_jobs_back() -> None:
    found = membership([domain("row", 1000.0), domain("open", 1000.0)], [node("a")])
    told = picture(found, {}, {}, 0.0, 3.0, {}, {}, {"row": 0.00123456}, {})
    assert {feed.name: feed.work_per_kilowatt_hour for feed in told.feeds} == {"row": 1.2346, "open": None}
