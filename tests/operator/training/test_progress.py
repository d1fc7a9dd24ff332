"""A pod's report is untrusted: whatever it contains, the API server still accepts the job's status."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.builders import NOW, admitted, ended, job, running, view, with_status

from busbar.kube.types.training_status import TrainingJobStatus
from busbar.kube.types.training_words import adapter_words
from busbar.operator.pods.readings import parse_reading
from busbar.operator.training.progress import LARGEST, merge_reading
from busbar.operator.training.reconcile import reconcile

numbers = st.integers() | st.floats() | st.just(10**30) | st.just(-1)
moments = st.sampled_from(
    ["2026-11-21T11:00:00", "2026-11-21T11:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"]
)


def merged(**said: Any) -> TrainingJobStatus | None:
    reading = parse_reading({"kind": "training", "phase": "Training", **said})
    return merge_reading(TrainingJobStatus(attempt=2), reading, NOW) if reading is not None else None


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "step": st.integers(),
            "totalSteps": st.integers(),
            "tokens": st.integers(),
            "lostSteps": st.integers(),
            "badRows": st.integers(),
            "activations": st.text(max_size=63),
            "timing": st.fixed_dictionaries(
                {
                    "predicted": st.fixed_dictionaries({"step": numbers}),
                    "measured": st.fixed_dictionaries({"step": numbers}),
                    "ratio": numbers,
                }
            ),
            "phaseSeconds": st.fixed_dictionaries({"forward": numbers, "wait": numbers}),
            "model": st.fixed_dictionaries(
                {
                    "parameters": st.integers(),
                    "trainableParameters": st.integers(),
                    "adapter": st.text(max_size=300),
                }
            ),
            "resumedFromStep": st.integers(),
            "loss": numbers,
            "tokensPerSecond": numbers,
            "modelTflops": numbers,
            "etaSeconds": numbers,
            "checkpoint": st.fixed_dictionaries({"step": st.integers(), "savedAt": moments}),
            "evaluation": st.fixed_dictionaries(
                {"bitsPerByte": numbers, "bigramBitsPerByte": numbers, "heldOutBytes": st.integers()}
            ),
            "adapters": st.lists(
                st.fixed_dictionaries(
                    {
                        "name": st.sampled_from(["", "a", "b"]) | st.text(max_size=70),
                        "step": st.integers(),
                        "steps": st.integers(),
                        "loss": numbers,
                        "finished": st.booleans(),
                    }
                ),
                max_size=20,
            ),
        },
    )
)
def test_no_answer_makes_a_status_that_the_schema_refuses(said: dict[str, Any]) -> None:
    status = merged(**said)
    if status is not None:
        assert TrainingJobStatus.model_validate(status.to_wire()) == status


def test_the_adapter_and_the_rows_that_were_left_out_are_told() -> None:
    told = {"parameters": 64_000, "trainableParameters": 1024, "adapter": "LoRA of rank 8 on q_proj"}
    status = merged(step=1, totalSteps=2, badRows=3, model=told)
    assert status is not None
    assert status.progress is not None
    assert status.progress.bad_rows == 3
    assert status.model is not None
    assert status.model.to_wire() == told


def test_what_the_engine_does_with_activations_is_told() -> None:
    status = merged(step=1, totalSteps=2, activations="recompute")
    assert status is not None
    assert status.progress is not None
    assert status.progress.activations == "recompute"


def test_predicted_and_measured_seconds_of_a_step_are_told() -> None:
    timing = {"predicted": {"step": 1.20004, "durable": 9.0}, "measured": {"step": 1.25}, "ratio": 0.96}
    status = merged(step=1, totalSteps=2, timing=timing)
    assert status is not None
    assert status.progress is not None
    assert status.progress.step_seconds is not None
    assert status.progress.step_seconds.to_wire() == {"predicted": 1.2, "measured": 1.25, "ratio": 0.96}


def test_what_steps_are_spent_on_is_told_in_whole_percent() -> None:
    status = merged(step=1, totalSteps=2, phaseSeconds={"forward": 10.0, "backward": 20.04, "update": 3})
    assert status is not None
    assert status.progress is not None
    assert status.progress.phases is not None
    shares = {"forward": 30, "backward": 61, "update": 9}
    assert {name: each for name, each in status.progress.phases.to_wire().items() if each} == shares
    for nothing in ({"forward": 0}, {"forward": -3.0}, None):
        without = merged(step=1, totalSteps=2, phaseSeconds=nothing)
        assert without is not None
        assert without.progress is not None
        assert without.progress.phases is None


def test_the_pace_of_a_gangs_pods_is_told_of_the_slowest() -> None:
    reports = [{"rank": rank, "ownSeconds": 100.0 - rank} for rank in range(100)]
    reports[2]["ownSeconds"] = 1e300
    status = merged(step=1, totalSteps=2, workers=reports)
    assert status is not None
    assert status.progress is not None
    assert status.progress.workers is not None
    assert [each.rank for each in status.progress.workers] == [0, 1, *range(3, 64)]
    for nothing in ([], [{"rank": 0, "ownSeconds": float("inf")}]):
        without = merged(step=1, totalSteps=2, workers=nothing)
        assert without is not None
        assert without.progress is not None
        assert without.progress.workers is None


def test_numbers_are_cut_to_what_json_can_hold() -> None:
    status = merged(step=10**30, totalSteps=10**30, tokensPerSecond=-1.0, etaSeconds=-5.0)
    assert status is not None
    assert status.progress is not None
    assert (status.progress.step, status.progress.tokens_per_second) == (LARGEST, None)
    assert status.progress.eta is None


@pytest.mark.parametrize(("slack", "late_s"), [(None, None), (1.5, 90)])
def test_the_pessimistic_end_is_told_only_where_the_speed_has_a_range(
    slack: float | None, late_s: float | None
) -> None:
    reading = parse_reading({"kind": "training", "phase": "Training", "step": 1, "etaSeconds": 60.0})
    assert reading is not None
    progress = merge_reading(TrainingJobStatus(), reading, NOW, slack).progress
    assert progress is not None
    assert progress.eta_p50 == NOW + timedelta(seconds=60)
    assert progress.eta_p90 == (None if late_s is None else NOW + timedelta(seconds=late_s))


def test_a_checkpoint_is_never_in_the_future_and_has_a_time_zone() -> None:
    later = (NOW + timedelta(days=1)).isoformat()
    for text in (later, "2026-11-21T13:00:00"):
        status = merged(checkpoint={"step": 1, "savedAt": text})
        assert status is not None
        assert status.checkpoint is not None
        assert status.checkpoint.saved_at == NOW


@pytest.mark.parametrize(
    "message",
    [
        '{"kind": "training", "phase": "Done", "step": 3, "totalSteps": 3, "tokensPerSecond": -1}',
        '{"kind": "training", "evaluation": {"bitsPerByte": -1, "heldOutBytes": -1}}',
        '{"a":' + "[" * 4000,
        '{"a":' + "[" * 2000 + "]" * 2000 + "}",
    ],
    ids=["negative speed", "negative evaluation", "cut", "deep"],
)
def test_a_job_ends_whatever_its_last_words_are(message: str) -> None:
    of = admitted(job())
    of = with_status(of, reconcile(view(of, running())))
    good = reconcile(view(of, ended(0, 0, message))).status
    assert good is not None
    assert good.phase == "Succeeded"
    bad = reconcile(view(of, ended(0, 1, message))).status
    assert bad is not None
    assert bad.phase == "Queued"


def test_each_of_several_adapters_is_told() -> None:
    status = merged(
        step=11,
        totalSteps=19,
        adapters=[
            {
                "name": "first", "step": 8, "steps": 8, "loss": 1.23456, "finished": True,
                "evaluation": {"bitsPerByte": 1.5, "bigramBitsPerByte": 2, "ngramBitsPerByte": 1, "heldOutBytes": 9},
                "fingerprint": {"losses": "a" * 64, "weights": "b" * 64},
            },
            {"name": "second", "step": 3, "steps": 11, "loss": None},
        ],
    )  # fmt: skip
    assert status is not None
    first, second = status.adapters or []
    assert (first.name, first.step, first.loss, first.finished, first.bits_per_byte) == (
        "first",
        8,
        1.2346,
        True,
        1.5,
    )
    assert first.fingerprint is not None
    assert first.fingerprint.weights == "b" * 64
    assert (second.step, second.steps, second.loss, second.finished) == (3, 11, None, False)
    twice = merged(adapters=[{"name": "a", "step": 1}, {"name": ""}, {"name": "a", "step": 2}])
    assert twice is not None
    assert [(row.name, row.step) for row in twice.adapters or ()] == [("a", 2)]
    assert [adapter_words(row) for row in (first, second)] == [
        "8 of 8 steps, loss 1.235, 1.500 bits per byte, written",
        "3 of 11 steps, in training",
    ]
