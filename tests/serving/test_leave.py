"""A serving process that gets SIGTERM while its engine's thread is in torch exits with its own exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOADS_FOR_EVER = """
import asyncio, os, signal, sys, threading
from pathlib import Path
import torch
from busbar.workloads.serving import process
from busbar.workloads.serving.settings import EngineSettings, ServerSettings

def load(*_):
    torch.set_num_threads(1)
    weights = torch.ones(50, 50)
    loading.set()
    while True:
        weights = (weights @ weights).tanh()

def tell():
    loading.wait()
    os.kill(os.getpid(), signal.SIGTERM)

process.load, loading = load, threading.Event()
threading.Thread(target=tell).start()
settings = ServerSettings(EngineSettings(Path("nowhere")), "model", port=0, drain_s=float(sys.argv[1]))
print("kept though not flushed")
process.leave(asyncio.run(process.run(settings)))
"""


@pytest.mark.parametrize("drain_s", ["30", "0"])
def test_sigterm_while_a_model_loads_ends_the_process_at_once_and_well(drain_s: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADS_FOR_EVER, drain_s],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "kept though not flushed\n", "")
