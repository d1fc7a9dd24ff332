"""From a crash of the trainer to its next step: from the copies in memory, and by new processes from the disk.

    python benchmarks/training_restart.py --output benchmarks/results/training_restart.json

One model is trained twice in turns, for some steps each: with `checkpoint.memory`, where the supervisor starts another
trainer, and without, where this script starts `busbar train` again at once, as a pod that was never gone would. The
trainer is killed with SIGKILL behind a step, and its journal tells when the next step is done. Printed are the wall
seconds of both, medians, with their ratio; the seconds of one step, which are in both; and what the copies cost: CPU
seconds per step with them over those without.

The same is done with a gang of two, started as their pods would be: the trainer of rank 1 is killed, or all processes of its
pod, which is replaced at once; and without copies both pods are started again, as the operator would do it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gang_here import free_port
from benchmarks.result import circumstances, publish

from busbar.kube.contracts.workload import Env

BAR_S = 5.0  # and one step
STEPS_BEFORE, STEPS_AFTER = 8, 4
TRAINER, POD, ALL = "trainer", "pod", "all"
WAYS: dict[
    str, tuple[int, int | None, str]
] = {  # ranks; steps from copy to copy, None: there are none; what is lost
    "memory": (1, 2, TRAINER),
    "disk": (1, None, ALL),
    "gangTrainer": (2, 2, TRAINER),
    "gangPod": (2, 2, POD),
    "gangDisk": (2, None, ALL),
}


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
    """A run on a folder, of one process (`busbar train`) or as pods of a gang; its journal tells what is done."""

    def __init__(self, folder: Path, document: dict[str, Any], ranks: int) -> None:
        self.folder, self._spec, self._ranks = folder, document["spec"], ranks
        (folder / "job.yaml").write_text(yaml.safe_dump(document))
        (folder / "command").write_text(uuid4().hex)
        (folder / "read").write_text(uuid4().hex)
        self.journal = folder / "claims/out/model/checkpoints/journal.jsonl"
        self._ports = [free_port() for _ in range(ranks + 1)]
        self._processes = [self._start(rank) for rank in range(ranks)]

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Of the last rank, which is killed."""
        return self._processes[-1]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "busbar.cli.main", "train", "job.yaml", "--plain"]
        environment = dict(os.environ)
        if self._ranks > 1:
            command = [sys.executable, "-m", "busbar.workloads.training"]
            environment |= self._pod(rank)
        log = (self.folder / "log.txt").open("a")
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)

    def _pod(self, rank: int) -> dict[str, str]:
        """The variables that the operator sets."""
        claims = self.folder / "claims"
        return {
            Env.SPEC: json.dumps(self._spec["engine"]),
            Env.CHECKPOINT: json.dumps(self._spec["checkpoint"]),
            Env.OUTPUT_DIR: str(claims / "out/model"),
            Env.CHECKPOINT_DIR: str(claims / "out/model/checkpoints"),
            Env.DATA_DIR: str(claims / "text/text"),
            Env.BEARERS_DIR: str(self.folder),
            Env.PORT: str(self._ports[rank]),
            Env.JOB_NAME: "restart",
            Env.NAMESPACE: "here",
            Env.JOB_UID: "restart",
            Env.ATTEMPT: "1",
            Env.RANK: str(rank),
            Env.WORLD_SIZE: str(self._ranks),
            Env.MASTER_ADDR: "127.0.0.1",
            Env.MASTER_PORT: str(self._ports[-1]),
        }

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

    def crash(self, what: str) -> float:
        """Seconds from SIGKILL to the next finished step.

        Args:
            what: is lost: a trainer, a pod, or all of them.
        """
        before = self.lines
        trainer = self.trainer()
        if what != TRAINER:
            self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(trainer, signal.SIGKILL)
        started = time.monotonic()
        first = {TRAINER: self._ranks, POD: self._ranks - 1, ALL: 0}[what]
        for rank in range(first, self._ranks):
            self._processes[rank].wait()
        for rank in range(first, self._ranks):
            self._processes[rank] = self._start(rank)
        self.wait(max(before, self.lines) + 1)
        return time.monotonic() - started

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def measure(rounds: int, size: str, folder: Path) -> dict[str, Any]:
    """All figures of `rounds` crashes of each way, in turns."""
    found: dict[str, dict[str, list[float]]] = {
        way: {"restart": [], "step": [], "stepCpu": []} for way in WAYS
    }
    with Progress() as bar:
        task = bar.add_task("crashes", total=rounds * len(WAYS))
        for number, (way, (ranks, every, what)) in product(range(rounds), WAYS.items()):
            place = folder / f"{way}-{number}"
            _write_corpus(place / "claims/text/text")
            training = Training(place, job(every, size), ranks)
            try:
                training.wait(STEPS_BEFORE)
                wall, cpu = training.steps(STEPS_AFTER)
                found[way]["step"].append(wall)
                found[way]["stepCpu"].append(cpu)
                found[way]["restart"].append(training.crash(what))
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
    memory, disk, gang = ways["memory"], ways["disk"], ways["gangTrainer"]
    result = {
        **circumstances(),
        "seconds": ways,
        "restartRatio": disk["restart"] / memory["restart"],
        "cpuPerStepRatio": memory["stepCpu"] / disk["stepCpu"],
        "barSeconds": BAR_S + memory["step"],
        "gangRestartRatio": ways["gangDisk"]["restart"] / gang["restart"],
        "gangCpuPerStepRatio": gang["stepCpu"] / ways["gangDisk"]["stepCpu"],
        "gangBarSeconds": BAR_S + gang["step"],
    }
    publish(result, given.output)


if __name__ == "__main__":
    main()
