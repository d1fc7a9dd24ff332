"""A preview: one plan with the draft, and an answer without other tenants' data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.operator.builders import (
    NOW,
    admitted,
    engine_of,
    gang,
    job,
    pool,
    running,
    service,
    tenant,
)
from tests.operator.previews.drafts import LARGE, POLICY, TENANTS, asked, gpu_pool, nodes_of, sized

from busbar.kube.contracts.preview import PreviewAnswer
from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.operator.forecasts.worker import Answer
from busbar.operator.previews.preview import (
    Calibration,
    answer,
    as_sentence,
    held_by_claims,
    held_by_model,
    held_by_tenant,
    if_suspended,
    loads_of,
    with_engine_mode,
    with_forecast,
)
from busbar.operator.previews.replicas import offered
from busbar.operator.scheduling.snapshot import ClusterObjects, Draft, build, with_draft
from busbar.operator.watch.projections import Node
from busbar.scheduler import (
    Cell,
    JobId,
    PerformanceTable,
    Placement,
    Pool,
    PowerDomain,
    Quota,
    Rate,
    Resources,
    Run,
    plan,
)
from busbar.scheduler import (
    Node as SNode,
)


def test_a_draft_that_fits_starts_now_and_only_an_admin_reads_where() -> None:
    found = answer(asked(job("draft")))
    assert (found.starts_now, found.pool, found.when, found.nodes) == (True, "cpu", "Now", ())
    assert found.reason.endswith(".")
    assert answer(asked(job("draft"), admin=True)).nodes != ()


def test_a_service_is_told_in_which_mode_its_engine_would_start_and_why() -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336,
    }  # fmt: skip
    made = job("made", engine=engine_of(config), status={"phase": "Succeeded"})
    seen = ClusterObjects(pools=(pool("cpu"),), nodes=nodes_of(), tenants=TENANTS, jobs=(made,))
    for memory, mode in (("40Gi", "resident"), ("6Gi", "stream")):
        draft = service(
            "web", model={"trainingJob": "made"}, shape={"cpu": "1", "memory": memory}, replicas=1
        )
        starts = PreviewAnswer(
            starts_now=True, possible=True, reason="There is room.", when="Now", pool="cpu", mode="resident"
        )
        found = with_engine_mode(starts, seen, draft)
        assert found.mode == mode
        assert ("Engine mode stream, because resident needs" in found.reason) is (mode == "stream")
        waits = starts.model_copy(update={"pool": ""})
        assert with_engine_mode(waits, seen, draft) == waits
    assert with_engine_mode(starts, seen, job("draft")) == starts


@pytest.mark.parametrize(
    ("kinds", "starts"),
    [(("L4",), ""), (("H100",), "H100"), (("L4", "H100"), "H100"), (("H100", "L4"), "H100")],
)
def test_a_service_starts_only_where_its_model_fits_in_some_engine_mode(
    kinds: tuple[str, ...], starts: str
) -> None:
    made = job("made", engine=engine_of(LARGE), status={"phase": "Succeeded"})
    pools, nodes = zip(*(gpu_pool(kind) for kind in kinds), strict=True)
    draft = service("web", model={"trainingJob": "made"}, replicas=1)
    seen = ClusterObjects(pools=pools, nodes=nodes, tenants=TENANTS, jobs=(made,))
    base = build(seen, NOW, draft)
    found = with_engine_mode(answer(replace(asked(draft), base=base)), seen, draft)
    assert (found.starts_now, found.possible, found.accelerator) == (bool(starts), bool(starts), starts)
    if not starts:
        assert found.reason.startswith("It fits in no engine mode: stream needs")
        assert found.when.startswith("Never")


@pytest.mark.parametrize(
    ("made", "possible", "words"),
    [
        (None, True, "does not exist in this namespace"),
        (job("made", status={"phase": "Running"}), True, "has not succeeded yet"),
        (job("made", status={"phase": "Succeeded"}), True, ""),
    ],
)
def test_a_service_is_told_that_its_model_is_not_made(
    made: TrainingJob | None, possible: bool, words: str
) -> None:
    seen = ClusterObjects(jobs=() if made is None else (made,))
    draft = service("web", model={"trainingJob": "made"}, replicas=1)
    found = held_by_model(seen, draft)
    assert (found is None) is (not words)
    if found is not None:
        assert (found.starts_now, found.possible, found.code) == (False, possible, "ModelNotReady")
        assert words in found.reason
    assert held_by_model(seen, service("web", model={"uri": "pvc://claim/model"})) is None
    assert held_by_model(seen, job("draft")) is None


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("make", [job, service])
def test_a_suspended_draft_does_not_start_and_what_would_follow_is_told(
    make: Callable[..., Draft], full: bool
) -> None:
    draft = make("draft", **({"replicas": 1} if make is service else {}))
    found = answer(asked(draft, full=full))
    assert found.starts_now is not full
    assert if_suspended(found, draft) == found
    suspended = make("draft", suspend=True)
    told = if_suspended(found, suspended)
    assert (told.starts_now, told.possible, told.pool) == (False, True, found.pool)
    assert told.reason == f"It is suspended. Otherwise: {found.reason}"
    assert told.when.startswith("When spec.suspend is false")
    assert (found.when in told.when) is full
    never = PreviewAnswer(starts_now=False, possible=False, reason="Too large.", when="Never")
    assert if_suspended(never, suspended) == never


def test_a_draft_that_waits_names_nobody_else() -> None:
    found = answer(asked(job("draft"), full=True))
    assert (found.starts_now, found.possible, found.waits) == (False, True, True)
    text = found.model_dump_json()
    assert "others" not in text
    assert "secret" not in text


def test_a_draft_is_told_what_its_deadline_would_be_promised() -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 512,
    }  # fmt: skip
    engine = engine_of(config)
    for days, words in ((5, "Promised: it needs 1 cpu from now on"), (-1, "Not promised: out of reach")):
        at = (NOW + timedelta(days=days)).isoformat()
        found = answer(asked(job("draft", engine=engine, deadline=at)))
        assert found.starts_now
        assert found.deadline.startswith(words)
    assert answer(asked(job("draft", engine=engine))).deadline == ""


@pytest.mark.parametrize(
    ("memory", "possible"), [({}, False), ({"memoryGib": 180}, True), ({"memoryGib": 0}, True)]
)
def test_a_model_that_its_accelerators_cannot_hold_is_refused_also_where_the_pool_states_no_memory(
    memory: dict[str, float], possible: bool
) -> None:
    config = {
        "model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
        "num_key_value_heads": 8, "intermediate_size": 53248, "vocab_size": 128256,
    }  # fmt: skip
    draft = job("draft", engine=engine_of(config), shape={"acceleratorsPerPod": 1})
    kind = pool("gpu", accelerator="L40S", resourceName="nvidia.com/gpu", **memory)
    [selector] = kind.spec.node_selector.items()
    large = Node("n0", (selector,), (), 64_000, 16_000_000, 100_000, (("nvidia.com/gpu", 8),), True)
    seen = ClusterObjects(pools=(kind,), nodes=(large,), tenants=TENANTS)
    found = answer(replace(asked(draft), base=build(seen, NOW, draft)))
    assert found.possible is possible
    assert found.starts_now is possible
    if not possible:
        assert "per accelerator in its smallest mode" in found.reason
        assert "the largest accelerator here has 49,152 MiB" in found.reason


@pytest.mark.parametrize("memory", [{}, {"memory": "2Gi"}])
@pytest.mark.parametrize(
    ("hidden", "layers", "possible"), [(256, 4, True), (2048, 24, True), (16384, 126, False)]
)
def test_a_model_that_the_memory_of_the_nodes_cannot_hold_is_refused_where_the_cores_train_it(
    hidden: int, layers: int, possible: bool, memory: dict[str, str]
) -> None:
    config = {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 16,
        "intermediate_size": 3 * hidden, "vocab_size": 32000,
    }  # fmt: skip
    engine = engine_of(config)
    question = asked(job("draft", engine=engine, shape={"cpu": "1", **memory}))
    found = answer(question)
    assert found.possible is found.starts_now is possible
    if not possible:
        assert "and the largest node has 65,536 MiB" in found.reason
        return
    [action] = plan(question.snapshot, POLICY, question.now, None)[0].actions
    assert action.to is not None
    assert action.to.per_pod.memory_mib >= (8192 if hidden == 2048 else 2048 if memory else 400)


def test_a_draft_that_can_never_start_is_told_so() -> None:
    question = asked(job("draft"))
    limited = tuple(replace(one, quotas=(Quota("cpu", 0, 0),)) for one in question.snapshot.tenants)
    found = answer(replace(question, base=replace(question.snapshot, tenants=limited)))
    assert (found.possible, found.code) == (False, "BorrowingLimit")
    assert found.when.startswith("Never")


def test_a_draft_that_only_cordoned_nodes_would_hold_is_told_of_the_cordon() -> None:
    question = asked(job("draft"))
    closed = tuple(replace(node, ready=False, cordoned=True) for node in question.snapshot.nodes)
    found = answer(replace(question, base=replace(question.snapshot, nodes=closed)))
    assert (found.possible, found.code) == (True, "NodesClosed")
    assert "2 nodes that could hold its pods are cordoned" in found.reason
    assert found.when == "Not before closed nodes are opened"


def test_a_draft_that_lacks_watts_is_told_of_the_power_domain() -> None:
    question = asked(job("draft"))
    [own] = question.snapshot.jobs
    own = replace(own, accelerators=(), per_pod=Resources(1000))
    place = Placement("gpus", "H100", "resident", ("n",), Resources(1000))
    short = replace(
        question.snapshot,
        pools=(Pool("gpus", "H100"),),
        nodes=(SNode("n", "gpus", Resources(8000), domain="rack"),),
        domains=(PowerDomain("rack", 1000.0),),
        table=PerformanceTable(rates=(Rate("H100", watts=700.0),)),
        jobs=(own, replace(own, id=JobId("other"), name="other", run=Run(place, 0.0))),
    )
    found = answer(replace(question, base=short))
    assert (found.possible, found.starts_now, found.code) == (True, False, "InsufficientPower")
    assert "300 W of the 1,000 W" in found.reason
    assert found.when == "When other jobs on its power domain have ended, or its budget is raised"


def test_a_draft_is_told_what_it_will_use_and_under_which_cap_it_would_start() -> None:
    question = asked(job("draft"))
    [own] = question.snapshot.jobs
    own = replace(
        own,
        accelerators=(),
        workload_class="llm",
        per_pod=Resources(8000),
        most_devices=0,
        modes=("resident",),
        remaining_work=72_000.0,
    )
    known = ((1.0, 10.0, 700.0), (0.7, 9.0, 480.0))
    cells = tuple(
        Cell("llm", "H100", 8000, speed=speed, low=0.9 * speed, high=1.1 * speed, watts=watts, power_cap=cap)
        for cap, speed, watts in known
    )
    rich = replace(
        question.snapshot,
        pools=(Pool("gpus", "H100", price_per_hour=2.0),),
        nodes=(SNode("n", "gpus", Resources(8000), domain="rack", limits_boards=True),),
        domains=(PowerDomain("rack", 9000.0),),
        table=PerformanceTable(cells, rates=(Rate("H100", watts=700.0),)),
        jobs=(own,),
    )
    found = answer(replace(question, base=rich))
    assert (found.accelerator_hours, found.estimated_cost, found.watts) == (16.0, 32.0, 5600.0)
    assert (found.kilowatt_hours, found.kilowatt_hours_low, found.kilowatt_hours_high) == (
        11.2,
        10.182,
        12.444,
    )
    assert (found.power_cap_percent, found.power_cap_speed) == (None, None)
    tight = answer(replace(question, base=replace(rich, domains=(PowerDomain("rack", 4000.0),))))
    assert tight.starts_now
    assert (tight.power_cap_percent, tight.power_cap_speed, tight.watts) == (70, 0.9, 3840.0)
    assert tight.kilowatt_hours == round(3840 * 8000 / 3.6e6, 3)
    assert "limited to 70%" in tight.reason


def test_a_service_that_may_sleep_says_what_wakes_it() -> None:
    question = asked(service("web", minReplicas=0))
    nothing = replace(question, base=replace(question.snapshot, jobs=()))
    assert "request" in answer(nothing).reason
    assert "nothing to place" in answer(replace(nothing, service=False)).reason


def test_a_forecast_is_told_beside_how_earlier_ones_turned_out() -> None:
    waits = answer(asked(job("draft"), full=True))
    told = with_forecast(
        waits, Answer("draft", (60.0, 7260.0), None, (120.0, 8000.0)), Calibration(9, 0.5, 0.9)
    )
    assert told.when == "Likely in 60 s, nine times in ten within 2 h 01 min"
    assert (told.start_p90_seconds, told.end_p50_seconds, told.past_forecasts) == (7260.0, 120.0, 9)
    silent = with_forecast(waits, None, Calibration())
    assert (silent.when, silent.start_p50_seconds) == (waits.when, None)


@pytest.mark.parametrize(("text", "said"), [("", ""), ("there is room", "There is room."), ("Why?", "Why?")])
def test_reasons_become_sentences(text: str, said: str) -> None:
    assert as_sentence(text) == said


def test_the_load_of_a_node_is_what_its_jobs_hold() -> None:
    loads = loads_of(asked(job("draft"), full=True).snapshot).nodes
    assert [(load.name, load.capacity, load.allocated) for load in loads] == [
        ("node-0", 8.0, 8.0),
        ("node-1", 8.0, 8.0),
    ]


@pytest.mark.parametrize(
    "draft",
    [
        sized("draft"),
        sized("draft", width=256),
        sized("draft", shape={"acceleratorsPerPod": 2}),
        job("draft"),
        service("draft"),
    ],
    ids=["known class", "new class", "new size", "no class", "service"],
)
def test_a_draft_beside_the_last_snapshot_is_the_snapshot_built_with_it(draft: Draft) -> None:
    seen = ClusterObjects(jobs=(sized("there"),), pools=(pool("cpu"),), nodes=nodes_of(), tenants=TENANTS)
    last = build(seen, NOW)
    base, added = with_draft(last, seen, draft, NOW)
    question = replace(asked(job("x")), base=base, drafts=added)
    assert question.snapshot == build(seen, NOW, draft)
    assert (base is last) == (draft is not None and base.table == last.table)


def test_a_draft_of_a_tenant_whose_budget_is_spent_is_told_so() -> None:
    budget = {"period": "month", "cost": 0, "enforcement": "StopAdmitting"}
    seen = ClusterObjects(tenants=(tenant("team", ["team"], budgets=[budget]),))
    found = held_by_tenant(seen, job(), NOW)
    assert found is not None
    assert (found.starts_now, found.possible, found.code) == (False, True, "BudgetSpent")
    assert "budget of 0 in cost a month" in found.reason
    assert held_by_tenant(seen, service(), NOW) is None
    assert held_by_tenant(replace(seen, jobs=(admitted(job()),)), job(), NOW) is None
    assert held_by_tenant(ClusterObjects(tenants=TENANTS), job(), NOW) is None


def test_a_draft_that_needs_more_pods_than_its_tenants_limit_leaves_is_told_so() -> None:
    limited = (tenant("team", ["team"], limits={"pods": 3}),)
    taken = (running(0, owner="other"), running(1, owner="other"))
    seen = ClusterObjects(tenants=limited, pods=taken)
    assert held_by_tenant(seen, gang(1), NOW) is None
    waits, never = (held_by_tenant(seen, gang(size), NOW) for size in (2, 4))
    assert waits is not None
    assert (waits.starts_now, waits.possible, waits.code) == (False, True, "PodLimit")
    assert waits.reason.startswith("It needs 2 pods, and 1 of the 3 are left")
    assert never is not None
    assert (never.possible, never.when) == (False, "")
    assert held_by_tenant(replace(seen, tenants=TENANTS), gang(4), NOW) is None


def test_a_job_that_is_not_preemptible_hears_whose_guarantees_it_would_take() -> None:
    owner = tenant("owner", ["owner"], quota=[{"accelerator": "cpu", "guaranteed": 7}])
    node = Node("node-0", (("pool", "cpu"),), (), 8000, 32768, 100_000, (), True)
    seen = ClusterObjects(tenants=(*TENANTS, owner), pools=(pool(),), nodes=(node,))

    def asks(pods: int, *, preemptible: bool = False) -> TrainingJob:
        shape = {"minPods": pods, "maxPods": pods, "cpu": "1", "memory": "1Gi"}
        return job(template={"image": "own"}, shape=shape, preemptible=preemptible)

    draft = asks(2)
    base, jobs = with_draft(build(seen, NOW), seen, draft, NOW)
    allowed, [found] = offered(base, seen, draft, jobs, NOW)
    assert allowed == ()
    assert (found.starts_now, found.possible, found.code) == (False, True, "GuaranteesOfOthers")
    assert "needs 2 cpu, of which it may take 1" in found.reason
    for fits in (asks(1), asks(2, preemptible=True), service()):
        base, jobs = with_draft(base, seen, fits, NOW)
        assert offered(base, seen, fits, jobs, NOW) == (jobs, ())


def test_a_draft_whose_claim_does_not_exist_is_told_which() -> None:
    seen = ClusterObjects(tenants=TENANTS, volume_claims=frozenset({Key("team", "corpus")}))
    for draft in (job(output={"uri": "pvc://later/a"}), service(model={"uri": "pvc://later/a"})):
        told = held_by_claims(seen, draft)
        assert told is not None
        assert (told.starts_now, told.possible, told.code) == (False, True, "ClaimMissing")
        assert told.reason.startswith("PersistentVolumeClaim later does not exist in namespace team")
        assert held_by_claims(replace(seen, volume_claims=frozenset({Key("team", "later")})), draft) is None
        assert held_by_claims(replace(seen, volume_claims=None), draft) is None
    runs = replace(seen, jobs=(admitted(job()),))
    assert held_by_claims(runs, job(output={"uri": "pvc://later/a"})) is None
