"""What a PowerDomain's status says, and when it is written."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.operator.builders import NOW
from tests.operator.power.parts import domain, node, reading

from busbar.kube.contracts.power import LeaseState, LimitsReport
from busbar.kube.types import PowerDomain
from busbar.kube.types.power_domain import PowerDomainStatus
from busbar.kube.types.power_meter import PowerMeter, RedfishMeter
from busbar.kube.types.reasons import Reason
from busbar.operator.power.draw import Draw, Overrun, draw_of, watched
from busbar.operator.power.leasing import FeedLeases
from busbar.operator.power.membership import membership
from busbar.operator.power.meter_book import Hour, MeterBook
from busbar.operator.power.meters import Metered
from busbar.operator.power.metrics import PowerMetrics
from busbar.operator.power.preemption import FeedRelief
from busbar.operator.power.readings import Reading
from busbar.operator.power.reconcile import Seen, reconcile
from busbar.operator.power.view import picture

NODES = [node(f"n{i}", rack="a") for i in range(3)]


def look(
    of: PowerDomain, *readings: Reading, at_s: float = 1.0, overrun: Overrun | None = None, due: bool = True
) -> PowerDomainStatus | None:
    members = [n.name for n in NODES]
    draw = draw_of(members, {r.node: r for r in readings}, at_s, 3.0)
    return reconcile(of, membership([of], NODES), Seen(draw, overrun), NOW, due=due)


def written(of: PowerDomain, status: PowerDomainStatus | None) -> PowerDomain:
    assert status is not None
    return PowerDomain.model_validate({**of.to_wire(), "status": status.to_wire()})


def said(status: PowerDomainStatus | None) -> dict[str, tuple[str, str]]:
    assert status is not None
    return {c.type: (c.status.value, c.reason) for c in status.conditions or ()}


ALL = [reading(f"n{i}", 300.0) for i in range(3)]
RACK = domain("rack", 1000.0, rack="a")


def test_all_nodes_report_and_the_budget_is_kept() -> None:
    status = look(RACK, *ALL)
    assert said(status) == {
        "Ready": ("True", "Observing"),
        "WithinBudget": ("True", "WithinBudget"),
        "TelemetryFresh": ("True", "AllReport"),
    }
    assert status is not None
    assert status.draw_watts == 900.0
    assert status.headroom_watts == 90.0, "one percent of the budget is the margin"
    assert (status.floor_watts, status.nameplate_watts) == (300.0, 1200.0)
    assert (status.silent_nodes, status.simulated_nodes, status.telemetry_age_seconds) == (0, 3, 1)
    assert "The watts of 3 are simulated" in (status.conditions or [])[0].message


def test_a_silent_node_counts_with_its_nameplate_and_proves_nothing() -> None:
    late = reading("n2", 300.0, at_s=-5.0)
    status = look(RACK, *ALL[:2], late)
    assert said(status)["WithinBudget"] == ("True", "WithinBudget"), "600 W and a nameplate of 400 W"
    assert said(status)["TelemetryFresh"] == ("False", "NodesSilent")
    assert status is not None
    assert (status.draw_watts, status.assumed_watts, status.headroom_watts) == (600.0, 400.0, -10.0)
    tight = domain("rack", 999.0, rack="a")
    assert said(look(tight, *ALL[:2], late))["WithinBudget"] == ("Unknown", "NotMeasured")


def test_a_node_that_never_reported_leaves_the_headroom_open() -> None:
    status = look(RACK, *ALL[:2])
    assert said(status)["WithinBudget"] == ("Unknown", "NotMeasured")
    assert status is not None
    assert status.headroom_watts is None
    nothing = look(RACK)
    assert nothing is not None
    assert (nothing.draw_watts, nothing.floor_watts, nothing.silent_nodes) == (None, None, 3)


def test_what_is_measured_above_the_budget_is_over_whatever_is_silent() -> None:
    status = look(domain("rack", 599.0, rack="a"), *ALL[:2])
    assert said(status)["WithinBudget"] == ("False", "OverBudget")


def test_numbers_are_written_when_they_are_due_and_conditions_at_once() -> None:
    told = written(RACK, look(RACK, *ALL))
    assert look(told, *ALL) is None
    warmer = [reading(f"n{i}", 310.0) for i in range(3)]
    assert look(told, *warmer, due=False) is None
    assert look(told, *warmer) is not None
    hotter = [reading(f"n{i}", 340.0) for i in range(3)]
    assert said(look(told, *hotter, due=False))["WithinBudget"] == ("False", "OverBudget")


def test_without_a_picture_the_status_keeps_what_it_said() -> None:
    told = written(RACK, look(RACK, *ALL))
    assert reconcile(told, membership([told], NODES), None, NOW, due=False) is None
    fewer = reconcile(told, membership([told], NODES[:1]), None, NOW, due=False)
    assert fewer is not None
    assert (fewer.nodes, fewer.draw_watts) == (1, 900.0)
    assert said(fewer)["WithinBudget"] == ("True", "WithinBudget")


def test_a_transition_time_moves_with_the_status_only() -> None:
    first = look(RACK, *ALL)
    told = written(RACK, first)
    later = reconcile(
        told,
        membership([told], NODES),
        Seen(draw_of(["n0", "n1", "n2"], {r.node: r for r in ALL}, 9.0, 3.0)),
        NOW + timedelta(minutes=5),
        due=True,
    )
    assert first is not None
    assert later is not None
    before, after = ({c.type: c.last_transition_time for c in s.conditions or ()} for s in (first, later))
    assert {kind for kind in after if after[kind] != before[kind]} == {"WithinBudget", "TelemetryFresh"}


def test_an_overrun_is_kept_after_it_ends_and_across_a_restart() -> None:
    over: Overrun | None = None
    for above_w, second in ((-10.0, 0), (50.0, 1), (200.0, 2), (100.0, 3), (0.0, 4), (-5.0, 5)):
        over = watched(over, above_w, 1.0, NOW + timedelta(seconds=second))
    assert over == Overrun(NOW + timedelta(seconds=1), 3.0, 200.0, 350.0, lasts=False)
    told = written(RACK, look(RACK, *ALL, overrun=over))
    wire: dict[str, Any] = told.to_wire()["status"]["lastOverrun"]
    assert wire == {
        "startTime": "2026-11-21T12:00:01Z",
        "seconds": 3.0,
        "worstWatts": 200.0,
        "kilojoules": 0.35,
    }
    assert look(told, *ALL, overrun=None) is None, "a new operator knows of none, and keeps it"
    assert watched(over, 1.0, 1.0, NOW) == Overrun(NOW, 1.0, 1.0, 1.0)


LEASED = domain("rack", 1000.0, None, "Lease", 0.0, rack="a")


def leases(of: PowerDomain, draw: Draw, found: FeedLeases | None) -> PowerDomainStatus:
    status = reconcile(of, membership([of], NODES), Seen(draw, None, leases=found), NOW, due=True)
    assert status is not None
    return status


def test_a_limited_feed_says_what_is_leased_capped_refused_and_fought_over() -> None:
    draw = Draw(nodes=3, fresh=3, watts=800.0, capped=2, refusing=("n0",), age_s=0.0)
    status = leases(LEASED, draw, FeedLeases(980.0))
    assert (status.leased_watts, status.capped_nodes) == (980.0, 2)
    assert said(status)["Ready"] == ("True", "Leasing")
    assert said(status)["CapConflict"] == ("False", "NoConflict")
    text = (status.conditions or [])[0].message
    assert "Node n0 has boards that take no limits" in text
    assert status.boards_limited is False
    assert leases(LEASED, replace(draw, refusing=()), FeedLeases(980.0)).boards_limited is True
    assert leases(LEASED, replace(draw, refusing=(), unknown=1), FeedLeases(980.0)).boards_limited is False
    fought = replace(draw, conflicts=("n0", "n1", "n2"))
    again = leases(written(LEASED, status), fought, FeedLeases(980.0))
    assert said(again)["CapConflict"] == ("True", "CapConflict")
    observed = written(domain("rack", 1000.0, rack="a"), again)
    after = leases(observed, draw, None)
    assert "CapConflict" not in said(after)
    assert (after.leased_watts, said(after)["Ready"]) == (None, ("True", "Observing"))
    assert after.boards_limited is None
    at_once = reconcile(observed, membership([observed], NODES), None, NOW, due=False)
    assert at_once is not None
    assert (at_once.leased_watts, at_once.draw_watts) == (None, 800.0)


def test_a_feed_whose_lowest_limits_are_too_much_or_unknown_is_not_ready() -> None:
    draw = Draw(nodes=3, fresh=3, watts=800.0, age_s=0.0)
    assert said(leases(LEASED, draw, FeedLeases(1200.0, True)))["Ready"] == ("False", "FloorAboveBudget")
    unknown = leases(LEASED, draw, FeedLeases(980.0, False, ("n1", "n2")))
    assert said(unknown)["Ready"] == ("False", "NodesUnknown")
    assert "Nodes n1 and n2 have never reported" in (unknown.conditions or [])[0].message


def test_before_the_first_round_a_limited_feed_keeps_what_it_said_of_leases() -> None:
    draw = Draw(nodes=3, fresh=3, watts=800.0, age_s=0.0)
    told = written(LEASED, leases(LEASED, draw, FeedLeases(980.0)))
    assert leases(told, replace(draw, watts=700.0), None).leased_watts == 980.0


def test_what_only_measurements_tell_stays_until_there_are_new_ones() -> None:
    leased = domain("rack", 1000.0, None, "Lease", 200.0, rack="a")
    draw = draw_of([n.name for n in NODES], {r.node: r for r in ALL}, 1.0, 3.0)
    found = membership([leased], NODES)
    status = reconcile(leased, found, Seen(draw, leases=FeedLeases(900.0, True)), NOW, due=True)
    assert said(status)["Ready"] == ("False", "FloorAboveBudget")
    assert reconcile(written(leased, status), found, None, NOW, due=False) is None


def relieved(found: FeedRelief, floor_above_budget: bool = True) -> PowerDomainStatus:
    draw = Draw(nodes=3, fresh=3, watts=800.0, age_s=0.0)
    seen = Seen(draw, leases=FeedLeases(1200.0, floor_above_budget), relief=found)
    status = reconcile(LEASED, membership([LEASED], NODES), seen, NOW, due=True)
    assert status is not None
    return status


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (FeedRelief(990.0, 60.0, 0.0), "60 W more than the budget less its margin; if that lasts, work is stopped."),
        (FeedRelief(990.0, 60.0, 0.0, leaving=2), "2 jobs or replicas are being stopped."),
        (FeedRelief(990.0, 60.0, 60.0), "nothing that runs may be stopped for it. 60 W will still be lacking then"),
        (FeedRelief(990.0, 60.0, 23.0, leaving=1), "are being stopped. 23 W will still be lacking then: raise the"),
    ],
)  # fmt: skip
def test_a_feed_that_lacks_watts_for_what_runs_says_how_many_and_what_is_done(
    found: FeedRelief, says: str
) -> None:
    status = relieved(found)
    assert said(status)["Ready"] == said(status)["WithinBudget"] == ("False", "FloorAboveBudget")
    assert status.short_watts == 60.0
    for condition in status.conditions or ():
        if condition.type in ("Ready", "WithinBudget"):
            assert "What runs needs 1,050 W with all boards at their lowest limits" in condition.message
            assert says in condition.message


def test_a_feed_that_fits_because_boards_idle_is_ready_and_closed_while_what_was_stopped_lacks_room() -> None:
    status = relieved(FeedRelief(990.0, -7.0, stopped_w=37.0))
    assert said(status)["Ready"] == ("True", "Leasing")
    assert said(status)["WithinBudget"] == ("True", "WithinBudget")
    assert status.short_watts == 30.0
    text = (status.conditions or [])[0].message
    assert "as long as idle boards stay idle" in text
    assert "the least of it lacks 30 W" in text
    after = relieved(FeedRelief(990.0, -37.0, stopped_w=37.0))
    assert after.short_watts is None


# -- the feed's own meter -----------------------------------------------------------------------------------------


def compared(of: PowerDomain, metered: Metered | None) -> PowerDomainStatus | None:
    draw = draw_of([n.name for n in NODES], {r.node: r for r in ALL}, 1.0, 3.0)
    return reconcile(of, membership([of], NODES), Seen(draw, meter=metered), NOW, due=False)


def test_a_meter_is_told_beside_the_ledger_and_changes_nothing_else() -> None:
    plain = look(RACK, *ALL)
    meter = PowerMeter(redfish=RedfishMeter(url="https://pdu/redfish/v1/Sensors/1"))
    of = RACK.model_copy(update={"spec": RACK.spec.model_copy(update={"meter": meter})})
    assert said(compared(of, None))["MeterRead"] == ("Unknown", "MeterNotReadYet")
    book = MeterBook([Hour(3600, 3600.0, 950.0, 1000.0), Hour(7200, 60.0, 10.0, 12.0)])
    metered = Metered(meter, book, NOW, Reason.METER_READ, "In the hour from 01:00 UTC …")
    status = compared(of, metered)
    assert said(status) == {**said(plain), "MeterRead": ("True", "MeterRead")}
    assert status is not None
    assert plain is not None
    assert status.meter is not None
    assert [(h.ledger_joules, h.meter_joules) for h in status.meter.hours or ()] == [
        (950.0, 1000.0),
        (10.0, 12.0),
    ]
    assert status.model_copy(update={"meter": None, "conditions": None}) == plain.model_copy(
        update={"conditions": None}
    )
    there = written(of, status)
    metered.reason, metered.message = Reason.METER_JUMPED, "Its meter went back …"
    assert said(compared(there, metered))["MeterRead"] == ("False", "MeterJumped")
    gone = compared(there.model_copy(update={"spec": RACK.spec}), None)
    assert "MeterRead" not in said(gone)
    assert gone is not None
    assert gone.meter is None


def test_the_metric_is_of_the_last_whole_hour() -> None:
    meter = PowerMeter(redfish=RedfishMeter(url="https://pdu/redfish/v1/Sensors/1"))
    registry = CollectorRegistry()
    metrics = PowerMetrics(registry)
    part = Metered(meter, MeterBook([Hour(0, 1800.0, 1.0, 2.0), Hour(3600, 60.0, 1.0, 1.0)]))
    whole = Metered(meter, MeterBook([Hour(0, 3600.0, 900.0, 1000.0), Hour(3600, 60.0, 1.0, 2.0)]))
    metrics.show_meters({"part": part, "whole": whole})
    name = "busbar_power_meter_error_ratio"
    assert registry.get_sample_value(name, {"domain": "part"}) is None
    assert registry.get_sample_value(name, {"domain": "whole"}) == pytest.approx(-0.1)
    told = picture(membership([RACK], NODES), {}, {}, 0.0, 3.0, {}, {}, {}, {"rack": whole})
    [feed] = told.feeds
    assert (feed.metered, feed.meter_error, feed.meter_problem) == (True, -0.1, "")
    assert [hour.error for hour in feed.meter_hours] == [-0.1, -0.5]
    whole.reason, whole.message = Reason.METER_REFUSED, "It refuses."
    [feed] = picture(membership([RACK], NODES), {}, {}, 0.0, 3.0, {}, {}, {}, {"rack": whole}).feeds
    assert feed.meter_problem == "It refuses."


def test_nodes_that_take_no_limits_are_counted_where_watts_are_leased() -> None:
    registry = CollectorRegistry()
    metrics = PowerMetrics(registry)
    limits = LimitsReport(state=LeaseState.LEASED, sequence=1, lease_watts=300.0)
    mixed = [replace(ALL[0], limits=limits), *ALL[1:]]
    draw = draw_of([n.name for n in NODES], {r.node: r for r in mixed}, 1.0, 3.0)
    domains = {"leasing": (1000.0, draw), "observing": (1000.0, draw)}
    metrics.show(domains, {"leasing": FeedLeases(900.0)}, mixed, 1.0)
    name = "busbar_power_unlimited_nodes"
    assert registry.get_sample_value(name, {"domain": "leasing"}) == 2
    assert registry.get_sample_value(name, {"domain": "observing"}) is None
    metrics.show({}, {}, [], 2.0)
    assert registry.get_sample_value(name, {"domain": "leasing"}) is None


def test_the_slowdown_of_a_tenants_priority_is_a_mean_over_its_jobs() -> None:
    registry = CollectorRegistry()
    metrics = PowerMetrics(registry)
    metrics.show_slowdowns([("red", 100, 1.1), ("red", 100, 1.3), ("red", 500, 1.0), ("blue", 100, 2.0)])
    name = "busbar_power_slowdown_ratio"
    assert registry.get_sample_value(name, {"tenant": "red", "priority": "100"}) == pytest.approx(1.2)
    assert registry.get_sample_value(name, {"tenant": "blue", "priority": "100"}) == 2.0
    metrics.show_slowdowns([])
    assert registry.get_sample_value(name, {"tenant": "blue", "priority": "100"}) is None
