"""A preview: one plan with the draft, in a long-lived process, and an answer without other tenants' data."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import (
    NOW,
    SETTINGS,
    admitted,
    engine_of,
    gang,
    job,
    pool,
    running,
    service,
    tenant,
)

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.contracts.preview import PreviewAnswer
from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool, ModelService, TrainingJob
from busbar.operator.errors import Busy, PreviewFailed
from busbar.operator.forecasts.forecaster import Forecaster
from busbar.operator.forecasts.job_history import JobHistory
from busbar.operator.forecasts.worker import Answer, Question
from busbar.operator.previews import worker as preview_worker
from busbar.operator.previews.preview import (
    Calibration,
    PreviewQuestion,
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
from busbar.operator.previews.replicas import held_at_zero, offered, with_target
from busbar.operator.previews.worker import HEAD, Previews, PreviewWorker, serve
from busbar.operator.scheduling.snapshot import DRAFT, ClusterObjects, Draft, build, with_draft
from busbar.operator.serving.scaling import desired_replicas
from busbar.operator.watch.projections import Node
from busbar.scheduler import (
    Cell,
    Finished,
    JobId,
    PerformanceTable,
    Placement,
    Policy,
    Pool,
    PowerDomain,
    Quota,
    Rate,
    Resources,
    Run,
    Snapshot,
    plan,
)
from busbar.scheduler import (
    Node as SNode,
)

NODES = tuple(
    Node(f"node-{i}", (("busbar.dev/pool", "cpu"),), (), 8000, 65536, 100_000, (), True) for i in range(2)
)
TENANTS = (tenant("team", ["team"]), tenant("others", ["others"]))
POLICY = Policy(solver=False)


def asked(draft: Draft, *, full: bool = False, admin: bool = False, **fields: object) -> PreviewQuestion:
    pools = (pool("cpu"),)
    seen = ClusterObjects(pools=pools, nodes=nodes_of(), tenants=TENANTS)
    snapshot = build(seen, NOW, draft)
    if full:
        own = snapshot.jobs[0]
        held = [
            replace(
                own,
                id=JobId(f"theirs-{node.name}"),
                name=f"secret-{node.name}",
                namespace="others",
                tenant="others",
                preemptible=False,
                run=Run(
                    Placement("cpu", "cpu", "resident", (node.name,), Resources(8000, 8000, 60_000)), 0.0
                ),
            )
            for node in snapshot.nodes
        ]
        snapshot = replace(snapshot, jobs=(*snapshot.jobs, *held))
    question = PreviewQuestion(
        base=snapshot,
        drafts=(),
        policy=POLICY,
        now=NOW.timestamp(),
        key=draft.key,
        service=draft.kind == "ModelService",
        admin=admin,
    )
    return replace(question, **fields)  # type: ignore[arg-type]


def nodes_of() -> tuple[Node, ...]:
    [selector] = pool("cpu").spec.node_selector.items()
    return tuple(replace(node, labels=(selector,)) for node in NODES)


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


LARGE = {
    "model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "intermediate_size": 53248, "vocab_size": 128256,
}  # fmt: skip


def gpu_pool(kind: str) -> tuple[AcceleratorPool, Node]:
    made = pool(kind.lower(), accelerator=kind, resourceName="nvidia.com/gpu")
    [selector] = made.spec.node_selector.items()
    node = Node(f"n-{kind}", (selector,), (), 64_000, 512_000, 100_000, (("nvidia.com/gpu", 8),), True)
    return made, node


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


CONFIG = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 256, "vocab_size": 512,
}  # fmt: skip


def sized(name: str, width: int = 128, **spec: Any) -> TrainingJob:
    config = CONFIG | {"hidden_size": width}
    return job(name, engine=engine_of(config), **spec)


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


def forecast(question: PreviewQuestion) -> Question:
    ended = tuple(Finished("others", 8000, NOW.timestamp() - 1000.0 * i) for i in range(20))
    return Question(Snapshot(), POLICY, question.now, (DRAFT,), ended, (), 5.0)


def test_the_child_answers_each_question_with_two_lines() -> None:
    starts = asked(job("draft"))
    waits = asked(job("draft"), full=True)
    questions = [starts, replace(waits, forecast=forecast(waits))]
    sent = b"".join(
        len(data).to_bytes(HEAD) + data for data in (pickle.dumps(question) for question in questions)
    )
    out = io.StringIO()
    serve(io.BytesIO(sent), out)
    first, nothing, second, told = out.getvalue().splitlines()
    assert PreviewAnswer.model_validate_json(first) == answer(starts)
    assert nothing == "null"
    assert PreviewAnswer.model_validate_json(second).waits
    assert json.loads(told)["job"] == DRAFT


@pytest.fixture
async def worker() -> AsyncIterator[PreviewWorker]:
    made = PreviewWorker(limit_s=120.0)  # a busy machine takes long to start a process
    yield made
    await made.close()


async def test_one_process_answers_one_question_after_the_other(worker: PreviewWorker) -> None:
    starts, waits = asked(job("draft")), asked(job("draft"), full=True)
    assert await worker.ask(starts, 5.0) == (answer(starts), None)
    child = worker._child
    assert child is not None
    assert (await worker.ask(waits, 5.0))[0] == answer(waits)
    assert (await worker.ask(replace(waits, admin=True), 5.0))[0] == answer(replace(waits, admin=True))
    assert worker._child is child
    child.kill()  # after any end of the process, the next request gets a new one
    await child.wait()
    assert (await worker.ask(starts, 5.0))[0].starts_now
    assert worker._child is not child


def runs(worker: PreviewWorker) -> bool:
    return worker._child is not None


async def test_a_snapshot_that_is_held_is_not_sent_with_the_question(worker: PreviewWorker) -> None:
    starts, waits = asked(job("draft")), asked(job("draft"), full=True)
    assert waits.base is not None
    await worker.hold(waits.base)
    assert not runs(worker)  # no request yet
    await worker.ask(starts, 5.0)
    await worker.hold(waits.base)
    assert worker._base is waits.base
    assert (await worker.ask(waits, 5.0))[0] == answer(waits)
    child = worker._child
    assert child is not None
    child.kill()
    await child.wait()
    assert (await worker.ask(waits, 5.0))[0] == answer(waits)  # it is sent again to the new process


async def test_after_a_preview_each_round_sends_its_snapshot_at_once(worker: PreviewWorker) -> None:
    nobody: Any = None
    forecasts = Forecaster(nobody, nobody, JobHistory(), SETTINGS, nobody, POLICY)
    seen = ClusterObjects(pools=(pool("cpu"),), nodes=nodes_of(), tenants=TENANTS)
    rounds = [build(seen, NOW)]
    previews = Previews(lambda: seen, lambda: rounds[-1], forecasts, POLICY, 5.0)
    previews.worker = worker
    previews.after_round()
    assert not runs(worker)
    assert (await previews.of(job("draft"), admin=False)).starts_now
    rounds.append(build(seen, NOW))
    previews.after_round()
    assert previews._sending is not None
    await previews._sending
    assert worker._base is rounds[-1]
    assert (await previews.of(job("draft"), admin=True)).nodes != ()
    await previews.close()


async def test_a_question_that_breaks_the_process_is_an_error_and_the_next_is_answered(
    worker: PreviewWorker,
) -> None:
    broken = replace(asked(job("draft")), base=None)
    with pytest.raises(PreviewFailed):
        await worker.ask(broken, 5.0)
    assert (await worker.ask(asked(job("draft")), 5.0))[0].starts_now


async def test_a_forecast_that_is_not_found_in_time_does_not_cost_the_answer(worker: PreviewWorker) -> None:
    waits = asked(job("draft"), full=True)
    found, told = await worker.ask(replace(waits, forecast=forecast(waits)), 0.0)
    assert (found, told) == (answer(waits), None)
    assert worker._child is None  # the result that it still computes is dropped


async def test_more_than_may_wait_are_told_to_come_back(
    worker: PreviewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview_worker, "MOST_WAITING", 0)
    with pytest.raises(Busy, match="try again"):
        await worker.ask(asked(job("draft")), 5.0)
    assert worker._child is None


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


def previewed(draft: ModelService, seen: ClusterObjects) -> PreviewAnswer:
    """What the operator answers, without the process that it is computed in."""
    base, jobs = with_draft(build(seen, NOW), seen, draft, NOW)
    jobs, kept_back = offered(base, seen, draft, jobs, NOW)
    question = replace(asked(draft), base=base, drafts=jobs, kept_back=kept_back)
    return with_engine_mode(answer(question), seen, draft)


def stored(**spec: Any) -> ModelService:
    return service("web", model={"uri": "pvc://claim/model"}, **spec)


@pytest.mark.parametrize(
    ("spec", "replicas", "starting", "possible"),
    [
        ({"replicas": 1}, 1, 1, True),
        ({"replicas": 16}, 16, 16, True),
        ({"replicas": 17}, 17, 16, False),
        ({"replicas": 100}, 100, 16, False),
        ({"minReplicas": 3, "maxReplicas": 20}, 3, 3, True),
        ({"scaling": {"external": {"cpu": 5}}}, 5, 5, True),
        ({"scaling": {"external": {"cpu": 20}}}, 20, 16, False),
    ],
)
def test_all_replicas_that_a_service_begins_with_are_counted(
    spec: dict[str, Any], replicas: int, starting: int, possible: bool
) -> None:
    seen = ClusterObjects(pools=(pool("cpu", pricePerHour=0.5),), nodes=nodes_of(), tenants=TENANTS)
    found = previewed(stored(**spec), seen)
    assert (found.replicas, found.replicas_starting, found.possible) == (replicas, starting, possible)
    assert (found.starts_now, found.pods, found.accelerators) == (possible, starting, starting)
    assert found.cost_per_hour == 0.5 * starting
    if not possible:
        assert f"Where nothing else runs, 16 of the {replicas} replicas have room." in found.reason
        assert (
            found.when
            == f"Now for 16 of {replicas} replicas; for the others: Never, unless something is changed"
        )
        assert (found.waits, found.changes) == (False, ())


def test_replicas_that_wait_for_others_work_are_possible_and_the_rest_starts() -> None:
    draft = stored(replicas=10)
    question = asked(draft, full=True)
    assert question.base is not None
    left = tuple(job for job in question.base.jobs if "node-1" not in job.name)
    found = answer(replace(question, base=replace(question.base, jobs=left)))
    assert (found.starts_now, found.possible, found.replicas, found.replicas_starting) == (False, True, 10, 8)
    assert found.reason.startswith("8 of its 10 replicas start: ")
    none = answer(question)
    assert (none.possible, none.waits, none.replicas, none.replicas_starting) == (True, True, 10, 0)


def test_a_service_with_a_target_of_zero_replicas_asks_for_nothing() -> None:
    seen = ClusterObjects(pools=(pool("cpu"),), nodes=nodes_of(), tenants=TENANTS)
    found = previewed(stored(replicas=0), seen)
    assert (found.starts_now, found.possible, found.pool) == (False, True, "")
    assert found.reason.startswith("It asks for no replicas now")


@pytest.mark.parametrize(
    ("spec", "held"),
    [
        ({"replicas": 0}, True),
        ({"replicas": 0, "minReplicas": 0}, False),
        ({"scaling": {"external": {"cpu": 0}}}, True),
        ({"replicas": 1}, False),
        ({"minReplicas": 0}, False),
    ],
)
def test_a_service_that_no_request_wakes_is_told_so(spec: dict[str, Any], held: bool) -> None:
    found = held_at_zero(stored(**spec))
    assert (found is not None) is held
    demand = ServiceDemand(namespace="team", name="web", waiting=1, last_request_age_seconds=0.0)
    woken, _, _ = desired_replicas(stored(**spec), demand, None, NOW, has_model=True)
    assert (woken == 0) is held  # as the autoscaler does with a request that waits
    if found is not None:
        assert (found.starts_now, found.possible) == (False, True)
        assert "no request starts one" in found.reason


@pytest.mark.parametrize(("enforcement", "starting"), [("StopAdmitting", 2), ("Preempt", 0)])
def test_a_spent_budget_leaves_a_service_what_it_would_leave_it_when_created(
    enforcement: str, starting: int
) -> None:
    budget = {"period": "month", "cost": 0, "enforcement": enforcement}
    seen = ClusterObjects(
        pools=(pool("cpu"),), nodes=nodes_of(), tenants=(tenant("team", ["team"], budgets=[budget]),)
    )
    draft = stored(replicas=5, minReplicas=2)
    base, jobs = with_draft(build(seen, NOW), seen, draft, NOW)
    jobs, kept_back = offered(base, seen, draft, jobs, NOW)
    assert (len(jobs), len(kept_back)) == (starting, 5 - starting)
    assert {each.code for each in kept_back} == {"BudgetSpent"}
    if starting:
        found = previewed(draft, seen)
        assert (found.replicas, found.replicas_starting, found.possible) == (5, 2, True)
        assert "budget of 0 in cost a month" in found.reason


@pytest.mark.parametrize(
    ("most", "taken", "starting", "possible"), [(3, 0, 3, False), (5, 0, 5, True), (6, 3, 3, True)]
)
def test_replicas_beyond_the_tenants_limit_of_pods_do_not_start(
    most: int, taken: int, starting: int, possible: bool
) -> None:
    seen = ClusterObjects(
        pools=(pool("cpu"),),
        nodes=nodes_of(),
        tenants=(tenant("team", ["team"], limits={"pods": most}),),
        pods=tuple(running(rank, owner="other") for rank in range(taken)),
    )
    found = previewed(stored(replicas=5), seen)
    assert (found.replicas, found.replicas_starting, found.possible) == (5, starting, possible)
    if starting < 5:
        assert found.code == "PodLimit"
        assert f"It needs 5 pods, and {most - taken} of the {most} are left" in found.reason


def test_replicas_in_several_pools_are_told_by_pool() -> None:
    made = job("made", engine=engine_of(CONFIG), status={"phase": "Succeeded"})
    pools, nodes = zip(*(gpu_pool(kind) for kind in ("L4", "H100")), strict=True)
    seen = ClusterObjects(pools=pools, nodes=nodes, tenants=TENANTS, jobs=(made,))
    found = previewed(service("web", model={"trainingJob": "made"}, replicas=12), seen)
    assert (found.starts_now, found.accelerators, set(found.pool.split(", "))) == (True, 12, {"l4", "h100"})
    counts = [int(word) for word in found.reason.split("By pool: ")[1].split() if word.isdigit()]
    assert (sum(counts), len(counts)) == (12, 2)


@pytest.mark.parametrize(
    ("ttft", "tpot", "kinds", "nearest"),
    [
        (2000, 100, ("L4", "H100"), ""),
        (60_000, 60, ("L4", "H100"), ""),
        (1, 100, ("L4", "H100"), "H100"),
        (2000, 1, ("L4", "H100"), "H100"),
        (2000, 1, ("H100", "L4"), "H100"),
        (2000, 20, ("L4",), "L4"),
        (2000, 1, ("Unheard-of", "H100"), ""),
    ],
)
def test_a_service_is_told_that_no_type_keeps_its_target_and_which_comes_nearest(
    ttft: int, tpot: int, kinds: tuple[str, ...], nearest: str
) -> None:
    config = LARGE | {
        "hidden_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 14336,
    }  # fmt: skip
    made = job("made", engine=engine_of(config), status={"phase": "Succeeded"})
    pools, nodes = zip(*(gpu_pool(kind) for kind in kinds), strict=True)
    seen = ClusterObjects(pools=pools, nodes=nodes, tenants=TENANTS, jobs=(made,))
    slo = {"ttftMilliseconds": ttft, "tpotMilliseconds": tpot}
    draft = service("web", model={"trainingJob": "made"}, replicas=1, slo=slo)
    starts = previewed(draft, seen)
    found = with_target(starts, seen, draft)
    assert found.starts_now
    assert found.possible
    if not nearest:
        assert found == starts
        return
    assert found.code == "TargetUnreachable"
    assert (
        f"No type keeps spec.slo at any load: by data sheets {nearest} (resident) comes nearest: alone, with 1 token"
        in found.reason
    )
    assert f"the target is {ttft} ms and {tpot} ms" in found.reason


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
