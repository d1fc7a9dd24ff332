"""Whatever happens and in whatever order: the builder that followed says what one that reads everything says."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.builders import (
    NOW,
    admitted,
    engine_of,
    gang,
    gated,
    job,
    pool,
    replica,
    running,
    service,
    tenant,
)
from tests.operator.power.parts import domain

from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.operator.pools.nodes import DISCOVERED
from busbar.operator.queue.controller import Item
from busbar.operator.scheduling.builder import DOMAIN, JOB, NODE, POD, POOL, SERVICE, TENANT, SnapshotBuilder
from busbar.operator.scheduling.snapshot import ClusterObjects, build, builder_of
from busbar.operator.watch.projections import HOSTNAME, Node, Pod, Requests
from busbar.scheduler import JobId

Change = tuple[str, Key, Any]
PLACE = '{"pool": "cpu", "accelerator": "cpu", "mode": "resident", "node": "node-0", "perPod": {"accelerators_m": 1000}}'
LATER = (NOW + timedelta(seconds=30)).isoformat()
CONFIG = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 1024, "vocab_size": 1000}  # fmt: skip


def learns(name: str, speed: float) -> TrainingJob:
    """A job of a known class that reports a speed."""
    of = admitted(job(name, engine=engine_of(CONFIG)))
    assert of.status is not None
    assert of.status.admission is not None
    started = of.status.admission.model_copy(update={"started_at": NOW})
    told = {"step": 5, "totalSteps": 100, "tokensPerSecond": speed}
    return TrainingJob.model_validate(
        {**of.to_wire(), "status": {**of.status.to_wire(), "admission": started.to_wire(), "progress": told}}
    )


def of_name(made: TrainingJob, name: str, **meta: Any) -> TrainingJob:
    return made.model_copy(update={"metadata": made.metadata.model_copy(update={"name": name, **meta})})


JOBS = [
    None,
    job("a"),
    job("a", suspend=True),
    job("a", status={"phase": "Queued", "retryAt": LATER}),
    of_name(admitted(gang(2)), "a", uid="uid-a"),
    job("a", status={"phase": "Queued", "attempt": 1}),
    job("a", status={"phase": "Succeeded"}),
    of_name(job("a"), "a", uid="uid-second"),
    learns("a", 100.0),
    learns("a", 300.0),
]
SERVICES = [
    None,
    service(replicas=2, status={"desiredReplicas": 2, "observedGeneration": 1}),
    service(model={"trainingJob": "a"}, status={"desiredReplicas": 1, "observedGeneration": 1}),
]
PODS = [
    None,
    running(0, owner="a"),
    running(1, owner="a", owner_uid="uid-second"),
    running(0, owner="a", phase="Succeeded"),
    replica(0, placement=PLACE),
    gated(0, kind="", owner="x", queued=True, pinned="", requests=Requests(500)),
    replace(
        gated(0, kind="", owner="x", queued=True, requests=Requests(500), admission="a", pinned="host-1"),
        gates=(),
    ),
    running(0, owner="gone", requests=Requests(2000)),
    running(0, kind="", owner="other", owner_uid="", node="node-1", requests=Requests(750)),
]


def node(name: str, host: str, **fields: Any) -> Node:
    base = Node(name, (("pool", "cpu"), (HOSTNAME, host)), (), 8000, 32768, 100_000, (), True)
    return replace(base, **fields)


NODES = [
    None,
    node("", "host-1"),
    node("", "host-1", ready=False),
    node("", "host-2", cpu_m=4000),
    node("", "host-1", ready=False, silent_since=NOW),
]
POOLS = [None, pool(), pool(unit="500m"), pool(reserved={"cpu": "1"})]
MADE_BY_US = pool("found", nodeSelector={"pool": "cpu", HOSTNAME: "host-1"})
MADE_BY_US.metadata.labels[DISCOVERED] = "true"
OTHER_POOLS = [None, pool("found", nodeSelector={"pool": "cpu", HOSTNAME: "host-1"}), MADE_BY_US]
TENANTS = [
    None,
    tenant("team", ["team"]),
    tenant("team", ["other"]),
    tenant("team", ["team"], quota=[{"accelerator": "cpu", "guaranteed": 2}]),
    tenant("team", ["team"], budgets=[{"period": "month", "cost": 0, "enforcement": "StopAdmitting"}]),
]
DOMAINS = [
    None,
    domain("feed", 5000.0, None, "Static", 500.0, pool="cpu"),
    domain("feed", 5000.0, None, "Lease", 100.0, **{HOSTNAME: "host-1"}),
    domain("feed", 5000.0, pool="cpu"),
]


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """One object that appears, changes or goes."""
    kind = draw(st.sampled_from([JOB, JOB, SERVICE, POD, POD, POD, NODE, POOL, TENANT, DOMAIN]))
    slot = draw(st.integers(0, 1))
    if kind == POD:
        made: Pod | None = draw(st.sampled_from(PODS))
        key = Key("team", f"pod-{slot}")
        return kind, key, None if made is None else replace(made, key=key, uid=f"uid-pod-{slot}-{made.owner}")
    if kind == NODE:
        there: Node | None = draw(st.sampled_from(NODES))
        return kind, Key("", f"node-{slot}"), None if there is None else replace(there, name=f"node-{slot}")
    if kind == JOB:
        return kind, Key("team", "a"), draw(st.sampled_from(JOBS))
    if kind == SERVICE:
        return kind, Key("team", "web"), draw(st.sampled_from(SERVICES))
    if kind == DOMAIN:
        return kind, Key("", "feed"), draw(st.sampled_from(DOMAINS))
    if kind == TENANT:
        return kind, Key("", "team"), draw(st.sampled_from(TENANTS))
    if slot:
        return kind, Key("", "found"), draw(st.sampled_from(OTHER_POOLS))
    return kind, Key("", "cpu"), draw(st.sampled_from(POOLS))


def objects(there: dict[tuple[str, Key], Any]) -> ClusterObjects:
    of_kind = {
        kind: tuple(o for (k, _), o in there.items() if k == kind)
        for kind in (JOB, SERVICE, POD, NODE, DOMAIN)
    }
    return ClusterObjects(
        of_kind[JOB], of_kind[SERVICE], tuple(o for (k, _), o in there.items() if k == POOL),
        tuple(o for (k, _), o in there.items() if k == TENANT), of_kind[NODE], of_kind[POD],
        domains=of_kind[DOMAIN],
    )  # fmt: skip


START: list[Change] = [
    (POOL, Key("", "cpu"), pool()),
    (TENANT, Key("", "team"), tenant("team", ["team"])),
    (NODE, Key("", "node-0"), node("node-0", "host-0")),
    (NODE, Key("", "node-1"), node("node-1", "host-1")),
]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.lists(changes(), max_size=4), st.integers(0, 20), st.booleans()), max_size=8))
def test_following_is_the_same_as_reading_everything(
    steps: list[tuple[list[Change], int, bool]],
) -> None:
    builder, there, now = SnapshotBuilder(), dict[tuple[str, Key], Any](), NOW
    for batch, seconds, full in [(START, 0, True), *steps, ([], 40, True)]:
        now += timedelta(seconds=seconds)
        for kind, key, obj in batch:
            builder.put(kind, key, obj)
            there[kind, key] = obj
            there = {name: one for name, one in there.items() if one is not None}
        _same(builder, objects(there), now, full=full)


def _same(builder: SnapshotBuilder, seen: ClusterObjects, now: datetime, *, full: bool) -> None:
    made, fresh = builder.snapshot(now, full=full), builder_of(seen)
    expected = fresh.snapshot(now)
    assert (made.pools, made.nodes, made.jobs) == (expected.pools, expected.nodes, expected.jobs)
    assert made.domains == expected.domains
    assert made.reservations == expected.reservations
    assert builder.remarks() == fresh.remarks()
    assert set(builder.waiting()) == set(fresh.waiting())
    assert [builder.target(one.id) for one in made.jobs] == [fresh.target(one.id) for one in made.jobs]
    if full:
        assert made == expected


def test_what_stayed_is_the_same_object() -> None:
    """The scheduler compares identities, so that it looks only at what changed."""
    builder = builder_of(
        ClusterObjects(
            (job("a"), job("b")),
            (),
            (pool(),),
            (tenant("team", ["team"]),),
            (node("node-0", "h"), node("node-1", "i")),
        )
    )
    before = builder.snapshot(NOW)
    builder.put(JOB, Key("team", "b"), job("b", suspend=True))
    builder.put(POD, Key("team", "p"), running(0, kind="", owner_uid="", node="node-1", uid="p"))
    after = builder.snapshot(NOW + timedelta(seconds=1), full=False)
    assert [one.name for one in after.jobs] == ["a"]
    assert after.jobs[0] is before.jobs[0]
    assert [new is old for new, old in zip(after.nodes, before.nodes, strict=True)] == [True, False]
    assert (after.pools, after.tenants, after.table) == (before.pools, before.tenants, before.table)
    assert after.table is before.table
    assert after.tenants is before.tenants


def test_a_job_that_may_be_tried_again_later_is_offered_then() -> None:
    of = job("a", status={"phase": "Queued", "retryAt": LATER})
    builder = builder_of(ClusterObjects((of,), (), (pool(),), (tenant("team", ["team"]),)))
    assert builder.snapshot(NOW).jobs == ()
    assert not builder.waits(Item(JOB, Key("team", "a")))
    assert [one.name for one in builder.snapshot(NOW + timedelta(seconds=31), full=False).jobs] == ["a"]
    assert builder.waits(Item(JOB, Key("team", "a")))


def test_a_class_that_is_new_has_its_cells_at_once_and_reports_are_learned_from_with_the_next_full_plan() -> (
    None
):
    silent = job("a", engine=engine_of(CONFIG))
    builder = builder_of(ClusterObjects((), (), (pool(),), (tenant("team", ["team"]),)))
    assert builder.snapshot(NOW).table.cells == ()
    builder.put(JOB, Key("team", "a"), silent)
    table = builder.snapshot(NOW, full=False).table
    assert {cell.workload_class for cell in table.cells} == {builder.snapshot(NOW).jobs[0].workload_class}
    builder.put(JOB, Key("team", "a"), learns("a", 100.0))
    assert builder.snapshot(NOW, full=False).table is table
    learned = builder.snapshot(NOW).table
    assert learned != table
    assert (
        learned
        == build(ClusterObjects((learns("a", 100.0),), (), (pool(),), (tenant("team", ["team"]),)), NOW).table
    )


def test_a_class_that_is_new_leaves_what_was_learned_of_others_to_the_next_full_plan() -> None:
    builder = builder_of(ClusterObjects((learns("a", 100.0),), (), (pool(),), (tenant("team", ["team"]),)))
    before = builder.snapshot(NOW)
    known = before.jobs[0].workload_class
    other = job("b", engine=engine_of({**CONFIG, "hidden_size": 512}))
    builder.put(JOB, Key("team", "a"), learns("a", 300.0))
    builder.put(JOB, Key("team", "b"), other)
    table = builder.snapshot(NOW, full=False).table
    assert {cell.workload_class for cell in table.cells} > {known}
    assert {c for c in table.learned if c.workload_class == known} == set(before.table.learned)
    later = builder.snapshot(NOW).table
    assert {c for c in later.learned if c.workload_class == known} != set(before.table.learned)
    assert {c for c in later.learned if c.workload_class != known} == {
        c for c in table.learned if c.workload_class != known
    }


def test_the_object_behind_a_job_is_found_by_its_id() -> None:
    wants = service(replicas=2, status={"desiredReplicas": 2, "observedGeneration": 1})
    opted = gated(0, kind="", owner="x", queued=True, pinned="", requests=Requests(500))
    builder = builder_of(
        ClusterObjects((job("a"),), (wants,), (pool(),), (tenant("team", ["team"]),), (), (opted,))
    )
    found = {one.id: builder.target(one.id) for one in builder.snapshot(NOW).jobs}
    assert found == {
        "uid-a": (Item(JOB, Key("team", "a")), "7", 0),
        "uid-web/0": (Item(SERVICE, Key("team", "web")), "7", 0),
        "uid-web/1": (Item(SERVICE, Key("team", "web")), "7", 1),
        opted.uid: (Item(POD, opted.key), "", 0),
    }
    assert builder.target(JobId("uid-nobody")) is None


def test_beside_a_replica_whose_node_does_not_answer_another_one_waits_until_it_does() -> None:
    builder = SnapshotBuilder()
    for kind, key, obj in START:
        builder.put(kind, key, obj)
    wants = service(replicas=1, status={"desiredReplicas": 1, "observedGeneration": 1})
    builder.put(SERVICE, Key("team", "web"), wants)
    builder.put(POD, Key("team", "web-0"), replica(0, placement=PLACE))

    def waiting() -> list[str]:
        return [one.id for one in builder.snapshot(NOW, full=False).jobs if one.run is None]

    assert waiting() == []
    answers = node("node-0", "host-0")
    builder.put(NODE, Key("", "node-0"), replace(answers, ready=False, silent_since=NOW))
    assert waiting() == ["uid-web/1"]
    builder.put(NODE, Key("", "node-1"), None)
    assert waiting() == [], "most nodes do not answer: it is not they that are gone"
    builder.put(NODE, Key("", "node-1"), node("node-1", "host-1"))
    assert waiting() == ["uid-web/1"]
    builder.put(NODE, Key("", "node-0"), answers)
    assert waiting() == []
