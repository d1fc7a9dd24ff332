"""The start of `busbar`: modules imported before a command runs, lookup of commands, and an up-to-date reference."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from tests.cli.conftest import run_busbar

from busbar.cli import lazy, reference
from busbar.cli.errors import EXIT_CODES
from busbar.cli.main import OTHERS, OWN, busbar

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "kubernetes",
    "fastapi",
    "sqlalchemy",
    "aiohttp",
    "numpy",
    "pydantic",
    "httpx2",
    "rich",
    "yaml",
)


def commands() -> list[tuple[str, ...]]:
    """Every own command as the words that name it."""
    found: list[tuple[str, ...]] = []
    root = click.Context(busbar, info_name="busbar")
    for name in OWN:
        command = busbar.get_command(root, name)
        found.append((name,))
        if isinstance(command, click.Group):
            found += [(name, child) for child in command.list_commands(root)]
    return found


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from busbar.cli.main import run; run(['--help']); "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_of_every_own_command_imports_no_server_and_no_engine() -> None:
    lines = "".join(f"run([*{words!r}, '--help']); " for words in commands())
    code = f"import sys; from busbar.cli.main import run; {lines} print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_help_with_examples(words: tuple[str, ...]) -> None:
    done = run_busbar(*words, "--help")
    assert done.code == 0
    assert "Examples:" in done.out
    assert f"busbar {' '.join(words)}" in done.out


def test_the_line_in_the_list_of_commands_says_what_the_command_says() -> None:
    """The table saves an import at start; its text must equal the command's own help."""
    shown = run_busbar("--help").out
    for name, (_, line) in OWN.items():
        assert f"  {name} " in shown
        assert line in shown


def test_the_exit_codes_are_in_the_help() -> None:
    shown = run_busbar("--help").out
    for code, meaning in EXIT_CODES.items():
        assert f"{code}  {meaning}" in shown


def test_wrong_use_exits_with_two() -> None:
    assert run_busbar("no-such-command").code == 2
    assert run_busbar("list", "--no-such-option").code == 2
    assert run_busbar("apply").code == 2


def test_a_number_that_is_none_is_wrong_use() -> None:
    done = run_busbar("apply", "-f", "job.yaml", "--timeout", "nan")
    assert done.code == 2
    assert "nan is no finite number" in done.err


def test_a_full_disk_under_the_output_is_a_sentence() -> None:
    code = "import sys; from busbar.cli.main import run; sys.exit(run(['--help']))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")


def test_a_character_that_the_output_cannot_have_is_written_as_its_number() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "busbar.cli.main", "simulate", "--help"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        text=True,
        encoding="latin-1",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2026" in done.stdout


def test_commands_of_other_parts_are_listed_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "up": EntryPoint("up", "nowhere.at_all:up", lazy.GROUP),
        "x": EntryPoint("x", "no:x", lazy.GROUP),
    }
    monkeypatch.setattr(lazy, "_installed", lambda: entries)
    shown = run_busbar("--help")
    assert shown.code == 0
    assert OTHERS["up"] in shown.out
    assert "(from no)" in shown.out


def test_a_command_whose_packages_are_missing_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"train": EntryPoint("train", "nowhere.at_all:train", lazy.GROUP)}
    monkeypatch.setattr(lazy, "_installed", lambda: entries)
    done = run_busbar("train", "job.yaml")
    assert done.code == 1
    assert "pip install 'busbar[workloads]'" in done.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_calls_busbar(shell: str) -> None:
    done = run_busbar("completion", shell)
    assert done.code == 0
    assert f"_BUSBAR_COMPLETE={shell}_complete" in done.out


def test_the_reference_is_up_to_date() -> None:
    for path, text in reference.generate().items():
        assert (ROOT / path).read_text() == text, "run: python -m tools.generate cli"


def test_without_a_login_a_command_says_how_to_log_in(home: Path) -> None:
    done = run_busbar("list")
    assert done.code == 4
    assert "busbar login URL" in done.err
