"""Engine modes in the mix: a replica's speed counts in the mode that it would have in a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.operator.builders import NOW, job, pool, service
from tests.operator.serving.fleet_world import STEP, World, windows
from tests.operator.serving.test_reconcile import BIG

from busbar.kube.contracts.demand import ServiceDemand
from busbar.kube.informer import Key
from busbar.kube.types import AcceleratorPool
from busbar.operator.profiles.table import workload
from busbar.operator.scheduling.builder import SnapshotBuilder
from busbar.operator.serving.claims import claims
from busbar.operator.serving.replica_speed import Speeds, speeds
from busbar.operator.serving.scaling_status import pool_rows
from busbar.scheduler.autoscale.step_model import Slo

MADE_BY = workload(job(engine=BIG))
SLO = Slo(2.0, 0.1)


def gpu(name: str, kind: str, gib: float, price: float) -> AcceleratorPool:
    made = pool(name, accelerator=kind, resourceName="nvidia.com/gpu", pricePerHour=price, memoryGib=gib)
    return made.model_validate(made.to_wire() | {"status": {"capacity": 16}})


LARGE, SMALL, TINY = gpu("large", "A100", 80, 4.0), gpu("small", "L4", 12, 0.5), gpu("tiny", "T4", 2, 0.1)


def measured(kind: str, mode: str = "resident", **step: Any) -> dict[str, Any]:
    return {
        "workloadClass": "serve-x", "accelerator": kind, "accelerators": 1, "mode": mode, "kvTokens": 200_000,
        "stepModel": STEP | step,
    }  # fmt: skip


def found(*lines: dict[str, Any], known: bool = True) -> Speeds:
    of = World(lines=list(lines)).service
    return speeds(of, [LARGE, SMALL, TINY], (), SLO, MADE_BY if known else None)


def test_a_type_on_which_only_codes_fit_is_predicted_in_that_mode_and_says_why() -> None:
    told = found(measured("A100"))
    assert told.modes == {"large": "resident", "small": "int8", "tiny": "stream"}
    assert told.models.keys() == {"large", "small"}
    assert "tiny" in told.refused
    assert told.refused["tiny"].startswith("on T4: It fits in no engine mode")
    why = told.predicted["small"]
    assert why.startswith(
        "The speed on L4 (int8) is predicted by A100 (resident). Engine mode int8, because resident needs"
    )
    assert told.models["small"].d_s > told.models["large"].d_s, "an L4 has fewer operations a second"


def test_what_was_measured_in_the_mode_counts_and_in_another_mode_it_only_predicts() -> None:
    told = found(measured("A100"), measured("L4", "int8", secondsPerStep=0.03))
    assert (told.models["small"].a_s, told.predicted) == (0.03, {})
    other = found(measured("L4", secondsPerStep=0.03))
    assert other.predicted["small"].startswith("The speed on L4 (int8) is predicted by L4 (resident).")
    assert other.models["small"].a_s < 0.03, "it reads half as much"


def test_without_the_models_dimensions_nothing_is_predicted() -> None:
    told = found(measured("A100"), known=False)
    assert told.models.keys() == {"large"}
    assert told.refused["small"] == "no replica has measured its speed on L4 yet"
    assert found().models == {}


def test_the_mix_takes_a_cheaper_type_in_the_mode_that_fits_there_and_the_status_tells_it() -> None:
    world = World(
        lines=[measured("A100", secondsPerStep=0.004, secondsPerSequence=0.0001)], pools=(LARGE, SMALL)
    )
    demand = ServiceDemand(
        namespace="team", name="web", windows=[w for s in (10, 60, 180) for w in windows(0.5, s)]
    )
    world.desired = 0
    plan = None
    for second in range(40):
        at = replace(world.seen(0.5), made_by=MADE_BY, demand=demand, reading=second, now_s=1000.0 + second)
        plan = world.fleets.plan(at)
        world.desired = sum((plan.target or {}).values()) or 1
    assert plan is not None
    assert plan.target == {"small": 1}
    assert plan.modes["small"] == "int8"
    [row] = pool_rows(world.service, (), {"small": SMALL}, plan, 1)
    assert (row.pool, row.mode, row.predicted) == ("small", "int8", True)
    assert "is predicted by A100 (resident)" in plan.message


def test_a_replica_is_not_placed_where_its_model_fits_in_no_mode() -> None:
    trained = job("big", engine=BIG, status={"phase": "Succeeded"})
    of = service(model={"trainingJob": "big"}, status={"desiredReplicas": 1})

    def asked(*pools: AcceleratorPool) -> list[tuple[str, ...]]:
        return [claim.job.pools for claim in claims(of, (), (trained,), "team", NOW, pools=pools)]

    assert asked(LARGE, SMALL, TINY) == [("large", "small")]
    assert asked(LARGE, SMALL) == [()], "any will do"
    assert asked(TINY) == [()], "the engine says what it lacks"
    of = service(model={"trainingJob": "big"}, status={"desiredReplicas": 1}, args=["--weights=stream"])
    assert asked(LARGE, SMALL, TINY) == [()], "who chooses the weights knows where they fit"


def test_another_memory_of_a_pool_makes_the_claims_of_services_anew() -> None:
    builder = SnapshotBuilder()
    trained = job("big", engine=BIG, status={"phase": "Succeeded"})
    of = service(model={"trainingJob": "big"}, status={"desiredReplicas": 1})
    builder.put("TrainingJob", Key("team", "big"), trained)
    builder.put("ModelService", Key("team", "web"), of)
    for made in (LARGE, TINY):
        builder.put("AcceleratorPool", Key("", made.metadata.name), made)
    before = builder.snapshot(NOW, full=True)
    assert [one.pools for one in before.jobs if one.name == "web-0"] == [("large",)]
    larger = gpu("tiny", "T4", 16, 0.1)
    larger = larger.model_copy(update={"metadata": larger.metadata.model_copy(update={"generation": 2})})
    builder.put("AcceleratorPool", Key("", "tiny"), larger)
    after = builder.snapshot(NOW, full=False)
    assert [one.pools for one in after.jobs if one.name == "web-0"] == [()]
