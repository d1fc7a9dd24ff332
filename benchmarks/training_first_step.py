"""From the start of a run on much text to its first step, and its memory while the text is tokenized beside the steps.

    python benchmarks/training_first_step.py --gib 10 --output benchmarks/results/training_first_step.json

The corpus is the source text of Python's library, again and again in files of 1 GiB, which are names of one file on disk, so what
reads it reads from the page cache. The run has as many steps as the text has tokens for, and is stopped after some seconds.
Printed are the seconds, and CPU seconds, from the start of the process to the end of its first step; tokens made per second, and from these how long
all of them would have taken before the first step; and the process's own memory (RssAnon) at the first step, and the most of
it later.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result import circumstances, publish
from benchmarks.training_restart import Training

BAR_S = 30.0
GIB = 2**30
SEQUENCES, LENGTH = 32, 256
TOKENS_OF_A_BYTE = 0.25  # of this text, at least, with this vocabulary


def write_corpus(folder: Path, files: int) -> None:
    folder.mkdir(parents=True)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in library)
    with (folder / "part-0.txt").open("wb") as file:
        for _ in range(GIB // len(text)):
            file.write(text)
    for number in range(1, files):
        os.link(folder / "part-0.txt", folder / f"part-{number}.txt")


def job(gib: int) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    }
    return {
        "apiVersion": "busbar.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "first-step"},
        "spec": {
            "engine": {
                "model": {"config": config},
                "tokenizer": {"train": {"vocabSize": 4096}},
                "data": {"uri": "pvc://text/text", "sequenceLength": LENGTH},
                "steps": int(gib * GIB * TOKENS_OF_A_BYTE / SEQUENCES / LENGTH),
                "batch": {"sequences": SEQUENCES, "microBatch": 8},
                "threads": 1,
            },
            "output": {"uri": "pvc://out/model"},
            "checkpoint": {"everySteps": 100_000},
        },
    }


def own_bytes(pid: int) -> int:
    """Of a process's memory, without files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def measure(folder: Path, gib: int, seconds: float) -> dict[str, Any]:
    started = time.monotonic()
    run = Training(folder, job(gib), 1)
    try:
        run.wait(1)
        first_s, cpu_s, pid = time.monotonic() - started, run.cpu_s(), run.process.pid
        tokens = run.journal.parent / "prepared/tokens.bin"
        before, since, found = tokens.stat().st_size, time.monotonic(), [own_bytes(pid)]
        while time.monotonic() - since < seconds:
            time.sleep(0.5)
            found.append(own_bytes(pid))
        rate = (tokens.stat().st_size - before) / 4 / (time.monotonic() - since)
        steps = run.lines
    finally:
        run.end()
    text = tokens.stat().st_size / 4
    return {
        "corpusGib": gib,
        "firstStepSeconds": round(first_s, 2),
        "firstStepCpuSeconds": round(cpu_s, 2),
        "met": first_s < BAR_S,
        "stepsMeanwhile": steps,
        "tokensPerSecond": round(rate),
        "secondsForAllTokens": round(gib * GIB * TOKENS_OF_A_BYTE / rate),
        "tokensMade": round(text),
        "ownMemoryMib": {"firstStep": found[0] >> 20, "most": max(found) >> 20, "last": found[-1] >> 20},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60, help="that the run goes on after its first step")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "claims/text/text", asked.gib)
        found = measure(Path(folder), asked.gib, asked.seconds)
    publish({**circumstances(), **found}, asked.output)


if __name__ == "__main__":
    main()
