"""The set-up of a bare machine survives short network failures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools import bootstrap


def fails_until(tries: int, log: Path) -> list[str]:
    """A command that succeeds at the given attempt."""
    code = f"import sys; f = open({str(log)!r}, 'a+'); f.write('x'); sys.exit(f.tell() < {tries})"
    return [sys.executable, "-S", "-c", code]


def test_a_download_that_fails_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "PAUSE_S", 0.0)
    bootstrap.run("a download", fails_until(3, tmp_path / "log"), tries=bootstrap.DOWNLOAD_TRIES)
    assert (tmp_path / "log").read_text() == "xxx"


def test_what_needs_no_network_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(bootstrap.SetupError, match="exit code 1"):
        bootstrap.run("a step", fails_until(2, tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "x"
