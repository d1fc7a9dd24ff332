"""What the boards of replicas draw beside what their engines count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.operator.power.test_limited_replicas import CLASS, DECODES, ENGINE, READS, on, tells
from tests.operator.power.test_limited_runs import reading

from busbar.kube.contracts.power import Backend
from busbar.kube.contracts.workload import ServingStatus
from busbar.operator.pods.manifests import KIND_TRAINING
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.own_replicas import OwnReplicas
from busbar.operator.power.readings import Reading
from busbar.operator.power.replica_draws import replica_draws
from busbar.operator.profiles.phase_draws import DrawPlace, ReplicaDraw
from busbar.operator.watch.projections import Pod

FOUR = reading("n0", 400.0, 400.0, 400.0, 400.0)


def draws(
    *pods: Pod, at: Reading = FOUR, told: ServingStatus | None = None, silent: str = ""
) -> list[ReplicaDraw]:
    answers = {pod.uid: told or tells() for pod in pods if pod.uid != silent}
    return replica_draws({at.node: at}, pods, answers, OwnReplicas(ENGINE), 97.0)


def test_the_boards_that_draw_most_are_those_that_replicas_hold() -> None:
    boards = dict(FOUR.meters)
    for name, watts in (("n0-0", 60.0), ("n0-1", 300.0), ("n0-2", 200.0), ("n0-3", 55.0)):
        boards[name] = replace(boards[name], watts=watts)
    busier = tells(prefill=READS.model_copy(update={"seconds": 1.6}))
    one, two = on("n0", 1), on("n0", 1, index=1)
    told = {one.uid: tells(), two.uid: busier}
    [found] = replica_draws({"n0": replace(FOUR, meters=boards)}, [one, two], told, OwnReplicas(ENGINE), 97.0)
    assert found.board_w == pytest.approx(250.0)
    assert found.place == DrawPlace(CLASS, "A100", 1, "resident")
    assert (found.part, found.board_max_w) == (1.0, 400.0)
    assert found.prefill_s == pytest.approx(1.2)
    assert found.decode_s == DECODES.seconds
    assert found.name != draws(one)[0].name, "other replicas on the node are another row of minutes"


def test_where_it_is_known_which_boards_replicas_hold_each_counts_by_itself_whatever_else_is_there() -> None:
    boards = dict(reading("n0", 200.0, 400.0, 300.0, 300.0).meters)
    for name, watts in (("n0-0", 180.0), ("n0-1", 390.0), ("n0-2", 210.0), ("n0-3", 190.0)):
        boards[name] = replace(boards[name], watts=watts)
    at = {"n0": replace(FOUR, meters=boards)}
    one, two, three = on("n0", 1), on("n0", 2, index=2), on("n0", 1, index=3)
    training = replace(on("n0", 1, index=1), kind=KIND_TRAINING)
    pods, told = [one, training, two], {pod.uid: tells() for pod in (one, two, three)}
    own: Boards = {"n0-0": (one.key,), "n0-1": (training.key,), "n0-2": (two.key,), "n0-3": (two.key,)}

    def found(holds: Boards) -> list[tuple[int, float, float]]:
        draws = replica_draws(at, [*pods, three], told, OwnReplicas(ENGINE), 97.0, {"n0": holds})
        return [(draw.place.accelerators, draw.part, draw.board_w) for draw in draws]

    assert found(own) == [(1, 0.5, 180.0), (2, 0.75, 200.0)]
    assert found({**own, "n0-0": (one.key, three.key)}) == [(2, 0.75, 200.0)], "two share a board"
    assert found({**own, "n0-1": (two.key,)}) == [(1, 0.5, 180.0)], "its boards have different limits"


def test_watts_need_no_limits() -> None:
    [found] = draws(on("n0", 4), at=replace(reading("n0", None, None, None, None), limits=None))
    assert (found.part, found.place.accelerators) == (1.0, 4)


def test_a_node_with_others_on_it_or_without_news_is_left_out() -> None:
    ours = on("n0", 1)
    assert len(draws(ours)) == 1
    training = replace(on("n0", 1, index=1), kind=KIND_TRAINING)
    assert draws(ours, training) == []
    assert len(draws(ours, replace(training, phase="Succeeded"))) == 1
    assert draws(ours, on("n0", 2, index=1)) == [], "of another size"
    foreign = on("n0", 1, index=1, digest=f"sha256:{'b' * 64}")
    assert draws(ours, foreign) == []
    assert draws(ours, on("n0", 1, index=1), silent=ours.uid) == []
    assert draws(ours, told=ServingStatus()) == []
    assert draws(ours, at=replace(FOUR, at_s=96.0)) == []
    assert draws(ours, at=replace(FOUR, boards_from=Backend.SIMULATED)) == []
    assert draws(ours, at=reading("n0", 400.0, 200.0)) == [], "its boards have different limits"
