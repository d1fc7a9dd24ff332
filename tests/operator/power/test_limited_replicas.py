"""Replicas on limited boards: their paces beside a step model without limits, and what these teach."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.builders import RENDERING, replica
from tests.operator.power.test_limited_runs import FEED, reading
from tests.operator.profiles.parts import profile

from busbar.kube.contracts.workload import ServingStatus, StepSums
from busbar.kube.types import PerformanceProfile
from busbar.operator.pods.engine_image import EngineImage
from busbar.operator.power import own_replicas
from busbar.operator.power.board_holders import Boards
from busbar.operator.power.limited_replicas import SETTLED_STEPS, LimitedReplicas
from busbar.operator.power.limited_runs import with_curves
from busbar.operator.power.membership import membership
from busbar.operator.power.own_replicas import OwnReplicas
from busbar.operator.power.readings import Reading
from busbar.operator.power.work import NodeWork, WorkKind
from busbar.operator.profiles.paces import LimitCurves, LimitedRun, Work
from busbar.operator.watch.projections import Pod, Requests
from busbar.scheduler.power import Phase
from busbar.scheduler.power.curves import slowdown

CLASS, DIGEST = "serve-llama-1b", f"sha256:{'a' * 64}"
ENGINE = EngineImage(RENDERING.workloads_image, (DIGEST,))
STEP = {
    "secondsPerStep": 0.01, "secondsPerSequence": 0.001, "secondsPerThousandContextTokens": 0.002,
    "secondsPerPromptToken": 0.0001, "steps": SETTLED_STEPS,
}  # fmt: skip
DECODES = StepSums(steps=100, sequences=800, context_tokens=400_000, prompt_tokens=0, seconds=3.0)
NOTHING = StepSums(steps=0, sequences=0, context_tokens=0, prompt_tokens=0, seconds=0)
READS = StepSums(steps=10, sequences=20, context_tokens=20_000, prompt_tokens=5_000, seconds=0.8)


def on(node: str, boards: int = 2, index: int = 0, digest: str = DIGEST, **fields: Any) -> Pod:
    place = {
        "pool": "p", "accelerator": "A100", "mode": "resident", "node": node,
        "perPod": {"accelerators_m": 1000 * boards, "cpu_m": 1000},
    }  # fmt: skip
    base = replica(
        index, node=node, image=ENGINE.reference, image_id=f"x@{digest}", placement=json.dumps(place)
    )
    return replace(base, requests=Requests(devices=(("nvidia.com/gpu", boards),)), **fields)


def known(boards: int = 2, **cell: Any) -> PerformanceProfile:
    """The class's profile, with what was measured without limits."""
    line = {"accelerator": "A100", "accelerators": boards, "tokensPerSecond": 900.0, "source": "Measured"}
    status = {"cells": [line | {"stepModel": STEP} | cell]}
    return PerformanceProfile.model_validate(
        profile(status=status).to_wire() | {"spec": {"workloadClass": CLASS}}
    )


def tells(prefill: StepSums = READS, decode: StepSums = DECODES) -> ServingStatus:
    return ServingStatus.model_validate(
        {"report": {"class": CLASS, "accelerator": "cuda"}, "phaseSteps": {"prefill": prefill, "decode": decode}}
    )  # fmt: skip


def runs(
    *pods: Pod,
    told: ServingStatus | None = None,
    readings: Sequence[Reading] = (reading("n0", 300.0, 300.0),),
    profiles: Sequence[PerformanceProfile] | None = None,
    boards: Mapping[str, Boards] | None = None,
) -> list[LimitedRun]:
    replicas = LimitedReplicas(OwnReplicas(ENGINE), lambda: (known(),) if profiles is None else profiles)
    answers = {pod.uid: told or tells() for pod in pods}
    return replicas.look(FEED, {each.node: each for each in readings}, pods, answers, 97.0, boards or {})


def test_the_pace_of_each_phase_is_the_time_that_the_model_has_for_its_steps() -> None:
    prefill, decode = runs(on("n0"))
    assert prefill.work == Work(CLASS, "A100", "resident", Phase.PREFILL)
    assert decode.work == Work(CLASS, "A100", "resident", Phase.DECODE)
    assert prefill.told is not None
    assert prefill.told == pytest.approx((0.1 + 0.02 + 0.04 + 0.5, 0.8))
    assert decode.told == pytest.approx((1.0 + 0.8 + 0.8, 3.0))
    for run in (prefill, decode):
        assert (run.part, run.binds, run.pauses, run.nodes) == (0.75, True, True, ("n0",))
    assert prefill.name != decode.name


