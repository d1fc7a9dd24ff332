"""What becomes of all replicas of a service, in one answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import (
    NOW,
    engine_of,
    job,
    pool,
    running,
    service,
    tenant,
)
from tests.operator.previews.drafts import CONFIG, LARGE, TENANTS, asked, gpu_pool, nodes_of

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.contracts.preview import PreviewAnswer
from busbar.kube.types import ModelService
from busbar.operator.previews.preview import (
    answer,
    with_engine_mode,
)
from busbar.operator.previews.replicas import held_at_zero, offered, with_target
from busbar.operator.scheduling.snapshot import ClusterObjects, build, with_draft
from busbar.operator.serving.scaling import desired_replicas


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
