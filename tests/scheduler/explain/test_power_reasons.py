"""Why a job waits for watts: the domain, the amounts, and what would start it."""

from __future__ import annotations

from dataclasses import replace

from busbar.scheduler import (
    Policy,
    PowerDomain,
    Rate,
    Snapshot,
    WaitCode,
    WaitingRecord,
    check_plan,
    plan,
    sentence,
)

from ..build import NOW, cluster, job, placed

POLICY = Policy(solver_seconds=None)


def on_feeds(snapshot: Snapshot, *domains: PowerDomain) -> Snapshot:
    """Each node hangs on the domain of its own name; an H100 draws 700 W and an L4 72 W."""
    names = {domain.name for domain in domains}
    nodes = tuple(
        replace(n, domain=n.name if n.name in names else "row", labels=(("host", n.name),))
        for n in snapshot.nodes
    )
    table = replace(snapshot.table, rates=(Rate("H100", 1.0, 700.0), Rate("L4", 0.5, 72.0)))
    return replace(snapshot, nodes=nodes, domains=domains, table=table)


def waits(snapshot: Snapshot) -> dict[str, WaitingRecord]:
    result, _ = plan(snapshot, POLICY, NOW)
    assert check_plan(snapshot, result) == []
    return {record.job.removeprefix("uid-"): record for record in result.waiting}


def test_the_sentence_names_the_domain_and_what_is_missing_there() -> None:
    runs = job("run", on=placed("H100", "H100-0000"))
    record = waits(on_feeds(cluster(runs, job("w"), H100=1), PowerDomain("row", 1000.0)))["w"]
    assert record.code is WaitCode.POWER
    assert (record.domain, record.requested, record.free, record.limit) == ("row", 700, 300, 1000)
    assert sentence(record) == (
        "Needs 700 W on the power domain row, and 300 W of the 1,000 W that it has for jobs are free. "
        "It would start now with 400 W more there."
    )
    assert not record.never
    assert record.foreseeable


def test_the_domain_named_is_the_one_that_is_short_most() -> None:
    runs = job("run", on=placed("H100", "H100-0000"))
    feeds = (PowerDomain("row", 900.0), PowerDomain("H100-0000", 1300.0, "row"))
    record = waits(on_feeds(cluster(runs, job("w"), H100=1), *feeds))["w"]
    assert (record.domain, record.free) == ("row", 200)


def test_nothing_is_promised_to_those_behind_the_first() -> None:
    runs = job("run", on=placed("H100", "H100-0000"))
    others = [job("w1", submitted=NOW - 9000), job("w2")]
    records = waits(on_feeds(cluster(runs, *others, H100=1), PowerDomain("row", 1000.0)))
    told = {name: [change.kind for change in record.changes] for name, record in records.items()}
    assert told == {"w1": ["watts"], "w2": []}


def test_a_job_that_its_domain_never_carries_is_told_so() -> None:
    record = waits(on_feeds(cluster(job("w", size=2), H100=1), PowerDomain("row", 1000.0)))["w"]
    assert record.never
    assert sentence(record) == (
        "Needs 1,400 W on the power domain row, and 1,000 W of the 1,000 W that it has for jobs are free, so it never "
        "starts unless this is raised."
    )


def test_fewer_pods_and_other_types_are_suggested() -> None:
    gang = job("w", pods=3, accelerators=("H100",))
    feeds = (PowerDomain("H100-0000", 1500.0), PowerDomain("row", 300.0))
    changes = waits(on_feeds(cluster(gang, H100=1, L4=1), *feeds))["w"].changes
    assert [(change.kind, change.needed) for change in changes] == [("pods", "2"), ("accelerator", "L4")]


def test_another_domain_is_suggested_where_the_node_selector_excludes_it() -> None:
    runs = job("run", on=placed("H100", "H100-0000"))
    bound = replace(job("w"), node_selector=(("host", "H100-0000"),))
    feeds = (PowerDomain("H100-0000", 1000.0), PowerDomain("H100-0001", 1000.0))
    record = waits(on_feeds(cluster(runs, bound, H100=2), *feeds))["w"]
    assert [(c.kind, c.current, c.needed) for c in record.changes] == [
        ("domain", "H100-0000", "H100-0001"),
        ("watts", "300", "400"),
    ]
    assert sentence(record).endswith(
        "It would start now on the power domain H100-0001 without its node selector or with 400 W more there."
    )


def test_a_job_that_lacks_room_as_well_waits_for_room() -> None:
    runs = job("run", on=placed("H100", "H100-0000", size=8), size=8)
    record = waits(on_feeds(cluster(runs, job("w"), H100=1), PowerDomain("row", 5600.0)))["w"]
    assert record.code is WaitCode.CAPACITY


def test_a_job_for_which_nodes_are_closed_and_watts_too_few_is_told_of_the_watts() -> None:
    snapshot = on_feeds(cluster(job("w", size=2), H100=1), PowerDomain("row", 1000.0))
    closed = replace(
        snapshot, nodes=tuple(replace(node, ready=False, cordoned=True) for node in snapshot.nodes)
    )
    record = waits(closed)["w"]
    assert (record.code, record.never) == (WaitCode.POWER, True)
    enough = waits(replace(closed, domains=(PowerDomain("row", 1400.0),)))["w"]
    assert enough.code is WaitCode.NODES_CLOSED