@pytest.mark.parametrize(
    ("pod", "profiles", "told"),
    [
        (on("n0", digest=f"sha256:{'b' * 64}"), None, tells()),
        (on("n0", digest=""), None, tells()),
        (replace(on("n0"), placement=""), None, tells()),
        (on("n0"), (), tells()),
        (on("n0"), (known(stepModel=STEP | {"steps": SETTLED_STEPS - 1}),), tells()),
        (on("n0"), (known(boards=4),), tells()),
        (on("n0"), (known(accelerator="V100"),), tells()),
        (on("n0"), (known(mode="int8"),), tells()),
        (on("n0"), (known(powerCapPercent=70),), tells()),
        (on("n0"), None, tells().model_copy(update={"phase_steps": None})),
        (on("n0"), None, tells().model_copy(update={"report": None})),
    ],
    ids=[
        "another image", "an image nobody checked", "no placement", "no profile", "a model of few steps", "another size",
        "another type", "another mode", "a cell under a cap", "an engine that counts no steps", "no report",
    ],
)  # fmt: skip
def test_a_replica_without_a_model_to_compare_with_or_not_ours_teaches_nothing(
    pod: Pod, profiles: Sequence[PerformanceProfile] | None, told: ServingStatus
) -> None:
    found = runs(pod, profiles=profiles, told=told)
    assert [run.told for run in found] == [None, None]
    assert [run.told is None for run in runs(on("n0"))] == [False, False]


def test_a_replica_keeps_the_model_that_it_was_compared_with_first() -> None:
    profiles, pods, told = [known()], [on("n0")], {on("n0").uid: tells()}
    replicas = LimitedReplicas(OwnReplicas(ENGINE), lambda: profiles)
    readings = {"n0": reading("n0", 300.0, 300.0)}
    before = replicas.look(FEED, readings, pods, told, 97.0)
    profiles[0] = known(stepModel=STEP | {"secondsPerStep": 0.02})
    assert replicas.look(FEED, readings, pods, told, 97.0) == before
    assert replicas.look(FEED, readings, [], told, 97.0) == []
    after = replicas.look(FEED, readings, pods, told, 97.0)
    assert after[1].told == pytest.approx((2.0 + 0.8 + 0.8, 3.0)), "it is another replica"


def test_an_image_is_looked_at_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    own, pod = OwnReplicas(ENGINE), on("n0")
    for _ in range(2):
        place = own.place(pod)
        assert place is not None
        assert (place.accelerator, place.nodes) == ("A100", ("n0",))
    assert own.place(replace(pod, image_id=f"x@sha256:{'b' * 64}")) is None
    assert own.place(replace(pod, kind="trainingjob")) is None
    monkeypatch.setattr(own_replicas, "MOST", 1)
    assert own.place(on("n1")) is not None
    assert own.place(pod) == place


@pytest.mark.parametrize(
    "wrong",
    [
        reading("n0", 200.0, 300.0),
        replace(reading("n0", 300.0, 300.0), at_s=96.0),
        reading("n1", 300.0, 300.0),
        reading("n0", 300.0, limits=None),
    ],
    ids=["boards differ", "old", "silent", "takes no limits"],
)
def test_a_limit_that_is_not_known_is_none(wrong: Reading) -> None:
    assert [run.part for run in runs(on("n0"), readings=[wrong])] == [None, None]


def test_a_limit_holds_replicas_where_it_holds_half_of_the_boards_that_pods_have() -> None:
    one_of_four = reading("n0", 300.0, 300.0, 300.0, 300.0)
    boards = dict(one_of_four.meters)
    for name in ("n0-1", "n0-2", "n0-3"):
        boards[name] = replace(boards[name], watts=100.0)
    one_of_four = replace(one_of_four, meters=boards)
    assert [run.binds for run in runs(on("n0"), readings=[one_of_four])] == [True, True]
    assert {run.binds for run in runs(on("n0"), on("n0", index=1), readings=[one_of_four])} == {False}


