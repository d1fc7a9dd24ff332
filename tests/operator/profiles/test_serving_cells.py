"""What serving replicas measured becomes cells of the profile."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.operator.builders import NOW, placement, replica, service
from tests.operator.profiles.parts import CLASS, profile, waiting, written

from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types import ModelService
from busbar.kube.types.performance_profile import CellSource
from busbar.operator.profiles.serving_speeds import believed, measured
from busbar.operator.profiles.serving_speeds import of_class as served

STEP = {
    "secondsPerStep": 0.01, "secondsPerSequence": 0.001, "secondsPerThousandContextTokens": 0.0002,
    "secondsPerPromptToken": 0.0001, "rmsErrorSeconds": 0.0005,
}  # fmt: skip


def serving(steps: int, **more: Any) -> ServingStatus:
    report = {"class": CLASS, "accelerator": "cuda", "decodeTokensPerSecond": 812.34567, "weightBytes": 2**30}
    return ServingStatus.model_validate({"report": report | {"stepModel": STEP | {"steps": steps}} | more})


def of_service(**spec: Any) -> ModelService:
    readings = {replica(0).uid: serving(500, kvBytes=2**30), replica(1).uid: serving(20)}
    lines = measured(((replica(i), placement()) for i in (0, 1, 2)), readings)
    [line] = lines
    assert line.step_model.steps == 500
    return service(status={"measured": [line.to_wire()]}, **spec)


def test_the_step_model_of_replicas_becomes_a_cell_and_outlives_them() -> None:
    [line] = served((of_service(),), CLASS)
    kept = written(profile(), serving=(line,))
    [at] = [c for c in (kept.status and kept.status.cells) or () if c.step_model is not None]
    assert (at.accelerator, at.accelerators, at.source) == (placement().accelerator, 1, CellSource.MEASURED)
    assert (at.tokens_per_second, at.measured_memory_gib) == (812.3, 2.0)
    assert at.step_model is not None
    assert at.step_model.seconds_per_step == 0.01
    later = written(kept, waiting(), now=NOW + timedelta(days=1))
    assert [c.step_model for c in (later.status and later.status.cells) or () if c.step_model] == [
        at.step_model
    ]


def test_only_the_platforms_own_engine_fills_shared_cells() -> None:
    assert served((of_service(),), "another") == []
    assert believed(of_service(image="own/image")) == []
    assert believed(of_service(engine="vllm", image="vllm/vllm-openai")) == []
    assert len(believed(of_service())) == 1
