"""Sequences that are shorter in the first steps: those of a plain loop, bit for bit, on every placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.training.crash import Point, start_gang, train_in_a_process
from tests.training.small import GPT2, SEQUENCE, SEQUENCES, engine, manifest, with_text
from tests.training.test_bit_equality import STEPS, assert_equal_to_plain, train_ours
from tests.training.test_crash_and_resume import assert_same_result

from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.settings import LengthWarmup
from busbar.workloads.training.status import WARM_UP_STEPS, Status

WARMUP = {"start": 8, "steps": 6}
LENGTHS = [8, 8, 16, 16, 24, 24]  # of sequences of 32


def document(**changes: Any) -> dict[str, Any]:
    return engine(**{"steps": STEPS, "lengthWarmup": WARMUP, **changes})


def test_sequences_grow_by_eight_tokens_from_the_first_step_to_the_last() -> None:
    warmup = LengthWarmup(8, 6)
    assert [warmup.length(step, 32) for step in range(8)] == [*LENGTHS, 32, 32]
    odd = LengthWarmup(13, 4)
    assert [odd.length(step, 100) for step in range(5)] == [13, 32, 56, 72, 100]


@pytest.mark.parametrize("placement", ["resident", "half", "optimizer-offload", "parameter-offload"])
def test_a_plain_loop_with_such_batches_has_the_same_bits(placement: str) -> None:
    assert_equal_to_plain(document(), placement, True, lengths=LENGTHS)


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "gated"},
        {"activations": "recompute"},
        {"activations": "swap"},
        {"model": {"config": GPT2}, "lengthWarmup": {"start": 16, "steps": 4}},
        {"dtype": "bfloat16"},
    ],
    ids=["gated", "recomputed", "swapped", "dropout", "bfloat16"],
)
def test_so_it_has_with_everything_else(changes: dict[str, Any]) -> None:
    lengths = [16, 16, 24, 24] if "lengthWarmup" in changes else LENGTHS
    assert_equal_to_plain(document(**changes), "half", True, lengths=lengths)


def test_the_peak_of_activations_is_that_of_whole_sequences() -> None:
    _, short = train_ours(document(steps=6), "resident", True)
    _, whole = train_ours(document(lengthWarmup={"start": 8, "steps": 5}), "resident", True)
    assert short.device_arena.peak["activations"] == 0  # none was trained on
    assert whole.device_arena.peak["activations"] == pytest.approx(whole.plan.device["activations"], rel=0.05)


def test_it_belongs_to_a_runs_identity() -> None:
    assert parse_engine(document()).identity != parse_engine(engine(steps=STEPS)).identity


def test_only_whole_sequences_tell_the_speed() -> None:
    status = Status()
    for step in range(1, 6):
        status.finished_step(step, 1.0, 0.1, 10, whole=False)
        assert (status.steady_samples, status.tokens_per_second) == (0, 100.0)
    for step in range(6, 6 + WARM_UP_STEPS):
        status.finished_step(step, 1.0, 1.0, 200)
        assert (status.steady_samples, status.tokens_per_second) == (0, 200.0)
    status.finished_step(9, 1.0, 0.5, 200)
    assert (status.steady_samples, status.tokens_per_second) == (1, 400.0)
    assert status.to_json()["tokens"] == 5 * 10 + 4 * 200


WIDE: dict[str, Any] = {
    "batch": {"sequences": SEQUENCES, "microBatch": 1},
    "parallelism": {"order": "fixed"},
    "lengthWarmup": {"start": 8, "steps": 9},
}


def test_a_run_that_was_killed_and_a_gang_end_with_the_same_bits(tmp_path: Path) -> None:
    whole, killed, gang = (with_text(tmp_path / name) for name in ("whole", "killed", "gang"))
    assert SEQUENCE == 32
    assert train_in_a_process(manifest(**WIDE), whole) == 0
    assert train_in_a_process(manifest(**WIDE), killed, Point("trainer:Trainer", "step", 8)) == -9
    assert train_in_a_process(manifest(**WIDE), killed) == 0
    assert_same_result(killed, whole)
    document = manifest(**{**WIDE, "parallelism": {"order": "fixed", "sharding": "parameters"}})
    document["spec"]["shape"] = {"minPods": 2, "maxPods": 2}
    assert start_gang([document] * 2, gang, {}).exit_codes() == [0, 0]
    assert_same_result(gang, whole)
