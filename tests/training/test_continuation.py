"""A finished run continues with more steps; settings that must not change between two starts are compared and
reported."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.training.small import engine, manifest, with_text

from busbar.workloads.machine.limits import usable_processors
from busbar.workloads.training.control import Control
from busbar.workloads.training.environment import run_from_manifest, run_from_pod
from busbar.workloads.training.packing import WINDOW_TOKENS, Packed, tokens_for
from busbar.workloads.training.paths import newest_facts
from busbar.workloads.training.report import Lines
from busbar.workloads.training.run import run
from busbar.workloads.training.status import Status

CONSTANT = {"learningRate": 3e-3, "schedule": "constant", "gradientClip": 0.5}


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    return with_text(tmp_path / "claims")


def start(claims: Path, adopt: bool = False, **changes: Any) -> tuple[int, dict[str, Any], str]:
    """Exit code, status and log of a run."""
    status, log = Status(), io.StringIO()
    document = manifest(**changes)
    document["spec"]["checkpoint"]["adopt"] = adopt
    code = run(run_from_manifest(document, claims, None, {}), status, Control(), Lines("small", log))
    return code, status.to_json(), log.getvalue()


def weights(claims: Path) -> dict[str, torch.Tensor]:
    return load_file(claims / "out/model/model.safetensors")


def test_a_finished_run_goes_on_as_if_it_had_never_ended(claims: Path, tmp_path: Path) -> None:
    whole = with_text(tmp_path / "whole")
    assert start(whole, steps=16, optimizer=CONSTANT)[0] == 0
    assert start(claims, steps=8, optimizer=CONSTANT)[0] == 0
    code, status, _ = start(claims, steps=16, optimizer=CONSTANT)
    assert (code, status["resumedFromStep"], status["lostSteps"], status["step"]) == (0, 8, 0, 16)
    ours, theirs = weights(claims), weights(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_with_another_number_of_steps_the_repeated_ones_are_not_called_mismatches(claims: Path) -> None:
    assert start(claims)[0] == 0
    for step in (8, 12):
        (claims / f"out/model/checkpoints/step-{step:08d}/manifest.json").unlink(missing_ok=True)
    code, status, _ = start(claims, steps=20)  # a different linear schedule
    assert (code, status["lostSteps"], status["replayedSteps"], status["replayMismatches"]) == (0, 12, 12, 0)


def test_fewer_steps_than_were_done_are_refused_and_delete_nothing(claims: Path) -> None:
    assert start(claims)[0] == 0
    before = weights(claims)
    code, status, _ = start(claims, steps=8)
    assert code == 2
    assert "steps is 8, and the checkpoint" in status["message"]
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(claims).items())


def test_adopted_checkpoints_of_other_settings_are_refused_by_the_settings_name(claims: Path) -> None:
    assert start(claims)[0] == 0
    code, status, _ = start(claims, adopt=True, optimizer=CONSTANT)
    assert code == 2
    assert "optimizer.schedule 'linear' (now 'constant')" in status["message"]
    code, status, log = start(claims, optimizer=CONSTANT)
    assert (code, status["resumedFromStep"]) == (0, None)
    assert "checkpoints.previous, where they stay" in log


def test_a_run_of_earlier_settings_goes_on_from_its_own_checkpoints(claims: Path) -> None:
    first = {"learningRate": 1e-3, "schedule": "constant"}
    assert start(claims, steps=4, optimizer=first, threads=2)[0] == 0
    assert start(claims, steps=4, optimizer=CONSTANT)[0] == 0
    document = manifest(steps=6, optimizer=first)
    del document["spec"]["engine"]["threads"]
    assert run_from_manifest(document, claims, None, {}).threads == 2
    code, status, log = start(claims, steps=6, optimizer=first, threads=2)
    assert (code, status["resumedFromStep"], status["step"]) == (0, 4, 6)
    assert "from its own checkpoints, which were in" in log


def test_a_longer_run_has_the_same_batches_first() -> None:
    windows = 3 * WINDOW_TOKENS
    short, long = (
        Packed.cut(np.arange(size, dtype=np.uint32), 1024, 5, 4) for size in (windows, 2 * windows)
    )
    steps = windows // 1024 // 4
    assert [short.indices(step, 4) for step in range(steps)] == [
        long.indices(step, 4) for step in range(steps)
    ]
    assert sorted(row for step in range(steps) for row in short.indices(step, 4)) == list(range(steps * 4))
    assert tokens_for(1, 4, 1024) == WINDOW_TOKENS
    assert tokens_for(steps, 4, 1024) == windows
    assert tokens_for(steps + 1, 4, 1024) == windows + WINDOW_TOKENS


def test_a_resumed_run_takes_the_threads_of_its_checkpoint(claims: Path) -> None:
    document = manifest(steps=4)
    del document["spec"]["engine"]["threads"]
    described = run_from_manifest(document, claims, None, {})
    assert described.threads == usable_processors()
    assert start(claims, steps=4, threads=3)[0] == 0
    assert run_from_manifest(document, claims, None, {}).threads == 3
    assert newest_facts(claims / "out/model/checkpoints", "another") == {}
    code, _, log = start(claims, steps=6, threads=2)
    assert code == 0
    assert "threads was 3 and is 2: from here on the numbers may differ" in log


@pytest.mark.parametrize(
    ("millicores", "threads"), [("1000", 1), ("500", 1), ("1999", 1), ("256000", usable_processors())]
)
def test_a_pod_uses_the_cores_that_it_asked_for(millicores: str, threads: int, tmp_path: Path) -> None:
    document = engine()
    del document["threads"]
    variables = {"BUSBAR_SPEC": json.dumps(document), "BUSBAR_OUTPUT_DIR": str(tmp_path)}
    assert run_from_pod(variables | {"BUSBAR_CPU_MILLICORES": millicores}).threads == threads


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_processors_are_those_of_the_quota(
    files: dict[str, str], most: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    everything = usable_processors(tmp_path / "nothing")
    assert usable_processors(tmp_path) == (everything if most is None else most)
