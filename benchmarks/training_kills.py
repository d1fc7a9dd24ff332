"""kill -9 of one rank at random moments, resume, and compare every loss and weight with a run that was never killed.

    PYTHONPATH=. python benchmarks/training_kills.py --kills 30 --output benchmarks/results/training_kills.json
    PYTHONPATH=. python benchmarks/training_kills.py --kills 70 --alone --output benchmarks/results/training_kills_alone.json
    PYTHONPATH=. python benchmarks/training_kills.py --kills 60 --memory --output benchmarks/results/training_kills_memory.json

Each round starts a gang of two or four ranks (order fixed) on a fresh folder, kills one rank at a random call of a random
function of the engine, checks that the others end by themselves with exit code 1, and resumes with one, two or four.
With --alone it is a single process with a checkpoint every two steps, killed mostly while one is copied, written,
committed or removed. With --memory no checkpoint is written before the end, and the pods of a gang hold each
other's state: in about half of the rounds the trainer of one rank is killed, in the others all processes of as many pods as
there are parities, which are replaced. Points are drawn from the seed. A point that the run never reaches counts as no kill, and another one is drawn.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks.progress import show
from tests.training.crash import (
    Point,
    start_gang,
    start_supervised_gang,
    train_in_a_process,
)
from tests.training.small import manifest, with_text
from tests.training.test_crash_and_resume import assert_same_result, losses

from busbar.workloads.training.checkpoint import CheckpointFolder

PLACES = (  # calls of each in a whole run, roughly
    ("trainer:Trainer", "_micro_batch", 24),
    ("trainer:Trainer", "step", 12),
    ("spread:Spread", "_start", 48),
    ("spread:Spread", "gather_weights", 12),
    ("norm:RowNorm", "total", 12),
    ("optimizer:OffloadedAdamW", "_adamw", 60),
    ("snapshot:Snapshot", "_fill", 12),
    ("gang_folder", "write_state", 3),
    ("gang_folder", "write_document", 3),
    ("gang_folder", "_replace", 3),
    ("meeting:StoreMeeting", "tell", 8),
    ("ranks:Gang", "most", 24),
)
ALONE = (
    ("trainer:Trainer", "_micro_batch", 24),
    ("optimizer:OffloadedAdamW", "_adamw", 60),
    ("capture:Capture", "wait_for", 60),
    ("capture:Capture", "_copy_one", 30),
    ("capture:Capture", "take", 30),
    ("capture:Capture", "finish", 6),
    ("direct_file", "_reserve", 6),
    ("direct_file:DirectFile", "write", 36),
    ("state_file", "crc32", 60),
    ("checkpoint", "write_document", 6),
    ("checkpoint", "_replace", 6),
    ("checkpoint", "fsync", 18),
    ("checkpoint:CheckpointFolder", "_remove", 4),
    ("checkpoint:CheckpointFolder", "_make_room", 6),
)
MEMORY = (
    ("trainer:Trainer", "_micro_batch", 24),
    ("trainer:Trainer", "step", 12),
    ("spread:Spread", "_start", 48),
    ("norm:RowNorm", "total", 12),
    ("optimizer:OffloadedAdamW", "_adamw", 60),
    ("snapshot:Snapshot", "_fill", 12),
    ("gang_copies", "write_state", 6),
    ("gang_copies", "write_document", 6),
    ("gang_copies", "add_times", 6),
    ("gang_copies:GangCopies", "_agreed", 12),
    ("ranks:Beside", "exchange", 6),
    ("ranks:Beside", "gather", 12),
)
FIRST_COPY = 4  # the step by whose end the copy of step 2 is whole
JOB: dict[str, Any] = {"batch": {"sequences": 4, "microBatch": 1}, "parallelism": {"order": "fixed"}}


def kill_once(source: random.Random, whole: Path, folder: Path) -> dict[str, Any] | None:
    """One round; None when the point was not reached. Raises AssertionError where a bit differs."""
    size = source.choice((2, 4))
    owner, name, calls = source.choice(PLACES)
    rank = 0 if name == "_replace" else source.randrange(size)
    point = Point(owner, name, source.randint(1, max(1, calls * 2 // size)))
    claims = with_text(folder / "claims")
    gang = start_gang([manifest(**JOB) for _ in range(size)], claims, {rank: point})
    codes = gang.exit_codes()
    if codes[rank] != -signal.SIGKILL:
        return None
    survivors = [code for other, code in enumerate(codes) if other != rank]
    assert set(survivors) == {1}, f"rank {rank} of {size} at {point}: exit codes {codes}"
    durable = max(CheckpointFolder(claims / "out/model/checkpoints", 2).steps(), default=0)
    after = source.choice((1, 2, 4))
    if after == 1:
        assert train_in_a_process(manifest(**JOB), claims) == 0
    else:
        again = start_gang([manifest(**JOB) for _ in range(after)], claims, {})
        assert again.exit_codes() == [0] * after
    assert_same_result(claims, whole)
    named = sum(f"rank {rank} is" in gang.log(other) for other in range(size) if other != rank)
    return {
        "ranks": size,
        "killed": rank,
        "at": f"{owner}.{name}, call {point.count}",
        "checkpoint": durable,
        "resumedOn": after,
        "namedByAll": named == size - 1,
    }


def kill_alone(source: random.Random, whole: Path, folder: Path) -> dict[str, Any] | None:
    """The same for a single process."""
    owner, name, calls = source.choice(ALONE)
    point = Point(owner, name, source.randint(1, calls))
    claims = with_text(folder / "claims")
    if train_in_a_process(often(), claims, point) != -signal.SIGKILL:
        return None
    durable = max(CheckpointFolder(claims / "out/model/checkpoints", 2).steps(), default=0)
    assert train_in_a_process(often(), claims) == 0
    status = json.loads((claims / "status.json").read_text())
    assert status["resumedFromStep"] in (durable, None if durable == 0 else durable), status
    assert "passed over" not in (claims / "log.txt").read_text()
    assert_same_result(claims, whole)
    return {"at": f"{owner}.{name}, call {point.count}", "checkpoint": durable}


def lose_from_memory(source: random.Random, whole: Path, folder: Path) -> dict[str, Any] | None:
    """The same for a gang whose pods hold each other's state, and write no checkpoint before the end."""
    size = source.choice((2, 4))
    parity = source.randint(1, size - 1)
    owner, name, calls = source.choice(MEMORY)
    point = Point(owner, name, source.randint(1, calls))
    document = manifest(**JOB)
    document["spec"]["shape"] = {"minPods": size, "maxPods": size}
    document["spec"]["checkpoint"] = {"everySteps": 1000, "memory": {"everySteps": 2, "parity": parity}}
    claims = with_text(folder / "claims")
    pods, first = source.random() < 0.5, source.randrange(size)
    others = source.sample([rank for rank in range(size) if rank != first], parity - 1)
    lost = [first, *others] if pods else [first]
    at = replace(point, signal=signal.SIGSTOP) if pods else point
    gang = start_supervised_gang(document, claims, size, {first: [at]})
    if pods:
        if not gang.stops(first) or max(losses(claims), default=0) < FIRST_COPY:
            gang.end()
            return None
        assert not CheckpointFolder(claims / "out/model/checkpoints", 2).steps()
        for rank in lost:
            gang.lose(rank)
        for rank in lost:
            gang.start(rank, size)
    codes = gang.exit_codes()
    if "from the copy in the pods' memory" not in gang.log(0):
        assert not pods  # of a trainer: the run ended before the point, or it came before the first copy
        return None
    assert codes == [0] * size, f"ranks {lost} of {size} at {point}: exit codes {codes}"
    assert gang.status(0)["replayMismatches"] == 0
    assert_same_result(claims, whole)
    return {
        "ranks": size,
        "parity": parity,
        "lost": f"pods of ranks {lost}" if pods else f"trainer of rank {first}",
        "at": f"{owner}.{name}, call {point.count}",
    }


