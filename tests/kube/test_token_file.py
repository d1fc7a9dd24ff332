"""Tokens in files: read when they change, kept while their file is away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from busbar.kube.token_file import CHECK_S, TokenFile


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_new_token_is_used_at_the_next_look_at_its_file(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "token"
    path.write_text("one\n")
    token = TokenFile(path, clock)
    assert token.header() == {"Authorization": "Bearer one"}
    path.write_text("two")
    assert token.read() == "one"
    clock.now = CHECK_S
    assert token.read() == "two"


def test_a_file_that_did_not_change_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, path = Clock(), tmp_path / "token"
    path.write_text("one")
    token = TokenFile(path, clock)
    token.read()
    clock.now = CHECK_S
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("read again"))
    assert token.read() == "one"


def test_a_link_that_is_swapped_brings_the_new_token_though_times_and_sizes_agree(tmp_path: Path) -> None:
    """This is how the kubelet renews what it projects."""
    clock, path = Clock(), tmp_path / "token"
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1, 1))
    path.symlink_to("one")
    token = TokenFile(path, clock)
    assert token.read() == "one"
    path.unlink()
    path.symlink_to("two")
    clock.now = CHECK_S
    assert token.read() == "two"


def test_the_last_token_stays_while_the_file_is_away_and_a_file_that_never_was_is_an_error(
    tmp_path: Path,
) -> None:
    clock, path = Clock(), tmp_path / "token"
    with pytest.raises(OSError, match="token"):
        TokenFile(path, clock).read()
    path.write_text("one")
    token = TokenFile(path, clock)
    token.read()
    path.unlink()
    clock.now = CHECK_S
    assert token.read() == "one"
    path.write_text("three")
    clock.now = 2 * CHECK_S
    assert token.read() == "three"
