"""A month of Philly's jobs on 80 nodes of eight, through `busbar simulate` with the planner itself.

October 2017 is the trace's busiest month: 47,192 jobs, 0.95 of what 640 GPUs can do. The command runs as people run it, in a
process of its own, which may take ten minutes of one core; the processor time of that process is what is judged. Plans are
made once a minute: what happens in between shares one, as events between two rounds of a cluster do. A second row replays
the first jobs twice with different hash seeds: all that is not a time must be the same.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

JOBS = Path("philly") / "philly_jobs.csv"
MONTH = (datetime(2017, 10, 1), datetime(2017, 11, 1))
CLUSTER = "gpu=80x8"
EVERY_S = 60
MOST_CPU_S = 600.0
REPEATED = 1500
"""Jobs of the row that is replayed twice."""
TIMES = {"decision_ms_p50", "decision_ms_p99", "peak_memory_mib"}

Row = dict[str, Any]


def rows(data: Path) -> list[Row]:
    """The month with known lengths, and the proof that it repeats."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "philly_2017_10.csv"
        count = write_month(data / JOBS, trace)
        found, cpu_s = replay(trace, Path(folder) / "month")
        first, _ = replay(trace, Path(folder) / "first", "--limit", str(REPEATED), seed="1")
        second, _ = replay(trace, Path(folder) / "second", "--limit", str(REPEATED), seed="2")
    row = {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}
    row |= {"trace": "October 2017", "trace_jobs": count, "every_s": EVERY_S, "cpu_s": round(cpu_s, 1)}
    same = {k: v for k, v in first.items() if k not in TIMES} == {
        k: v for k, v in second.items() if k not in TIMES
    }
    return [
        row | {"bars": {"cpu_s": {"at_most": MOST_CPU_S, "met": cpu_s <= MOST_CPU_S}}},
        {
            "name": "repeated",
            "jobs": REPEATED,
            "differing": int(not same),
            "bars": {"differing": {"at_most": 0, "met": same}},
        },
    ]


def write_month(jobs: Path, to: Path) -> int:
    """The month's rows of the trace as a file of its own; returns how many."""
    with jobs.open() as file:
        head, *lines = filter(None, file.read().splitlines())
    kept = [line for line in lines if MONTH[0] <= datetime.fromisoformat(line.split(",", 1)[0]) < MONTH[1]]
    to.write_text("\n".join([head, *kept]) + "\n")
    return len(kept)


def replay(trace: Path, output: Path, *more: str, seed: str = "0") -> tuple[Row, float]:
    """What `busbar simulate` writes, and the processor time that it took; its progress bar goes to our standard error."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [
            sys.executable, "-c", "from busbar.cli.main import main; main()", "simulate", str(trace), "--format", "philly", "--cluster", CLUSTER,
            "--every", str(EVERY_S), "--output", str(output), *more,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (found,) = json.loads((output / "result.json").read_text())["results"]
    return found, spent