def often() -> dict[str, Any]:
    document = manifest(**JOB)
    document["spec"]["checkpoint"] = {"everySteps": 2, "keep": 1}
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--alone", action="store_true", help="a single process")
    ways.add_argument(
        "--memory", action="store_true", help="a gang without checkpoints, from its pods' memory"
    )
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    source, kills = random.Random(given.seed), list[dict[str, Any]]()
    place = Path(tempfile.mkdtemp(prefix="busbar-kills-"))
    whole = with_text(place / "whole")
    assert train_in_a_process(manifest(**JOB), whole) == 0
    attempts, text = 0, ""
    while len(kills) < given.kills:
        attempts += 1
        way = kill_alone if given.alone else lose_from_memory if given.memory else kill_once
        found = way(source, whole, place / str(attempts))
        shutil.rmtree(place / str(attempts))
        if found is not None:
            kills.append(found)
        text = report(kills, attempts, given)
        if given.output is not None:  # after every kill, so that nothing is lost when this is interrupted
            given.output.write_text(text)
        show("kills", len(kills), given.kills)
    shutil.rmtree(place)
    sys.stdout.write(text)


def report(kills: list[dict[str, Any]], attempts: int, given: argparse.Namespace) -> str:
    document = {
        "command": f"PYTHONPATH=. python benchmarks/training_kills.py --kills {len(kills)} --seed {given.seed}"
        f"{' --alone' if given.alone else ' --memory' if given.memory else ''}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "kills": len(kills),
        "resumedToTheSameBits": len(kills),  # a bit that differs ends this script
        **(
            {}
            if given.alone or given.memory
            else {"killedRankNamedByAllOthers": sum(each["namedByAll"] for each in kills)}
        ),
        "pointsNotReached": attempts - len(kills),
        "each": kills,
    }
    return json.dumps(document, indent=2) + "\n"


if __name__ == "__main__":
    main()