def test_where_it_is_known_which_boards_replicas_hold_each_has_the_limit_of_its_own() -> None:
    low, high = on("n0"), on("n0", 1, index=1)
    uneven = reading("n0", 200.0, 240.0, 400.0)
    idle = replace(uneven, meters={**uneven.meters, "n0-2": replace(uneven.meters["n0-2"], watts=90.0)})
    own: Boards = {"n0-0": (low.key,), "n0-1": (low.key,), "n0-2": (high.key,)}
    found = runs(low, high, readings=[idle], boards={"n0": own})
    assert [(run.part, run.binds) for run in found] == [(0.5, True)] * 2 + [(1.0, False)] * 2
    assert {run.part for run in runs(low, high, readings=[idle])} == {None}
    late = runs(low, high, readings=[idle], boards={"n0": {**own, "n0-2": ()}})
    assert [run.part for run in late] == [0.5, 0.5, None, None], "it is not known yet where one is"


def test_replicas_on_nodes_that_nothing_limits_or_without_boards_are_left_out() -> None:
    assert runs(on("n2"), readings=[reading("n2", 300.0)]) == []
    assert runs(replace(on("n0"), requests=Requests())) == []
    assert runs(replace(on("n0"), phase="Failed")) == []
    nothing = LimitedReplicas(OwnReplicas(ENGINE), lambda: [known()])
    readings = {"n0": reading("n0", 300.0)}
    assert nothing.look(membership([], []), readings, [on("n0")], {}, 97.0) == []


class Replica:
    """An engine whose steps take what its model says, times what a limit costs in each phase; its load comes and goes."""

    def __init__(self) -> None:
        self.sums = {Phase.PREFILL: NOTHING, Phase.DECODE: NOTHING}

    def second(self, now_s: int, part: float) -> ServingStatus:
        busy = 0.4 + 0.3 * math.sin(now_s / 47)
        sequences = 8 + 6 * math.sin(now_s / 31)
        self._work(Phase.DECODE, 0.7 * busy, sequences, 0, 1 + 0.5 * (1 - part))
        self._work(Phase.PREFILL, 0.3 * busy, sequences / 2, 512, 1 + 1.5 * (1 - part))
        return tells(self.sums[Phase.PREFILL], self.sums[Phase.DECODE])

    def _work(self, phase: Phase, seconds: float, sequences: float, prompt: float, slow: float) -> None:
        context = 500 * sequences + prompt
        step_s = slow * (0.01 + 0.001 * sequences + 0.002 * context / 1000 + 0.0001 * prompt)
        steps, old = seconds / step_s, self.sums[phase]
        self.sums[phase] = StepSums(
            steps=old.steps + steps,
            sequences=old.sequences + steps * sequences,
            context_tokens=old.context_tokens + steps * context,
            prompt_tokens=old.prompt_tokens + steps * prompt,
            seconds=old.seconds + seconds,
        )


def test_a_replica_under_changing_limits_and_load_teaches_a_curve_for_each_phase() -> None:
    curves, engine, pod = LimitCurves(), Replica(), on("n0")
    replicas = LimitedReplicas(OwnReplicas(ENGINE), lambda: [known()])
    told: dict[str, ServingStatus] = {}
    found: list[LimitedRun] = []
    for second in range(5400):
        part = (1.0, 0.8, 0.6)[second // 120 % 3]
        answer = engine.second(second, part)
        if second % 6 == 0:
            told[pod.uid] = answer
        draws = reading("n0", 400.0 * part, 400.0 * part)
        found = replicas.look(FEED, {"n0": draws}, [pod], told, 97.0)
        curves.look(found, float(second))
    works = {"n0": NodeWork(kind=WorkKind.SERVING, weight=4.0)}
    node = with_curves(works, found, curves, 100.0)["n0"]
    for phase, cost in ((Phase.PREFILL, 1.5), (Phase.DECODE, 0.5)):
        for part in (0.6, 0.8):
            assert slowdown(node.curves[phase], part) == pytest.approx(1 + cost * (1 - part), rel=0.03)
    weights = {with_curves(works, found, LimitCurves(), float(now_s))["n0"].weight for now_s in range(900)}
    assert weights == {4.0}, "replicas are not tried"
    stranger = replace(found[1], name="other", work=found[1].work._replace(workload_class="other"))
    alike = with_curves(works, [*found, stranger], curves, 100.0)["n0"].curves
    assert set(alike) == {Phase.PREFILL}, "two kinds of decoding have no curve in common"
