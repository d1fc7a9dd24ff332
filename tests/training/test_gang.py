"""Whole runs of several ranks: the same result as alone, and what happens when a rank dies, freezes or differs."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.training.crash import HURRIED, Gang, Point, start_gang, train_in_a_process
from tests.training.small import manifest, with_text
from tests.training.test_crash_and_resume import assert_same_result, losses

from busbar.workloads.training.checkpoint import CheckpointFolder

WIDE = {
    "batch": {"sequences": 4, "microBatch": 1},
    "parallelism": {"order": "fixed"},
    "evaluation": {"ngramOrder": 3},
}


def gang(claims: Path, size: int = 2, points: dict[int, Point] | None = None) -> Gang:
    return start_gang([manifest(**WIDE) for _ in range(size)], claims, points or {})


def divided(sharding: str, **changes: Any) -> dict[str, Any]:
    """The manifest of a gang of two that divides what `sharding` says."""
    document = manifest(**{**WIDE, "parallelism": {"order": "fixed", "sharding": sharding}, **changes})
    document["spec"]["shape"] = {"minPods": 2, "maxPods": 2}
    return document


def steps(claims: Path) -> list[int]:
    return CheckpointFolder(claims / "out/model/checkpoints", 2).steps()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    claims = with_text(tmp_path_factory.mktemp("alone"))
    assert train_in_a_process(manifest(**WIDE), claims) == 0
    return claims


def test_two_ranks_give_the_result_of_one(alone: Path, tmp_path: Path) -> None:
    claims = with_text(tmp_path)
    ranks = gang(claims)
    assert ranks.exit_codes() == [0, 0]
    assert_same_result(claims, alone)
    assert evaluation(claims) == evaluation(alone)
    assert ranks.status(0)["evaluation"] is not None
    assert ranks.status(1)["evaluation"] is None  # rank 0 speaks for all
    assert {ranks.status(rank)["checkpoint"]["step"] for rank in (0, 1)} == {12}


def test_a_gang_says_what_it_predicted_beside_what_it_measured(alone: Path, tmp_path: Path) -> None:
    """Also where a rank is late to be measured; and no bit of the result changes."""
    claims = with_text(tmp_path)
    late = {1: Point("probe", "measure", 1, delay_s=1.0)}
    ranks = start_gang([manifest(**WIDE) for _ in range(2)], claims, late, predicts=True)
    assert ranks.exit_codes() == [0, 0]
    assert_same_result(claims, alone)
    said = [ranks.status(rank)["timing"] for rank in (0, 1)]
    assert said[0]["predicted"] == said[1]["predicted"]
    assert all(said[0]["predicted"][name] > 0 for name in ("step", "durable"))
    ratio = said[0]["predicted"]["step"] / said[0]["measured"]["step"]
    assert said[0]["ratio"] == pytest.approx(ratio, abs=1e-3)
    assert "MiB go to the other ranks in " in ranks.log(0)
    folder = claims / "out/model/checkpoints"
    probes = [json.loads((folder / name).read_text()) for name in ("probe.json", "probe-1.json")]
    assert probes[0]["probe"]["links"] == probes[1]["probe"]["links"]
    assert probes[0]["probe"]["links"]["gradients"]["bytes_per_s"] > 0
    assert not list(folder.glob("probe-*.data"))


def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    claims = with_text(tmp_path)
    ranks = gang(claims, points={1: Point("trainer:Trainer", "_micro_batch", 1, delay_s=0.2)})
    assert ranks.exit_codes() == [0, 0]
    slow, fast = ranks.status(0)["workers"]
    assert (slow["rank"], fast["rank"]) == (1, 0)
    assert slow["ownSeconds"] >= 0.4 > fast["ownSeconds"]  # two micro-batches each
    assert "the others wait for rank 1: of each step it takes" in ranks.log(0)


def evaluation(claims: Path) -> Any:
    return json.loads((claims / "out/model/busbar.json").read_text())["evaluation"]


KILLS = {
    "rank 1 in a forward pass": (1, Point("trainer:Trainer", "_micro_batch", 13)),
    "rank 0 in the exchange": (0, Point("spread:Spread", "_start", 25)),
    "rank 1 while it writes its second file": (1, Point("gang_folder", "write_state", 2)),
    "rank 0 before its second commit": (0, Point("gang_folder", "_replace", 2)),
}


@pytest.mark.parametrize(("rank", "point"), KILLS.values(), ids=KILLS.keys())
def test_a_gang_resumes_to_the_same_bits_after_a_rank_was_killed(
    rank: int, point: Point, alone: Path, tmp_path: Path
) -> None:
    claims = with_text(tmp_path)
    ranks = gang(claims, points={rank: point})
    codes = ranks.exit_codes()
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] == 1  # a failure, after which the operator starts the gang again
    assert f"rank {rank} is" in ranks.log(1 - rank)
    durable, finished = max(steps(claims), default=0), max(losses(claims), default=0)

    again = gang(claims, size=1 if rank else 2)  # once on another number of pods
    assert again.exit_codes() == [0] * len(again.processes)
    status = again.status(0)
    assert (status["resumedFromStep"] or 0) == durable
    assert status["lostSteps"] == status["replayedSteps"] == finished - durable
    assert status["replayMismatches"] == 0
    assert_same_result(claims, alone)


def test_a_rank_that_is_lost_while_others_write_a_checkpoint_is_missed_as_soon(tmp_path: Path) -> None:
    """They wait for its part of the checkpoint, and must not wait as for a rank that is only silent."""
    claims = with_text(tmp_path)
    ranks = gang(claims, points={1: Point("gang_folder", "write_state", 2)})
    assert ranks.exit_codes() == [1, -signal.SIGKILL]
    assert f"it has said nothing for {HURRIED.suspected_after_s:.0f} s" in ranks.log(0)


def test_a_gang_that_was_killed_goes_on_with_divided_weights(alone: Path, tmp_path: Path) -> None:
    """And evaluates and exports them to the bits of one process."""
    claims = with_text(tmp_path)
    exchange = Point("gradient_shards:GradientShards", "_exchange", 48)
    ranks = start_gang([divided("gradients")] * 2, claims, {1: exchange})
    assert ranks.exit_codes() == [1, -signal.SIGKILL]
    durable = max(steps(claims), default=0)

    again = start_gang([divided("parameters")] * 2, claims, {})
    assert again.exit_codes() == [0, 0]
    assert (again.status(0)["resumedFromStep"] or 0) == durable
    assert again.status(0)["replayMismatches"] == 0
    assert_same_result(claims, alone)
    assert evaluation(claims) == evaluation(alone)
    assert "weights, gradients and the optimizer's state among 2 ranks" in again.log(1)


@pytest.mark.parametrize(
    "part",
    [{"freeze": ["model.layers.0.*", "lm_head.*"]}, {"adapter": {"rank": 4, "merge": True}}],
    ids=["frozen parts", "merged adapter"],
)
def test_divided_weights_that_are_not_trained_are_in_the_result_of_a_gang_that_was_killed(
    part: dict[str, Any], alone: Path, tmp_path: Path
) -> None:
    """Of a saved model, of which each rank reads its slices; the result is that of one process, bit for bit."""
    saved = {"model": {"uri": "pvc://base"}, "tokenizer": {"uri": "pvc://base"}, **part}
    one, claims = (with_text(tmp_path / name) for name in ("one", "gang"))
    for folder in (one, claims):
        shutil.copytree(alone / "out/model", folder / "base", ignore=shutil.ignore_patterns("checkpoints"))
    assert train_in_a_process(manifest(**{**WIDE, **saved}), one) == 0
    exchange = Point("gradient_shards:GradientShards", "_exchange", 48)
    document = divided("parameters", **saved)
    assert start_gang([document] * 2, claims, {1: exchange}).exit_codes() == [1, -signal.SIGKILL]
    again = start_gang([document] * 2, claims, {})
    assert again.exit_codes() == [0, 0], again.log(0)
    assert again.status(0)["replayMismatches"] == 0
    assert_same_result(claims, one)
    assert evaluation(claims) == evaluation(one)


def test_a_gang_that_shares_sequences_resumes_to_the_same_bits_after_a_kill(
    alone: Path, tmp_path: Path
) -> None:
    """And learns what one process does, up to rounding."""
    document = manifest(**{**WIDE, "parallelism": {"sequence": 2, "sharding": "parameters"}})
    document["spec"]["shape"] = {"minPods": 2, "maxPods": 2}
    undisturbed, claims = with_text(tmp_path / "undisturbed"), with_text(tmp_path / "killed")
    assert start_gang([document] * 2, undisturbed, {}).exit_codes() == [0, 0]
    assert losses(undisturbed) == pytest.approx(losses(alone), rel=1e-5)
    exchange = Point("sequence_parallel:SequencePart", "send", 300)
    ranks = start_gang([document] * 2, claims, {1: exchange})
    assert ranks.exit_codes() == [1, -signal.SIGKILL]
    assert "2 ranks share each sequence" in ranks.log(1)
    again = start_gang([document] * 2, claims, {})
    assert again.exit_codes() == [0, 0]
    assert again.status(0)["replayMismatches"] == 0
    assert_same_result(claims, undisturbed)


def test_a_frozen_rank_is_named_and_the_others_leave(tmp_path: Path) -> None:
    claims = with_text(tmp_path)
    frozen = Point("trainer:Trainer", "_micro_batch", 13, signal.SIGSTOP)
    unhurried = Point(
        "trainer:Trainer", "_micro_batch", 1, delay_s=0.1
    )  # so that rank 1 can say where it is before
    ranks = gang(claims, points={0: unhurried, 1: frozen})
    try:
        ranks.processes[0].join(300)
        assert ranks.processes[0].exitcode == 1
        assert "rank 1 is lost: it has said nothing for" in ranks.log(0)
        assert " step " in ranks.log(0).rpartition("and was ")[2]  # where it was at its last word
    finally:
        ranks.processes[1].kill()
        ranks.processes[1].join(120)


def test_a_request_to_stop_one_rank_stops_all_with_their_state_saved(alone: Path, tmp_path: Path) -> None:
    claims = with_text(tmp_path)
    ranks = gang(claims, points={1: Point("trainer:Trainer", "_micro_batch", 13, signal.SIGTERM)})
    assert ranks.exit_codes() == [143, 143]
    assert steps(claims)[0] == 7
    assert "the state after step 7 is durable" in ranks.log(0)
    assert gang(claims).exit_codes() == [0, 0]
    assert_same_result(claims, alone)


def test_a_rank_with_other_settings_is_named_by_all(tmp_path: Path) -> None:
    claims = with_text(tmp_path)
    other = divided("parameters", optimizer={"learningRate": 1e-4})
    ranks = start_gang([divided("gradients"), other], claims, {})
    assert ranks.exit_codes() == [1, 1]
    for rank in (0, 1):
        log = ranks.log(rank).replace("\\", "")
        assert 'rank 1 differs from rank 0 in parallelism.sharding: "parameters" and not "gradients"' in log
        assert "settings optimizer.learningRate: 0.0001 and not 0.003" in log


def test_a_rank_that_refuses_the_job_takes_the_others_with_it(tmp_path: Path) -> None:
    """With its exit code and its sentence: trying again would not help."""
    claims = with_text(tmp_path)
    broken = manifest(**{**WIDE, "tokenizer": {"uri": "pvc://text"}})
    ranks = start_gang([manifest(**WIDE), broken], claims, {})
    assert ranks.exit_codes() == [2, 2]
    assert "rank 1 has left: spec.engine.tokenizer.uri" in ranks.log(0)
