"""Training jobs on limited boards: their limits, what they tell, and what is learned goes to their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import ENGINE, job, pod, replica
from tests.operator.power.parts import domain, node

from busbar.kube.contracts.power import Backend, LimitsReport
from busbar.kube.contracts.workload import StepPhaseSeconds, TrainingStatus
from busbar.kube.informer import Key
from busbar.kube.types import TrainingJob
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.board_limits import HELD_S, HeldPods
from busbar.operator.power.limited_runs import limited_runs, power_use, with_curves
from busbar.operator.power.membership import membership
from busbar.operator.power.readings import HOST, Metered, Reading
from busbar.operator.power.work import NodeWork, WorkKind
from busbar.operator.profiles.paces import Cost, LimitCurves, LimitedRun, Told
from busbar.operator.watch.projections import Pod, Requests
from busbar.scheduler.power import Phase

NODES = [node("n0", rack="a"), node("n1", rack="a"), node("n2", rack="b")]
FEED = membership([domain("rack", 9000.0, None, "Lease", 200.0, rack="a")], NODES)
LIMITS = LimitsReport.model_validate({"state": "Leased", "sequence": 1, "term": 1})
TOLD = TrainingStatus(tokens=5000, phase_seconds=StepPhaseSeconds(forward=2.0, backward=4.0, other=0.5))


def reading(name: str, *limits_w: float | None, draws: float = 1.0, **fields: Any) -> Reading:
    """Boards of 400 W with these limits that draw so much of them."""
    boards = {
        f"{name}-{index}": Metered(draws * (limit_w or 400.0), 0.0, 100.0, 400.0, limit_w)
        for index, limit_w in enumerate(limits_w)
    }
    host = {HOST: Metered(500.0, 0.0, 200.0, 1000.0)}
    given: dict[str, Any] = {"boards_from": Backend.NVML, "host_from": Backend.RAPL, "limits": LIMITS}
    return Reading(name, 100.0, "e1", 1.0, boards | host, **(given | fields))


def gang(*nodes: str, verified: bool = True, **status: Any) -> tuple[dict[Key, TrainingJob], list[Pod]]:
    """A job with a pod of two boards on each of the nodes."""
    place = {
        "id": "x", "pool": "p", "accelerator": "A100", "mode": "resident", "pods": len(nodes), "nodes": list(nodes),
        "image": {"verified": verified},
    }  # fmt: skip
    place |= status.pop("admission", {})
    made = job("big", engine=ENGINE, status={"phase": "Running", "attempt": 3, "admission": place, **status})
    boards = Requests(devices=(("nvidia.com/gpu", 2),))
    pods = [
        replace(
            pod(kind="trainingjob", owner="big", node=name, requests=boards), rank=rank, uid=f"pod-{rank}"
        )
        for rank, name in enumerate(nodes)
    ]
    return {Key("team", "big"): made}, pods


def runs(
    made: tuple[dict[Key, TrainingJob], list[Pod]],
    *readings: Reading,
    told: TrainingStatus | None = TOLD,
    boards: Mapping[str, Boards] | None = None,
) -> list[LimitedRun]:
    jobs, pods = made
    answers = {} if told is None else {"pod-0": told}
    return limited_runs(FEED, {each.node: each for each in readings}, pods, jobs, answers, 97.0, boards or {})


def test_a_gang_has_the_lowest_limit_of_its_nodes_and_what_its_first_pod_tells() -> None:
    (found,) = runs(gang("n0", "n1"), reading("n0", 300.0, 300.0), reading("n1", 200.0, 208.0))
    assert found.part == 0.5
    assert found.told == Told(5000, 6.5)
    assert found.nodes == ("n0", "n1")
    assert found.name.endswith("-3")
    assert found.work[1:] == ("A100", "resident", Phase.TRAINING)
    assert found.binds
    assert found.cap == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        reading("n1", 200.0, 300.0),
        replace(reading("n1", 200.0, 200.0), at_s=96.0),
        reading("n1", 200.0, 200.0, boards_from=Backend.SIMULATED),
        reading("n1", 200.0, 200.0, limits=None),
        reading("n1"),
        reading("n0", 200.0, 200.0),
    ],
    ids=["boards differ", "old", "simulated", "takes no limits", "no boards", "silent"],
)
def test_a_limit_that_is_not_known_of_every_node_is_not_known(wrong: Reading) -> None:
    (found,) = runs(gang("n0", "n1"), reading("n0", 200.0, 200.0), wrong)
    assert found.part is None
    (found,) = runs(gang("n0", "n1"), reading("n0", 200.0, 200.0), reading("n1", 200.0, 200.0))
    assert found.part == 0.5


def test_where_it_is_known_which_boards_a_job_holds_the_limits_of_others_do_not_count() -> None:
    made = gang("n0", "n1")
    pods = [each.key for each in made[1]]
    uneven = reading("n0", 200.0, 200.0, 400.0, 100.0), reading("n1", 240.0, 260.0, 400.0, draws=0.5)
    own: dict[str, Boards] = {
        "n0": {"n0-0": (pods[0],), "n0-1": (pods[0],), "n0-2": (), "n0-3": (Key("team", "other"),)},
        "n1": {"n1-0": (pods[1],), "n1-1": (pods[1],), "n1-2": (Key("team", "other"),)},
    }
    assert runs(made, *uneven)[0].part is None
    (found,) = runs(made, *uneven, boards=own)
    assert (found.part, found.binds) == (0.5, True)
    idle = replace(uneven[0], meters={u: replace(m, watts=60.0) for u, m in uneven[0].meters.items()})
    busy = {**idle.meters, "n0-3": replace(idle.meters["n0-3"], watts=100.0)}
    (found,) = runs(made, replace(idle, meters=busy), uneven[1], boards=own)
    assert (found.part, found.binds) == (0.5, False), "what holds another's board does not hold it"
    late = {**own, "n0": dict.fromkeys(own["n0"], ())}
    assert runs(made, *uneven, boards=late)[0].part is None, "it is not known yet"


def test_boards_without_a_limit_have_all_that_they_can_draw() -> None:
    (found,) = runs(gang("n0"), reading("n0", None, None))
    assert (found.part, found.binds) == (1.0, False)


def test_a_limit_far_above_the_draw_does_not_bind() -> None:
    (found,) = runs(gang("n0"), reading("n0", 300.0, 300.0, draws=0.5))
    assert (found.part, found.binds) == (0.75, False)


def test_only_the_platforms_own_engine_teaches() -> None:
    full = reading("n0", 300.0, 300.0)
    assert runs(gang("n0", verified=False), full)[0].told is None
    assert runs(gang("n0"), full, told=None)[0].told is None
    assert runs(gang("n0"), full, told=TrainingStatus(tokens=7))[0].told is None
    assert runs(gang("n0"), full)[0].told == Told(5000, 6.5)


def test_jobs_that_are_not_wholly_on_limited_nodes_or_have_ended_are_left_out() -> None:
    full = reading("n0", 300.0, 300.0)
    assert runs(gang("n0", "n2"), full) == []
    jobs, pods = gang("n0")
    assert runs((jobs, [replace(each, phase="Succeeded") for each in pods]), full) == []
    assert runs(({}, pods), full) == []
    assert len(runs((jobs, pods), full)) == 1
    nothing = membership([domain("rack", 9000.0, None, "Observe", rack="a")], NODES)
    assert limited_runs(nothing, {"n0": full}, pods, jobs, {}, 97.0) == []


def test_what_is_written_of_the_attempt_is_taken_and_not_that_of_another() -> None:
    power = {"attempt": 3, "seconds": 50, "slowdown": 1.2}
    full = reading("n0", 300.0, 300.0)
    assert runs(gang("n0", power=power), full)[0].before == Cost(50.0, 1.2)
    assert runs(gang("n0", power=power | {"attempt": 2}), full)[0].before == Cost()
    (capped,) = runs(gang("n0", admission={"powerCapPercent": 70}), full)
    assert capped.cap == 0.7


def test_a_node_has_the_curve_of_what_trains_on_it_and_its_share_of_trials() -> None:
    curves = LimitCurves()
    (run,) = runs(gang("n0", "n1"), reading("n0", 200.0), reading("n1", 200.0))
    training = NodeWork(kind=WorkKind.TRAINING, weight=2.0)
    tokens = 0
    for second in range(0, 3600, 30):
        part = 1.0 if second % 120 < 60 else 0.6
        tokens += 30_000 if part == 1.0 else 24_000
        curves.look([replace(run, part=part, told=Told(tokens, float(second)))], float(second))
    works = {"n0": training, "n1": training, "n2": training}
    found = with_curves(works, [run], curves, 0.0)
    curve = curves.curve(run.work)
    assert curve is not None
    assert found["n0"].curves == found["n1"].curves == {Phase.TRAINING: curve}
    assert found["n2"] == training
    other = replace(run, name="other", work=run.work._replace(mode="optimizer-offload"), nodes=("n1",))
    found = with_curves(works, [run, other], curves, 0.0)
    assert found["n0"].curves == {Phase.TRAINING: curve}
    assert found["n1"] == training
    mixed = NodeWork(kind=WorkKind.UNKNOWN)
    assert with_curves({"n0": mixed, "n1": mixed}, [run], curves, 0.0)["n0"] == mixed
    fresh = LimitCurves()
    weights = {with_curves(works, [run], fresh, float(now_s))["n0"].weight for now_s in range(900)}
    assert weights == {1.0, 2.0, 4.0}
    twin = replace(run, name="twin")
    weights = {with_curves(works, [run, twin], fresh, float(now_s))["n0"].weight for now_s in range(900)}
    assert weights == {2.0}, "two jobs on a node: nobody could say which one a trial is of"


def test_a_job_is_told_its_limit_and_what_limits_have_cost() -> None:
    curves = LimitCurves()
    made = gang("n0")
    (run,) = runs(made, reading("n0", 200.0, 200.0))
    (big,) = made[0].values()
    assert power_use(big, curves) is None
    for second in range(101):
        curves.look([run], float(second))
    found = power_use(big, curves)
    assert found is not None
    assert (found.attempt, found.limit_percent, found.seconds) == (3, 50, 100)
    assert found.slowdown == pytest.approx(1.4, abs=0.1)


@pytest.mark.parametrize(
    ("of", "held"),
    [
        (reading("n0", 200.0, None), True),
        (reading("n0", 200.0, draws=0.5), False),
        (reading("n0", 400.0), False),
        (reading("n0", None), False),
        (reading("n0", 200.0, boards_from=Backend.SIMULATED), False),
        (replace(reading("n0", 200.0), at_s=10.0), False),
    ],
    ids=["one board of two", "it draws less", "its nameplate", "no limit", "simulated", "old"],
)
def test_pods_of_a_node_are_held_while_a_board_draws_what_its_limit_lets_it(of: Reading, held: bool) -> None:
    pods, on = HeldPods(), [replica(0, node="n0"), replica(1, node="n1")]
    pods.look({"n0": of}, on, {}, 50.0, 100.0)
    assert pods.uids == ({on[0].uid} if held else frozenset())


def test_a_pod_counts_as_held_for_two_minutes_more() -> None:
    pods, free, on = HeldPods(), {"n0": reading("n0", None)}, [replica(0, node="n0")]
    pods.look({"n0": reading("n0", 200.0)}, on, {}, 50.0, 100.0)
    pods.look(free, on, {}, 50.0, 100.0 + HELD_S - 1)
    assert pods.uids == {on[0].uid}
    pods.look(free, on, {}, 50.0, 100.0 + HELD_S)
    assert pods.uids == frozenset()


def test_of_pods_that_share_a_node_those_are_held_whose_boards_are_or_may_be() -> None:
    held, free, late, gone = (replica(index, node="n0") for index in range(4))
    boards: dict[str, Boards] = {"n0": {"n0-0": (held.key,), "n0-1": (free.key,), "n0-2": ()}}
    pods, of = HeldPods(), {"n0": reading("n0", 200.0, 400.0, 400.0)}
    pods.look(of, [held, free, late, replace(gone, phase="Failed")], boards, 50.0, 100.0)
    assert pods.uids == {held.uid, late.uid}
