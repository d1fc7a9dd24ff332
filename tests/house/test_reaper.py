"""What a benchmark has started ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import subprocess, sys, time
from benchmarks.reaper import ends_with_us
server = "import subprocess, sys, time; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True, start_new_session=True)
with ends_with_us(process.pid):
    print(process.pid, process.stdout.readline().strip(), flush=True)
    if sys.argv[1] == "stay":
        time.sleep(600)
process.wait()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("end", [None, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_a_server_and_what_it_started_end_with_the_script(end: signal.Signals | None) -> None:
    command = [sys.executable, "-c", SCRIPT, "stay" if end else "go"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as script:
        assert script.stdout is not None
        pids = [int(word) for word in script.stdout.readline().split()]
        assert len(pids) == 2
        if end is not None:
            assert all(map(is_running, pids))
            os.kill(script.pid, end)
    until = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, pids))
