"""Ends from outside: Ctrl-C, SIGTERM, and a pipe that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import click
import pytest

from busbar.cli import main

WAITS = """
import signal
import time
import click
from busbar.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have it ignored by what they run in the background

@click.command()
def wait():
    try:
        click.echo("waits")
        {work}
    finally:
        click.echo("cleaned up")

main.busbar.get_command = lambda context, name: wait
main.main()
"""
IN_A_LOOP = "import asyncio; asyncio.run(asyncio.sleep(60))"


@pytest.mark.parametrize("work", ["time.sleep(60)", IN_A_LOOP], ids=["a call", "an event loop"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_one_sentence_after_it_has_cleaned_up(
    number: signal.Signals, code: int, work: str
) -> None:
    program = [sys.executable, "-c", WAITS.format(work=work), "wait"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.strip()) == (code, "cleaned up\n", "stopped")


def test_sigterm_is_ignored_where_the_caller_wants_it() -> None:
    ignoring = WAITS.format(work="import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    program = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN){ignoring}"
    done = subprocess.run([sys.executable, "-c", program, "wait"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "waits\ncleaned up\n")


@pytest.mark.parametrize("words", [["--help"], ["list", "--help"], ["completion", "bash"]], ids=" ".join)
def test_what_nobody_reads_ends_quietly(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-m", "busbar.cli.main", *words]
    done = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_that_nobody_reads_ends_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-m", "busbar.cli.main", "no-such-command"]
    done = subprocess.run(program, stdout=writing, stderr=writing)
    os.close(writing)
    assert done.returncode == 141


def test_a_table_that_nobody_reads_ends_the_command_as_other_output_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rich.console import Console

    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)

        @click.command()
        def table() -> None:
            Console(file=out).print("a table")

        monkeypatch.setattr(main.busbar, "get_command", lambda context, name: table)
        assert main.run(["table"]) == 141


def test_a_command_with_an_exit_code_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        main.busbar, "get_command", lambda context, name: click.command()(lambda: sys.exit(6))
    )
    assert main.run(["own"]) == 6


def test_a_standard_input_that_is_closed_is_empty() -> None:
    program = f"{sys.executable} -m busbar.cli.main apply -f - <&-"
    done = subprocess.run(program, shell=True, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: ")
