"""Ending an instance while an `up` of it still runs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from busbar.local import build, teardown
from busbar.local.instance import Instance


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
