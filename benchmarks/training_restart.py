"""From a crash of the trainer to its next step: from the copy in memory, and by a new process from the disk.

    python benchmarks/training_restart.py --output benchmarks/results/training_restart.json

One model is trained twice in turns, for some steps each: with `checkpoint.memory`, where the supervisor starts another
trainer, and without, where this script starts `busbar train` again at once, as a pod that was never gone would. The
trainer is killed with SIGKILL behind a step, and its journal tells when the next step is done. Printed are the wall
seconds of both, medians, with their ratio; the seconds of one step, which are in both; and what the copies cost: CPU
seconds per step with them over those without.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.progress import Progress

BAR_S = 5.0  # and one step
STEPS_BEFORE, STEPS_AFTER = 8, 4


def job(every_steps: int | None, size: str) -> dict[str, Any]:
    """A TrainingJob; `every_steps` of the copies in memory, None: there are none."""
    hidden, inner, layers = {"small": (64, 112, 2), "33m": (512, 1536, 8)}[size]
    checkpoint: dict[str, Any] = {"everySteps": STEPS_BEFORE - 2}
    if every_steps is not None:
        checkpoint = {"everySteps": 100_000, "memory": {"everySteps": every_steps}}
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }
    return {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "restart"},
        "spec": {
            "engine": {
                "model": {"config": config},
                "tokenizer": {"train": {"vocabSize": 2048}},
                "data": {"uri": "pvc://text/text", "sequenceLength": 64},
                "steps": 100_000,
                "batch": {"sequences": 4, "microBatch": 2},
                "threads": 1,
            },
            "output": {"uri": "pvc://out/model"},
            "checkpoint": checkpoint,
        },
    }


class Training:
    """`busbar train` on a folder; its journal tells what is done."""

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        self.folder = folder
        (folder / "job.yaml").write_text(yaml.safe_dump(document))
        self.journal = folder / "claims/out/model/checkpoints/journal.jsonl"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "busbar.cli.main", "train", "job.yaml", "--plain"]
        log = (self.folder / "log.txt").open("a")
        return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    @property
    def lines(self) -> int:
        """Finished steps, repeated ones too."""
        return self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0

    def wait(self, lines: int) -> float:
        """Seconds until the journal has so many lines."""
        started = time.monotonic()
        while self.lines < lines:
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended: {(self.folder / 'log.txt').read_text()[-2000:]}")
            time.sleep(0.005)
        return time.monotonic() - started

    def trainer(self) -> int:
        """The process that trains: a child of the supervisor, or the process itself."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else self.process.pid

    def cpu_s(self) -> float:
        """CPU seconds of the trainer so far."""
        fields = Path(f"/proc/{self.trainer()}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def steps(self, count: int) -> tuple[float, float]:
        """Wall and CPU seconds per step of the next ones."""
        begun = self.lines
        used, wall = self.cpu_s(), self.wait(begun + count)
        return wall / count, (self.cpu_s() - used) / count

    def crash(self, *, supervised: bool) -> float:
        """Seconds from SIGKILL to the next finished step."""
        before = self.lines
        os.kill(self.trainer(), signal.SIGKILL)
        started = time.monotonic()
        if not supervised:
            self.process.wait()
            self.process = self.start()
        before = max(before, self.lines)
        self.wait(before + 1)
        return time.monotonic() - started

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(rounds: int, size: str, folder: Path) -> dict[str, Any]:
    """All figures of `rounds` crashes of each way, in turns."""
    ways: dict[str, int | None] = {"memory": 2, "disk": None}
    found: dict[str, dict[str, list[float]]] = {
        way: {"restart": [], "step": [], "stepCpu": []} for way in ways
    }
    with Progress() as bar:
        task = bar.add_task("crashes", total=rounds * len(ways))
        for number, (way, every) in product(range(rounds), ways.items()):
            place = folder / f"{way}-{number}"
            _write_corpus(place / "claims/text/text")
            training = Training(place, job(every, size))
            try:
                training.wait(STEPS_BEFORE)
                wall, cpu = training.steps(STEPS_AFTER)
                found[way]["step"].append(wall)
                found[way]["stepCpu"].append(cpu)
                found[way]["restart"].append(training.crash(supervised=every is not None))
            finally:
                training.end()
            bar.advance(task)
    return {way: {name: statistics.median(each) for name, each in of.items()} for way, of in found.items()}


def _write_corpus(folder: Path) -> None:
    folder.mkdir(parents=True)
    for index, source in enumerate(sorted(Path(json.__file__).parent.glob("*.py"))):
        (folder / f"{index}.txt").write_bytes(source.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="crashes of each way")
    parser.add_argument("--size", choices=["small", "33m"], default="33m")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ways = measure(given.rounds, given.size, Path(folder))
    memory, disk = ways["memory"], ways["disk"]
    result = {
        "command": " ".join(["python", "benchmarks/training_restart.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": ways,
        "restartRatio": disk["restart"] / memory["restart"],
        "cpuPerStepRatio": memory["stepCpu"] / disk["stepCpu"],
        "barSeconds": BAR_S + memory["step"],
    }
    print(json.dumps(result, indent=2))
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
