"""What power limits cost is learned from what a real engine counts of its steps, whatever these are made of.

The engine runs on a CPU with a clock that a rule moves, so that what its steps take, and what a limit costs, is known.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.operator.builders import NOW, SETTINGS
from tests.operator.power.test_limited_replicas import CLASS, ENGINE, on
from tests.operator.power.test_limited_runs import FEED, reading
from tests.operator.profiles.parts import look, profile
from tests.serving.engines import greedy_params, load_engine
from tests.serving.test_metrics import Clock

from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types import PerformanceProfile
from busbar.operator.pods.replica_place import place_of
from busbar.operator.power.limited_replicas import SETTLED_STEPS, LimitedReplicas
from busbar.operator.power.own_replicas import OwnReplicas
from busbar.operator.profiles.paces import LimitCurves, Work
from busbar.operator.profiles.serving_speeds import measured
from busbar.scheduler.power import Phase
from busbar.scheduler.power.curves import slowdown
from busbar.workloads.serving.report import phase_steps
from busbar.workloads.serving.sequence import Step

SLOWER = {Phase.PREFILL: 1.6, Phase.DECODE: 1.15}
"""At 60 % of the boards' watts."""


class Engine:
    """An engine that always has something to do, of other sizes in other minutes."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.part, self._next = Clock(), 1.0, 0
        self.core = load_engine(folder, self.clock).core
        object.__setattr__(self.core.scheduler.limits, "max_batched_tokens", 48)
        self._plan = self.core.scheduler.plan
        self.core.scheduler.plan = self._plan_and_take_time  # type: ignore[method-assign, assignment]
        self._random = random.Random(7)

    def _plan_and_take_time(self, *asked: Any) -> Step:
        step = self._plan(*asked)
        decoding = sum(chunk.count == 1 for chunk in step.chunks)
        context = sum(chunk.start + chunk.count for chunk in step.chunks)
        prompt = step.token_count - decoding
        slower = SLOWER[Phase.PREFILL if prompt > decoding else Phase.DECODE]
        whole_s = 1.0 + 0.1 * decoding + 0.001 * context + 0.05 * prompt
        self.clock.now += whole_s * (1.0 if self.part == 1.0 else slower)
        return step

    def step(self) -> None:
        wanted = 2 + int(self.clock.now // 90) % 4
        while len(self.core.scheduler.running) + len(self.core.scheduler.waiting) < wanted:
            self._next += 1
            length, answer = self._random.randrange(20, 80), self._random.randrange(4, 24)
            params = greedy_params(answer, ignore_eos=True)
            tokens = [self._random.randrange(3, 60) for _ in range(length)]
            self.core.submit(str(self._next), tokens, params, self.clock.now)
        self.core.step()

    def status(self) -> ServingStatus:
        speed = self.core.speed
        report = {"class": CLASS, "accelerator": "cuda", **speed.report()}
        return ServingStatus.model_validate({"report": report, "phaseSteps": phase_steps(speed)})


def test_the_engines_own_counts_teach_what_a_limit_costs_each_phase(llama: tuple[Path, Any]) -> None:
    engine, pod = Engine(llama[0]), on("n0")
    while engine.core.speed.model.steps < SETTLED_STEPS:
        engine.step()
    [line] = measured([(pod, place_of(pod))], {pod.uid: engine.status()}, ENGINE)
    empty = PerformanceProfile.model_validate(profile().to_wire() | {"spec": {"workloadClass": CLASS}})
    written = look(empty, now=NOW, settings=SETTINGS, serving=(line,)).status
    assert written is not None
    known = empty.model_copy(update={"status": written})

    curves, replicas = LimitCurves(), LimitedReplicas(OwnReplicas(ENGINE), lambda: (known,))
    told: dict[str, ServingStatus] = {}
    until_s = engine.clock.now + 1600.0
    while engine.clock.now < until_s:
        engine.part = 0.6 if engine.clock.now // 100 % 2 else 1.0
        engine.step()
        told[pod.uid] = engine.status()
        held = reading("n0", 400.0 * engine.part, 400.0 * engine.part)
        curves.look(replicas.look(FEED, {"n0": held}, [pod], told, 97.0), engine.clock.now)
    for phase, slower in SLOWER.items():
        curve = curves.curve(Work(CLASS, "A100", "resident", phase))
        assert curve is not None
        assert slowdown(curve, 0.6) == pytest.approx(slower, rel=0.03)
