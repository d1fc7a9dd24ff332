"""Ending an instance while an `up` of it still runs, and a deletion that is interrupted."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from busbar.local import build, supervisor, teardown
from busbar.local.errors import StartError
from busbar.local.instance import Instance, load, names


def test_down_waits_for_an_up_that_is_still_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    instance = Instance("try", 64, 30080, 30081)
    instance.save()
    happened: list[str] = []
    waiting = threading.Event()

    def said(text: str) -> None:
        if text.startswith("waiting for another `busbar up`"):
            waiting.set()

    def sweep(instance: Instance) -> list[str]:
        return []

    monkeypatch.setattr(build, "say", said)
    monkeypatch.setattr(teardown, "stop", lambda instance: happened.append("stopped"))
    monkeypatch.setattr(teardown, "sweep", sweep)
    down = threading.Thread(target=teardown.down, args=("try",), kwargs={"purge": True})
    with build.locked(instance.folder / ".lock", "a test"):
        down.start()
        assert waiting.wait(20)
        happened.append("up ended")
    down.join(20)
    assert happened == ["up ended", "stopped"]
    assert not instance.folder.exists()


def test_a_start_after_a_deletion_that_was_interrupted_meets_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    instance = Instance("try", 64, 30080, 30081)
    instance.save()
    (instance.folder / "volumes").mkdir()

    def interrupted(path: Path) -> None:
        (path / "volumes").rmdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            teardown.delete_data(instance)
    assert load("try") is None
    assert names() == []
    assert not instance.folder.exists()
    teardown.down("try", purge=True)
    assert list((tmp_path / "busbar").iterdir()) == []


def test_a_supervisor_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "running.json").mkdir()  # cannot be replaced by a file
    with pytest.raises(StartError, match=r"ended with 1; see .*supervisor\.log"):
        supervisor.launch(tmp_path)
    assert "Error" in (tmp_path / "logs" / "supervisor.log").read_text()
