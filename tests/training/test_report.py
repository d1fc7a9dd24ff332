"""The output of a run: a limited number of lines, and a progress bar on a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from busbar.workloads.training.report import Bar, Lines


def test_steps_are_shown_every_few_seconds_and_the_last_one_always() -> None:
    now, out = [100.0], io.StringIO()
    lines = Lines("demo/small", out, clock=lambda: now[0])
    for step in range(1, 11):
        lines.step(step, 10, 2.5, 1000.0, 3.0)
        now[0] += 1.0
    shown = [line for line in out.getvalue().splitlines() if "event=step" in line]
    assert [line.split("step=")[1].split("/")[0] for line in shown] == ["1", "6", "10"]
    assert shown[0] == "job=demo/small event=step step=1/10 loss=2.5000 tokens_per_s=1000.0 eta_s=3"


def test_values_with_spaces_or_line_ends_stay_on_one_line() -> None:
    out = io.StringIO()
    Lines("j", out).note('two words\n"quoted"')
    assert out.getvalue() == 'job=j event=note message="two words\\n\\"quoted\\""\n'


def test_the_bar_shows_phase_step_loss_and_speed() -> None:
    out = io.StringIO()
    bar = Bar(Console(file=out, force_terminal=True, width=120))
    bar.phase("Training", "from step 0 of 10")
    bar.step(5, 10, 3.25, 1234.0, 9.0)
    bar.note("resumed from step 4")
    bar.phase("Done", "10 steps done")
    bar.close()
    text = out.getvalue()
    assert "resumed from step 4" in text
    assert "step 5/10  loss 3.250  1,234 tok/s" in text
    assert "10 steps done" in text


RUN = """
from busbar.workloads.training.report import Lines
lines = Lines("demo/small")
lines.note("one")
lines.note("two")
lines.close()
"""


def test_a_run_whose_log_nobody_reads_goes_on() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", RUN], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_whose_log_has_no_room_goes_on() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", RUN], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
