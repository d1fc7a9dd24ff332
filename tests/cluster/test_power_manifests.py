"""Bad PowerDomains beside accepted neighbours, in the words of people who write them. Bounds are in `bounds.txt`."""

from __future__ import annotations

import pytest
from tests.cluster.apiserver import Client
from tests.cluster.manifests import power_domain
from tests.cluster.rule_row import Change, edited
from tests.cluster.test_manifests import assert_refused, client

__all__ = ["client"]

ROWS: tuple[tuple[str, Change, Change, str, str], ...] = (
    ("no watts", {"spec/budgetWatts": 0}, {"spec/budgetWatts": 1}, "spec.budgetWatts", "greater than 0"),
    ("negative", {"spec/budgetWatts": -1}, {"spec/budgetWatts": 0.5}, "spec.budgetWatts", "greater than 0"),
    ("above 100 MW", {"spec/budgetWatts": 1.1e8}, {"spec/budgetWatts": 1e8}, "spec.budgetWatts", "less than"),
    ("a text", {"spec/budgetWatts": "5kW"}, {"spec/budgetWatts": 5000}, "spec.budgetWatts", "Invalid value"),
    ("margin 101 %", {"spec/marginPercent": 101}, {"spec/marginPercent": 50}, "spec.marginPercent", "less"),
    ("margin -1 %", {"spec/marginPercent": -1}, {"spec/marginPercent": 0}, "spec.marginPercent", "greater"),
    *(
        (
            policy,
            {"spec/policy": policy},
            {"spec/policy": good, "spec/enforcement": ..., "spec/rideThroughSeconds": ...},
            "spec.policy",
            "Unsupported value",
        )
        for policy, good in (
            ("leasewithburst", "LeaseWithBurst"),
            ("lease", "Lease"),
            ("static", "Static"),
            ("observe", "Observe"),
        )
    ),
    *(
        (
            f"{policy} without a host",
            {"spec/policy": policy, "spec/rideThroughSeconds": ..., "spec/hostWatts": ...},
            {"spec/policy": policy, "spec/rideThroughSeconds": ...},
            "spec.hostWatts",
            "policies that limit nodes need spec.hostWatts",
        )
        for policy in ("Static", "Lease", "LeaseWithBurst")
    ),
    (
        "no such enforcement",
        {"spec/enforcement": "Stop"},
        {"spec/enforcement": "Cap"},
        "spec.enforcement",
        "Unsupported value",
    ),
    (
        "stopping work where nothing is limited",
        {"spec/policy": "Observe", "spec/rideThroughSeconds": ...},
        {"spec/policy": "Observe", "spec/rideThroughSeconds": ..., "spec/enforcement": ...},
        "spec.enforcement",
        "Preempt needs a spec.policy that limits nodes",
    ),
    (
        "peaks above leases without a policy that lets them pass",
        {"spec/policy": "Lease", "spec/rideThroughSeconds": 0.1},
        {"spec/policy": "LeaseWithBurst", "spec/rideThroughSeconds": 0.1},
        "spec.rideThroughSeconds",
        "only spec.policy LeaseWithBurst",
    ),
    (
        "a breaker that bears nothing",
        {"spec/policy": "LeaseWithBurst", "spec/rideThroughSeconds": 0},
        {"spec/policy": "LeaseWithBurst", "spec/rideThroughSeconds": 0.02},
        "spec.rideThroughSeconds",
        "greater than 0",
    ),
    (
        "a negative host",
        {"spec/hostWatts": -1},
        {"spec/hostWatts": 0},
        "spec.hostWatts",
        "greater than or equal",
    ),
    (
        "all nodes",
        {"spec/nodeSelector": {}},
        {"spec/nodeSelector": ..., "spec/hostWatts": ..., "spec/rideThroughSeconds": ...},
        "spec.nodeSelector",
        "at least 1",
    ),
    ("itself", {"spec/parent": "sample"}, {"spec/parent": ...}, "spec.parent", "its own parent"),
    *(
        (
            f"a meter at {url}",
            {"spec/meter/prometheus/url": url},
            {"spec/meter/prometheus/url": good},
            "spec.meter.prometheus.url",
            "should match",
        )
        for url, good in (
            ("https://root:calvin@pdu", "https://pdu"),
            ("file:///etc/passwd", "https://etc/passwd"),
            ("https://prometheus/?query=up", "https://prometheus/"),
            ("https://prometheus/#up", "https://prometheus/up"),
            ("prometheus:9090", "https://prometheus:9090"),
            ("https://pro metheus", "https://prometheus"),
        )
    ),
    (
        "a meter without a unit",
        {"spec/meter/prometheus/unit": ...},
        {"spec/meter/prometheus/unit": "Watts"},
        "spec.meter.prometheus.unit",
        "Required value",
    ),
    ("no name", {"spec/parent": "Row 1"}, {"spec/parent": "row-1"}, "spec.parent", "should match"),
)
NOT_BUILT = ("quantile",)


@pytest.mark.parametrize(("bad", "good", "field", "says"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_bad_domain_is_refused_and_its_neighbour_is_not(
    client: Client, bad: Change, good: Change, field: str, says: str
) -> None:
    assert_refused(client.create(edited(power_domain(), bad)), field, says)
    client.create(edited(power_domain(), good)).expect()


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_is_not_built_is_no_field(client: Client, name: str) -> None:
    answer = client.create(edited(power_domain(), {f"spec/{name}": 1}))
    assert answer.status == 400
    assert f'unknown field "spec.{name}"' in answer.message
