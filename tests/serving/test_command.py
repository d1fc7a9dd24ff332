"""`busbar serve` and the pod's entry: help without torch, and errors that say what to do."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.free_port import free_port

from busbar.workloads.serving.__main__ import main
from busbar.workloads.serving.command import serve


def test_help_has_examples_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom busbar.workloads.serving.command import serve\n"
        "try:\n    serve(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'aiohttp', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Examples:" in done.stdout
    for flag in ("--port", "--host", "--kv-memory", "--max-model-len", "--max-running", "--model-id"):
        assert flag in done.stdout


@pytest.fixture(autouse=True)
def own_log_handlers() -> Iterator[None]:
    """The commands configure the process's logging; pytest's handlers are restored for the next test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["{nowhere}"], 1, "does not exist"),
        (["{empty}"], 1, "config.json is missing"),
        (["{empty}", "--kv-memory", "lots"], 2, "--kv-memory: 'lots' is not an amount"),
        (["{empty}", "--block-tokens", "48"], 2, "not a power of two"),
        (["{empty}", "--kv-dtype", "fp8"], 2, "'fp8' is not one of 'auto', 'int8', 'int4'"),
        (["{empty}", "--weights-dtype", "int2"], 2, "'int2' is not one of 'auto', 'int8', 'int4'"),
        (["{empty}", "--host", "192.0.2.1"], 2, "cannot listen on 192.0.2.1"),
        (["{empty}", "--port", "0"], 2, "--port"),
    ],
)
def test_errors_are_one_sentence_and_an_exit_code(
    tmp_path: Path, flags: list[str], status: int, message: str
) -> None:
    words = [f.format(nowhere=tmp_path / "nowhere", empty=tmp_path) for f in flags]
    given = [] if "--port" in words else ["--port", str(free_port())]
    result = CliRunner().invoke(serve, [*words, *given])
    assert result.exit_code == status
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_pod_with_a_bad_environment_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BUSBAR_SPEC", "{}")
    monkeypatch.delenv("BUSBAR_MODEL_DIR", raising=False)
    monkeypatch.setattr(sys, "argv", ["serving"])
    assert main() == 2
    assert "BUSBAR_MODEL_DIR is not set" in capsys.readouterr().err
