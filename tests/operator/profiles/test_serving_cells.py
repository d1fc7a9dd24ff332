"""What serving replicas measured becomes cells of the profile."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.operator.builders import NOW, RENDERING, placement, replica, service
from tests.operator.profiles.parts import CLASS, look, profile, waiting, written

from busbar.kube.contracts.workload import ServingStatus
from busbar.kube.types import ModelService, PerformanceProfile
from busbar.kube.types.performance_profile import CellSource, ProfileCell
from busbar.kube.types.service_status import MeasuredReplica
from busbar.operator.pods.engine_image import EngineImage
from busbar.operator.profiles.paces import Work
from busbar.operator.profiles.serving_speeds import believed, checked, measured
from busbar.operator.profiles.serving_speeds import of_class as served
from busbar.operator.watch.projections import Pod
from busbar.scheduler.power import Phase
from busbar.scheduler.power.curves import KNOWN_S, Compared, Evidence, fitted, slowdown

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
    pods = [(runs(index), placement()) for index in (0, 1)]
    readings = {runs(0).uid: serving(500), runs(1).uid: serving(90)}
    [line] = measured(pods, readings, ENGINE, {runs(0).uid})
    assert (line.step_model.steps, line.limited) == (90, False), "the one that nothing held, of fewer steps"
    [line] = measured(pods[:1], readings, ENGINE, {runs(0).uid})
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


def under_caps(of: PerformanceProfile) -> dict[int, ProfileCell]:
    """What the profile says of replicas, by cap."""
    return {c.power_cap_percent: c for c in (of.status and of.status.cells) or () if c.step_model is not None}


def learned(prefill_s: float = KNOWN_S, decode_s: float = KNOWN_S, lowest: int = 60) -> dict[Work, Evidence]:
    return {
        Work(CLASS, "A100", "resident", Phase.PREFILL): {(60, 100): Compared(prefill_s, 0.4)},
        Work(CLASS, "A100", "resident", Phase.DECODE): {(lowest, 100): Compared(decode_s, 0.1)},
    }


def on_a100() -> tuple[MeasuredReplica, ...]:
    place = placement(accelerator="A100")
    return tuple(measured([(runs(0), place)], {runs(0).uid: serving(500)}, ENGINE))


def test_cells_under_caps_have_the_step_model_with_what_a_limit_costs_each_phase() -> None:
    limits = learned()
    made = written(profile(), serving=on_a100(), limits=limits)
    found = under_caps(made)
    assert set(found) == {100, 80, 70, 60}, "none below the lowest limit that was measured"
    reads, decodes = (fitted(work.phase, of) for work, of in limits.items())
    whole = found[100].step_model
    assert whole is not None
    for cap in (80, 70, 60):
        cell, slow = found[cap], slowdown(decodes, cap / 100)
        model = cell.step_model
        assert model is not None
        assert model.seconds_per_step == pytest.approx(slow * whole.seconds_per_step)
        assert model.seconds_per_sequence == pytest.approx(slow * whole.seconds_per_sequence)
        assert model.seconds_per_prompt_token == pytest.approx(
            slowdown(reads, cap / 100) * whole.seconds_per_prompt_token
        )
        assert cell.tokens_per_second == pytest.approx(812.3 / slow)
        assert (cell.watts, cell.source, cell.kv_tokens) == (
            4.0 * cap,
            CellSource.RATIO,
            found[100].kv_tokens,
        )
    assert slowdown(reads, 0.6) > slowdown(decodes, 0.6)
    later = NOW + timedelta(days=1)
    assert look(made, serving=on_a100(), limits=limits, now=later).status is None, "nothing is news"
    slower = tuple(line.model_copy(update={"tokens_per_second": 406.15}) for line in on_a100())
    again = under_caps(written(made, serving=slower, now=later))
    assert again[60].tokens_per_second == pytest.approx(found[60].tokens_per_second / 2), "it follows anew"


@pytest.mark.parametrize(
    "limits",
    [{}, learned(prefill_s=KNOWN_S - 1), learned(decode_s=KNOWN_S - 1), learned(lowest=95)],
    ids=["nothing", "little of prompts", "little of decoding", "no low limit"],
)
def test_cells_under_caps_need_what_was_measured_of_both_phases(limits: dict[Work, Evidence]) -> None:
    assert set(under_caps(written(profile(), serving=on_a100(), limits=limits))) == {100}
    assert len(under_caps(written(profile(), serving=on_a100(), limits=learned()))) > 1
