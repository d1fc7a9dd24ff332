"""The reconcile of a ModelService and its replica count, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import (
    ENGINE,
    NOW,
    RENDERING,
    SETTINGS,
    admit,
    job,
    placement,
    pool,
    replica,
    service,
)

from busbar.kube.contracts.bearers import secret_name
from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.informer import Key
from busbar.kube.types import ModelService
from busbar.kube.types.engines import VLLM
from busbar.operator.decisions import Admit, Release, Wait
from busbar.operator.pods.manifests import KIND_TRAINING
from busbar.operator.profiles.table import workload
from busbar.operator.serving.engine_mode import engine_mode
from busbar.operator.serving.names import holders
from busbar.operator.serving.reconcile import reconcile
from busbar.operator.serving.replicas import wanted_indexes
from busbar.operator.serving.view import ModelPlace, ServiceView, model_uri
from busbar.operator.watch.projections import Pod
from busbar.operator.write.actions import Apply, Create, Delete, LiftGate, Patch, PostToPod


def view(of: ModelService, *pods: Pod, **fields: Any) -> ServiceView:
    base = ServiceView(of, pods, NOW, SETTINGS, RENDERING, ModelPlace(uri="pvc://claim/model"))
    return replace(base, **fields)


def wanting(count: int, **spec: Any) -> ModelService:
    status = {"desiredReplicas": count, "observedGeneration": 1}
    return service(replicas=count, status=status, **spec)


def test_a_new_service_wants_its_first_replica() -> None:
    update = reconcile(view(service()))
    assert update.status is not None
    assert update.status.desired_replicas == 1


def test_a_replica_is_created_where_the_plan_says_gated_and_pinned() -> None:
    update = reconcile(view(wanting(1)), (admit(),))
    applied, create = update.actions
    assert isinstance(applied, Apply)
    assert isinstance(create, Create)
    assert applied.body["type"] == "busbar.dev/bearers"
    spec = create.body["spec"]
    assert create.key.name == "web-0"
    assert spec["schedulingGates"] == [{"name": "busbar.dev/admission"}]
    assert "node-0" in str(spec["affinity"])


BIG: dict[str, Any] = {
    **ENGINE,
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        }
    },
}
"""7 B parameters in float32 (the job trains a tokenizer of 512 tokens)."""


@pytest.mark.parametrize(
    ("memory_gib", "fields", "mode", "said"),
    [
        (80, {}, "resident", ""),
        (24, {}, "int8", "Engine mode int8, because resident needs 27.1 GiB and the L4 has 22.1 GiB"),
        (
            6,
            {},
            "stream",
            "Engine mode stream, because resident needs 27.1 GiB and int8 needs 7.6 GiB and the L4 has",
        ),
        (2, {}, "stream", "It fits in no engine mode: stream needs"),
        (24, {"args": ["--weights-dtype", "int4"]}, None, ""),
        (24, {"args": ["--weights=stream"]}, None, ""),
        (24, {"engine": "vllm", "image": "vllm"}, None, ""),
    ],
    ids=["room", "codes", "streamed", "nowhere", "own codes", "own streaming", "another engine"],
)
def test_a_replica_starts_in_the_mode_that_fits_its_accelerator_and_says_why(
    memory_gib: int, fields: dict[str, Any], mode: str | None, said: str
) -> None:
    of = wanting(1, **fields)
    made_by = workload(job(engine=BIG))
    device = pool("l4", accelerator="L4", resourceName="nvidia.com/gpu", memoryGib=memory_gib)
    update = reconcile(
        view(of, model=ModelPlace("pvc://claim/model", made_by=made_by), pools={"l4": device}),
        (Admit(placement(pool="l4", accelerator="L4"), "there is room", "7", 0),),
    )
    create = update.actions[-1]
    assert isinstance(create, Create)
    env = {item["name"]: item["value"] for item in create.body["spec"]["containers"][0]["env"]}
    assert env.get("BUSBAR_MODE") == mode
    told = [text for reason, text in update.notices if reason == "ModeChosen"]
    assert [said in text for text in told] == [True] * bool(said)


def test_on_a_cpu_the_pods_memory_decides_and_without_one_nothing_is_chosen() -> None:
    made_by = workload(job(engine=BIG))
    for memory, mode in (("40Gi", "resident"), ("6Gi", "stream"), (None, None)):
        of = service(shape={"cpu": "2"} | ({} if memory is None else {"memory": memory}))
        choice = engine_mode(of, made_by, pool())
        assert (None if choice is None else choice.mode) == mode
    assert engine_mode(service(shape={"cpu": "2", "memory": "8Gi"}), None, pool()) is None


def test_an_order_for_a_replica_that_is_not_wanted_creates_nothing() -> None:
    assert reconcile(view(wanting(1), replica(0)), (admit(index=1),)).actions == ()


def test_a_refused_replica_is_told_where_a_person_reads_it() -> None:
    for of, pods in ((wanting(1), ()), (wanting(2), (replica(0),))):
        update = reconcile(view(of, *pods, refused="exceeded quota: team"))
        assert update.status is not None
        assert "exceeded quota: team" in (update.status.message or "")
    assert update.status is not None
    assert update.status.phase == "Ready"


@pytest.mark.parametrize(
    ("fields", "owner"),
    [
        ({"kind": "", "job": "", "owner": ""}, "nobody"),
        ({"kind": "", "job": "", "owner": "ReplicaSet web-5d4c"}, "ReplicaSet web-5d4c"),
        ({}, "an earlier service named web"),
        ({"kind": KIND_TRAINING, "job": "train"}, "train"),
    ],
    ids=["bare", "owned", "earlier", "a job's"],
)
def test_a_replica_whose_name_is_taken_is_not_made_and_its_service_says_by_whom(
    fields: dict[str, str], owner: str
) -> None:
    text = f"are tried again: pod web-1 exists already and belongs to {owner}."
    squatter = replace(replica(1), key=Key("team", "web-1"), **{"owner_uid": "uid-other", **fields})  # type: ignore[arg-type]
    of = wanting(2)
    held = holders(of, [0, 1], (replica(0),), {squatter.key: squatter})
    assert held == {1: squatter}
    update = reconcile(view(of, replica(0), holders=held), (admit(index=1),))
    assert update.actions == ()
    assert update.status is not None
    assert (update.status.phase, text in (update.status.message or "")) == ("Ready", True)
    alone = reconcile(view(of, holders={1: squatter}, refused="exceeded quota: team"))
    assert alone.status is not None
    assert (alone.status.phase, alone.status.reason) == ("Queued", "PodsRefused")
    assert text in (alone.status.message or "")


def test_own_pods_and_pods_elsewhere_take_no_replicas_name() -> None:
    of = wanting(2)
    mine = {replica(0).key: replica(0)}
    elsewhere = replace(replica(1), key=Key("other", "web-1"), owner_uid="uid-other")
    assert holders(of, [0, 1], (), mine) == {}, "made a moment ago, and not in the list of own pods yet"
    assert holders(of, [0, 1], (replica(0),), {**mine, elsewhere.key: elsewhere}) == {}
    freed = reconcile(view(of, replica(0)), (admit(index=1),))
    assert any(isinstance(action, Create) for action in freed.actions)


def test_a_replica_that_its_node_cannot_take_is_removed_and_planned_again() -> None:
    for seconds, kinds in ((59, []), (61, [Delete])):
        stuck = replica(
            0, phase="Pending", ready=False, node="", unschedulable_since=NOW - timedelta(seconds=seconds)
        )
        assert [type(a) for a in reconcile(view(wanting(1), stuck)).actions] == kinds


def test_restarts_of_the_present_replicas_are_counted_and_written_once() -> None:
    of = wanting(2)
    pods = (
        replica(0, restarts=2),
        replica(1, restarts=1),
        replica(2, restarts=9, phase="Failed", ready=False),
    )
    first = reconcile(view(of, *pods))
    assert first.status is not None
    assert first.status.restarts == 3
    again = of.model_copy(update={"status": first.status})
    assert reconcile(view(again, *pods)).status is None


def test_the_last_change_of_the_count_has_its_moment() -> None:
    of = service(replicas=2, status={"desiredReplicas": 1, "observedGeneration": 1})
    update = reconcile(view(of, replica(0)))
    assert update.status is not None
    assert update.status.last_scale_time == NOW


def test_a_gated_replica_that_is_wanted_is_let_go() -> None:
    born = replica(0, phase="Pending", ready=False, gates=("busbar.dev/admission",))
    assert [type(a) for a in reconcile(view(wanting(1), born)).actions] == [LiftGate]


def test_a_leaving_replica_is_marked_then_drained_then_deleted() -> None:
    of = wanting(0, drainSeconds=30)
    assert [type(a) for a in reconcile(view(of, replica(0))).actions] == [Patch]
    marked = replica(0, draining_since=NOW - timedelta(seconds=3))
    assert [type(a) for a in reconcile(view(of, marked)).actions] == [PostToPod]
    busy = ServingStatus(draining=True, running=1)
    waiting = view(of, marked, asked={marked.uid: True}, readings={marked.uid: busy})
    assert reconcile(waiting).actions == ()
    empty = replace(waiting, readings={marked.uid: ServingStatus(draining=True)})
    assert [type(a) for a in reconcile(empty).actions] == [Delete]


def test_a_draining_replica_is_told_of_those_that_stay_take_requests_and_know_its_bearer() -> None:
    of = wanting(3, drainSeconds=30)
    leaving = replica(3, draining_since=NOW - timedelta(seconds=3))
    others = (replica(0), replica(1, ready=False), replica(2, bearers=""))
    (drain,) = reconcile(view(of, leaving, *others)).actions
    assert isinstance(drain, PostToPod)
    assert drain.peers == (replica(0).key,)


def test_streams_of_a_draining_replica_go_to_those_that_decode() -> None:
    of = wanting(3, prefillReplicas=1)
    leaving = replica(258, draining_since=NOW - timedelta(seconds=3))
    for others, told in (
        ((replica(0), replica(256)), (replica(256).key,)),
        ((replica(0),), (replica(0).key,)),
    ):
        drains = [a for a in reconcile(view(of, leaving, *others)).actions if isinstance(a, PostToPod)]
        assert [drain.peers for drain in drains] == [told]


def test_a_replica_that_somebody_deletes_hands_its_streams_over_if_there_is_a_peer() -> None:
    of = wanting(2, drainSeconds=30)
    going = replica(1, deleting=True)

    def posts(*pods: Pod, **more: Any) -> list[PostToPod]:
        return [a for a in reconcile(view(of, *pods, **more)).actions if isinstance(a, PostToPod)]

    (drain,) = posts(replica(0), going)
    assert (drain.uid, drain.peers) == (going.uid, (replica(0).key,))
    assert posts(going) == []
    assert posts(replica(0), going, asked={going.uid: True}) == []


def test_what_the_replicas_measured_is_written_with_the_usage_and_not_before() -> None:
    step = {"secondsPerStep": 0.01, "secondsPerSequence": 0, "secondsPerThousandContextTokens": 0}
    step |= {"secondsPerPromptToken": 0, "rmsErrorSeconds": 0, "steps": 20}
    report = {"class": "serve-x", "accelerator": "cuda", "decodeTokensPerSecond": 20.0, "stepModel": step}
    said = ServingStatus.model_validate({"ready": True, "report": report})
    place = {"pool": "cpu", "accelerator": "cpu", "mode": "resident", "node": "node-0"}
    pod = replica(0, placement=json.dumps(place | {"perPod": {"accelerators_m": 2000}}))
    first = reconcile(view(wanting(1), pod, readings={pod.uid: said})).status
    assert first is not None
    [line] = first.measured or []
    assert (line.workload_class, line.accelerators, line.tokens_per_second) == ("serve-x", 2, 20.0)
    again = wanting(1).model_copy(update={"status": first})
    faster = ServingStatus.model_validate({"report": report | {"decodeTokensPerSecond": 30.0}})
    assert reconcile(view(again, pod, readings={pod.uid: faster})).status is None
    later = reconcile(view(again, pod, readings={pod.uid: faster}, now=NOW + timedelta(minutes=5))).status
    assert later is not None
    assert [m.tokens_per_second for m in later.measured or []] == [30.0]


def test_a_vllm_is_not_asked_to_drain_and_leaves_when_it_was_read_without_requests() -> None:
    of = wanting(0, drainSeconds=30, engine="vllm", image="vllm/vllm-openai")
    assert [type(a) for a in reconcile(view(of, replica(0, engine=VLLM))).actions] == [Patch]
    settles_s = SETTINGS.drain_settle_s + SETTINGS.poll_period_s + SETTINGS.poll_timeout_s

    def after(seconds: float, reading: ServingStatus | None) -> list[type]:
        marked = replica(0, engine=VLLM, draining_since=NOW - timedelta(seconds=seconds))
        readings = {marked.uid: reading} if reading is not None else {}
        return [type(a) for a in reconcile(view(of, marked, readings=readings)).actions]

    idle, busy = ServingStatus(ready=True), ServingStatus(ready=True, running=1)
    assert after(settles_s - 0.1, idle) == [], "requests that came since may not have been read"
    assert after(settles_s, busy) == []
    assert after(settles_s, ServingStatus(ready=True, waiting=1)) == []
    assert after(settles_s, None) == []
    assert after(settles_s, idle) == [Delete]
    assert after(31, busy) == [Delete]


def test_a_drain_ends_with_its_time() -> None:
    old = replica(0, draining_since=NOW - timedelta(seconds=31))
    assert [type(a) for a in reconcile(view(wanting(0, drainSeconds=30), old)).actions] == [Delete]


def test_a_replica_that_drains_unasked_is_replaced_and_an_event_says_so() -> None:
    of, serving = wanting(1), replica(0)
    for draining, actions, reasons in ((False, [], []), (True, [Patch], ["ReplicaReplaced"])):
        readings = {serving.uid: ServingStatus(draining=draining)}
        update = reconcile(view(of, serving, readings=readings))
        assert [type(a) for a in update.actions] == actions
        assert [reason for reason, _ in update.notices] == reasons
    marked = replica(0, draining_since=NOW - timedelta(seconds=3))
    assert wanted_indexes(of, [marked]) == [1]
    leaving = reconcile(view(of, marked, readings={marked.uid: ServingStatus(draining=True)}))
    assert ([type(a) for a in leaving.actions], leaving.notices) == ([Delete], ())


def test_a_replica_of_another_workload_key_is_replaced_and_one_of_an_earlier_release_is_not() -> None:
    for secret, reasons in (("busbar-bearers-uid-web-00000000", ["ReplicaReplaced"]), ("", [])):
        update = reconcile(view(wanting(1), replica(0, bearers=secret)))
        assert [reason for reason, _ in update.notices] == reasons
        assert [type(a) for a in update.actions] == [Patch] * len(reasons)


def replaced(of: ModelService, *pods: Pod) -> list[str]:
    """The replicas that are drained because of their key, while it is rotated."""
    new = replace(RENDERING, workload_key=b"n" * 16, former_workload_key=RENDERING.workload_key)
    update = reconcile(replace(view(of, *pods), rendering=new))
    assert {reason for reason, _ in update.notices} <= {"ReplicaReplaced"}
    return [action.key.name for action in update.actions if isinstance(action, Patch)]


def test_while_the_key_is_rotated_replicas_are_replaced_one_at_a_time() -> None:
    of, two = wanting(2), (replica(0), replica(1))
    made = replace(replica(2), bearers=secret_name(b"n" * 16, "uid-web"))
    assert replaced(of, *two) == ["web-0"]
    assert replaced(wanting(3), replica(1), made) == [], "one that is wanted is not there yet"
    going = replica(0, draining_since=NOW - timedelta(seconds=3))
    for present in (
        (going, replica(1)),
        (replica(1), replace(made, ready=False)),
        (replica(0), replica(1, deleting=True)),
    ):
        assert "web-1" not in replaced(of, *present)
    assert replaced(of, replica(1), made) == ["web-1"]
    assert replaced(of, made, replace(made, key=Key("team", "web-3"), rank=3, uid="uid-web-3")) == []


def test_the_only_replica_stays_until_the_former_key_is_taken_away() -> None:
    assert replaced(wanting(1), replica(0)) == []
    without = replace(RENDERING, workload_key=b"n" * 16)
    update = reconcile(replace(view(wanting(1), replica(0)), rendering=without))
    assert [reason for reason, _ in update.notices] == ["ReplicaReplaced"]


def test_the_replicas_that_serve_stay_when_one_must_go() -> None:
    of = wanting(1)
    assert wanted_indexes(of, [replica(0, ready=False), replica(1)]) == [1]


def reading(used: int = 0, **fields: Any) -> ServingStatus:
    report = {"class": "serve-x", "accelerator": "cpu", "kvBlockTokens": 16}
    status = {"ready": True, "kvBlocksTotal": 100, "kvBlocksFree": 100 - used, "report": report, **fields}
    return ServingStatus.model_validate(status)


@pytest.mark.parametrize(
    ("said", "leaves"),
    [
        ({0: reading(used=1), 1: reading(used=40), 2: reading(used=30)}, 0),
        ({0: reading(used=40), 1: reading(used=1), 2: reading(used=30)}, 1),
        ({0: reading(used=40), 1: reading(running=1, report=None), 2: reading(waiting=2)}, 1),
        ({0: reading(), 1: reading(), 2: reading()}, 2),
        ({}, 2),
    ],
    ids=["the first", "the second", "requests alone", "all idle", "nothing is known"],
)
def test_of_replicas_that_serve_the_one_with_fewest_tokens_to_move_leaves(
    said: dict[int, ServingStatus], leaves: int
) -> None:
    pods = [replica(rank) for rank in range(3)]
    readings = {pods[rank].uid: status for rank, status in said.items()}
    [mark] = reconcile(view(wanting(2), *pods, readings=readings)).actions
    assert isinstance(mark, Patch)
    assert mark.key.name == f"web-{leaves}"


def test_a_replica_that_does_not_serve_yet_leaves_before_those_that_have_least_to_move() -> None:
    pods = [replica(0), replica(1, ready=False), replica(2)]
    readings = {pods[1].uid: reading(used=90)}
    [mark] = reconcile(view(wanting(2), *pods, readings=readings)).actions
    assert isinstance(mark, Patch)
    assert mark.key.name == "web-1"


def test_a_number_is_not_reused_while_its_pod_is_still_there() -> None:
    of = wanting(1)
    assert wanted_indexes(of, [replica(0, deleting=True)]) == [1]


def test_a_replica_whose_place_is_taken_back_is_drained_first() -> None:
    update = reconcile(view(wanting(1), replica(0)), (Release("Preempted", "x", "7", index=0),))
    assert [type(a) for a in update.actions] == [Patch]


def test_a_service_without_room_says_why() -> None:
    update = reconcile(view(wanting(1)), (Wait("InsufficientCapacity", "Needs 1 H100."),))
    assert update.status is not None
    assert (update.status.phase, update.status.reason, update.status.message) == (
        "Queued", "InsufficientCapacity", "Needs 1 H100.",
    )  # fmt: skip


def test_usage_counts_what_the_old_status_held() -> None:
    status = {
        "desiredReplicas": 2, "replicas": 2, "readyReplicas": 2, "phase": "Ready", "reason": "Serving",
        "observedGeneration": 1, "pools": [{"pool": "cpu", "replicas": 2}],
        "lastUsageTime": (NOW - timedelta(seconds=60)).isoformat(),
    }  # fmt: skip
    update = reconcile(view(service(replicas=2, status=status), replica(0), replica(1)))
    assert update.status is not None
    assert update.status.usage is not None
    assert update.status.usage.accelerator_seconds == 120


@pytest.mark.parametrize(
    ("phase", "problem"),
    [(None, "not succeeded"), ("Running", "not succeeded"), ("Failed", "not succeeded"), ("Succeeded", "")],
)
def test_a_jobs_output_is_served_once_it_has_succeeded(phase: str | None, problem: str) -> None:
    trained = job("train", status={"phase": phase} if phase else None)
    place = model_uri(service(model={"trainingJob": "train"}), [trained])
    assert (problem in place.problem) if problem else (place.uri == "pvc://claim/model")


@pytest.mark.parametrize(
    ("adapters", "named"),
    [
        ({"adapter": {"rank": 4}}, "adapters (adapter)"),
        ({"adapter": {"rank": 4, "merge": True}}, ""),
        ({"adapters": [{"name": "a", "merge": True}, {"name": "b"}]}, "adapters (a, b)"),
    ],
    ids=["one", "merged", "several"],
)
def test_an_output_that_holds_adapters_is_no_model_to_serve(adapters: dict[str, Any], named: str) -> None:
    engine = {**ENGINE, "model": {"uri": "pvc://base/model"}, **adapters}
    trained = job("train", status={"phase": "Succeeded"}, engine=engine)
    place = model_uri(service(model={"trainingJob": "train"}), [trained])
    assert (f"is no model, but {named}" in place.problem) if named else (place.uri == "pvc://claim/model")


# -- the replica count ------------------------------------------------------------------------------------------


def count(of: ModelService, **demand: Any) -> int | None:
    said = ServiceDemand(namespace="team", name="web", **demand)
    status = reconcile(view(of, demand=said)).status or of.status
    return status.desired_replicas if status is not None else None


def asleep(**spec: Any) -> ModelService:
    status = {"desiredReplicas": 0, "observedGeneration": 1, "phase": "Idle", "reason": "Idle"}
    return service(minReplicas=0, status=status, **spec)


def test_a_held_request_wakes_a_service_whose_target_is_zero() -> None:
    assert count(asleep(replicas=0), waiting=1, last_request_age_seconds=0.0) == 1


def test_a_request_does_not_wake_a_service_that_may_not_be_at_zero_by_itself() -> None:
    of = service(minReplicas=1, replicas=0, status={"desiredReplicas": 0, "observedGeneration": 1})
    assert count(of, waiting=1) == 0


def test_a_suspended_service_stays_off_whatever_waits() -> None:
    assert count(asleep(suspend=True), waiting=5) == 0


def test_a_service_whose_tenant_is_gone_drains_and_says_what_would_start_it() -> None:
    update = reconcile(view(wanting(1, minReplicas=1), replica(0), has_tenant=False))
    assert update.status is not None
    assert (update.status.desired_replicas, update.status.phase) == (0, "Draining")
    at_rest = reconcile(view(service(minReplicas=1, status={"desiredReplicas": 0}), has_tenant=False))
    assert at_rest.status is not None
    assert (at_rest.status.phase, at_rest.status.reason) == ("Suspended", "TenantGone")
    assert "no Tenant has its namespace" in (at_rest.status.message or "")


def test_scaling_to_zero_is_obeyed_although_requests_came_just_now() -> None:
    of = service(minReplicas=0, replicas=0, status={"desiredReplicas": 2, "observedGeneration": 0})
    assert count(of, in_flight=3, last_request_age_seconds=0.0) == 0


def test_a_woken_service_is_still_awake_for_a_restarted_operator() -> None:
    of = service(
        minReplicas=0, replicas=0,
        status={"desiredReplicas": 1, "observedGeneration": 1, "lastRequestTime": NOW.isoformat()},
    )  # fmt: skip
    assert count(of, last_request_age_seconds=1.0) == 1


def test_an_autoscaled_service_follows_demand_within_its_bounds() -> None:
    of = service(minReplicas=1, maxReplicas=3, status={"desiredReplicas": 1, "observedGeneration": 1})
    assert count(of, in_flight=20) == 3
    assert count(of, in_flight=100) == 3


@pytest.mark.parametrize(("scaling", "after_s"), [({}, 60), ({"downAfterSeconds": 200}, 200)])
def test_by_requests_in_flight_one_leaves_after_the_window(scaling: dict[str, Any], after_s: int) -> None:
    of = service(maxReplicas=3, scaling=scaling, status={"desiredReplicas": 3, "observedGeneration": 1})
    demand = ServiceDemand(namespace="team", name="web", in_flight=1)
    state = None
    counts = []
    for ago_s in (0, after_s - 1, after_s):
        now = NOW + timedelta(seconds=ago_s)
        update = reconcile(view(of, demand=demand, scaling=state, now=now))
        state = update.scaling
        counts.append(state.replicas if state is not None else None)
    assert counts == [3, 3, 2]


def test_a_silent_gateway_scales_nothing_down() -> None:
    of = service(minReplicas=0, maxReplicas=3, status={"desiredReplicas": 3, "observedGeneration": 1})
    update = reconcile(view(of))
    assert update.status is not None
    assert update.status.desired_replicas == 3
