"""What serving replicas measured becomes cells of the profile."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, RENDERING, placement, replica, service
from tests.operator.profiles.parts import CLASS, look, profile, waiting, written

from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types import ModelService
from busbar.kube.types.performance_profile import CellSource
from busbar.operator.pods.engine_image import EngineImage
from busbar.operator.profiles.serving_speeds import believed, checked, measured
from busbar.operator.profiles.serving_speeds import of_class as served
from busbar.operator.watch.projections import Pod

STEP = {
    "secondsPerStep": 0.01, "secondsPerSequence": 0.001, "secondsPerThousandContextTokens": 0.0002,
    "secondsPerPromptToken": 0.0001, "rmsErrorSeconds": 0.0005,
}  # fmt: skip

OURS, DIGEST, OTHER = RENDERING.workloads_image, f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
ENGINE = EngineImage(OURS, (DIGEST,))


def runs(index: int, image: str = OURS, digest: str = DIGEST) -> Pod:
    return replica(index, image=image, image_id=f"registry/x@{digest}" if digest else "")


def serving(steps: int, **more: Any) -> ServingStatus:
    report = {"class": CLASS, "accelerator": "cuda", "decodeTokensPerSecond": 812.34567, "weightBytes": 2**30}
    return ServingStatus.model_validate({"report": report | {"stepModel": STEP | {"steps": steps}} | more})


def of_service(**spec: Any) -> ModelService:
    readings = {runs(0).uid: serving(500, kvBytes=2**30), runs(1).uid: serving(20)}
    lines = measured(((runs(i), placement()) for i in (0, 1, 2)), readings, ENGINE)
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


def test_weights_that_are_streamed_take_no_memory_of_the_accelerator() -> None:
    reading = serving(500, kvBytes=2**30, mode="stream", streamedBytes=3 * 2**28)
    [line] = measured([(runs(0), placement())], {runs(0).uid: reading}, ENGINE)
    assert (line.mode, line.memory_gib) == ("stream", 1.25)


def test_only_the_platforms_own_engine_fills_shared_cells() -> None:
    assert served((of_service(),), "another") == []
    assert believed(of_service(image="own/image")) == []
    assert believed(of_service(engine="vllm", image="vllm/vllm-openai")) == []
    assert len(believed(of_service())) == 1


@pytest.mark.parametrize(
    ("image", "digest", "shared"),
    [(OURS, DIGEST, True), (OURS, OTHER, False), (OURS, "", False), ("registry/mine:1", DIGEST, False)],
    ids=["ours", "another digest", "no digest", "another image"],
)
def test_a_replicas_speed_is_shared_only_after_its_image_was_checked(
    image: str, digest: str, shared: bool
) -> None:
    """What it measured still stands in its own service's status, where it decides for that service alone."""
    pod = runs(0, image, digest)
    lines = measured([(pod, placement())], {pod.uid: serving(500)}, ENGINE)
    assert [line.verified for line in lines] == [shared]
    of = service(status={"measured": [line.to_wire() for line in lines]})
    assert len(believed(of)) == shared
    assert len(served((of,), CLASS)) == shared


def test_what_limits_slowed_down_is_the_services_alone_and_takes_no_shared_speed_away() -> None:
    pods = [(replace(runs(index), node=f"node-{index}"), placement()) for index in (0, 1)]
    readings = {runs(0).uid: serving(500), runs(1).uid: serving(90)}
    [line] = measured(pods, readings, ENGINE, {"node-0"})
    assert (line.step_model.steps, line.limited) == (90, False), "the one that nothing held, of fewer steps"
    [line] = measured(pods[:1], readings, ENGINE, {"node-0"})
    assert (line.step_model.steps, line.limited) == (500, True)
    held = service(status={"measured": [line.to_wire()]})
    assert believed(held) == served((held,), CLASS) == []
    assert checked(held) == [line], "its class has a profile all the same, which learns what limits cost it"
    kept = written(profile(), serving=tuple(served((of_service(),), CLASS)))
    assert [c for c in (kept.status and kept.status.cells) or () if c.step_model]
    assert look(kept, serving=tuple(served((held,), CLASS))).status is None, "the cell stays as it was"


def test_a_checked_replica_speaks_before_a_busier_one_that_is_not() -> None:
    checked, busier = runs(0), runs(1, digest=OTHER)
    readings = {checked.uid: serving(20), busier.uid: serving(500)}
    [line] = measured([(busier, placement()), (checked, placement())], readings, ENGINE)
    assert (line.verified, line.step_model.steps) == (True, 20)
